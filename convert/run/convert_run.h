/* A conversion that is planned, carried out: staging, journal, pipeline, side files, manifest, and
 * what remains when it fails. */
#ifndef QC_CONVERT_CONVERT_RUN_H
#define QC_CONVERT_CONVERT_RUN_H

#include "convert/fit/fit.h"
#include "convert/plan/plan.h"
#include "convert/run/part_run.h"
#include "convert/run/summary.h"

/* model: the plan's, which changes where its files are deleted (--consume-source).
 * Goes on with what an interrupted run of the same command left, or begins. fit: what the plan was
 * cut for, or NULL. part: begun (qc_part_begin); of several, this process makes its own, and the
 * rest of OUT if it is the last. Fills in the results of report.
 * On failure the staging folder stays where the same command can go on: after an interruption, an
 * error of I/O, a full disk or memory that ran out, if a weight was finished; *err says so. It goes
 * where the same command can only fail again (the input is bad), and where nothing was finished. A
 * conversion of another command is never touched; nor is one that has deleted files of its source.
 */
QC_NODISCARD qc_status qc_convert_run(const qc_plan *plan, qc_checkpoint *model, const qc_fit *fit,
                                      qc_part_run *part, qc_convert_report *report, qc_error *err);

#endif
