/* The products of a piece of a weight with the factor; see cuda_feedback_weight.c. */
#include "kernels/cuda_feedback_job.h"

typedef qc_cuda_feedback_job job;
typedef qc_cuda_factor factor;

qc_status qc_cuda_feedback_multiply(const job *j, const qc_cuda_feedback_product *p, qc_error *err)
{
    const qc_cublas_product_args a = {.a = p->x.at,
                                      .b = p->f.b.at,
                                      .y = p->y,
                                      .dtype = QC_DTYPE_F32,
                                      .trans_b = p->f.trans,
                                      .m = p->rows,
                                      .n = p->f.cols,
                                      .k = p->f.k,
                                      .lda = p->x.ld,
                                      .ldb = p->f.b.ld,
                                      .ldy = p->ldy,
                                      .alpha = p->alpha,
                                      .beta = p->beta};
    return p->f.k == 0 || p->f.cols == 0 ? QC_OK : qc_cublas_product(j->f->tools.blas, &a, err);
}

qc_status qc_cuda_piece_multiply(const job *j, qc_cuda_strip x, factor f, float *y, uint64_t ldy,
                                 double alpha, double beta, qc_error *err)
{
    const qc_cuda_feedback_product p = {j->count, x, f, y, ldy, alpha, beta};
    return qc_cuda_feedback_multiply(j, &p, err);
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
