/* The tables of functions that gpu_*.c fill, and all of them together for main.c. */
#ifndef QC_CONVERT_GPU_TABLE_H
#define QC_CONVERT_GPU_TABLE_H

#include "convert/calibrate/calibrate_engine.h"
#include "convert/device/device_gpu.h"
#include "convert/device/device_quantizer.h"
#include "convert/validate/validate_compare.h"

extern const qc_gpu_quantizer qc_gpu_quantizer_table;
extern const qc_gpu_validator qc_gpu_validator_table;
extern const qc_gpu_calibrating qc_gpu_calibrating_table;

/* NULL in a build without CUDA kernels (no_gpu.c). */
const qc_gpu_work *qc_gpu_table(void);

#endif
