#include "convert/llama/llama_config.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/llama/family.h"
#include "convert/model/config_fields.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define SHOWN          80
#define DEFAULT_WINDOW 4096u
#define DEFAULT_FROM   28u /* max_window_layers of Qwen */
#define MAX_CONTEXT    (UINT64_C(1) << 40)
#define TAU            6.283185307179586476925

typedef struct {
    qc_llama_shape *out;
    qc_arena *arena;
    const qc_json_node *root;
    const qc_llama_family *family;
} reader;

static qc_status find_family(reader *r, qc_error *err)
{
    const char *type = qc_json_string_or(qc_json_get(r->root, "model_type"), NULL);
    if (!type)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: expected a model_type that is computed (%s), found none",
                qc_llama_family_list());
    r->family = qc_llama_family_of(type);
    if (!r->family)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: models of model_type '%.*s' are not computed, %s are", SHOWN, type,
                qc_llama_family_list());
    r->out->family = r->family;
    r->out->config.model_type = r->family->model_type;
    const qc_json_node *list = qc_config_field(r->root, "architectures");
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY || !qc_json_first(list))
        return QC_OK;
    const char *named = qc_json_string_or(qc_json_first(list), "");
    const char *other = r->family->other_architecture;
    if (strcmp(named, r->family->architecture) == 0 || (other && strcmp(named, other) == 0))
        return QC_OK;
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "config.json: the architecture of this %s is '%.*s'; expected %s", type, SHOWN, named,
            r->family->architecture);
}

/* ---- fields ---- */

static qc_status count(const reader *r, const char *name, uint64_t missing, uint64_t *out,
                       qc_error *err)
{
    QC_TRY(qc_config_count(out, qc_config_field(r->root, name), QC_CONFIG_MAX_SIZE, missing, err));
    if (*out == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s", name,
                qc_config_field(r->root, name) ? "0" : "missing");
    return QC_OK;
}

/* Reads a positive finite number. */
static qc_status positive(const qc_json_node *object, const char *name, double missing, double *out,
                          qc_error *err)
{
    const qc_json_node *n = qc_config_field(object, name);
    char what[SHOWN + 32];
    *out = missing;
    if (n) {
        (void)snprintf(what, sizeof what, "config.json: %s", name);
        QC_TRY(qc_json_as_double(n, what, out, err));
    } else if (isnan(missing)) {
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is missing", name);
    }
    if (!(*out > 0.0) || isinf(*out))
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %g, expected a number above 0", name, *out);
    return QC_OK;
}

static int flag(const reader *r, const char *name)
{
    return qc_json_bool_or(qc_config_field(r->root, name), 0);
}

/* Python takes "false" for true, so only a boolean is accepted. */
static qc_status check_flags(const reader *r, qc_error *err)
{
    static const char *const names[] = {"tie_word_embeddings", "attention_bias", "mlp_bias",
                                        "use_sliding_window"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const qc_json_node *n = qc_config_field(r->root, names[i]);
        char what[SHOWN + 32];
        int value = 0;
        (void)snprintf(what, sizeof what, "config.json: %s", names[i]);
        if (n)
            QC_TRY(qc_json_as_bool(n, what, &value, err));
    }
    return QC_OK;
}

/* Reads an id, the first of a list of ids, or none. */
static qc_status token(const reader *r, const char *name, int64_t missing, int64_t *out,
                       qc_error *err)
{
    const qc_json_node *n = qc_json_get(r->root, name);
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

static qc_status read_sizes(reader *r, qc_error *err)
{
    qc_llama_config *c = &r->out->config;
    const qc_llama_family *f = r->family;
    QC_TRY(qc_config_count(&c->layers, qc_config_field(r->root, "num_hidden_layers"),
                           QC_CONFIG_MAX_LAYERS, 0, err));
    if (c->layers == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: num_hidden_layers is missing");
    QC_TRY(count(r, "hidden_size", 0, &c->hidden, err));
    QC_TRY(count(r, "intermediate_size", 0, &c->intermediate, err));
    QC_TRY(count(r, "num_attention_heads", 0, &c->heads, err));
    /* If it is missing, the family's own value counts; if it is null, there are as many as
     * heads. */
    const qc_json_node *kv = qc_json_get(r->root, "num_key_value_heads");
    uint64_t no_kv = kv || f->kv_heads == 0 ? c->heads : f->kv_heads;
    QC_TRY(count(r, "num_key_value_heads", no_kv, &c->kv_heads, err));
    QC_TRY(count(r, "vocab_size", 0, &c->vocabulary, err));
    QC_TRY(
        count(r, "head_dim", f->head_dim ? f->head_dim : c->hidden / c->heads, &c->head_dim, err));
    QC_TRY(qc_config_count(&c->context, qc_config_field(r->root, "max_position_embeddings"),
                           MAX_CONTEXT, 0, err));
    if (c->heads % c->kv_heads != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: num_attention_heads %" PRIu64
                " is no multiple of num_key_value_heads %" PRIu64,
                c->heads, c->kv_heads);
    if (c->head_dim % 2 != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: head_dim is %" PRIu64 ", and rotary positions need an even one",
                c->head_dim);
    QC_TRY(positive(r->root, "rms_norm_eps", f->norm_eps > 0.0 ? f->norm_eps : 1e-6, &c->norm_eps,
                    err));
    QC_TRY(token(r, "bos_token_id", f->bos, &c->bos, err));
    QC_TRY(token(r, "eos_token_id", f->eos, &c->eos, err));
    c->tied = flag(r, "tie_word_embeddings");
    const char *act = qc_json_string_or(qc_config_field(r->root, "hidden_act"), "silu");
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: hidden_act is '%.*s', and only silu is computed", SHOWN, act);
    r->out->out_bias = f->traits & QC_FAMILY_READS_ATTENTION_BIAS && flag(r, "attention_bias");
    r->out->qkv_bias = f->traits & QC_FAMILY_QKV_BIAS || r->out->out_bias;
    r->out->mlp_bias = f->traits & QC_FAMILY_READS_MLP_BIAS && flag(r, "mlp_bias");
    r->out->head_norms = (f->traits & QC_FAMILY_HEAD_NORMS) != 0;
    return QC_OK;
}

/* ---- sliding windows ---- */

static qc_status read_layer_types(reader *r, const qc_json_node *types, uint64_t window,
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

static qc_status read_windows(reader *r, qc_error *err)
{
    const qc_llama_family *f = r->family;
    uint64_t layers = r->out->config.layers, window = 0, from = 0;
    QC_TRY(
        qc_arena_alloc(r->arena, &r->out->windows, (size_t)layers, sizeof *r->out->windows, err));
    const int asked = (f->traits & QC_FAMILY_SLIDES_IF_ASKED) != 0;
    if (!asked && !(f->traits & QC_FAMILY_SLIDES))
        return QC_OK;
    if (asked && !flag(r, "use_sliding_window") && !qc_config_field(r->root, "layer_types"))
        return QC_OK;
    if (f->ffn == QC_LLAMA_EXPERTS && flag(r, "use_sliding_window"))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: use_sliding_window is true, and sliding windows of a %s are not "
                "computed",
                f->model_type);
    if (f->ffn == QC_LLAMA_EXPERTS && asked) {
        const qc_json_node *types = qc_config_field(r->root, "layer_types");
        return types ? read_layer_types(r, types, 0, err) : QC_OK;
    }
    const qc_json_node *n = qc_json_get(r->root, "sliding_window");
    if (!n || qc_json_kind_of(n) != QC_JSON_NULL)
        QC_TRY(qc_config_count(&window, n, MAX_CONTEXT,
                               f->ffn == QC_LLAMA_EXPERTS ? 0 : DEFAULT_WINDOW, err));
    if (n && window == 0 && qc_json_kind_of(n) != QC_JSON_NULL)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: sliding_window is 0");
    if (asked) {
        if (!flag(r, "use_sliding_window"))
            window = 0;
        const qc_json_node *types = qc_config_field(r->root, "layer_types");
        if (types)
            return read_layer_types(r, types, window, err);
        QC_TRY(qc_config_count(&from, qc_config_field(r->root, "max_window_layers"),
                               QC_CONFIG_MAX_SIZE, DEFAULT_FROM, err));
    }
    for (uint64_t i = from; i < layers; i++)
        r->out->windows[i] = window;
    return QC_OK;
}

/* ---- rotary positions ---- */

/* transformers 4 has rope_theta and rope_scaling; 5 has rope_parameters, which holds both. */
static const qc_json_node *rope_object(const reader *r)
{
    const qc_json_node *n = qc_config_field(r->root, "rope_scaling");
    if (n && qc_json_kind_of(n) == QC_JSON_OBJECT && qc_json_first(n))
        return n;
    return qc_config_field(r->root, "rope_parameters");
}

static qc_status whole_head(const qc_json_node *object, qc_error *err)
{
    double part = 1.0;
    QC_TRY(positive(object, "partial_rotary_factor", 1.0, &part, err));
    if (part != 1.0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: partial_rotary_factor is %g, and only models that rotate whole heads "
                "are computed",
                part);
    return QC_OK;
}

static double yarn_magnitude(double factor, double scale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * scale * log(factor) + 1.0;
}

static qc_status read_original(const reader *r, const qc_json_node *p, qc_rope *rope, qc_error *err)
{
    double outside = 0.0, context = (double)r->out->config.context;
    QC_TRY(positive(p, "original_max_position_embeddings", context > 0.0 ? context : (double)NAN,
                    &rope->original, err));
    QC_TRY(positive(r->root, "original_max_position_embeddings", rope->original, &outside, err));
    /* transformers 5 takes the outer value, 4 the inner one. */
    if (outside != rope->original)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: original_max_position_embeddings is %g outside and %g inside of the "
                "rotary parameters, and versions of transformers differ in which they take",
                outside, rope->original);
    return QC_OK;
}

static qc_status read_yarn(const reader *r, const qc_json_node *p, qc_rope *rope, qc_error *err)
{
    double scale = 0.0, scale_all = 0.0;
    QC_TRY(read_original(r, p, rope, err));
    QC_TRY(positive(p, "beta_fast", 32.0, &rope->beta_fast, err));
    QC_TRY(positive(p, "beta_slow", 1.0, &rope->beta_slow, err));
    rope->truncate = qc_json_bool_or(qc_config_field(p, "truncate"), 1);
    if (qc_config_field(p, "attention_factor"))
        return positive(p, "attention_factor", 1.0, &rope->magnitude, err);
    rope->magnitude = yarn_magnitude(rope->factor, 1.0);
    if (!qc_config_field(p, "mscale") || !qc_config_field(p, "mscale_all_dim"))
        return QC_OK;
    QC_TRY(positive(p, "mscale", 1.0, &scale, err));
    QC_TRY(positive(p, "mscale_all_dim", 1.0, &scale_all, err));
    rope->magnitude = yarn_magnitude(rope->factor, scale) / yarn_magnitude(rope->factor, scale_all);
    return QC_OK;
}

static qc_status read_rope(reader *r, qc_error *err)
{
    static const char *const names[] = {"default", "linear", "dynamic", "llama3", "yarn"};
    qc_rope *rope = &r->out->rope;
    const qc_json_node *p = rope_object(r);
    const char *type = "default";
    *rope = (qc_rope){.factor = 1.0, .magnitude = 1.0, .truncate = 1};
    QC_TRY(whole_head(r->root, err));
    QC_TRY(positive(r->root, "rope_theta", r->family->theta > 0.0 ? r->family->theta : 10000.0,
                    &rope->theta, err));
    if (!p)
        return QC_OK;
    if (qc_json_kind_of(p) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s, expected an object", qc_json_key(p),
                qc_json_kind_name(qc_json_kind_of(p)));
    for (const qc_json_node *n = qc_json_first(p); n; n = qc_json_next(n))
        if (qc_json_kind_of(n) == QC_JSON_OBJECT)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "config.json: %s differ by layer ('%.*s'), which is not computed",
                    qc_json_key(p), SHOWN, qc_json_key(n));
    type = qc_json_string_or(qc_config_field(p, "rope_type type"), "default");
    int kind = -1;
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(type, names[i]) == 0)
            kind = i;
    if (kind < 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: rotary positions of type '%.*s' are not computed; default, linear, "
                "dynamic, llama3 and yarn are",
                SHOWN, type);
    rope->kind = (qc_rope_kind)kind;
    QC_TRY(whole_head(p, err));
    QC_TRY(positive(p, "rope_theta", rope->theta, &rope->theta, err));
    if (rope->kind == QC_ROPE_DEFAULT)
        return QC_OK;
    QC_TRY(positive(p, "factor", (double)NAN, &rope->factor, err));
    if (rope->kind == QC_ROPE_YARN)
        return read_yarn(r, p, rope, err);
    if (rope->kind != QC_ROPE_LLAMA3)
        return QC_OK;
    QC_TRY(read_original(r, p, rope, err));
    QC_TRY(positive(p, "low_freq_factor", (double)NAN, &rope->low, err));
    QC_TRY(positive(p, "high_freq_factor", (double)NAN, &rope->high, err));
    if (rope->high <= rope->low)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: high_freq_factor %g is not above low_freq_factor %g", rope->high,
                rope->low);
    return QC_OK;
}

qc_status qc_llama_shape_read(qc_llama_shape *out, qc_arena *arena, const qc_json *config,
                              qc_error *err)
{
    reader r = {.out = out, .arena = arena};
    memset(out, 0, sizeof *out);
    if (!config)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "there is no config.json, which says how the model computes");
    r.root = qc_json_root(config);
    QC_TRY(find_family(&r, err));
    QC_TRY(check_flags(&r, err));
    QC_TRY(read_sizes(&r, err));
    QC_TRY(read_windows(&r, err));
    QC_TRY(qc_experts_shape_read(&out->experts, arena, r.root, out->config.layers, err));
    return read_rope(&r, err);
}

/* ---- tables ---- */

/* This computes in float where transformers does. An error in a frequency grows with the position,
 * so both have to get the same frequency. transformers also multiplies llama3's scale and yarn's
 * ramp in float. */
static float llama3(const qc_rope *r, float inv)
{
    float wavelength = (float)TAU / inv;
    float factor = (float)r->factor;
    if (wavelength < (float)(r->original / r->high))
        return inv;
    if (wavelength > (float)(r->original / r->low))
        return inv / factor;
    float smooth = ((float)r->original / wavelength - (float)r->low) / (float)(r->high - r->low);
    return (1.0f - smooth) * inv / factor + smooth * inv;
}

/* The dimension that turns `rotations` times within the original context. */
static double yarn_dimension(const qc_rope *r, double rotations, double dims)
{
    return dims * log(r->original / (rotations * TAU)) / (2.0 * log(r->theta));
}

static void yarn_range(const qc_rope *r, double dims, double *low, double *high)
{
    *low = yarn_dimension(r, r->beta_fast, dims);
    *high = yarn_dimension(r, r->beta_slow, dims);
    if (r->truncate) {
        *low = floor(*low);
        *high = ceil(*high);
    }
    *low = *low > 0.0 ? *low : 0.0;
    *high = *high < dims - 1.0 ? *high : dims - 1.0;
    if (*low == *high)
        *high += 0.001;
}

static float yarn(const qc_rope *r, float power, uint64_t i, double low, double high)
{
    float ramp = ((float)i - (float)low) / (float)(high - low);
    ramp = ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp;
    float keep = 1.0f - ramp;
    return 1.0f / ((float)r->factor * power) * (1.0f - keep) + 1.0f / power * keep;
}

void qc_rope_frequencies(const qc_rope *r, uint64_t head_dim, float *frequencies)
{
    double low = 0.0, high = 0.0;
    if (r->kind == QC_ROPE_YARN)
        yarn_range(r, (double)head_dim, &low, &high);
    for (uint64_t i = 0; i < head_dim / 2; i++) {
        float exponent = (float)(2 * i) / (float)head_dim;
        float power = (float)pow((double)(float)r->theta, (double)exponent);
        float inv = 1.0f / power;
        switch (r->kind) {
        case QC_ROPE_DEFAULT:
        case QC_ROPE_DYNAMIC:
            break;
        case QC_ROPE_LINEAR:
            inv /= (float)r->factor;
            break;
        case QC_ROPE_LLAMA3:
            inv = llama3(r, inv);
            break;
        case QC_ROPE_YARN:
            inv = yarn(r, power, i, low, high);
            break;
        }
        frequencies[i] = inv;
    }
}

void qc_rope_table(const qc_rope *r, const float *frequencies, uint64_t head_dim,
                   uint64_t positions, float *cosines, float *sines)
{
    float magnitude = (float)r->magnitude;
    for (uint64_t p = 0; p < positions; p++) {
        for (uint64_t i = 0; i < head_dim / 2; i++) {
            float angle = (float)p * frequencies[i];
            *cosines++ = (float)cos((double)angle) * magnitude;
            *sines++ = (float)sin((double)angle) * magnitude;
        }
    }
}

qc_status qc_rope_tables(float **cosines, float **sines, const qc_llama_shape *shape,
                         uint64_t positions, qc_error *err)
{
    uint64_t dim = shape->config.head_dim, half = dim / 2;
    uint64_t floats = qc_sat_add(qc_sat_mul(positions, 2 * half), half);
    size_t bytes = 0;
    *cosines = *sines = NULL;
    if (qc_u64_to_size(qc_sat_mul(floats, sizeof(float)), &bytes) || bytes == SIZE_MAX)
        QC_FAIL(err, QC_ERR_NOMEM, "a window of %" PRIu64 " tokens is too long", positions);
    QC_TRY(qc_malloc_aligned(cosines, 64, bytes, err));
    *sines = *cosines + positions * half;
    float *frequencies = *sines + positions * half;
    qc_rope_frequencies(&shape->rope, dim, frequencies);
    qc_rope_table(&shape->rope, frequencies, dim, positions, *cosines, *sines);
    return QC_OK;
}
