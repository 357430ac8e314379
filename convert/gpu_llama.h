/* The functions of qc_gpu_llama (convert/gpu_work.h), over kernels/matmul.h and cuda_llama.h. */
#ifndef QC_CONVERT_GPU_LLAMA_H
#define QC_CONVERT_GPU_LLAMA_H

#include "convert/gpu_work.h"

QC_NODISCARD qc_status qc_gpu_decoder_create(qc_gpu_decoder **out, const qc_cuda_device *device,
                                             const qc_gpu_decoder_form *form,
                                             const qc_matmul_table *tuning, qc_error *err);
void qc_gpu_decoder_destroy(qc_gpu_decoder *d);
QC_NODISCARD qc_status qc_gpu_decoder_run(qc_gpu_decoder *d, const qc_gpu_decoder_layer *layer,
                                          float *hidden, const uint64_t *lengths, uint64_t windows,
                                          qc_error *err);
QC_NODISCARD qc_status qc_gpu_decoder_head(qc_gpu_decoder *d, const qc_gpu_matrix *head,
                                           qc_error *err);
QC_NODISCARD qc_status qc_gpu_decoder_logits(qc_gpu_decoder *d, const float *hidden, uint64_t n,
                                             float *out, qc_error *err);

#endif
