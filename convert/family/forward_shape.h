/* What config.json says about how a model of the Llama family computes. Fields are read as
 * transformers 4 and 5 read them, with their defaults. Whatever would make the model compute
 * differently from llama.c is refused by name. */
#ifndef QC_CONVERT_FAMILY_FORWARD_SHAPE_H
#define QC_CONVERT_FAMILY_FORWARD_SHAPE_H

#include "convert/family/experts_shape.h"
#include "convert/forward/forward.h"
#include "convert/family/rope.h"

typedef struct qc_llama_family qc_llama_family; /* family.h */
typedef struct qc_llama_names qc_llama_names;   /* forward_layer.h */

/* What turns q and k of a layer. */
typedef enum {
    QC_LLAMA_TURNED,       /* rotary positions */
    QC_LLAMA_TURNED_LOCAL, /* those of local_rope */
    QC_LLAMA_UNTURNED      /* none: the layer knows no positions */
} qc_llama_turn;

typedef struct {
    qc_llama_config config;
    const qc_llama_family *family;
    const qc_llama_names *names; /* of the tensors of a layer */
    qc_rope rope, local_rope;
    qc_experts_shape experts;
    /* [config.layers]: the numbers of the layers in names, where not all are computed; else NULL */
    uint64_t *numbers;
    uint64_t media_rows;  /* of the embedding, behind those of the vocabulary */
    unsigned char *turns; /* [layers]: qc_llama_turn */
    uint64_t *windows;    /* [layers]: how many positions a token sees, including its own; 0: all */
    int qkv_bias, out_bias, mlp_bias;
    /* A head of q and k is head_dim wide, and its elements from turned_from to turned_from + turned
     * are turned. A head of values is value_dim wide. */
    uint64_t turned, turned_from, value_dim;
    /* Multi-head latent attention: the widths of what q, and k and v, come from. kv_rank 0: the
     * model has none; q_rank 0: q comes from the hidden states. */
    uint64_t q_rank, kv_rank;
    double score_scale;          /* of q k^T; 0: 1 / sqrt(head_dim) */
    double score_cap, logit_cap; /* 0: none */
    double embedding_scale, residual_scale, logit_divisor;
} qc_llama_shape;

/* The number that names give to a layer. */
static inline uint64_t qc_llama_layer_number(const qc_llama_shape *s, uint64_t layer)
{
    return s->numbers ? s->numbers[layer] : layer;
}

/* The floats of a token's heads behind attention. */
static inline uint64_t qc_llama_attended(const qc_llama_shape *s)
{
    return s->config.heads * s->value_dim;
}

/* Strings and arrays live in the arena. QC_ERR_UNSUPPORTED for what qconv does not compute,
 * QC_ERR_INPUT for impossible values. Messages start with "config.json". */
QC_NODISCARD qc_status qc_llama_shape_read(qc_llama_shape *out, qc_arena *arena,
                                           const qc_json *config, qc_error *err);

#endif
