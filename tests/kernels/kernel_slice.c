/* Parts of prepared weights that nothing copies: values bit for bit those of the whole, products of
 * every path, groups of parts, and the cuts that are refused. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/cuda_dequantize.h"

#include <inttypes.h>

static qc_matmul *handle;
static qt_rng rng;

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* What is multiplied by: a path and the rows of x that lead to a kernel of it. */
typedef struct {
    qc_matmul_path path;
    uint64_t m;
    const char *needs_64; /* the kernel's name, where it wants multiples of 64; NULL: any */
} way;

static const way ways[] = {
    {QC_MATMUL_GEMV, 3, NULL},          {QC_MATMUL_MMA_884, 5, NULL},
    {QC_MATMUL_MMA_16816, 4, "stream"}, {QC_MATMUL_MMA_16816, 9, "tiles"},
    {QC_MATMUL_MMA_16816, 40, "tiles"}, {QC_MATMUL_WGMMA, 20, "wgmma"},
    {QC_MATMUL_DEQUANT_GEMM, 6, NULL},
};

/* The kinds of weights, plain and nested; NF4 in blocks of 128 lets cuts fall into blocks. */
static const km_spec specs[] = {
    {.kind = QC_FORM_NF4, .block = 64, .nested = 1},
    {.kind = QC_FORM_NF4, .block = 256, .nested = 1, .custom_map = 1},
    {.kind = QC_FORM_NF4, .block = 32},
    {.kind = QC_FORM_INT8_BLOCKS, .block = 64, .nested = 1},
    {.kind = QC_FORM_INT8_BLOCKS, .block = 512},
    {.kind = QC_FORM_INT8_ROWS},
};

/* Columns of a weight of 640: at blocks of 64, within blocks of more, within groups of nested
 * scales (their 256 blocks never end with a row), at 32, and to the end. */
static const qc_weights_part parts[] = {
    {0, 140, 0, 320},  {0, 140, 320, 320}, {70, 70, 64, 192}, {3, 97, 192, 448},
    {1, 130, 32, 320}, {0, 140, 608, 32},  {9, 1, 0, 640},    {72, 68, 0, 640},
};

static km_rounding rounding_of(const km_job *job)
{
    if (job->path == QC_MATMUL_GEMV)
        return (km_rounding){0.0, 0.0};
    if (job->path == QC_MATMUL_DEQUANT_GEMM && job->x_dtype == QC_DTYPE_BF16 &&
        job->y_dtype == QC_DTYPE_BF16)
        return (km_rounding){0x1p-8, 0.0};
    return (km_rounding){0x1p-10, 0x1p-24};
}

static void sliced(km_weight *out, const km_weight *whole, const qc_weights_part *part)
{
    *out = *whole;
    KM_OK(qc_matmul_slice(&whole->ready, part, &out->ready, &km_error));
}

static int goes_by_64(const qc_weights_part *p, uint64_t cols)
{
    return p->col % 64 == 0 && p->cols % 64 == 0 && cols % 64 == 0;
}

/* The product of a part against sums in double, by each path that takes it. */
static void multiply(const km_weight *part, const way *v, unsigned turn)
{
    km_job job = km_next_job(turn, v->m, part->ready.part.rows, part->ready.part.cols);
    km_data d;
    job.path = v->path;
    km_data_make(&d, part, &job, &rng);
    km_run(handle, part, &d);
    km_check(part, &d, rounding_of(&job));
    km_data_free(&d);
}

/* Rows of the unit matrix bring out values: those of the part are the whole's. */
static void compare_values(const km_weight *whole, const km_weight *part, const way *v)
{
    const qc_weights_part *p = &part->ready.part;
    const km_job job = {
        .m = v->m, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16, .path = v->path};
    km_data all, some;
    km_data_make(&all, whole, &job, &rng);
    km_data_make(&some, part, &job, &rng);
    memset(all.x, 0, job.m * all.k * 2);
    memset(some.x, 0, job.m * some.k * 2);
    for (uint64_t m = 0; m < job.m; m++) {
        const uint64_t k = (m * 37 + 5) % p->cols;
        some.x[m * some.k + k] = all.x[m * all.k + p->col + k] = km_bits(1.0f, job.x_dtype);
    }
    km_run(handle, whole, &all);
    km_run(handle, part, &some);
    for (uint64_t m = 0; m < job.m; m++)
        for (uint64_t n = 0; n < p->rows; n++)
            QT_CHECK(some.y[m * some.n + n] == all.y[m * all.n + p->row + n],
                     "part of rows from %" PRIu64 " and columns from %" PRIu64 ", row %" PRIu64
                     ": 0x%04x, in the whole 0x%04x",
                     p->row, p->col, n, some.y[m * some.n + n], all.y[m * all.n + p->row + n]);
    km_data_free(&all);
    km_data_free(&some);
}

static void test_every_path(void **state)
{
    (void)state;
    unsigned turn = 0;
    for (size_t i = 0; i < COUNT(specs); i++)
        for (unsigned odd = 0; odd < 2; odd++) { /* 640 columns, or 621 that are repacked */
            km_spec spec = specs[i];
            km_weight whole, part;
            spec.n = 140;
            spec.k = odd ? 621 : 640;
            km_weight_make(&whole, handle, &spec, &rng);
            for (size_t j = 0; j < COUNT(parts); j++) {
                qc_weights_part p = parts[j];
                if (p.col + p.cols > spec.k)
                    p.cols = spec.k - p.col;
                sliced(&part, &whole, &p);
                for (size_t k = (i + odd + j) % 3; k < COUNT(ways); k += 3 * qt_every(2), turn++) {
                    const way *v = &ways[k];
                    const int by_64 = goes_by_64(&p, spec.k) && spec.block != 32;
                    if (v->path == QC_MATMUL_WGMMA && !by_64)
                        continue;
                    multiply(&part, v, turn);
                    /* Where the whole goes through another kernel, values round otherwise. */
                    if (by_64 || !v->needs_64 || odd || spec.block == 32)
                        compare_values(&whole, &part, v);
                }
            }
            km_weight_free(&whole);
        }
}

/* A part of a part is the part of the whole. */
static void test_part_of_a_part(void **state)
{
    (void)state;
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 96, .k = 512, .block = 64, .nested = 1};
    const qc_weights_part outer = {16, 80, 128, 384}, inner = {8, 33, 64, 160};
    km_weight whole, part;
    qc_matmul_weights within;
    km_weight_make(&whole, handle, &spec, &rng);
    sliced(&part, &whole, &outer);
    KM_OK(qc_matmul_slice(&part.ready, &inner, &within, &km_error));
    const qc_weights_part want = {24, 33, 192, 160};
    assert_memory_equal(&within.part, &want, sizeof want);
    assert_ptr_equal(within.exponent, whole.ready.exponent);
    part.ready = within;
    multiply(&part, &ways[0], 1);
    km_weight_free(&whole);
}

/* Integers have one path. They are cut at multiples of 32, too. */
static void test_integers(void **state)
{
    static const qc_form_kind kinds[] = {QC_FORM_W4A16, QC_FORM_W8A16, QC_FORM_W8A8};
    (void)state;
    for (size_t i = 0; i < COUNT(kinds); i++)
        for (unsigned odd = 0; odd < 2; odd++) {
            const km_spec spec = {.kind = kinds[i],
                                  .n = 40,
                                  .k = odd && i != 0 ? 168 : 160,
                                  .block = kinds[i] == QC_FORM_W8A8 || odd ? 0 : 32,
                                  .shift = odd ? 8 : 0};
            const qc_weights_part p = {7, 30, 64, spec.k - 64};
            const way v = {QC_MATMUL_DEQUANT_GEMM, 5, NULL};
            km_weight whole, part;
            km_weight_make(&whole, handle, &spec, &rng);
            sliced(&part, &whole, &p);
            multiply(&part, &v, (unsigned)i * 2 + 1);
            compare_values(&whole, &part, &v);
            km_weight_free(&whole);
        }
}

/* Where a weight can be cut. */
static void test_refused(void **state)
{
    (void)state;
    static const struct {
        qc_weights_part part;
        qc_status status;
        const char *words;
    } cases[] = {
        {{0, 4, 16, 48},
         QC_ERR_SHAPE,
         "columns 16 to 64 of a prepared weight in nf4 cut through 32 weights that stay together; "
         "it "
         "can be cut at multiples of 32 columns"},
        {{0, 4, 32, 33}, QC_ERR_SHAPE, "columns 32 to 65 of"},
        {{0, 4, 0, 159}, QC_ERR_SHAPE, "columns 0 to 159 of"},
        {{0, 9, 0, 160},
         QC_ERR_USAGE,
         "rows 0 to 9 and columns 0 to 160 are not within a weight of 8 rows and 160 columns"},
        {{UINT64_MAX, 1, 0, 160}, QC_ERR_USAGE, "are not within"},
        {{0, 1, 32, UINT64_MAX}, QC_ERR_USAGE, "are not within"},
    };
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 8, .k = 160, .block = 64};
    km_weight w;
    km_weight_make(&w, handle, &spec, &rng);
    qc_matmul_weights out = w.ready;
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_error err = {0};
        km_expect(qc_matmul_slice(&w.ready, &cases[i].part, &out, &err), cases[i].status, &err,
                  cases[i].words);
    }
    assert_memory_equal(&out, &w.ready, sizeof out);
    const qc_weights_part none = {3, 0, 5, 0};
    assert_int_equal(qc_matmul_slice(&w.ready, &none, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_slice(&w.ready, NULL, &out, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_matmul_slice(NULL, &none, &out, NULL), QC_ERR_USAGE);
    KM_OK(qc_matmul_slice(&w.ready, &none, &out, &km_error));
    assert_int_equal(out.part.rows, 0);
    km_weight_free(&w);
}

int main(void)
{
    if (km_no_device())
        return 77;
    handle = km_handle();
    rng = qt_rng_start("slices");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_path),
        cmocka_unit_test(test_part_of_a_part),
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_refused),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    qc_matmul_destroy(handle);
    return failed;
}
