/* The kernel of sm_90a (matmul_wgmma.cu) through the forced path, against double sums of the exact
 * dequantized weights.
 *
 *   kernel_wgmma            quick enough for the CPU shim
 *   kernel_wgmma --slow     more of the same */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_kernels.h"

#include <math.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static int slow;
static qc_matmul *handle;
static qt_rng rng;

/* Weights with scales are rounded to float16, and before that NF4's code values are; rows of int8
 * are exact. */
static km_rounding rounding_of(const km_weight *w)
{
    int exponent = 0;
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    km_download(&exponent, w->ready.exponent, sizeof exponent, s);
    qc_cuda_stream_destroy(s);
    if (w->spec.kind == QC_FORM_INT8_ROWS)
        return (km_rounding){0.0, 0.0};
    return (km_rounding){.weight = w->spec.kind == QC_FORM_NF4 ? 0x1p-10 : 0x1p-11 + 0x1p-14,
                         .absolute = ldexp(0x1p-24, -exponent)};
}

static void multiply(const km_spec *spec, km_job job)
{
    km_weight w;
    km_data d;
    job.path = QC_MATMUL_WGMMA;
    km_weight_make(&w, handle, spec, &rng);
    km_data_make(&d, &w, &job, &rng);
    km_run(handle, &w, &d);
    km_check(&w, &d, rounding_of(&w));
    uint16_t *before = km_host(job.m * d.job.ldy * 2);
    memcpy(before, d.y, job.m * d.job.ldy * 2);
    km_run(handle, &w, &d);
    QT_CHECK(memcmp(before, d.y, job.m * d.job.ldy * 2) == 0, "another run, other bits");
    free(before);
    km_data_free(&d);
    km_weight_free(&w);
}

static km_spec next_spec(unsigned t, uint64_t n, uint64_t k)
{
    static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_NF4, QC_FORM_INT8_ROWS,
                                         QC_FORM_INT8_BLOCKS};
    static const uint32_t blocks[] = {64, 64, 128, 256, 512, 1024, 2048, 4096};
    return (km_spec){
        .kind = kinds[t % 4],
        .n = n,
        .k = k,
        .block = blocks[t / 4 % COUNT(blocks)],
        .nested = t % 4 == 2 ? 0 : t % 3 != 0,
        .custom_map = t % 7 == 3,
    };
}

static km_job next_job(unsigned t, uint64_t m, uint64_t n, uint64_t k)
{
    return (km_job){
        .m = m,
        .x_dtype = t / 2 % 3 == 1 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
        .y_dtype = t / 5 % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
        .ldx = t % 5 == 1   ? k + 3
               : t % 5 == 2 ? k + 8
                            : 0,
        .ldy = t % 3 == 1 ? n + 5 : 0,
        .bias = t % 2,
        .x_shift = t % 6 == 5,
        .y_shift = t % 4 == 3,
    };
}

static void test_every_m(void **state)
{
    static const uint64_t ns[] = {1, 15, 257, 127, 129, 300}, ks[] = {64, 128, 192, 576, 512};
    static const uint64_t ms[] = {1,  2,  7,  8,  9,   15,  16,  17,  31,  32,
                                  33, 63, 64, 65, 100, 128, 129, 255, 256, 257};
    (void)state;
    for (unsigned i = 0; i < COUNT(ms); i += qt_every(5)) {
        uint64_t n = ns[i % COUNT(ns)], k = ks[i % COUNT(ks)];
        for (unsigned t = i; t < i + (slow ? 4 : 1); t++) {
            km_spec spec = next_spec(t, n, k);
            multiply(&spec, next_job(t, ms[i], n, k));
        }
    }
}

static void test_every_n_and_k(void **state)
{
    static const uint64_t ns[] = {1, 17, 129, 191, 255, 256, 257, 300, 513};
    static const uint64_t ks[] = {64, 128, 192, 512, 576, 1024, 2880, 8192}, ms[] = {9, 17, 70, 33};
    unsigned t = 0;
    (void)state;
    for (size_t i = 0; i < COUNT(ns); i++)
        for (size_t j = 0; j < COUNT(ks); j++, t++) {
            if (ns[i] * ks[j] > (slow ? UINT64_MAX : 200000 / qt_every(4)))
                continue;
            km_spec spec = next_spec(t, ns[i], ks[j]);
            multiply(&spec, next_job(t, ms[t % 4], ns[i], ks[j]));
        }
}

/* Weights that float16 cannot hold. */
static void test_every_scale(void **state)
{
    static const double scales[] = {1e-30, 1e-6, 300.0, 1e20};
    static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};
    (void)state;
    for (size_t i = 0; i < COUNT(scales); i += qt_every(3))
        for (unsigned kind = 0; kind < COUNT(kinds); kind++) {
            km_spec spec = {.kind = kinds[kind],
                            .n = 20,
                            .k = 192,
                            .block = 64,
                            .nested = kind != 1 && i % 2,
                            .scale = scales[i]};
            multiply(
                &spec,
                (km_job){.m = i % 2 ? 40 : 9, .x_dtype = QC_DTYPE_BF16, .y_dtype = QC_DTYPE_BF16});
        }
}

/* Less and less room for partial sums, of a weight whose K is split. */
static void test_every_workspace(void **state)
{
    static const uint64_t room[] = {0, 60000, 30000, 256};
    (void)state;
    for (unsigned i = 0; i < 2 * COUNT(room); i += qt_every(3)) {
        km_spec spec = {.kind = i % 2 ? QC_FORM_INT8_ROWS : QC_FORM_NF4,
                        .n = 70,
                        .k = 4096 + 64,
                        .block = 64,
                        .nested = i % 2 == 0};
        km_job job = {
            .m = 10, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16, .bias = 1, .x_shift = 1};
        if (room[i / 2])
            job.limit_bytes = QC_MATMUL_HEADER_BYTES + 16 * spec.k * 2 + 1024 + room[i / 2];
        multiply(&spec, job);
    }
}

/* Tiles of many blocks, on all of the device's multiprocessors; only on a real GPU. */
static void test_large(void **state)
{
    static const uint64_t shapes[][2] = {{1024, 1024}, {3584, 512}, {136, 8192}};
    static const uint64_t ms[] = {16, 64, 128, 256, 300};
    (void)state;
#ifdef QC_CUDA_SHIM
    return;
#endif
    unsigned t = 0;
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (size_t j = 0; j < COUNT(ms); j += 2, t++) {
            km_spec spec = next_spec(t, shapes[i][0], shapes[i][1]);
            multiply(&spec, next_job(t, ms[(i + j) % COUNT(ms)], spec.n, spec.k));
        }
}

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    if (km_no_device())
        return 77;
    km_without_cublas();
    rng.state = 18;
    KM_OK(qc_matmul_create(&handle, 0, &km_error));
    if (qc_matmul_device(handle)->sm != 90) {
        print_message("skipped: this device is sm_%u\n", qc_matmul_device(handle)->sm);
        qc_matmul_destroy(handle);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_m),     cmocka_unit_test(test_every_n_and_k),
        cmocka_unit_test(test_every_scale), cmocka_unit_test(test_every_workspace),
        cmocka_unit_test(test_large),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    qc_matmul_destroy(handle);
    return failed;
}
