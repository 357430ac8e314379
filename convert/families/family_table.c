/* The families. Names are as in the released checkpoints, and as transformers since 4.52 writes
 * them where those differ; the sources are the modeling_*.py of transformers 4.57 and 5.23. The
 * first row that knows a name counts.
 *
 * In a shape or condition, words in capitals are 1 where the family has them. Names in small
 * letters are fields of config.json, or a fact of model or layer (shape_text.h: hidden, q, kv,
 * layers, experts, moe, state, cross, extra, ...). The families have these words:
 *
 *   ATTENTION_BIAS   q, k, v and o have biases where attention_bias says so; QKV_BIAS_IF: not o;
 *                    QKV_BIAS: q, k and v always have them
 *   MLP_BIAS         the MLP has biases where mlp_bias says so
 *   HEAD_NORMS       q_norm and k_norm over a head; QK_NORM_IF: where use_qk_norm says so;
 *                    ALL_HEADS: over all heads; WIDE_NORMS: so, and other norms only after
 *                    attention and MLP
 *   FOUR_NORMS       before and after attention and MLP; GLM_NORMS: two more, after both
 *   FUSED_QKV        one matrix for q, k and v; FUSED_MLP: one for gate and up
 *   GATED            q_proj also has the gate of the output
 *   LATENT           multi-head latent attention; INDEXER: an indexer chooses its tokens
 *   EXPERTS          in layers that `moe` names; WIDE_EXPERTS: of intermediate_size; STACKED: in
 *                    one tensor; SHARED_EXPERT: one more, with a gate of its own
 *   ROUTER_BIAS      in F32; PREDICTS: layers for multi-token prediction; NO_EMBEDDING: without an
 *                    embedding and a head of their own
 *   NO_MLP           no mlp.gate_proj and so on; HYBRID: layers without attention keep a state;
 *                    NEXT: as in Qwen3-Next
 *   TIED             the head is tied where config.json is silent
 *   TOWER            a model of images beside the text; EXTRA_ROWS: of the embeddings, 8
 *   FP8, MXFP4       the ways of quantizing in which it is released
 *   ROTARY           transformers expects rotary tables in a device map
 *   TP               vLLM splits it over cards as its rows say
 *   ROLES            only the roles of its tensors are known */
#include "convert/families/family.h"

/* clang-format off */

#define END {NULL, QC_ROW_MODULE, QC_ROLE_OTHER, QC_SPLIT_UNKNOWN, 0, NULL, NULL, NULL, NULL}
#define ROW(name, kind, role, split, traits, shape, when, bias, why)                               \
    {name, QC_ROW_##kind, QC_ROLE_##role, QC_SPLIT_##split, traits, shape, when, bias, why}
#define SPLIT(name, split, shape, when, bias) ROW(name, MODULE, LINEAR, split, 0, shape, when, bias, NULL)
#define LINEAR(name, shape, when, bias)   SPLIT(name, UNKNOWN, shape, when, bias)
#define CONV1D(name, shape)  ROW(name, MODULE, LINEAR, UNKNOWN, QC_TRAIT_CONV1D, shape, NULL, "1", NULL)
#define PLAIN(name, shape, when)  ROW(name, MODULE, LINEAR, UNKNOWN, QC_TRAIT_PLAIN, shape, when, NULL, NULL)
#define NORM(name, shape, when)           ROW(name, NORM, NORM, WHOLE, 0, shape, when, NULL, NULL)
#define LAYER_NORM(name, shape, when)     ROW(name, NORM, NORM, WHOLE, 0, shape, when, "1", NULL)
#define EMBEDDING(name, shape, when)      ROW(name, MODULE, EMBEDDING, VOCABULARY, 0, shape, when, NULL, NULL)
#define HEAD(name, shape, when)           ROW(name, MODULE, HEAD, VOCABULARY, 0, shape, when, NULL, NULL)
#define LABELS(name, shape, when)  ROW(name, MODULE, HEAD, UNKNOWN, 0, shape, when, "1", "classification head")
#define ROUTER(name, shape, when)  ROW(name, MODULE, ROUTER, WHOLE, QC_TRAIT_MODULE, shape, when, NULL, NULL)
#define PARAMETER_ROUTER(name, shape, when, bias) ROW(name, MODULE, ROUTER, WHOLE, 0, shape, when, bias, NULL)
#define CONV(name, shape, bias)           ROW(name, MODULE, CONV, UNKNOWN, 0, shape, NULL, bias, NULL)
#define TABLE(name, shape, when)          ROW(name, TENSOR, EMBEDDING, UNKNOWN, 0, shape, when, NULL, NULL)
#define OTHER(name, shape, when, why)     ROW(name, TENSOR, OTHER, UNKNOWN, 0, shape, when, NULL, why)
#define BUFFER(name)  ROW(name, TENSOR, OTHER, ABSENT, QC_TRAIT_FIXED, NULL, NULL, NULL, "buffer")
#define ROUTER_BIAS(name, when) \
    ROW(name, TENSOR, BIAS, WHOLE, QC_TRAIT_FIXED | QC_TRAIT_F32, "experts", when, NULL, "bias of the router")
#define SHAPE(name, split, shape, when)   ROW(name, SHAPE, OTHER, split, 0, shape, when, NULL, NULL)

/* ---- decoders in the manner of Llama ---- */

#define I       "intermediate_size"
#define OWN     "!(state+cross+LATENT+FUSED_QKV)"
#define O_BIAS  "ATTENTION_BIAS*attention_bias~"
#define Q_BIAS  "QKV_BIAS+(ATTENTION_BIAS+QKV_BIAS_IF)*attention_bias~"
#define M_BIAS  "MLP_BIAS*mlp_bias~"

static const qc_family_row decoder_layer[] = {
    SPLIT("self_attn.q_proj", COLUMNS, "q+GATED*q, hidden", OWN, Q_BIAS),
    SPLIT("self_attn.{k|v}_proj", KV_HEADS, "kv, hidden", OWN, Q_BIAS),
    SPLIT("self_attn.qkv_proj", FUSED_QKV, "q+2*kv, hidden", "FUSED_QKV", NULL),
    SPLIT("self_attn.o_proj", ROWS, "hidden, q", "!(state+cross+LATENT)", O_BIAS),
    SPLIT("mlp.{gate|up}_proj", COLUMNS, I ", hidden", "!(moe+NO_MLP+FUSED_MLP)", M_BIAS),
    SPLIT("mlp.gate_up_proj", COLUMNS, "2*" I ", hidden", "FUSED_MLP", NULL),
    SPLIT("mlp.down_proj", ROWS, "hidden, " I, "!(moe+NO_MLP)", M_BIAS),
    NORM("input_layernorm", "hidden", "!WIDE_NORMS"),
    NORM("post_attention_layernorm", "hidden", NULL),
    NORM("pre_feedforward_layernorm", "hidden", "FOUR_NORMS"),
    NORM("post_feedforward_layernorm", "hidden", "FOUR_NORMS+WIDE_NORMS"),
    NORM("post_{self_attn|mlp}_layernorm", "hidden", "GLM_NORMS"),
    NORM("self_attn.{q|k}_norm", "head_dim", "!(state+cross)*(HEAD_NORMS+QK_NORM_IF*use_qk_norm~)"),
    NORM("self_attn.q_norm", "q", "WIDE_NORMS+ALL_HEADS"),
    NORM("self_attn.k_norm", "kv", "WIDE_NORMS+ALL_HEADS"),
    BUFFER("self_attn.rotary_emb.inv_freq"),
    END,
};

static const qc_family_row decoder_top[] = {
    EMBEDDING("embed_tokens", "vocab_size+8*EXTRA_ROWS, hidden", NULL),
    NORM("norm", "hidden", NULL),
    HEAD("lm_head", NULL, NULL),
    ROW("score", MODULE, HEAD, UNKNOWN, 0, NULL, NULL, NULL, "classification head"),
    BUFFER("rotary_emb.inv_freq"),
    END,
};

static const qc_family_row decoder_head[] = {
    HEAD("lm_head", "vocab_size, hidden", "!tied"),
    END,
};

static const qc_family_row mixtral_layer[] = {
    SPLIT("block_sparse_moe.experts.#.{w1|w3}", COLUMNS, I ", hidden", NULL, NULL),
    SPLIT("block_sparse_moe.experts.#.w2", ROWS, "hidden, " I, NULL, NULL),
    ROUTER("block_sparse_moe.gate", "experts, hidden", NULL),
    PARAMETER_ROUTER("mlp.gate", NULL, NULL, NULL), /* transformers 5 in memory */
    ROUTER_BIAS("block_sparse_moe.e_score_correction_bias", "ROUTER_BIAS"),
    END,
};

#define E "(WIDE_EXPERTS*intermediate_size?+!WIDE_EXPERTS*moe_intermediate_size?)"
#define S "shared_expert_intermediate_size?"

/* The general rules decide on stacks of experts, which are [experts, out, in]. */
static const qc_family_row qwen_moe_layer[] = {
    SPLIT("mlp.experts.#.{gate|up}_proj", COLUMNS, E ", hidden", "moe*!STACKED", NULL),
    SPLIT("mlp.experts.#.down_proj", ROWS, "hidden, " E, "moe*!STACKED", NULL),
    SHAPE("mlp.experts.gate_up_proj", COLUMNS, "experts, 2*" E ", hidden", "moe*STACKED"),
    SHAPE("mlp.experts.down_proj", ROWS, "experts, hidden, " E, "moe*STACKED"),
    SPLIT("mlp.shared_expert.{gate|up}_proj", COLUMNS, S ", hidden", "moe*SHARED_EXPERT", NULL),
    SPLIT("mlp.shared_expert.down_proj", ROWS, "hidden, " S, "moe*SHARED_EXPERT", NULL),
    ROUTER("mlp.gate", "experts, hidden", "moe"),
    ROUTER("mlp.shared_expert_gate", "1, hidden", "moe*SHARED_EXPERT"),
    END,
};

#define QK     "heads*(qk_nope_head_dim+qk_rope_head_dim)"
#define SHARED "n_shared_experts?*" E
#define FULL   "INDEXER*indexed"
#define NEXT   "extra*!NO_EMBEDDING*mtp_use_dedicated_embeddings~1"

/* Layers at num_hidden_layers and above are for multi-token prediction. They bring an embedding, a
 * projection and a head of their own. */
static const qc_family_row deepseek_layer[] = {
    SPLIT("mlp.experts.#.{gate|up}_proj", COLUMNS, E ", hidden", "moe", NULL),
    SPLIT("mlp.experts.#.down_proj", ROWS, "hidden, " E, "moe", NULL),
    SPLIT("mlp.shared_experts.{gate|up}_proj", COLUMNS, SHARED ", hidden", "moe*n_shared_experts?", NULL),
    SPLIT("mlp.shared_experts.down_proj", ROWS, "hidden, " SHARED, "moe*n_shared_experts?", NULL),
    PARAMETER_ROUTER("mlp.gate", "experts, hidden", "moe", NULL),
    ROUTER_BIAS("mlp.gate.e_score_correction_bias", "moe*ROUTER_BIAS"),
    SPLIT("self_attn.q_proj", COLUMNS, QK ", hidden", "LATENT*!q_lora_rank?", NULL),
    SPLIT("self_attn.q_a_proj", WHOLE, "q_lora_rank?, hidden", "LATENT*q_lora_rank?", O_BIAS),
    NORM("self_attn.q_a_layernorm", "q_lora_rank?", "LATENT*q_lora_rank?"),
    SPLIT("self_attn.q_b_proj", COLUMNS, QK ", q_lora_rank?", "LATENT*q_lora_rank?", NULL),
    SPLIT("self_attn.kv_a_proj_with_mqa", WHOLE, "kv_lora_rank+qk_rope_head_dim, hidden", "LATENT", O_BIAS),
    NORM("self_attn.kv_a_layernorm", "kv_lora_rank", "LATENT"),
    SPLIT("self_attn.kv_b_proj", COLUMNS, "heads*(qk_nope_head_dim+v_head_dim), kv_lora_rank", "LATENT", NULL),
    SPLIT("self_attn.o_proj", ROWS, "hidden, heads*v_head_dim", "LATENT", O_BIAS),
    LINEAR("self_attn.indexer.wq_b", "index_n_heads*index_head_dim, q_lora_rank", FULL, NULL),
    LINEAR("self_attn.indexer.wk", "index_head_dim, hidden", FULL, NULL),
    ROW("self_attn.indexer.weights_proj", MODULE, LINEAR, UNKNOWN, QC_TRAIT_FLOAT | QC_TRAIT_PLAIN,
        "index_n_heads, hidden", FULL, NULL, "held in 32 bit by transformers"),
    LAYER_NORM("self_attn.indexer.k_norm", "index_head_dim", FULL),
    PLAIN("eh_proj", "hidden, 2*hidden", "extra"),
    NORM("{enorm|hnorm|shared_head.norm}", "hidden", "extra"),
    EMBEDDING("embed_tokens", "vocab_size, hidden", NEXT),
    HEAD("shared_head.head", "vocab_size, hidden", NEXT),
    END,
};

#define MXFP4(name, role, split, shape)                                                            \
    ROW("mlp.experts." name, TENSOR, role, split, QC_TRAIT_FIXED | QC_TRAIT_U8, shape, "mxfp4",     \
        NULL, "MXFP4, kept as stored")

/* In MXFP4 experts are [experts, out, in], as blocks of 32 along the input with one scale each.
 * Without it they are [experts, in, out], as transformers holds them. */
static const qc_family_row gpt_oss_layer[] = {
    MXFP4("gate_up_proj_blocks", PACKED, COLUMNS, "experts, 2*" I ", hidden/32, 16"),
    MXFP4("gate_up_proj_scales", STATE, COLUMNS, "experts, 2*" I ", hidden/32"),
    MXFP4("down_proj_blocks", PACKED, ROWS, "experts, hidden, " I "/32, 16"),
    MXFP4("down_proj_scales", STATE, ROWS, "experts, hidden, " I "/32"),
    SHAPE("mlp.experts.gate_up_proj", COLUMNS, "experts, hidden, 2*" I, "!mxfp4"),
    SHAPE("mlp.experts.down_proj", ROWS, "experts, " I ", hidden", "!mxfp4"),
    ROW("mlp.experts.gate_up_proj_bias", TENSOR, BIAS, COLUMNS, 0, "experts, 2*" I, NULL, NULL, NULL),
    ROW("mlp.experts.down_proj_bias", TENSOR, BIAS, ROWS, 0, "experts, hidden", NULL, NULL, NULL),
    PARAMETER_ROUTER("mlp.router", "experts, hidden", NULL, "1"),
    ROW("self_attn.sinks", TENSOR, OTHER, SINKS, 0, "heads", NULL, NULL, "attention sinks"),
    END,
};

/* ---- Qwen3.5 and Qwen3-Next: gated delta nets ---- */

#define KEYS   "2*linear_num_key_heads*linear_key_head_dim"
#define VALUES "linear_num_value_heads*linear_value_head_dim"
#define DECAY  "decay of a state"

/* in_proj_a, in_proj_b and in_proj_ba have a row for each head, often too few to quantize. The
 * general rules decide on them. */
static const qc_family_row qwen35_layer[] = {
    LINEAR("linear_attn.in_proj_qkvz", KEYS "+2*" VALUES ", hidden", "state*NEXT", NULL),
    LINEAR("linear_attn.in_proj_qkv", KEYS "+" VALUES ", hidden", "state*!NEXT", NULL),
    LINEAR("linear_attn.in_proj_z", VALUES ", hidden", "state*!NEXT", NULL),
    SHAPE("linear_attn.in_proj_ba.weight", UNKNOWN, "2*linear_num_value_heads, hidden", "state*NEXT"),
    SHAPE("linear_attn.in_proj_{a|b}.weight", UNKNOWN, "linear_num_value_heads, hidden", "state*!NEXT"),
    LINEAR("linear_attn.out_proj", "hidden, " VALUES, "state", NULL),
    ROW("linear_attn.norm", NORM, NORM, UNKNOWN, QC_TRAIT_F32, "linear_value_head_dim", "state", NULL, NULL),
    ROW("linear_attn.conv1d", MODULE, CONV, UNKNOWN, 0, KEYS "+" VALUES ", 1, linear_conv_kernel_dim",
        "state", NULL, NULL),
    OTHER("linear_attn.dt_bias", "linear_num_value_heads", "state", DECAY),
    ROW("linear_attn.A_log", TENSOR, OTHER, UNKNOWN, QC_TRAIT_F32, "linear_num_value_heads", "state", NULL,
        DECAY),
    END,
};

#define MTP "mtp_num_hidden_layers?"

/* What is below "mtp." is for multi-token prediction. */
static const qc_family_row qwen35_mtp[] = {
    LINEAR("fc", "hidden, 2*hidden", MTP, NULL),
    NORM("pre_fc_norm_{embedding|hidden}", "hidden", MTP),
    NORM("norm", "hidden", MTP),
    END,
};

#define VH    "vision.hidden_size"
#define VI    "vision.intermediate_size"
#define MERGE "vision.hidden_size*vision.spatial_merge_size*vision.spatial_merge_size"

static const qc_family_row qwen35_visual_block[] = {
    LINEAR("attn.qkv", "3*" VH ", " VH, NULL, "1"),
    LINEAR("attn.proj", VH ", " VH, NULL, "1"),
    LINEAR("mlp.linear_fc1", VI ", " VH, NULL, "1"),
    LINEAR("mlp.linear_fc2", VH ", " VI, NULL, "1"),
    LAYER_NORM("norm{1|2}", VH, NULL),
    END,
};

static const qc_family_row qwen35_visual[] = {
    CONV("patch_embed.proj", VH ", vision.in_channels?3, vision.temporal_patch_size, "
         "vision.patch_size, vision.patch_size", "1"),
    EMBEDDING("pos_embed", "vision.num_position_embeddings?2304, " VH, NULL),
    LAYER_NORM("merger.norm", VH, NULL),
    LINEAR("merger.linear_fc1", MERGE ", " MERGE, NULL, "1"),
    LINEAR("merger.linear_fc2", "vision.out_hidden_size, " MERGE, NULL, "1"),
    END,
};

/* ---- Granite 4 ---- */

#define MAMBA_HEADS "mamba_n_heads?128"
#define INNER "(mamba_d_head?*mamba_n_heads?128+!mamba_d_head?*mamba_expand?2*hidden/mamba_n_heads?128*mamba_n_heads?128)"
#define MIXED INNER "+2*mamba_n_groups?1*mamba_d_state?256"
#define SHARED_MLP "shared_intermediate_size?1024"

/* The general rules decide on stacks of experts, which are [experts, out, in]. */
static const qc_family_row granite_layer[] = {
    LINEAR("mamba.in_proj", INNER "+" MIXED "+" MAMBA_HEADS ", hidden", "state", "mamba_proj_bias~"),
    LINEAR("mamba.out_proj", "hidden, " INNER, "state", "mamba_proj_bias~"),
    LINEAR("shared_mlp.input_linear", "2*" SHARED_MLP ", hidden", NULL, NULL),
    LINEAR("shared_mlp.output_linear", "hidden, " SHARED_MLP, NULL, NULL),
    ROUTER("block_sparse_moe.router.layer", "experts, hidden", "experts"),
    SHAPE("block_sparse_moe.input_linear.weight", UNKNOWN, "experts, 2*" I ", hidden", "experts"),
    SHAPE("block_sparse_moe.output_linear.weight", UNKNOWN, "experts, hidden, " I, "experts"),
    NORM("mamba.norm", INNER, "state"),
    ROW("mamba.conv1d", MODULE, CONV, UNKNOWN, 0, MIXED ", 1, mamba_d_conv?4", "state", "mamba_conv_bias~1",
        NULL),
    OTHER("mamba.{dt_bias|A_log|D}", MAMBA_HEADS, "state", DECAY),
    END,
};

/* ---- GPT-NeoX, and GPT-2 with Conv1D, [in, out] in the file ---- */

static const qc_family_row gpt_neox_layer[] = {
    LINEAR("attention.query_key_value", "3*hidden, hidden", NULL, "attention_bias~1"),
    LINEAR("attention.dense", "hidden, hidden", NULL, "attention_bias~1"),
    LINEAR("mlp.dense_h_to_4h", "inner, hidden", NULL, "1"),
    LINEAR("mlp.dense_4h_to_h", "hidden, inner", NULL, "1"),
    LAYER_NORM("{input|post_attention}_layernorm", "hidden", NULL),
    BUFFER("attention.{bias|masked_bias|rotary_emb.inv_freq}"),
    END,
};

static const qc_family_row gpt_neox_top[] = {
    EMBEDDING("embed_in", "vocab, hidden", NULL),
    LAYER_NORM("final_layer_norm", "hidden", NULL),
    HEAD("embed_out", NULL, NULL),
    END,
};

static const qc_family_row gpt_neox_head[] = {
    HEAD("embed_out", "vocab, hidden", "!tied"),
    END,
};

static const qc_family_row gpt2_layer[] = {
    CONV1D("attn.c_attn", "hidden, 3*hidden"),
    CONV1D("attn.c_proj", "hidden, hidden"),
    CONV1D("mlp.c_fc", "hidden, inner"),
    CONV1D("mlp.c_proj", "inner, hidden"),
    CONV1D("{attn.q_attn|crossattention.c_attn|crossattention.q_attn|crossattention.c_proj}", NULL),
    LAYER_NORM("ln_{1|2}", "hidden", NULL),
    LAYER_NORM("ln_cross_attn", NULL, NULL),
    BUFFER("{attn|crossattention}.{bias|masked_bias}"),
    END,
};

static const qc_family_row gpt2_top[] = {
    EMBEDDING("wte", "vocab, hidden", NULL),
    EMBEDDING("wpe", "context, hidden", NULL),
    EMBEDDING("{tokens_embed|positions_embed}", NULL, NULL),
    LAYER_NORM("ln_f", "hidden", NULL),
    HEAD("lm_head", NULL, NULL),
    LABELS("{score|classifier|qa_outputs}", NULL, NULL),
    BUFFER("position_ids"),
    END,
};

/* ---- BERT ---- */

static const qc_family_row bert_layer[] = {
    LINEAR("attention.self.{query|key|value}", "hidden, hidden", NULL, "1"),
    LINEAR("attention.output.dense", "hidden, hidden", NULL, "1"),
    LINEAR("intermediate.dense", I ", hidden", NULL, "1"),
    LINEAR("output.dense", "hidden, " I, NULL, "1"),
    LINEAR("crossattention.{self.query|self.key|self.value|output.dense}", NULL, NULL, NULL),
    LAYER_NORM("{attention.|}output.LayerNorm", "hidden", NULL),
    LAYER_NORM("crossattention.output.LayerNorm", NULL, NULL),
    EMBEDDING("{attention|crossattention}.self.distance_embedding", NULL, NULL),
    END,
};

static const qc_family_row bert_top[] = {
    EMBEDDING("embeddings.word_embeddings", "vocab_size, hidden", NULL),
    EMBEDDING("embeddings.position_embeddings", "max_position_embeddings, hidden", NULL),
    EMBEDDING("embeddings.token_type_embeddings", "type_vocab_size?2, hidden", NULL),
    LAYER_NORM("embeddings.LayerNorm", "hidden", NULL),
    BUFFER("embeddings.{position|token_type}_ids"),
    LINEAR("pooler.dense", "hidden, hidden", "!masked", "1"),
    END,
};

static const qc_family_row bert_heads[] = {
    ROW("cls.predictions.bias", TENSOR, BIAS, UNKNOWN, 0, "vocab_size", "!bare", NULL, NULL),
    LINEAR("cls.predictions.transform.dense", "hidden, hidden", "!bare", "1"),
    LAYER_NORM("cls.predictions.transform.LayerNorm", "hidden", "!bare"),
    HEAD("cls.predictions.decoder", NULL, NULL),
    LABELS("cls.seq_relationship", "2, hidden", "!(bare+masked)"),
    LABELS("{classifier|qa_outputs}", NULL, NULL),
    END,
};

/* ---- towers beside a decoder ---- */

#define PATCHES VH ", vision.num_channels?3, vision.patch_size, vision.patch_size"
#define SIDE    "(vision.image_size/vision.patch_size)"

/* SigLIP of gemma3. */
static const qc_family_row siglip_layer[] = {
    LINEAR("self_attn.{q_proj|k_proj|v_proj|out_proj}", VH ", " VH, NULL, "1"),
    LINEAR("mlp.fc1", VI ", " VH, NULL, "1"),
    LINEAR("mlp.fc2", VH ", " VI, NULL, "1"),
    LAYER_NORM("layer_norm{1|2}", VH, NULL),
    END,
};

static const qc_family_row siglip_top[] = {
    CONV("embeddings.patch_embedding", PATCHES, "1"),
    EMBEDDING("embeddings.position_embedding", SIDE "*" SIDE ", " VH, NULL),
    LAYER_NORM("post_layernorm", VH, NULL),
    END,
};

static const qc_family_row siglip_projector[] = {
    OTHER("mm_input_projection_weight", VH ", hidden", NULL, "not the weight of a module"),
    NORM("mm_soft_emb_norm", VH, NULL),
    END,
};

/* Pixtral of mistral3. */
static const qc_family_row pixtral_layer[] = {
    LINEAR("attention.{q|k|v|o}_proj", VH ", " VH, NULL, NULL),
    LINEAR("feed_forward.{gate|up}_proj", VI ", " VH, NULL, NULL),
    LINEAR("feed_forward.down_proj", VH ", " VI, NULL, NULL),
    NORM("{attention|ffn}_norm", VH, NULL),
    END,
};

static const qc_family_row pixtral_top[] = {
    CONV("patch_conv", PATCHES, NULL),
    NORM("ln_pre", VH, NULL),
    END,
};

static const qc_family_row pixtral_projector[] = {
    NORM("norm", VH, NULL),
    LINEAR("patch_merger.merging_layer", VH ", " VH "*spatial_merge_size?2*spatial_merge_size?2",
           NULL, NULL),
    LINEAR("linear_1", "hidden, " VH, NULL, "multimodal_projector_bias~"),
    LINEAR("linear_2", "hidden, hidden", NULL, "multimodal_projector_bias~"),
    END,
};

/* Stacks are [experts, in, out], as transformers holds them; the general rules decide on them. */
static const qc_family_row llama4_layer[] = {
    LINEAR("feed_forward.shared_expert.{gate|up}_proj", I ", hidden", "moe", NULL),
    LINEAR("feed_forward.shared_expert.down_proj", "hidden, " I, "moe", NULL),
    LINEAR("feed_forward.{gate|up}_proj", "intermediate_size_mlp, hidden", "!moe", NULL),
    LINEAR("feed_forward.down_proj", "hidden, intermediate_size_mlp", "!moe", NULL),
    LINEAR("feed_forward.experts.#.{gate|up|down}_proj", NULL, NULL, NULL), /* where they are codes */
    SHAPE("feed_forward.experts.gate_up_proj", UNKNOWN, "experts, hidden, 2*" I, "moe"),
    SHAPE("feed_forward.experts.down_proj", UNKNOWN, "experts, " I ", hidden", "moe"),
    ROUTER("feed_forward.router", "experts, hidden", "moe"),
    END,
};

static const qc_family_row llama4_tower_layer[] = {
    LINEAR("self_attn.{q|k|v|o}_proj", VH ", " VH, NULL, "1"),
    LINEAR("mlp.fc1", VI ", " VH, NULL, "1"),
    LINEAR("mlp.fc2", VH ", " VI, NULL, "1"),
    LAYER_NORM("{input|post_attention}_layernorm", VH, NULL),
    END,
};

static const qc_family_row llama4_tower[] = {
    TABLE("class_embedding", VH, NULL),
    TABLE("positional_embedding_vlm", SIDE "*" SIDE "+1, " VH, NULL),
    LINEAR("patch_embedding.linear", VH ", vision.num_channels?3*vision.patch_size*vision.patch_size",
           NULL, NULL),
    LAYER_NORM("layernorm_{pre|post}", VH, NULL),
    LINEAR("vision_adapter.mlp.fc1", "vision.projector_input_dim, " VI, NULL, NULL),
    LINEAR("vision_adapter.mlp.fc2", "vision.projector_output_dim, vision.projector_output_dim", NULL,
           NULL),
    END,
};

static const qc_family_row llama4_projector[] = {
    LINEAR("linear_1", "hidden, vision.projector_output_dim", NULL, NULL),
    END,
};

/* ---- mllama ---- */

#define GATE "scalar gate"

static const qc_family_row mllama_layer[] = {
    LINEAR("cross_attn.q_proj", "q, hidden", "cross", NULL),
    LINEAR("cross_attn.{k|v}_proj", "kv, hidden", "cross", NULL),
    LINEAR("cross_attn.o_proj", "hidden, q", "cross", NULL),
    NORM("cross_attn.{q|k}_norm", "head_dim", "cross"),
    OTHER("cross_attn_{attn|mlp}_gate", "1", "cross", GATE),
    END,
};

#define TILES     "vision.max_num_tiles"
#define RATIOS    "#vision.supported_aspect_ratios+1"
#define POSITIONS "media/vision.max_num_tiles"

static const qc_family_row mllama_tower_layer[] = {
    LINEAR("self_attn.{q|k|v|o}_proj", VH ", " VH, NULL, NULL),
    LINEAR("mlp.fc1", VI ", " VH, NULL, "1"),
    LINEAR("mlp.fc2", VH ", " VI, NULL, "1"),
    LAYER_NORM("{input|post_attention}_layernorm", VH, NULL),
    OTHER("gate_{attn|ffn}", "1", "extra", GATE),
    END,
};

static const qc_family_row mllama_tower[] = {
    LAYER_NORM("layernorm_{pre|post}", VH, NULL),
    CONV("patch_embedding", VH ", vision.num_channels, vision.patch_size, vision.patch_size", NULL),
    TABLE("class_embedding", VH, NULL),
    TABLE("gated_positional_embedding.embedding", POSITIONS ", " VH, NULL),
    EMBEDDING("gated_positional_embedding.tile_embedding", RATIOS ", " TILES "*" VH "*(" POSITIONS ")",
              NULL),
    EMBEDDING("{pre|post}_tile_positional_embedding.embedding", RATIOS ", " TILES "*" VH, NULL),
    OTHER("{gated|pre_tile|post_tile}_positional_embedding.gate", "1", NULL, GATE),
    END,
};

static const qc_family_row mllama_projector[] = {
    LINEAR("multi_modal_projector", "hidden, vision.vision_output_dim", NULL, "1"),
    END,
};

/* ---- groups ---- */

#define LAYERS(rows)   {"%layers.#.", rows, NULL, "layers", NULL, 0}
#define PREDICT(rows)  {"%layers.#.", rows, NULL, "layers+PREDICTS*num_nextn_predict_layers?", NULL, 0}
#define ONCE(prefix, rows, at)          {prefix, rows, at, NULL, NULL, 0}
#define TIMES(prefix, rows, at, count)  {prefix, rows, at, count, NULL, 0}
#define TOWER          "{model.|}{vision_tower.vision_model.|vision_tower.|vision_model.}"
#define PROJECTOR      "{model.|}multi_modal_projector."
#define TEXT_AND(layer) {LAYERS(layer), LAYERS(decoder_layer), ONCE("%", decoder_top, NULL), \
                         ONCE("%", decoder_head, ""), {NULL, NULL, NULL, NULL, NULL, 0}}
#define NO_GROUP       {NULL, NULL, NULL, NULL, NULL, 0}

static const qc_family_group decoder_groups[] = {
    LAYERS(decoder_layer), ONCE("%", decoder_top, NULL), ONCE("%", decoder_head, ""), NO_GROUP};
static const qc_family_group mixtral_groups[] = TEXT_AND(mixtral_layer);
static const qc_family_group qwen_moe_groups[] = TEXT_AND(qwen_moe_layer);
static const qc_family_group gpt_oss_groups[] = TEXT_AND(gpt_oss_layer);
static const qc_family_group granite_groups[] = TEXT_AND(granite_layer);
static const qc_family_group deepseek_groups[] = {
    PREDICT(deepseek_layer), PREDICT(decoder_layer), ONCE("%", decoder_top, NULL),
    ONCE("%", decoder_head, ""), NO_GROUP};
static const qc_family_group qwen35_groups[] = {
    LAYERS(qwen35_layer), LAYERS(qwen_moe_layer), LAYERS(decoder_layer),
    {"mtp.layers.#.", qwen_moe_layer, NULL, MTP, NULL, 1},
    {"mtp.layers.#.", decoder_layer, NULL, MTP, NULL, 1},
    {"{model.|}visual.blocks.#.", qwen35_visual_block, "model.visual.blocks.#.", "vision.depth",
     "!NEXT", 0},
    {"{model.|}visual.", qwen35_visual, "model.visual.", NULL, "!NEXT", 0},
    ONCE("%", decoder_top, NULL), ONCE("%", decoder_head, ""), ONCE("mtp.", qwen35_mtp, NULL), NO_GROUP};
static const qc_family_group gemma3_groups[] = {
    LAYERS(decoder_layer),
    TIMES(TOWER "encoder.layers.#.", siglip_layer, "vision_tower.vision_model.encoder.layers.#.",
          "vision.num_hidden_layers"),
    ONCE(TOWER, siglip_top, "vision_tower.vision_model."),
    ONCE(PROJECTOR, siglip_projector, "multi_modal_projector."),
    ONCE("%", decoder_top, NULL), ONCE("%", decoder_head, "language_model."), NO_GROUP};
static const qc_family_group mistral3_groups[] = {
    LAYERS(decoder_layer),
    TIMES(TOWER "transformer.layers.#.", pixtral_layer, "vision_tower.transformer.layers.#.",
          "vision.num_hidden_layers"),
    ONCE(TOWER, pixtral_top, "vision_tower."),
    ONCE(PROJECTOR, pixtral_projector, "multi_modal_projector."),
    ONCE("%", decoder_top, NULL), ONCE("%", decoder_head, "language_model."), NO_GROUP};
static const qc_family_group llama4_groups[] = {
    LAYERS(decoder_layer), LAYERS(llama4_layer),
    TIMES(TOWER "model.layers.#.", llama4_tower_layer, "vision_model.model.layers.#.",
          "vision.num_hidden_layers"),
    ONCE(TOWER, llama4_tower, "vision_model."),
    ONCE(PROJECTOR, llama4_projector, "multi_modal_projector."),
    ONCE("%", decoder_top, NULL), ONCE("%", decoder_head, "language_model."), NO_GROUP};
static const qc_family_group mllama_groups[] = {
    LAYERS(decoder_layer), LAYERS(mllama_layer),
    TIMES("{model.|}vision_model.transformer.layers.#.", mllama_tower_layer,
          "vision_model.transformer.layers.#.", "vision.num_hidden_layers"),
    {"{model.|}vision_model.global_transformer.layers.#.", mllama_tower_layer,
     "vision_model.global_transformer.layers.#.", "vision.num_global_layers", NULL, 1},
    ONCE("{model.|}vision_model.", mllama_tower, "vision_model."),
    ONCE("%", decoder_top, NULL), ONCE("%", decoder_head, "language_model."),
    ONCE("{model.|}", mllama_projector, ""), NO_GROUP};
static const qc_family_group bert_groups[] = {
    TIMES("%encoder.layer.#.", bert_layer, NULL, "layers"), ONCE("%", bert_top, NULL),
    ONCE("", bert_heads, NULL), NO_GROUP};
static const qc_family_group gpt2_groups[] = {
    TIMES("%h.#.", gpt2_layer, NULL, "layers"), ONCE("%", gpt2_top, NULL), NO_GROUP};
static const qc_family_group gpt_neox_groups[] = {
    LAYERS(gpt_neox_layer), ONCE("%", gpt_neox_top, NULL), ONCE("%", gpt_neox_head, ""), NO_GROUP};

static const qc_module_rename bert_renames[] = {
    {"encoder.", "bert.encoder."}, {"pooler.", "bert.pooler."}, {"bert.", ""}, {NULL, NULL}};
static const qc_module_rename gpt2_renames[] = {
    {"h.", "transformer.h."}, {"transformer.", ""}, {NULL, NULL}};

/* ---- families ---- */

#define DECODER(type, words, groups, more)                                                         \
    {type, words, "{model.|}", "model.", groups, "vocab_size intermediate_size" more, NULL}
#define BESIDE_TOWER(type, words, groups, more)                                                    \
    {type, words, "{language_model.model.|model.language_model.|language_model.|model.|}",         \
     "language_model.model.", groups, "vocab_size intermediate_size" more, NULL}
#define QWEN35(type, base, words, need)                                                            \
    {type, words, "{model.language_model.|language_model.model.|model.|mtp.|}", base,              \
     qwen35_groups, "vocab_size linear_num_key_heads linear_num_value_heads linear_key_head_dim "  \
     "linear_value_head_dim linear_conv_kernel_dim " need, NULL}
#define GPT2(type, words)                                                                          \
    {type, words, "{transformer.|}", "transformer.", gpt2_groups, "n_positions vocab_size",        \
     gpt2_renames}
#define TOWER_NEEDS " vision.hidden_size vision.intermediate_size vision.num_hidden_layers "        \
                    "vision.patch_size vision.image_size"
#define LATENT_NEEDS  " kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
#define INDEXER_NEEDS LATENT_NEEDS " q_lora_rank index_n_heads index_head_dim"
#define EXPERT_NEEDS  "moe_intermediate_size shared_expert_intermediate_size"

const qc_family qc_families[] = {
    DECODER("llama", " ATTENTION_BIAS MLP_BIAS ROTARY TP ", decoder_groups, ""),
    DECODER("mistral", " ROTARY TP ", decoder_groups, ""),
    DECODER("mixtral", " EXPERTS NO_MLP ROTARY TP ", mixtral_groups, ""),
    DECODER("minimax_m2", " EXPERTS NO_MLP ROUTER_BIAS ALL_HEADS FP8 ", mixtral_groups, ""),
    DECODER("qwen2", " QKV_BIAS ROTARY TP ", decoder_groups, ""),
    DECODER("qwen3", " ATTENTION_BIAS HEAD_NORMS ROTARY TP ", decoder_groups, ""),
    DECODER("qwen2_moe", " QKV_BIAS EXPERTS SHARED_EXPERT ROTARY TP ", qwen_moe_groups, ""),
    DECODER("qwen3_moe", " ATTENTION_BIAS HEAD_NORMS EXPERTS ROTARY TP ", qwen_moe_groups, ""),
    QWEN35("qwen3_next", "model.", " NEXT HYBRID GATED HEAD_NORMS EXPERTS SHARED_EXPERT ", EXPERT_NEEDS),
    DECODER("phi3", " FUSED_QKV FUSED_MLP ROTARY TP ", decoder_groups, ""),
    DECODER("gemma", " ATTENTION_BIAS TIED ROTARY TP ", decoder_groups, ""),
    DECODER("gemma2", " ATTENTION_BIAS FOUR_NORMS TIED ROTARY TP ", decoder_groups, ""),
    BESIDE_TOWER("gemma3", " ATTENTION_BIAS HEAD_NORMS FOUR_NORMS TIED TOWER ", gemma3_groups,
                 TOWER_NEEDS),
    DECODER("gemma3_text", " ATTENTION_BIAS HEAD_NORMS FOUR_NORMS TIED ROTARY TP ", decoder_groups, ""),
    DECODER("deepseek_v2", " ATTENTION_BIAS EXPERTS LATENT ROTARY TP ", deepseek_groups, LATENT_NEEDS),
    DECODER("deepseek_v3", " ATTENTION_BIAS EXPERTS LATENT ROUTER_BIAS PREDICTS FP8 ROTARY TP ",
            deepseek_groups, LATENT_NEEDS),
    DECODER("deepseek_v32", " ATTENTION_BIAS EXPERTS LATENT ROUTER_BIAS PREDICTS INDEXER FP8 ",
            deepseek_groups, INDEXER_NEEDS),
    DECODER("kimi_k2", " ATTENTION_BIAS EXPERTS LATENT ROUTER_BIAS PREDICTS FP8 ", deepseek_groups,
            LATENT_NEEDS),
    DECODER("gpt_oss", " ATTENTION_BIAS NO_MLP MXFP4 ROTARY TP ", gpt_oss_groups, ""),
    DECODER("granite", " ATTENTION_BIAS MLP_BIAS ", decoder_groups, ""),
    {"granitemoehybrid", " ATTENTION_BIAS NO_MLP HYBRID ", "{model.|}", "model.", granite_groups,
     "vocab_size", NULL},
    DECODER("smollm3", " ATTENTION_BIAS MLP_BIAS TIED ", decoder_groups, ""),
    DECODER("olmo2", " ATTENTION_BIAS WIDE_NORMS ", decoder_groups, ""),
    DECODER("olmo3", " ATTENTION_BIAS WIDE_NORMS ", decoder_groups, ""),
    DECODER("olmoe", " ATTENTION_BIAS EXPERTS WIDE_EXPERTS ALL_HEADS ", qwen_moe_groups, ""),
    DECODER("glm4", " QKV_BIAS_IF FUSED_MLP GLM_NORMS ", decoder_groups, ""),
    DECODER("glm4_moe", " QKV_BIAS_IF QK_NORM_IF EXPERTS ROUTER_BIAS PREDICTS ", deepseek_groups, ""),
    DECODER("glm4_moe_lite", " ATTENTION_BIAS EXPERTS LATENT ROUTER_BIAS PREDICTS ", deepseek_groups,
            LATENT_NEEDS),
    DECODER("glm_moe_dsa",
            " ATTENTION_BIAS EXPERTS LATENT ROUTER_BIAS PREDICTS NO_EMBEDDING INDEXER FP8 ",
            deepseek_groups, INDEXER_NEEDS),
    BESIDE_TOWER("mistral3", " TOWER ", mistral3_groups, TOWER_NEEDS),
    BESIDE_TOWER("llama4", " ATTENTION_BIAS EXPERTS NO_MLP TOWER ", llama4_groups, TOWER_NEEDS),
    QWEN35("qwen3_5", "model.language_model.", " HYBRID GATED HEAD_NORMS TOWER ", I),
    QWEN35("qwen3_5_moe", "model.language_model.",
           " HYBRID GATED HEAD_NORMS EXPERTS STACKED SHARED_EXPERT TOWER ", EXPERT_NEEDS),
    BESIDE_TOWER("mllama", " EXTRA_ROWS TOWER ", mllama_groups,
                 " vision.hidden_size vision.intermediate_size vision.patch_size vision.max_num_tiles "
                 "vision.num_channels vision.vision_output_dim"),
    {"bert", " TIED ", "{bert.|}", "bert.", bert_groups,
     "vocab_size intermediate_size max_position_embeddings", bert_renames},
    GPT2("gpt2", " TIED "),
    {"gpt_neox", " ", "{gpt_neox.|}", "gpt_neox.", gpt_neox_groups, "vocab_size", NULL},
    DECODER("glm", " QKV_BIAS_IF FUSED_MLP ", decoder_groups, ""),
    DECODER("seed_oss", " QKV_BIAS_IF MLP_BIAS ", decoder_groups, ""),
    DECODER("helium", " ATTENTION_BIAS MLP_BIAS ", decoder_groups, ""),
    DECODER("dots1", " ATTENTION_BIAS HEAD_NORMS EXPERTS ROUTER_BIAS ", deepseek_groups, ""),
    DECODER("youtu", " ATTENTION_BIAS LATENT TIED ", deepseek_groups, LATENT_NEEDS),
    BESIDE_TOWER("mllama_text_model", " ROTARY ROLES ", mllama_groups, ""),
    GPT2("openai-gpt", " TIED ROLES "),
    GPT2("imagegpt", " TIED ROLES "),
};
const size_t qc_family_count = sizeof qc_families / sizeof *qc_families;
