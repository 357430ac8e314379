/* The manifest of a finished pipeline. */
#ifndef QC_CONVERT_MAKE_MANIFEST_H
#define QC_CONVERT_MAKE_MANIFEST_H

#include "convert/calibrate/calibrate.h"
#include "convert/pipeline/pipeline.h"
#include "formats/manifest.h"

/* What the manifest's rows of tensors are made from, when they are asked for. */
typedef struct {
    const qc_pipeline *p;
    qc_strbuf name; /* the name in the row that was asked for last; freed by the caller */
    qc_manifest_outputs outputs;
} qc_manifest_rows;

/* Fills m from the pipeline's results. What it holds lives in the plan's arena, except for its
 * tensors, which are rows made from p: both p and *rows have to outlive m. */
QC_NODISCARD qc_status qc_manifest_make(qc_manifest *m, qc_manifest_rows *rows,
                                        const qc_pipeline *p, qc_manifest_file *files,
                                        size_t file_count, qc_error *err);
/* Fills in what is known before the work: version, options, placement, sources. The rest is
 * empty. */
QC_NODISCARD qc_status qc_manifest_head(qc_manifest *m, const qc_plan *plan, qc_error *err);
/* Fills in what the plan knows of the row of an output tensor; the rest is empty. name gets the
 * text of its name. */
QC_NODISCARD qc_status qc_manifest_plan_row(qc_manifest_tensor *t, qc_strbuf *name,
                                            const qc_plan *plan, uint32_t tensor, qc_error *err);
/* Fills in what weights were calibrated with. */
QC_NODISCARD qc_status qc_manifest_add_calibration(qc_manifest *m, const qc_plan *plan,
                                                   const qc_calibrate_report *r, qc_error *err);
/* Writes the manifest into the staging folder, whole and synced, for qc_output_dir_move. It
 * hashes the text. */
QC_NODISCARD qc_status qc_manifest_stage(qc_output_dir *d, const qc_manifest *m, qc_digest *digest,
                                         qc_error *err);

#endif
