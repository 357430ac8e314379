/* What this build of the program can do on GPUs: one table for each room that uses a GPU.
 *
 * The users own the interfaces: device_quantizer.h, validate_compare.h and calibrate_engine.h
 * describe the tables that this struct points at. gpu_*.c implement them over kernels/, and main.c
 * puts the whole into the options; everything else finds it in the devices that it opened
 * (device_choice.h). A build without CUDA kernels has none: no_gpu.c returns NULL. */
#ifndef QC_CONVERT_DEVICE_GPU_H
#define QC_CONVERT_DEVICE_GPU_H

#include "kernels/cuda_device.h"

typedef struct qc_gpu_work {
    /* "CUDA 13.0: sm_75 sm_80 ...": what the kernels were compiled with and for. */
    const char *(*build)(void);
    /* The number of devices, or 0 and a sentence that says why. See kernels/cuda_device.h. */
    void (*device_count)(int *count, char *why, size_t why_bytes);
    /* QC_ERR_DEVICE if this build has no code for the device. */
    qc_status (*device_open)(qc_cuda_device *out, int index, qc_error *err);

    const struct qc_gpu_quantizer *quantizer;
    const struct qc_gpu_validator *validator;
    const struct qc_gpu_calibrating *calibrating;
} qc_gpu_work;

#endif
