/* The functions of qc_gpu_calibrating (convert/gpu_work.h), over kernels/cuda_feedback.h and
 * convert/gpu_llama_internal.h. */
#ifndef QC_CONVERT_GPU_CALIBRATE_H
#define QC_CONVERT_GPU_CALIBRATE_H

#include "convert/gpu_work.h"

QC_NODISCARD qc_status qc_gpu_calibrator_create(qc_gpu_calibrator **out,
                                                const qc_cuda_device *device,
                                                const qc_gpu_decoder_form *form,
                                                const qc_matmul_table *tuning, qc_error *err);
void qc_gpu_calibrator_destroy(qc_gpu_calibrator *c);
const char *qc_gpu_calibrator_name(const qc_gpu_calibrator *c);
QC_NODISCARD qc_status qc_gpu_calibrator_layer(qc_gpu_calibrator *c, const qc_gpu_decoder_layer *z,
                                               const qc_gpu_decoder_layer *x, qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_replace(qc_gpu_calibrator *c, qc_llama_part part,
                                                 const qc_gpu_matrix *m, qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_moments(qc_gpu_calibrator *c, uint64_t n, int cross,
                                                 qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_stage(qc_gpu_calibrator *c, qc_llama_stage stage,
                                               const qc_gpu_states *s, int add, qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_pass(qc_gpu_calibrator *c, const qc_gpu_states *s,
                                              qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_head(qc_gpu_calibrator *c, const float *gain,
                                              const qc_gpu_states *s, qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_take(qc_gpu_calibrator *c, uint64_t n, const double *h,
                                              qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_factor(qc_gpu_calibrator *c,
                                                const qc_feedback_options *options,
                                                qc_feedback_info *info, qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_weight(qc_gpu_calibrator *c, const qc_feedback_form *form,
                                                const qc_gpu_matrix *w, qc_feedback_out *out,
                                                qc_feedback_result *result, qc_error *err);
QC_NODISCARD qc_status qc_gpu_calibrator_measure(qc_gpu_calibrator *c, double *single, double *dual,
                                                 double *forward, qc_error *err);
uint64_t qc_gpu_calibrator_bytes(const qc_gpu_decoder_form *form, uint64_t layer_bytes, uint64_t n,
                                 int cross, uint64_t rows, const qc_feedback_form *weight);
/* For tests: the moments' size, 0: there are none, and the moments to the host, [n, n] each. cross
 * NULL: not asked for. */
uint64_t qc_gpu_calibrator_inputs(const qc_gpu_calibrator *c);
QC_NODISCARD qc_status qc_gpu_calibrator_read(const qc_gpu_calibrator *c, double *h, double *cross,
                                              qc_error *err);

#endif
