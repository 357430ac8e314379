/* Inside kernels/ only: CUDA's results as statuses. This is plain C, so that .c and .cu files share
 * one set. */
#ifndef QC_KERNELS_CUDA_CHECK_H
#define QC_KERNELS_CUDA_CHECK_H

#include "base/status.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Turns CUDA's result of `what` ("nf4_quantize") into a status; see cuda_device.h. An error that
 * does not stick is removed from CUDA's record of the last one, so that the next launch is not
 * blamed. */
QC_NODISCARD qc_status qc_cuda_check(cudaError_t code, const char *what, qc_error *err);
/* QC_OK, or the error of the last launch in this thread. */
QC_NODISCARD qc_status qc_cuda_launched(const char *what, qc_error *err);
/* qc_cuda_device.code of the current device (matmul_reduce.cu). */
QC_NODISCARD qc_status qc_cuda_compiled_for(uint32_t *code, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
