/* The tensor-core matmuls, both forced, against double sums of the exact dequantized weights: every
 * tile and every tail, ways of finding codes, kinds of scales, and what must be exact.
 *
 *   kernel_mma            quick enough for the CPU shim
 *   kernel_mma --slow     the rest: whole Llama rows, thousands of rows of x
 *
 * Numbers are the same in every run: one output alone may cancel so far that its relative error
 * says nothing. */
#include "tests/fixtures/kernel_matmul.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static const qc_matmul_path paths[] = {QC_MATMUL_MMA_884, QC_MATMUL_MMA_16816};
static const unsigned path_sm[] = {70, 80};
static const uint64_t all_m[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,   15,  16,
                                 17, 31, 32, 33, 48, 63, 64, 65, 128, 256, 1024};
static int slow;

typedef struct {
    qc_matmul *h;
    qc_matmul_path path;
    qt_rng rng;
    unsigned turn; /* goes through the variants below */
    unsigned runs;
} bench;

static int bench_open(bench *b, size_t path)
{
    memset(b, 0, sizeof *b);
    b->path = paths[path];
    b->rng.state = 4;
    KM_OK(qc_matmul_create(&b->h, 0, &km_error));
    if (qc_matmul_device(b->h)->sm >= path_sm[path])
        return 1;
    print_message("%s left out: this device is sm_%u\n", qc_matmul_path_name(b->path),
                  qc_matmul_device(b->h)->sm);
    qc_matmul_destroy(b->h);
    return 0;
}

/* What the weight's rounding to float16 costs. */
static km_rounding rounding_of(const km_weight *w)
{
    int exponent = 0;
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    km_download(&exponent, w->ready.exponent, sizeof exponent, s);
    qc_cuda_stream_destroy(s);
    return (km_rounding){.weight = 0x1p-11, .absolute = ldexp(0x1p-25, -exponent)};
}

static void multiply(bench *b, const km_spec *spec, km_job job)
{
    km_weight w;
    km_data d;
    job.path = b->path;
    km_weight_make(&w, b->h, spec, &b->rng);
    km_data_make(&d, &w, &job, &b->rng);
    km_run(b->h, &w, &d);
    km_check(&w, &d, rounding_of(&w));
    if (slow || b->runs++ % 4 == 0) {
        uint16_t *before = km_host(job.m * d.job.ldy * 2);
        memcpy(before, d.y, job.m * d.job.ldy * 2);
        km_run(b->h, &w, &d);
        QT_CHECK(memcmp(before, d.y, job.m * d.job.ldy * 2) == 0, "another run, other bits");
        free(before);
    }
    km_data_free(&d);
    km_weight_free(&w);
}

static int is_aligned(const km_spec *s)
{
    return s->k % 32 == 0 && s->shift % 16 == 0;
}

/* The next of the kinds, dtypes, strides and so on, for a shape. */
static void multiply_next(bench *b, uint64_t m, uint64_t n, uint64_t k)
{
    static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};
    static const uint32_t blocks[] = {64, 32, 128, 4096, 512};
    unsigned t = b->turn++;
    km_spec spec = {
        .kind = kinds[t % 3],
        .n = n,
        .k = k,
        .block = blocks[t / 3 % COUNT(blocks)],
        .nested = t % 3 == 1 ? 0 : t / 2 % 2 == 0,
        .custom_map = t % 7 == 3,
        .shift = t % 4 == 2 ? 1 + t % 15 : 0,
    };
    km_job job = {
        .m = m,
        .x_dtype = t / 2 % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
        .y_dtype = t / 5 % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
        .ldx = t % 5 == 1   ? k + 3
               : t % 5 == 2 ? (k + 15) / 8 * 8
                            : 0,
        .ldy = t % 3 == 1 ? n + 5 : 0,
        .bias = t % 2,
        .x_shift = t % 6 == 5,
        .y_shift = t % 4 == 3,
    };
    multiply(b, &spec, job);
}

static void every_m(bench *b)
{
    static const uint64_t shapes[][2] = {{65, 192}, {130, 576}, {33, 95}};
    for (size_t i = 0; i < COUNT(all_m); i += qt_every(3))
        for (size_t j = 0; j < (slow ? 3 : all_m[i] <= 65 ? 2 : 1); j++)
            multiply_next(b, all_m[i], all_m[i] > 200 ? 33 : shapes[j][0], shapes[j][1]);
}

static void every_n_and_k(bench *b)
{
    static const uint64_t sizes[] = {1, 63, 65, 97, 576, 2880, 3420};
    static const uint64_t rows[] = {3, 17, 8, 40, 11};
    for (size_t i = 0; i < COUNT(sizes); i++)
        for (size_t j = 0; j < COUNT(sizes); j++) {
            uint64_t n = sizes[i], k = sizes[j], m = rows[(i + j) % COUNT(rows)];
            if (n * k > (slow ? UINT64_MAX : 3420 * 66 / qt_every(5)))
                continue;
            multiply_next(b, n * k > 1000000 ? 9 : m, n, k);
        }
}

/* Widths of the Llama layers: K whole with few rows of W, N whole with a short K. */
static void llama(bench *b)
{
    static const uint64_t widths[] = {4096, 8192, 14336, 28672, 1024, 11008};
    for (size_t i = 0; i < COUNT(widths); i++) {
        if (i > (slow ? COUNT(widths) : 3 / qt_every(4)))
            break;
        for (unsigned variant = 0; variant < (slow ? 6 : 1); variant++)
            multiply_next(b, variant % 2 ? 19 : 9, 5, widths[i]);
        if (slow || i < 1)
            multiply_next(b, 2, widths[i], 64);
    }
}

/* Blocks of every size, double quantized and plain: K 96 ends in the middle of blocks, 83 and 84 of
 * bytes and words. */
static void every_block(bench *b)
{
    static const uint64_t ks[] = {96, 83, 84};
    for (uint32_t block = 32; block <= 4096; block *= 2)
        for (unsigned variant = 0; variant < 12; variant += qt_every(5)) {
            km_spec spec = {
                .kind = variant & 1 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                .n = 51,
                .k = ks[variant / 4],
                .block = block,
                .nested = variant >> 1 & 1,
            };
            km_job job = {.m = 7, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
            multiply(b, &spec, job);
        }
}

/* Weights that float16 cannot hold: the exponent of the weight, and of x in BF16. */
static void every_scale(bench *b)
{
    static const double scales[] = {1e-30, 1e-6, 300.0, 1e20};
    for (size_t i = 0; i < COUNT(scales); i += qt_every(3))
        for (unsigned kind = 0; kind < 3; kind++) {
            km_spec spec = {.kind = kind == 0   ? QC_FORM_NF4
                                    : kind == 1 ? QC_FORM_INT8_ROWS
                                                : QC_FORM_INT8_BLOCKS,
                            .n = 20,
                            .k = 160,
                            .block = 64,
                            .nested = kind != 1 && i % 2,
                            .scale = scales[i]};
            multiply(b, &spec,
                     (km_job){.m = 9, .x_dtype = QC_DTYPE_BF16, .y_dtype = QC_DTYPE_BF16});
        }
}

/* K split: partial sums through the workspace; less and less of it behind the copy of x. */
static void every_split(bench *b)
{
    static const uint64_t room[] = {0, 30000, 9000, 6000, 3000};
    for (unsigned i = 0; i < 2 * COUNT(room); i += qt_every(3)) {
        km_spec spec = {.kind = i % 2 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                        .n = 70,
                        .k = 4096 + 32,
                        .block = 64,
                        .nested = 1};
        km_job job = {.m = 10, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16, .bias = 1};
        if (room[i / 2])
            job.limit_bytes = QC_MATMUL_HEADER_BYTES + job.m * spec.k * 2 + 1024 + room[i / 2];
        multiply(b, &spec, job);
    }
}

/* Whether y of a row of the unit matrix is right for a weight: the bits of dequantizing it to
 * float16. mma-884 with aligned codes has no weights in float16 (docs/decisions/0018), nor, of what
 * is tried here, has mma-16816 for int8 by row: int8 is exact until y is rounded, and for NF4 only
 * the code value is rounded before, to 0.6 * 2^-11 of it. */
static int brings_out(const bench *b, const km_spec *spec, float weight, uint16_t got, qc_dtype y)
{
    int exact_rows =
        b->path == QC_MATMUL_MMA_16816 && spec->kind == QC_FORM_INT8_ROWS && spec->k % 64 == 0;
    if (!is_aligned(spec) || (b->path != QC_MATMUL_MMA_884 && !exact_rows))
        return got == km_bits(qc_f32_from_f16(qc_f16_from_f32(weight)) + 0.0f, y);
    if (spec->kind != QC_FORM_NF4)
        return got == km_bits(weight + 0.0f, y); /* sums make -0 a 0 */
    /* Half a unit of y's dtype: 2^-11 or 2^-8, and half of the least number. */
    double exact = fabs((double)weight), unit = y == QC_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
    double least = y == QC_DTYPE_F16 ? 0x1p-25 : 0x1p-134;
    double code = 0.6 * 0x1p-11 + 0x1p-22, largest = exact * (1.0 + code);
    double half = ldexp(unit, ilogb(largest > 0.0 ? largest : 1.0));
    half = half > least ? half : least;
    return fabs((double)km_float(got, y) - (double)weight) <= code * exact + half;
}

/* Rows of the unit matrix bring out the weights. */
static void identity(bench *b)
{
    for (unsigned variant = 0; variant < 24; variant += qt_every(5)) {
        km_spec spec = {
            .kind = variant % 3 == 0   ? QC_FORM_NF4
                    : variant % 3 == 1 ? QC_FORM_INT8_ROWS
                                       : QC_FORM_INT8_BLOCKS,
            .n = 75,
            .k = variant / 3 % 2 ? 128 : 77,
            .block = 32,
            .nested = variant % 3 != 1 && variant / 6 % 2,
            .scale = 0.02,
        };
        km_job job = {.m = spec.k,
                      .x_dtype = variant / 12 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                      .y_dtype = variant / 4 % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                      .path = b->path};
        km_weight w;
        km_data d;
        km_weight_make(&w, b->h, &spec, &b->rng);
        km_data_make(&d, &w, &job, &b->rng);
        for (uint64_t m = 0; m < job.m; m++)
            for (uint64_t k = 0; k < spec.k; k++)
                d.x[m * d.job.ldx + k] = m == k ? km_bits(1.0f, job.x_dtype) : 0;
        km_run(b->h, &w, &d);
        for (uint64_t m = 0; m < job.m; m++)
            for (uint64_t n = 0; n < spec.n; n++) {
                float weight = km_value(&w.host, n, m);
                uint16_t got = d.y[m * d.job.ldy + n];
                QT_CHECK(brings_out(b, &spec, weight, got, job.y_dtype),
                         "variant %u, W[%" PRIu64 "][%" PRIu64 "]: 0x%04x for %a", variant, n, m,
                         got, (double)weight);
            }
        km_data_free(&d);
        km_weight_free(&w);
    }
}

/* NaN and infinity in one row of x, at every k that means something to a kernel: in y that row
 * has what IEEE says, all others their bits. */
static void not_finite(bench *b)
{
    static const uint64_t places[] = {0,   31,  32,  127,  128,  255,  256, 511,
                                      512, 640, 896, 1024, 2047, 2048, 2879};
    km_spec spec = {.kind = QC_FORM_NF4, .n = 33, .k = 2880, .block = 64};
    km_job job = {.m = 11, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16, .path = b->path};
    for (unsigned variant = 0; variant < 4; variant += qt_every(3)) {
        spec.kind = variant % 2 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4;
        spec.k = variant / 2 ? 2879 : 2880;
        job.x_dtype = variant / 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
        km_weight w;
        km_data d;
        km_weight_make(&w, b->h, &spec, &b->rng);
        km_data_make(&d, &w, &job, &b->rng);
        km_run(b->h, &w, &d);
        uint64_t elems = job.m * spec.n;
        uint16_t *before = km_host(elems * 2);
        memcpy(before, d.y, elems * 2);
        for (size_t i = slow ? 0 : variant % 3; i < COUNT(places); i += slow ? 1 : 3) {
            uint64_t k = places[i] < spec.k ? places[i] : spec.k - 1, bad = i % job.m;
            uint16_t *x = &d.x[bad * d.job.ldx + k], kept = *x;
            float value = i % 2 ? INFINITY : NAN;
            *x = km_bits(value, job.x_dtype);
            km_run(b->h, &w, &d);
            *x = kept;
            for (uint64_t j = 0; j < elems; j++) {
                if (j / spec.n != bad) {
                    QT_CHECK(d.y[j] == before[j], "row %" PRIu64 " changed row %" PRIu64, bad,
                             j / spec.n);
                    continue;
                }
                float weight = qc_f32_from_f16(qc_f16_from_f32(km_value(&w.host, j % spec.n, k)));
                float want = weight * value, got = qc_f32_from_f16(d.y[j]);
                QT_CHECK(isnan(want) ? isnan(got) : got == want,
                         "x[%" PRIu64 "][%" PRIu64 "] = %g makes y[..][%" PRIu64 "] %g", bad, k,
                         (double)value, j % spec.n, (double)got);
            }
        }
        free(before);
        km_data_free(&d);
        km_weight_free(&w);
    }
}

/* More tiles of x than one, weights read again for each; y of another stride. */
static void many_rows(bench *b)
{
    if (!slow)
        return;
    for (unsigned i = 0; i < 6; i++)
        multiply_next(b, 4096, 40, 320 + i);
}

static void on_both(void (*test)(bench *))
{
    for (size_t i = 0; i < COUNT(paths); i++) {
        bench b;
        if (!bench_open(&b, i))
            continue;
        test(&b);
        qc_matmul_destroy(b.h);
    }
}

#define ON_BOTH(name)                                                                              \
    static void test_##name(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        on_both(name);                                                                             \
    }
ON_BOTH(every_m)
ON_BOTH(every_n_and_k)
ON_BOTH(llama)
ON_BOTH(every_block)
ON_BOTH(every_scale)
ON_BOTH(every_split)
ON_BOTH(identity)
ON_BOTH(not_finite)
ON_BOTH(many_rows)

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    if (km_no_device())
        return 77;
    km_without_cublas();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_m),     cmocka_unit_test(test_every_n_and_k),
        cmocka_unit_test(test_llama),       cmocka_unit_test(test_every_block),
        cmocka_unit_test(test_every_scale), cmocka_unit_test(test_every_split),
        cmocka_unit_test(test_identity),    cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_many_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
