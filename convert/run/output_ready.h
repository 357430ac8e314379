/* Finds out before the work begins what is in the way of an output in OUT, and what happens to
 * files there. */
#ifndef QC_CONVERT_OUTPUT_READY_H
#define QC_CONVERT_OUTPUT_READY_H

#include "convert/output/output_dir.h"
#include "convert/run/part_run.h"

/* Refuses what cannot be written or must not be replaced (qc_output_check_names), and says which
 * files --force replaces. names is sorted here. */
QC_NODISCARD qc_status qc_output_ready(const qc_call *call, int force, const qc_file *root,
                                       const qc_owned *owned, const char **names, size_t count,
                                       int dry_run, qc_error *err);
/* Does the same for the names of a plan, in d, which is open. */
QC_NODISCARD qc_status qc_output_ready_for(const qc_output_dir *d, const qc_plan *plan,
                                           const qc_fit *fit, int force, qc_error *err);
/* Is for --dry-run with an OUT: it refuses what the conversion would refuse, and says what it would
 * replace and delete. It touches nothing. */
QC_NODISCARD qc_status qc_output_preview(const qc_plan *plan, const qc_fit *fit,
                                         const qc_part_run *part, qc_error *err);
/* Is for --dry-run: would the output fit on the disk? */
QC_NODISCARD qc_status qc_output_preview_room(const qc_plan *plan, const qc_part_run *part,
                                              qc_error *err);

#endif
