/* Works out the tensors of a model from its configuration: names, dtypes and shapes as the released
 * checkpoints of its family have them. docs/theory/config.md lists the families. */
#ifndef QC_CONVERT_MODEL_TENSORS_H
#define QC_CONVERT_MODEL_TENSORS_H

#include "formats/checkpoint.h"

/* The 60 layers of 384 experts in FP8 of Kimi K2 have 138,240 tensors, including scales. */
#define QC_MODEL_MAX_TENSORS 400000u

typedef struct {
    qc_checkpoint_tensor *rows; /* in no particular order; bytes, begin and file are not set */
    size_t count;
} qc_model_tensors;

/* All memory is in the arena. QC_ERR_UNSUPPORTED for a model type that is not known, or a way of
 * quantizing that is neither FP8 nor MXFP4 (unless any_form: the tensors are those of the model
 * before it was quantized so). QC_ERR_INPUT for a configuration that is impossible, or that has
 * more than QC_MODEL_MAX_TENSORS tensors. Thread-safe. */
QC_NODISCARD qc_status qc_model_tensors_make(qc_model_tensors *out, qc_arena *arena,
                                             const qc_json *config, int any_form, qc_error *err);

#endif
