/* Weights as the forward pass has them, made floats for what calibrates them. */
#ifndef QC_CONVERT_CALIBRATE_FORWARD_H
#define QC_CONVERT_CALIBRATE_FORWARD_H

#include "convert/calibrate/calibrate_internal.h"

/* qc_calibrate_weight, qc_calibrate_searched and qc_calibrate_groups_add. */
QC_NODISCARD qc_status qc_calibrate_forward_weight(const qc_calibrator *k, uint32_t number,
                                                   const qc_forward_matrix *w,
                                                   const qc_feedback_outputs *g,
                                                   qc_calibrated_arrays *arrays, qc_error *err);
QC_NODISCARD qc_status qc_calibrate_forward_searched(const qc_calibrator *k, uint32_t number,
                                                     const qc_forward_matrix *w, qc_error *err);
QC_NODISCARD qc_status qc_calibrate_forward_groups_add(qc_calibrator *k, uint32_t number,
                                                       const qc_forward_matrix *w, qc_error *err);

#endif
