/* Which device does the work: what --device (or QCONV_DEVICE) wishes for, against what this build
 * and this machine have.
 *
 *   cpu    The CPU. The driver is not even asked.
 *   cuda   Every GPU that this build has code for, or those that are named. QC_ERR_DEVICE where
 *          there are none.
 *   auto   The same, but where there are none the CPU takes over without a word. It also takes
 *          less than QC_GPU_WORTH_BYTES of weights, because it has quantized them before CUDA
 *          has started.
 *
 * The bytes that are written do not depend on the device, except those of calibrated weights
 * (convert/calibrate/calibrate.h). */
#ifndef QC_CONVERT_DEVICE_CHOICE_H
#define QC_CONVERT_DEVICE_CHOICE_H

#include "base/arena.h"
#include "convert/device/device_gpu.h"
#include "convert/device/device_wish.h"

#define QC_GPU_WORTH_BYTES ((uint64_t)1 << 30)

typedef struct {
    const qc_gpu_work *work; /* what the GPUs can do, if gpu_count > 0 */
    unsigned gpu_count;      /* 0: the CPU does the work */
    qc_cuda_device gpus[QC_MAX_GPUS];
    int wished;       /* GPUs were asked for, so it is an error if they fail */
    const char *why;  /* a clause: why the CPU does the work; NULL with GPUs */
    const char *text; /* "cpu", "cuda:0 (NVIDIA H200), cuda:1 (NVIDIA H200)" */
} qc_devices;

/* What a choice of devices is made from. */
typedef struct {
    const qc_gpu_work *work; /* all that this build can do on GPUs; NULL: nothing */
    const char *wish;        /* --device, well-formed; NULL: it was not given */
} qc_device_options;

/* source_bytes: the bytes of the weights that GPUs could quantize. *out lives as long as the
 * arena. */
QC_NODISCARD qc_status qc_devices_choose(qc_devices *out, qc_device_options from,
                                         uint64_t source_bytes, qc_arena *arena, qc_error *err);

#endif
