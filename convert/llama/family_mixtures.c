/* Mixtures whose attention is Llama's: Mixtral (Jiang et al. 2024), Qwen2-MoE and Qwen3-MoE.
 * experts_config.c says how their experts compute. */
#include "convert/llama/family.h"

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

const qc_llama_family qc_family_mixtures[3] = {
    {.model_type = "mixtral",
     .architecture = "MixtralForCausalLM",
     .names = &qc_llama_names_plain,
     .ffn = QC_LLAMA_EXPERTS,
     .traits = QC_FAMILY_SLIDES,
     .kv_heads = 8,
     .bos = 1,
     .eos = 2,
     .theta = 1e6,
     .norm_eps = 1e-5},
    {.model_type = "qwen2_moe",
     .architecture = "Qwen2MoeForCausalLM",
     .names = &qc_llama_names_plain,
     .ffn = QC_LLAMA_EXPERTS,
     .traits = QC_FAMILY_QKV_BIAS | QC_FAMILY_SLIDES_IF_ASKED,
     .kv_heads = 16,
     .bos = -1,
     .eos = -1},
    {.model_type = "qwen3_moe",
     .architecture = "Qwen3MoeForCausalLM",
     .names = &with_head_norms,
     .ffn = QC_LLAMA_EXPERTS,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_HEAD_NORMS | QC_FAMILY_SLIDES_IF_ASKED,
     .kv_heads = 4,
     .bos = -1,
     .eos = -1},
};
