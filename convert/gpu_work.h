/* What the program does on GPUs, behind one table, so that it is built the same with and without
 * CUDA: gpu_*.c (plain C over kernels/) fill the table, no_gpu.c, linked instead of them in a build
 * without kernels, has none. Nothing else of convert/ calls kernels/.
 *
 * qconv links gpu_*.c with the CUDA kernels, or no_gpu.c; the tests also link gpu_*.c with the
 * kernels on the CPU shim (qconv_shim). */
#ifndef QC_CONVERT_GPU_WORK_H
#define QC_CONVERT_GPU_WORK_H

#include "base/status.h"

typedef struct {
    /* Number of devices, or 0 and a sentence why. See kernels/cuda_device.h. */
    void (*device_count)(int *count, char *why, size_t why_bytes);
} qc_gpu_work;

/* NULL in a build without CUDA kernels. */
const qc_gpu_work *qc_gpu_work_get(void);
/* "CUDA 13.0: sm_75 sm_80 ..."; "none" in a build without. For --version and hardware. */
const char *qc_gpu_build(void);

#endif
