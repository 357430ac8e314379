/* The weights of one layer of a Llama-family model: which tensors they are, and how they lie in
 * memory while the CPU (forward_cpu.c) or a GPU (gpu_llama.c) computes the layer. */
#ifndef QC_CONVERT_FORWARD_LAYER_H
#define QC_CONVERT_FORWARD_LAYER_H

#include "convert/family/forward_shape.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/stored_read.h"
#include "quant/quant_ops.h"

/* The linear layers of a layer, by their matrices. */
typedef enum {
    QC_LLAMA_Q,
    QC_LLAMA_K,
    QC_LLAMA_V,
    QC_LLAMA_O,
    QC_LLAMA_GATE,
    QC_LLAMA_UP,
    QC_LLAMA_DOWN,
    QC_LLAMA_MATRICES, /* those of Llama */
    /* Of multi-head latent attention, where Q gives what Q_B makes q of (or q itself), K what KV_B
     * makes keys and values of, and there is no V. */
    QC_LLAMA_Q_B = QC_LLAMA_MATRICES,
    QC_LLAMA_KV_B,
    QC_LLAMA_ALL_MATRICES
} qc_llama_which;

/* The points in a layer at which the inputs of linear layers are. */
typedef enum {
    QC_LLAMA_AT_QKV, /* computed from the hidden states before the layer */
    QC_LLAMA_AT_Q_B, /* of multi-head latent attention; computed as the former */
    QC_LLAMA_AT_KV_B,
    QC_LLAMA_AT_O, /* computed from the hidden states before the layer */
    /* The inputs of gate and up. They are computed from the inputs of o and from the hidden states
     * before the layer, which then become those behind attention. */
    QC_LLAMA_AT_GATE,
    QC_LLAMA_AT_DOWN, /* computed from the hidden states behind attention */
    /* The end of the layer. The hidden states behind attention become those behind the layer. */
    QC_LLAMA_AT_END
} qc_llama_point;

typedef enum {
    QC_LLAMA_INPUT_NORM,    /* of the hidden states before attention */
    QC_LLAMA_ATTENDED_NORM, /* of what attention adds to them */
    QC_LLAMA_POST_NORM,     /* of the hidden states behind attention */
    QC_LLAMA_FFN_NORM,      /* of what the feed-forward part adds to them */
    QC_LLAMA_Q_NORM,
    QC_LLAMA_K_NORM,
    QC_LLAMA_Q_A_NORM, /* of what Q_B and KV_B get */
    QC_LLAMA_KV_A_NORM,
    QC_LLAMA_NORMS,
    QC_LLAMA_SINKS = QC_LLAMA_NORMS, /* no norm: qc_attend_io's */
    QC_LLAMA_VECTORS
} qc_llama_vector;

/* What a gate goes through. */
typedef enum { QC_LLAMA_SILU, QC_LLAMA_GELU_TANH } qc_llama_gate;

/* What the feed-forward part of a layer is. */
typedef enum {
    QC_LLAMA_DENSE,  /* gate, up and down */
    QC_LLAMA_EXPERTS /* a router and experts */
} qc_llama_ffn;

/* ---- in the checkpoint ---- */

/* The names of a layer's tensors, below "model.layers.N.". NULL: the family does not have it. A
 * matrix that holds the rows of those behind it as well stands for them: qkv_proj at Q where there
 * are no K and V, gate_up_proj at GATE where there is no UP. */
struct qc_llama_names {
    const char *matrices[QC_LLAMA_ALL_MATRICES];
    const char *vectors[QC_LLAMA_VECTORS];
};

typedef struct qc_experts_layer qc_experts_layer; /* experts_layer.h */

typedef struct {
    /* Either is QC_NO_TENSOR if there is none: a family has not all matrices. rows is 0 then. */
    uint32_t tensor, bias;
    const qc_stored_weight *stored; /* if it is quantized, else NULL */
    /* if it is FP8, which is decoded to float when it is read; else NULL */
    const qc_coded_weight *coded;
    uint64_t rows, cols;
    uint64_t read_bytes, memory_bytes;
} qc_llama_linear;

typedef struct {
    qc_llama_linear linear[QC_LLAMA_ALL_MATRICES];
    const qc_experts_layer *experts;    /* NULL: the layer is dense */
    uint32_t vectors[QC_LLAMA_VECTORS]; /* QC_NO_TENSOR if the family does not have it */
    qc_llama_ffn ffn;
    float norms_add; /* is added to the weights of norms when they are read: 0 or 1 */
    uint64_t read_bytes, memory_bytes;
} qc_llama_layer;

typedef struct {
    qc_llama_shape shape;
    qc_llama_layer *layers;
    uint32_t embedding, norm;
    uint32_t own_head; /* lm_head.weight, which a tied model may have, or QC_NO_TENSOR */
    qc_llama_linear head;
} qc_llama_tensors;

/* Finds every tensor and checks its shape and type. QC_ERR_INPUT for a missing tensor, QC_ERR_SHAPE
 * for a wrong shape, QC_ERR_UNSUPPORTED for a type that qconv does not compute with. Memory is in
 * the arena. */
QC_NODISCARD qc_status qc_llama_tensors_find(qc_llama_tensors *out, qc_arena *arena,
                                             const qc_checkpoint *c, qc_error *err);

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
} qc_llama_matrix;

typedef struct {
    qc_llama_matrix matrices[QC_LLAMA_ALL_MATRICES];
    float *vectors[QC_LLAMA_VECTORS]; /* NULL if the family does not have it */
} qc_llama_weights;

typedef struct {
    const qc_checkpoint *checkpoint;
    const qc_quant_ops *ops;
    qc_st_cursor *cursor;
    qc_progress *progress; /* may be NULL */
} qc_llama_source;

/* All reads respond to Ctrl-C. Free the result also after a failure; a struct of zeros may be freed
 * too. */
QC_NODISCARD qc_status qc_llama_matrix_read(qc_llama_matrix *out, const qc_llama_source *s,
                                            const qc_llama_linear *l, qc_error *err);
void qc_llama_matrix_deinit(qc_llama_matrix *m);
QC_NODISCARD qc_status qc_llama_weights_read(qc_llama_weights *out, const qc_llama_source *s,
                                             const qc_llama_layer *l, qc_error *err);
void qc_llama_weights_deinit(qc_llama_weights *w);
/* Reads a vector as floats. */
QC_NODISCARD qc_status qc_llama_vector_read(float **out, const qc_llama_source *s, uint32_t tensor,
                                            qc_error *err);
/* Reads the weights of the norm behind the last layer. */
QC_NODISCARD qc_status qc_llama_last_norm_read(float **out, const qc_llama_source *s,
                                               const qc_llama_tensors *t, qc_error *err);
/* The tokens of the longest window of a batch. */
uint64_t qc_llama_longest(const qc_llama_batch *b);
/* QC_ERR_NONFINITE if any of the n floats is not finite. */
QC_NODISCARD qc_status qc_llama_finite(const float *x, uint64_t n, qc_error *err);
/* Reads rows of the embedding into out [n, hidden]. The ids may be in any order. */
QC_NODISCARD qc_status qc_llama_embed(const qc_llama_source *s, const qc_llama_tensors *t,
                                      const uint32_t *ids, uint64_t n, float *out, qc_error *err);

#endif
