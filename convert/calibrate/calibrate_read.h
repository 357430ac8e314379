/* Reads a weight that is calibrated from the model. */
#ifndef QC_CONVERT_CALIBRATE_READ_H
#define QC_CONVERT_CALIBRATE_READ_H

#include "convert/calibrate/calibrate_internal.h"

/* Reads a weight by its number as floats [rows, cols], a matrix of a stack by itself. The caller
 * frees it, also after a failure. */
QC_NODISCARD qc_status qc_calibrate_read(float **out, qc_calibrator *k, uint32_t number,
                                         qc_error *err);

#endif
