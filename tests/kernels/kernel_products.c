/* The matmul kernels one by one, each through its forced path, against double sums of the exact
 * dequantized weights: every tile and every tail, ways of finding codes, kinds of scales, less and
 * less workspace, and what must be exact. Another run has the same bits. How work is shared out is
 * in kernel_sharing.c, and what only the kernel for few rows has in kernel_ring.c.
 *
 *   kernel_products [--slow] [KERNEL]    --slow: more of everything; KERNEL: gemv, mma-884,
 *                                        general, ring, ring-32, tiles or wgmma alone
 *
 * Numbers are the same in every run: one output alone may cancel so far that its relative error
 * says nothing. */
#include "kernels/matmul_handle.h"
#include "tests/fixtures/kernel_matmul.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define MOST         16

/* Ends with 0. */
typedef uint64_t sizes[MOST];

/* What y of a row of the unit matrix is. */
typedef enum {
    WEIGHTS,  /* float weights, rounded once */
    FLOAT16,  /* weights as dequantizing them to float16 gives them */
    BEHIND,   /* int8 like WEIGHTS; NF4's code values are float16, and scales come behind */
    SCALED,   /* the same, but scales of int8 by blocks are rounded on their way, to 2^-22 */
    NOT_EXACT /* nothing that km_check does not say */
} exactness;

typedef struct {
    const char *name;
    qc_matmul_path path;
    uint32_t variant; /* 0: any */
    unsigned sm_least;
    uint32_t whole; /* divides K, and blocks are as long or longer; 0: any K */
    sizes ms, ns, ks;
    uint64_t quick; /* the most weights of a product that is tried without --slow */
    km_rounding (*rounding)(const km_weight *w);
    exactness whole_exact, other_exact;
} kernel;

/* NS and KS are tried together; of MS, which also go with some of them, all. No single element of
 * y is alone with few rows of x, whose sum may be so small that its relative error is large. */
#define ANY_N                                                                                      \
    {                                                                                              \
        63, 1, 65, 130, 33, 97, 576, 2880, 3420, 8192                                              \
    }
#define ANY_K                                                                                      \
    {                                                                                              \
        192, 576, 95, 1, 31, 63, 65, 1067, 1088, 2880, 3420, 4096, 8191, 9000, 14336               \
    }
#define WHOLE_N                                                                                    \
    {                                                                                              \
        15, 257, 127, 129, 17, 300, 191, 192, 193, 256, 1                                          \
    }
#define WHOLE_K                                                                                    \
    {                                                                                              \
        64, 128, 192, 576, 512, 1024, 2880, 8192                                                   \
    }
#define ALL_M                                                                                      \
    {                                                                                              \
        1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 256                                     \
    }

static const kernel kernels[] = {
    {"gemv",
     QC_MATMUL_GEMV,
     0,
     0,
     0,
     {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 19, 45},
     ANY_N,
     ANY_K,
     60000,
     km_rounding_of_floats,
     WEIGHTS,
     WEIGHTS},
    {"mma-884", QC_MATMUL_MMA_884, 0, 70, 0, ALL_M, ANY_N, ANY_K, 110000, km_rounding_of_weights,
     BEHIND, FLOAT16},
    {"general", QC_MATMUL_MMA_16816, 0, 80, 0, ALL_M, ANY_N, ANY_K, 110000, km_rounding_of_weights,
     NOT_EXACT, FLOAT16},
    {"ring",
     QC_MATMUL_MMA_16816,
     QC_MATMUL_RING,
     80,
     64,
     {1, 2, 3, 4, 5, 6, 7, 8},
     {64, 65, 127, 128, 191, 300, 1, 15},
     {64, 128, 192, 576, 1024, 1088, 2880, 4096, 8192, 9216},
     600000,
     km_rounding_of_codes,
     SCALED,
     SCALED},
    {"ring-32",
     QC_MATMUL_MMA_16816,
     QC_MATMUL_RING,
     80,
     32,
     {1, 2, 3, 4, 5, 6, 7, 8},
     {64, 65, 127, 17, 191, 300, 1, 15},
     {32, 96, 224, 608, 1056, 1088, 2880, 4128, 8160},
     300000,
     km_rounding_of_codes,
     SCALED,
     SCALED},
    {"tiles",
     QC_MATMUL_MMA_16816,
     QC_MATMUL_TILES,
     80,
     64,
     {9, 16, 17, 25, 32, 33, 48, 63, 64, 65, 128},
     WHOLE_N,
     WHOLE_K,
     100000,
     km_rounding_of_codes,
     NOT_EXACT,
     NOT_EXACT},
    {"wgmma",
     QC_MATMUL_WGMMA,
     0,
     90,
     64,
     {1, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 257},
     WHOLE_N,
     WHOLE_K,
     100000,
     km_rounding_of_wgmma,
     NOT_EXACT,
     NOT_EXACT},
};

static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};

static qc_matmul *handle;
static const kernel *of; /* the kernel at work */
static qt_rng rng;
static int slow;
static unsigned turn; /* goes through kinds, dtypes, strides and so on */

static size_t count_of(const sizes s)
{
    size_t n = 0;
    while (n < MOST && s[n])
        n++;
    return n;
}

/* The product is the kernel's. */
static void check_kernel(const km_weight *w, const km_data *d)
{
    const qc_matmul_weights *ready = &w->ready;
    const qc_matmul_io io = {.m = d->job.m,
                             .x = (const void *)(uintptr_t)(256 + 2 * d->job.x_shift),
                             .x_dtype = d->job.x_dtype,
                             .y_dtype = d->job.y_dtype,
                             .ldx = d->job.ldx,
                             .ldy = d->job.ldy};
    qc_matmul_planned planned;
    KM_OK(qc_matmul_plan_product(handle, &ready, &io, 1, of->path, d->job.limit_bytes, &planned,
                                 &km_error));
    const qc_matmul_plan *p = &planned.set[0].plan;
    QT_CHECK(p->path == of->path && (!of->variant || p->variant == of->variant),
             "%" PRIu64 " x %" PRIu64 " with %" PRIu64 " rows of x: variant %u", d->n, d->k,
             d->job.m, p->variant);
}

/* Against the truth, and in every other turn once more. */
static void multiply(const km_spec *spec, km_job job)
{
    km_weight w;
    km_data d;
    job.path = of->path;
    km_weight_make(&w, handle, spec, &rng);
    km_data_make(&d, &w, &job, &rng);
    check_kernel(&w, &d);
    km_run(handle, &w, &d);
    km_check(&w, &d, of->rounding(&w));
    const size_t bytes = job.m * d.job.ldy * 2;
    uint16_t *before = km_host(bytes);
    memcpy(before, d.y, bytes);
    if (slow || turn % 4 == 0) {
        w.ready.complete = turn / 4 % 2 ? QC_MATMUL_WEIGHTS_COMPLETE : 0;
        km_run(handle, &w, &d);
        QT_CHECK(memcmp(before, d.y, bytes) == 0,
                 "another run has other bits: %" PRIu64 " rows of x, %" PRIu64 " x %" PRIu64, job.m,
                 d.n, d.k);
    }
    free(before);
    km_data_free(&d);
    km_weight_free(&w);
}

/* The next kinds, dtypes, strides and addresses for a shape. */
static void multiply_next(uint64_t m, uint64_t n, uint64_t k)
{
    unsigned t = turn++;
    km_spec spec = km_next_spec(t, n, k);
    km_job job = km_next_job(t, m, n, k);
    if (t % 5 == 2)
        job.ldx = (k + 15) / 8 * 8;
    if (of->whole < 64)
        spec.block = t / 3 % 3 ? spec.block : 32;
    if (!of->whole) {
        spec.shift = t % 4 == 2 ? 1 + t % 15 : 0;
    }
    multiply(&spec, job);
}

static void test_every_m(void **state)
{
    const size_t ns = slow ? 3 : 1;
    (void)state;
    for (size_t i = 0; i < count_of(of->ms); i += qt_every(3))
        for (size_t j = 0; j < (of->ms[i] <= 65 ? 2 * ns : ns); j++) {
            size_t n = (i + j) % 4, k = (i + j) % 5;
            multiply_next(of->ms[i], of->ns[of->ns[n] == 1 ? n + 1 : n],
                          of->ks[of->ks[k] == 1 ? k + 1 : k]);
        }
}

static void test_every_n_and_k(void **state)
{
    const size_t ms = count_of(of->ms);
    (void)state;
    for (size_t i = 0; i < count_of(of->ns); i++)
        for (size_t j = 0; j < count_of(of->ks); j++) {
            uint64_t m = of->ms[(3 * i + j) % ms], n = of->ns[i], k = of->ks[j];
            if (n * k > (slow ? 1u << 22 : of->quick / qt_every(2)))
                continue;
            m = m > 70 ? of->ms[ms / 2] : m;
            multiply_next(n == 1 && m < 3 ? of->ms[ms / 2] : m, n, k);
        }
}

/* Blocks of every size with either kind of scales; where K may be anything, it ends in the middle
 * of blocks, of bytes (83) and of words (84). */
static void test_every_block(void **state)
{
    static const uint64_t any[] = {96, 83, 84}, whole[] = {256, 320, 768}, half[] = {96, 288, 512};
    const uint64_t *ks = of->whole == 64 ? whole : of->whole ? half : any;
    (void)state;
    for (uint32_t block = of->whole == 64 ? 64 : 32; block <= 4096; block *= 2)
        for (unsigned v = 0; v < 12; v += qt_every(5)) {
            const km_spec spec = {.kind = v & 1 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                                  .n = of->ns[0] + block % 7,
                                  .k = ks[v / 4],
                                  .block = block,
                                  .nested = v >> 1 & 1};
            turn++;
            multiply(&spec, (km_job){.m = of->ms[(v + block / 64) % 5],
                                     .x_dtype = QC_DTYPE_F16,
                                     .y_dtype = QC_DTYPE_F16});
        }
}

/* Nested scales whose codes lie together, for every tile of x. */
static void test_together(void **state)
{
    static const uint64_t ns[] = {300, 64, 129, 193}, ks[] = {256, 512, 768};
    (void)state;
    for (unsigned i = 0; of->whole && i < count_of(of->ms); i += qt_every(3)) {
        const km_spec spec = {.kind = i % 2 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                              .n = ns[i % COUNT(ns)],
                              .k = ks[i % COUNT(ks)],
                              .block = of->whole,
                              .nested = 1,
                              .custom_map = i == 6};
        turn++;
        multiply(&spec, km_next_job(i, of->ms[i], spec.n, spec.k));
    }
}

/* Weights that float16 cannot hold: the exponent of the weight, and of x in BF16. */
static void test_every_scale(void **state)
{
    static const double scales[] = {1e-30, 1e-6, 300.0, 1e20, 1e34};
    (void)state;
    for (size_t i = 0; i < COUNT(scales); i += qt_every(3))
        for (unsigned kind = 0; kind < 3; kind++) {
            const km_spec spec = {.kind = kinds[kind],
                                  .n = 70,
                                  .k = of->whole ? 192 : 160,
                                  .block = 64,
                                  .nested = kind != 1 && i % 2,
                                  .scale = scales[i]};
            turn++;
            multiply(&spec,
                     (km_job){.m = of->ms[i], .x_dtype = QC_DTYPE_BF16, .y_dtype = QC_DTYPE_BF16});
        }
}

/* Less and less room for partial sums behind the copy of x, of a weight whose K is split. */
static void test_every_workspace(void **state)
{
    static const uint64_t room[] = {0, 60000, 30000, 9000, 6000, 3000, 256};
    const uint64_t m = of->ms[0] < 9 ? of->ms[3] : of->ms[0];
    (void)state;
    for (unsigned i = 0; i < 2 * COUNT(room); i += qt_every(3)) {
        const km_spec spec = {.kind = kinds[i % 2 ? 1 + i / 2 % 2 : 0],
                              .n = 70,
                              .k = 4096 + (of->whole == 64 ? 64 : 32),
                              .block = 64,
                              .nested = i % 2 == 0};
        km_job job = {.m = m,
                      .x_dtype = QC_DTYPE_F16,
                      .y_dtype = QC_DTYPE_F16,
                      .bias = 1,
                      .x_shift = i / 2 % 2};
        if (room[i / 2])
            job.limit_bytes = (m + 15) / 16 * 16 * spec.k * 2 + 1024 + room[i / 2];
        turn++;
        multiply(&spec, job);
    }
}

/* Whether y of a row of the unit matrix is right for a weight. */
static int brings_out(exactness exact, qc_form_kind kind, float weight, uint16_t got, qc_dtype y)
{
    if (exact == FLOAT16)
        return got == km_bits(qc_f32_from_f16(qc_f16_from_f32(weight)) + 0.0f, y);
    if (exact == WEIGHTS || kind == QC_FORM_INT8_ROWS ||
        (exact == BEHIND && kind == QC_FORM_INT8_BLOCKS))
        return got == km_bits(weight + 0.0f, y); /* sums make -0 a 0 */
    /* Half a unit of y's dtype: 2^-11 or 2^-8, and half of the least number. */
    double size = fabs((double)weight), unit = y == QC_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
    double least = y == QC_DTYPE_F16 ? 0x1p-25 : 0x1p-134;
    double code = (kind == QC_FORM_NF4 ? 0.6 * 0x1p-11 : 0.0) + 0x1p-22;
    double largest = size * (1.0 + code);
    double half = ldexp(unit, ilogb(largest > 0.0 ? largest : 1.0));
    half = half > least ? half : least;
    return fabs((double)km_float(got, y) - (double)weight) <= code * size + half;
}

/* Rows of the unit matrix bring out the weights. */
static void test_identity(void **state)
{
    (void)state;
    const uint64_t most = of->ms[count_of(of->ms) - 1];
    for (unsigned v = 0; v < 24; v += qt_every(5)) {
        const int whole = of->whole || v / 3 % 2;
        const exactness exact = whole ? of->whole_exact : of->other_exact;
        const km_spec spec = {.kind = kinds[v % 3],
                              .n = 75,
                              .k = whole ? 128 : 77,
                              .block = of->whole == 64 ? 64 : 32,
                              .nested = v % 3 != 1 && v / 6 % 2,
                              .scale = 0.02};
        km_weight w;
        if (exact == NOT_EXACT)
            continue;
        km_weight_make(&w, handle, &spec, &rng);
        for (uint64_t first = 0; first < spec.k; first += most * qt_every(4)) {
            const km_job job = {.m = spec.k - first < most ? spec.k - first : most,
                                .x_dtype = v / 12 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                                .y_dtype = v / 4 % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                                .path = of->path};
            km_data d;
            km_data_make(&d, &w, &job, &rng);
            for (uint64_t i = 0; i < job.m * spec.k; i++)
                d.x[i] = i % spec.k == first + i / spec.k ? km_bits(1.0f, job.x_dtype) : 0;
            km_run(handle, &w, &d);
            for (uint64_t i = 0; i < job.m * spec.n; i++) {
                float weight = km_value(&w.host, i % spec.n, first + i / spec.n);
                QT_CHECK(brings_out(exact, spec.kind, weight, d.y[i], job.y_dtype),
                         "variant %u, W[%" PRIu64 "][%" PRIu64 "]: 0x%04x for %a", v, i % spec.n,
                         first + i / spec.n, d.y[i], (double)weight);
            }
            km_data_free(&d);
        }
        km_weight_free(&w);
    }
}

static void test_not_finite(void **state)
{
    static const uint64_t any[] = {2880, 2879}, whole[] = {576, 2880};
    const size_t ms = count_of(of->ms);
    (void)state;
    for (unsigned v = 0; v < 6; v += qt_every(5)) {
        const uint64_t m = of->ms[(v + 4) % ms];
        const km_spec spec = {
            .kind = kinds[v % 3], .n = 66, .k = of->whole ? whole[v / 3] : any[v / 3], .block = 64};
        const km_job job = {.m = m > 64 ? 33 : m,
                            .x_dtype = v / 3 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                            .y_dtype = QC_DTYPE_F16,
                            .path = of->path};
        km_check_not_finite(handle, &spec, &job, v, slow ? 1 : 4, &rng);
    }
}

/* More tiles of x than one, weights read again for each. */
static void test_many_rows(void **state)
{
    (void)state;
    for (unsigned i = 0; slow && of->variant != QC_MATMUL_RING && i < 6; i++)
        multiply_next(of->path == QC_MATMUL_GEMV ? 1029 : 4096, 40, of->whole ? 320 : 320 + i);
}

#ifndef QC_CUDA_SHIM
/* Tiles of many blocks, on all of the device's multiprocessors. */
static void test_large(void **state)
{
    static const uint64_t shapes[][2] = {{1024, 1024}, {3584, 512}, {136, 8192}};
    const size_t ms = count_of(of->ms);
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (size_t j = 0; j < 3; j++)
            multiply_next(of->ms[ms - 1 - (i + j) % 3], shapes[i][0], shapes[i][1]);
}
#else
/* Kernels that want several blocks on a multiprocessor say so: of an sm_90, three GEMVs for one row
 * (3 x 38.3 of 228 KB) and two of the general kernel for 8 rows (2 x 58.3 KB). */
static void test_resident(void **state)
{
    const int general = of->path == QC_MATMUL_MMA_16816 && !of->variant;
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 64, .k = 512, .block = 32, .nested = 1};
    const km_job job = {.m = general ? 8 : 1, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    km_weight w;
    km_data d;
    (void)state;
    if (qc_matmul_device(handle)->sm != 90 || (!general && of->path != QC_MATMUL_GEMV))
        return;
    assert_int_equal(qc_matmul_device(handle)->shared_multiprocessor_bytes, 228 << 10);
    km_weight_make(&w, handle, &spec, &rng);
    km_data_make(&d, &w, &job, &rng);
    handle->choice = (qc_matmul_choice){of->path, general ? QC_MATMUL_GENERAL : 0, 0};
    km_run(handle, &w, &d); /* so small that K is not split: no reduction behind it */
    handle->choice = (qc_matmul_choice){QC_MATMUL_AUTO, 0, 0};
    assert_int_equal(qc_shim_last_carveout(), general ? 52 : 51);
    km_data_free(&d);
    km_weight_free(&w);
}
#endif

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_m),     cmocka_unit_test(test_every_n_and_k),
        cmocka_unit_test(test_every_block), cmocka_unit_test(test_together),
        cmocka_unit_test(test_every_scale), cmocka_unit_test(test_every_workspace),
        cmocka_unit_test(test_identity),    cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_many_rows),
#ifdef QC_CUDA_SHIM
        cmocka_unit_test(test_resident),
#else
        cmocka_unit_test(test_large),
#endif
    };
    int failed = 0;
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    const char *only = argc > 1 + slow ? argv[1 + slow] : NULL;
    if (km_no_device())
        return 77;
    km_without_cublas();
    handle = km_handle();
    for (size_t i = 0; i < COUNT(kernels); i++) {
        of = &kernels[i];
        rng.state = 4;
        turn = 0;
        if ((!only || strcmp(only, of->name) == 0) &&
            km_is_here(handle, of->name, of->path, of->sm_least))
            failed += cmocka_run_group_tests_name(of->name, tests, NULL, NULL);
    }
    qc_matmul_destroy(handle);
    return failed;
}
