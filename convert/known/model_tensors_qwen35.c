/* Qwen3.5 has attention with an output gate in every fourth layer and gated delta nets in the
 * others, a vision tower, and layers for multi-token prediction. qwen3_5_moe has stacks of experts.
 * Qwen3-Next has its experts one by one, other projections of the delta nets, and no tower. The
 * sources are the modeling_*.py of transformers 5.23 and 4.57, and the names in released
 * checkpoints. */
#include "convert/known/model_tensors_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define POSITIONS 2304u /* vision_config.num_position_embeddings if it is missing */

typedef struct {
    qc_tensor_maker *m;
    const char *base; /* of the names: "model.language_model." */
    int next;         /* it is Qwen3-Next */
    uint64_t intermediate, vocab;
    uint64_t moe, shared;                                        /* widths of experts; 0: none */
    uint64_t key_heads, value_heads, key_dim, value_dim, kernel; /* of the delta nets */
} qwen35;

static qc_status read_text(qwen35 *q, qc_error *err)
{
    const qc_tensor_maker *m = q->m;
    const struct {
        const char *name;
        uint64_t *to;
    } fields[] = {
        {"vocab_size", &q->vocab},
        {"linear_num_key_heads", &q->key_heads},
        {"linear_num_value_heads", &q->value_heads},
        {"linear_key_head_dim", &q->key_dim},
        {"linear_value_head_dim", &q->value_dim},
        {"linear_conv_kernel_dim", &q->kernel},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        QC_TRY(qc_maker_need(m, m->config.text, fields[i].name, QC_CONFIG_MAX_SIZE, fields[i].to,
                             err));
    const qc_json_node *text = m->config.text;
    if (strcmp(m->config.model_type, "qwen3_5") == 0)
        return qc_maker_need(m, text, "intermediate_size", QC_CONFIG_MAX_SIZE, &q->intermediate,
                             err);
    const qc_json_node *dense = qc_config_field(text, "mlp_only_layers");
    uint64_t step = 0;
    QC_TRY(qc_config_read(&step, &m->config, "decoder_sparse_step", QC_CONFIG_MAX_SIZE, 1, err));
    if (m->g->experts == 0 || step != 1 ||
        (dense && (qc_json_kind_of(dense) != QC_JSON_ARRAY || qc_json_first(dense))))
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: the tensors of a %s can be worked out only with experts in every "
                "layer; give the checkpoint itself",
                m->config.model_type);
    QC_TRY(qc_maker_need(m, text, "moe_intermediate_size", QC_CONFIG_MAX_SIZE, &q->moe, err));
    return qc_maker_need(m, text, "shared_expert_intermediate_size", QC_CONFIG_MAX_SIZE, &q->shared,
                         err);
}

/* q_proj holds the gate of the output beside the queries. */
static qc_status add_attention(const qwen35 *q, qc_error *err)
{
    qc_tensor_maker *m = q->m;
    const qc_geometry *g = m->g;
    uint64_t wide = g->heads * g->head_dim, kv = g->kv_heads * g->head_dim;
    QC_TRY(qc_maker_linear(m, "self_attn.q_proj", 2 * wide, g->hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "self_attn.k_proj", kv, g->hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "self_attn.v_proj", kv, g->hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "self_attn.o_proj", g->hidden, wide, 0, err));
    QC_TRY(qc_maker_vector(m, "self_attn.q_norm.weight", g->head_dim, err));
    return qc_maker_vector(m, "self_attn.k_norm.weight", g->head_dim, err);
}

static qc_status add_delta_net(const qwen35 *q, qc_error *err)
{
    qc_tensor_maker *m = q->m;
    uint64_t hidden = m->g->hidden, value = q->value_heads * q->value_dim;
    uint64_t mixed = 2 * q->key_heads * q->key_dim + value;
    if (q->next) {
        QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_qkvz", mixed + value, hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_ba", 2 * q->value_heads, hidden, 0, err));
    } else {
        QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_qkv", mixed, hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_z", value, hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_b", q->value_heads, hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_a", q->value_heads, hidden, 0, err));
    }
    QC_TRY(qc_maker_linear(m, "linear_attn.out_proj", hidden, value, 0, err));
    QC_TRY(qc_maker_add(m, "linear_attn.conv1d.weight", m->dtype, 3,
                        (uint64_t[]){mixed, 1, q->kernel}, err));
    QC_TRY(qc_maker_vector(m, "linear_attn.dt_bias", q->value_heads, err));
    QC_TRY(qc_maker_add(m, "linear_attn.A_log", QC_DTYPE_F32, 1, &q->value_heads, err));
    return qc_maker_add(m, "linear_attn.norm.weight", QC_DTYPE_F32, 1, &q->value_dim, err);
}

static qc_status add_gated(qc_tensor_maker *m, const char *module, uint64_t width, qc_error *err)
{
    char name[64];
    (void)snprintf(name, sizeof name, "%s.gate_proj", module);
    QC_TRY(qc_maker_linear(m, name, width, m->g->hidden, 0, err));
    (void)snprintf(name, sizeof name, "%s.up_proj", module);
    QC_TRY(qc_maker_linear(m, name, width, m->g->hidden, 0, err));
    (void)snprintf(name, sizeof name, "%s.down_proj", module);
    return qc_maker_linear(m, name, m->g->hidden, width, 0, err);
}

/* Adds router, experts and the shared expert. Stacks are [experts, out, in]. */
static qc_status add_experts(const qwen35 *q, qc_error *err)
{
    qc_tensor_maker *m = q->m;
    uint64_t experts = m->g->experts, hidden = m->g->hidden;
    QC_TRY(qc_maker_matrix(m, "mlp.gate.weight", experts, hidden, err));
    for (uint64_t e = 0; q->next && e < experts; e++) {
        char name[40];
        (void)snprintf(name, sizeof name, "mlp.experts.%" PRIu64, e);
        QC_TRY(add_gated(m, name, q->moe, err));
    }
    if (!q->next) {
        QC_TRY(qc_maker_add(m, "mlp.experts.gate_up_proj", m->dtype, 3,
                            (uint64_t[]){experts, 2 * q->moe, hidden}, err));
        QC_TRY(qc_maker_add(m, "mlp.experts.down_proj", m->dtype, 3,
                            (uint64_t[]){experts, hidden, q->moe}, err));
    }
    QC_TRY(add_gated(m, "mlp.shared_expert", q->shared, err));
    return qc_maker_matrix(m, "mlp.shared_expert_gate.weight", 1, hidden, err);
}

static qc_status add_layer(const qwen35 *q, const char *base, uint64_t number, int full,
                           qc_error *err)
{
    qc_tensor_maker *m = q->m;
    uint64_t hidden = m->g->hidden;
    qc_maker_prefix(m, base, number);
    QC_TRY(qc_maker_vector(m, "input_layernorm.weight", hidden, err));
    QC_TRY(qc_maker_vector(m, "post_attention_layernorm.weight", hidden, err));
    QC_TRY(full ? add_attention(q, err) : add_delta_net(q, err));
    return q->moe ? add_experts(q, err) : add_gated(m, "mlp", q->intermediate, err);
}

static qc_status add_prediction(const qwen35 *q, qc_error *err)
{
    qc_tensor_maker *m = q->m;
    uint64_t count = 0, hidden = m->g->hidden;
    QC_TRY(qc_config_read(&count, &m->config, "mtp_num_hidden_layers", 16, 0, err));
    for (uint64_t i = 0; i < count; i++)
        QC_TRY(add_layer(q, "mtp.layers.", i, 1, err));
    if (count == 0)
        return QC_OK;
    qc_maker_prefix(m, "mtp.", UINT64_MAX);
    QC_TRY(qc_maker_linear(m, "fc", hidden, 2 * hidden, 0, err));
    QC_TRY(qc_maker_vector(m, "pre_fc_norm_embedding.weight", hidden, err));
    QC_TRY(qc_maker_vector(m, "pre_fc_norm_hidden.weight", hidden, err));
    return qc_maker_vector(m, "norm.weight", hidden, err);
}

static qc_status add_tower(qc_tensor_maker *m, qc_error *err)
{
    const qc_json_node *c = m->config.vision;
    uint64_t hidden = 0, width = 0, depth = 0, out = 0, patch = 0, frames = 0, merge = 0;
    uint64_t positions = 0, channels = 0;
    QC_TRY(qc_maker_need(m, c, "hidden_size", QC_CONFIG_MAX_SIZE, &hidden, err));
    QC_TRY(qc_maker_need(m, c, "intermediate_size", QC_CONFIG_MAX_SIZE, &width, err));
    QC_TRY(qc_maker_need(m, c, "depth", QC_CONFIG_MAX_LAYERS, &depth, err));
    QC_TRY(qc_maker_need(m, c, "out_hidden_size", QC_CONFIG_MAX_SIZE, &out, err));
    QC_TRY(qc_maker_need(m, c, "patch_size", QC_CONFIG_MAX_SIZE, &patch, err));
    QC_TRY(qc_maker_need(m, c, "temporal_patch_size", QC_CONFIG_MAX_SIZE, &frames, err));
    QC_TRY(qc_maker_need(m, c, "spatial_merge_size", QC_CONFIG_MAX_LAYERS, &merge, err));
    QC_TRY(qc_config_count(&positions, qc_config_field(c, "num_position_embeddings"),
                           QC_CONFIG_MAX_SIZE, POSITIONS, err));
    QC_TRY(
        qc_config_count(&channels, qc_config_field(c, "in_channels"), QC_CONFIG_MAX_SIZE, 3, err));
    for (uint64_t i = 0; i < depth; i++) {
        qc_maker_prefix(m, "model.visual.blocks.", i);
        QC_TRY(qc_maker_layer_norm(m, "norm1", hidden, err));
        QC_TRY(qc_maker_layer_norm(m, "norm2", hidden, err));
        QC_TRY(qc_maker_linear(m, "attn.qkv", 3 * hidden, hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "attn.proj", hidden, hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.linear_fc1", width, hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.linear_fc2", hidden, width, 1, err));
    }
    qc_maker_prefix(m, "model.visual.", UINT64_MAX);
    QC_TRY(qc_maker_add(m, "patch_embed.proj.weight", m->dtype, 5,
                        (uint64_t[]){hidden, channels, frames, patch, patch}, err));
    QC_TRY(qc_maker_vector(m, "patch_embed.proj.bias", hidden, err));
    QC_TRY(qc_maker_matrix(m, "pos_embed.weight", positions, hidden, err));
    QC_TRY(qc_maker_layer_norm(m, "merger.norm", hidden, err));
    uint64_t merged = hidden * merge * merge;
    QC_TRY(qc_maker_linear(m, "merger.linear_fc1", merged, merged, 1, err));
    return qc_maker_linear(m, "merger.linear_fc2", out, merged, 1, err);
}

qc_status qc_maker_qwen35(qc_tensor_maker *m, qc_error *err)
{
    const qc_geometry *g = m->g;
    qwen35 q = {.m = m, .next = strcmp(m->config.model_type, "qwen3_next") == 0};
    char layers[32];
    q.base = q.next ? "model." : "model.language_model.";
    QC_TRY(read_text(&q, err));
    (void)snprintf(layers, sizeof layers, "%slayers.", q.base);
    for (uint32_t i = 0; i < g->layer_count; i++)
        QC_TRY(add_layer(&q, layers, i, g->layers[i].attention == QC_ATTENTION_FULL, err));
    QC_TRY(add_prediction(&q, err));
    if (!q.next)
        QC_TRY(add_tower(m, err));
    qc_maker_prefix(m, q.base, UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "embed_tokens.weight", q.vocab, g->hidden, err));
    QC_TRY(qc_maker_vector(m, "norm.weight", g->hidden, err));
    if (qc_config_flag(&m->config, "tie_word_embeddings", 0))
        return QC_OK;
    qc_maker_prefix(m, "", UINT64_MAX);
    return qc_maker_matrix(m, "lm_head.weight", q.vocab, g->hidden, err);
}
