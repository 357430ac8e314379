/* The CUDA driver (libcuda.so.1), opened at run time: memory of a GPU, taken and given back.
 * QCONV_LIBCUDA names another library (tests). One context at a time, one thread. */
#ifndef QC_CONVERT_CUDA_DRIVER_H
#define QC_CONVERT_CUDA_DRIVER_H

#include "base/status.h"

typedef struct qc_cuda_driver qc_cuda_driver;

/* Retains the primary context of visible GPU `index`. QC_ERR_DEVICE, with the driver's words, where
 * there is no driver or no such GPU. */
QC_NODISCARD qc_status qc_cuda_driver_open(qc_cuda_driver **out, int index, qc_error *err);
/* Frees what was allocated, releases the context. NULL is fine. */
void qc_cuda_driver_close(qc_cuda_driver *d);
const char *qc_cuda_driver_gpu(const qc_cuda_driver *d);
QC_NODISCARD qc_status qc_cuda_driver_memory(qc_cuda_driver *d, uint64_t *free_bytes,
                                             uint64_t *total_bytes, qc_error *err);
/* QC_ERR_NOMEM when the GPU has no more. Lives until close. */
QC_NODISCARD qc_status qc_cuda_driver_take(qc_cuda_driver *d, uint64_t bytes, qc_error *err);

#endif
