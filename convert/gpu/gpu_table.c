#include "convert/gpu/gpu_table.h"

const qc_gpu_work *qc_gpu_table(void)
{
    static const qc_gpu_work all = {
        .build = qc_cuda_build,
        .device_count = qc_cuda_device_count,
        .device_open = qc_cuda_device_open,
        .quantizer = &qc_gpu_quantizer_table,
        .validator = &qc_gpu_validator_table,
        .calibrating = &qc_gpu_calibrating_table,
    };
    return &all;
}
