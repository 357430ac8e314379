/* Reading and copying device memory as fast as it gives, so that times have a roof: what
 * cudaMemcpyAsync does is not the most, on an H200 kernels of ours move more. All pointers are
 * device memory, aligned to 16 bytes; bytes is a multiple of 16. Work is put on the stream and not
 * waited for; nothing is allocated. Thread-safe: yes. Errors: QC_ERR_USAGE for an argument,
 * QC_ERR_INTERNAL from CUDA. */
#ifndef QC_KERNELS_CUDA_MEMORY_RATE_H
#define QC_KERNELS_CUDA_MEMORY_RATE_H

#include "kernels/cuda_device.h"

QC_C_BEGIN

/* How many sums a read makes per multiprocessor: one of each thread. */
#define QC_CUDA_READ_SUMS 1024u

/* Reads everything once. sums: [QC_CUDA_READ_SUMS * device->multiprocessors], the exclusive or of
 * the 32-bit words that each thread has read. */
QC_NODISCARD qc_status qc_cuda_rate_read(const qc_cuda_device *device, const void *from,
                                         uint64_t bytes, uint32_t *sums, qc_cuda_stream s,
                                         qc_error *err);
QC_NODISCARD qc_status qc_cuda_rate_copy(const qc_cuda_device *device, void *to, const void *from,
                                         uint64_t bytes, qc_cuda_stream s, qc_error *err);

QC_C_END
#endif
