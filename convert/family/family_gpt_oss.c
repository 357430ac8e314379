/* gpt-oss (OpenAI 2025): every other layer slides, every head has a sink, all linear layers have
 * biases. experts_shape.c says how its experts compute. */
#include "convert/family/family.h"

static const qc_layer_names names = {
    .matrices = {QC_NAMES_QKV},
    .vectors = {QC_NAMES_TWO_NORMS, [QC_LAYER_SINKS] = "self_attn.sinks"}};

const qc_family qc_family_gpt_oss[1] = {
    {.model_type = "gpt_oss",
     .architecture = "GptOssForCausalLM",
     .names = &names,
     .ffn = QC_LAYER_EXPERTS,
     .slides = QC_SLIDES_PATTERN,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_BIASED,
     .kv_heads = 8,
     .head_dim = 64,
     .window = 128,
     .pattern = 2,
     .theta = 150000.0,
     .norm_eps = 1e-5,
     .bos = -1,
     .eos = -1},
};
