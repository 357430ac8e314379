/* Finds for each quantized weight of an output the tensor of the checkpoint that it was made from,
 * so that the two can be compared.
 *
 * Quantized weights are recognised by the tensors beside them, as everywhere (recipe_stored.h), so
 * OUT may be compressed, unpacked, or from bitsandbytes. If OUT has a manifest, it says what a
 * weight was made from; otherwise the names must be equal. Fused experts of MODEL are split as
 * convert splits them. */
#ifndef QC_CONVERT_VALIDATE_PAIR_H
#define QC_CONVERT_VALIDATE_PAIR_H

#include "convert/model/recipe.h"
#include "convert/model/stored_read.h"
#include "formats/manifest.h"

typedef struct {
    const char *name;               /* name of the weight in OUT */
    const char *source;             /* its name in MODEL; NULL if it is not there */
    const char *why_not;            /* a clause why the two cannot be compared; NULL: they can */
    const qc_stored_weight *stored; /* in OUT */
    const qc_coded_weight *coded;   /* how MODEL's weight is coded, for FP8 and MXFP4; else NULL */
    uint32_t out_tensor;
    uint32_t model_tensor; /* UINT32_MAX if source is NULL */
    int transpose;         /* Conv1D: MODEL has [in, out] */
    uint64_t rows, cols;   /* N and K; a stack of experts is [experts * out, in] */
    uint64_t bytes;        /* codes and scales in OUT */
    qc_dtype dtype;        /* the weight's in MODEL, after decoding if it is coded */
} qc_validate_pair;

typedef struct {
    qc_validate_pair *pairs; /* sorted by name, in natural order */
    size_t count;
} qc_validate_pairs;

/* manifest is OUT's, or NULL. QC_ERR_INPUT when OUT has no quantized weight. QC_ERR_CHECK when a
 * shape in MODEL differs, because OUT was then not made from it. */
QC_NODISCARD qc_status qc_validate_pair_up(qc_validate_pairs *out, qc_arena *arena,
                                           const qc_checkpoint *output, const qc_manifest *manifest,
                                           const qc_checkpoint *model, qc_error *err);

#endif
