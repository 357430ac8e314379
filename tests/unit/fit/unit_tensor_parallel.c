/* How vLLM splits tensors over cards: bytes worked out by hand. The sums of whole models are
 * compared with vLLM's in tests/cli/test_tensor_parallel.py. */
#include "convert/fit/fit.h"
#include "convert/fit/tensor_parallel.h"
#include "tests/fixtures/test.h"

/* 8 heads of 4, 2 of them for k and v. */
static const qc_geometry eight_heads = {.heads = 8, .kv_heads = 2, .head_dim = 4};

TEST(rows_tell_the_split)
{
    static const struct {
        const char *type, *name;
        qc_split split;
    } rows[] = {
        {"llama", "model.layers.0.self_attn.q_proj.weight", QC_SPLIT_COLUMNS},
        {"llama", "model.layers.0.self_attn.q_proj.bias", QC_SPLIT_COLUMNS},
        {"llama", "model.layers.0.self_attn.k_proj.weight_packed", QC_SPLIT_KV_HEADS},
        {"llama", "model.layers.0.self_attn.v_proj.weight_scale", QC_SPLIT_KV_HEADS},
        {"phi3", "model.layers.0.self_attn.qkv_proj.weight", QC_SPLIT_FUSED_QKV},
        {"llama", "model.layers.0.self_attn.o_proj.weight_shape", QC_SPLIT_ROWS},
        {"llama", "model.layers.0.mlp.gate_proj.weight_scale_inv", QC_SPLIT_COLUMNS},
        {"qwen2_moe", "model.layers.0.mlp.gate.weight", QC_SPLIT_WHOLE},
        {"deepseek_v3", "model.layers.0.mlp.gate.e_score_correction_bias", QC_SPLIT_WHOLE},
        {"qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight", QC_SPLIT_WHOLE},
        {"qwen2_moe", "model.layers.0.mlp.experts.7.down_proj.weight", QC_SPLIT_ROWS},
        {"mixtral", "model.layers.0.block_sparse_moe.experts.7.w2.weight", QC_SPLIT_ROWS},
        {"mixtral", "model.layers.0.block_sparse_moe.experts.7.w3.weight", QC_SPLIT_COLUMNS},
        {"deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", QC_SPLIT_WHOLE},
        {"deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", QC_SPLIT_COLUMNS},
        {"llama", "model.layers.0.self_attn.k_norm.weight", QC_SPLIT_WHOLE},
        {"llama", "model.norm.weight", QC_SPLIT_WHOLE},
        {"llama", "model.embed_tokens.weight", QC_SPLIT_VOCABULARY},
        {"llama", "lm_head.weight", QC_SPLIT_VOCABULARY},
        {"gpt_oss", "model.layers.0.self_attn.sinks", QC_SPLIT_SINKS},
        {"gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_blocks", QC_SPLIT_COLUMNS},
        {"gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", QC_SPLIT_ROWS},
        {"llama", "model.layers.0.self_attn.rotary_emb.inv_freq", QC_SPLIT_ABSENT},
        {"llama", "model.layers.0.self_attn.W_pack.weight", QC_SPLIT_UNKNOWN},
        {"llama", "model.layers.0.mlp.mygate.weight", QC_SPLIT_UNKNOWN},
        {"llama", "model.layers.0.self_attn.q_proj.lora", QC_SPLIT_UNKNOWN},
        {"llama", "weight", QC_SPLIT_UNKNOWN},
        {"llama", "", QC_SPLIT_UNKNOWN},
        {"mixtral", "model.layers.0.mlp.experts.7.down_proj.weight", QC_SPLIT_UNKNOWN},
        {"no family", "model.layers.0.self_attn.q_proj.weight", QC_SPLIT_UNKNOWN},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const qc_split split = qc_family_split(qc_family_find(rows[i].type), rows[i].name);
        if (split != rows[i].split)
            fail_msg("%s: %s: %d", rows[i].type, rows[i].name, (int)split);
    }
}

/* The bytes of one of `ranks` cards, or UINT64_MAX where it is refused. */
static uint64_t bytes_of(const char *type, const char *name, qc_dtype dtype, unsigned ndim,
                         const uint64_t *dims, uint32_t ranks)
{
    uint64_t out = 0;
    qc_error err = {0};
    const qc_split_tensor t = {.name = name, .dtype = dtype, .ndim = ndim, .dims = dims};
    qc_status st =
        qc_split_bytes(&out, &t, &(qc_tp_split){qc_family_find(type), &eight_heads, ranks}, &err);
    if (st == QC_OK)
        return out;
    assert_int_equal(st, QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, name));
    return UINT64_MAX;
}

static uint64_t bytes(const char *name, qc_dtype dtype, unsigned ndim, const uint64_t *dims,
                      uint32_t ranks)
{
    return bytes_of("deepseek_v3", name, dtype, ndim, dims, ranks);
}

#define ATTENTION "model.layers.0.self_attn."
#define MLP       "model.layers.0.mlp."

#define DIMS(...)                                                                                  \
    sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), (const uint64_t[])                       \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

TEST(weights_are_split)
{
    assert_int_equal(bytes(ATTENTION "q_proj.weight", QC_DTYPE_BF16, DIMS(32, 10), 2), 16 * 10 * 2);
    assert_int_equal(bytes(ATTENTION "q_proj.bias", QC_DTYPE_BF16, DIMS(32), 2), 16 * 2);
    assert_int_equal(bytes(ATTENTION "o_proj.weight", QC_DTYPE_BF16, DIMS(10, 32), 2), 10 * 16 * 2);
    assert_int_equal(bytes(ATTENTION "o_proj.bias", QC_DTYPE_BF16, DIMS(10), 2), 10 * 2);
    /* Two KV heads: one on each of 2 cards, and copies on 4 and 8. */
    assert_int_equal(bytes(ATTENTION "k_proj.weight", QC_DTYPE_BF16, DIMS(8, 10), 1), 8 * 10 * 2);
    assert_int_equal(bytes(ATTENTION "k_proj.weight", QC_DTYPE_BF16, DIMS(8, 10), 2), 4 * 10 * 2);
    assert_int_equal(bytes(ATTENTION "k_proj.weight", QC_DTYPE_BF16, DIMS(8, 10), 8), 4 * 10 * 2);
    /* 8 + 2 + 2 heads of 4 rows; on a card of 4 there are 2 + 1 + 1. */
    assert_int_equal(bytes(ATTENTION "qkv_proj.weight", QC_DTYPE_BF16, DIMS(48, 10), 4),
                     16 * 10 * 2);
    assert_int_equal(bytes(ATTENTION "qkv_proj.weight", QC_DTYPE_BF16, DIMS(47, 10), 4),
                     UINT64_MAX);
    assert_int_equal(bytes(MLP "down_proj.weight", QC_DTYPE_BF16, DIMS(10, 33), 2), UINT64_MAX);
    assert_int_equal(bytes(MLP "up_proj.weight", QC_DTYPE_BF16, DIMS(33, 10), 2), UINT64_MAX);
    /* 1001 rows are padded to 1024. */
    assert_int_equal(bytes("lm_head.weight", QC_DTYPE_BF16, DIMS(1001, 10), 2), 512 * 10 * 2);
    assert_int_equal(bytes("lm_head.weight", QC_DTYPE_BF16, DIMS(1024, 10), 1), 1024 * 10 * 2);
    assert_int_equal(bytes("lm_head.weight", QC_DTYPE_BF16, DIMS(1024, 10), 3), UINT64_MAX);
    assert_int_equal(bytes("model.norm.weight", QC_DTYPE_F32, DIMS(10), 2), 10 * 2);
    assert_int_equal(bytes("model.x.weight", QC_DTYPE_F32, DIMS(10), 2), UINT64_MAX);
}

static uint64_t packed_scale(const char *name, const uint64_t *dims, uint32_t ranks)
{
    uint64_t out = 0;
    const qc_split_tensor t = {
        .name = name, .dtype = QC_DTYPE_F32, .ndim = 2, .dims = dims, .packed = 1};
    const qc_tp_split split = {qc_family_find("llama"), &eight_heads, ranks};
    assert_int_equal(qc_split_bytes(&out, &t, &split, NULL), QC_OK);
    return out;
}

TEST(scales_follow_their_weight)
{
    /* One scale a row, of 8-bit codes: in single precision, and whole where rows are split. */
    assert_int_equal(bytes(ATTENTION "q_proj.weight", QC_DTYPE_I8, DIMS(32, 10), 2), 16 * 10);
    assert_int_equal(bytes(ATTENTION "q_proj.weight_scale", QC_DTYPE_BF16, DIMS(32, 1), 2), 16 * 4);
    assert_int_equal(bytes(ATTENTION "o_proj.weight_scale", QC_DTYPE_F32, DIMS(10, 1), 2), 10 * 4);
    /* Packed codes: groups of 32 along 128 inputs, in 16 bit whatever the file has. */
    assert_int_equal(bytes(ATTENTION "o_proj.weight_packed", QC_DTYPE_I32, DIMS(10, 16), 2),
                     10 * 8 * 4);
    assert_int_equal(packed_scale(ATTENTION "o_proj.weight_scale", (const uint64_t[]){10, 4}, 2),
                     10 * 2 * 2);
    assert_int_equal(packed_scale(ATTENTION "o_proj.weight_scale", (const uint64_t[]){10, 1}, 2),
                     10 * 2);
    assert_int_equal(packed_scale(ATTENTION "q_proj.weight_scale", (const uint64_t[]){32, 4}, 2),
                     16 * 4 * 2);
    /* Three groups do not divide over two cards. */
    assert_int_equal(bytes(ATTENTION "o_proj.weight_scale", QC_DTYPE_BF16, DIMS(10, 3), 2),
                     UINT64_MAX);
    /* The shape is there once for q, k, v and once for gate, up. */
    assert_int_equal(bytes(ATTENTION "q_proj.weight_shape", QC_DTYPE_I64, DIMS(2), 2), 16);
    assert_int_equal(bytes(ATTENTION "v_proj.weight_shape", QC_DTYPE_I64, DIMS(2), 2), 0);
    assert_int_equal(bytes(MLP "up_proj.weight_shape", QC_DTYPE_I64, DIMS(2), 2), 0);
    assert_int_equal(bytes(MLP "experts.0.down_proj.weight_shape", QC_DTYPE_I64, DIMS(2), 2), 4);
    /* FP8 in tiles of 128 x 128 */
    assert_int_equal(bytes(MLP "down_proj.weight_scale_inv", QC_DTYPE_F32, DIMS(6, 4), 2),
                     6 * 2 * 4);
}

TEST(stacks_of_experts_are_split)
{
    /* gpt-oss: 3 experts, 64 inputs, twice 96 outputs, in blocks of 32 codes */
    assert_int_equal(
        bytes_of("gpt_oss", MLP "experts.gate_up_proj_blocks", QC_DTYPE_U8, DIMS(3, 192, 2, 16), 2),
        3 * 96 * 2 * 16);
    assert_int_equal(
        bytes_of("gpt_oss", MLP "experts.gate_up_proj_bias", QC_DTYPE_BF16, DIMS(3, 192), 2),
        3 * 96 * 2);
    assert_int_equal(
        bytes_of("gpt_oss", MLP "experts.down_proj_blocks", QC_DTYPE_U8, DIMS(3, 64, 4, 16), 2),
        3 * 64 * 2 * 16);
    assert_int_equal(
        bytes_of("gpt_oss", MLP "experts.down_proj_blocks", QC_DTYPE_U8, DIMS(3, 64, 3, 16), 2),
        UINT64_MAX);
    assert_int_equal(
        bytes_of("gpt_oss", MLP "experts.down_proj_scales", QC_DTYPE_U8, DIMS(3, 64, 4), 2),
        3 * 64 * 2);
    assert_int_equal(
        bytes_of("gpt_oss", MLP "experts.down_proj_bias", QC_DTYPE_BF16, DIMS(3, 64), 2),
        3 * 64 * 2);
    /* In 16 bit they lie as [experts, in, out]. */
    assert_int_equal(
        bytes_of("gpt_oss", MLP "experts.gate_up_proj", QC_DTYPE_BF16, DIMS(3, 5, 192), 2),
        3 * 5 * 96 * 2);
    assert_int_equal(bytes_of("gpt_oss", MLP "experts.down_proj", QC_DTYPE_BF16, DIMS(3, 96, 5), 2),
                     3 * 48 * 5 * 2);
    assert_int_equal(bytes_of("gpt_oss", ATTENTION "sinks", QC_DTYPE_BF16, DIMS(8), 2), 4 * 2);
}

TEST(a_card_has_its_share_of_the_geometry)
{
    qc_geometry g = eight_heads, share;
    qc_layer_geometry layers[] = {
        {.attention = QC_ATTENTION_FULL, .kv_elems = 16},
        {.attention = QC_ATTENTION_MLA, .kv_elems = 60, .kv_elems_expanded = 160}};
    g.layers = layers;
    g.layer_count = 2;
    g.intermediate = 100;
    g.vocab = 1000;
    SCOPED(qc_arena) arena = {0};
    assert_int_equal(qc_tp_geometry(&share, &arena, &g, 4, NULL), QC_OK);
    assert_int_equal(share.heads, 2);
    assert_int_equal(share.kv_heads, 1);
    assert_int_equal(share.intermediate, 25);
    assert_int_equal(share.vocab, 1000); /* every card gets all logits */
    assert_int_equal(share.layers[0].kv_elems, 8);
    assert_int_equal(share.layers[1].kv_elems, 60);
    assert_int_equal(share.layers[1].kv_elems_expanded, 40);
    assert_int_equal(layers[0].kv_elems, 16);
}

TEST(sequences_share_the_tokens_in_flight)
{
    const qc_geometry g = {.decoder = 1, .hidden = 100, .heads = 2, .kv_heads = 1, .head_dim = 50};
    qc_fit_options o = {.context = 1000, .batch = 3, .prefill = 10};
    assert_int_equal(qc_workspace_bytes(&g, &o, QC_SEGMENT_NORM, 0, 0, 0), 2 * 2 * 100 * 30);
    o.parallel = QC_PARALLEL_TENSOR;
    assert_int_equal(qc_workspace_bytes(&g, &o, QC_SEGMENT_NORM, 0, 0, 0), 2 * 2 * 100 * 10);
    o.context = 2;
    assert_int_equal(qc_workspace_bytes(&g, &o, QC_SEGMENT_NORM, 0, 0, 0), 2 * 2 * 100 * 6);
}

TEST(vllms_ways_are_taken)
{
    qc_strbuf text;
    qc_fit_options o = {.context = 4096, .margin = 0.85, .kv_bits = 16};
    qc_tp_defaults(&o);
    assert_int_equal(o.prefill, 0);
    assert_int_equal(o.mla_absorbed, 0);
    o.tensor_parallel = 2;
    qc_tp_defaults(&o);
    assert_int_equal(o.parallel, QC_PARALLEL_TENSOR);
    assert_int_equal(o.prefill, 2048);
    assert_int_equal(o.mla_absorbed, 1);
    qc_strbuf_init(&text, 1000);
    qc_tp_serve_options(&text, &o, 2);
    assert_string_equal(text.data, "--tensor-parallel-size 2 --max-model-len 4096 "
                                   "--gpu-memory-utilization 0.85 --max-num-batched-tokens 2048");
    qc_strbuf_deinit(&text);
    /* --prefill whole */
    o.prefill = 0;
    o.prefill_given = 1;
    o.kv_bits = 8;
    qc_tp_defaults(&o);
    qc_strbuf_init(&text, 1000);
    qc_tp_serve_options(&text, &o, 4);
    assert_string_equal(text.data, "--tensor-parallel-size 4 --max-model-len 4096 "
                                   "--gpu-memory-utilization 0.85 --max-num-batched-tokens 4096 "
                                   "--kv-cache-dtype fp8");
    qc_strbuf_deinit(&text);
}
