/* Reads whole tensors, and quantized weights in the form that the matmuls take. */
#ifndef QC_CONVERT_STORED_READ_H
#define QC_CONVERT_STORED_READ_H

#include "convert/model/recipe.h"
#include "quant/quant_form.h"

/* Reads all of a tensor. Free it with qc_free, also after a failure. It is read in steps, and
 * between these Ctrl-C is looked for. */
QC_NODISCARD qc_status qc_tensor_read(const qc_checkpoint *c, const qc_checkpoint_tensor *t,
                                      qc_st_cursor *cursor, void **out, qc_error *err);

/* The arrays of a quantized weight in memory. w points into this struct, so do not copy it. */
typedef struct {
    qc_weights w;
    void *codes, *scales, *nested;
    float maps[16 + 256];
    uint64_t codes_bytes, scales_bytes, nested_bytes;
} qc_stored_arrays;

/* tensor is the index of the codes, and stored says how they are stored (recipe_stored.h). The last
 * dimension is cols; all others together are rows. QC_ERR_SHAPE for a form that the matmuls do not
 * take. Free it also after a failure. */
QC_NODISCARD qc_status qc_stored_read(qc_stored_arrays *out, const qc_checkpoint *c,
                                      uint32_t tensor, const qc_stored_weight *stored,
                                      qc_st_cursor *cursor, qc_error *err);
void qc_stored_deinit(qc_stored_arrays *a); /* accepts a struct of zeros */
/* The bytes of the codes and scales. */
uint64_t qc_stored_bytes(const qc_checkpoint *c, uint32_t tensor, const qc_stored_weight *stored);

#endif
