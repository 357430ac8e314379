/* OLMo 2 (OLMo Team 2024): norms of what both parts of a layer add, none of what they get; norms of
 * q and k over all heads. */
#include "convert/llama/family.h"

static const qc_llama_names names = {
    .matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
    .vectors = {[QC_LLAMA_ATTENDED_NORM] = "post_attention_layernorm",
                [QC_LLAMA_FFN_NORM] = "post_feedforward_layernorm",
                QC_NAMES_QK_NORMS}};

const qc_llama_family qc_family_olmo2[1] = {
    {.model_type = "olmo2",
     .architecture = "Olmo2ForCausalLM",
     .names = &names,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_WIDE_NORMS,
     .norm_eps = 1e-5,
     .bos = -1,
     .eos = 50279},
};
