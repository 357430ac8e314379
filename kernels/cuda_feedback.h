/* Calibrated quantization on a GPU: quant/second_moments.h and quant/error_feedback.h, whose method
 * and names are meant here, by cuBLAS, cuSOLVER and kernels of our own.
 *
 * Products are cuBLAS's: of floats as floats (no TF32), the factor's and the target's of doubles.
 * So results are as good as the CPU's but not the same; they are the same from run to run with the
 * same GPU, cuBLAS and cuSOLVER. What needs no product (search of scales, codes of a panel) is
 * computed as quant/ does, operation by operation.
 *
 * Pointers are device memory where it says so. Calls wait for what they started where a result is
 * host memory; the rest is put on tools->stream. One thread at a time for tools and whatever was
 * opened with them; the device must be current (qc_cuda_use).
 *
 * Errors: QC_ERR_NOMEM when the device has no room, QC_ERR_INTERRUPTED, QC_ERR_INTERNAL from CUDA,
 * and what error_feedback.h names. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_H
#define QC_KERNELS_CUDA_FEEDBACK_H

#include "kernels/cublas_library.h"
#include "kernels/cusolver_library.h"
#include "quant/error_feedback.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    qc_cublas *blas;
    qc_cusolver *solver;
    qc_cuda_stream stream;
} qc_cuda_feedback_tools;

/* ---- second moments (cuda_moments.c, .cu) ---- */

/* h [n, n] doubles (what lies above the diagonal tiles is not touched, or not meant) += x^T x; c
 * [n, n] doubles += x^T z where c is not NULL; all on the device. x, z: floats [tokens, n], rows
 * ldx and ldz apart, on the device. scratch: device, qc_cuda_moments_scratch_bytes(n). Sums are in
 * float over at most QC_CUDA_MOMENT_TOKENS tokens, then in double. */
#define QC_CUDA_MOMENT_TOKENS 1024u
uint64_t qc_cuda_moments_scratch_bytes(uint64_t n);
QC_NODISCARD qc_status qc_cuda_moments_add(const qc_cuda_feedback_tools *t, double *h, double *c,
                                           uint64_t n, const float *x, uint64_t ldx, const float *z,
                                           uint64_t ldz, uint64_t tokens, float *scratch,
                                           qc_error *err);

/* ---- the factor (cuda_feedback_open.c, .cu) ---- */

typedef struct qc_cuda_feedback qc_cuda_feedback;

/* As qc_feedback_open: h (lower triangle) and c [n, n], on the device, are used and changed by this
 * call only; c may be NULL. Synchronizes. */
QC_NODISCARD qc_status qc_cuda_feedback_open(qc_cuda_feedback **out,
                                             const qc_cuda_feedback_tools *t, uint64_t n, double *h,
                                             double *c, const qc_feedback_options *options,
                                             qc_feedback_info *info, qc_error *err);
void qc_cuda_feedback_close(qc_cuda_feedback *f); /* NULL is fine */
/* Of device memory, at most, h and c left out; while it works, and what it keeps. Saturate. */
uint64_t qc_cuda_feedback_open_bytes(uint64_t n, int cross);
uint64_t qc_cuda_feedback_kept_bytes(uint64_t n, int cross);

/* ---- a weight (cuda_feedback_weight.c, .cu) ---- */

/* As qc_feedback_weight, w: [rows, n] of dtype F32, F16 or BF16 and out's arrays in host memory.
 * Rows are worked on in pieces, as many at once as a quarter of the device's memory takes (or what
 * is free, if that is less) and the form's groups permit: the order of sums in products depends on
 * it, so that results are the same wherever a quarter is free. Synchronizes. */
QC_NODISCARD qc_status qc_cuda_feedback_weight(const qc_cuda_feedback *f,
                                               const qc_feedback_form *form, const void *w,
                                               qc_dtype dtype, uint64_t rows, qc_feedback_out *out,
                                               qc_feedback_result *result, qc_error *err);
/* Device memory of the smallest piece, and of all rows at once. Saturate. */
uint64_t qc_cuda_feedback_weight_least_bytes(uint64_t rows, uint64_t n,
                                             const qc_feedback_form *form, int cross);
uint64_t qc_cuda_feedback_weight_bytes(uint64_t rows, uint64_t n, const qc_feedback_form *form,
                                       int cross);

#ifdef __cplusplus
}
#endif
#endif
