/* `qconv plan --mode train` finds the settings that fit, prints them, writes one as a
 * configuration, and measures it. */
#ifndef QC_CONVERT_TRAIN_PLAN_H
#define QC_CONVERT_TRAIN_PLAN_H

#include "convert/fit/train_memory.h"

/* Takes a plan after qc_plan_begin. It prints to standard output (text, or JSON with --json),
 * writes o->apply, and measures with o->profile. A budget without a GPU is QC_ERR_USAGE. If
 * something is to be applied and nothing fits, that is QC_ERR_CHECK. */
QC_NODISCARD qc_status qc_train_plan(const qc_train_options *o, const char *html,
                                     const qc_plan *plan, const qc_geometry *geometry,
                                     const qc_budget *budget, qc_error *err);

#endif
