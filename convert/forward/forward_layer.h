/* The weights of one layer of a model: which tensors they are, and how they lie in
 * memory while forward_cpu.c computes the layer. */
#ifndef QC_CONVERT_FORWARD_LAYER_H
#define QC_CONVERT_FORWARD_LAYER_H

#include "convert/family/layer_names.h"
#include "convert/forward/forward.h"
#include "convert/forward/image_states.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/stored_read.h"
#include "quant/quant_ops.h"

/* The points in a layer at which the inputs of linear layers are. */
typedef enum {
    QC_AT_QKV,   /* computed from the hidden states before the layer */
    QC_AT_IMAGE, /* the inputs of k and v in a layer that looks at images: their states */
    QC_AT_Q_B,   /* of multi-head latent attention; computed as the former */
    QC_AT_KV_B,
    QC_AT_O, /* computed from the hidden states before the layer */
    /* The inputs of gate and up. They are computed from the inputs of o and from the hidden states
     * before the layer, which then become those behind attention. In a parallel layer they are
     * computed from the hidden states before the layer, which stay until the end. */
    QC_AT_GATE,
    QC_AT_DOWN, /* computed from the hidden states that AT_GATE left */
    /* The end of the layer. The hidden states become those behind the layer; a parallel one reads
     * the inputs of o for that. */
    QC_AT_END
} qc_forward_point;

/* ---- in the checkpoint ---- */

typedef struct qc_experts_layer qc_experts_layer; /* experts_layer.h */

typedef struct {
    /* Either is QC_NO_TENSOR if there is none: a family has not all matrices. rows is 0 then. */
    uint32_t tensor, bias;
    const qc_stored_weight *stored; /* if it is quantized, else NULL */
    /* if it is FP8, which is decoded to float when it is read; else NULL */
    const qc_coded_weight *coded;
    uint64_t rows, cols;
    int turned; /* it is dense and lies as [cols, rows] */
    uint64_t read_bytes, memory_bytes;
} qc_forward_linear;

typedef struct {
    qc_forward_linear linear[QC_LAYER_ALL_MATRICES];
    const qc_experts_layer *experts; /* NULL: the layer is dense */
    /* QC_NO_TENSOR if the family does not have it */
    uint32_t vectors[QC_LAYER_VECTORS], biases[QC_LAYER_NORMS];
    qc_layer_ffn ffn;
    float norms_add; /* is added to the weights of norms when they are read: 0 or 1 */
    uint64_t read_bytes, memory_bytes;
} qc_forward_layer;

typedef struct {
    qc_forward_shape shape;
    qc_forward_layer *layers;
    uint32_t embedding;
    uint32_t norm, norm_bias; /* norm: QC_NO_TENSOR if there is none behind the last layer */
    /* Rows that are added to the embedding, and the norm of the sum; or QC_NO_TENSOR. */
    uint32_t positions, types, embedded, embedded_bias;
    uint32_t own_head;      /* lm_head.weight, which a tied model may have, or QC_NO_TENSOR */
    qc_forward_linear head; /* of an encoder its tensor is QC_NO_TENSOR */
} qc_forward_tensors;

/* Finds every tensor and checks its shape and type. images: what the layers that look at images are
 * to see; NULL: these layers are left out. QC_ERR_INPUT for a missing tensor, QC_ERR_SHAPE
 * for a wrong shape, QC_ERR_UNSUPPORTED for a type that qconv does not compute with. Memory is in
 * the arena. */
QC_NODISCARD qc_status qc_forward_tensors_find(qc_forward_tensors *out, qc_arena *arena,
                                               const qc_checkpoint *c,
                                               const qc_image_states *images, qc_error *err);

/* ---- in memory ---- */

/* y = x W^T + bias; W [rows, cols]. rows 0: the layer does not have it. */
typedef struct {
    uint64_t rows, cols;
    const qc_weights *quantized; /* &arrays.w, or NULL if it is dense */
    const void *dense;
    qc_dtype dtype;    /* of the dense weights: F32, F16 or BF16 */
    const float *bias; /* [rows] or NULL */
    qc_stored_arrays arrays;
    void *owned, *owned_bias;
} qc_forward_matrix;

typedef struct {
    qc_forward_matrix matrices[QC_LAYER_ALL_MATRICES];
    /* NULL if the family does not have it. A norm's biases are behind its weights. */
    float *vectors[QC_LAYER_VECTORS];
} qc_forward_weights;

typedef struct {
    const qc_checkpoint *checkpoint;
    const qc_quant_ops *ops;
    qc_st_cursor *cursor;
    qc_progress *progress; /* may be NULL */
} qc_forward_source;

/* All reads respond to Ctrl-C. Free the result also after a failure; a struct of zeros may be freed
 * too. */
QC_NODISCARD qc_status qc_forward_matrix_read(qc_forward_matrix *out, const qc_forward_source *s,
                                              const qc_forward_linear *l, qc_error *err);
void qc_forward_matrix_deinit(qc_forward_matrix *m);
QC_NODISCARD qc_status qc_forward_weights_read(qc_forward_weights *out, const qc_forward_source *s,
                                               const qc_forward_layer *l, qc_error *err);
void qc_forward_weights_deinit(qc_forward_weights *w);
/* Reads a vector as floats. */
QC_NODISCARD qc_status qc_forward_vector_read(float **out, const qc_forward_source *s,
                                              uint32_t tensor, qc_error *err);
/* Reads the weights of a norm, to which add is added, and behind them its biases if there are any.
 */
QC_NODISCARD qc_status qc_forward_norm_read(float **out, const qc_forward_source *s,
                                            uint32_t tensor, uint32_t bias, float add,
                                            qc_error *err);
/* Reads the norm behind the last layer so. *out is NULL if there is none. */
QC_NODISCARD qc_status qc_forward_last_norm_read(float **out, const qc_forward_source *s,
                                                 const qc_forward_tensors *t, qc_error *err);
/* The tokens of the longest window of a batch. */
uint64_t qc_forward_longest(const qc_forward_batch *b);
/* QC_ERR_NONFINITE if any of the n floats is not finite. */
QC_NODISCARD qc_status qc_forward_finite(const float *x, uint64_t n, qc_error *err);
/* The bytes that qc_forward_embed needs for learned positions. Saturates. */
uint64_t qc_forward_embed_bytes(const qc_forward_tensors *t, uint64_t longest);
/* Reads what the first layer gets into out [tokens, hidden]: rows of the embedding, to which those
 * of types and learned positions are added, behind a norm where there is one. The ids may be in any
 * order. QC_ERR_UNSUPPORTED for a window that is longer than the learned positions. */
QC_NODISCARD qc_status qc_forward_embed(const qc_forward_source *s, const qc_forward_tensors *t,
                                        const qc_forward_batch *batch, float *out, qc_error *err);

#endif
