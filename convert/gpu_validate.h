/* The functions of qc_gpu_validator (convert/gpu_work.h), over kernels/matmul.h; timed as qconv
 * bench does. */
#ifndef QC_CONVERT_GPU_VALIDATE_H
#define QC_CONVERT_GPU_VALIDATE_H

#include "convert/gpu_work.h"

QC_NODISCARD qc_status qc_gpu_comparer_create(qc_gpu_comparer **out, const qc_cuda_device *device,
                                              const qc_matmul_table *tuning, qc_error *err);
void qc_gpu_comparer_destroy(qc_gpu_comparer *c);
const char *qc_gpu_comparer_no_gemm(const qc_gpu_comparer *c);
QC_NODISCARD qc_status qc_gpu_compare(qc_gpu_comparer *c, const qc_gpu_comparison *in,
                                      qc_gpu_compared *out, unsigned count, qc_error *err);

#endif
