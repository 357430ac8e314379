/* For the tests of kernels that quantize, to the largest value or with searched scales: what both
 * are held to, and rows of int8 from source to verdict. */
#ifndef QC_TESTS_QUANTIZER_FIXTURE_H
#define QC_TESTS_QUANTIZER_FIXTURE_H

#include "quant_device_fixture.h"

#include "kernels/cuda_quantize.h"
#include "quant/quant_collect.h"

static const qc_dtype types[3] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};

static inline void qz_check_sums(const qc_piece_sums *got, const qc_piece_sums *want,
                                 const char *what)
{
    QT_CHECK(qc_f64_bits(got->sum_ee) == qc_f64_bits(want->sum_ee) &&
                 qc_f64_bits(got->sum_xx) == qc_f64_bits(want->sum_xx) &&
                 qc_f64_bits(got->max_err) == qc_f64_bits(want->max_err) &&
                 got->max_index == want->max_index,
             "%s: sums %a %a %a at %" PRIu64 ", not %a %a %a at %" PRIu64, what, got->sum_ee,
             got->sum_xx, got->max_err, got->max_index, want->sum_ee, want->sum_xx, want->max_err,
             want->max_index);
}

/* The same bad element, or none. Returns 1 where there is one: what is left then is anything. */
static inline int qz_check_bad(const uint64_t *bad, const qc_piece_sums *want, const char *what)
{
    uint64_t index = want->bad != QC_BAD_NONE ? want->bad_index : UINT64_MAX;
    QT_CHECK(*bad == index, "%s: bad %" PRIu64 ", not %" PRIu64, what, *bad, index);
    return want->bad != QC_BAD_NONE;
}

/* NaN and both infinities in turn. */
static inline double qz_bad_value(int i)
{
    return i % 3 == 0 ? nan("") : i % 3 == 1 ? -HUGE_VAL : HUGE_VAL;
}

/* ---- rows ---- */

/* Float16's range is what rows pass through. */
static inline void *qz_row_source(qt_rng *rng, qd_kind kind, qc_dtype dtype, uint64_t n)
{
    void *src = qd_source(rng, kind, dtype, n);
    for (uint64_t i = 0; i < n; i++) {
        double x = qt_get(src, dtype, i);
        if (fabs(x) > 65000.0)
            qt_put(src, dtype, i, x > 0 ? 60000.0 + (double)(i % 5000) : -64000.0);
    }
    return src;
}

/* Largest values that fall from row to row. */
static inline void *qz_falling_rows(qt_rng *rng, qc_dtype dtype, uint64_t rows, uint64_t cols)
{
    void *src = qz_row_source(rng, QD_NORMAL, dtype, rows * cols);
    for (uint64_t i = 0; i < rows; i++)
        qt_put(src, dtype, i * cols + i % cols, 60000.0 / (double)(i + 1));
    return src;
}

typedef struct {
    qc_dtype dtype;
    uint64_t rows, cols;
    const void *src;
    size_t src_offset, codes_offset; /* elements, bytes */
    int errors;                      /* sums are asked for */
} qz_rows;

/* Where things are on the device. */
typedef struct {
    const void *src;
    int8_t *codes;
    float *scb, *errors;
    uint64_t *bad;
} qz_rows_io;

typedef void (*qz_rows_truth)(const qz_rows *r, int8_t *codes, float *scb, qc_piece_sums *sums);
typedef qc_status (*qz_rows_kernel)(const qz_rows *r, const qz_rows_io *at);

static inline void qz_check_rows(const qz_rows *r, qz_rows_truth truth, qz_rows_kernel kernel)
{
    char what[160];
    snprintf(what, sizeof what, "rows %s %" PRIu64 " x %" PRIu64 " src+%zu codes+%zu errors %d",
             qc_dtype_name(r->dtype), r->rows, r->cols, r->src_offset, r->codes_offset, r->errors);
    uint64_t n = r->rows * r->cols;
    uint64_t runs = r->rows * ((r->cols + QC_CUDA_ROW_RUN - 1) / QC_CUDA_ROW_RUN);
    int8_t *codes = qt_alloc(n, 1);
    float *scb = qt_alloc(r->rows, sizeof *scb);
    qc_piece_sums sums, got;
    truth(r, codes, scb, &sums);

    size_t each = qt_size(r->dtype);
    qd_buffer d_src = qd_new_from(r->src, (size_t)n * each, r->src_offset * each);
    qd_buffer d_codes = qd_new((size_t)n, r->codes_offset), d_scb = qd_new((size_t)r->rows * 4, 4);
    qd_buffer d_errors = qd_new((size_t)runs * 16, 16), d_bad = qd_new(8, 8);
    const qz_rows_io at = {.src = d_src.p,
                           .codes = d_codes.p,
                           .scb = d_scb.p,
                           .errors = r->errors ? d_errors.p : NULL,
                           .bad = d_bad.p};
    QD_OK(kernel(r, &at));
    void *got_codes = qd_take(&d_codes, what), *got_scb = qd_take(&d_scb, what);
    float *lanes = qd_take(&d_errors, what);
    uint64_t *bad = qd_take(&d_bad, what);
    qd_drop(&d_src);
    if (!qz_check_bad(bad, &sums, what)) {
        qd_same(got_scb, scb, (size_t)r->rows * 4, what);
        qd_same(got_codes, codes, (size_t)n, what);
        if (r->errors) {
            qc_rows_collect(lanes, r->rows, r->cols, &got);
            qz_check_sums(&got, &sums, what);
        }
    }
    free(codes), free(scb), free(got_codes), free(got_scb), free(lanes), free(bad);
}

#endif
