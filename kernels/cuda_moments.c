/* Second moments: products of a strip of columns, in float, for some tokens at a time; a kernel
 * adds them to the sums in double. A strip is as wide as scratch has room for. */
#include "kernels/cuda_moments.h"

#include "base/checked.h"
#include "kernels/cuda_feedback_internal.h"

#include <inttypes.h>

static uint64_t strip_of(uint64_t n)
{
    return n < QC_CUDA_MOMENT_STRIP ? n : QC_CUDA_MOMENT_STRIP;
}

uint64_t qc_cuda_moments_scratch_bytes(uint64_t n)
{
    return qc_sat_mul(qc_sat_mul(n, strip_of(n)), sizeof(float));
}

/* sums [n, n] += x^T z for columns [col, col + cols), from row `row` on. */
static qc_status add_strip(const qc_cuda_feedback_tools *t, double *sums, uint64_t n, uint64_t row,
                           uint64_t col, uint64_t cols, const float *x, uint64_t ldx,
                           const float *z, uint64_t ldz, uint64_t tokens, float *scratch,
                           qc_error *err)
{
    const qc_cublas_product_args p = {.a = x + row,
                                      .b = z + col,
                                      .y = scratch,
                                      .dtype = QC_DTYPE_F32,
                                      .trans_a = 1,
                                      .m = n - row,
                                      .n = cols,
                                      .k = tokens,
                                      .lda = ldx,
                                      .ldb = ldz,
                                      .ldy = cols,
                                      .alpha = 1.0,
                                      .beta = 0.0};
    QC_TRY(qc_cublas_product(t->blas, &p, err));
    return qc_cuda_add_part(sums + row * n + col, n, scratch, n - row, cols, t->stream, err);
}

static qc_status add_all(const qc_cuda_feedback_tools *t, double *h, double *c, uint64_t n,
                         uint64_t strip, const float *x, uint64_t ldx, const float *z, uint64_t ldz,
                         uint64_t tokens, float *scratch, qc_error *err)
{
    for (uint64_t first = 0; first < tokens; first += QC_CUDA_MOMENT_TOKENS) {
        const uint64_t left = tokens - first;
        const uint64_t count = left < QC_CUDA_MOMENT_TOKENS ? left : QC_CUDA_MOMENT_TOKENS;
        const float *xs = x + first * ldx;
        for (uint64_t col = 0; col < n; col += strip) {
            const uint64_t cols = n - col < strip ? n - col : strip;
            QC_TRY(add_strip(t, h, n, col, col, cols, xs, ldx, xs, ldx, count, scratch, err));
            if (c)
                QC_TRY(add_strip(t, c, n, 0, col, cols, xs, ldx, z + first * ldz, ldz, count,
                                 scratch, err));
        }
    }
    return QC_OK;
}

qc_status qc_cuda_moments_add_strips(const qc_cuda_feedback_tools *t, double *h, double *c,
                                     uint64_t n, uint64_t strip, const float *x, uint64_t ldx,
                                     const float *z, uint64_t ldz, uint64_t tokens, float *scratch,
                                     qc_error *err)
{
    if (n == 0 || tokens == 0)
        return QC_OK;
    if (n > INT32_MAX || ldx > INT32_MAX || (c && ldz > INT32_MAX))
        QC_FAIL(err, QC_ERR_SHAPE, "second moments of %" PRIu64 " inputs: too many", n);
    QC_TRY(qc_cublas_begin(t->blas, NULL, 0, t->stream, err));
    qc_status st = add_all(t, h, c, n, strip, x, ldx, z, ldz, tokens, scratch, err);
    qc_cublas_end(t->blas);
    return st;
}

qc_status qc_cuda_moments_add(const qc_cuda_feedback_tools *t, double *h, double *c, uint64_t n,
                              const float *x, uint64_t ldx, const float *z, uint64_t ldz,
                              uint64_t tokens, float *scratch, qc_error *err)
{
    return qc_cuda_moments_add_strips(t, h, c, n, strip_of(n), x, ldx, z, ldz, tokens, scratch,
                                      err);
}
