/* Second moments: products of a strip of columns, in float, for some tokens at a time; a kernel
 * adds them to the sums in double. A strip is as wide as scratch has room for. */
#include "kernels/cuda_feedback_internal.h"

#include "base/checked.h"

#include <inttypes.h>

static uint64_t strip_of(uint64_t n)
{
    return n < QC_CUDA_MOMENT_STRIP ? n : QC_CUDA_MOMENT_STRIP;
}

uint64_t qc_cuda_moments_scratch_bytes(uint64_t n)
{
    return qc_sat_mul(qc_sat_mul(n, strip_of(n)), sizeof(float));
}

/* Adds x^T z to sums [n, n] for columns [col, col + cols), from row `row` on; z is x unless
 * `cross`. */
static qc_status add_strip(const qc_cuda_feedback_tools *t, const qc_cuda_moments *a, int cross,
                           uint64_t row, uint64_t col, uint64_t cols, qc_error *err)
{
    const qc_cublas_product_args p = {.a = a->x + row,
                                      .b = (cross ? a->z : a->x) + col,
                                      .y = a->scratch,
                                      .dtype = QC_DTYPE_F32,
                                      .trans_a = 1,
                                      .m = a->n - row,
                                      .n = cols,
                                      .k = a->tokens,
                                      .lda = a->ldx,
                                      .ldb = cross ? a->ldz : a->ldx,
                                      .ldy = cols,
                                      .alpha = 1.0,
                                      .beta = 0.0};
    QC_TRY(qc_cublas_product(t->blas, &p, err));
    return qc_cuda_add_part((cross ? a->c : a->h) + row * a->n + col, a->n, a->scratch, a->n - row,
                            cols, t->stream, err);
}

static qc_status add_all(const qc_cuda_feedback_tools *t, const qc_cuda_moments *all,
                         uint64_t strip, qc_error *err)
{
    qc_cuda_moments a = *all;
    for (uint64_t left = all->tokens; left > 0; left -= a.tokens) {
        a.tokens = left < QC_CUDA_MOMENT_TOKENS ? left : QC_CUDA_MOMENT_TOKENS;
        a.x = all->x + (all->tokens - left) * a.ldx;
        a.z = a.c ? all->z + (all->tokens - left) * a.ldz : NULL;
        for (uint64_t col = 0; col < a.n; col += strip) {
            const uint64_t cols = a.n - col < strip ? a.n - col : strip;
            QC_TRY(add_strip(t, &a, 0, col, col, cols, err));
            if (a.c)
                QC_TRY(add_strip(t, &a, 1, 0, col, cols, err));
        }
    }
    return QC_OK;
}

qc_status qc_cuda_moments_add_strips(const qc_cuda_feedback_tools *t, const qc_cuda_moments *a,
                                     uint64_t strip, qc_error *err)
{
    if (a->n == 0 || a->tokens == 0)
        return QC_OK;
    if (a->n > INT32_MAX || a->ldx > INT32_MAX || (a->c && a->ldz > INT32_MAX))
        QC_FAIL(err, QC_ERR_SHAPE,
                "second moments: expected at most %d inputs, in rows at most as far apart, found "
                "%" PRIu64 " in rows %" PRIu64 " apart",
                INT32_MAX, a->n, a->ldx > a->ldz ? a->ldx : a->ldz);
    QC_TRY(qc_cublas_begin(t->blas, NULL, 0, t->stream, err));
    qc_status st = add_all(t, a, strip, err);
    qc_cublas_end(t->blas);
    return st;
}

qc_status qc_cuda_moments_add(const qc_cuda_feedback_tools *t, const qc_cuda_moments *a,
                              qc_error *err)
{
    return qc_cuda_moments_add_strips(t, a, strip_of(a->n), err);
}
