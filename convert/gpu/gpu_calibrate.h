/* For tests: what the engine of calibrating on a GPU holds on the device. */
#ifndef QC_CONVERT_GPU_CALIBRATE_H
#define QC_CONVERT_GPU_CALIBRATE_H

#include "convert/gpu/gpu_table.h"

/* Returns the number of inputs of the moments; 0: there are no moments. */
uint64_t qc_gpu_calibrator_inputs(qc_calibrate_engine *e);
/* Copies the moments to the host, [n, n] each. cross NULL: not asked for. */
QC_NODISCARD qc_status qc_gpu_calibrator_read(qc_calibrate_engine *e, double *h, double *cross,
                                              qc_error *err);

#endif
