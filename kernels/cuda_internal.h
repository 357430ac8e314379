/* Inside kernels/ only, in plain C, so that .c and .cu files share it: CUDA's results as statuses,
 * which GPUs the kernels of a build run on, and shared memory. */
#ifndef QC_KERNELS_CUDA_INTERNAL_H
#define QC_KERNELS_CUDA_INTERNAL_H

#include "kernels/cuda_device.h"

#include <cuda_runtime_api.h>

QC_C_BEGIN

/* Turns CUDA's result of `what` ("nf4_quantize") into a status; see cuda_device.h. An error that
 * does not stick is removed from CUDA's record of the last one, so that the next launch is not
 * blamed. */
QC_NODISCARD qc_status qc_cuda_check(cudaError_t code, const char *what, qc_error *err);
/* Returns QC_OK, or the error of the last launch in this thread. */
QC_NODISCARD qc_status qc_cuda_launched(const char *what, qc_error *err);
/* Gives qc_cuda_device.code of the current device (matmul_reduce.cu). */
QC_NODISCARD qc_status qc_cuda_compiled_for(uint32_t *code, qc_error *err);

/* Returns 1 if the code runs on GPUs of compute capability sm (times ten), else 0; also 0 if the
 * code has an unknown word. code says what was built, as "70-real 80-real 90 90-virtual" (words of
 * CMAKE_CUDA_ARCHITECTURES; one without an ending is both).
 * Machine code (-real) runs on its own generation from its number on: 80 on 80, 86 and 89, not on
 * 75, 90 or 79. PTX (-virtual) runs on its number and everything newer. Endings 'a' and 'f' (90a)
 * are for exactly that chip, in both forms. */
int qc_cuda_code_runs(const char *code, unsigned sm);

/* How much of a multiprocessor's L1 becomes shared memory while a kernel runs. The driver's own
 * choice may leave room for a single thread block where a kernel wants two, and only the clock
 * would show it. */

/* The percentage of a multiprocessor's largest shared memory (all_bytes) at which `blocks` thread
 * blocks are resident, or as many as it has room for. 0 means that this is one, for which the
 * driver makes room anyway. A block takes block_bytes and reserved_bytes, which the driver keeps
 * for itself (1 KB from sm_80 on). CUDA rounds up to the next size that the device has. */
unsigned qc_cuda_carve_percent(uint64_t block_bytes, uint64_t reserved_bytes, unsigned blocks,
                               uint64_t all_bytes);

/* Asks for it on the current device, for launches of this kernel with so much dynamic shared memory
 * from now on. `what` is the kernel's name, for messages. This is cheap if it was asked for
 * lately. */
QC_NODISCARD qc_status qc_cuda_carve_out(const void *kernel, size_t block_bytes, unsigned blocks,
                                         const char *what, qc_error *err);

QC_C_END
#endif
