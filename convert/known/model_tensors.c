/* Makes the tensors of a model from the rows of its family (convert/families/family_table.c). */
#include "convert/known/model_tensors.h"

#include "convert/families/shape_text.h"
#include "convert/model/geometry.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define NAME_BYTES  192u
#define MXFP4_BLOCK 32u

typedef struct {
    qc_model_tensors *out;
    qc_arena *arena;
    const qc_config *config;
    const qc_geometry *g;
    const qc_family *family;
    qc_shape_facts facts;
    qc_dtype dtype; /* dtype of weights */
    /* FP8 weights have a scale per square block of this side; 0: there are none */
    uint64_t fp8_block;
    /* Which layers have experts: marked ones have not, nor do the first; of the others, one in
     * `every` or `step`. */
    unsigned char *dense;
    uint64_t dense_first, every, step;
    /* The tensors that are made just now: their name or its beginning, and their row. */
    char name[NAME_BYTES];
    const qc_family_row *row;
    uint64_t dims[QC_MAX_DIMS], bias;
    unsigned ndim;
} maker;

/* ---- tensors ---- */

static qc_status add(maker *m, const char *leaf, qc_dtype dtype, unsigned ndim,
                     const uint64_t *dims, qc_error *err)
{
    qc_model_tensors *o = m->out;
    if (o->count == QC_MODEL_MAX_TENSORS)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: expected a model of at most %u tensors, found more: %" PRIu32
                " layers with %" PRIu64 " experts each",
                QC_MODEL_MAX_TENSORS, m->g->layer_count, m->g->experts);
    QC_TRY(qc_arena_more(m->arena, &o->rows, o->count, err));
    qc_checkpoint_tensor *t = &o->rows[o->count];
    memset(t, 0, sizeof *t);
    QC_TRY(qc_arena_printf(m->arena, &t->name, err, "%s%s", m->name, leaf));
    t->dtype = dtype;
    t->ndim = ndim;
    for (unsigned i = 0; i < ndim; i++) {
        t->dims[i] = dims[i];
        if (dims[i] == 0)
            QC_FAIL(err, QC_ERR_INPUT, "config.json: " QC_NAME " would have a dimension of 0",
                    t->name);
    }
    o->count++;
    return QC_OK;
}

static qc_status add_module(maker *m, qc_error *err)
{
    const qc_family_row *r = m->row;
    const int is_linear = r->kind == QC_ROW_MODULE && r->role == QC_ROLE_LINEAR;
    const int fp8 = is_linear && m->fp8_block && !(r->traits & QC_TRAIT_PLAIN);
    const qc_dtype dtype = fp8                        ? QC_DTYPE_F8_E4M3
                           : r->traits & QC_TRAIT_F32 ? QC_DTYPE_F32
                           : r->traits & QC_TRAIT_U8  ? QC_DTYPE_U8
                                                      : m->dtype;
    if (r->kind == QC_ROW_TENSOR || r->kind == QC_ROW_SHAPE)
        return add(m, "", dtype, m->ndim, m->dims, err);
    QC_TRY(add(m, ".weight", dtype, m->ndim, m->dims, err));
    if (fp8) {
        uint64_t scales[2] = {(m->dims[0] + m->fp8_block - 1) / m->fp8_block,
                              (m->dims[1] + m->fp8_block - 1) / m->fp8_block};
        QC_TRY(add(m, ".weight_scale_inv", QC_DTYPE_F32, 2, scales, err));
    }
    const uint64_t *outputs = &m->dims[r->traits & QC_TRAIT_CONV1D ? 1 : 0];
    return m->bias ? add(m, ".bias", m->dtype, 1, outputs, err) : QC_OK;
}

/* Adds the tensors of all names that a pattern stands for; len bytes of the name are there. */
static qc_status spell(maker *m, const char *p, size_t len, qc_error *err)
{
    size_t n = strcspn(p, "{#");
    if (len + n + 1 > sizeof m->name)
        QC_FAIL(err, QC_ERR_INTERNAL, "the name of a tensor is too long: '%.80s'", m->name);
    memcpy(m->name + len, p, n);
    len += n;
    m->name[len] = '\0';
    p += n;
    if (*p == '\0')
        return add_module(m, err);
    if (*p == '#') {
        for (uint64_t e = 0; e < m->g->experts; e++) {
            int digits = snprintf(m->name + len, sizeof m->name - len, "%" PRIu64, e);
            QC_TRY(spell(m, p + 1, len + (size_t)digits, err));
        }
        return QC_OK;
    }
    for (const char *alt = p + 1, *behind = strchr(p, '}') + 1; alt < behind; alt += n + 1) {
        n = strcspn(alt, "|}");
        if (len + n + 1 > sizeof m->name)
            QC_FAIL(err, QC_ERR_INTERNAL, "the name of a tensor is too long: '%.80s'", m->name);
        memcpy(m->name + len, alt, n);
        QC_TRY(spell(m, behind, len + n, err));
    }
    return QC_OK;
}

/* ---- layers ---- */

static void set_layer(maker *m, const qc_family_group *group, uint64_t i)
{
    qc_shape_facts *f = &m->facts;
    const int of_text = group->prefix[0] == '%' && i < m->g->layer_count;
    const qc_attention attention = of_text ? m->g->layers[i].attention : QC_ATTENTION_FULL;
    f->extra = group->extra || (group->prefix[0] == '%' && !of_text);
    f->moe = (of_text || f->extra) && qc_family_is(m->family, "EXPERTS");
    if (!f->extra && f->moe)
        f->moe = !m->dense[i] && i >= m->dense_first && (m->every == 0 || i % m->every == 0) &&
                 (m->step == 0 || (i + 1) % m->step == 0);
    f->state = attention != QC_ATTENTION_FULL && qc_family_is(m->family, "HYBRID");
    f->cross = attention == QC_ATTENTION_CROSS;
    /* Has it an indexer of its own, which takes no earlier layer's choice? */
    const qc_json_node *list = qc_config_text_field(m->config, "indexer_types");
    const qc_json_node *type = list ? qc_json_first(list) : NULL;
    for (uint64_t k = 0; type && k < i; k++)
        type = qc_json_next(type);
    f->indexed = !type || strcmp(qc_json_string_or(type, ""), "full") == 0;
}

/* Puts the prefix of a group in m->name: base for '%', number for '#'. Returns its length. */
static size_t put_prefix(maker *m, const char *prefix, uint64_t number)
{
    size_t len = 0;
    for (; *prefix; prefix++) {
        int n = 0;
        if (*prefix == '%')
            n = snprintf(m->name + len, sizeof m->name - len, "%s", m->family->base);
        else if (*prefix == '#')
            n = snprintf(m->name + len, sizeof m->name - len, "%" PRIu64, number);
        else
            n = snprintf(m->name + len, sizeof m->name - len, "%c", *prefix);
        len += (size_t)n;
    }
    m->name[len] = '\0';
    return len;
}

static qc_status make_group(maker *m, const qc_family_group *group, qc_error *err)
{
    const char *prefix = group->at ? group->at : group->prefix;
    uint64_t count = 0, is = 0;
    QC_TRY(qc_shape_when(&is, group->when, 1, &m->facts, err));
    if (!is)
        return QC_OK;
    QC_TRY(qc_shape_when(&count, group->count, 1, &m->facts, err));
    if (count > QC_CONFIG_MAX_LAYERS)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %" PRIu64 ", expected at most %u layers",
                group->count, count, QC_CONFIG_MAX_LAYERS);
    for (uint64_t i = 0; i < count; i++) {
        set_layer(m, group, i);
        for (const qc_family_row *r = group->rows; r->name; r++) {
            m->row = r;
            if (!r->shape)
                continue;
            QC_TRY(qc_shape_when(&is, r->when, 1, &m->facts, err));
            if (!is)
                continue;
            QC_TRY(qc_shape_read(m->dims, QC_MAX_DIMS, &m->ndim, r->shape, &m->facts, err));
            QC_TRY(qc_shape_when(&m->bias, r->bias, 0, &m->facts, err));
            if (m->facts.bare && prefix[0] == '%')
                QC_TRY(spell(m, r->name, put_prefix(m, prefix + 1, i), err));
            else
                QC_TRY(spell(m, r->name, put_prefix(m, prefix, i), err));
        }
    }
    return QC_OK;
}

/* ---- the model ---- */

/* Reads quantization_config, which may be absent, gpt-oss' MXFP4 or DeepSeek's FP8. */
static qc_status read_quantization(maker *m, int any_form, qc_error *err)
{
    const qc_json_node *q = qc_config_field(m->config->root, "quantization_config");
    if (!q)
        return QC_OK;
    const char *method = qc_json_string_or(qc_json_get(q, "quant_method"), "");
    if (strcmp(method, "mxfp4") == 0 && qc_family_is(m->family, "MXFP4")) {
        m->facts.mxfp4 = 1;
        return QC_OK;
    }
    const qc_json_node *block = qc_json_get(q, "weight_block_size");
    int square = block && qc_json_kind_of(block) == QC_JSON_ARRAY && qc_json_first(block);
    if (strcmp(method, "fp8") == 0 && qc_family_is(m->family, "FP8") && square) {
        QC_TRY(qc_config_count(&m->fp8_block, qc_json_first(block), QC_CONFIG_MAX_SIZE, 0, err));
        if (m->fp8_block != 0)
            return QC_OK;
    }
    if (any_form)
        return QC_OK;
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "config.json: the tensors of a %s that is quantized by " QC_NAME
            " cannot be worked out; "
            "give the checkpoint itself",
            m->config->text_type, method);
}

static qc_status read_experts(maker *m, qc_error *err)
{
    const qc_config *c = m->config;
    const qc_json_node *only = qc_config_text_field(c, "mlp_only_layers");
    QC_TRY(qc_config_read(&m->step, c, "decoder_sparse_step interleave_moe_layer_step",
                          QC_CONFIG_MAX_SIZE, 1, err));
    QC_TRY(qc_config_read(&m->dense_first, c, "first_k_dense_replace", QC_CONFIG_MAX_SIZE, 0, err));
    QC_TRY(qc_config_read(&m->every, c, "moe_layer_freq", QC_CONFIG_MAX_SIZE, 1, err));
    QC_TRY(qc_arena_array(m->arena, &m->dense, m->g->layer_count, err));
    QC_TRY(qc_config_mark_layers(m->dense, m->g->layer_count, only, 0, err));
    const qc_json_node *types = qc_config_text_field(c, "mlp_layer_types");
    if (types && qc_json_kind_of(types) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: mlp_layer_types is not a list");
    const qc_json_node *n = types ? qc_json_first(types) : NULL;
    for (uint32_t i = 0; n && i < m->g->layer_count; i++, n = qc_json_next(n))
        m->dense[i] |= strcmp(qc_json_string_or(n, ""), "dense") == 0;
    if (qc_family_is(m->family, "HYBRID") &&
        (m->g->experts == 0 || m->step != 1 || (only && qc_json_first(only))))
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: the tensors of a %s can be worked out only with experts in every "
                "layer; give the checkpoint itself",
                m->config->model_type);
    if (m->g->experts == 0)
        QC_FAIL(
            err, QC_ERR_INPUT,
            "config.json: the number of experts is missing, so the tensors cannot be worked out");
    return QC_OK;
}

/* Does it have the heads that it was trained with, or is it bare? */
static qc_status read_class(maker *m, qc_error *err)
{
    const qc_json_node *list = qc_config_field(m->config->root, "architectures");
    const char *kind = "";
    if (list && qc_json_kind_of(list) == QC_JSON_ARRAY && qc_json_first(list))
        kind = qc_json_string_or(qc_json_first(list), "");
    m->facts.bare = strcmp(kind, "GPT2Model") == 0;
    if (strcmp(m->family->type, "bert") != 0)
        return QC_OK;
    m->facts.masked = strcmp(kind, "BertForMaskedLM") == 0;
    m->facts.bare = !m->facts.masked && strcmp(kind, "BertForPreTraining") != 0;
    if (m->facts.bare && kind[0] != '\0' && strcmp(kind, "BertModel") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: the tensors of " QC_NAME " cannot be worked out, but only those of "
                "BertModel, BertForMaskedLM and BertForPreTraining; give the checkpoint itself",
                kind);
    return QC_OK;
}

static qc_status check_needs(const maker *m, qc_error *err)
{
    char name[NAME_BYTES];
    const qc_json_node *indexers = qc_config_text_field(m->config, "indexer_types");
    if (indexers && qc_json_kind_of(indexers) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: indexer_types is not a list");
    for (const char *at = m->family->need; *at; at += strspn(at, " ")) {
        size_t n = strcspn(at, " ");
        (void)snprintf(name, sizeof name, "%.*s", (int)n, at);
        QC_TRY(qc_shape_need(name, &m->facts, err));
        at += n;
    }
    return QC_OK;
}

static qc_status refuse_type(const qc_config *c, qc_error *err)
{
    char list[1024] = "";
    size_t len = 0;
    for (size_t i = 0; i < qc_family_count && len < sizeof list; i++) {
        if (!qc_family_is(&qc_families[i], "ROLES"))
            len += (size_t)snprintf(list + len, sizeof list - len, "%s%s", i ? ", " : "",
                                    qc_families[i].type);
    }
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "config.json: the tensors of model_type " QC_NAME
            " cannot be worked out; give the checkpoint "
            "itself or its headers (docs/planning.md), or a type of docs/models.md: %s",
            c->model_type, list);
}

qc_status qc_model_tensors_make(qc_model_tensors *out, qc_arena *arena, const qc_json *config,
                                int any_form, qc_error *err)
{
    qc_geometry g;
    qc_config c;
    maker m = {.out = out, .arena = arena, .config = &c, .g = &g, .every = 1, .step = 1};
    memset(out, 0, sizeof *out);
    qc_config_open(&c, config);
    if (c.model_type[0] == '\0')
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: expected a model_type to work the tensors out by, found none; give "
                "the checkpoint itself");
    m.family = qc_family_find(c.model_type);
    const int tower = qc_family_is(m.family, "TOWER");
    if (!m.family || qc_family_is(m.family, "ROLES") || tower != (c.text != c.root) ||
        (tower && !c.vision))
        return refuse_type(&c, err);
    QC_TRY(qc_geometry_read(&g, arena, config, err));
    m.facts = (qc_shape_facts){
        .config = &c,
        .family = m.family,
        .hidden = g.hidden,
        .heads = g.heads,
        .kv_heads = g.kv_heads,
        .head_dim = g.head_dim,
        .q = g.heads * g.head_dim,
        .kv = g.kv_heads * g.head_dim,
        .layers = g.layer_count,
        .experts = g.experts,
        .vocab = g.vocab,
        .context = g.max_context,
        .inner = g.intermediate,
        .media = g.media_positions,
        .tied = (uint64_t)qc_config_flag(&c, "tie_word_embeddings", qc_family_is(m.family, "TIED")),
    };
    QC_TRY(read_quantization(&m, any_form, err));
    if (g.layer_count == 0)
        QC_FAIL(
            err, QC_ERR_INPUT,
            "config.json: the number of layers is missing, so the tensors cannot be worked out");
    /* If nothing is said, the dtype is PyTorch's default; but the rest of a model in MXFP4 or FP8
     * is BF16. */
    m.dtype = g.dtype;
    if (m.dtype == QC_DTYPE_COUNT)
        m.dtype = m.facts.mxfp4 || m.fp8_block ? QC_DTYPE_BF16 : QC_DTYPE_F32;
    QC_TRY(read_class(&m, err));
    QC_TRY(check_needs(&m, err));
    uint64_t inputs[2] = {g.hidden, g.intermediate};
    QC_TRY(qc_config_read(&inputs[1], &c, "intermediate_size", QC_CONFIG_MAX_SIZE, 0, err));
    for (int i = 0; m.facts.mxfp4 && i < 2; i++) {
        if (inputs[i] % MXFP4_BLOCK != 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: expected inputs of experts in whole blocks of MXFP4, which have "
                    "%u weights, found %" PRIu64,
                    MXFP4_BLOCK, inputs[i]);
    }
    if (qc_family_is(m.family, "EXPERTS"))
        QC_TRY(read_experts(&m, err));
    for (const qc_family_group *group = m.family->groups; group->prefix; group++)
        QC_TRY(make_group(&m, group, err));
    return QC_OK;
}
