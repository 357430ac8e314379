/* Shared by cuda_feedback_*; not for callers. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_INTERNAL_H
#define QC_KERNELS_CUDA_FEEDBACK_INTERNAL_H

#include "kernels/cuda_feedback.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The same as struct qc_feedback (quant/error_feedback_internal.h), on the device. */
struct qc_cuda_feedback {
    qc_cuda_feedback_tools tools;
    uint64_t n;
    qc_feedback_options options;
    uint32_t *order; /* device, [n] the column at each place of the feedback: by falling H_kk */
    /* device, [n, n]: H_kj times a power of two where j >= k (columns in their own order), U_jk
     * where j < k (by places). */
    float *hu;
    float *d;       /* device, [n] D, times the same power of two; by columns */
    float *inverse; /* device, [n] 1 / H_kk as in hu; 0 for a dead column */
    float *m;       /* device, [n, n], T = W m^T; NULL without C */
};

/* ---- cuda_moments.c ---- */

/* How many columns a strip of products has; a test takes fewer. */
#define QC_CUDA_MOMENT_STRIP 2048u
QC_NODISCARD qc_status qc_cuda_moments_add_strips(const qc_cuda_feedback_tools *t, double *h,
                                                  double *c, uint64_t n, uint64_t strip,
                                                  const float *x, uint64_t ldx, const float *z,
                                                  uint64_t ldz, uint64_t tokens, float *scratch,
                                                  qc_error *err);

/* ---- cuda_feedback_search.cu ---- */

/* Step 2 for the blocks of x [rows, n] floats on the device, whose first element begins a block
 * (and, nested, a group). weights: [n] on the device, or NULL for 1 everywhere. absmax [blocks]
 * (rows for INT8_ROWS), device: the scales before double quantization, equal to the bit to those
 * that quant/error_feedback_search.c finds. Runs on the stream. */
QC_NODISCARD qc_status qc_cuda_feedback_find(const qc_cuda_feedback *f,
                                             const qc_feedback_form *form, const float *x,
                                             const float *weights, uint64_t rows, float *absmax,
                                             qc_error *err);
/* Double quantizes the scales of the same blocks. In: absmax as found, and codes as nested_quantize
 * (host) made them of nested_absmax [groups] and offset; map is qc_dynamic_map; all on the device.
 * Out: codes of least error, and in absmax what a reader makes of them. Equal to the bit, as above.
 * Runs on the stream. */
QC_NODISCARD qc_status qc_cuda_feedback_nest(const qc_cuda_feedback *f,
                                             const qc_feedback_form *form, const float *x,
                                             const float *weights, uint64_t rows, float *absmax,
                                             uint8_t *codes, const float *nested_absmax,
                                             const float *map, float offset, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
