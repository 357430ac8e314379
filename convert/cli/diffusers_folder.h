/* A diffusers pipeline: a folder with model_index.json and one folder for each of its models.
 *
 * convert makes the transformers, UNets, text encoders and the like into outputs, each a
 * transaction of its own in its folder of OUT, and copies the rest (VAE, schedulers, tokenizers).
 * What is copied has a manifest of its own in OUT, without shards, which comes first: it makes OUT
 * a qconv output, so that the same command continues. model_index.json comes last, and without it
 * no loader takes OUT for a pipeline. */
#ifndef QC_CONVERT_DIFFUSERS_FOLDER_H
#define QC_CONVERT_DIFFUSERS_FOLDER_H

#include "convert/cli/options.h"

typedef qc_status (*qc_part_command)(const qc_options *o, qc_error *err);

/* Is path the folder of a pipeline, and not that of a model? */
int qc_is_diffusers_folder(const qc_options *o, const char *path);
/* `one` is the command for a single part. It gets the options with the part's paths. */
QC_NODISCARD qc_status qc_diffusers_convert(const qc_options *o, qc_part_command one,
                                            qc_error *err);
/* For verify and unpack: goes through the copied files, then through every part. */
QC_NODISCARD qc_status qc_diffusers_each(const qc_options *o, qc_part_command one, qc_error *err);

#endif
