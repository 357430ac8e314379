/* The CUDA driver (libcuda.so.1), opened at run time to take memory of a GPU and give it back.
 * QCONV_LIBCUDA names another library (for tests). There is one context at a time, for one
 * thread. */
#ifndef QC_CONVERT_CUDA_DRIVER_H
#define QC_CONVERT_CUDA_DRIVER_H

#include "base/status.h"

typedef struct qc_cuda_driver qc_cuda_driver;

/* Retains the primary context of visible GPU `index`. QC_ERR_DEVICE, with the driver's words, if
 * there is no driver or no such GPU. */
QC_NODISCARD qc_status qc_cuda_driver_open(qc_cuda_driver **out, int index, qc_error *err);
/* Frees what was allocated and releases the context. Accepts NULL. */
void qc_cuda_driver_close(qc_cuda_driver *d);
const char *qc_cuda_driver_gpu(const qc_cuda_driver *d);
QC_NODISCARD qc_status qc_cuda_driver_memory(qc_cuda_driver *d, uint64_t *free_bytes,
                                             uint64_t *total_bytes, qc_error *err);
/* Allocates memory that lives until close. QC_ERR_NOMEM when the GPU has no more. */
QC_NODISCARD qc_status qc_cuda_driver_take(qc_cuda_driver *d, uint64_t bytes, qc_error *err);

#endif
