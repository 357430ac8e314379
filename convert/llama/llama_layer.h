/* The weights of one layer of a Llama-family model: which tensors they are, and as they lie in
 * memory while the layer is computed, on the CPU (llama_forward.c) or on a GPU (llama_device.c). */
#ifndef QC_CONVERT_LLAMA_LAYER_H
#define QC_CONVERT_LLAMA_LAYER_H

#include "convert/llama/llama_config.h"
#include "convert/llama/llama_stage.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/stored_read.h"
#include "quant/quant_ops.h"

typedef enum {
    QC_LLAMA_INPUT_NORM,
    QC_LLAMA_POST_NORM,
    QC_LLAMA_Q_NORM,
    QC_LLAMA_K_NORM,
    QC_LLAMA_VECTORS
} qc_llama_vector;

/* ---- in the checkpoint ---- */

typedef struct {
    uint32_t tensor, bias;          /* QC_NO_TENSOR: no bias */
    const qc_stored_weight *stored; /* quantized, else NULL */
    const qc_coded_weight *coded;   /* FP8: decoded to float when read; else NULL */
    uint64_t rows, cols;
    uint64_t read_bytes, memory_bytes;
} qc_llama_linear;

typedef struct {
    qc_llama_linear linear[QC_LLAMA_MATRICES];
    uint32_t vectors[QC_LLAMA_VECTORS]; /* QC_NO_TENSOR where the family has none */
    uint64_t read_bytes, memory_bytes;
} qc_llama_layer;

typedef struct {
    qc_llama_shape shape;
    qc_llama_layer *layers;
    uint32_t embedding, norm;
    qc_llama_linear head;
} qc_llama_tensors;

/* Finds every tensor and checks its shape and type. QC_ERR_INPUT for a missing one, QC_ERR_SHAPE,
 * QC_ERR_UNSUPPORTED for a type that is not computed. Memory in the arena. */
QC_NODISCARD qc_status qc_llama_tensors_find(qc_llama_tensors *out, qc_arena *arena,
                                             const qc_checkpoint *c, qc_error *err);

/* ---- in memory ---- */

/* y = x W^T + bias; W [rows, cols]. */
typedef struct {
    uint64_t rows, cols;
    const qc_weights *quantized; /* &arrays.w, or NULL: dense */
    const void *dense;
    qc_dtype dtype;    /* of dense: F32, F16 or BF16 */
    const float *bias; /* [rows] or NULL */
    qc_stored_arrays arrays;
    void *owned, *owned_bias;
} qc_llama_matrix;

typedef struct {
    qc_llama_matrix matrices[QC_LLAMA_MATRICES];
    float *vectors[QC_LLAMA_VECTORS]; /* NULL where the family has none */
} qc_llama_weights;

typedef struct {
    const qc_checkpoint *checkpoint;
    const qc_quant_ops *ops;
    qc_st_cursor *cursor;
    qc_progress *progress; /* NULL is fine */
} qc_llama_source;

/* All reads answer Ctrl-C. To be freed also after a failure; zeros are fine to free. */
QC_NODISCARD qc_status qc_llama_matrix_read(qc_llama_matrix *out, const qc_llama_source *s,
                                            const qc_llama_linear *l, qc_error *err);
void qc_llama_matrix_deinit(qc_llama_matrix *m);
QC_NODISCARD qc_status qc_llama_weights_read(qc_llama_weights *out, const qc_llama_source *s,
                                             const qc_llama_layer *l, qc_error *err);
void qc_llama_weights_deinit(qc_llama_weights *w);
/* A vector as floats. */
QC_NODISCARD qc_status qc_llama_vector_read(float **out, const qc_llama_source *s, uint32_t tensor,
                                            qc_error *err);
/* QC_ERR_NONFINITE where any of n floats is not finite. */
QC_NODISCARD qc_status qc_llama_finite(const float *x, uint64_t n, qc_error *err);
/* Rows of the embedding, ids in any order: out [n, hidden]. */
QC_NODISCARD qc_status qc_llama_embed(const qc_llama_source *s, const qc_llama_tensors *t,
                                      const uint32_t *ids, uint64_t n, float *out, qc_error *err);

#endif
