/* Families that are not built like Llama. The sources are the modeling_*.py of transformers 4.57
 * and the names in released checkpoints. */
#include "convert/known/model_tensors_internal.h"

#include "base/checked.h"

#include <stdio.h>
#include <string.h>

#define MLLAMA_EXTRA_ROWS 8u /* special tokens that vocab_size does not count */

/* ---- mllama ---- */

typedef struct {
    uint64_t hidden, intermediate, channels, patch, tiles, ratios, positions, out;
} mllama_vision;

static qc_status mllama_vision_layers(qc_tensor_maker *m, const mllama_vision *v, const char *base,
                                      uint64_t count, int gated, qc_error *err)
{
    static const char *const attention[] = {"self_attn.q_proj", "self_attn.k_proj",
                                            "self_attn.v_proj", "self_attn.o_proj"};
    for (uint64_t i = 0; i < count; i++) {
        qc_maker_prefix(m, base, i);
        for (size_t k = 0; k < sizeof attention / sizeof *attention; k++)
            QC_TRY(qc_maker_linear(m, attention[k], v->hidden, v->hidden, 0, err));
        QC_TRY(qc_maker_linear(m, "mlp.fc1", v->intermediate, v->hidden, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.fc2", v->hidden, v->intermediate, 1, err));
        QC_TRY(qc_maker_layer_norm(m, "input_layernorm", v->hidden, err));
        QC_TRY(qc_maker_layer_norm(m, "post_attention_layernorm", v->hidden, err));
        if (!gated)
            continue;
        QC_TRY(qc_maker_vector(m, "gate_attn", 1, err));
        QC_TRY(qc_maker_vector(m, "gate_ffn", 1, err));
    }
    return QC_OK;
}

static qc_status read_mllama_vision(const qc_tensor_maker *m, mllama_vision *v, qc_error *err)
{
    const qc_json_node *c = m->config.vision;
    const struct {
        const char *name;
        uint64_t *to;
    } fields[] = {
        {"hidden_size", &v->hidden},    {"intermediate_size", &v->intermediate},
        {"patch_size", &v->patch},      {"max_num_tiles", &v->tiles},
        {"num_channels", &v->channels}, {"vision_output_dim", &v->out},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        QC_TRY(qc_maker_need(m, c, fields[i].name, QC_CONFIG_MAX_SIZE, fields[i].to, err));
    const qc_json_node *list = qc_config_field(c, "supported_aspect_ratios");
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(
            err, QC_ERR_INPUT,
            "config.json: supported_aspect_ratios is missing, so the tensors cannot be worked out");
    v->ratios = 1; /* and one more for padding */
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n))
        v->ratios++;
    v->positions = m->g->media_positions / v->tiles;
    return QC_OK;
}

static qc_status mllama_tower(qc_tensor_maker *m, const mllama_vision *v, qc_error *err)
{
    const qc_json_node *c = m->config.vision;
    uint64_t local = 0, global = 0, tile_row = 0, tiles_row = 0;
    QC_TRY(qc_maker_need(m, c, "num_hidden_layers", QC_CONFIG_MAX_LAYERS, &local, err));
    QC_TRY(qc_maker_need(m, c, "num_global_layers", QC_CONFIG_MAX_LAYERS, &global, err));
    QC_TRY(mllama_vision_layers(m, v, "vision_model.transformer.layers.", local, 0, err));
    QC_TRY(mllama_vision_layers(m, v, "vision_model.global_transformer.layers.", global, 1, err));
    if (qc_mul_u64(v->tiles, v->hidden, &tile_row) ||
        qc_mul_u64(tile_row, v->positions, &tiles_row))
        QC_FAIL(err, QC_ERR_INPUT, "config.json: the vision tower's sizes overflow 64 bits");
    qc_maker_prefix(m, "vision_model.", UINT64_MAX);
    QC_TRY(qc_maker_vector(m, "class_embedding", v->hidden, err));
    QC_TRY(
        qc_maker_matrix(m, "gated_positional_embedding.embedding", v->positions, v->hidden, err));
    QC_TRY(qc_maker_vector(m, "gated_positional_embedding.gate", 1, err));
    QC_TRY(qc_maker_matrix(m, "gated_positional_embedding.tile_embedding.weight", v->ratios,
                           tiles_row, err));
    QC_TRY(qc_maker_layer_norm(m, "layernorm_post", v->hidden, err));
    QC_TRY(qc_maker_layer_norm(m, "layernorm_pre", v->hidden, err));
    QC_TRY(qc_maker_add(m, "patch_embedding.weight", m->dtype, 4,
                        (uint64_t[]){v->hidden, v->channels, v->patch, v->patch}, err));
    QC_TRY(qc_maker_matrix(m, "post_tile_positional_embedding.embedding.weight", v->ratios,
                           tile_row, err));
    QC_TRY(qc_maker_vector(m, "post_tile_positional_embedding.gate", 1, err));
    QC_TRY(qc_maker_matrix(m, "pre_tile_positional_embedding.embedding.weight", v->ratios, tile_row,
                           err));
    QC_TRY(qc_maker_vector(m, "pre_tile_positional_embedding.gate", 1, err));
    qc_maker_prefix(m, "", UINT64_MAX);
    return qc_maker_linear(m, "multi_modal_projector", m->g->hidden, v->out, 1, err);
}

static qc_status mllama_layer(qc_tensor_maker *m, int cross, uint64_t width, qc_error *err)
{
    const qc_geometry *g = m->g;
    const char *attention = cross ? "cross_attn" : "self_attn";
    uint64_t q = g->heads * g->head_dim, kv = g->kv_heads * g->head_dim;
    const struct {
        const char *name;
        uint64_t out, in;
    } parts[] = {
        {"q_proj", q, g->hidden},
        {"k_proj", kv, g->hidden},
        {"v_proj", kv, g->hidden},
        {"o_proj", g->hidden, q},
    };
    char name[64];
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        (void)snprintf(name, sizeof name, "%s.%s", attention, parts[i].name);
        QC_TRY(qc_maker_linear(m, name, parts[i].out, parts[i].in, 0, err));
    }
    QC_TRY(qc_maker_linear(m, "mlp.gate_proj", width, g->hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "mlp.up_proj", width, g->hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "mlp.down_proj", g->hidden, width, 0, err));
    QC_TRY(qc_maker_vector(m, "input_layernorm.weight", g->hidden, err));
    QC_TRY(qc_maker_vector(m, "post_attention_layernorm.weight", g->hidden, err));
    if (!cross)
        return QC_OK;
    QC_TRY(qc_maker_vector(m, "cross_attn.q_norm.weight", g->head_dim, err));
    QC_TRY(qc_maker_vector(m, "cross_attn.k_norm.weight", g->head_dim, err));
    QC_TRY(qc_maker_vector(m, "cross_attn_attn_gate", 1, err));
    return qc_maker_vector(m, "cross_attn_mlp_gate", 1, err);
}

qc_status qc_maker_mllama(qc_tensor_maker *m, qc_error *err)
{
    const qc_geometry *g = m->g;
    mllama_vision v = {0};
    uint64_t width = 0, vocab = 0;
    QC_TRY(read_mllama_vision(m, &v, err));
    QC_TRY(qc_maker_need(m, m->config.text, "intermediate_size", QC_CONFIG_MAX_SIZE, &width, err));
    QC_TRY(qc_maker_need(m, m->config.text, "vocab_size", QC_CONFIG_MAX_SIZE, &vocab, err));
    for (uint32_t i = 0; i < g->layer_count; i++) {
        qc_maker_prefix(m, "language_model.model.layers.", i);
        QC_TRY(mllama_layer(m, g->layers[i].attention == QC_ATTENTION_CROSS, width, err));
    }
    qc_maker_prefix(m, "language_model.", UINT64_MAX);
    QC_TRY(
        qc_maker_matrix(m, "model.embed_tokens.weight", vocab + MLLAMA_EXTRA_ROWS, g->hidden, err));
    QC_TRY(qc_maker_vector(m, "model.norm.weight", g->hidden, err));
    QC_TRY(qc_maker_matrix(m, "lm_head.weight", vocab, g->hidden, err));
    return mllama_tower(m, &v, err);
}

/* ---- BERT ---- */

static const char *architecture(const qc_tensor_maker *m)
{
    const qc_json_node *list = qc_config_field(m->config.root, "architectures");
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY || !qc_json_first(list))
        return "";
    return qc_json_string_or(qc_json_first(list), "");
}

static qc_status bert_layer(qc_tensor_maker *m, uint64_t width, qc_error *err)
{
    uint64_t h = m->g->hidden;
    QC_TRY(qc_maker_linear(m, "attention.self.query", h, h, 1, err));
    QC_TRY(qc_maker_linear(m, "attention.self.key", h, h, 1, err));
    QC_TRY(qc_maker_linear(m, "attention.self.value", h, h, 1, err));
    QC_TRY(qc_maker_linear(m, "attention.output.dense", h, h, 1, err));
    QC_TRY(qc_maker_layer_norm(m, "attention.output.LayerNorm", h, err));
    QC_TRY(qc_maker_linear(m, "intermediate.dense", width, h, 1, err));
    QC_TRY(qc_maker_linear(m, "output.dense", h, width, 1, err));
    return qc_maker_layer_norm(m, "output.LayerNorm", h, err);
}

/* Adds a BertModel by itself, or below "bert." with the heads that it was trained with. */
qc_status qc_maker_bert(qc_tensor_maker *m, qc_error *err)
{
    const char *kind = architecture(m);
    int masked = strcmp(kind, "BertForMaskedLM") == 0;
    int heads = masked || strcmp(kind, "BertForPreTraining") == 0;
    uint64_t h = m->g->hidden, vocab = 0, width = 0, positions = 0, types = 0;
    const qc_json_node *c = m->config.text;
    if (!heads && kind[0] != '\0' && strcmp(kind, "BertModel") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: the tensors of '%.*s' cannot be worked out, but only those of "
                "BertModel, BertForMaskedLM and BertForPreTraining; give the checkpoint itself",
                80, kind);
    QC_TRY(qc_maker_need(m, c, "vocab_size", QC_CONFIG_MAX_SIZE, &vocab, err));
    QC_TRY(qc_maker_need(m, c, "intermediate_size", QC_CONFIG_MAX_SIZE, &width, err));
    QC_TRY(qc_maker_need(m, c, "max_position_embeddings", QC_CONFIG_MAX_SIZE, &positions, err));
    QC_TRY(qc_config_read(&types, &m->config, "type_vocab_size", QC_CONFIG_MAX_SIZE, 2, err));
    const char *base = heads ? "bert." : "";
    char layers[32];
    (void)snprintf(layers, sizeof layers, "%sencoder.layer.", base);
    for (uint32_t i = 0; i < m->g->layer_count; i++) {
        qc_maker_prefix(m, layers, i);
        QC_TRY(bert_layer(m, width, err));
    }
    qc_maker_prefix(m, base, UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "embeddings.word_embeddings.weight", vocab, h, err));
    QC_TRY(qc_maker_matrix(m, "embeddings.position_embeddings.weight", positions, h, err));
    QC_TRY(qc_maker_matrix(m, "embeddings.token_type_embeddings.weight", types, h, err));
    QC_TRY(qc_maker_layer_norm(m, "embeddings.LayerNorm", h, err));
    if (!masked)
        QC_TRY(qc_maker_linear(m, "pooler.dense", h, h, 1, err));
    if (!heads)
        return QC_OK;
    qc_maker_prefix(m, "cls.", UINT64_MAX);
    QC_TRY(qc_maker_vector(m, "predictions.bias", vocab, err));
    QC_TRY(qc_maker_linear(m, "predictions.transform.dense", h, h, 1, err));
    QC_TRY(qc_maker_layer_norm(m, "predictions.transform.LayerNorm", h, err));
    return masked ? QC_OK : qc_maker_linear(m, "seq_relationship", 2, h, 1, err);
}

/* ---- GPT-2: Conv1D, [in, out] ---- */

static qc_status add_conv1d(qc_tensor_maker *m, const char *module, uint64_t in, uint64_t out,
                            qc_error *err)
{
    char name[64];
    (void)snprintf(name, sizeof name, "%s.weight", module);
    QC_TRY(qc_maker_matrix(m, name, in, out, err));
    (void)snprintf(name, sizeof name, "%s.bias", module);
    return qc_maker_vector(m, name, out, err);
}

qc_status qc_maker_gpt2(qc_tensor_maker *m, qc_error *err)
{
    uint64_t h = m->g->hidden, width = m->g->intermediate;
    const char *base = strcmp(architecture(m), "GPT2Model") == 0 ? "" : "transformer.";
    char layers[32];
    if (m->g->vocab == 0 || m->g->max_context == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: vocab_size or n_positions is missing, so the tensors cannot be "
                "worked out");
    (void)snprintf(layers, sizeof layers, "%sh.", base);
    for (uint32_t i = 0; i < m->g->layer_count; i++) {
        qc_maker_prefix(m, layers, i);
        QC_TRY(qc_maker_layer_norm(m, "ln_1", h, err));
        QC_TRY(add_conv1d(m, "attn.c_attn", h, 3 * h, err));
        QC_TRY(add_conv1d(m, "attn.c_proj", h, h, err));
        QC_TRY(qc_maker_layer_norm(m, "ln_2", h, err));
        QC_TRY(add_conv1d(m, "mlp.c_fc", h, width, err));
        QC_TRY(add_conv1d(m, "mlp.c_proj", width, h, err));
    }
    qc_maker_prefix(m, base, UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "wte.weight", m->g->vocab, h, err));
    QC_TRY(qc_maker_matrix(m, "wpe.weight", m->g->max_context, h, err));
    return qc_maker_layer_norm(m, "ln_f", h, err);
}

/* ---- GPT-NeoX ---- */

qc_status qc_maker_gpt_neox(qc_tensor_maker *m, qc_error *err)
{
    const qc_geometry *g = m->g;
    uint64_t h = g->hidden;
    int bias = qc_config_flag(&m->config, "attention_bias", 1);
    if (g->vocab == 0 || g->intermediate == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: vocab_size or intermediate_size is missing, so the tensors cannot be "
                "worked out");
    for (uint32_t i = 0; i < g->layer_count; i++) {
        qc_maker_prefix(m, "gpt_neox.layers.", i);
        QC_TRY(qc_maker_layer_norm(m, "input_layernorm", h, err));
        QC_TRY(qc_maker_layer_norm(m, "post_attention_layernorm", h, err));
        QC_TRY(qc_maker_linear(m, "attention.query_key_value", 3 * h, h, bias, err));
        QC_TRY(qc_maker_linear(m, "attention.dense", h, h, bias, err));
        QC_TRY(qc_maker_linear(m, "mlp.dense_h_to_4h", g->intermediate, h, 1, err));
        QC_TRY(qc_maker_linear(m, "mlp.dense_4h_to_h", h, g->intermediate, 1, err));
    }
    qc_maker_prefix(m, "", UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "gpt_neox.embed_in.weight", g->vocab, h, err));
    QC_TRY(qc_maker_layer_norm(m, "gpt_neox.final_layer_norm", h, err));
    if (qc_config_flag(&m->config, "tie_word_embeddings", 0))
        return QC_OK;
    return qc_maker_matrix(m, "embed_out.weight", g->vocab, h, err);
}

/* ---- Granite 4: granitemoehybrid ---- */

typedef struct {
    uint64_t shared, heads, head_dim, state, groups, kernel;
    int conv_bias, proj_bias, bias;
} granite_hybrid;

static qc_status read_granite(const qc_tensor_maker *m, granite_hybrid *f, qc_error *err)
{
    const struct {
        const char *name;
        uint64_t *to, missing;
    } fields[] = {
        {"shared_intermediate_size", &f->shared, 1024},
        {"mamba_n_heads", &f->heads, 128},
        {"mamba_d_head", &f->head_dim, 0},
        {"mamba_d_state", &f->state, 256},
        {"mamba_n_groups", &f->groups, 1},
        {"mamba_d_conv", &f->kernel, 4},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        QC_TRY(qc_config_read(fields[i].to, &m->config, fields[i].name, QC_CONFIG_MAX_SIZE,
                              fields[i].missing, err));
    if (f->head_dim == 0 && f->heads != 0) { /* "auto" is refused as not a number */
        uint64_t expand = 0;
        QC_TRY(qc_config_read(&expand, &m->config, "mamba_expand", QC_CONFIG_MAX_LAYERS, 2, err));
        f->head_dim = expand * m->g->hidden / f->heads;
    }
    f->conv_bias = qc_config_flag(&m->config, "mamba_conv_bias", 1);
    f->proj_bias = qc_config_flag(&m->config, "mamba_proj_bias", 0);
    f->bias = qc_config_flag(&m->config, "attention_bias", 0);
    return QC_OK;
}

static qc_status add_mamba(qc_tensor_maker *m, const granite_hybrid *f, qc_error *err)
{
    uint64_t inner = f->heads * f->head_dim, mixed = inner + 2 * f->groups * f->state;
    QC_TRY(qc_maker_linear(m, "mamba.in_proj", inner + mixed + f->heads, m->g->hidden, f->proj_bias,
                           err));
    QC_TRY(qc_maker_add(m, "mamba.conv1d.weight", m->dtype, 3, (uint64_t[]){mixed, 1, f->kernel},
                        err));
    if (f->conv_bias)
        QC_TRY(qc_maker_vector(m, "mamba.conv1d.bias", mixed, err));
    QC_TRY(qc_maker_vector(m, "mamba.dt_bias", f->heads, err));
    QC_TRY(qc_maker_vector(m, "mamba.A_log", f->heads, err));
    QC_TRY(qc_maker_vector(m, "mamba.D", f->heads, err));
    QC_TRY(qc_maker_vector(m, "mamba.norm.weight", inner, err));
    return qc_maker_linear(m, "mamba.out_proj", m->g->hidden, inner, f->proj_bias, err);
}

static qc_status add_granite_attention(qc_tensor_maker *m, int bias, qc_error *err)
{
    const qc_geometry *g = m->g;
    uint64_t q = g->heads * g->head_dim, kv = g->kv_heads * g->head_dim;
    QC_TRY(qc_maker_linear(m, "self_attn.q_proj", q, g->hidden, bias, err));
    QC_TRY(qc_maker_linear(m, "self_attn.k_proj", kv, g->hidden, bias, err));
    QC_TRY(qc_maker_linear(m, "self_attn.v_proj", kv, g->hidden, bias, err));
    return qc_maker_linear(m, "self_attn.o_proj", g->hidden, q, bias, err);
}

/* Adds experts, which are stacks [experts, out, in], and the MLP that all tokens pass. */
static qc_status add_granite_mlp(qc_tensor_maker *m, uint64_t shared, qc_error *err)
{
    const qc_geometry *g = m->g;
    uint64_t width = 0;
    QC_TRY(qc_maker_linear(m, "shared_mlp.input_linear", 2 * shared, g->hidden, 0, err));
    QC_TRY(qc_maker_linear(m, "shared_mlp.output_linear", g->hidden, shared, 0, err));
    if (g->experts == 0)
        return QC_OK;
    QC_TRY(qc_maker_need(m, m->config.text, "intermediate_size", QC_CONFIG_MAX_SIZE, &width, err));
    QC_TRY(qc_maker_add(m, "block_sparse_moe.input_linear.weight", m->dtype, 3,
                        (uint64_t[]){g->experts, 2 * width, g->hidden}, err));
    QC_TRY(qc_maker_add(m, "block_sparse_moe.output_linear.weight", m->dtype, 3,
                        (uint64_t[]){g->experts, g->hidden, width}, err));
    return qc_maker_matrix(m, "block_sparse_moe.router.layer.weight", g->experts, g->hidden, err);
}

qc_status qc_maker_granite_hybrid(qc_tensor_maker *m, qc_error *err)
{
    const qc_geometry *g = m->g;
    granite_hybrid f = {0};
    QC_TRY(read_granite(m, &f, err));
    if (g->vocab == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: vocab_size is missing, so the tensors cannot be worked out");
    for (uint32_t i = 0; i < g->layer_count; i++) {
        qc_maker_prefix(m, "model.layers.", i);
        QC_TRY(qc_maker_vector(m, "input_layernorm.weight", g->hidden, err));
        QC_TRY(qc_maker_vector(m, "post_attention_layernorm.weight", g->hidden, err));
        QC_TRY(g->layers[i].attention == QC_ATTENTION_FULL ? add_granite_attention(m, f.bias, err)
                                                           : add_mamba(m, &f, err));
        QC_TRY(add_granite_mlp(m, f.shared, err));
    }
    qc_maker_prefix(m, "", UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "model.embed_tokens.weight", g->vocab, g->hidden, err));
    QC_TRY(qc_maker_vector(m, "model.norm.weight", g->hidden, err));
    if (qc_config_flag(&m->config, "tie_word_embeddings", 0))
        return QC_OK;
    return qc_maker_matrix(m, "lm_head.weight", g->vocab, g->hidden, err);
}
