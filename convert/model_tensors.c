/* Choosing a family, and the few shapes that all of them are made of. */
#include "convert/model_tensors.h"

#include "convert/model_tensors_parts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define FIRST_CAPACITY   512u
#define NAME_SHOWN_BYTES 80

static const char family_list[] =
    "llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe, phi3, gemma, gemma2, "
    "gemma3, gemma3_text, deepseek_v2, deepseek_v3, gpt_oss, granite, smollm3, olmo2, olmo3, glm4, "
    "glm4_moe, mistral3, llama4, qwen3_5, mllama, bert, gpt2";

/* ---- adding ---- */

void qc_tm_prefix(qc_tensor_maker *m, const char *base, uint64_t number)
{
    if (number == UINT64_MAX)
        (void)snprintf(m->prefix, sizeof m->prefix, "%s", base);
    else
        (void)snprintf(m->prefix, sizeof m->prefix, "%s%" PRIu64 ".", base, number);
}

static qc_status add(qc_tensor_maker *m, const char *module, const char *leaf, qc_dtype dtype,
                     unsigned ndim, const uint64_t *dims, qc_error *err)
{
    qc_model_tensors *o = m->out;
    if (o->count == QC_MODEL_MAX_TENSORS)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: expected a model of at most %u tensors, found more: %" PRIu32
                " layers with %" PRIu64 " experts each",
                QC_MODEL_MAX_TENSORS, m->g->layer_count, m->g->experts);
    if (o->count == m->capacity) {
        void *v = NULL;
        size_t capacity = m->capacity ? 2 * m->capacity : FIRST_CAPACITY;
        QC_TRY(qc_arena_alloc(m->arena, &v, capacity, sizeof *o->rows, err));
        if (o->count)
            memcpy(v, o->rows, o->count * sizeof *o->rows);
        o->rows = v;
        m->capacity = capacity;
    }
    qc_ckpt_tensor *t = &o->rows[o->count];
    memset(t, 0, sizeof *t);
    QC_TRY(qc_arena_printf(m->arena, &t->name, err, "%s%s%s", m->prefix, module, leaf));
    t->dtype = dtype;
    t->ndim = ndim;
    for (unsigned i = 0; i < ndim; i++) {
        t->dims[i] = dims[i];
        if (dims[i] == 0)
            QC_FAIL(err, QC_ERR_INPUT, "config.json: '%.*s' would have a dimension of 0",
                    NAME_SHOWN_BYTES, t->name);
    }
    o->count++;
    return QC_OK;
}

qc_status qc_tm_add(qc_tensor_maker *m, const char *name, qc_dtype dtype, unsigned ndim,
                    const uint64_t *dims, qc_error *err)
{
    return add(m, name, "", dtype, ndim, dims, err);
}

qc_status qc_tm_vector(qc_tensor_maker *m, const char *name, uint64_t n, qc_error *err)
{
    return add(m, name, "", m->dtype, 1, &n, err);
}

qc_status qc_tm_matrix(qc_tensor_maker *m, const char *name, uint64_t rows, uint64_t cols,
                       qc_error *err)
{
    return add(m, name, "", m->dtype, 2, (uint64_t[]){rows, cols}, err);
}

qc_status qc_tm_linear(qc_tensor_maker *m, const char *module, uint64_t out, uint64_t in, int bias,
                       qc_error *err)
{
    qc_dtype dtype = m->fp8_block ? QC_DTYPE_F8_E4M3 : m->dtype;
    QC_TRY(add(m, module, ".weight", dtype, 2, (uint64_t[]){out, in}, err));
    if (m->fp8_block) {
        uint64_t rows = (out + m->fp8_block - 1) / m->fp8_block;
        uint64_t cols = (in + m->fp8_block - 1) / m->fp8_block;
        QC_TRY(add(m, module, ".weight_scale_inv", QC_DTYPE_F32, 2, (uint64_t[]){rows, cols}, err));
    }
    return bias ? add(m, module, ".bias", m->dtype, 1, &out, err) : QC_OK;
}

qc_status qc_tm_layer_norm(qc_tensor_maker *m, const char *module, uint64_t n, qc_error *err)
{
    QC_TRY(add(m, module, ".weight", m->dtype, 1, &n, err));
    return add(m, module, ".bias", m->dtype, 1, &n, err);
}

qc_status qc_tm_need(const qc_tensor_maker *m, const qc_json_node *object, const char *name,
                     uint64_t max, uint64_t *out, qc_error *err)
{
    (void)m;
    const qc_json_node *n = qc_config_field(object, name);
    QC_TRY(qc_config_count(out, n, max, 0, err));
    if (*out == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s, and the tensors cannot be worked out",
                name, n ? "0" : "missing");
    return QC_OK;
}

int qc_tm_is(const qc_tensor_maker *m, const char *types)
{
    return qc_config_word_in(m->config.text_type, types);
}

/* ---- the family ---- */

/* quantization_config: none, gpt-oss' MXFP4 or DeepSeek's FP8. */
static qc_status read_quantization(qc_tensor_maker *m, qc_error *err)
{
    const qc_json_node *q = qc_config_field(m->config.root, "quantization_config");
    if (!q)
        return QC_OK;
    const char *method = qc_json_string_or(qc_json_get(q, "quant_method"), "");
    if (strcmp(method, "mxfp4") == 0 && qc_tm_is(m, " gpt_oss ")) {
        m->mxfp4 = 1;
        return QC_OK;
    }
    const qc_json_node *block = qc_json_get(q, "weight_block_size");
    int square = block && qc_json_kind_of(block) == QC_JSON_ARRAY && qc_json_first(block);
    if (strcmp(method, "fp8") == 0 && qc_tm_is(m, " deepseek_v3 ") && square) {
        QC_TRY(qc_config_count(&m->fp8_block, qc_json_first(block), QC_CONFIG_MAX_SIZE, 0, err));
        if (m->fp8_block != 0)
            return QC_OK;
    }
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "config.json: the tensors of a %s that is quantized by '%.*s' cannot be worked out; "
            "give the checkpoint itself",
            m->config.text_type, NAME_SHOWN_BYTES, method);
}

static qc_status check_layers(const qc_tensor_maker *m, qc_error *err)
{
    if (m->g->layer_count == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: there is no number of layers, and the tensors cannot be worked out");
    return QC_OK;
}

static const char with_towers[] = " mllama gemma3 mistral3 llama4 qwen3_5 ";

static int is_family(const qc_tensor_maker *m)
{
    static const char decoders[] =
        " llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe phi3 gemma gemma2 gemma3_text "
        "deepseek_v2 deepseek_v3 gpt_oss granite smollm3 olmo2 olmo3 glm4 glm4_moe bert gpt2 ";
    if (qc_config_word_in(m->config.model_type, with_towers))
        return m->config.text != m->config.root && m->config.vision != NULL;
    return qc_config_word_in(m->config.model_type, decoders) && m->config.text == m->config.root;
}

qc_status qc_model_tensors_make(qc_model_tensors *out, qc_arena *arena, const qc_json *config,
                                qc_error *err)
{
    qc_geometry g;
    qc_tensor_maker m = {.out = out, .arena = arena, .g = &g};
    memset(out, 0, sizeof *out);
    qc_config_open(&m.config, config);
    if (m.config.model_type[0] == '\0')
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: expected a model_type to work the tensors out by, found none; give "
                "the checkpoint itself");
    if (!is_family(&m))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: the tensors of model_type '%.*s' cannot be worked out, only those "
                "of %s; give the checkpoint itself",
                NAME_SHOWN_BYTES, m.config.model_type, family_list);
    QC_TRY(qc_geometry_read(&g, arena, config, err));
    QC_TRY(read_quantization(&m, err));
    QC_TRY(check_layers(&m, err));
    /* Where nothing is said it is PyTorch's default, but for MXFP4 models, whose rest is BF16. */
    m.dtype = g.dtype;
    if (m.dtype == QC_DTYPE_COUNT)
        m.dtype = m.mxfp4 ? QC_DTYPE_BF16 : QC_DTYPE_F32;
    if (strcmp(m.config.model_type, "mllama") == 0)
        return qc_tm_mllama(&m, err);
    if (strcmp(m.config.model_type, "qwen3_5") == 0)
        return qc_tm_qwen35(&m, err);
    if (qc_config_word_in(m.config.model_type, with_towers))
        return qc_tm_with_tower(&m, err);
    if (qc_tm_is(&m, " bert "))
        return qc_tm_bert(&m, err);
    if (qc_tm_is(&m, " gpt2 "))
        return qc_tm_gpt2(&m, err);
    return qc_tm_decoder(&m, "", err);
}
