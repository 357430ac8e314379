/* The streaming GEMV against double sums: kinds, shapes, strides, alignments, and the bits of
 * single weights. `--slow` adds shapes and rows of x. */
#include "tests/fixtures/kernel_matmul.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

static qc_matmul *handle;
static int slow;

static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};

static km_job job_of(uint64_t m, qt_rng *rng)
{
    uint64_t random = qt_next(rng);
    return (km_job){
        .m = m,
        .x_dtype = random & 1 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
        .y_dtype = random & 2 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
        .bias = (random & 4) != 0,
        .path = QC_MATMUL_GEMV,
    };
}

static void check_job(const km_weight *w, const km_job *job, qt_rng *rng)
{
    km_data d;
    km_data_make(&d, w, job, rng);
    km_run(handle, w, &d);
    km_check(w, &d, (km_rounding){0.0, 0.0});
    km_data_free(&d);
}

static void check_spec(const km_spec *spec, uint64_t m, qt_rng *rng)
{
    km_weight w;
    km_job job = job_of(m, rng);
    km_weight_make(&w, handle, spec, rng);
    check_job(&w, &job, rng);
    km_weight_free(&w);
}

/* Each number of rows of x has its own kernel, and each kind, alignment and dtype of x. */
static void test_rows(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("rows");
    const uint64_t rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 19};
    for (size_t kind = 0; kind < 3; kind++)
        for (int aligned = 0; aligned < 2; aligned++) {
            km_weight w;
            km_spec spec = {.kind = kinds[kind],
                            .n = 35,
                            .k = aligned ? 1088 : 1067,
                            .block = 64,
                            .nested = kinds[kind] != QC_FORM_INT8_ROWS};
            km_weight_make(&w, handle, &spec, &rng);
            for (size_t i = 0; i < sizeof rows / sizeof *rows; i += qt_every(3))
                for (int dtype = 0; dtype < 2; dtype++) {
                    km_job job = job_of(rows[i], &rng);
                    job.x_dtype = dtype ? QC_DTYPE_F16 : QC_DTYPE_BF16;
                    check_job(&w, &job, &rng);
                }
            km_weight_free(&w);
        }
}

static void test_shapes(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("shapes");
    static const uint64_t quick[][2] = {{1, 1},     {1, 63},   {63, 1},   {65, 65},  {2, 31},
                                        {33, 576},  {576, 33}, {5, 2880}, {7, 3420}, {3, 4096},
                                        {67, 1025}, {4, 8191}, {1, 9000}, {129, 100}};
    static const uint64_t more[][2] = {{576, 576},   {2880, 2880}, {3420, 576}, {65, 28672},
                                       {1024, 4096}, {63, 14336},  {577, 3421}};
    uint32_t block = 32;
    size_t count = sizeof quick / sizeof *quick;
    for (size_t i = 0; i < count + (slow ? sizeof more / sizeof *more : 0); i += qt_every(4))
        for (size_t kind = 0; kind < 3; kind++) {
            const uint64_t *shape = i < count ? quick[i] : more[i - count];
            km_spec spec = {.kind = kinds[kind],
                            .n = shape[0],
                            .k = shape[1],
                            .block = block,
                            .nested = kinds[kind] != QC_FORM_INT8_ROWS && (i + kind) % 2,
                            .custom_map = kinds[kind] == QC_FORM_NF4 && i % 4 == 1};
            check_spec(&spec, 1 + qt_below(&rng, 9), &rng);
            block = block == 4096 ? 32 : block * 2;
        }
}

/* Blocks of every size over rows that do and do not end with them. */
static void test_blocks(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("blocks");
    for (uint32_t block = 32; block <= 4096; block *= 2)
        for (int form = 0; form < 6; form += (int)qt_every(5)) {
            km_spec spec = {.kind = form % 2 ? QC_FORM_NF4 : QC_FORM_INT8_BLOCKS,
                            .n = 9,
                            .k = form < 2 ? 544 : 541,
                            .block = block,
                            .nested = form % 3 != 0};
            check_spec(&spec, 1 + qt_below(&rng, 3), &rng);
        }
}

/* Codes, x, y and bias at any address; rows of x and y apart. */
static void test_layouts(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("layouts");
    for (size_t kind = 0; kind < 3; kind++)
        for (size_t shift = 0; shift < 20; shift = shift * 2 + 1) {
            km_spec spec = {
                .kind = kinds[kind], .n = 21, .k = shift ? 160 : 157, .block = 32, .shift = shift};
            km_weight w;
            km_weight_make(&w, handle, &spec, &rng);
            assert_true(w.ready.row_bytes != 0);
            for (uint64_t m = 1; m <= 5; m += 4) {
                km_job job = job_of(m, &rng);
                km_data a;
                job.ldx = spec.k + qt_below(&rng, 9);
                job.ldy = spec.n + qt_below(&rng, 9);
                job.x_shift = qt_below(&rng, 8);
                job.y_shift = qt_below(&rng, 8);
                km_data_make(&a, &w, &job, &rng);
                km_run(handle, &w, &a);
                km_check(&w, &a, (km_rounding){0.0, 0.0});
                km_data_free(&a);
            }
            km_weight_free(&w);
        }
}

/* x with a single 1 per row picks one column of W: the float weight, rounded once. */
static void test_identity(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("identity");
    for (size_t kind = 0; kind < 3; kind++)
        for (int form = 0; form < 8; form += (int)qt_every(3)) {
            km_spec spec = {.kind = kinds[kind],
                            .n = 40,
                            .k = form % 2 ? 96 : 91,
                            .block = 32,
                            .nested = kinds[kind] != QC_FORM_INT8_ROWS && form % 4 > 1,
                            .scale = form > 3 ? 1e-3 : 0.05};
            km_weight w;
            km_weight_make(&w, handle, &spec, &rng);
            uint64_t rows = form % 4 ? 8 : 3; /* scale after or before the product */
            for (uint64_t first = 0; first < spec.k; first += rows * qt_every(4)) {
                km_job job = job_of(spec.k - first < rows ? spec.k - first : rows, &rng);
                km_data d;
                job.bias = 0;
                km_data_make(&d, &w, &job, &rng);
                memset(d.x, 0, job.m * spec.k * 2);
                for (uint64_t m = 0; m < job.m; m++)
                    d.x[m * spec.k + first + m] = km_bits(1.0f, job.x_dtype);
                km_run(handle, &w, &d);
                for (uint64_t m = 0; m < job.m; m++)
                    for (uint64_t n = 0; n < spec.n; n++) {
                        uint16_t want = km_bits(km_value(&w.host, n, first + m), job.y_dtype);
                        uint16_t got = d.y[m * spec.n + n];
                        /* A sum with zeros has no -0. */
                        want = want == 0x8000u ? 0 : want;
                        QT_CHECK(got == want || (got == 0x8000u && want == 0),
                                 "W[%" PRIu64 "][%" PRIu64 "]: %04x, expected %04x", n, first + m,
                                 got, want);
                    }
                km_data_free(&d);
            }
            km_weight_free(&w);
        }
}

/* The same bits from run to run and for any rows of x beside it that have the same kernel; K split
 * or not, sums are in one order. */
static void test_repeats(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("repeats");
    for (size_t kind = 0; kind < 3; kind++) {
        km_spec spec = {.kind = kinds[kind], .n = 6, .k = 3200, .block = 128};
        km_weight w;
        km_weight_make(&w, handle, &spec, &rng);
        km_job job = job_of(3, &rng);
        km_data a;
        km_data_make(&a, &w, &job, &rng);
        uint16_t *first = km_host(job.m * spec.n * 2);
        km_run(handle, &w, &a);
        memcpy(first, a.y, job.m * spec.n * 2);
        for (int i = 0; i < 3; i++) {
            km_run(handle, &w, &a);
            assert_memory_equal(first, a.y, job.m * spec.n * 2);
        }
        /* Less workspace, fewer slices of K: another order, as right. */
        a.job.limit_bytes = QC_MATMUL_NO_WORKSPACE;
        km_run(handle, &w, &a);
        km_check(&w, &a, (km_rounding){0.0, 0.0});
        free(first);
        km_data_free(&a);
        km_weight_free(&w);
    }
}

/* NaN and infinity reach the rows of y that they are in, and no other. */
static void test_nonfinite(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("nonfinite");
    for (size_t kind = 0; kind < 3; kind++)
        for (int form = 0; form < 4; form += (int)qt_every(3)) {
            km_spec spec = {.kind = kinds[kind], .n = 17, .k = form % 2 ? 1056 : 1041, .block = 32};
            km_weight w;
            km_data d;
            km_weight_make(&w, handle, &spec, &rng);
            km_job job = job_of(form < 2 ? 3 : 7, &rng);
            km_data_make(&d, &w, &job, &rng);
            uint64_t nan_at = qt_below(&rng, spec.k), inf_at = spec.k - 1 - (uint64_t)form;
            int f16 = job.x_dtype == QC_DTYPE_F16;
            d.x[nan_at] = f16 ? 0x7e01u : 0x7fc1u;
            d.x[spec.k + inf_at] = f16 ? 0xfc00u : 0xff80u;
            km_run(handle, &w, &d);
            for (uint64_t n = 0; n < spec.n; n++) {
                float weight = km_value(&w.host, n, inf_at);
                float got = km_float(d.y[spec.n + n], job.y_dtype);
                assert_true(isnan(km_float(d.y[n], job.y_dtype)));
                if (weight == 0.0f)
                    assert_true(isnan(got));
                else
                    assert_true(isinf(got) && (got < 0.0f) == (weight > 0.0f));
                for (uint64_t m = 2; m < job.m; m++)
                    assert_true(isfinite(km_float(d.y[m * spec.n + n], job.y_dtype)));
            }
            km_data_free(&d);
            km_weight_free(&w);
        }
}

/* More rows of x than one launch has chunks for would take hours; a multiple of 8 and a rest do
 * not. Every row is what it is alone. */
static void test_chunks(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("chunks");
    km_spec spec = {.kind = QC_FORM_NF4, .n = 33, .k = 64, .block = 64, .nested = 1};
    km_weight w;
    km_data d;
    km_weight_make(&w, handle, &spec, &rng);
    km_job job = {.m = slow ? 1029 : 45,
                  .ldx = 72,
                  .ldy = 40,
                  .x_dtype = QC_DTYPE_BF16,
                  .y_dtype = QC_DTYPE_F16,
                  .bias = 1,
                  .path = QC_MATMUL_GEMV};
    km_data_make(&d, &w, &job, &rng);
    km_run(handle, &w, &d);
    km_check(&w, &d, (km_rounding){0.0, 0.0});
    km_data_free(&d);
    km_weight_free(&w);
}

#ifdef QC_CUDA_SHIM
/* Kernels that want several blocks on a multiprocessor say so: of an sm_90, three GEMVs for one row
 * (3 x 38.3 of 228 KB) and two of the general kernel for 8 rows (2 x 58.3 KB). */
static void test_resident(void **state)
{
    (void)state;
    qt_rng rng = qt_rng_start("resident");
    static const qc_matmul_path paths[] = {QC_MATMUL_GEMV, QC_MATMUL_MMA_16816};
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 64, .k = 512, .block = 32, .nested = 1};
    km_weight w;
    if (qc_matmul_device(handle)->sm != 90)
        skip(); /* the numbers below are an sm_90's */
    assert_int_equal(qc_matmul_device(handle)->shared_multiprocessor_bytes, 228 << 10);
    km_weight_make(&w, handle, &spec, &rng);
    for (size_t i = 0; i < 2; i++) {
        km_job job = {.m = i ? 8 : 1, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
        km_data d;
        job.path = paths[i];
        km_data_make(&d, &w, &job, &rng);
        km_run(handle, &w, &d); /* so small that K is not split: no reduction behind it */
        assert_int_equal(qc_shim_last_carveout(), i ? 52 : 51);
        km_data_free(&d);
    }
    km_weight_free(&w);
}
#endif

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),      cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_blocks),    cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_identity),  cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_nonfinite), cmocka_unit_test(test_chunks),
#ifdef QC_CUDA_SHIM
        cmocka_unit_test(test_resident),
#endif
    };
    qc_error err = {0};
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    int skip = km_no_device();
    if (skip)
        return skip;
    km_without_cublas();
    if (qc_matmul_create(&handle, 0, &err) != QC_OK) {
        print_error("%s\n", err.msg);
        return 1;
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    qc_matmul_destroy(handle);
    return failed;
}
