#include "convert/gpu_work.h"

#include "convert/gpu_bench_parts.h"
#include "convert/gpu_quantize.h"

const qc_gpu_work *qc_gpu_work_get(void)
{
    static const qc_gpu_work work = {
        .device_count = qc_cuda_device_count,
        .device_open = qc_cuda_device_open,
        .quantizer =
            {
                .ring_create = qc_gpu_ring_create,
                .ring_destroy = qc_gpu_ring_destroy,
                .ring_slot_bytes = qc_gpu_ring_slot_bytes,
                .ring_elems = qc_gpu_ring_elems,
                .ring_source = qc_gpu_ring_source,
                .ring_start = qc_gpu_ring_start,
                .ring_finish = qc_gpu_ring_finish,
            },
        .bench = qc_gpu_bench,
    };
    return &work;
}

const char *qc_gpu_build(void)
{
    return qc_cuda_build();
}
