/* A decoder beside a vision tower: gemma3 (SigLIP), mistral3 (Pixtral) and llama4. The sources are
 * the modeling_*.py of transformers 4.57 and the names in released checkpoints. */
#include "convert/known/model_tensors_internal.h"

#include <string.h>

#define MERGE 2u /* mistral3's spatial_merge_size if it is missing */

typedef struct {
    uint64_t hidden, intermediate, layers, channels, patch, image;
} tower;

static qc_status read_tower(const qc_tensor_maker *m, tower *t, qc_error *err)
{
    const qc_json_node *c = m->config.vision;
    QC_TRY(qc_maker_need(m, c, "hidden_size", QC_CONFIG_MAX_SIZE, &t->hidden, err));
    QC_TRY(qc_maker_need(m, c, "intermediate_size", QC_CONFIG_MAX_SIZE, &t->intermediate, err));
    QC_TRY(qc_maker_need(m, c, "num_hidden_layers", QC_CONFIG_MAX_LAYERS, &t->layers, err));
    QC_TRY(qc_maker_need(m, c, "patch_size", QC_CONFIG_MAX_LAYERS, &t->patch, err));
    QC_TRY(qc_maker_need(m, c, "image_size", QC_CONFIG_MAX_SIZE, &t->image, err));
    return qc_config_count(&t->channels, qc_config_field(c, "num_channels"), QC_CONFIG_MAX_SIZE, 3,
                           err);
}

static qc_status add_patches(qc_tensor_maker *m, const char *name, const tower *t, qc_error *err)
{
    return qc_maker_add(m, name, m->dtype, 4,
                        (uint64_t[]){t->hidden, t->channels, t->patch, t->patch}, err);
}

/* Adds linear layers from hidden to hidden below "attention.". */
static qc_status add_square(qc_tensor_maker *m, const char *const names[4], uint64_t n, int bias,
                            qc_error *err)
{
    for (int i = 0; i < 4; i++)
        QC_TRY(qc_maker_linear(m, names[i], n, n, bias, err));
    return QC_OK;
}

/* ---- SigLIP ---- */

static qc_status add_siglip(qc_tensor_maker *m, const tower *t, qc_error *err)
{
    static const char *const attention[4] = {"self_attn.q_proj", "self_attn.k_proj",
                                             "self_attn.v_proj", "self_attn.out_proj"};
    uint64_t side = t->image / t->patch;
    for (uint64_t i = 0; i < t->layers; i++) {
        qc_maker_prefix(m, "vision_tower.vision_model.encoder.layers.", i);
        QC_TRY(add_square(m, attention, t->hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.fc1", t->intermediate, t->hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.fc2", t->hidden, t->intermediate, 1, err));
        QC_TRY(qc_maker_layer_norm(m, "layer_norm1", t->hidden, err));
        QC_TRY(qc_maker_layer_norm(m, "layer_norm2", t->hidden, err));
    }
    qc_maker_prefix(m, "vision_tower.vision_model.", UINT64_MAX);
    QC_TRY(add_patches(m, "embeddings.patch_embedding.weight", t, err));
    QC_TRY(qc_maker_vector(m, "embeddings.patch_embedding.bias", t->hidden, err));
    QC_TRY(qc_maker_matrix(m, "embeddings.position_embedding.weight", side * side, t->hidden, err));
    QC_TRY(qc_maker_layer_norm(m, "post_layernorm", t->hidden, err));
    qc_maker_prefix(m, "multi_modal_projector.", UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "mm_input_projection_weight", t->hidden, m->g->hidden, err));
    return qc_maker_vector(m, "mm_soft_emb_norm.weight", t->hidden, err);
}

/* ---- Pixtral ---- */

static qc_status add_pixtral(qc_tensor_maker *m, const tower *t, qc_error *err)
{
    static const char *const attention[4] = {"attention.q_proj", "attention.k_proj",
                                             "attention.v_proj", "attention.o_proj"};
    uint64_t merge = 0, hidden = m->g->hidden;
    int bias = qc_json_bool_or(qc_config_field(m->config.root, "multimodal_projector_bias"), 0);
    QC_TRY(qc_config_count(&merge, qc_config_field(m->config.root, "spatial_merge_size"),
                           QC_CONFIG_MAX_LAYERS, MERGE, err));
    for (uint64_t i = 0; i < t->layers; i++) {
        qc_maker_prefix(m, "vision_tower.transformer.layers.", i);
        QC_TRY(add_square(m, attention, t->hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "feed_forward.gate_proj", t->intermediate, t->hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "feed_forward.up_proj", t->intermediate, t->hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "feed_forward.down_proj", t->hidden, t->intermediate, 0, err));
        QC_TRY(qc_maker_vector(m, "attention_norm.weight", t->hidden, err));
        QC_TRY(qc_maker_vector(m, "ffn_norm.weight", t->hidden, err));
    }
    qc_maker_prefix(m, "vision_tower.", UINT64_MAX);
    QC_TRY(add_patches(m, "patch_conv.weight", t, err));
    QC_TRY(qc_maker_vector(m, "ln_pre.weight", t->hidden, err));
    qc_maker_prefix(m, "multi_modal_projector.", UINT64_MAX);
    QC_TRY(qc_maker_vector(m, "norm.weight", t->hidden, err));
    QC_TRY(qc_maker_linear(m, "patch_merger.merging_layer", t->hidden, t->hidden * merge * merge, 0,
                           err));
    QC_TRY(qc_maker_linear(m, "linear_1", hidden, t->hidden, bias, err));
    return qc_maker_linear(m, "linear_2", hidden, hidden, bias, err);
}

/* ---- Llama 4 ---- */

static qc_status add_llama4(qc_tensor_maker *m, const tower *t, qc_error *err)
{
    static const char *const attention[4] = {"self_attn.q_proj", "self_attn.k_proj",
                                             "self_attn.v_proj", "self_attn.o_proj"};
    const qc_json_node *c = m->config.vision;
    uint64_t in = 0, out = 0, side = t->image / t->patch;
    QC_TRY(qc_maker_need(m, c, "projector_input_dim", QC_CONFIG_MAX_SIZE, &in, err));
    QC_TRY(qc_maker_need(m, c, "projector_output_dim", QC_CONFIG_MAX_SIZE, &out, err));
    for (uint64_t i = 0; i < t->layers; i++) {
        qc_maker_prefix(m, "vision_model.model.layers.", i);
        QC_TRY(add_square(m, attention, t->hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.fc1", t->intermediate, t->hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.fc2", t->hidden, t->intermediate, 1, err));
        QC_TRY(qc_maker_layer_norm(m, "input_layernorm", t->hidden, err));
        QC_TRY(qc_maker_layer_norm(m, "post_attention_layernorm", t->hidden, err));
    }
    qc_maker_prefix(m, "vision_model.", UINT64_MAX);
    QC_TRY(qc_maker_vector(m, "class_embedding", t->hidden, err));
    QC_TRY(qc_maker_matrix(m, "positional_embedding_vlm", side * side + 1, t->hidden, err));
    QC_TRY(qc_maker_matrix(m, "patch_embedding.linear.weight", t->hidden,
                           t->channels * t->patch * t->patch, err));
    QC_TRY(qc_maker_layer_norm(m, "layernorm_pre", t->hidden, err));
    QC_TRY(qc_maker_layer_norm(m, "layernorm_post", t->hidden, err));
    QC_TRY(qc_maker_linear(m, "vision_adapter.mlp.fc1", in, t->intermediate, 0, err));
    QC_TRY(qc_maker_linear(m, "vision_adapter.mlp.fc2", out, out, 0, err));
    qc_maker_prefix(m, "multi_modal_projector.", UINT64_MAX);
    return qc_maker_linear(m, "linear_1", m->g->hidden, out, 0, err);
}

qc_status qc_maker_with_tower(qc_tensor_maker *m, qc_error *err)
{
    tower t = {0};
    QC_TRY(read_tower(m, &t, err));
    QC_TRY(qc_maker_decoder(m, "language_model.", err));
    if (strcmp(m->config.model_type, "llama4") == 0)
        return add_llama4(m, &t, err);
    return strcmp(m->config.model_type, "gemma3") == 0 ? add_siglip(m, &t, err)
                                                       : add_pixtral(m, &t, err);
}
