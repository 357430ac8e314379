/* Is an OUT that is there already what this conversion would make? For a part that comes when the
 * others have completed it. */
#ifndef QC_CONVERT_FINISHED_H
#define QC_CONVERT_FINISHED_H

#include "convert/fit.h"
#include "convert/plan.h"
#include "formats/manifest.h"

/* *same: the manifest is of this version, of the same options and source (names, sizes, heads), and
 * lists the tensors that the plan does, at the same places. Contents are not looked at: 'verify'
 * does. fit: what the plan was cut for, or NULL. What it needs
 * for that it takes from the arena of the plan. */
QC_NODISCARD qc_status qc_manifest_is_of_plan(int *same, const qc_manifest *m, const qc_plan *plan,
                                              const qc_fit *fit, qc_error *err);

/* The same of the folder out; 0 where there is no manifest, or none that can be read. */
QC_NODISCARD qc_status qc_output_is_of_plan(int *same, const char *out, const qc_plan *plan,
                                            const qc_fit *fit, qc_error *err);

#endif
