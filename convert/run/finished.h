/* Is an OUT that is there already what this conversion would make? Then there is nothing to do; and
 * if it is not, nobody replaces it who does not say so (--force). */
#ifndef QC_CONVERT_FINISHED_H
#define QC_CONVERT_FINISHED_H

#include "convert/fit/fit.h"
#include "convert/plan/plan.h"
#include "formats/manifest.h"

/* Why an output is not what a conversion would make. */
typedef struct {
    char there[96]; /* what is there */
    char text[320]; /* what differs */
} qc_difference;

/* The manifest of a folder and why->there; without shards, and why->text saying so, where it is
 * damaged. */
QC_NODISCARD qc_status qc_output_read_finished(qc_manifest *m, qc_difference *why, qc_arena *arena,
                                               const char *out, qc_error *err);
/* Are options and sources that two manifests record the same? why may be NULL, here and below. */
int qc_manifest_is_alike(qc_difference *why, const qc_manifest *then, const qc_manifest *now);
/* *same: the manifest of the folder out is of this version, of the same options and source (names,
 * sizes, heads), and lists the tensors that the plan does, at the same places; 0 where there is no
 * manifest, or none that can be read. Contents are not looked at: those of OUT by 'verify', the
 * source's below. fit: what the plan was cut for, or NULL. What it needs for that it takes from the
 * arena of the plan. */
QC_NODISCARD qc_status qc_output_is_of_plan(int *same, qc_difference *why, const char *out,
                                            const qc_plan *plan, const qc_fit *fit, qc_error *err);
/* Are all files that a manifest lists in its folder, with the sizes that it says? */
QC_NODISCARD qc_status qc_manifest_is_there(int *same, qc_difference *why, const qc_manifest *m,
                                            const qc_file *root, qc_error *err);
/* Both of these, and the files beside the weights, what it was calibrated with, and if `weights`
 * what follows. root: OUT, which has a manifest. */
QC_NODISCARD qc_status qc_output_is_finished(int *same, qc_difference *why, const qc_file *root,
                                             const qc_plan *plan, const qc_fit *fit, int weights,
                                             qc_error *err);
/* Makes the QC_ERR_USAGE that says: out holds another finished output, and only --force replaces
 * it. */
QC_NODISCARD qc_status qc_output_refuse(const qc_difference *why, const char *out, qc_error *err);

/* The same of weights, after *same of the two above: models of one architecture have the same
 * heads. Reads all that part `index` of the shards (part_of, per shard; NULL: all of them) was made
 * of, on all threads, and compares it with the digests of the manifest, but for matrices that lie
 * transposed in the source, and files that are deleted. */
QC_NODISCARD qc_status qc_manifest_is_of_weights(int *same, const qc_manifest *m,
                                                 const qc_plan *plan, const uint32_t *part_of,
                                                 unsigned index, qc_error *err);
/* Does this for out's manifest. One that went away meanwhile is not the same. */
QC_NODISCARD qc_status qc_output_is_of_weights(int *same, const char *out, const qc_plan *plan,
                                               const uint32_t *part_of, unsigned index,
                                               qc_error *err);

#endif
