/* The activations to multiply with: random ones, or captured ones from a file.
 *
 * Random activations are independent and normally distributed with mean 0 and variance 1, and are
 * then rounded to the 16-bit type. Element (r, k) depends only on the seed, the number of columns,
 * r and k. So more rows leave the first ones as they are, and layers of equal width see the same x.
 *
 * Captured activations come from a .safetensors file of F64, F32, F16 or BF16 tensors [..., K]. A
 * layer uses the tensor that has the name of its weight ("model.layers.0.mlp.up_proj.weight"), or
 * of its module (without ".weight"), or of the number of columns ("4096"). Of its rows (all
 * dimensions but the last), as many as are wanted are taken, evenly spread; if there are fewer,
 * they repeat. */
#ifndef QC_CONVERT_VALIDATE_INPUT_H
#define QC_CONVERT_VALIDATE_INPUT_H

#include "base/dtype.h"
#include "formats/checkpoint.h"
#include "quant/quant_ops.h"

typedef struct {
    uint64_t seed;
    qc_checkpoint *file; /* captured activations; NULL: they are random */
    qc_st_cursor *cursor;
    const qc_quant_ops *ops;

    /* the last ones that were made */
    void *x; /* [rows, cols] of dtype F16 or BF16 */
    qc_dtype dtype;
    uint64_t rows, cols;
    int of_random;
} qc_validate_input;

/* path is NULL for random activations. */
QC_NODISCARD qc_status qc_validate_input_open(qc_validate_input *in, const char *path,
                                              uint64_t seed, const qc_quant_ops *ops,
                                              qc_error *err);
void qc_validate_input_close(qc_validate_input *in); /* accepts a struct of zeros */

/* Are there activations for this layer? Returns the tensor's name (in the file's memory), or NULL
 * if there are none; for random ones it is always "". */
const char *qc_validate_input_find(const qc_validate_input *in, const char *layer, uint64_t cols);

/* Makes x for a layer in in->x. QC_ERR_NONFINITE or QC_ERR_RANGE for values that the type cannot
 * hold. */
QC_NODISCARD qc_status qc_validate_input_make(qc_validate_input *in, const char *layer,
                                              qc_dtype dtype, uint64_t rows, uint64_t cols,
                                              qc_error *err);

#endif
