/* Mixtures of experts with the attention of Llama: Mixtral (Jiang et al. 2024), Qwen2-MoE and
 * Qwen3-MoE; OLMoE (Muennighoff et al. 2024), whose norms of q and k go over all heads; and GLM-4.5
 * (Z.ai 2025), which turns half of each head. experts_shape.c says how experts compute. */
#include "convert/family/family.h"
#include "convert/family/family_read.h"
#include "convert/model/config_fields.h"

#include <string.h>

static const qc_layer_names head_norms = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
                                          .vectors = {QC_NAMES_TWO_NORMS, QC_NAMES_QK_NORMS}};

/* Versions of transformers differ in which layers of a Qwen mixture slide. */
static qc_status never_slides(qc_family_reader *r, qc_error *err)
{
    int slides = 0;
    const qc_json_node *types = qc_config_field(r->root, "layer_types");
    QC_TRY(qc_read_flag(r->root, "use_sliding_window", 0, &slides, err));
    for (const qc_json_node *n = types ? qc_json_first(types) : NULL; n; n = qc_json_next(n))
        slides |= strcmp(qc_json_string_or(n, ""), "full_attention") != 0;
    if (slides)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: use_sliding_window or layer_types asks for sliding attention, which "
                "is not computed for a %s",
                r->family->model_type);
    return QC_OK;
}

static qc_status never_clips(qc_family_reader *r, qc_error *err)
{
    if (qc_config_field(r->root, "clip_qkv"))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: clip_qkv is set, and clipping q, k and v is not computed");
    return QC_OK;
}

/* GLM-4.5-Air has no norms of q and k, GLM-4.5 has them. */
static qc_status read_norms(qc_family_reader *r, qc_error *err)
{
    int norms = 0;
    QC_TRY(qc_read_flag(r->root, "use_qk_norm", 0, &norms, err));
    if (norms)
        r->out->names = &head_norms;
    return QC_OK;
}

const qc_family qc_family_mixtures[5] = {
    {.model_type = "mixtral",
     .architecture = "MixtralForCausalLM",
     .names = &qc_layer_names_plain,
     .ffn = QC_LAYER_EXPERTS,
     .slides = QC_SLIDES_ALWAYS,
     .kv_heads = 8,
     .theta = 1e6,
     .norm_eps = 1e-5,
     .bos = 1,
     .eos = 2},
    {.model_type = "qwen2_moe",
     .architecture = "Qwen2MoeForCausalLM",
     .names = &qc_layer_names_plain,
     .ffn = QC_LAYER_EXPERTS,
     .traits = QC_FAMILY_QKV_BIAS,
     .read = never_slides,
     .kv_heads = 16,
     .bos = -1,
     .eos = -1},
    {.model_type = "qwen3_moe",
     .architecture = "Qwen3MoeForCausalLM",
     .names = &head_norms,
     .ffn = QC_LAYER_EXPERTS,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS,
     .read = never_slides,
     .kv_heads = 4,
     .bos = -1,
     .eos = -1},
    {.model_type = "olmoe",
     .architecture = "OlmoeForCausalLM",
     .names = &head_norms,
     .ffn = QC_LAYER_EXPERTS,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_WIDE_NORMS,
     .read = never_clips,
     .norm_eps = 1e-5,
     .bos = -1,
     .eos = 50279},
    {.model_type = "glm4_moe",
     .architecture = "Glm4MoeForCausalLM",
     .names = &qc_layer_names_plain,
     .ffn = QC_LAYER_EXPERTS,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_READS_PART,
     .read = read_norms,
     .kv_heads = 8,
     .rotary_part = 0.5,
     .norm_eps = 1e-5,
     .bos = -1,
     .eos = -1},
};
