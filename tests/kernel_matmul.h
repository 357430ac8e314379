/* What tests of the matmul kernels share: random quantized weights on the host and on the device,
 * their exact values, and products to compare with. For tests/kernel_*.c: with the CPU shim and
 * with a GPU alike. */
#ifndef QC_TESTS_KERNEL_MATMUL_H
#define QC_TESTS_KERNEL_MATMUL_H

#include "tests/quant_testing.h"

#include "kernels/matmul.h"
#include "kernels/matmul_plan.h"

#include <string.h>

/* Calls in KM_OK give &km_error as their last argument; each thread has its own. */
static __thread qc_error km_error;

#define KM_OK(call)                                                                                \
    do {                                                                                           \
        km_error = (qc_error){0};                                                                  \
        if ((call) != QC_OK)                                                                       \
            fail_msg("%s: %s", #call, km_error.msg);                                               \
    } while (0)

/* 77 where there is no device; for main. */
static inline int km_no_device(void)
{
    int count = 0;
    char why[256] = "";
    qc_cuda_device_count(&count, why, sizeof why);
    if (count == 0)
        print_message("skipped: %s\n", why);
    return count == 0 ? 77 : 0;
}

/* For tests that do not need it: under compute-sanitizer its start alone takes long. */
static inline void km_without_cublas(void)
{
    if (qt_every(2) > 1)
        (void)setenv("QCONV_LIBCUBLAS", "none", 1);
}

static inline void *km_host(size_t bytes)
{
    void *p = calloc(bytes ? bytes : 1, 1);
    assert_non_null(p);
    return p;
}

/* Device memory with these bytes, from `shift` bytes behind an aligned address on. *base: to free.
 */
static inline void *km_upload(const void *host, size_t bytes, size_t shift, void **base)
{
    KM_OK(qc_cuda_malloc(base, bytes + shift + (bytes + shift == 0), &km_error));
    unsigned char *p = (unsigned char *)*base + shift;
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_to_device(p, host, bytes, s, &km_error));
    KM_OK(qc_cuda_stream_synchronize(s, &km_error));
    qc_cuda_stream_destroy(s);
    return p;
}

static inline void km_download(void *host, const void *device, size_t bytes, qc_cuda_stream s)
{
    KM_OK(qc_cuda_to_host(host, device, bytes, s, &km_error));
    KM_OK(qc_cuda_stream_synchronize(s, &km_error));
}

/* ---- weights --------------------------------------------------------------------------------- */

typedef struct {
    qc_weights_kind kind;
    uint64_t n, k;
    uint32_t block;
    int nested, custom_map;
    size_t shift; /* of the codes' address */
    double scale; /* about the largest weight; 0: 0.05 */
    int repack;
} km_spec;

typedef struct {
    km_spec spec;
    qc_weights host, device;
    qc_matmul_weights ready;
    void *bases[8];
    size_t base_count;
    void *host_arrays[8];
    size_t host_count;
} km_weight;

static inline const void *km_array(km_weight *w, const void *host, size_t bytes, size_t shift)
{
    w->host_arrays[w->host_count++] = (void *)(uintptr_t)host;
    return km_upload(host, bytes, shift, &w->bases[w->base_count++]);
}

static inline void km_weight_make(km_weight *w, const qc_matmul *h, const km_spec *spec,
                                  qt_rng *rng)
{
    memset(w, 0, sizeof *w);
    w->spec = *spec;
    uint64_t elems = spec->n * spec->k;
    uint64_t code_bytes = spec->kind == QC_WEIGHTS_NF4 ? (elems + 1) / 2 : elems;
    uint64_t scales =
        spec->kind == QC_WEIGHTS_INT8_ROWS ? spec->n : (elems + spec->block - 1) / spec->block;
    double scale = spec->scale != 0.0 ? spec->scale : 0.05;
    uint8_t *codes = km_host(code_bytes);
    for (uint64_t i = 0; i < code_bytes; i++)
        codes[i] = (uint8_t)qt_next(rng);
    if (spec->kind != QC_WEIGHTS_NF4) /* -128 is not made by the quantizers */
        for (uint64_t i = 0; i < code_bytes; i++)
            codes[i] = codes[i] == 0x80 ? 0x81 : codes[i];
    w->host.kind = w->device.kind = spec->kind;
    w->host.rows = w->device.rows = spec->n;
    w->host.cols = w->device.cols = spec->k;
    w->host.block_elems = w->device.block_elems =
        spec->kind == QC_WEIGHTS_INT8_ROWS ? 0 : spec->block;
    w->host.codes = codes;
    w->device.codes = km_array(w, codes, code_bytes, spec->shift);
    if (!spec->nested) {
        float *absmax = km_host(scales * sizeof *absmax);
        for (uint64_t i = 0; i < scales; i++)
            absmax[i] = (float)(scale * (0.3 + 0.7 * qt_uniform(rng)));
        w->host.absmax = absmax;
        w->device.absmax = km_array(w, absmax, scales * sizeof *absmax, 0);
    } else {
        uint64_t blocks = (scales + 255) / 256;
        uint8_t *absmax_codes = km_host(scales);
        float *nested = km_host(blocks * sizeof *nested);
        float *map = km_host(256 * sizeof *map);
        for (uint64_t i = 0; i < scales; i++)
            absmax_codes[i] = (uint8_t)qt_next(rng);
        for (uint64_t i = 0; i < blocks; i++)
            nested[i] = (float)(scale * 0.4 * (0.5 + 0.5 * qt_uniform(rng)));
        memcpy(map, qc_dynamic_map, 256 * sizeof *map);
        w->host.absmax_codes = absmax_codes;
        w->host.nested_absmax = nested;
        w->host.nested_map = map;
        w->host.nested_offset = w->device.nested_offset = (float)(scale * 0.55);
        w->host.nested_block = w->device.nested_block = 256;
        w->device.absmax_codes = km_array(w, absmax_codes, scales, 0);
        w->device.nested_absmax = km_array(w, nested, blocks * sizeof *nested, 0);
        w->device.nested_map = km_array(w, map, 256 * sizeof *map, 0);
    }
    if (spec->custom_map) {
        float *map = km_host(16 * sizeof *map);
        for (int i = 0; i < 16; i++)
            map[i] = (float)(2.0 * qt_uniform(rng) - 1.0);
        w->host.code_map = map;
        w->device.code_map = km_array(w, map, 16 * sizeof *map, 0);
    }
    void *memory = NULL;
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_malloc(&memory, qc_matmul_prepared_bytes(&w->device, spec->repack), &km_error));
    w->bases[w->base_count++] = memory;
    KM_OK(qc_matmul_prepare(h, &w->device, spec->repack, memory, &w->ready, s, &km_error));
    KM_OK(qc_cuda_stream_synchronize(s, &km_error));
    qc_cuda_stream_destroy(s);
}

static inline void km_weight_free(km_weight *w)
{
    for (size_t i = 0; i < w->base_count; i++)
        qc_cuda_free(w->bases[i]);
    for (size_t i = 0; i < w->host_count; i++)
        free(w->host_arrays[i]);
}

/* The float that quant_weights.h defines, written down once more. */
static inline float km_value(const qc_weights *w, uint64_t row, uint64_t col)
{
    uint64_t f = row * w->cols + col;
    uint64_t b = w->kind == QC_WEIGHTS_INT8_ROWS ? row : f / w->block_elems;
    float absmax;
    if (w->absmax) {
        absmax = w->absmax[b];
    } else {
        float product = w->nested_map[w->absmax_codes[b]] * w->nested_absmax[b / w->nested_block];
        absmax = product + w->nested_offset;
    }
    if (w->kind == QC_WEIGHTS_NF4) {
        uint8_t byte = ((const uint8_t *)w->codes)[f / 2];
        unsigned code = f % 2 ? byte & 15u : byte >> 4;
        return (w->code_map ? w->code_map[code] : qc_nf4_code[code]) * absmax;
    }
    float code = (float)((const int8_t *)w->codes)[f];
    if (w->kind == QC_WEIGHTS_INT8_ROWS)
        return code * absmax * QC_INT8_STEP;
    return code * QC_INT8_STEP * absmax;
}

/* ---- 16-bit arrays --------------------------------------------------------------------------- */

static inline float km_float(uint16_t bits, qc_dtype t)
{
    return t == QC_DTYPE_F16 ? qc_f32_from_f16(bits) : qc_f32_from_bf16(bits);
}

static inline uint16_t km_bits(float v, qc_dtype t)
{
    return t == QC_DTYPE_F16 ? qc_f16_from_f32(v) : qc_bf16_from_f32(v);
}

/* ---- a product ------------------------------------------------------------------------------- */

typedef struct {
    uint64_t m, ldx, ldy; /* strides 0: dense */
    qc_dtype x_dtype, y_dtype;
    int bias;
    size_t x_shift, y_shift; /* elements behind an aligned address */
    qc_matmul_path path;
    uint64_t limit_bytes;
} km_job;

/* x [m][ldx], bias, y [m][ldy] on the host, as 16-bit patterns. */
typedef struct {
    km_job job;
    uint64_t n, k;
    uint16_t *x, *bias, *y;
} km_data;

#define KM_GAP 0x7bcdu /* what y holds where nothing may be written */

static inline void km_data_make(km_data *d, const km_weight *w, const km_job *job, qt_rng *rng)
{
    d->job = *job;
    d->n = w->spec.n;
    d->k = w->spec.k;
    if (!d->job.ldx)
        d->job.ldx = d->k;
    if (!d->job.ldy)
        d->job.ldy = d->n;
    d->x = km_host(d->job.m * d->job.ldx * 2);
    d->y = km_host(d->job.m * d->job.ldy * 2);
    d->bias = km_host(d->n * 2);
    for (uint64_t i = 0; i < d->job.m * d->job.ldx; i++) {
        /* NaN between the rows: nobody may read there */
        int gap = i % d->job.ldx >= d->k;
        double v = (qt_uniform(rng) + qt_uniform(rng) + qt_uniform(rng) - 1.5) * 2.0;
        d->x[i] = gap ? 0x7fffu : km_bits((float)v, d->job.x_dtype);
    }
    for (uint64_t i = 0; i < d->n; i++)
        d->bias[i] = km_bits((float)(qt_uniform(rng) - 0.5), d->job.y_dtype);
}

static inline void km_data_free(km_data *d)
{
    free(d->x);
    free(d->y);
    free(d->bias);
}

/* y of the device to d->y; gaps of y and what lies behind the workspace are looked after. */
static inline void km_run(const qc_matmul *h, const km_weight *w, km_data *d)
{
    const km_job *j = &d->job;
    void *base_x = NULL, *base_y = NULL, *base_b = NULL, *workspace = NULL;
    uint64_t y_elems = j->m * j->ldy;
    for (uint64_t i = 0; i < y_elems; i++)
        d->y[i] = KM_GAP;
    qc_matmul_io io = {
        .m = j->m, .x_dtype = j->x_dtype, .ldx = j->ldx, .y_dtype = j->y_dtype, .ldy = j->ldy};
    /* The last row ends where x ends. */
    io.x = km_upload(d->x, (j->m && d->k ? (j->m - 1) * j->ldx + d->k : 0) * 2, j->x_shift * 2,
                     &base_x);
    io.y = km_upload(d->y, y_elems * 2, j->y_shift * 2, &base_y);
    io.bias = j->bias ? km_upload(d->bias, d->n * 2, j->y_shift * 2, &base_b) : NULL;
    uint64_t bytes = qc_matmul_workspace_bytes(h, &w->ready, j->m, j->path, j->limit_bytes);
    assert_true(bytes != UINT64_MAX);
    KM_OK(qc_cuda_malloc(&workspace, bytes, &km_error));
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_fill(workspace, 0xff, bytes, s, &km_error));
    KM_OK(qc_matmul_workspace_init(workspace, bytes, s, &km_error));
    KM_OK(qc_matmul_run(h, &w->ready, &io, j->path, workspace, bytes, s, &km_error));
    km_download(d->y, io.y, y_elems * 2, s);
    qc_cuda_stream_destroy(s);
    qc_cuda_free(workspace);
    qc_cuda_free(base_x);
    qc_cuda_free(base_y);
    qc_cuda_free(base_b);
    for (uint64_t i = 0; i < y_elems; i++)
        if (i % j->ldy >= d->n)
            QT_CHECK(d->y[i] == KM_GAP, "y was written to behind row %" PRIu64, i / j->ldy);
}

/* ---- the truth ------------------------------------------------------------------------------- */

/* How weights and sums are rounded on the way, relative: 0 where they are floats. */
typedef struct {
    double weight;   /* of every weight: 2^-11 where they are float16 */
    double absolute; /* and of what is below its normals */
} km_rounding;

/* Every element of d->y against double sums of exact products: within the rounding to y's dtype, of
 * the weights, and of float sums in any order; and normwise within 1e-3 (F16) or 2^-8 (BF16). */
static inline void km_check(const km_weight *w, const km_data *d, km_rounding r)
{
    const km_job *j = &d->job;
    double unit = j->y_dtype == QC_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
    double tiny = j->y_dtype == QC_DTYPE_F16 ? 0x1p-25 : 0x1p-134;
    double sum_error = 0.0, sum_square = 0.0;
    float *row = km_host(d->k * sizeof *row);
    for (uint64_t n = 0; n < d->n; n++) {
        for (uint64_t k = 0; k < d->k; k++)
            row[k] = km_value(&w->host, n, k);
        for (uint64_t m = 0; m < j->m; m++) {
            double sum = 0.0, size = 0.0, spread = 0.0;
            for (uint64_t k = 0; k < d->k; k++) {
                double x = (double)km_float(d->x[m * j->ldx + k], j->x_dtype);
                sum += (double)row[k] * x;
                size += fabs((double)row[k] * x);
                spread += (r.weight * fabs((double)row[k]) + r.absolute) * fabs(x);
            }
            if (j->bias)
                sum += (double)km_float(d->bias[n], j->y_dtype);
            double got = (double)km_float(d->y[m * j->ldy + n], j->y_dtype);
            double bound = unit * fabs(sum) + tiny + spread * 1.01 + 0x1p-20 * (size + fabs(sum));
            QT_CHECK(fabs(got - sum) <= bound,
                     "y[%" PRIu64 "][%" PRIu64 "] is %.9g, %.9g +- %.3g was expected", m, n, got,
                     sum, bound);
            sum_error += (got - sum) * (got - sum);
            sum_square += sum * sum;
        }
    }
    double norm = sqrt(sum_error) / (sum_square > 0.0 ? sqrt(sum_square) : 1.0);
    QT_CHECK(norm <= (j->y_dtype == QC_DTYPE_F16 ? 1e-3 : 0x1p-8),
             "relative error of the whole is %.3g", norm);
    free(row);
}

static inline qc_matmul *km_handle(void)
{
    qc_matmul *h = NULL;
    KM_OK(qc_matmul_create(&h, 0, &km_error));
    assert_non_null(h);
    return h;
}

static inline void km_expect(qc_status got, qc_status want, const qc_error *err, const char *words)
{
    assert_int_equal(got, want);
    QT_CHECK(strstr(err->msg, words), "'%s' does not say '%s'", err->msg, words);
}

static inline void km_expect_run(const qc_matmul *h, const qc_matmul_weights *w,
                                 const qc_matmul_io *io, int path, void *workspace, uint64_t bytes,
                                 const char *words)
{
    qc_error err = {0};
    km_expect(qc_matmul_run(h, w, io, (qc_matmul_path)path, workspace, bytes, NULL, &err),
              QC_ERR_USAGE, &err, words);
}

#endif
