/* What a card of qconv's plug-in holds of a weight: bytes worked out by hand. What vLLM's workers
 * hold is compared in tests/interop/test_interop_vllm.py. */
#include "convert/fit/plugin_share.h"
#include "tests/fixtures/test.h"

/* 8 heads, 2 of them for k and v. */
static const qc_geometry eight_heads = {.heads = 8, .kv_heads = 2, .head_dim = 4};

static qc_tp_split split_of(uint32_t ranks)
{
    return (qc_tp_split){qc_family_find("deepseek_v3"), &eight_heads, ranks};
}

#define ATTENTION "model.layers.0.self_attn."
#define MLP       "model.layers.0.mlp."

/* On the fullest of so many cards; UINT64_MAX where it is refused, with a message that has the name
 * and `words`. */
static uint64_t bytes(const char *name, qc_job j, uint32_t ranks, const char *words)
{
    uint64_t out = 0;
    qc_error err = {0};
    qc_checkpoint_tensor tensor = {.name = name};
    qc_checkpoint model = {.tensors = &tensor, .tensor_count = 1};
    const qc_recipe_entry entry = {.scheme = j.scheme};
    const qc_plan plan = {.model = &model, .jobs = &j, .job_count = 1};
    const qc_tp_split split = split_of(ranks);
    j.entry = &entry;
    qc_status st = qc_plugin_bytes(&out, &plan, &j, &split, &err);
    if (st == QC_OK)
        return out;
    assert_int_equal(st, QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, name));
    if (!strstr(err.msg, words))
        fail_msg("'%s' has not '%s'", err.msg, words);
    return UINT64_MAX;
}

static qc_job nf4(uint64_t rows, uint64_t cols, uint32_t block, int nested)
{
    return (qc_job){.scheme = QC_SCHEME_NF4,
                    .rows = rows,
                    .elems = rows * cols,
                    .form = qc_scheme_form(QC_SCHEME_NF4, cols, block, nested)};
}

static qc_job int8_rows(uint64_t rows, uint64_t cols)
{
    return (qc_job){.scheme = QC_SCHEME_INT8_ROWS,
                    .rows = rows,
                    .elems = rows * cols,
                    .form = qc_scheme_form(QC_SCHEME_INT8_ROWS, cols, 0, 0)};
}

TEST(rows_are_cut_on_blocks)
{
    /* 8 rows of 224 blocks, in groups of 256. */
    assert_int_equal(bytes(ATTENTION "q_proj.weight", nf4(16, 14336, 64, 1), 2, NULL),
                     8 * 7168 + 1792 + 7 * 4);
    assert_int_equal(bytes(ATTENTION "q_proj.weight", nf4(16, 14336, 64, 0), 2, NULL),
                     8 * 7168 + 1792 * 4);
    assert_int_equal(bytes(ATTENTION "q_proj.weight", int8_rows(16, 30), 2, NULL), 8 * 30 + 8 * 4);
}

TEST(rows_within_a_block_bring_those_before_them)
{
    /* The second card has the head of rows 3 to 6 and reads from row 2, where a block begins. */
    assert_int_equal(bytes(ATTENTION "k_proj.weight", nf4(6, 96, 64, 0), 2, NULL), 4 * 48 + 6 * 4);
    /* With nested scales that card has floats, because an odd block is the first. */
    assert_int_equal(bytes(ATTENTION "k_proj.weight", nf4(6, 96, 64, 1), 2, NULL), 4 * 48 + 6 * 4);
    /* Four cards have copies of two heads. */
    assert_int_equal(bytes(ATTENTION "k_proj.weight", int8_rows(6, 96), 4, NULL), 3 * 96 + 3 * 4);
}

TEST(columns_make_blocks_and_groups_smaller)
{
    /* Half of a row is 112 blocks, so groups are of 16. */
    assert_int_equal(bytes(MLP "down_proj.weight", nf4(16, 14336, 64, 1), 2, NULL),
                     16 * 3584 + 16 * 112 + 16 * 7 * 4);
    /* 96 columns are three halves of a block: floats, for blocks of 32. */
    assert_int_equal(bytes(MLP "down_proj.weight", nf4(4, 192, 64, 1), 2, NULL),
                     4 * 48 + 4 * 3 * 4);
    assert_int_equal(bytes(ATTENTION "o_proj.weight", int8_rows(10, 30), 2, NULL),
                     10 * 15 + 10 * 4);
    assert_int_equal(bytes(MLP "down_proj.weight", nf4(4, 440, 64, 1), 2,
                           "columns 0 to 220 of a weight in nf4 cut through 32 weights that stay "
                           "together; it can be cut at multiples of 440 columns"),
                     UINT64_MAX);
}

TEST(a_card_has_a_table_once)
{
    qc_job flat = nf4(64, 64, 64, 0), nested = nf4(64, 64, 64, 1), rows = int8_rows(64, 64);
    unsigned counted = 0;
    assert_int_equal(qc_plugin_tables(&rows, &counted), 0);
    assert_int_equal(qc_plugin_tables(&flat, &counted), 16 * 4);
    assert_int_equal(qc_plugin_tables(&nested, &counted), 256 * 4);
    assert_int_equal(qc_plugin_tables(&nested, &counted), 0);
    counted = 0;
    assert_int_equal(qc_plugin_tables(&nested, &counted), 272 * 4);
}

TEST(several_matrices_in_one)
{
    /* 8 + 2 + 2 heads of 4 rows; on a card of 2: 4 + 1 + 1. */
    assert_int_equal(bytes(ATTENTION "qkv_proj.weight", nf4(48, 64, 64, 0), 2, NULL),
                     24 * 32 + 24 * 4);
    assert_int_equal(bytes(MLP "gate_up_proj.weight", nf4(48, 64, 64, 0), 2, NULL),
                     24 * 32 + 24 * 4);
    assert_int_equal(bytes(ATTENTION "kv_a_proj_with_mqa.weight", nf4(48, 64, 64, 0), 2, NULL),
                     48 * 32 + 48 * 4);
}

static uint64_t elems(const char *name, uint64_t count, uint32_t ranks, qc_format format)
{
    const qc_tp_split split = split_of(ranks);
    return qc_plugin_elems(name, count, &split, format);
}

TEST(what_is_not_cut)
{
    /* Experts are restored to 16 bits where a block is in the way of down's columns. */
    assert_int_equal(bytes(MLP "experts.3.down_proj.weight", nf4(4, 440, 64, 1), 2, NULL),
                     4 * 220 * 2);
    assert_int_equal(bytes(MLP "experts.3.gate_proj.weight", nf4(440, 64, 64, 1), 2, NULL),
                     220 * 64 * 2);
    assert_int_equal(bytes(MLP "experts.3.down_proj.weight", nf4(4, 512, 64, 0), 2, NULL),
                     4 * 256 / 2 + 4 * 256 / 64 * 4);
    assert_int_equal(bytes(MLP "experts.3.gate_proj.weight", nf4(512, 64, 64, 0), 2, NULL),
                     256 * 64 / 2 + 256 * 4);
    assert_int_equal(elems(MLP "experts.3.down_proj.weight", 100, 2, QC_FORMAT_BITSANDBYTES), 0);
    assert_int_equal(elems(MLP "down_proj.weight", 101, 2, QC_FORMAT_BITSANDBYTES), 51);
    assert_int_equal(elems(ATTENTION "kv_a_proj_with_mqa.weight", 101, 2, QC_FORMAT_BITSANDBYTES),
                     101);
    assert_int_equal(elems(MLP "down_proj.weight", 101, 2, QC_FORMAT_COMPRESSED_TENSORS), 0);
    assert_int_equal(elems(MLP "down_proj.weight", 101, 0, QC_FORMAT_BITSANDBYTES), 101);
    qc_job stack = nf4(64, 64, 64, 0);
    stack.stack = 1;
    assert_int_equal(bytes(MLP "experts.down_proj", stack, 2, "experts stacked in one tensor"),
                     UINT64_MAX);
    assert_int_equal(
        bytes(ATTENTION "q_proj.weight", int8_rows(15, 64), 2, "15 rows and 64 columns do"),
        UINT64_MAX);
    assert_int_equal(bytes(MLP "down_proj.weight", int8_rows(15, 63), 2, "do not divide"),
                     UINT64_MAX);
    assert_int_equal(bytes("lm_head.weight", int8_rows(64, 64), 2, "takes the head in 16 bits"),
                     UINT64_MAX);
    assert_int_equal(
        bytes(ATTENTION "unknown.weight", int8_rows(64, 64), 2, "not known how vLLM splits"),
        UINT64_MAX);
}
