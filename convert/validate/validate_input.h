/* Activations to multiply with: random ones, or captured ones from a file.
 *
 * Random: independent, normally distributed, mean 0 and variance 1, then rounded to the 16-bit
 * type. Element (r, k) depends on the seed, the number of columns, r and k only: more rows leave
 * the first ones as they are, and layers of equal width see the same x.
 *
 * Captured: a .safetensors file of F64, F32, F16 or BF16 tensors [..., K]. For a layer the one that
 * is called as its weight is taken ("model.layers.0.mlp.up_proj.weight"), or as its module (without
 * ".weight"), or as the number of columns ("4096"). Of its rows (all dimensions but the last) as
 * many as are wanted are taken, evenly spread; where there are fewer, they repeat. */
#ifndef QC_CONVERT_VALIDATE_INPUT_H
#define QC_CONVERT_VALIDATE_INPUT_H

#include "base/dtype.h"
#include "formats/checkpoint.h"
#include "quant/quant_ops.h"

typedef struct {
    uint64_t seed;
    qc_checkpoint *file; /* captured activations; NULL: random */
    qc_st_cursor *cursor;
    const qc_quant_ops *ops;

    /* what was made last */
    void *x; /* [rows, cols] of dtype, F16 or BF16 */
    qc_dtype dtype;
    uint64_t rows, cols;
    int of_random;
} qc_validate_input;

/* path: NULL for random ones. */
QC_NODISCARD qc_status qc_validate_input_open(qc_validate_input *in, const char *path,
                                              uint64_t seed, const qc_quant_ops *ops,
                                              qc_error *err);
void qc_validate_input_close(qc_validate_input *in); /* of zeros is fine */

/* Can activations for this layer be had? The tensor's name to *found (in the file's memory), or
 * NULL; always "" for random ones. */
const char *qc_validate_input_find(const qc_validate_input *in, const char *layer, uint64_t cols);

/* x for a layer to in->x. QC_ERR_NONFINITE or QC_ERR_RANGE for values that the type has no place
 * for. */
QC_NODISCARD qc_status qc_validate_input_make(qc_validate_input *in, const char *layer,
                                              qc_dtype dtype, uint64_t rows, uint64_t cols,
                                              qc_error *err);

#endif
