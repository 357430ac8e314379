/* Prints what --dry-run shows. */
#ifndef QC_CONVERT_PLAN_PRINT_H
#define QC_CONVERT_PLAN_PRINT_H

#include "convert/plan/plan.h"
#include "convert/run/summary.h"

/* Prints the plan to standard output: one row per tensor and the sums from `totals`, or with --json
 * one JSON object. */
QC_NODISCARD qc_status qc_plan_print(const qc_plan *plan, const qc_convert_report *totals,
                                     qc_error *err);

#endif
