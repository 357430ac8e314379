/* Inside kernels/ only: how much of a multiprocessor's L1 becomes shared memory while a kernel
 * runs. The driver's own choice may leave room for a single thread block where a kernel wants two,
 * and only the clock would show it. */
#ifndef QC_KERNELS_CUDA_CARVE_H
#define QC_KERNELS_CUDA_CARVE_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The percentage of a multiprocessor's largest shared memory (all_bytes) at which `blocks` thread
 * blocks are resident, or as many as it has room for. 0 means that this is one, for which the
 * driver makes room anyway. A block takes block_bytes and reserved_bytes, which the driver keeps
 * for itself (1 KB from sm_80 on). CUDA rounds up to the next size that the device has. */
unsigned qc_cuda_carve_percent(uint64_t block_bytes, uint64_t reserved_bytes, unsigned blocks,
                               uint64_t all_bytes);

/* Asks for it on the current device, for launches of this kernel with so much dynamic shared memory
 * from now on. what: the kernel's name, for messages. Cheap if it was asked for lately. */
QC_NODISCARD qc_status qc_cuda_carve_out(const void *kernel, size_t block_bytes, unsigned blocks,
                                         const char *what, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
