/* The products of a piece of a weight with the factor; see cuda_feedback_weight.c. */
#include "kernels/cuda_feedback_job.h"

typedef qc_cuda_feedback_job job;
typedef qc_cuda_factor factor;

qc_status qc_cuda_piece_multiply(const job *j, qc_cuda_strip x, factor f, float *y, uint64_t ldy,
                                 double alpha, double beta, qc_error *err)
{
    const qc_cublas_product_args a = {.a = x.at,
                                      .b = f.b.at,
                                      .y = y,
                                      .dtype = QC_DTYPE_F32,
                                      .y_dtype = QC_DTYPE_F32,
                                      .trans_b = f.trans,
                                      .m = j->count,
                                      .n = f.cols,
                                      .k = f.k,
                                      .lda = x.ld,
                                      .ldb = f.b.ld,
                                      .ldy = ldy,
                                      .alpha = alpha,
                                      .beta = beta};
    return f.k == 0 || f.cols == 0 ? QC_OK : qc_cublas_product(j->f->tools.blas, &a, err);
}

qc_status qc_cuda_piece_times_h(const job *j, const float *x, uint64_t low, uint64_t high,
                                qc_cuda_stretch s, double left, float *y, qc_error *err)
{
    const uint64_t n = j->n, col = s.col, cols = s.cols, behind = col + cols;
    const float *hu = j->f->hu;
    QC_TRY(qc_cuda_rows_square(hu, n, col, cols, j->d.square, j->f->tools.stream, err));
    QC_TRY(qc_cuda_piece_multiply(j, (qc_cuda_strip){x + col, n},
                                  (factor){{j->d.square, cols}, 0, cols, cols}, y, QC_CUDA_SUPER,
                                  1.0, 0.0, err));
    QC_TRY(qc_cuda_piece_multiply(j, (qc_cuda_strip){x + low, n},
                                  (factor){{hu + low * n + col, n}, 0, col - low, cols}, y,
                                  QC_CUDA_SUPER, left, 1.0, err));
    return qc_cuda_piece_multiply(j, (qc_cuda_strip){x + behind, n},
                                  (factor){{hu + col * n + behind, n}, 1, high - behind, cols}, y,
                                  QC_CUDA_SUPER, 1.0, 1.0, err);
}

qc_status qc_cuda_piece_pass_on(const job *j, factor square, uint64_t behind, qc_error *err)
{
    return qc_cuda_piece_multiply(j, (qc_cuda_strip){j->d.less, QC_CUDA_PANEL}, square,
                                  j->d.g + behind, QC_CUDA_SUPER, 1.0, 1.0, err);
}
