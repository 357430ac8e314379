/* The kernels of cuda_feedback.h's second moments and factor. They take plain arrays on the device,
 * run on a stream and are not waited for. Not for callers of cuda_feedback.h. Matrices are [n, n],
 * row-major. */
#ifndef QC_KERNELS_CUDA_MOMENTS_H
#define QC_KERNELS_CUDA_MOMENTS_H

#include "kernels/cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* sums [rows, cols], rows ld apart, += part [rows, cols] */
QC_NODISCARD qc_status qc_cuda_add_part(double *sums, uint64_t ld, const float *part, uint64_t rows,
                                        uint64_t cols, qc_cuda_stream s, qc_error *err);

/* odd[row] is 1 if anything in row `row` is not finite, else 0. lower: of h, only the row up to the
 * diagonal counts. */
QC_NODISCARD qc_status qc_cuda_find_odd(const double *h, uint64_t n, int lower, uint32_t *odd,
                                        qc_cuda_stream s, qc_error *err);
QC_NODISCARD qc_status qc_cuda_diagonal(const double *h, uint64_t n, double *out, qc_cuda_stream s,
                                        qc_error *err);

/* What the matrices below are made of. `back` is the order from its end, which the factor uses. */
typedef struct {
    uint64_t n;
    const uint32_t *order; /* [n] column at each place */
    const double *damped;  /* [n] H's damped diagonal; for a dead column a stand-in */
    const double *added;   /* [n] what is added to the diagonal of C; for a dead column a
                              stand-in */
    const uint8_t *dead;   /* [n] */
    double scale;          /* of H in hu */
} qc_cuda_factor_input;

/* a's upper triangle = H's rows and columns by back; of dead columns only the diagonal. */
QC_NODISCARD qc_status qc_cuda_gather_factor(const qc_cuda_factor_input *in, const double *h,
                                             double *a, qc_cuda_stream s, qc_error *err);
/* Makes hu, d and inverse (cuda_feedback_internal.h) from H and a, which qc_cusolver_factor
 * changed. */
QC_NODISCARD qc_status qc_cuda_fill_feedback(const qc_cuda_factor_input *in, const double *h,
                                             const double *a, float *hu, float *d, float *inverse,
                                             qc_cuda_stream s, qc_error *err);
/* Row r of x = column r of C + added, with its elements by back. */
QC_NODISCARD qc_status qc_cuda_gather_target(const qc_cuda_factor_input *in, const double *c,
                                             double *x, qc_cuda_stream s, qc_error *err);
/* m = x's transpose, rows in their own order. */
QC_NODISCARD qc_status qc_cuda_narrow_target(const qc_cuda_factor_input *in, const double *x,
                                             float *m, qc_cuda_stream s, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
