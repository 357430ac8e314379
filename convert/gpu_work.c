#include "convert/gpu_work.h"

#include "convert/gpu_bench_internal.h"
#include "convert/gpu_calibrate.h"
#include "convert/gpu_llama.h"
#include "convert/gpu_quantize.h"
#include "convert/gpu_validate.h"

const qc_gpu_work *qc_gpu_work_get(void)
{
    static const qc_gpu_work work = {
        .device_count = qc_cuda_device_count,
        .device_open = qc_cuda_device_open,
        .validator =
            {
                .create = qc_gpu_comparer_create,
                .destroy = qc_gpu_comparer_destroy,
                .no_gemm = qc_gpu_comparer_no_gemm,
                .compare = qc_gpu_compare,
            },
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
        .llama =
            {
                .create = qc_gpu_decoder_create,
                .destroy = qc_gpu_decoder_destroy,
                .layer = qc_gpu_decoder_run,
                .head = qc_gpu_decoder_head,
                .logits = qc_gpu_decoder_logits,
            },
        .calibrating =
            {
                .create = qc_gpu_calibrator_create,
                .destroy = qc_gpu_calibrator_destroy,
                .name = qc_gpu_calibrator_name,
                .layer = qc_gpu_calibrator_layer,
                .replace = qc_gpu_calibrator_replace,
                .moments = qc_gpu_calibrator_moments,
                .stage = qc_gpu_calibrator_stage,
                .pass = qc_gpu_calibrator_pass,
                .head = qc_gpu_calibrator_head,
                .take = qc_gpu_calibrator_take,
                .factor = qc_gpu_calibrator_factor,
                .weight = qc_gpu_calibrator_weight,
                .measure = qc_gpu_calibrator_measure,
                .bytes = qc_gpu_calibrator_bytes,
            },
        .bench = qc_gpu_bench,
    };
    return &work;
}

const char *qc_gpu_build(void)
{
    return qc_cuda_build();
}
