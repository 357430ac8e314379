/* Llama (Touvron et al. 2023) and those that compute as it does, but for biases, norms of q and k,
 * and windows: Mistral, Qwen2 and Qwen3. */
#include "convert/llama/family.h"

const qc_llama_names qc_llama_names_plain = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
                                             .vectors = {QC_NAMES_TWO_NORMS}};

static const qc_llama_names with_head_norms = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
                                               .vectors = {QC_NAMES_TWO_NORMS, QC_NAMES_QK_NORMS}};

const qc_llama_family qc_family_llama[4] = {
    {.model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .other_architecture = "LLaMAForCausalLM",
     .names = &qc_llama_names_plain,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_READS_MLP_BIAS |
               QC_FAMILY_ON_GPU,
     .bos = 1,
     .eos = 2},
    {.model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .names = &qc_llama_names_plain,
     .slides = QC_SLIDES_ALWAYS,
     .traits = QC_FAMILY_ON_GPU,
     .window = 4096,
     .kv_heads = 8,
     .bos = 1,
     .eos = 2},
    {.model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .names = &qc_llama_names_plain,
     .slides = QC_SLIDES_FROM,
     .traits = QC_FAMILY_QKV_BIAS | QC_FAMILY_ON_GPU,
     .window = 4096,
     .kv_heads = 32,
     .bos = -1,
     .eos = -1},
    {.model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .names = &with_head_norms,
     .slides = QC_SLIDES_FROM,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_ON_GPU,
     .window = 4096,
     .kv_heads = 32,
     .head_dim = 128,
     .bos = -1,
     .eos = -1},
};
