/* What the matmul's C API refuses, and in which words. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/cuda_dequantize.h"

TEST(test_run_refuses)
{
    qt_rng rng = {1};
    qc_matmul *h = km_handle();
    km_spec spec = {.kind = QC_FORM_NF4, .n = 8, .k = 64, .block = 64, .nested = 1};
    km_weight w;
    km_weight_make(&w, h, &spec, &rng);
    unsigned char *memory = NULL;
    KM_OK(qc_cuda_malloc((void **)&memory, 65536, &km_error));
    const qc_matmul_io good = {
        .m = 4, .x = memory, .x_dtype = QC_DTYPE_F16, .y = memory + 4096, .y_dtype = QC_DTYPE_F16};
    qc_matmul_io io = good;
    io.x_dtype = QC_DTYPE_F32;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0, "x is F32; expected F16 or BF16");
    io = good;
    io.y_dtype = QC_DTYPE_F32;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0, "y is F32");
    io = good;
    io.ldx = 63;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0,
                  "the rows of x are 63 elements apart, but have 64");
    io = good;
    io.ldy = 7;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0,
                  "the rows of y are 7 elements apart, but have 8");
    io = good;
    io.x = NULL;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0, "x is NULL");
    io = good;
    io.y = NULL;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0, "y is NULL");
    io = good;
    io.x = memory + 1;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0, "odd address");
    io = good;
    io.bias = memory + 3;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0, "odd address");
    io = good;
    io.m = UINT64_MAX / 4;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_AUTO, NULL, 0, "rows overflow 64 bits");
    km_expect_run(h, &w.ready, &good, QC_MATMUL_AUTO, memory + 8, 256, "not 256-byte aligned");
    km_expect_run(h, &w.ready, &good, QC_MATMUL_AUTO, NULL, 256, "workspace of 256 bytes is NULL");
    km_expect_run(h, &w.ready, &good, QC_MATMUL_FILL, NULL, 0, "cannot be asked for");
    io = good;
    io.x_dtype = QC_DTYPE_BF16;
    km_expect_run(h, &w.ready, &io, QC_MATMUL_MMA_884, NULL, 0,
                  "path mma-884 needs a workspace of at");
    km_expect_run(h, &w.ready, &io, QC_MATMUL_MMA_884, memory + 8192, 256, "256 are allowed");
    qc_matmul_weights raw = w.ready;
    raw.exponent = NULL;
    km_expect_run(h, &raw, &good, QC_MATMUL_AUTO, NULL, 0,
                  "the weight was not prepared; call qc_matmul_prepare first");
    raw = w.ready;
    raw.w.codes = NULL;
    km_expect_run(h, &raw, &good, QC_MATMUL_AUTO, NULL, 0, "weights have no codes");
    qc_cuda_free(memory);
    km_weight_free(&w);
    qc_matmul_destroy(h);
}

/* Whoever calls from another language has no compiler that sees a NULL. */
TEST(test_null_is_answered)
{
    qt_rng rng = {1};
    qc_matmul *h = km_handle();
    km_spec spec = {.kind = QC_FORM_NF4, .n = 8, .k = 64, .block = 64, .nested = 1};
    km_weight w;
    km_weight_make(&w, h, &spec, &rng);
    uint16_t y[8] = {0};
    qc_matmul_weights out;
    qc_matmul_planned planned;
    const qc_matmul_weights *one = &w.ready, *none = NULL;
    const qc_matmul_io io = {
        .m = 1, .x = y, .x_dtype = QC_DTYPE_F16, .y = y, .y_dtype = QC_DTYPE_F16};
    const qc_matmul_path any = QC_MATMUL_AUTO;
    assert_int_equal(qc_matmul_create(NULL, 0, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_check(NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_prepare(NULL, &w.ready.w, y, &out, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_prepare(h, NULL, y, &out, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_prepare(h, &w.ready.w, y, NULL, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_run(NULL, one, &io, any, NULL, 0, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_run(h, NULL, &io, any, NULL, 0, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_run(h, one, NULL, any, NULL, 0, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_run_group(h, NULL, &io, 1, any, NULL, 0, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_plan_product(NULL, &one, &io, 1, any, 0, &planned, NULL),
                     QC_ERR_USAGE);
    assert_int_equal(qc_matmul_plan_product(h, &none, &io, 1, any, 0, &planned, NULL),
                     QC_ERR_USAGE);
    assert_int_equal(qc_matmul_plan_product(h, &one, &io, 1, any, 0, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_run_planned(h, NULL, &one, &io, NULL, 0, NULL, NULL), QC_ERR_USAGE);
    KM_OK(qc_matmul_plan_product(h, &one, &io, 1, any, 0, &planned, &km_error));
    assert_int_equal(qc_matmul_planned_path(&planned, 0),
                     qc_matmul_device(h)->sm >= 80 ? QC_MATMUL_MMA_16816 : QC_MATMUL_GEMV);
    assert_int_equal(qc_matmul_planned_path(&planned, 1), QC_MATMUL_AUTO);
    assert_int_equal(qc_matmul_planned_path(NULL, 0), QC_MATMUL_AUTO);
    assert_int_equal(qc_matmul_planned_workspace(&planned), planned.workspace_bytes);
    assert_true(qc_matmul_planned_workspace(NULL) == UINT64_MAX);
    assert_true(qc_matmul_workspace_bytes(NULL, one, 1, any, 0) == UINT64_MAX);
    assert_true(qc_matmul_workspace_bytes(h, NULL, 1, any, 0) == UINT64_MAX);
    assert_true(qc_matmul_group_workspace_bytes(h, &none, 1, 1, any, 0) == UINT64_MAX);
    assert_true(qc_matmul_prepared_bytes(NULL) == UINT64_MAX);
    assert_null(qc_matmul_device(NULL));
    assert_null(qc_matmul_no_gemm(NULL));
    assert_int_equal(qc_cuda_dequantize(NULL, 0, 1, y, QC_DTYPE_F16, 64, NULL, NULL, NULL, NULL),
                     QC_ERR_USAGE);
    qc_matmul_destroy(NULL);
    km_weight_free(&w);
    qc_matmul_destroy(h);
}

TEST(test_prepare_refuses)
{
    qc_matmul *h = km_handle();
    unsigned char *memory = NULL;
    qc_matmul_weights out;
    qc_error err = {0};
    float map[1];
    KM_OK(qc_cuda_malloc((void **)&memory, 4096, &km_error));
    const qc_weights good = {.form.ops = &qc_form_nf4,
                             .rows = 2,
                             .form.cols = 64,
                             .form.block_elems = 64,
                             .codes = memory,
                             .absmax = (const float *)(void *)(memory + 1024)};
    const qc_weights nested = {.form.ops = &qc_form_int8_blocks,
                               .rows = 2,
                               .form.cols = 64,
                               .form.block_elems = 64,
                               .codes = memory,
                               .absmax_codes = memory,
                               .nested_absmax = map,
                               .nested_map = map,
                               .nested_block = 256};
    struct {
        qc_weights w;
        size_t shift;
        const char *words;
    } cases[] = {
        {good, 8, "not 256-byte aligned"},
        {good, 0, "the form of the weights is not known"},
        {good, 0, "from 32 to 4096, found 48"},
        {good, 0, "from 32 to 4096, found 16"},
        {good, 0, "from 32 to 4096, found 8192"},
        {good, 0, "no codes"},
        {good, 0, "neither plain scales nor all"},
        {nested, 0, "neither plain scales nor all"},
        {nested, 0, "neither plain scales nor all"},
        {nested, 0, "nested block size: expected a power of two, found 0"},
        {good, 0, "weights in int8 have no scales"},
        {good, 0, "the weights are int8 in blocks of 64; expected scales by rows"},
        {good, 0, "overflows 64 bits"},
    };
    cases[1].w.form.ops = NULL;
    cases[2].w.form.block_elems = 48;
    cases[3].w.form.block_elems = 16;
    cases[4].w.form.block_elems = 8192;
    cases[5].w.codes = NULL;
    cases[6].w.absmax = NULL;
    cases[7].w.nested_absmax = NULL;
    cases[8].w.nested_map = NULL;
    cases[9].w.nested_block = 0;
    cases[10].w.form.ops = &qc_form_int8_rows;
    cases[10].w.form.block_elems = 0;
    cases[10].w.absmax = NULL;
    cases[11].w.form.ops = &qc_form_int8_rows;
    cases[12].w.rows = cases[12].w.form.cols = UINT64_C(1) << 33;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        km_expect(
            qc_matmul_prepare(h, &cases[i].w, memory + 2048 + cases[i].shift, &out, NULL, &err),
            QC_ERR_USAGE, &err, cases[i].words);
    km_expect(qc_matmul_prepare(h, &good, NULL, &out, NULL, &err), QC_ERR_USAGE, &err, "aligned");
    assert_int_equal(qc_matmul_prepared_bytes(&good), 256);
    qc_weights moved = good;
    moved.codes = memory + 8;
    assert_int_equal(qc_matmul_prepared_bytes(&moved), 256 + 2 * 32);
    moved.form.cols = 65;
    moved.codes = NULL;
    assert_int_equal(qc_matmul_prepared_bytes(&moved), 256 + 2 * 48);
    moved.rows = moved.form.cols = (UINT64_C(1) << 33) + 1;
    assert_true(qc_matmul_prepared_bytes(&moved) == UINT64_MAX);
    qc_cuda_free(memory);
    qc_matmul_destroy(h);
    assert_string_equal(qc_matmul_path_name(QC_MATMUL_MMA_16816), "mma-16816");
    assert_string_equal(qc_matmul_path_name(QC_MATMUL_PATH_COUNT), "unknown");
    assert_int_equal(qc_matmul_create(&h, 99, &err), QC_ERR_DEVICE);
    assert_null(h);
    qc_matmul_destroy(NULL);
}

int main(void)
{
    int skip = km_no_device();
    return skip ? skip : test_run_all(NULL);
}
