#include "convert/fit/split_names.h"

#include "convert/families/config_fields.h"

#include <string.h>

/* By the name of the module, or of the tensor where it is no module's ".weight" or the like. */
static const struct {
    const char *name;
    qc_split split;
} rules[] = {
    {"q_proj", QC_SPLIT_COLUMNS},
    {"k_proj", QC_SPLIT_KV_HEADS},
    {"v_proj", QC_SPLIT_KV_HEADS},
    {"qkv_proj", QC_SPLIT_FUSED_QKV},
    {"o_proj", QC_SPLIT_ROWS},
    {"gate_proj", QC_SPLIT_COLUMNS},
    {"up_proj", QC_SPLIT_COLUMNS},
    {"gate_up_proj", QC_SPLIT_COLUMNS},
    {"down_proj", QC_SPLIT_ROWS},
    {"w1", QC_SPLIT_COLUMNS},
    {"w3", QC_SPLIT_COLUMNS},
    {"w2", QC_SPLIT_ROWS},
    {"embed_tokens", QC_SPLIT_VOCABULARY},
    {"lm_head", QC_SPLIT_VOCABULARY},
    /* DeepSeek's latent attention */
    {"q_a_proj", QC_SPLIT_WHOLE},
    {"q_b_proj", QC_SPLIT_COLUMNS},
    {"kv_a_proj_with_mqa", QC_SPLIT_WHOLE},
    {"kv_b_proj", QC_SPLIT_COLUMNS},
    /* routers */
    {"gate", QC_SPLIT_WHOLE},
    {"router", QC_SPLIT_WHOLE},
    {"shared_expert_gate", QC_SPLIT_WHOLE},
    {"gate.e_score_correction_bias", QC_SPLIT_WHOLE},
    /* norms */
    {"norm", QC_SPLIT_WHOLE},
    {"q_norm", QC_SPLIT_WHOLE},
    {"k_norm", QC_SPLIT_WHOLE},
    {"input_layernorm", QC_SPLIT_WHOLE},
    {"post_attention_layernorm", QC_SPLIT_WHOLE},
    {"pre_feedforward_layernorm", QC_SPLIT_WHOLE},
    {"post_feedforward_layernorm", QC_SPLIT_WHOLE},
    {"q_a_layernorm", QC_SPLIT_WHOLE},
    {"kv_a_layernorm", QC_SPLIT_WHOLE},
    /* gpt-oss: experts in MXFP4, and their biases */
    {"gate_up_proj_blocks", QC_SPLIT_COLUMNS},
    {"gate_up_proj_scales", QC_SPLIT_COLUMNS},
    {"gate_up_proj_bias", QC_SPLIT_COLUMNS},
    {"down_proj_blocks", QC_SPLIT_ROWS},
    {"down_proj_scales", QC_SPLIT_ROWS},
    {"down_proj_bias", QC_SPLIT_ROWS},
    {"sinks", QC_SPLIT_SINKS},
    {"rotary_emb.inv_freq", QC_SPLIT_ABSENT},
};

static const char parameters[] = " weight bias weight_packed weight_scale weight_scale_inv "
                                 "weight_shape weight_zero_point ";

const char *qc_split_last(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

const char *qc_split_parameter(const char *name)
{
    const char *last = qc_split_last(name);
    return strchr(name, '.') && qc_config_word_in(last, parameters) ? last : "";
}

qc_split qc_split_of(const char *name)
{
    size_t len = strlen(name), tail = strlen(qc_split_parameter(name));
    len -= tail > 0 ? tail + 1 : 0;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        size_t n = strlen(rules[i].name);
        if (len >= n && memcmp(name + len - n, rules[i].name, n) == 0 &&
            (len == n || name[len - n - 1] == '.'))
            return rules[i].split;
    }
    return QC_SPLIT_UNKNOWN;
}
