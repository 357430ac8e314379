/* The functions of qc_gpu_quantizer (convert/gpu_work.h), over kernels/cuda_quantize.h. */
#ifndef QC_CONVERT_GPU_QUANTIZE_H
#define QC_CONVERT_GPU_QUANTIZE_H

#include "convert/gpu_work.h"

QC_NODISCARD qc_status qc_gpu_ring_create(qc_gpu_ring **out, const qc_cuda_device *device,
                                          size_t slot_bytes, size_t min_bytes, qc_error *err);
void qc_gpu_ring_destroy(qc_gpu_ring *r);
size_t qc_gpu_ring_slot_bytes(const qc_gpu_ring *r);
uint64_t qc_gpu_ring_elems(const qc_gpu_ring *r, const qc_gpu_form *form, uint64_t step);
void *qc_gpu_ring_source(qc_gpu_ring *r, unsigned slot);
QC_NODISCARD qc_status qc_gpu_ring_start(qc_gpu_ring *r, unsigned slot, const qc_gpu_form *form,
                                         uint64_t n, qc_error *err);
QC_NODISCARD qc_status qc_gpu_ring_finish(qc_gpu_ring *r, unsigned slot, qc_gpu_result *out,
                                          qc_error *err);

#endif
