/* Carries out a conversion that is planned: staging, journal, pipeline, side files, manifest, and
 * what remains when it fails. */
#ifndef QC_CONVERT_CONVERT_RUN_H
#define QC_CONVERT_CONVERT_RUN_H

#include "convert/plan/plan.h"
#include "convert/run/part_run.h"
#include "convert/run/summary.h"

/* Goes on with what an interrupted run of the same command left, or begins where there is nothing,
 * and fills in the results of report. part has been begun (qc_part_begin). If it is one of
 * several, this process makes its own part, and the rest of OUT if it is the last. device_map is
 * the text of a placement's device_map.json, or NULL.
 *
 * On failure the staging folder stays where the same command can go on. That is after an
 * interruption, an I/O error, a full disk or lack of memory, if a weight was finished; *err says
 * so. The folder goes where the same command can only fail again (the input is bad), and where
 * nothing was finished. A conversion of another command is never touched. */
QC_NODISCARD qc_status qc_convert_run(const qc_plan *plan, qc_part_run *part,
                                      const char *device_map, qc_convert_report *report,
                                      qc_error *err);

#endif
