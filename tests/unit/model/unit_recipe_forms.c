/* Weights in FP8 and MXFP4, multi-token prediction layers and fused experts: what the recipe makes
 * of them, from names, dtypes and shapes. Values are for tests/cli/test_forms.py. */
#include "convert/model/expert_split.h"
#include "convert/model/recipe.h"

#include "tests/fixtures/recipe_fixture.h"

#define Q  "model.layers.0.self_attn.q_proj.weight"
#define UP "model.layers.0.mlp.experts.gate_up_proj"

static void add2(fixture *f, const char *name, qc_dtype dtype, uint64_t rows, uint64_t cols)
{
    fixture_add_dims(f, name, dtype, 2, (uint64_t[]){rows, cols});
}

static void add3(fixture *f, const char *name, qc_dtype dtype, uint64_t a, uint64_t b, uint64_t c)
{
    fixture_add_dims(f, name, dtype, 3, (uint64_t[]){a, b, c});
}

static const char deepseek[] =
    "{\"model_type\":\"deepseek_v3\",\"num_hidden_layers\":61,\"quantization_config\":"
    "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}}";

TEST(fp8_blocks)
{
    static const struct {
        qc_to to;
        uint32_t block;
        qc_scheme scheme;
        qc_dtype out;
    } runs[] = {
        {QC_TO_NF4, 0, QC_SCHEME_NF4, QC_DTYPE_F8_E4M3},
        {QC_TO_INT8, 0, QC_SCHEME_INT8_ROWS, QC_DTYPE_F8_E4M3},
        {QC_TO_INT8, 64, QC_SCHEME_INT8_BLOCKS, QC_DTYPE_F8_E4M3},
        {QC_TO_AUTO, 0, QC_SCHEME_NF4, QC_DTYPE_F8_E4M3},
        {QC_TO_BF16, 0, QC_SCHEME_CAST, QC_DTYPE_BF16},
        {QC_TO_FP16, 0, QC_SCHEME_CAST, QC_DTYPE_F16},
        {QC_TO_KEEP, 0, QC_SCHEME_KEEP, QC_DTYPE_F8_E4M3},
    };
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        SCOPED(fixture) f = {0};
        fixture_init(&f, runs[r].to);
        f.options.block_elems = runs[r].block;
        fixture_config(&f, deepseek);
        add2(&f, Q, QC_DTYPE_F8_E4M3, 576, 200);
        add2(&f, Q "_scale_inv", QC_DTYPE_F32, 5, 2);
        fixture_make_ok(&f);
        const qc_recipe_entry *e = fixture_entry(&f, Q);
        fixture_expect(&f, Q, runs[r].scheme, QC_ROLE_LINEAR);
        fixture_expect(&f, Q "_scale_inv",
                       runs[r].to == QC_TO_KEEP ? QC_SCHEME_KEEP : QC_SCHEME_ABSORBED,
                       QC_ROLE_STATE);
        assert_int_equal(e->out_dtype, runs[r].out);
        assert_int_equal(e->transpose, 0);
        assert_non_null(e->coded);
        assert_int_equal(e->coded->coding, QC_CODING_FP8);
        assert_int_equal(e->coded->tile_rows, 128);
        assert_int_equal(e->coded->tile_cols, 128);
        assert_int_equal(e->coded->tiles_across, 2);
        assert_int_equal(e->coded->dtype, QC_DTYPE_BF16);
        assert_string_equal(e->coded->name, Q);
        assert_int_equal(f.recipe.input_is_coded, 1);
        assert_int_equal(f.recipe.input_is_quantized, 0);
    }
}

TEST(fp8_kept_with_its_scales)
{
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, deepseek, "");
    add2(&f, Q, QC_DTYPE_F8_E4M3, 256, 256);
    add2(&f, Q "_scale_inv", QC_DTYPE_F32, 2, 2);
    fixture_rule(&f, 0, "*.q_proj.weight");
    fixture_make_ok(&f);
    fixture_expect(&f, Q, QC_SCHEME_KEEP, QC_ROLE_LINEAR);
    fixture_expect(&f, Q "_scale_inv", QC_SCHEME_KEEP, QC_ROLE_STATE);
    assert_true(fixture_skips(&f, "model.layers.0.self_attn.q_proj"));
}

/* The places of weights with one scale in all and one per row; dtype from config.json. */
TEST(fp8_other_scales)
{
    static const struct {
        unsigned ndim;
        uint64_t dims[2];
        uint64_t tile_rows;
        qc_status status;
    } cases[] = {
        {0, {0}, 256, QC_OK},
        {1, {1}, 256, QC_OK},
        {2, {1, 1}, 256, QC_OK},
        {1, {256}, 1, QC_OK},
        {2, {256, 1}, 1, QC_OK},
        {1, {2}, 0, QC_ERR_UNSUPPORTED},
        {2, {256, 2}, 0, QC_ERR_UNSUPPORTED},
        {2, {3, 2}, 0, QC_ERR_UNSUPPORTED},
        {1, {4}, 0, QC_ERR_UNSUPPORTED},
        {2, {2, 2}, 128, QC_OK}, /* 128 x 128 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        fixture_start(&f, QC_TO_INT8, "{\"model_type\":\"llama\",\"torch_dtype\":\"float16\"}", "");
        add2(&f, Q, QC_DTYPE_F8_E4M3, 256, 256);
        fixture_add_dims(&f, Q "_scale", QC_DTYPE_BF16, cases[i].ndim, cases[i].dims);
        fixture_add_dims(&f, "model.layers.0.self_attn.q_proj.input_scale", QC_DTYPE_F32, 0, NULL);
        if (cases[i].status != QC_OK) {
            fixture_make_fails(&f, cases[i].status, Q "_scale", "one for each");
        } else {
            fixture_make_ok(&f);
            const qc_coded_weight *w = fixture_entry(&f, Q)->coded;
            assert_int_equal(w->tile_rows, cases[i].tile_rows);
            assert_int_equal(w->tile_cols, cases[i].tile_rows == 128 ? 128 : 256);
            assert_int_equal(w->tiles_across, cases[i].tile_rows == 128 ? 2 : 1);
            assert_int_equal(w->dtype, QC_DTYPE_F16);
            fixture_expect(&f, "model.layers.0.self_attn.q_proj.input_scale", QC_SCHEME_ABSORBED,
                           QC_ROLE_STATE);
        }
    }
}

TEST(fp8_that_is_not_read)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_BF16); /* a config that speaks of scales, and none there */
    fixture_config(&f, deepseek);
    add2(&f, Q, QC_DTYPE_F8_E4M3, 256, 256);
    fixture_make_fails(&f, QC_ERR_UNSUPPORTED, Q, "weight_scale_inv or weight_scale");
    add2(&f, Q "_scale_inv", QC_DTYPE_F32, 2, 3);
    fixture_make_fails(&f, QC_ERR_INPUT, Q "_scale_inv", "scales [2, 2]");
    add2(&f, Q "_scale", QC_DTYPE_F32, 1, 1);
    fixture_make_fails(&f, QC_ERR_UNSUPPORTED, Q, "more than one kind");
    fixture_config(&f, "{\"quantization_config\":{\"weight_block_size\":[128]}}");
    fixture_make_fails(&f, QC_ERR_INPUT, "weight_block_size", "fewer");
    fixture_config(&f, "{\"quantization_config\":{\"weight_block_size\":[0,128]}}");
    fixture_make_fails(&f, QC_ERR_INPUT, "weight_block_size", "0");
    fixture_init(&f, QC_TO_NF4); /* other encodings */
    add2(&f, Q, QC_DTYPE_F8_E4M3FNUZ, 256, 256);
    add2(&f, Q "_scale_inv", QC_DTYPE_F32, 2, 2);
    fixture_make_fails(&f, QC_ERR_UNSUPPORTED, Q, "F8_E4M3FNUZ");
}

static void add_experts(fixture *f, uint64_t out, uint64_t groups)
{
    fixture_add_dims(f, UP "_blocks", QC_DTYPE_U8, 4, (uint64_t[]){4, out, groups, 16});
    add3(f, UP "_scales", QC_DTYPE_U8, 4, out, groups);
    fixture_add(f, Q, 64, 64);
}

TEST(mxfp4_passes_through)
{
    /* The tensors decide: no config, another model type, a wrong quant_method. */
    static const char *const configs[] = {
        "{\"model_type\":\"gpt_oss\"}",
        "{}",
        "{\"model_type\":\"gpt_oss\",\"quantization_config\":{\"quant_method\":\"gptq\"}}",
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        SCOPED(fixture) f = {0};
        fixture_start(&f, QC_TO_NF4, configs[i], "");
        add_experts(&f, 96, 3);
        fixture_make_ok(&f);
        fixture_expect(&f, UP "_blocks", QC_SCHEME_KEEP, QC_ROLE_PACKED);
        fixture_expect(&f, UP "_scales", QC_SCHEME_KEEP, QC_ROLE_STATE);
        fixture_expect(&f, Q, QC_SCHEME_NF4, QC_ROLE_LINEAR);
        f.options.requantize = 1;
        fixture_make_ok(&f);
        fixture_expect(&f, UP "_blocks", QC_SCHEME_NF4, QC_ROLE_PACKED);
        fixture_expect(&f, UP "_scales", QC_SCHEME_ABSORBED, QC_ROLE_STATE);
        const qc_coded_weight *w = fixture_entry(&f, UP "_blocks")->coded;
        assert_string_equal(w->name, UP);
        assert_int_equal(w->ndim, 3);
        assert_int_equal(w->dims[0], 4);
        assert_int_equal(w->dims[1], 96);
        assert_int_equal(w->dims[2], 96);
        assert_int_equal(fixture_entry(&f, UP "_blocks")->transpose, 0);
        f.options.to = QC_TO_BF16;
        fixture_make_ok(&f);
        fixture_expect(&f, UP "_blocks", QC_SCHEME_CAST, QC_ROLE_PACKED);
        assert_int_equal(fixture_entry(&f, UP "_blocks")->transpose, 1);
        fixture_rule(&f, 0, "*_blocks");
        fixture_make_ok(&f);
        fixture_expect(&f, UP "_blocks", QC_SCHEME_KEEP, QC_ROLE_PACKED);
        fixture_expect(&f, UP "_scales", QC_SCHEME_KEEP, QC_ROLE_STATE);
    }
}

TEST(mxfp4_rules)
{
    SCOPED(fixture) f = {0};
    fixture_init(&f, QC_TO_NF4);
    fixture_add(&f, Q, 64, 64);
    f.options.requantize = 1;
    fixture_make_fails(&f, QC_ERR_USAGE, "--requantize", "no weights in MXFP4");
    fixture_init(&f, QC_TO_NF4);
    add_experts(&f, 33, 3); /* 33 * 96 is 49.5 blocks of 64 */
    f.options.requantize = 1;
    fixture_make_fails(&f, QC_ERR_UNSUPPORTED, UP "_blocks", "whole blocks of 64");
    f.options.block_elems = 32;
    fixture_make_ok(&f);
    f.options.block_elems = 0;
    f.options.to = QC_TO_INT8;
    fixture_make_ok(&f);
    f.options.requantize = 0;
    fixture_rule(&f, 1, "*_blocks");
    fixture_make_fails(&f, QC_ERR_USAGE, UP "_blocks", "--requantize");
}

TEST(mtp)
{
    static const qc_to to[] = {QC_TO_NF4, QC_TO_BF16, QC_TO_KEEP};
    for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
        SCOPED(fixture) f = {0};
        fixture_init(&f, to[i]);
        fixture_config(&f, "{\"model_type\":\"deepseek_v3\",\"num_hidden_layers\":10}");
        fixture_add(&f, "model.layers.9.self_attn.o_proj.weight", 64, 64);
        f.options.drop_mtp = 1;
        fixture_make_fails(&f, QC_ERR_USAGE, "--drop-mtp", "numbered 10");
        fixture_add(&f, "model.layers.10.eh_proj.weight", 64, 128);
        fixture_add(&f, "model.layers.100.enorm.weight", 1, 64);
        fixture_add(&f, "other.layers.10.weight", 64, 64);
        fixture_make_ok(&f);
        assert_int_equal(f.recipe.mtp_dropped, 1);
        assert_int_equal(fixture_entry(&f, "model.layers.10.eh_proj.weight")->scheme,
                         QC_SCHEME_ABSORBED);
        assert_int_equal(fixture_entry(&f, "model.layers.100.enorm.weight")->scheme,
                         QC_SCHEME_ABSORBED);
        assert_int_not_equal(fixture_entry(&f, "other.layers.10.weight")->scheme,
                             QC_SCHEME_ABSORBED);
        assert_int_not_equal(fixture_entry(&f, "model.layers.9.self_attn.o_proj.weight")->scheme,
                             QC_SCHEME_ABSORBED);
        fixture_config(&f, "{\"model_type\":\"deepseek_v3\"}");
        fixture_make_fails(&f, QC_ERR_INPUT, "num_hidden_layers", "");
    }
}

/* ---- fused experts ---- */

static void split(fixture *f)
{
    qc_checkpoint_tensor *before = f->model.tensors;
    qsort(before, f->model.tensor_count, sizeof *before, fixture_order);
    if (qc_experts_split(&f->model, 0, &f->err) != QC_OK)
        fail_msg("%s", f->err.msg);
    if (f->model.tensors == before)
        return;
    /* The new list is the arena's; the fixture frees its own. */
    size_t bytes = f->model.tensor_count * sizeof *before;
    before = realloc(before, bytes);
    assert_non_null(before);
    memcpy(before, f->model.tensors, bytes);
    f->model.tensors = before;
}

static void expect_part(const fixture *f, const char *name, uint64_t begin, uint64_t rows,
                        uint64_t cols)
{
    const qc_checkpoint_tensor *t = qc_checkpoint_find(&f->model, name);
    if (!t)
        fail_msg("no '%s'", name);
    assert_int_equal(t->begin, begin);
    assert_int_equal(t->ndim, 2);
    assert_int_equal(t->dims[0], rows);
    assert_int_equal(t->dims[1], cols);
    assert_int_equal(t->bytes, 2 * rows * cols);
    assert_int_equal(t->file, 3);
}

TEST(fused_experts)
{
    SCOPED(fixture) f = {0};
    fixture_start(&f, QC_TO_NF4, "{\"model_type\":\"mixtral\",\"num_local_experts\":2}", "");
    add3(&f, UP, QC_DTYPE_BF16, 2, 128, 96);
    f.model.tensors[0].begin = 1000;
    f.model.tensors[0].file = 3;
    add3(&f, "model.layers.0.mlp.experts.down_proj", QC_DTYPE_BF16, 2, 96, 64);
    f.model.tensors[1].begin = 500000;
    f.model.tensors[1].file = 3;
    fixture_add(&f, "model.layers.0.mlp.gate.weight", 2, 96);
    fixture_add(&f, "model.layers.1.mlp.gate.weight", 2, 96); /* no fused experts beside it */
    split(&f);
    assert_int_equal(f.model.tensor_count, 8);
    assert_int_equal(f.model.warning_count, 0);
    uint64_t half = 2 * 64 * 96;
#define X "model.layers.0.block_sparse_moe.experts."
    expect_part(&f, X "0.w1.weight", 1000, 64, 96);
    expect_part(&f, X "0.w3.weight", 1000 + half, 64, 96);
    expect_part(&f, X "1.w1.weight", 1000 + 2 * half, 64, 96);
    expect_part(&f, X "1.w3.weight", 1000 + 3 * half, 64, 96);
    expect_part(&f, X "0.w2.weight", 500000, 96, 64);
    expect_part(&f, X "1.w2.weight", 500000 + half, 96, 64);
#undef X
    assert_non_null(qc_checkpoint_find(&f.model, "model.layers.0.block_sparse_moe.gate.weight"));
    assert_non_null(qc_checkpoint_find(&f.model, "model.layers.1.mlp.gate.weight"));
}

/* 3 experts of [256, 200] and [200, 256], blocks of 128 x 128 or as config.json says. */
static void add_fp8_experts(fixture *f, uint64_t inner, uint64_t scale_rows)
{
    add3(f, UP, QC_DTYPE_F8_E4M3, 3, 2 * inner, 200);
    add3(f, UP "_scale_inv", QC_DTYPE_F32, 3, scale_rows, 2);
    add3(f, "model.layers.0.mlp.experts.down_proj", QC_DTYPE_F8_E4M3, 3, 200, inner);
    add3(f, "model.layers.0.mlp.experts.down_proj_scale_inv", QC_DTYPE_F32, 3, 2,
         (inner + 127) / 128);
    for (size_t i = 0; i < 4; i++)
        f->model.tensors[i].begin = i * 1000000;
}

TEST(fused_fp8_experts)
{
    static const char config[] = "{\"model_type\":\"deepseek_v3\",\"n_routed_experts\":3}";
    static const qc_to to[] = {QC_TO_NF4, QC_TO_INT8};
    for (size_t i = 0; i < 2; i++) {
        SCOPED(fixture) f = {0};
        fixture_init(&f, to[i]);
        fixture_config(&f, config);
        add_fp8_experts(&f, 256, 4);
        split(&f);
        assert_int_equal(f.model.tensor_count, 3 * 3 * 2);
        assert_int_equal(f.model.warning_count, 0);
#define X "model.layers.0.mlp.experts.2.up_proj.weight"
        const qc_checkpoint_tensor *t = qc_checkpoint_find(&f.model, X);
        assert_int_equal(t->begin, (2 * 512 + 256) * 200);
        assert_int_equal(t->bytes, 256 * 200);
        t = qc_checkpoint_find(&f.model, X "_scale_inv");
        assert_int_equal(t->begin, 1000000 + (2 * 4 + 2) * 2 * 4);
        assert_int_equal(t->dims[0], 2);
        assert_int_equal(t->dims[1], 2);
        assert_int_equal(t->bytes, 16);
        fixture_make(&f);
        assert_non_null(fixture_entry(&f, X)->coded);
        assert_int_not_equal(fixture_entry(&f, X)->scheme, QC_SCHEME_KEEP);
        assert_int_equal(fixture_entry(&f, X "_scale_inv")->scheme, QC_SCHEME_ABSORBED);
#undef X
    }
    /* A block of scales that spans gate and up; scales that are not there; too many. */
    static const uint64_t shapes[][2] = {{192, 3}, {256, 5}, {192, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        SCOPED(fixture) f = {0};
        fixture_start(&f, QC_TO_NF4, config, "");
        add_fp8_experts(&f, shapes[i][0], shapes[i][1]);
        split(&f);
        assert_int_equal(f.model.tensor_count, 4);
        assert_int_equal(f.model.warning_count, 1);
    }
}

TEST(stacks_that_stay)
{
    static const struct {
        const char *config;
        uint64_t up[2], down[2];
        qc_dtype dtype;
        int warned;
    } cases[] = {
        {"{\"model_type\":\"gpt_oss\"}", {128, 96}, {96, 64}, QC_DTYPE_BF16, 1},
        {"{}", {128, 96}, {96, 64}, QC_DTYPE_BF16, 1},
        {"{\"model_type\":\"qwen3_moe\"}", {96, 128}, {64, 96}, QC_DTYPE_BF16, 1},
        {"{\"model_type\":\"qwen3_moe\"}", {127, 96}, {96, 63}, QC_DTYPE_BF16, 1},
        {"{\"model_type\":\"qwen3_moe\"}", {128, 96}, {96, 64}, QC_DTYPE_F8_E4M3, 1},
        {"{\"model_type\":\"qwen3_moe\"}", {0, 96}, {96, 0}, QC_DTYPE_BF16, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        fixture_start(&f, QC_TO_NF4, cases[i].config, "");
        add3(&f, UP, cases[i].dtype, 2, cases[i].up[0], cases[i].up[1]);
        add3(&f, "model.layers.0.mlp.experts.down_proj", cases[i].dtype, 2, cases[i].down[0],
             cases[i].down[1]);
        split(&f);
        assert_int_equal(f.model.tensor_count, 2);
        assert_int_equal(f.model.warning_count, cases[i].warned);
        if (i == 0)
            assert_non_null(strstr(f.model.warnings[0], "36864 weights"));
    }
}
