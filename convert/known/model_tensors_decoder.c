/* Decoders in the manner of Llama: embed_tokens, layers of attention and MLP, norm, lm_head. What a
 * family does differently is a trait. The sources are the modeling_*.py of transformers 4.57 and
 * the names in released checkpoints. */
#include "convert/known/model_tensors_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MXFP4_BLOCK       32u
#define MXFP4_BLOCK_BYTES 16u

enum {
    QKV_BIAS = 1,          /* always */
    ATTENTION_BIAS = 2,    /* q, k, v and o, where attention_bias says so */
    MLP_BIAS = 4,          /* where mlp_bias says so */
    HEAD_NORMS = 8,        /* q_norm and k_norm over head_dim */
    FOUR_NORMS = 16,       /* before and after attention and MLP */
    FUSED_QKV = 32,        /* qkv_proj */
    TIED = 64,             /* unless tie_word_embeddings is false */
    EXPERTS = 128,         /* mlp.experts.N */
    MIXTRAL_EXPERTS = 256, /* block_sparse_moe.experts.N */
    SHARED_EXPERT = 512,   /* one, with a gate of its own */
    LATENT = 1024,         /* MLA */
    FUSED_MLP = 2048,      /* gate_up_proj */
    QKV_BIAS_IF = 4096,    /* q, k and v, where attention_bias says so */
    /* q_norm and k_norm over all heads; other norms only after attention and MLP */
    WIDE_NORMS = 8192,
    GLM_NORMS = 16384,     /* two more, after attention and MLP */
    FEW_EXPERTS = 32768,   /* shared experts, dense first layers */
    ROUTER_BIAS = 65536,   /* in F32; layers for multi-token prediction */
    LLAMA4 = 262144,       /* feed_forward: a router, stacked experts and a shared one */
    QK_NORM_IF = 131072,   /* HEAD_NORMS, where use_qk_norm says so */
    ALL_HEADS = 524288,    /* q_norm and k_norm over all heads */
    INDEXER = 1048576,     /* sparse attention: an indexer beside MLA */
    NO_EMBEDDING = 2097152 /* layers for multi-token prediction have no embedding and no head */
};

static const struct {
    const char *types;
    unsigned traits;
} families[] = {
    {" llama ", ATTENTION_BIAS | MLP_BIAS},
    {" mistral ", 0},
    {" mixtral ", MIXTRAL_EXPERTS},
    {" minimax_m2 ", MIXTRAL_EXPERTS | ROUTER_BIAS | ALL_HEADS},
    {" qwen2 ", QKV_BIAS},
    {" qwen3 ", ATTENTION_BIAS | HEAD_NORMS},
    {" qwen2_moe ", QKV_BIAS | EXPERTS | SHARED_EXPERT},
    {" qwen3_moe ", ATTENTION_BIAS | HEAD_NORMS | EXPERTS},
    {" olmoe ", ATTENTION_BIAS | EXPERTS | ALL_HEADS},
    {" phi3 ", FUSED_QKV | FUSED_MLP},
    {" gemma ", ATTENTION_BIAS | TIED},
    {" gemma2 ", ATTENTION_BIAS | FOUR_NORMS | TIED},
    {" gemma3_text ", ATTENTION_BIAS | HEAD_NORMS | FOUR_NORMS | TIED},
    {" deepseek_v2 ", ATTENTION_BIAS | EXPERTS | LATENT | FEW_EXPERTS},
    {" deepseek_v3 kimi_k2 ", ATTENTION_BIAS | EXPERTS | LATENT | FEW_EXPERTS | ROUTER_BIAS},
    {" deepseek_v32 ", ATTENTION_BIAS | EXPERTS | LATENT | FEW_EXPERTS | ROUTER_BIAS | INDEXER},
    {" glm_moe_dsa ",
     ATTENTION_BIAS | EXPERTS | LATENT | FEW_EXPERTS | ROUTER_BIAS | INDEXER | NO_EMBEDDING},
    {" glm4_moe_lite ", ATTENTION_BIAS | EXPERTS | LATENT | FEW_EXPERTS | ROUTER_BIAS},
    {" gpt_oss ", ATTENTION_BIAS},
    {" llama4_text ", ATTENTION_BIAS | LLAMA4},
    {" granite ", ATTENTION_BIAS | MLP_BIAS},
    {" smollm3 ", ATTENTION_BIAS | MLP_BIAS | TIED},
    {" olmo2 olmo3 ", ATTENTION_BIAS | WIDE_NORMS},
    {" glm4 ", QKV_BIAS_IF | FUSED_MLP | GLM_NORMS},
    {" glm4_moe ", QKV_BIAS_IF | QK_NORM_IF | EXPERTS | FEW_EXPERTS | ROUTER_BIAS},
};

typedef struct {
    qc_tensor_maker *m;
    const char *base; /* start of all names: "", "language_model." */
    unsigned traits;
    uint64_t hidden, heads, kv_heads, head_dim, vocab;
    uint64_t intermediate;             /* dense */
    uint64_t moe, shared;              /* widths */
    uint64_t dense_first, every, step; /* which layers have experts */
    uint64_t q_rank, kv_rank, rope, nope, v_dim;
    uint64_t index_heads, index_dim;
    unsigned char *dense_marks;   /* mlp_only_layers, mlp_layer_types */
    const qc_json_node *indexers; /* indexer_types; NULL: all are "full" */
} decoder;

/* ---- fields ---- */

/* Marks the layers that mlp_layer_types calls "dense". */
static qc_status mark_dense(decoder *d, qc_error *err)
{
    const qc_json_node *list = qc_config_text_field(&d->m->config, "mlp_layer_types");
    if (list && qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: mlp_layer_types is not a list");
    const qc_json_node *n = list ? qc_json_first(list) : NULL;
    for (uint32_t i = 0; n && i < d->m->g->layer_count; i++, n = qc_json_next(n)) {
        if (strcmp(qc_json_string_or(n, ""), "dense") == 0)
            d->dense_marks[i] = 1;
    }
    return QC_OK;
}

static qc_status read_experts(decoder *d, qc_error *err)
{
    const qc_config *c = &d->m->config;
    const qc_geometry *g = d->m->g;
    if (g->experts == 0)
        QC_FAIL(
            err, QC_ERR_INPUT,
            "config.json: the number of experts is missing, so the tensors cannot be worked out");
    QC_TRY(qc_config_read(
        &d->moe, c, qc_maker_is(d->m, " olmoe ") ? "intermediate_size" : "moe_intermediate_size",
        QC_CONFIG_MAX_SIZE, 0, err));
    QC_TRY(qc_config_read(&d->step, c, "decoder_sparse_step", QC_CONFIG_MAX_SIZE, 1, err));
    QC_TRY(qc_arena_array(d->m->arena, &d->dense_marks, g->layer_count, err));
    QC_TRY(qc_config_mark_layers(d->dense_marks, g->layer_count,
                                 qc_config_text_field(c, "mlp_only_layers"), err));
    QC_TRY(mark_dense(d, err));
    if (d->traits & SHARED_EXPERT)
        QC_TRY(qc_config_read(&d->shared, c, "shared_expert_intermediate_size", QC_CONFIG_MAX_SIZE,
                              0, err));
    return QC_OK;
}

static qc_status read_few_experts(decoder *d, qc_error *err)
{
    const qc_config *c = &d->m->config;
    uint64_t shared = 0;
    QC_TRY(qc_config_read(&d->dense_first, c, "first_k_dense_replace", QC_CONFIG_MAX_SIZE, 0, err));
    QC_TRY(qc_config_read(&d->every, c, "moe_layer_freq", QC_CONFIG_MAX_SIZE, 1, err));
    QC_TRY(qc_config_read(&shared, c, "n_shared_experts", QC_CONFIG_MAX_EXPERTS, 0, err));
    d->shared = shared * d->moe;
    return QC_OK;
}

static qc_status read_latent(decoder *d, qc_error *err)
{
    const qc_config *c = &d->m->config;
    QC_TRY(qc_config_read(&d->q_rank, c, "q_lora_rank", QC_CONFIG_MAX_SIZE, 0, err));
    QC_TRY(qc_maker_need(d->m, c->text, "kv_lora_rank", QC_CONFIG_MAX_SIZE, &d->kv_rank, err));
    QC_TRY(qc_maker_need(d->m, c->text, "qk_rope_head_dim", QC_CONFIG_MAX_SIZE, &d->rope, err));
    QC_TRY(qc_maker_need(d->m, c->text, "qk_nope_head_dim", QC_CONFIG_MAX_SIZE, &d->nope, err));
    QC_TRY(qc_maker_need(d->m, c->text, "v_head_dim", QC_CONFIG_MAX_SIZE, &d->v_dim, err));
    if (!(d->traits & INDEXER))
        return QC_OK;
    d->indexers = qc_config_text_field(c, "indexer_types");
    if (d->indexers && qc_json_kind_of(d->indexers) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: indexer_types is not a list");
    QC_TRY(qc_maker_need(d->m, c->text, "q_lora_rank", QC_CONFIG_MAX_SIZE, &d->q_rank, err));
    QC_TRY(qc_maker_need(d->m, c->text, "index_n_heads", QC_CONFIG_MAX_SIZE, &d->index_heads, err));
    return qc_maker_need(d->m, c->text, "index_head_dim", QC_CONFIG_MAX_SIZE, &d->index_dim, err);
}

/* Switches a trait off if the configuration says so. */
static void unless(decoder *d, unsigned trait, const char *field)
{
    if (!qc_config_flag(&d->m->config, field, 0))
        d->traits &= ~trait;
}

static qc_status read_fields(decoder *d, qc_error *err)
{
    const qc_tensor_maker *m = d->m;
    const qc_geometry *g = m->g;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        if (qc_maker_is(m, families[i].types))
            d->traits = families[i].traits;
    }
    unless(d, ATTENTION_BIAS | QKV_BIAS_IF, "attention_bias");
    unless(d, MLP_BIAS, "mlp_bias");
    unless(d, QK_NORM_IF, "use_qk_norm");
    if (!qc_config_flag(&m->config, "mtp_use_dedicated_embeddings", 1))
        d->traits |= NO_EMBEDDING;
    d->hidden = g->hidden;
    d->heads = g->heads;
    d->kv_heads = g->kv_heads;
    d->head_dim = g->head_dim;
    d->every = d->step = 1;
    QC_TRY(qc_maker_need(m, m->config.text, "vocab_size", QC_CONFIG_MAX_SIZE, &d->vocab, err));
    QC_TRY(qc_maker_need(m, m->config.text, "intermediate_size", QC_CONFIG_MAX_SIZE,
                         &d->intermediate, err));
    if (d->traits & (EXPERTS | MIXTRAL_EXPERTS))
        QC_TRY(read_experts(d, err));
    if (d->traits & LLAMA4)
        QC_TRY(qc_config_read(&d->step, &m->config, "interleave_moe_layer_step", QC_CONFIG_MAX_SIZE,
                              1, err));
    if (d->traits & FEW_EXPERTS)
        QC_TRY(read_few_experts(d, err));
    return d->traits & LATENT ? read_latent(d, err) : QC_OK;
}

/* ---- attention ---- */

/* Adds what chooses the tokens that a layer looks at, unless it takes an earlier layer's choice. */
static qc_status add_indexer(const decoder *d, uint64_t layer, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    const qc_json_node *type = d->indexers ? qc_json_first(d->indexers) : NULL;
    for (uint64_t i = 0; type && i < layer; i++)
        type = qc_json_next(type);
    if (type && strcmp(qc_json_string_or(type, ""), "full") != 0)
        return QC_OK;
    QC_TRY(qc_maker_linear(m, "self_attn.indexer.wq_b", d->index_heads * d->index_dim, d->q_rank, 0,
                           err));
    QC_TRY(qc_maker_linear(m, "self_attn.indexer.wk", d->index_dim, d->hidden, 0, err));
    QC_TRY(qc_maker_layer_norm(m, "self_attn.indexer.k_norm", d->index_dim, err));
    return qc_maker_matrix(m, "self_attn.indexer.weights_proj.weight", d->index_heads, d->hidden,
                           err);
}

static qc_status add_latent_attention(const decoder *d, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    int bias = (d->traits & ATTENTION_BIAS) != 0;
    uint64_t qk = d->nope + d->rope;
    if (d->q_rank == 0) {
        QC_TRY(qc_maker_linear(m, "self_attn.q_proj", d->heads * qk, d->hidden, 0, err));
    } else {
        QC_TRY(qc_maker_linear(m, "self_attn.q_a_proj", d->q_rank, d->hidden, bias, err));
        QC_TRY(qc_maker_vector(m, "self_attn.q_a_layernorm.weight", d->q_rank, err));
        QC_TRY(qc_maker_linear(m, "self_attn.q_b_proj", d->heads * qk, d->q_rank, 0, err));
    }
    QC_TRY(qc_maker_linear(m, "self_attn.kv_a_proj_with_mqa", d->kv_rank + d->rope, d->hidden, bias,
                           err));
    QC_TRY(qc_maker_vector(m, "self_attn.kv_a_layernorm.weight", d->kv_rank, err));
    QC_TRY(qc_maker_linear(m, "self_attn.kv_b_proj", d->heads * (d->nope + d->v_dim), d->kv_rank, 0,
                           err));
    return qc_maker_linear(m, "self_attn.o_proj", d->hidden, d->heads * d->v_dim, bias, err);
}

static qc_status add_attention(const decoder *d, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    int all = (d->traits & ATTENTION_BIAS) != 0;
    int qkv = all || (d->traits & (QKV_BIAS | QKV_BIAS_IF));
    int wide = (d->traits & (WIDE_NORMS | ALL_HEADS)) != 0;
    uint64_t q = d->heads * d->head_dim, kv = d->kv_heads * d->head_dim;
    if (d->traits & LATENT)
        return add_latent_attention(d, err);
    if (d->traits & FUSED_QKV) {
        QC_TRY(qc_maker_linear(m, "self_attn.qkv_proj", q + 2 * kv, d->hidden, 0, err));
    } else {
        QC_TRY(qc_maker_linear(m, "self_attn.q_proj", q, d->hidden, qkv, err));
        QC_TRY(qc_maker_linear(m, "self_attn.k_proj", kv, d->hidden, qkv, err));
        QC_TRY(qc_maker_linear(m, "self_attn.v_proj", kv, d->hidden, qkv, err));
    }
    QC_TRY(qc_maker_linear(m, "self_attn.o_proj", d->hidden, q, all, err));
    if (!(d->traits & (HEAD_NORMS | QK_NORM_IF | WIDE_NORMS | ALL_HEADS)))
        return QC_OK;
    QC_TRY(qc_maker_vector(m, "self_attn.q_norm.weight", wide ? q : d->head_dim, err));
    return qc_maker_vector(m, "self_attn.k_norm.weight", wide ? kv : d->head_dim, err);
}

/* ---- the MLP ---- */

static qc_status add_gated(const decoder *d, const char *module, uint64_t width, qc_error *err)
{
    char name[64];
    int bias = (d->traits & MLP_BIAS) != 0;
    (void)snprintf(name, sizeof name, "%s.gate_proj", module);
    QC_TRY(qc_maker_linear(d->m, name, width, d->hidden, bias, err));
    (void)snprintf(name, sizeof name, "%s.up_proj", module);
    QC_TRY(qc_maker_linear(d->m, name, width, d->hidden, bias, err));
    (void)snprintf(name, sizeof name, "%s.down_proj", module);
    return qc_maker_linear(d->m, name, d->hidden, width, bias, err);
}

static qc_status add_mixtral_experts(const decoder *d, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    uint64_t experts = m->g->experts;
    QC_TRY(qc_maker_matrix(m, "block_sparse_moe.gate.weight", experts, d->hidden, err));
    if (d->traits & ROUTER_BIAS)
        QC_TRY(qc_maker_add(m, "block_sparse_moe.e_score_correction_bias", QC_DTYPE_F32, 1,
                            &experts, err));
    for (uint64_t e = 0; e < experts; e++) {
        char name[64];
        for (int w = 1; w <= 3; w++) {
            (void)snprintf(name, sizeof name, "block_sparse_moe.experts.%" PRIu64 ".w%d", e, w);
            QC_TRY(qc_maker_linear(m, name, w == 2 ? d->hidden : d->intermediate,
                                   w == 2 ? d->intermediate : d->hidden, 0, err));
        }
    }
    return QC_OK;
}

static qc_status add_experts(const decoder *d, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    uint64_t experts = m->g->experts;
    QC_TRY(qc_maker_matrix(m, "mlp.gate.weight", experts, d->hidden, err));
    if (d->traits & ROUTER_BIAS)
        QC_TRY(qc_maker_add(m, "mlp.gate.e_score_correction_bias", QC_DTYPE_F32, 1, &experts, err));
    for (uint64_t e = 0; e < experts; e++) {
        char name[40];
        (void)snprintf(name, sizeof name, "mlp.experts.%" PRIu64, e);
        QC_TRY(add_gated(d, name, d->moe, err));
    }
    if (d->traits & SHARED_EXPERT) {
        QC_TRY(add_gated(d, "mlp.shared_expert", d->shared, err));
        return qc_maker_matrix(m, "mlp.shared_expert_gate.weight", 1, d->hidden, err);
    }
    return d->shared ? add_gated(d, "mlp.shared_experts", d->shared, err) : QC_OK;
}

/* Adds experts as transformers holds them: [experts, in, out]. */
static qc_status add_llama4(const decoder *d, uint64_t layer, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    uint64_t e = m->g->experts, dense = 0;
    if (d->step != 0 && (layer + 1) % d->step != 0) {
        QC_TRY(qc_maker_need(m, m->config.text, "intermediate_size_mlp", QC_CONFIG_MAX_SIZE, &dense,
                             err));
        return add_gated(d, "feed_forward", dense, err);
    }
    QC_TRY(qc_maker_matrix(m, "feed_forward.router.weight", e, d->hidden, err));
    QC_TRY(qc_maker_add(m, "feed_forward.experts.gate_up_proj", m->dtype, 3,
                        (uint64_t[]){e, d->hidden, 2 * d->intermediate}, err));
    QC_TRY(qc_maker_add(m, "feed_forward.experts.down_proj", m->dtype, 3,
                        (uint64_t[]){e, d->intermediate, d->hidden}, err));
    return add_gated(d, "feed_forward.shared_expert", d->intermediate, err);
}

static int has_experts(const decoder *d, uint64_t layer)
{
    if (!(d->traits & EXPERTS))
        return 0;
    if (layer >= d->m->g->layer_count) /* it is for multi-token prediction */
        return 1;
    if (d->dense_marks[layer] || layer < d->dense_first)
        return 0;
    return (d->every == 0 || layer % d->every == 0) && (d->step == 0 || (layer + 1) % d->step == 0);
}

/* Adds stacked experts. In MXFP4 they are [experts, out, in], as blocks of 32 along the input with
 * one scale each. Without it they are [experts, in, out], as transformers holds them. */
static qc_status add_stacked(qc_tensor_maker *m, const char *name, uint64_t out, uint64_t in,
                             qc_error *err)
{
    char text[64];
    uint64_t e = m->g->experts;
    (void)snprintf(text, sizeof text, "mlp.experts.%s_bias", name);
    QC_TRY(qc_maker_matrix(m, text, e, out, err));
    if (!m->mxfp4) {
        (void)snprintf(text, sizeof text, "mlp.experts.%s", name);
        return qc_maker_add(m, text, m->dtype, 3, (uint64_t[]){e, in, out}, err);
    }
    if (in % MXFP4_BLOCK != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: expected inputs of experts in whole blocks of MXFP4, which have %u "
                "weights, found %" PRIu64,
                MXFP4_BLOCK, in);
    uint64_t blocks = in / MXFP4_BLOCK;
    (void)snprintf(text, sizeof text, "mlp.experts.%s_blocks", name);
    QC_TRY(qc_maker_add(m, text, QC_DTYPE_U8, 4, (uint64_t[]){e, out, blocks, MXFP4_BLOCK_BYTES},
                        err));
    (void)snprintf(text, sizeof text, "mlp.experts.%s_scales", name);
    return qc_maker_add(m, text, QC_DTYPE_U8, 3, (uint64_t[]){e, out, blocks}, err);
}

/* Adds the router, experts and sinks of one layer of gpt-oss. */
static qc_status add_gpt_oss(qc_tensor_maker *m, uint64_t intermediate, qc_error *err)
{
    const qc_geometry *g = m->g;
    QC_TRY(qc_maker_vector(m, "self_attn.sinks", g->heads, err));
    QC_TRY(qc_maker_linear(m, "mlp.router", g->experts, g->hidden, 1, err));
    QC_TRY(add_stacked(m, "gate_up_proj", 2 * intermediate, g->hidden, err));
    return add_stacked(m, "down_proj", g->hidden, intermediate, err);
}

static qc_status add_mlp(const decoder *d, uint64_t layer, qc_error *err)
{
    if (qc_maker_is(d->m, " gpt_oss "))
        return add_gpt_oss(d->m, d->intermediate, err);
    if (d->traits & MIXTRAL_EXPERTS)
        return add_mixtral_experts(d, err);
    if (d->traits & LLAMA4)
        return add_llama4(d, layer, err);
    if (has_experts(d, layer))
        return add_experts(d, err);
    if (!(d->traits & FUSED_MLP))
        return add_gated(d, "mlp", d->intermediate, err);
    QC_TRY(qc_maker_linear(d->m, "mlp.gate_up_proj", 2 * d->intermediate, d->hidden, 0, err));
    return qc_maker_linear(d->m, "mlp.down_proj", d->hidden, d->intermediate, 0, err);
}

/* ---- layers ---- */

static const struct {
    const char *name;
    unsigned only, not ; /* traits; with 0, it is for all */
} layer_norms[] = {
    {"input_layernorm.weight", 0, WIDE_NORMS},
    {"post_attention_layernorm.weight", 0, 0},
    {"pre_feedforward_layernorm.weight", FOUR_NORMS, 0},
    {"post_feedforward_layernorm.weight", FOUR_NORMS | WIDE_NORMS, 0},
    {"post_self_attn_layernorm.weight", GLM_NORMS, 0},
    {"post_mlp_layernorm.weight", GLM_NORMS, 0},
};

static qc_status add_layer(const decoder *d, uint64_t layer, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    char base[48];
    (void)snprintf(base, sizeof base, "%smodel.layers.", d->base);
    qc_maker_prefix(m, base, layer);
    for (size_t i = 0; i < sizeof layer_norms / sizeof *layer_norms; i++) {
        unsigned only = layer_norms[i].only;
        if ((only == 0 || (d->traits & only)) && !(d->traits & layer_norms[i].not ))
            QC_TRY(qc_maker_vector(m, layer_norms[i].name, d->hidden, err));
    }
    QC_TRY(add_attention(d, err));
    if (d->traits & INDEXER)
        QC_TRY(add_indexer(d, layer, err));
    return add_mlp(d, layer, err);
}

/* Adds the layers for multi-token prediction (DeepSeek-V3, GLM-4.5). Most bring an embedding and a
 * head of their own. */
static qc_status add_prediction_layers(const decoder *d, qc_error *err)
{
    qc_tensor_maker *m = d->m;
    uint64_t count = 0;
    QC_TRY(qc_config_read(&count, &m->config, "num_nextn_predict_layers", 16, 0, err));
    for (uint64_t i = 0; (d->traits & ROUTER_BIAS) && i < count; i++) {
        QC_TRY(add_layer(d, m->g->layer_count + i, err));
        QC_TRY(qc_maker_matrix(m, "eh_proj.weight", d->hidden, 2 * d->hidden, err));
        QC_TRY(qc_maker_vector(m, "enorm.weight", d->hidden, err));
        QC_TRY(qc_maker_vector(m, "hnorm.weight", d->hidden, err));
        QC_TRY(qc_maker_vector(m, "shared_head.norm.weight", d->hidden, err));
        if (d->traits & NO_EMBEDDING)
            continue;
        QC_TRY(qc_maker_matrix(m, "embed_tokens.weight", d->vocab, d->hidden, err));
        QC_TRY(qc_maker_matrix(m, "shared_head.head.weight", d->vocab, d->hidden, err));
    }
    return QC_OK;
}

qc_status qc_maker_decoder(qc_tensor_maker *m, const char *base, qc_error *err)
{
    decoder d = {.m = m, .base = base};
    QC_TRY(read_fields(&d, err));
    for (uint64_t i = 0; i < m->g->layer_count; i++)
        QC_TRY(add_layer(&d, i, err));
    QC_TRY(add_prediction_layers(&d, err));
    qc_maker_prefix(m, base, UINT64_MAX);
    QC_TRY(qc_maker_matrix(m, "model.embed_tokens.weight", d.vocab, d.hidden, err));
    QC_TRY(qc_maker_vector(m, "model.norm.weight", d.hidden, err));
    if (qc_config_flag(&m->config, "tie_word_embeddings", (d.traits & TIED) != 0))
        return QC_OK;
    return qc_maker_matrix(m, "lm_head.weight", d.vocab, d.hidden, err);
}
