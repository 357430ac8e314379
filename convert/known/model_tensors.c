/* Chooses the family, which then adds the tensors. */
#include "convert/known/model_tensors.h"

#include "convert/known/model_tensors_internal.h"

#include <string.h>

#define NAME_SHOWN_BYTES 80

static const char family_list[] =
    "llama, mistral, mixtral, minimax_m2, qwen2, qwen3, qwen2_moe, qwen3_moe, qwen3_next, phi3, "
    "gemma, gemma2, gemma3, gemma3_text, deepseek_v2, deepseek_v3, deepseek_v32, kimi_k2, gpt_oss, "
    "granite, granitemoehybrid, smollm3, olmo2, olmo3, olmoe, glm4, glm4_moe, glm4_moe_lite, "
    "glm_moe_dsa, mistral3, "
    "llama4, qwen3_5, qwen3_5_moe, mllama, bert, gpt2, gpt_neox";

/* Reads quantization_config, which may be absent, gpt-oss' MXFP4 or DeepSeek's FP8. */
static qc_status read_quantization(qc_tensor_maker *m, qc_error *err)
{
    const qc_json_node *q = qc_config_field(m->config.root, "quantization_config");
    if (!q)
        return QC_OK;
    const char *method = qc_json_string_or(qc_json_get(q, "quant_method"), "");
    if (strcmp(method, "mxfp4") == 0 && qc_maker_is(m, " gpt_oss ")) {
        m->mxfp4 = 1;
        return QC_OK;
    }
    const qc_json_node *block = qc_json_get(q, "weight_block_size");
    int square = block && qc_json_kind_of(block) == QC_JSON_ARRAY && qc_json_first(block);
    static const char fp8_types[] = " deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa minimax_m2 ";
    if (strcmp(method, "fp8") == 0 && qc_maker_is(m, fp8_types) && square) {
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
        QC_FAIL(
            err, QC_ERR_INPUT,
            "config.json: the number of layers is missing, so the tensors cannot be worked out");
    return QC_OK;
}

static const char with_towers[] = " mllama gemma3 mistral3 llama4 qwen3_5 qwen3_5_moe ";

static int is_family(const qc_tensor_maker *m)
{
    static const char decoders[] =
        " llama mistral mixtral minimax_m2 qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next phi3 gemma "
        "gemma2 gemma3_text deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 gpt_oss granite "
        "granitemoehybrid smollm3 "
        "olmo2 olmo3 olmoe glm4 glm4_moe glm4_moe_lite glm_moe_dsa bert gpt2 gpt_neox ";
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
                "config.json: the tensors of model_type '%.*s' cannot be worked out, but only "
                "those of %s; give the checkpoint itself",
                NAME_SHOWN_BYTES, m.config.model_type, family_list);
    QC_TRY(qc_geometry_read(&g, arena, config, err));
    QC_TRY(read_quantization(&m, err));
    QC_TRY(check_layers(&m, err));
    /* If nothing is said, the dtype is PyTorch's default; but the rest of a model in MXFP4 or FP8
     * is BF16. */
    m.dtype = g.dtype;
    if (m.dtype == QC_DTYPE_COUNT)
        m.dtype = m.mxfp4 || m.fp8_block ? QC_DTYPE_BF16 : QC_DTYPE_F32;
    if (strcmp(m.config.model_type, "mllama") == 0)
        return qc_maker_mllama(&m, err);
    if (qc_config_word_in(m.config.model_type, " qwen3_5 qwen3_5_moe qwen3_next "))
        return qc_maker_qwen35(&m, err);
    if (qc_config_word_in(m.config.model_type, with_towers))
        return qc_maker_with_tower(&m, err);
    if (qc_maker_is(&m, " bert "))
        return qc_maker_bert(&m, err);
    if (qc_maker_is(&m, " gpt2 "))
        return qc_maker_gpt2(&m, err);
    if (qc_maker_is(&m, " granitemoehybrid "))
        return qc_maker_granite_hybrid(&m, err);
    if (qc_maker_is(&m, " gpt_neox "))
        return qc_maker_gpt_neox(&m, err);
    return qc_maker_decoder(&m, "", err);
}
