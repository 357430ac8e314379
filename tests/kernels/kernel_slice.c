/* Parts of prepared weights that nothing copies: values bit for bit those of the whole, products of
 * every path, and the cuts that are refused. Epilogues: gates and residuals on every path. */
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
    /* Weights in bfloat16 are too coarse for the norm of the few elements that some parts have. */
    if (v->path == QC_MATMUL_DEQUANT_GEMM)
        job.y_dtype = QC_DTYPE_F16;
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

TEST(test_every_path)
{
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
TEST(test_part_of_a_part)
{
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
TEST(test_integers)
{
    static const qc_form_kind kinds[] = {QC_FORM_W4A16, QC_FORM_W8A16, QC_FORM_W8A8, QC_FORM_W3A16,
                                         QC_FORM_W5A16};
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

/* ---- epilogues ------------------------------------------------------------------------------- */

/* Every path and kernel, with every part of an epilogue and with all of them, in both dtypes, whole
 * and with K split as a little workspace has it. */
TEST(test_epilogues)
{
    static const struct {
        int bias, residual;
        qc_matmul_gate act;
    } epilogues[] = {{0, KM_APART, QC_MATMUL_NO_GATE},
                     {1, KM_IN_Y, QC_MATMUL_NO_GATE},
                     {0, 0, QC_MATMUL_SILU},
                     {1, KM_IN_Y, QC_MATMUL_SILU},
                     {1, KM_APART, QC_MATMUL_GELU_TANH}};
    unsigned turn = 0;
    for (size_t i = 0; i < COUNT(ways); i++)
        for (size_t j = 0; j < COUNT(epilogues); j += qt_every(3), turn++) {
            km_spec spec = specs[turn % COUNT(specs)];
            if (spec.block == 32 && ways[i].path == QC_MATMUL_WGMMA)
                spec.block = 64;
            spec.n = turn % 3 ? 75 : 200;
            spec.k = turn % 2 ? 1024 : 192;
            km_job job = km_next_job(turn, ways[i].m, spec.n, spec.k);
            km_weight w;
            km_data d;
            job.path = ways[i].path;
            job.bias = epilogues[j].bias;
            job.residual = epilogues[j].residual;
            job.act = epilogues[j].act;
            km_weight_make(&w, handle, &spec, &rng);
            km_data_make(&d, &w, &job, &rng);
            km_run(handle, &w, &d);
            km_check(&w, &d, rounding_of(&job));
            km_data_free(&d);
            km_weight_free(&w);
        }
}

/* Without weights' columns a sum is 0, and y is what the epilogue makes of it. The order of its
 * steps and each rounding: y has the bits of the same steps in float. */
TEST(test_epilogue_of_nothing)
{
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 21, .k = 0, .block = 64};
    for (int act = QC_MATMUL_NO_GATE; act <= QC_MATMUL_SILU; act++)
        for (int residual = 0; residual <= KM_IN_Y; residual++) {
            const km_job job = {.m = 3,
                                .x_dtype = QC_DTYPE_F16,
                                .y_dtype = act ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                                .bias = 1,
                                .act = (qc_matmul_gate)act,
                                .residual = residual};
            km_weight w;
            km_data d;
            km_weight_make(&w, handle, &spec, &rng);
            km_data_make(&d, &w, &job, &rng);
            km_run(handle, &w, &d);
            for (uint64_t i = 0; i < job.m * d.n; i++) {
                const uint64_t m = i / d.n, n = i % d.n;
                float v = km_float(d.bias[n], job.y_dtype);
                if (act) {
                    const float g = km_float(d.gate[m * d.ldg + n], job.y_dtype);
                    v = g / (1.0f + expf(-g)) * v;
                }
                if (residual)
                    v = v + km_float(d.residual[m * d.ldr + n], job.y_dtype);
#ifdef QC_CUDA_SHIM /* whose expf is the host's */
                assert_int_equal(d.y[i], km_bits(v, job.y_dtype));
#else
                QT_CHECK(fabsf(km_float(d.y[i], job.y_dtype) - v) <= 0x1p-7f * (fabsf(v) + 1.0f),
                         "y[%" PRIu64 "] is far from %g", i, (double)v);
#endif
            }
            km_data_free(&d);
            km_weight_free(&w);
        }
}

/* Gate and residual of three weights in one launch, captured once and launched twice: with y as its
 * own residual each launch adds the product again. */
TEST(test_group_in_a_graph)
{
    enum { PARTS = 3, M = 5, K = 256 };
    static const uint64_t rows[PARTS] = {128, 64, 96};
    km_spec spec = {.kind = QC_FORM_NF4, .k = K, .block = 64, .nested = 1};
    km_weight w[PARTS];
    km_data d[PARTS];
    const qc_matmul_weights *ready[PARTS];
    qc_matmul_io io[PARTS];
    void *base[4 * PARTS + 2] = {NULL};
    unsigned bases = 0;
    for (int i = 0; i < PARTS; i++) {
        spec.n = rows[i];
        const km_job job = {.m = M,
                            .x_dtype = QC_DTYPE_F16,
                            .y_dtype = QC_DTYPE_BF16,
                            .bias = i != 1,
                            .act = i == 2 ? QC_MATMUL_SILU : QC_MATMUL_NO_GATE,
                            .residual = i ? KM_IN_Y : 0};
        km_weight_make(&w[i], handle, &spec, &rng);
        km_data_make(&d[i], &w[i], &job, &rng);
        ready[i] = &w[i].ready;
        io[i] = (qc_matmul_io){.m = M,
                               .x_dtype = QC_DTYPE_F16,
                               .y_dtype = QC_DTYPE_BF16,
                               .act = job.act,
                               .ldg = d[i].ldg};
        io[i].x = i ? io->x : km_upload(d[i].x, M * K * 2, 0, &base[bases++]);
        memcpy(d[i].y, d[i].residual, job.residual ? M * rows[i] * 2 : 0);
        io[i].y = km_upload(d[i].y, M * rows[i] * 2, 0, &base[bases++]);
        io[i].bias = job.bias ? km_upload(d[i].bias, rows[i] * 2, 0, &base[bases++]) : NULL;
        io[i].gate = job.act ? km_upload(d[i].gate, M * d[i].ldg * 2, 0, &base[bases++]) : NULL;
        io[i].residual = job.residual ? io[i].y : NULL;
    }
    for (int i = 1; i < PARTS; i++)
        memcpy(d[i].x, d->x, M * K * 2);
    const uint64_t bytes =
        qc_matmul_group_workspace_bytes(handle, ready, PARTS, M, QC_MATMUL_AUTO, 0);
    void *workspace = NULL;
    qc_cuda_stream s = NULL;
    qc_cuda_graph graph = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_malloc(&workspace, bytes, &km_error));
    KM_OK(qc_cuda_capture_begin(s, &km_error));
    KM_OK(qc_matmul_run_group(handle, ready, io, PARTS, QC_MATMUL_AUTO, workspace, bytes, s,
                              &km_error));
    KM_OK(qc_cuda_capture_end(&graph, s, &km_error));
    for (int turn = 0; turn < 2; turn++) {
        KM_OK(qc_cuda_graph_launch(graph, s, &km_error));
        for (int i = 0; i < PARTS; i++) {
            km_download(d[i].y, io[i].y, M * rows[i] * 2, s);
            km_check(&w[i], &d[i], (km_rounding){0x1p-10, 0x1p-24});
            if (d[i].job.residual)
                memcpy(d[i].residual, d[i].y, M * rows[i] * 2);
        }
    }
    qc_cuda_graph_destroy(graph);
    qc_cuda_stream_destroy(s);
    qc_cuda_free(workspace);
    while (bases)
        qc_cuda_free(base[--bases]);
    for (int i = 0; i < PARTS; i++) {
        km_data_free(&d[i]);
        km_weight_free(&w[i]);
    }
}

TEST(test_epilogue_arguments)
{
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 8, .k = 64, .block = 64};
    km_weight w;
    uint16_t a[512] = {0};
    km_weight_make(&w, handle, &spec, &rng);
    const qc_matmul_weights *ready = &w.ready;
    const qc_matmul_io good = {.m = 1,
                               .x = a,
                               .x_dtype = QC_DTYPE_F16,
                               .y = a + 64,
                               .y_dtype = QC_DTYPE_F16,
                               .gate = a,
                               .act = QC_MATMUL_SILU,
                               .residual = a};
    struct {
        qc_matmul_io io;
        const char *words;
    } cases[] = {{good, "ldg: its rows are 7 elements apart, but have 8"},
                 {good, "ldr: its rows are 7 elements apart, but have 8"},
                 {good, "the gate is NULL, but act is 1"},
                 {good, "the gate is given, but act is 0"},
                 {good, "the gate is given, but act is 3"},
                 {good, "residual is at an odd address"}};
    cases[0].io.ldg = cases[1].io.ldr = 7;
    cases[2].io.gate = NULL;
    cases[3].io.act = QC_MATMUL_NO_GATE;
    cases[4].io.act = (qc_matmul_gate)3;
    cases[5].io.residual = (const unsigned char *)a + 1;
    for (size_t i = 0; i < COUNT(cases); i++)
        km_expect_run(handle, &w.ready, &cases[i].io, QC_MATMUL_GEMV, NULL, 0, cases[i].words);
    qc_matmul_planned planned;
    qc_matmul_io plain = good;
    qc_error err = {0};
    plain.gate = plain.residual = NULL;
    plain.act = QC_MATMUL_NO_GATE;
    KM_OK(
        qc_matmul_plan_product(handle, &ready, &plain, 1, QC_MATMUL_GEMV, 0, &planned, &km_error));
    km_expect(qc_matmul_run_planned(handle, &planned, &ready, &good, NULL, 0, NULL, &err),
              QC_ERR_USAGE, &err, "weight 0 was planned without a bias, gate or residual");
    km_weight_free(&w);
}

/* Where a weight can be cut. */
TEST(test_refused)
{
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
    const int failed = test_run_all(NULL);
    qc_matmul_destroy(handle);
    return failed;
}
