#include "convert/family/forward_shape.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/family/family.h"
#include "convert/family/family_read.h"
#include "convert/model/config_fields.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define SHOWN        80
#define DEFAULT_FROM 28u /* max_window_layers of Qwen */
#define MAX_CONTEXT  (UINT64_C(1) << 40)

static const qc_family_fields llama_fields = {.layers = "num_hidden_layers",
                                              .hidden = "hidden_size",
                                              .intermediate = "intermediate_size",
                                              .heads = "num_attention_heads",
                                              .kv_heads = "num_key_value_heads",
                                              .head_dim = "head_dim",
                                              .context = "max_position_embeddings",
                                              .norm_eps = "rms_norm_eps",
                                              .gate = "hidden_act"};

static const qc_outer_names llama_outer = {
    .layers = "layers.", .embedding = "embed_tokens", .norm = "norm", .head = "lm_head"};

static const qc_family_fields *fields_of(const qc_family_reader *r)
{
    return r->family->fields ? r->family->fields : &llama_fields;
}

static qc_status find_family(qc_family_reader *r, qc_error *err)
{
    const char *type = qc_json_string_or(qc_json_get(r->top, "model_type"), NULL);
    char known[QC_FAMILY_LIST_BYTES];
    if (!type)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: expected a model_type that is computed (%s), found none",
                qc_family_list(known));
    r->family = r->out->family = qc_family_of(type);
    if (!r->family)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: models of model_type '%.*s' are not computed, %s are", SHOWN, type,
                qc_family_list(known));
    r->out->config.model_type = r->family->model_type;
    r->out->names = r->family->names;
    r->out->outer = r->family->outer ? r->family->outer : &llama_outer;
    r->theta = r->family->theta > 0.0 ? r->family->theta : 10000.0;
    r->rotary_part = r->family->rotary_part > 0.0 ? r->family->rotary_part : 1.0;
    if (r->family->traits & QC_FAMILY_TEXT_CONFIG)
        r->root = qc_config_field(r->top, "text_config");
    if (!r->root || qc_json_kind_of(r->root) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: this %s has no text_config", type);
    const qc_json_node *list = qc_config_field(r->top, "architectures");
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY || !qc_json_first(list))
        return QC_OK;
    const char *named = qc_json_string_or(qc_json_first(list), "");
    const char *other = r->family->other_architecture;
    const int encoder = (r->family->traits & QC_FAMILY_ENCODER) != 0;
    if (strcmp(named, r->family->architecture) == 0 || (other && strcmp(named, other) == 0) ||
        (encoder && strncmp(named, r->family->architecture, strlen(r->family->architecture)) == 0))
        return QC_OK;
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "config.json: the architecture of this %s is '%.*s'; expected %s%s", type, SHOWN, named,
            r->family->architecture, encoder ? "Model" : "");
}

/* ---- sizes ---- */

static int has(const qc_family_reader *r, unsigned trait)
{
    return (r->family->traits & trait) != 0;
}

/* Reads an id, the first of a list of ids, or none. */
static qc_status token(const qc_family_reader *r, const char *name, int64_t missing, int64_t *out,
                       qc_error *err)
{
    const qc_json_node *n = qc_json_get(r->root, name);
    n = n ? n : qc_json_get(r->top, name);
    uint64_t id = 0;
    *out = n ? -1 : missing;
    if (n && qc_json_kind_of(n) == QC_JSON_ARRAY)
        n = qc_json_first(n);
    if (!n || qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    char what[SHOWN + 32];
    (void)snprintf(what, sizeof what, "config.json: %s", name);
    /* Some configurations write -1 for none. */
    double v = 0.0;
    QC_TRY(qc_json_as_double(n, what, &v, err));
    if (v < 0.0)
        return QC_OK;
    QC_TRY(qc_json_as_u64(n, what, &id, err));
    *out = (int64_t)id;
    return QC_OK;
}

static qc_status read_heads(qc_family_reader *r, qc_error *err)
{
    qc_forward_config *c = &r->out->config;
    const qc_family *f = r->family;
    const qc_family_fields *fields = fields_of(r);
    QC_TRY(qc_read_count(r->root, fields->heads, f->heads, &c->heads, err));
    c->kv_heads = c->heads;
    c->head_dim = f->head_dim ? f->head_dim : c->hidden / c->heads;
    /* If it is missing, the family's own value counts; if it is null, there are as many as
     * heads. */
    if (fields->kv_heads) {
        const qc_json_node *kv = qc_json_get(r->root, fields->kv_heads);
        uint64_t no_kv = kv || f->kv_heads == 0 ? c->heads : f->kv_heads;
        QC_TRY(qc_read_count(r->root, fields->kv_heads, no_kv, &c->kv_heads, err));
    }
    if (fields->head_dim)
        QC_TRY(qc_read_count(r->root, fields->head_dim, c->head_dim, &c->head_dim, err));
    else if (c->hidden % c->heads != 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s %" PRIu64 " is no multiple of %s %" PRIu64,
                fields->hidden, c->hidden, fields->heads, c->heads);
    if (c->heads % c->kv_heads != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: num_attention_heads %" PRIu64
                " is no multiple of num_key_value_heads %" PRIu64,
                c->heads, c->kv_heads);
    r->out->turned = r->out->value_dim = c->head_dim;
    return QC_OK;
}

static qc_status read_sizes(qc_family_reader *r, qc_error *err)
{
    qc_forward_config *c = &r->out->config;
    const qc_family *f = r->family;
    const qc_family_fields *fields = fields_of(r);
    QC_TRY(qc_config_count(&c->layers, qc_config_field(r->root, fields->layers),
                           QC_CONFIG_MAX_LAYERS, 0, err));
    if (c->layers == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is missing", fields->layers);
    QC_TRY(qc_read_count(r->root, fields->hidden, 0, &c->hidden, err));
    QC_TRY(
        qc_read_count(r->root, fields->intermediate, f->wider * c->hidden, &c->intermediate, err));
    QC_TRY(qc_read_count(r->root, "vocab_size", f->vocabulary, &c->vocabulary, err));
    c->ids = c->vocabulary;
    QC_TRY(read_heads(r, err));
    QC_TRY(qc_config_count(&c->context, qc_config_field(r->root, fields->context), MAX_CONTEXT, 0,
                           err));
    if (c->context == 0 && has(r, QC_FAMILY_LEARNED_POSITIONS))
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is missing", fields->context);
    c->norm_eps = f->norm_eps > 0.0 ? f->norm_eps : 1e-6;
    if (fields->norm_eps)
        QC_TRY(qc_read_positive(r->root, fields->norm_eps, c->norm_eps, &c->norm_eps, err));
    c->encoder = has(r, QC_FAMILY_ENCODER);
    QC_TRY(token(r, "bos_token_id", f->bos, &c->bos, err));
    return token(r, "eos_token_id", f->eos, &c->eos, err);
}

/* ---- flags ---- */

/* An activation without a gate, by any of its names in transformers. */
static qc_status read_activation(const qc_family_reader *r, qc_error *err)
{
    static const struct {
        const char *name;
        qc_layer_gate gate;
    } known[] = {{"gelu", QC_LAYER_GELU},           {"gelu_python", QC_LAYER_GELU},
                 {"gelu_new", QC_LAYER_GELU_TANH},  {"gelu_pytorch_tanh", QC_LAYER_GELU_TANH},
                 {"gelu_fast", QC_LAYER_GELU_TANH}, {"relu", QC_LAYER_RELU}};
    const char *field = fields_of(r)->gate;
    const char *act = qc_json_string_or(qc_config_field(r->root, field), NULL);
    for (size_t i = 0; act && i < sizeof known / sizeof *known; i++)
        if (strcmp(act, known[i].name) == 0) {
            r->out->gate = known[i].gate;
            return QC_OK;
        }
    if (qc_config_field(r->root, field))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: %s is '%.*s', and only gelu, gelu_new, gelu_pytorch_tanh, gelu_fast "
                "and relu are computed",
                field, SHOWN, act ? act : "no name");
    return QC_OK;
}

static qc_status read_gate(const qc_family_reader *r, qc_error *err)
{
    r->out->gate = r->family->gate;
    if (has(r, QC_FAMILY_UNGATED))
        return read_activation(r, err);
    const int gelu = r->family->gate == QC_LAYER_GELU_TANH;
    const char *field = gelu ? "hidden_activation" : "hidden_act";
    const char *want = gelu ? "gelu_pytorch_tanh" : "silu";
    const char *act = qc_json_string_or(qc_config_field(r->root, field), want);
    if (strcmp(act, want) != 0 && (gelu || strcmp(act, "swish") != 0))
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "config.json: %s is '%.*s', and only %s is computed",
                field, SHOWN, act, want);
    return QC_OK;
}

static qc_status read_flags(qc_family_reader *r, qc_error *err)
{
    qc_forward_shape *s = r->out;
    int attention = 0, mlp = 0;
    QC_TRY(
        qc_read_flag(r->root, "tie_word_embeddings", has(r, QC_FAMILY_TIED), &s->config.tied, err));
    QC_TRY(qc_read_flag(r->root, "attention_bias", has(r, QC_FAMILY_BIASED), &attention, err));
    QC_TRY(qc_read_flag(r->root, "mlp_bias", 0, &mlp, err));
    attention = attention && has(r, QC_FAMILY_READS_ATTENTION_BIAS);
    s->qkv_bias = attention || has(r, QC_FAMILY_QKV_BIAS);
    s->out_bias = s->qkv_bias && has(r, QC_FAMILY_OUT_BIAS);
    s->mlp_bias = (mlp && has(r, QC_FAMILY_READS_MLP_BIAS)) || has(r, QC_FAMILY_MLP_BIAS);
    return read_gate(r, err);
}

/* ---- sliding windows ---- */

static qc_status read_layer_types(qc_family_reader *r, const qc_json_node *types, uint64_t window,
                                  qc_error *err)
{
    uint64_t layers = r->out->config.layers, i = 0;
    if (qc_json_kind_of(types) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: layer_types is %s, expected a list",
                qc_json_kind_name(qc_json_kind_of(types)));
    for (const qc_json_node *n = qc_json_first(types); n; n = qc_json_next(n), i++) {
        const char *kind = NULL;
        QC_TRY(qc_json_as_string(n, "config.json: an entry of layer_types", &kind, err));
        int slides = strcmp(kind, "sliding_attention") == 0;
        if (!slides && strcmp(kind, "full_attention") != 0)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "config.json: layer_types has '%.*s', and only full_attention and "
                    "sliding_attention are computed",
                    SHOWN, kind);
        if (slides && window == 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: layer_types has sliding_attention, but there is no window in "
                    "use (sliding_window, use_sliding_window)");
        if (i < layers)
            r->out->windows[i] = slides ? window : 0;
    }
    if (i != layers)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: layer_types has %" PRIu64 " entries, and there are %" PRIu64
                " layers",
                i, layers);
    return QC_OK;
}

static qc_status read_window(const qc_family_reader *r, uint64_t *window, qc_error *err)
{
    const qc_json_node *n = qc_json_get(r->root, "sliding_window");
    *window = n ? 0 : r->family->window;
    if (!n || qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    QC_TRY(qc_config_count(window, n, MAX_CONTEXT, 0, err));
    if (*window == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: sliding_window is 0");
    return QC_OK;
}

static qc_status read_windows(qc_family_reader *r, qc_error *err)
{
    const qc_family_slides slides = r->family->slides;
    const int if_asked = slides == QC_SLIDES_FROM || slides == QC_SLIDES_UNTURNED;
    const qc_json_node *types = qc_config_field(r->root, "layer_types");
    uint64_t layers = r->out->config.layers, window = 0, from = 0, pattern = r->family->pattern;
    int asked = 0;
    QC_TRY(
        qc_arena_alloc(r->arena, &r->out->windows, (size_t)layers, sizeof *r->out->windows, err));
    QC_TRY(qc_read_flag(r->root, "use_sliding_window", 0, &asked, err));
    if (slides == QC_SLIDES_NEVER || (if_asked && !asked && !types))
        return QC_OK;
    QC_TRY(read_window(r, &window, err));
    if (if_asked && !asked)
        window = 0;
    if (types && slides != QC_SLIDES_ALWAYS)
        return read_layer_types(r, types, window, err);
    if (slides == QC_SLIDES_FROM)
        QC_TRY(qc_config_count(&from, qc_config_field(r->root, "max_window_layers"),
                               QC_CONFIG_MAX_SIZE, DEFAULT_FROM, err));
    if (has(r, QC_FAMILY_READS_PATTERN))
        QC_TRY(qc_read_count(r->root, "sliding_window_pattern", pattern, &pattern, err));
    for (uint64_t i = from; i < layers; i++)
        if ((slides != QC_SLIDES_PATTERN || (i + 1) % pattern != 0) &&
            (slides != QC_SLIDES_UNTURNED || r->out->turns[i] == QC_LAYER_UNTURNED))
            r->out->windows[i] = window;
    return QC_OK;
}

/* ---- rotary positions ---- */

/* How many of a head are turned. */
static qc_status read_turned(const qc_family_reader *r, qc_error *err)
{
    qc_forward_shape *s = r->out;
    double part = 0.0;
    QC_TRY(qc_read_positive(r->root, "partial_rotary_factor", r->rotary_part, &part, err));
    const qc_json_node *object = qc_rope_object(r->root);
    if (object && qc_json_kind_of(object) == QC_JSON_OBJECT)
        QC_TRY(qc_read_positive(object, "partial_rotary_factor", part, &part, err));
    if (part > 1.0 || (part < 1.0 && !has(r, QC_FAMILY_READS_PART)))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: partial_rotary_factor is %g, and a %s is computed with %s", part,
                r->family->model_type,
                has(r, QC_FAMILY_READS_PART) ? "at most 1" : "1 only, that is, with whole heads");
    if (part < 1.0)
        s->turned = (uint64_t)((double)s->turned * part);
    if (s->turned == 0 || s->turned % 2 != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: rotary positions turn %" PRIu64 " of the %" PRIu64
                " elements of a head (head_dim), and they need an even number",
                s->turned, s->config.head_dim);
    return QC_OK;
}

static qc_status read_rope(qc_family_reader *r, qc_error *err)
{
    qc_forward_shape *s = r->out;
    const qc_json_node *object = qc_rope_object(r->root);
    qc_rope_source from = {.root = r->root,
                           .theta = r->theta,
                           .context = s->config.context,
                           .su_is_longrope = has(r, QC_FAMILY_SU_IS_LONGROPE)};
    if (has(r, QC_FAMILY_LEARNED_POSITIONS)) {
        s->turned = 0;
        s->rope = (qc_rope){.factor = 1.0, .magnitude = 1.0, .score = 1.0};
        memset(s->turns, QC_LAYER_UNTURNED, (size_t)s->config.layers);
        return QC_OK;
    }
    QC_TRY(read_turned(r, err));
    from.dims = s->turned;
    if (!has(r, QC_FAMILY_LOCAL_ROPE))
        return qc_rope_read(&s->rope, r->arena, &from, err);
    from.part = "full_attention";
    QC_TRY(qc_rope_read(&s->rope, r->arena, &from, err));
    const double local = r->family->local_theta > 0.0 ? r->family->local_theta : s->rope.theta;
    from.part = "sliding_attention";
    from.theta = local;
    if (object && qc_config_field(object, from.part))
        return qc_rope_read(&s->local_rope, r->arena, &from, err);
    s->local_rope = (qc_rope){.factor = 1.0, .magnitude = 1.0, .score = 1.0};
    return qc_read_positive(r->root, "rope_local_base_freq", local, &s->local_rope.theta, err);
}

static qc_status shape_read(qc_forward_shape *out, qc_arena *arena, const qc_json *config,
                            int images, qc_error *err)
{
    qc_family_reader r = {.out = out, .arena = arena, .images = images};
    memset(out, 0, sizeof *out);
    out->embedding_scale = out->residual_scale = out->logit_divisor = 1.0;
    if (!config)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "there is no config.json, which says how the model computes");
    r.top = r.root = qc_json_root(config);
    QC_TRY(find_family(&r, err));
    if (images && !r.family->cross_names)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: a %s has no layers that see the states of images; leave out "
                "--image-states",
                r.family->model_type);
    QC_TRY(read_sizes(&r, err));
    QC_TRY(read_flags(&r, err));
    if (r.family->ffn == QC_LAYER_EXPERTS)
        QC_TRY(qc_experts_shape_read(&out->experts, arena, r.root, out->config.layers, err));
    QC_TRY(qc_arena_alloc(arena, &out->turns, (size_t)out->config.layers, sizeof *out->turns, err));
    if (r.family->read)
        QC_TRY(r.family->read(&r, err));
    QC_TRY(read_rope(&r, err));
    if (has(&r, QC_FAMILY_SCALES_SCORES))
        out->score_scale = out->rope.score / sqrt((double)out->config.head_dim);
    QC_TRY(read_windows(&r, err));
    for (uint64_t i = 0; i < out->config.layers; i++)
        if (has(&r, QC_FAMILY_LOCAL_ROPE) && out->windows[i] > 0)
            out->turns[i] = QC_LAYER_TURNED_LOCAL;
    return QC_OK;
}

qc_status qc_forward_shape_read(qc_forward_shape *out, qc_arena *arena, const qc_json *config,
                                qc_error *err)
{
    return shape_read(out, arena, config, 0, err);
}

qc_status qc_forward_shape_read_images(qc_forward_shape *out, qc_arena *arena,
                                       const qc_json *config, qc_error *err)
{
    return shape_read(out, arena, config, 1, err);
}
