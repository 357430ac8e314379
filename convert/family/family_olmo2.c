/* OLMo 2 (OLMo Team 2024): norms of what both parts of a layer add, none of what they get; norms of
 * q and k over all heads. OLMo 3 (2025): windows besides, and rotary positions that are scaled in
 * the other layers only. */
#include "convert/family/family.h"

static const qc_layer_names names = {
    .matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
    .vectors = {[QC_LAYER_ATTENDED_NORM] = "post_attention_layernorm",
                [QC_LAYER_FFN_NORM] = "post_feedforward_layernorm",
                QC_NAMES_QK_NORMS}};

#define TRAITS (QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_WIDE_NORMS)

const qc_family qc_family_olmo2[2] = {
    {.model_type = "olmo2",
     .architecture = "Olmo2ForCausalLM",
     .names = &names,
     .traits = TRAITS,
     .norm_eps = 1e-5,
     .bos = -1,
     .eos = 50279},
    {.model_type = "olmo3",
     .architecture = "Olmo3ForCausalLM",
     .names = &names,
     .slides = QC_SLIDES_PATTERN,
     .traits = TRAITS | QC_FAMILY_LOCAL_ROPE,
     .window = 4096,
     .pattern = 4,
     .norm_eps = 1e-5,
     .bos = -1,
     .eos = 50279},
};
