/* The tables of known model types.
 *
 * A group is a prefix and rules for what follows it. Patterns are literal, except for '#' (a run of
 * digits) and '{a|b|}' (any of these, also nothing). The first rule that matches a whole name
 * counts, so frequent ones come first. A name that no rule matches is left to the general rules.
 *
 * Source: the modeling_*.py of transformers 4.57 and 5.23; names as in the released checkpoints,
 * and as transformers since 4.52 writes them where those differ (mllama). */
#include "convert/model/recipe_tables.h"

#include <string.h>

typedef struct {
    const char *pattern;
    qc_role role;
    unsigned traits;
    const char *why; /* NULL: the role says it */
} name_rule;

typedef struct {
    const char *prefix;
    const name_rule *rules; /* ends with a rule without a pattern */
} name_group;

typedef struct {
    const char *from, *to;
} module_rename;

struct qc_model_table {
    const char *types; /* " a b " */
    int tied_by_default;
    name_group groups[7];
    module_rename renames[6];
};

#define END                                                                                        \
    {                                                                                              \
        NULL, QC_ROLE_OTHER, 0, NULL                                                               \
    }

/* ---- decoders in the manner of Llama ---- */

static const name_rule decoder_top[] = {
    {"embed_tokens.weight", QC_ROLE_EMBEDDING, 0, NULL},
    {"lm_head.weight", QC_ROLE_HEAD, 0, NULL},
    {"norm.weight", QC_ROLE_NORM, 0, NULL},
    {"lm_head.bias", QC_ROLE_BIAS, 0, NULL},
    {"score.weight", QC_ROLE_HEAD, 0, "classification head"},
    {"rotary_emb.inv_freq", QC_ROLE_OTHER, QC_TRAIT_FIXED, "buffer"},
    END,
};

static const name_rule decoder_layer[] = {
    {"self_attn.{q|k|v|o|qkv}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"mlp.{gate|up|down|gate_up}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"{input|post_attention|pre_feedforward|post_feedforward|post_self_attn|post_mlp}_layernorm."
     "weight",
     QC_ROLE_NORM, 0, NULL},
    {"self_attn.{q|k}_norm.weight", QC_ROLE_NORM, 0, NULL},
    {"self_attn.{q|k|v|o|qkv}_proj.bias", QC_ROLE_BIAS, 0, NULL},
    {"mlp.{gate|up|down|gate_up}_proj.bias", QC_ROLE_BIAS, 0, NULL},
    {"self_attn.rotary_emb.inv_freq", QC_ROLE_OTHER, QC_TRAIT_FIXED, "buffer"},
    END,
};

static const name_rule mixtral_layer[] = {
    {"block_sparse_moe.experts.#.{w1|w2|w3}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"block_sparse_moe.gate.weight", QC_ROLE_ROUTER, QC_TRAIT_MODULE, NULL},
    {"mlp.gate.weight", QC_ROLE_ROUTER, 0, NULL}, /* transformers 5 in memory */
    {"block_sparse_moe.e_score_correction_bias", QC_ROLE_BIAS, QC_TRAIT_FIXED,
     "bias of the router"},
    {"block_sparse_moe.experts.#.{w1|w2|w3}.weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED, NULL},
    {"self_attn.{q|k|v|o}_proj.weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED, NULL},
    END,
};

static const name_rule qwen_moe_layer[] = {
    {"mlp.experts.#.{gate|up|down}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"mlp.shared_expert.{gate|up|down}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"mlp.gate.weight", QC_ROLE_ROUTER, QC_TRAIT_MODULE, NULL},
    {"mlp.shared_expert_gate.weight", QC_ROLE_ROUTER, QC_TRAIT_MODULE, NULL},
    END,
};

/* Layers at num_hidden_layers and above are for multi-token prediction. They bring an embedding, a
 * projection and a head of their own. */
static const name_rule deepseek_layer[] = {
    {"mlp.experts.#.{gate|up|down}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"mlp.experts.#.{gate|up|down}_proj.weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED, NULL},
    {"self_attn.{q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"mlp.shared_experts.{gate|up|down}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"mlp.gate.weight", QC_ROLE_ROUTER, 0, NULL},
    {"mlp.gate.e_score_correction_bias", QC_ROLE_BIAS, QC_TRAIT_FIXED, "bias of the router"},
    {"self_attn.{q|kv}_a_layernorm.weight", QC_ROLE_NORM, 0, NULL},
    {"self_attn.{q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj}.bias", QC_ROLE_BIAS, 0, NULL},
    {"self_attn.{q|o|q_a|q_b|kv_b}_proj.weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED, NULL},
    {"self_attn.kv_a_proj_with_mqa.weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED, NULL},
    {"mlp.{shared_experts.|}{gate|up|down}_proj.weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED,
     NULL},
    {"self_attn.indexer.{wq_b|wk}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"self_attn.indexer.weights_proj.weight", QC_ROLE_LINEAR, QC_TRAIT_FLOAT,
     "held in 32 bit by transformers"},
    {"self_attn.indexer.k_norm.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    {"self_attn.indexer.{wq_b|wk}.weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED, NULL},
    {"eh_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"embed_tokens.weight", QC_ROLE_EMBEDDING, 0, NULL},
    {"shared_head.head.weight", QC_ROLE_HEAD, 0, NULL},
    {"{enorm|hnorm|shared_head.norm}.weight", QC_ROLE_NORM, 0, NULL},
    END,
};

static const name_rule gpt_oss_layer[] = {
    {"mlp.experts.{gate_up_proj|down_proj}_blocks", QC_ROLE_PACKED, QC_TRAIT_FIXED,
     "MXFP4, kept as stored"},
    {"mlp.experts.{gate_up_proj|down_proj}_scales", QC_ROLE_STATE, QC_TRAIT_FIXED,
     "MXFP4, kept as stored"},
    {"mlp.experts.{gate_up_proj|down_proj}_bias", QC_ROLE_BIAS, 0, NULL},
    {"mlp.router.weight", QC_ROLE_ROUTER, 0, NULL},
    {"mlp.router.bias", QC_ROLE_BIAS, 0, NULL},
    {"self_attn.sinks", QC_ROLE_OTHER, 0, "attention sinks"},
    END,
};

/* in_proj_a, in_proj_b and in_proj_ba have a row for each head, often too few to quantize. The
 * general rules decide on them, and on stacks of experts. */
static const name_rule qwen35_layer[] = {
    {"linear_attn.{in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"linear_attn.norm.weight", QC_ROLE_NORM, 0, NULL},
    {"linear_attn.conv1d.weight", QC_ROLE_CONV, 0, NULL},
    {"linear_attn.{dt_bias|A_log}", QC_ROLE_OTHER, 0, "decay of a state"},
    END,
};

/* What is below "mtp." is for multi-token prediction. */
static const name_rule qwen35_top[] = {
    {"fc.weight", QC_ROLE_LINEAR, 0, NULL},
    {"pre_fc_norm_{embedding|hidden}.weight", QC_ROLE_NORM, 0, NULL},
    END,
};

static const name_rule qwen35_visual[] = {
    {"blocks.#.{attn.qkv|attn.proj|mlp.linear_fc1|mlp.linear_fc2}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"blocks.#.{attn.qkv|attn.proj|mlp.linear_fc1|mlp.linear_fc2}.bias", QC_ROLE_BIAS, 0, NULL},
    {"{blocks.#.norm1|blocks.#.norm2|merger.norm}.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    {"merger.linear_{fc1|fc2}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"merger.linear_{fc1|fc2}.bias", QC_ROLE_BIAS, 0, NULL},
    {"patch_embed.proj.weight", QC_ROLE_CONV, 0, NULL},
    {"patch_embed.proj.bias", QC_ROLE_BIAS, 0, NULL},
    {"pos_embed.weight", QC_ROLE_EMBEDDING, 0, NULL},
    END,
};

/* The general rules decide on stacks of experts. */
static const name_rule granite_layer[] = {
    {"mamba.{in|out}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"shared_mlp.{input|output}_linear.weight", QC_ROLE_LINEAR, 0, NULL},
    {"block_sparse_moe.router.layer.weight", QC_ROLE_ROUTER, QC_TRAIT_MODULE, NULL},
    {"mamba.norm.weight", QC_ROLE_NORM, 0, NULL},
    {"mamba.conv1d.weight", QC_ROLE_CONV, 0, NULL},
    {"mamba.{in_proj|out_proj|conv1d}.bias", QC_ROLE_BIAS, 0, NULL},
    {"mamba.{dt_bias|A_log|D}", QC_ROLE_OTHER, 0, "decay of a state"},
    END,
};

static const name_rule gpt_neox_layer[] = {
    {"{attention.query_key_value|attention.dense|mlp.dense_h_to_4h|mlp.dense_4h_to_h}.weight",
     QC_ROLE_LINEAR, 0, NULL},
    {"{attention.query_key_value|attention.dense|mlp.dense_h_to_4h|mlp.dense_4h_to_h}.bias",
     QC_ROLE_BIAS, 0, NULL},
    {"{input|post_attention}_layernorm.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    {"attention.{bias|masked_bias|rotary_emb.inv_freq}", QC_ROLE_OTHER, QC_TRAIT_FIXED, "buffer"},
    END,
};

static const name_rule gpt_neox_top[] = {
    {"embed_in.weight", QC_ROLE_EMBEDDING, 0, NULL},
    {"embed_out.weight", QC_ROLE_HEAD, 0, NULL},
    {"final_layer_norm.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    END,
};

/* ---- towers beside a decoder: SigLIP (gemma3), Pixtral (mistral3), llama4 ---- */

static const name_rule llama4_layer[] = {
    {"feed_forward.{shared_expert.|}{gate|up|down}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"feed_forward.router.weight", QC_ROLE_ROUTER, QC_TRAIT_MODULE, NULL},
    END,
};

static const name_rule tower_layer[] = {
    {"{self_attn|attention}.{q_proj|k_proj|v_proj|o_proj|out_proj}.weight", QC_ROLE_LINEAR, 0,
     NULL},
    {"{mlp.fc1|mlp.fc2|feed_forward.gate_proj|feed_forward.up_proj|feed_forward.down_proj}.weight",
     QC_ROLE_LINEAR, 0, NULL},
    {"self_attn.{q|k|v|o|out}_proj.bias", QC_ROLE_BIAS, 0, NULL},
    {"mlp.{fc1|fc2}.bias", QC_ROLE_BIAS, 0, NULL},
    {"{layer_norm1|layer_norm2|input_layernorm|post_attention_layernorm|attention_norm|ffn_norm}."
     "{weight|bias}",
     QC_ROLE_NORM, 0, NULL},
    END,
};

static const name_rule tower_top[] = {
    {"{embeddings.patch_embedding|patch_conv}.weight", QC_ROLE_CONV, 0, NULL},
    {"embeddings.patch_embedding.bias", QC_ROLE_BIAS, 0, NULL},
    {"{embeddings.position_embedding.weight|class_embedding|positional_embedding_vlm}",
     QC_ROLE_EMBEDDING, 0, NULL},
    {"{post_layernorm|ln_pre|layernorm_pre|layernorm_post}.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    {"{patch_embedding.linear|vision_adapter.mlp.fc1|vision_adapter.mlp.fc2}.weight",
     QC_ROLE_LINEAR, 0, NULL},
    END,
};

static const name_rule tower_projector[] = {
    {"{linear_1|linear_2|patch_merger.merging_layer}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"{linear_1|linear_2}.bias", QC_ROLE_BIAS, 0, NULL},
    {"{norm|mm_soft_emb_norm}.weight", QC_ROLE_NORM, 0, NULL},
    {"mm_input_projection_weight", QC_ROLE_OTHER, 0, "not the weight of a module"},
    END,
};

/* ---- mllama ---- */

static const name_rule mllama_layer[] = {
    {"cross_attn.{q|k|v|o}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"cross_attn.{q|k}_norm.weight", QC_ROLE_NORM, 0, NULL},
    {"cross_attn_{attn|mlp}_gate", QC_ROLE_OTHER, 0, "scalar gate"},
    END,
};

static const name_rule mllama_vision[] = {
    {"{global_|}transformer.layers.#.self_attn.{q|k|v|o}_proj.weight", QC_ROLE_LINEAR, 0, NULL},
    {"{global_|}transformer.layers.#.mlp.{fc1|fc2}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"{global_|}transformer.layers.#.mlp.{fc1|fc2}.bias", QC_ROLE_BIAS, 0, NULL},
    {"{global_|}transformer.layers.#.{input|post_attention}_layernorm.{weight|bias}", QC_ROLE_NORM,
     0, NULL},
    {"{global_|}transformer.layers.#.gate_{attn|ffn}", QC_ROLE_OTHER, 0, "scalar gate"},
    {"layernorm_{pre|post}.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    {"patch_embedding.weight", QC_ROLE_CONV, 0, NULL},
    {"class_embedding", QC_ROLE_EMBEDDING, 0, NULL},
    {"gated_positional_embedding.embedding", QC_ROLE_EMBEDDING, 0, NULL},
    {"gated_positional_embedding.tile_embedding.weight", QC_ROLE_EMBEDDING, 0, NULL},
    {"{pre|post}_tile_positional_embedding.embedding.weight", QC_ROLE_EMBEDDING, 0, NULL},
    {"{gated|pre_tile|post_tile}_positional_embedding.gate", QC_ROLE_OTHER, 0, "scalar gate"},
    END,
};

static const name_rule mllama_projector[] = {
    {"weight", QC_ROLE_LINEAR, 0, NULL},
    {"bias", QC_ROLE_BIAS, 0, NULL},
    END,
};

/* ---- BERT ---- */

static const name_rule bert_layer[] = {
    {"{attention|crossattention}.self.{query|key|value}.weight", QC_ROLE_LINEAR, 0, NULL},
    {"{attention.output|crossattention.output|intermediate|output}.dense.weight", QC_ROLE_LINEAR, 0,
     NULL},
    {"{attention|crossattention}.self.{query|key|value}.bias", QC_ROLE_BIAS, 0, NULL},
    {"{attention.output|crossattention.output|intermediate|output}.dense.bias", QC_ROLE_BIAS, 0,
     NULL},
    {"{attention.|crossattention.|}output.LayerNorm.{weight|bias|gamma|beta}", QC_ROLE_NORM, 0,
     NULL},
    {"{attention|crossattention}.self.distance_embedding.weight", QC_ROLE_EMBEDDING, 0, NULL},
    END,
};

static const name_rule bert_top[] = {
    {"embeddings.{word|position|token_type}_embeddings.weight", QC_ROLE_EMBEDDING, 0, NULL},
    {"embeddings.LayerNorm.{weight|bias|gamma|beta}", QC_ROLE_NORM, 0, NULL},
    {"embeddings.{position|token_type}_ids", QC_ROLE_OTHER, QC_TRAIT_FIXED, "buffer"},
    {"pooler.dense.weight", QC_ROLE_LINEAR, 0, NULL},
    {"pooler.dense.bias", QC_ROLE_BIAS, 0, NULL},
    END,
};

static const name_rule bert_heads[] = {
    {"cls.predictions.transform.dense.weight", QC_ROLE_LINEAR, 0, NULL},
    {"cls.predictions.transform.dense.bias", QC_ROLE_BIAS, 0, NULL},
    {"cls.predictions.transform.LayerNorm.{weight|bias|gamma|beta}", QC_ROLE_NORM, 0, NULL},
    {"cls.predictions.decoder.weight", QC_ROLE_HEAD, 0, NULL},
    {"cls.predictions.{decoder.|}bias", QC_ROLE_BIAS, 0, NULL},
    {"{cls.seq_relationship|classifier|qa_outputs}.weight", QC_ROLE_HEAD, 0, "classification head"},
    {"{cls.seq_relationship|classifier|qa_outputs}.bias", QC_ROLE_BIAS, 0, NULL},
    END,
};

/* ---- GPT-2: Conv1D, [in, out] in the file ---- */

static const name_rule gpt2_layer[] = {
    {"{attn|crossattention}.{c_attn|q_attn|c_proj}.weight", QC_ROLE_LINEAR, QC_TRAIT_CONV1D, NULL},
    {"mlp.{c_fc|c_proj}.weight", QC_ROLE_LINEAR, QC_TRAIT_CONV1D, NULL},
    {"{attn|crossattention}.{c_attn|q_attn|c_proj}.bias", QC_ROLE_BIAS, 0, NULL},
    {"mlp.{c_fc|c_proj}.bias", QC_ROLE_BIAS, 0, NULL},
    {"{ln_1|ln_2|ln_cross_attn}.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    {"{attn|crossattention}.{bias|masked_bias}", QC_ROLE_OTHER, QC_TRAIT_FIXED, "buffer"},
    END,
};

static const name_rule gpt2_top[] = {
    {"{wte|wpe|tokens_embed|positions_embed}.weight", QC_ROLE_EMBEDDING, 0, NULL},
    {"ln_f.{weight|bias}", QC_ROLE_NORM, 0, NULL},
    {"lm_head.weight", QC_ROLE_HEAD, 0, NULL},
    {"{score|classifier|qa_outputs}.weight", QC_ROLE_HEAD, 0, "classification head"},
    {"position_ids", QC_ROLE_OTHER, QC_TRAIT_FIXED, "buffer"},
    END,
};

#define MODEL  "{model.|}"
#define LAYER  "{model.|}layers.#."
#define MLLAMA "{language_model.model.|model.language_model.|language_model.|model.|}"
#define GPT2   "{transformer.|}"
#define QWEN35 "{model.language_model.|language_model.model.|model.|mtp.|}"
#define TOWER  "{model.|}{vision_tower.vision_model.|vision_tower.|vision_model.}"
#define NO_RENAME                                                                                  \
    {                                                                                              \
        {                                                                                          \
            NULL, NULL                                                                             \
        }                                                                                          \
    }

static const qc_model_table tables[] = {
    {" llama mistral qwen2 qwen3 phi3 granite olmo2 olmo3 glm glm4 ",
     0,
     {{LAYER, decoder_layer}, {MODEL, decoder_top}},
     NO_RENAME},
    {" gemma gemma2 gemma3_text smollm3 ",
     1,
     {{LAYER, decoder_layer}, {MODEL, decoder_top}},
     NO_RENAME},
    {" mixtral minimax_m2 ",
     0,
     {{LAYER, mixtral_layer}, {LAYER, decoder_layer}, {MODEL, decoder_top}},
     NO_RENAME},
    {" qwen2_moe qwen3_moe olmoe ",
     0,
     {{LAYER, qwen_moe_layer}, {LAYER, decoder_layer}, {MODEL, decoder_top}},
     NO_RENAME},
    {" qwen3_next qwen3_5 qwen3_5_moe ",
     0,
     {{QWEN35 "layers.#.", qwen35_layer},
      {QWEN35 "layers.#.", qwen_moe_layer},
      {QWEN35 "layers.#.", decoder_layer},
      {"{model.|}visual.", qwen35_visual},
      {QWEN35, decoder_top},
      {"mtp.", qwen35_top}},
     NO_RENAME},
    {" deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe glm4_moe_lite glm_moe_dsa ",
     0,
     {{LAYER, deepseek_layer}, {LAYER, decoder_layer}, {MODEL, decoder_top}},
     NO_RENAME},
    {" gpt_oss ",
     0,
     {{LAYER, gpt_oss_layer}, {LAYER, decoder_layer}, {MODEL, decoder_top}},
     NO_RENAME},
    {" gemma3 ",
     1,
     {{MLLAMA "layers.#.", decoder_layer},
      {TOWER "encoder.layers.#.", tower_layer},
      {TOWER, tower_top},
      {"{model.|}multi_modal_projector.", tower_projector},
      {MLLAMA, decoder_top}},
     NO_RENAME},
    {" mistral3 llama4 ",
     0,
     {{MLLAMA "layers.#.", decoder_layer},
      {MLLAMA "layers.#.", llama4_layer},
      {TOWER "{transformer.|model.}layers.#.", tower_layer},
      {TOWER, tower_top},
      {"{model.|}multi_modal_projector.", tower_projector},
      {MLLAMA, decoder_top}},
     NO_RENAME},
    {" granitemoehybrid ",
     0,
     {{LAYER, granite_layer}, {LAYER, decoder_layer}, {MODEL, decoder_top}},
     NO_RENAME},
    {" gpt_neox ",
     0,
     {{"{gpt_neox.|}layers.#.", gpt_neox_layer}, {"{gpt_neox.|}", gpt_neox_top}},
     NO_RENAME},
    {" mllama mllama_text_model ",
     0,
     {{MLLAMA "layers.#.", decoder_layer},
      {MLLAMA "layers.#.", mllama_layer},
      {"{model.|}vision_model.", mllama_vision},
      {MLLAMA, decoder_top},
      {"{model.|}multi_modal_projector.", mllama_projector}},
     NO_RENAME},
    {" bert ",
     1,
     {{"{bert.|}encoder.layer.#.", bert_layer}, {"{bert.|}", bert_top}, {"", bert_heads}},
     {{"encoder.", "bert.encoder."}, {"pooler.", "bert.pooler."}, {"bert.", ""}, {NULL, NULL}}},
    {" gpt2 openai-gpt imagegpt ",
     1,
     {{GPT2 "h.#.", gpt2_layer}, {GPT2, gpt2_top}},
     {{"h.", "transformer.h."}, {"transformer.", ""}, {NULL, NULL}}},
};

/* Matches a pattern at the start of s (all of s if `whole`). Returns the end of the match, or NULL.
 * It recurses once per '{', and our patterns have at most four of these. */
static const char *match_pattern(const char *p, const char *s, int whole)
{
    while (*p) {
        if (*p == '#') {
            size_t digits = strspn(s, "0123456789");
            if (digits == 0)
                return NULL;
            s += digits;
            p++;
        } else if (*p == '{') {
            const char *behind = strchr(p, '}') + 1;
            for (const char *alt = p + 1;;) {
                size_t n = strcspn(alt, "|}");
                const char *end = NULL;
                if (strncmp(s, alt, n) == 0)
                    end = match_pattern(behind, s + n, whole);
                if (end || alt[n] == '}')
                    return end;
                alt += n + 1;
            }
        } else if (*p++ != *s++) {
            return NULL;
        }
    }
    return whole && *s ? NULL : s;
}

static const char *role_words(qc_role role)
{
    switch (role) {
    case QC_ROLE_LINEAR:
        return "linear";
    case QC_ROLE_EMBEDDING:
        return "embedding";
    case QC_ROLE_HEAD:
        return "output head";
    case QC_ROLE_ROUTER:
        return "router";
    case QC_ROLE_NORM:
        return "norm";
    case QC_ROLE_BIAS:
        return "bias";
    case QC_ROLE_CONV:
        return "convolution";
    case QC_ROLE_STATE:
        return "scale of a packed weight";
    case QC_ROLE_PACKED:
        return "packed weight";
    case QC_ROLE_OTHER:
        break;
    }
    return "no weight of a Linear";
}

const qc_model_table *qc_model_table_find(const char *model_type)
{
    size_t len = strlen(model_type);
    if (len == 0 || strchr(model_type, ' '))
        return NULL;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        for (const char *p = tables[i].types; (p = strstr(p, model_type)) != NULL; p += len) {
            if (p[-1] == ' ' && p[len] == ' ')
                return &tables[i];
        }
    }
    return NULL;
}

const qc_model_table *qc_model_table_of(const qc_checkpoint *model)
{
    const qc_json_node *root = model->config ? qc_json_root(model->config) : NULL;
    return qc_model_table_find(qc_json_string_or(qc_json_get(root, "model_type"), ""));
}

int qc_model_table_is_conv1d(const qc_model_table *t, const char *name)
{
    qc_tensor_class c;
    return t && qc_model_table_classify(t, name, &c) && (c.traits & QC_TRAIT_CONV1D) != 0;
}

int qc_model_table_classify(const qc_model_table *t, const char *name, qc_tensor_class *out)
{
    size_t groups = sizeof t->groups / sizeof *t->groups;
    for (size_t g = 0; g < groups && t->groups[g].prefix; g++) {
        const char *rest = match_pattern(t->groups[g].prefix, name, 0);
        if (!rest)
            continue;
        for (const name_rule *r = t->groups[g].rules; r->pattern; r++) {
            if (!match_pattern(r->pattern, rest, 1))
                continue;
            out->role = r->role;
            out->traits = r->traits;
            if (r->role == QC_ROLE_HEAD)
                out->traits |= QC_TRAIT_MODULE;
            out->why = r->why ? r->why : role_words(r->role);
            return 1;
        }
    }
    return 0;
}

int qc_model_table_tied(const qc_model_table *t)
{
    return t->tied_by_default;
}

int qc_model_table_rename(const qc_model_table *t, unsigned n, const char **from, const char **to)
{
    if (n >= sizeof t->renames / sizeof *t->renames || !t->renames[n].from)
        return 0;
    *from = t->renames[n].from;
    *to = t->renames[n].to;
    return 1;
}
