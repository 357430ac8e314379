/* Which quantized weight of an output is to be compared with which tensor of the checkpoint it was
 * made from.
 *
 * Quantized weights are found by the tensors beside them, as everywhere (recipe_stored.h), so that
 * OUT may be compressed, unpacked, or from bitsandbytes. Where OUT has a manifest, that says what a
 * weight was made from; else the names must be equal. Fused experts of MODEL are split as convert
 * does. */
#ifndef QC_CONVERT_VALIDATE_PAIR_H
#define QC_CONVERT_VALIDATE_PAIR_H

#include "convert/model/recipe.h"
#include "convert/model/stored_read.h"
#include "formats/manifest.h"

typedef struct {
    const char *name;               /* of the weight in OUT */
    const char *source;             /* in MODEL; NULL where it is not there */
    const char *why_not;            /* why the two cannot be compared, a clause; NULL: they can */
    const qc_stored_weight *stored; /* in OUT */
    const qc_coded_weight *coded;   /* in MODEL, for FP8 and MXFP4; else NULL */
    uint32_t out_tensor;
    uint32_t model_tensor; /* UINT32_MAX where source is NULL */
    int transpose;         /* Conv1D: MODEL has [in, out] */
    uint64_t rows, cols;   /* N and K; a stack of experts is [experts * out, in] */
    uint64_t bytes;        /* codes and scales in OUT */
    qc_dtype dtype;        /* of the weight in MODEL: decoded, where it is coded */
} qc_validate_pair;

typedef struct {
    qc_validate_pair *pairs; /* in natural order of names */
    size_t count;
} qc_validate_pairs;

/* manifest: of OUT, or NULL. QC_ERR_INPUT when OUT has no quantized weight, QC_ERR_CHECK when a
 * shape in MODEL is another one: OUT was not made from it. */
QC_NODISCARD qc_status qc_validate_pair_up(qc_validate_pairs *out, qc_arena *arena,
                                           const qc_checkpoint *output, const qc_manifest *manifest,
                                           const qc_checkpoint *model, qc_error *err);

/* "nf4", "fp4", "int8", "int8-block". */
const char *qc_validate_scheme(const qc_validate_pair *p);

/* qc_stored_read of the pair's weight in OUT. */
QC_NODISCARD qc_status qc_validate_weights_read(qc_stored_arrays *out, const qc_checkpoint *output,
                                                const qc_validate_pair *p, qc_st_cursor *cursor,
                                                qc_error *err);

#endif
