/* Phi-3 and Phi-4 (Abdin et al. 2024): q, k and v are one matrix, and so are gate and up. Larger
 * ones have longrope, and some turn only a part of each head. */
#include "convert/family/family.h"

static const qc_layer_names names = {
    .matrices =
        {[QC_LAYER_Q] = "self_attn.qkv_proj", [QC_LAYER_O] = "self_attn.o_proj", QC_NAMES_GATE_UP},
    .vectors = {QC_NAMES_TWO_NORMS}};

const qc_family qc_family_phi3[1] = {
    {.model_type = "phi3",
     .architecture = "Phi3ForCausalLM",
     .names = &names,
     .slides = QC_SLIDES_ALWAYS,
     .traits = QC_FAMILY_READS_PART | QC_FAMILY_SU_IS_LONGROPE,
     .norm_eps = 1e-5,
     .bos = 1,
     .eos = 32000},
};
