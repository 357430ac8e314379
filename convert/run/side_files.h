/* The files of an output that are not weights: config.json with its quantization_config, the
 * index, and what is copied from the source. */
#ifndef QC_CONVERT_SIDE_FILES_H
#define QC_CONVERT_SIDE_FILES_H

#include "convert/output/output_dir.h"
#include "convert/plan/plan.h"
#include "formats/manifest.h"

#define QC_CONFIG_NAME     "config.json"
#define QC_DEVICE_MAP_NAME "device_map.json"

/* Returns "bfloat16", "float16" or "float32", which bnb_4bit_compute_dtype is set to. It is the
 * user's choice, or else the 16-bit type that most quantized weights have, or else (F32, F64)
 * bfloat16, because bitsandbytes' default of float32 is slow everywhere. */
const char *qc_compute_dtype(const qc_plan *plan);
/* Makes the source's config.json with quantization_config set (or removed when weights are
 * dequantized), and torch_dtype/dtype corrected where all floating tensors were cast. Nothing else
 * changes. bitsandbytes' configuration knows only 4 bit or 8 bit. So for int8 beside NF4, for FP8
 * kept beside either (--to auto, --keep), for stacks and for block-wise int8, the method is qconv,
 * which loaders refuse by name. */
QC_NODISCARD qc_status qc_config_make(qc_strbuf *out, const qc_plan *plan, qc_error *err);
typedef struct {
    const char *name; /* name of a tensor */
    const char *file; /* its file, as named after decompression */
} qc_index_entry;
/* Fills *e with row i, in the order of names. What it points to lives until the next call. */
typedef qc_status (*qc_index_row_fn)(void *ctx, size_t i, qc_index_entry *e, qc_error *err);
/* Stages the index that a shard of this name belongs to, as Hugging Face writes it, row by row. f
 * gets what a manifest lists of it. */
QC_NODISCARD qc_status qc_index_stage(qc_output_dir *d, qc_manifest_file *f, const char *shard,
                                      qc_index_row_fn row, void *ctx, size_t count,
                                      uint64_t total_bytes, qc_error *err);
/* Gives the names of the side files, sorted, in the arena, before any of them is made. */
QC_NODISCARD qc_status qc_side_file_names(const char ***names, size_t *count, qc_arena *arena,
                                          const qc_plan *plan, qc_error *err);
/* Stages all side files in d. files and count (in the arena of d) are what the manifest lists.
 * device_map is the text of a device_map.json, which a plan with a placement gets; else NULL. That
 * of the source is never copied. */
QC_NODISCARD qc_status qc_side_files_stage(qc_output_dir *d, const qc_plan *plan,
                                           const char *device_map, qc_manifest_file **files,
                                           size_t *count, qc_error *err);

#endif
