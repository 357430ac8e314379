/* GLM-4 (Z.ai 2024): gate and up are one matrix; half of each head is turned, in pairs of
 * neighbours. GLM-4-0414 (2025): norms around both parts of a layer besides. */
#include "convert/family/family.h"

static const qc_layer_names names = {
    .matrices = {QC_NAMES_QKV, QC_NAMES_GATE_UP},
    .vectors = {QC_NAMES_TWO_NORMS, [QC_LAYER_ATTENDED_NORM] = "post_self_attn_layernorm",
                [QC_LAYER_FFN_NORM] = "post_mlp_layernorm"}};

static const qc_layer_names names_of_glm = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATE_UP},
                                            .vectors = {QC_NAMES_TWO_NORMS}};

#define DEFAULTS                                                                                   \
    .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_BIASED | QC_FAMILY_READS_PART |           \
              QC_FAMILY_SIDE_BY_SIDE,                                                              \
    .kv_heads = 2, .head_dim = 128, .rotary_part = 0.5, .norm_eps = 1.5625e-7, .bos = -1,          \
    .eos = 151329

const qc_family qc_family_glm4[2] = {
    {DEFAULTS, .model_type = "glm", .architecture = "GlmForCausalLM", .names = &names_of_glm},
    {DEFAULTS, .model_type = "glm4", .architecture = "Glm4ForCausalLM", .names = &names},
};
