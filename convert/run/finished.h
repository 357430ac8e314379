/* Finds out whether an OUT that is already there is what this conversion would make. If it is,
 * there is nothing to do. If it is not, it is replaced only where the user says so (--force). */
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

/* Reads the manifest of a folder, and says in why->there what kind of output it is. Where the
 * manifest is damaged, m has no shards and why->text says so. */
QC_NODISCARD qc_status qc_output_read_finished(qc_manifest *m, qc_difference *why, qc_arena *arena,
                                               const char *out, qc_error *err);
/* Do two manifests record the same options and sources? why may be NULL, here and below. */
int qc_manifest_is_alike(qc_difference *why, const qc_manifest *then, const qc_manifest *now);
/* Sets *same where the manifest of the folder out is of this version, of the same options and
 * source (names, sizes, heads), and lists the same tensors at the same places as the plan. It is 0
 * where there is no manifest, or none that can be read. Contents are not looked at: 'verify' looks
 * at those of OUT, and qc_manifest_is_of_weights at the source's. fit is what the plan was cut for,
 * or NULL. The memory that this needs comes from the plan's arena. */
QC_NODISCARD qc_status qc_output_is_of_plan(int *same, qc_difference *why, const char *out,
                                            const qc_plan *plan, const qc_fit *fit, qc_error *err);
/* Are all files that a manifest lists in its folder, with the sizes that it says? */
QC_NODISCARD qc_status qc_manifest_is_there(int *same, qc_difference *why, const qc_manifest *m,
                                            const qc_file *root, qc_error *err);
/* Answers both of these, and compares the files beside the weights and what the output was
 * calibrated with; if `weights` is set, the weights too (see below). root is OUT, which has a
 * manifest. */
QC_NODISCARD qc_status qc_output_is_finished(int *same, qc_difference *why, const qc_file *root,
                                             const qc_plan *plan, const qc_fit *fit, int weights,
                                             qc_error *err);
/* Makes the QC_ERR_USAGE that says that out holds another finished output, and that only --force
 * replaces it. */
QC_NODISCARD qc_status qc_output_refuse(const qc_difference *why, const char *out, qc_error *err);

/* Answers the same question for the weights, once the first two have set *same: models of one
 * architecture have the same heads. It reads, on all threads, everything that part `index` of the
 * shards was made of (part_of has the part of each shard; NULL: all of them), and compares it with
 * the digests of the manifest. It leaves out matrices that lie transposed in the source, and files
 * that are deleted. */
QC_NODISCARD qc_status qc_manifest_is_of_weights(int *same, const qc_manifest *m,
                                                 const qc_plan *plan, const uint32_t *part_of,
                                                 unsigned index, qc_error *err);
/* Does this for out's manifest. If that went away meanwhile, *same is 0. */
QC_NODISCARD qc_status qc_output_is_of_weights(int *same, const char *out, const qc_plan *plan,
                                               const uint32_t *part_of, unsigned index,
                                               qc_error *err);

#endif
