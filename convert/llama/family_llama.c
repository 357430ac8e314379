/* Llama (Touvron et al. 2023) and those that compute as it does, but for biases, norms of q and k,
 * and windows: Mistral, Qwen2 and Qwen3. */
#include "convert/llama/family.h"

const qc_llama_names qc_llama_names_plain = {
    .matrices = {[QC_LLAMA_Q] = "self_attn.q_proj",
                 [QC_LLAMA_K] = "self_attn.k_proj",
                 [QC_LLAMA_V] = "self_attn.v_proj",
                 [QC_LLAMA_O] = "self_attn.o_proj",
                 [QC_LLAMA_GATE] = "mlp.gate_proj",
                 [QC_LLAMA_UP] = "mlp.up_proj",
                 [QC_LLAMA_DOWN] = "mlp.down_proj"},
    .vectors = {[QC_LLAMA_INPUT_NORM] = "input_layernorm",
                [QC_LLAMA_POST_NORM] = "post_attention_layernorm"}};

static const qc_llama_names with_head_norms = {
    .matrices = {[QC_LLAMA_Q] = "self_attn.q_proj",
                 [QC_LLAMA_K] = "self_attn.k_proj",
                 [QC_LLAMA_V] = "self_attn.v_proj",
                 [QC_LLAMA_O] = "self_attn.o_proj",
                 [QC_LLAMA_GATE] = "mlp.gate_proj",
                 [QC_LLAMA_UP] = "mlp.up_proj",
                 [QC_LLAMA_DOWN] = "mlp.down_proj"},
    .vectors = {[QC_LLAMA_INPUT_NORM] = "input_layernorm",
                [QC_LLAMA_POST_NORM] = "post_attention_layernorm",
                [QC_LLAMA_Q_NORM] = "self_attn.q_norm",
                [QC_LLAMA_K_NORM] = "self_attn.k_norm"}};

const qc_llama_family qc_family_llama[4] = {
    {.model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .other_architecture = "LLaMAForCausalLM",
     .names = &qc_llama_names_plain,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_READS_MLP_BIAS | QC_FAMILY_ON_GPU,
     .bos = 1,
     .eos = 2},
    {.model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .names = &qc_llama_names_plain,
     .traits = QC_FAMILY_SLIDES | QC_FAMILY_ON_GPU,
     .kv_heads = 8,
     .bos = 1,
     .eos = 2},
    {.model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .names = &qc_llama_names_plain,
     .traits = QC_FAMILY_QKV_BIAS | QC_FAMILY_SLIDES_IF_ASKED | QC_FAMILY_ON_GPU,
     .kv_heads = 32,
     .bos = -1,
     .eos = -1},
    {.model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .names = &with_head_norms,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_HEAD_NORMS | QC_FAMILY_SLIDES_IF_ASKED |
               QC_FAMILY_ON_GPU,
     .kv_heads = 32,
     .head_dim = 128,
     .bos = -1,
     .eos = -1},
};
