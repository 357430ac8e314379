/* Qwen3.5 has attention with an output gate in every fourth layer and gated delta nets in the
 * others, a vision tower, and layers for multi-token prediction. The sources are
 * modeling_qwen3_5.py of transformers 5.23 and the names in released checkpoints. */
#include "convert/known/model_tensors_internal.h"

#define POSITIONS 2304u /* vision_config.num_position_embeddings if it is missing */

typedef struct {
    qc_tensor_maker *m;
    uint64_t intermediate, vocab;
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
        {"intermediate_size", &q->intermediate},
        {"linear_num_key_heads", &q->key_heads},
        {"linear_num_value_heads", &q->value_heads},
        {"linear_key_head_dim", &q->key_dim},
        {"linear_value_head_dim", &q->value_dim},
        {"linear_conv_kernel_dim", &q->kernel},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        QC_TRY(qc_maker_need(m, m->config.text, fields[i].name, QC_CONFIG_MAX_SIZE, fields[i].to,
                             err));
    return QC_OK;
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
    QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_qkv", mixed, hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_z", value, hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_b", q->value_heads, hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "linear_attn.in_proj_a", q->value_heads, hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "linear_attn.out_proj", hidden, value, 0, err));
    QC_TRY(qc_maker_add(m, "linear_attn.conv1d.weight", m->dtype, 3,
                        (uint64_t[]){mixed, 1, q->kernel}, err));
    QC_TRY(qc_maker_vector(m, "linear_attn.dt_bias", q->value_heads, err));
    QC_TRY(qc_maker_add(m, "linear_attn.A_log", QC_DTYPE_F32, 1, &q->value_heads, err));
    return qc_maker_add(m, "linear_attn.norm.weight", QC_DTYPE_F32, 1, &q->value_dim, err);
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
    QC_TRY(qc_maker_linear(m, "mlp.gate_proj", q->intermediate, hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "mlp.up_proj", q->intermediate, hidden, 0, err));
    return qc_maker_linear(m, "mlp.down_proj", hidden, q->intermediate, 0, err);
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
    qwen35 q = {.m = m};
    QC_TRY(read_text(&q, err));
    for (uint32_t i = 0; i < g->layer_count; i++)
        QC_TRY(add_layer(&q, "model.language_model.layers.", i,
                         g->layers[i].attention == QC_ATTENTION_FULL, err));
    QC_TRY(add_prediction(&q, err));
    QC_TRY(add_tower(m, err));
    qc_maker_prefix(m, "", UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "model.language_model.embed_tokens.weight", q.vocab, g->hidden, err));
    QC_TRY(qc_maker_vector(m, "model.language_model.norm.weight", g->hidden, err));
    if (qc_config_flag(&m->config, "tie_word_embeddings", 0))
        return QC_OK;
    return qc_maker_matrix(m, "lm_head.weight", q.vocab, g->hidden, err);
}
