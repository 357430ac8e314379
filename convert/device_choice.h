/* Which GPUs quantize: what --device (or QCONV_DEVICE) wishes for, against what this build and this
 * machine have.
 *
 *   cpu    the CPU; the driver is not even asked
 *   cuda   every GPU this build has code for, or those named; QC_ERR_DEVICE where there are none
 *   auto   the same, but the CPU without a word where there are none, and for less than
 *          QC_GPU_WORTH_BYTES of weights: a CPU is done with them before CUDA has started
 *
 * The bytes written do not depend on it. */
#ifndef QC_CONVERT_DEVICE_CHOICE_H
#define QC_CONVERT_DEVICE_CHOICE_H

#include "base/arena.h"
#include "convert/device_wish.h"
#include "convert/gpu_work.h"

#define QC_GPU_WORTH_BYTES ((uint64_t)1 << 30)

typedef struct {
    const qc_gpu_work *work; /* with gpu_count > 0 */
    unsigned gpu_count;      /* 0: the CPU */
    qc_cuda_device gpus[QC_MAX_GPUS];
    qc_matmul_table tuning; /* for products on gpus[0]; its user's to fill */
    int wished;             /* GPUs were asked for: that they fail is an error */
    const char *why;        /* why the CPU, a clause; NULL with GPUs */
    const char *text;       /* "cpu", "cuda:0 (NVIDIA H200), cuda:1 (NVIDIA H200)" */
} qc_devices;

/* option: of --device, or NULL. source_bytes: of weights that GPUs could quantize. *out lives as
 * long as the arena. */
QC_NODISCARD qc_status qc_devices_choose(qc_devices *out, const char *option, uint64_t source_bytes,
                                         qc_arena *arena, qc_error *err);

#endif
