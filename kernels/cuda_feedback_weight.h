/* qc_cuda_feedback_weight with a bound on memory, for tests. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_WEIGHT_H
#define QC_KERNELS_CUDA_FEEDBACK_WEIGHT_H

#include "kernels/cuda_feedback.h"

#ifdef __cplusplus
extern "C" {
#endif

/* limit: bytes of device memory. If it is too little, pieces are as small as the form permits. */
QC_NODISCARD qc_status qc_cuda_feedback_weight_within(const qc_cuda_feedback *f,
                                                      const qc_feedback_form *form, const void *w,
                                                      qc_dtype dtype, uint64_t rows, uint64_t limit,
                                                      qc_feedback_out *out,
                                                      qc_feedback_result *result, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
