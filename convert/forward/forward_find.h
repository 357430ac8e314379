/* Finds the tensors that a layer asks for, and checks their shapes and types. For the files that
 * find tensors of layers (forward_tensors.c, experts_layer.c). */
#ifndef QC_CONVERT_FORWARD_FIND_H
#define QC_CONVERT_FORWARD_FIND_H

#include "convert/forward/forward_layer.h"
#include "convert/model/recipe_stored.h"

typedef struct {
    const qc_checkpoint *c;
    qc_arena *arena;
    const char *prefix; /* in front of "layers.N." */
    int turned;         /* dense matrices lie as [cols, rows] */
    qc_stored_set stored;
    qc_coded_set coded;
} qc_forward_finder;

/* Fails: the tensor that config.json asks for is not there. */
QC_NODISCARD qc_status qc_forward_missing(const qc_forward_finder *f, const char *name,
                                          qc_error *err);
/* Finds a tensor of floats that is neither quantized nor coded. */
QC_NODISCARD qc_status qc_forward_find_plain(const qc_forward_finder *f, const char *name,
                                             const uint64_t *dims, unsigned ndim, uint32_t *out,
                                             qc_error *err);
QC_NODISCARD qc_status qc_forward_find_vector(const qc_forward_finder *f, const char *name,
                                              uint64_t n, uint32_t *out, qc_error *err);
/* Finds module.weight, which may be quantized or coded, and module.bias if `bias`. */
QC_NODISCARD qc_status qc_forward_find_linear(const qc_forward_finder *f, const char *module,
                                              uint64_t rows, uint64_t cols, int bias,
                                              qc_forward_linear *out, qc_error *err);

#endif
