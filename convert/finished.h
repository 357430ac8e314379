/* Is an OUT that is there already what this conversion would make? For a part that comes when the
 * others have completed it. */
#ifndef QC_CONVERT_FINISHED_H
#define QC_CONVERT_FINISHED_H

#include "convert/fit.h"
#include "convert/plan.h"
#include "formats/manifest.h"

/* *same: the manifest is of this version, of the same options and source (names, sizes, heads), and
 * lists the tensors that the plan does, at the same places. Contents are not looked at: those of
 * OUT by 'verify', the source's below. fit: what the plan was cut for, or NULL. What it needs
 * for that it takes from the arena of the plan. */
QC_NODISCARD qc_status qc_manifest_is_of_plan(int *same, const qc_manifest *m, const qc_plan *plan,
                                              const qc_fit *fit, qc_error *err);

/* The same of the folder out; 0 where there is no manifest, or none that can be read. */
QC_NODISCARD qc_status qc_output_is_of_plan(int *same, const char *out, const qc_plan *plan,
                                            const qc_fit *fit, qc_error *err);

/* The same of weights, after *same of the two above: models of one architecture have the same
 * heads. Reads all that part `index` of the shards (part_of, per shard; NULL: all of them) was made
 * of, on all threads, and compares it with the digests of the manifest, but for matrices that lie
 * transposed in the source, and files that are deleted. */
QC_NODISCARD qc_status qc_manifest_is_of_weights(int *same, const qc_manifest *m,
                                                 const qc_plan *plan, const uint32_t *part_of,
                                                 unsigned index, qc_error *err);
/* Of out's manifest. One that went away meanwhile is not the same. */
QC_NODISCARD qc_status qc_output_is_of_weights(int *same, const char *out, const qc_plan *plan,
                                               const uint32_t *part_of, unsigned index,
                                               qc_error *err);

#endif
