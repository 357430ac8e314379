/* Calibrated quantization on a GPU, with cuBLAS, cuSOLVER and kernels of our own. The method and
 * the names are those of quant/error_feedback.h.
 *
 * cuBLAS does the products: those of floats in float (no TF32), those of the factor and the target
 * in double. So results are as good as the CPU's but not the same; they are the same from run to
 * run with the same GPU, cuBLAS and cuSOLVER. What needs no product (the search of scales, the
 * codes of a panel) is computed as quant/ does, operation by operation.
 *
 * Pointers are device memory where it says so. A call that returns a result in host memory waits
 * for it; all other work is put on tools->stream. Only one thread at a time may use tools and
 * whatever was opened with them; the device must be current (qc_cuda_use).
 *
 * Errors: QC_ERR_NOMEM when the device has no room, QC_ERR_INTERRUPTED, QC_ERR_INTERNAL from CUDA,
 * and those that error_feedback.h names. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_H
#define QC_KERNELS_CUDA_FEEDBACK_H

#include "kernels/cuda_library.h"
#include "quant/error_feedback.h"

QC_C_BEGIN

typedef struct {
    qc_cublas *blas;
    qc_cusolver *solver;
    qc_cuda_stream stream;
} qc_cuda_feedback_tools;

/* ---- the factor (cuda_feedback_open.c, cuda_moments.cu) ---- */

typedef struct qc_cuda_feedback qc_cuda_feedback;

/* Does what qc_feedback_open does. h (lower triangle) and c [n, n] are on the device; only this
 * call uses and changes them, and c may be NULL. Synchronizes. */
QC_NODISCARD qc_status qc_cuda_feedback_open(qc_cuda_feedback **out,
                                             const qc_cuda_feedback_tools *t, uint64_t n, double *h,
                                             double *c, const qc_feedback_options *options,
                                             qc_feedback_info *info, qc_error *err);
void qc_cuda_feedback_close(qc_cuda_feedback *f); /* f may be NULL */
/* Return the most device memory, without h and c: while it works, and what it keeps. They
 * saturate. */
uint64_t qc_cuda_feedback_open_bytes(uint64_t n, int cross);
uint64_t qc_cuda_feedback_kept_bytes(uint64_t n, int cross);

/* ---- a weight (cuda_feedback_weight.c, .cu) ---- */

/* Does what qc_feedback_weight does, with w [rows, n] of dtype F32, F16 or BF16, form->cols = n,
 * and g and out's arrays in host memory. Rows are worked on in pieces: as many at once as fit a
 * quarter of the device's memory (or what is free, if that is less), and as the form's groups and
 * the blocks of g permit, since a block is never cut. The order of sums in products depends on
 * that, so results are the same wherever a quarter is free. Synchronizes.
 *
 * With g, rows of a block are coupled, and codes are chosen one after another as on the CPU; one
 * multiprocessor does that for a block (cuda_feedback_outputs.cu). */
QC_NODISCARD qc_status qc_cuda_feedback_weight(const qc_cuda_feedback *f, const qc_form *form,
                                               const void *w, qc_dtype dtype, uint64_t rows,
                                               const qc_feedback_outputs *g, qc_feedback_out *out,
                                               qc_feedback_result *result, qc_error *err);
/* Return the device memory of the smallest piece, and of all rows at once. They saturate. block:
 * that of qc_feedback_outputs; 0 without. */
uint64_t qc_cuda_feedback_weight_least_bytes(uint64_t rows, uint64_t n, const qc_form *form,
                                             uint64_t block);
uint64_t qc_cuda_feedback_weight_bytes(uint64_t rows, uint64_t n, const qc_form *form,
                                       uint64_t block);

QC_C_END
#endif
