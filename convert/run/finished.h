/* Finds out whether an OUT that is already there is what this conversion would make. If it is,
 * there is nothing to do. If it is not, it is replaced only where the user says so (--force). */
#ifndef QC_CONVERT_FINISHED_H
#define QC_CONVERT_FINISHED_H

#include "convert/run/part_rank.h"
#include "formats/manifest.h"

/* Why an output is not what a conversion would make. */
typedef struct {
    char there[96]; /* the kind of output that is there */
    char text[320]; /* the difference, as a sentence */
} qc_difference;

/* Reads the manifest of a folder, and says in why->there what kind of output it is. Where the
 * manifest is damaged, m has no shards and why->text says so. */
QC_NODISCARD qc_status qc_output_read_finished(qc_manifest *m, qc_difference *why, qc_arena *arena,
                                               const char *out, qc_error *err);
/* Do two manifests record the same options and sources? why may be NULL, here and below. */
int qc_manifest_is_alike(qc_difference *why, const qc_manifest *then, const qc_manifest *now);
/* Are all files that a manifest lists in its folder, with the sizes that it says? */
QC_NODISCARD qc_status qc_manifest_is_there(int *same, qc_difference *why, const qc_manifest *m,
                                            const qc_file *root, qc_error *err);
/* How far qc_output_is_finished looks; each does what those before it do. */
typedef enum {
    QC_LOOK_PLAN,  /* at the manifest: version, options, source (names, sizes, heads), the plan */
    QC_LOOK_FILES, /* are all files there, are those beside the weights and the calibration equal */
    QC_LOOK_WEIGHTS /* at the weights of the source (qc_manifest_is_of_weights) */
} qc_look;

/* Is the output in root what the plan would make? *same is 0 where there is no manifest, or none
 * that can be read. 'verify' looks at the contents of an output; nothing here does. The memory that
 * this needs comes from the plan's arena. */
QC_NODISCARD qc_status qc_output_is_finished(int *same, qc_difference *why, const qc_file *root,
                                             const qc_plan *plan, qc_look look, qc_error *err);
/* Makes the QC_ERR_USAGE that says that out holds another finished output, and that only --force
 * replaces it. */
QC_NODISCARD qc_status qc_output_refuse(const qc_difference *why, const char *out, qc_error *err);

/* Answers the same question for the weights, once QC_LOOK_FILES found no difference: models of one
 * architecture have the same heads. It reads, on all threads, everything that a share of the shards
 * was made of, and compares it with the digests of the manifest. It leaves out matrices that lie
 * transposed in the source, and files that are deleted. */
QC_NODISCARD qc_status qc_manifest_is_of_weights(int *same, const qc_manifest *m,
                                                 const qc_plan *plan, qc_share share,
                                                 qc_error *err);
/* Does this for out's manifest. If that went away meanwhile, *same is 0. */
QC_NODISCARD qc_status qc_output_is_of_weights(int *same, const char *out, const qc_plan *plan,
                                               qc_share share, qc_error *err);

#endif
