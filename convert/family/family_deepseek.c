/* DeepSeek-V2 and V3 (DeepSeek-AI 2024): multi-head latent attention. q, and keys and values, come
 * from latents with norms of their own; the part of a key that is turned is shared by all heads. */
#include "convert/family/family.h"
#include "convert/family/family_read.h"
#include "convert/model/config_fields.h"

#define LATENT                                                                                     \
    [QC_LAYER_K] = "self_attn.kv_a_proj_with_mqa", [QC_LAYER_KV_B] = "self_attn.kv_b_proj",        \
    [QC_LAYER_O] = "self_attn.o_proj", QC_NAMES_GATED

static const qc_layer_names names = {
    .matrices =
        {LATENT, [QC_LAYER_Q] = "self_attn.q_a_proj", [QC_LAYER_Q_B] = "self_attn.q_b_proj"},
    .vectors = {QC_NAMES_TWO_NORMS, [QC_LAYER_Q_A_NORM] = "self_attn.q_a_layernorm",
                [QC_LAYER_KV_A_NORM] = "self_attn.kv_a_layernorm"}};
/* Where q comes from the hidden states. */
static const qc_layer_names names_without_q_rank = {
    .matrices = {LATENT, [QC_LAYER_Q] = "self_attn.q_proj"},
    .vectors = {QC_NAMES_TWO_NORMS, [QC_LAYER_KV_A_NORM] = "self_attn.kv_a_layernorm"}};

static qc_status read_latents(qc_family_reader *r, qc_error *err)
{
    qc_forward_shape *s = r->out;
    qc_forward_config *c = &s->config;
    const qc_json_node *q_rank = qc_json_get(r->root, "q_lora_rank");
    uint64_t turned = 0, plain = 0;
    int neighbours = 1;
    QC_TRY(qc_read_count(r->root, "kv_lora_rank", 512, &s->kv_rank, err));
    QC_TRY(qc_read_count(r->root, "qk_rope_head_dim", 64, &turned, err));
    QC_TRY(qc_read_count(r->root, "qk_nope_head_dim", 128, &plain, err));
    QC_TRY(qc_read_count(r->root, "v_head_dim", 128, &s->value_dim, err));
    if (!q_rank || qc_json_kind_of(q_rank) != QC_JSON_NULL)
        QC_TRY(qc_read_count(r->root, "q_lora_rank", 1536, &s->q_rank, err));
    else
        s->names = &names_without_q_rank;
    QC_TRY(qc_read_flag(r->root, "rope_interleave", 1, &neighbours, err));
    if (!neighbours)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: rope_interleave is false, and rotary pairs are computed for "
                "neighbours only");
    c->kv_heads = c->heads;
    c->head_dim = plain + turned;
    s->turned = turned;
    s->turned_from = plain;
    return QC_OK;
}

#define TRAITS                                                                                     \
    (QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_SIDE_BY_SIDE |                \
     QC_FAMILY_SCALES_SCORES)

const qc_family qc_family_deepseek[2] = {
    {.model_type = "deepseek_v2",
     .architecture = "DeepseekV2ForCausalLM",
     .names = &names,
     .ffn = QC_LAYER_EXPERTS,
     .traits = TRAITS,
     .read = read_latents,
     .bos = 100000,
     .eos = 100001},
    {.model_type = "deepseek_v3",
     .architecture = "DeepseekV3ForCausalLM",
     .names = &names,
     .ffn = QC_LAYER_EXPERTS,
     .traits = TRAITS,
     .read = read_latents,
     .bos = 0,
     .eos = 1},
};
