/* Makes the tensors of a model one after the other, in the few shapes that all families use. */
#ifndef QC_CONVERT_TENSOR_MAKER_H
#define QC_CONVERT_TENSOR_MAKER_H

#include "convert/known/model_tensors.h"
#include "convert/model/config_fields.h"
#include "convert/model/geometry.h"

typedef struct {
    qc_model_tensors *out;
    size_t capacity;
    qc_arena *arena;
    qc_config config;
    const qc_geometry *g;
    qc_dtype dtype; /* of weights */
    int mxfp4;      /* the experts are gpt-oss' MXFP4 */
    /* DeepSeek: FP8 weights with a scale per square block of this side; 0: none */
    uint64_t fp8_block;
    char prefix[96]; /* of the names that are added: "model.layers.3." */
} qc_tensor_maker;

/* Sets the prefix to base, number (unless it is UINT64_MAX) and '.'. "" clears it. */
void qc_maker_prefix(qc_tensor_maker *m, const char *base, uint64_t number);
/* Adds a tensor called prefix + name. Unused dims are 0. QC_ERR_INPUT if a dimension in use is
 * 0. */
QC_NODISCARD qc_status qc_maker_add(qc_tensor_maker *m, const char *name, qc_dtype dtype,
                                    unsigned ndim, const uint64_t *dims, qc_error *err);
QC_NODISCARD qc_status qc_maker_vector(qc_tensor_maker *m, const char *name, uint64_t n,
                                       qc_error *err);
QC_NODISCARD qc_status qc_maker_matrix(qc_tensor_maker *m, const char *name, uint64_t rows,
                                       uint64_t cols, qc_error *err);
/* Adds module.weight [out, in], with its FP8 scales if the model is FP8, and module.bias. */
QC_NODISCARD qc_status qc_maker_linear(qc_tensor_maker *m, const char *module, uint64_t out,
                                       uint64_t in, int bias, qc_error *err);
/* Adds module.weight and module.bias [n]. */
QC_NODISCARD qc_status qc_maker_layer_norm(qc_tensor_maker *m, const char *module, uint64_t n,
                                           qc_error *err);
/* Reads a field of config.json that must be there and must not be 0. */
QC_NODISCARD qc_status qc_maker_need(const qc_tensor_maker *m, const qc_json_node *object,
                                     const char *name, uint64_t max, uint64_t *out, qc_error *err);
int qc_maker_is(const qc_tensor_maker *m, const char *types);

#endif
