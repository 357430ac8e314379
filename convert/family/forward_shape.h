/* What config.json says about how a model computes. Fields are read as
 * transformers 4 and 5 read them, with their defaults. Whatever would make the model compute
 * differently from convert/forward is refused by name. */
#ifndef QC_CONVERT_FAMILY_FORWARD_SHAPE_H
#define QC_CONVERT_FAMILY_FORWARD_SHAPE_H

#include "convert/family/experts_shape.h"
#include "convert/family/layer_names.h"
#include "convert/family/rope.h"

typedef struct qc_family qc_family; /* family.h */

/* The shape of a model, from config.json. */
typedef struct {
    const char *model_type;
    uint64_t layers; /* that are computed */
    uint64_t hidden, intermediate, heads, kv_heads, head_dim, vocabulary;
    uint64_t ids;     /* what ids of tokens are below: vocabulary, and more with images */
    uint64_t context; /* max_position_embeddings, as many as are used; 0: config.json is silent */
    double norm_eps;
    int tied;         /* the head is the embedding */
    int encoder;      /* there is no head, and a token sees all tokens of its window */
    int64_t bos, eos; /* -1: none */
} qc_forward_config;

/* What turns q and k of a layer. */
typedef enum {
    QC_LAYER_TURNED,       /* rotary positions */
    QC_LAYER_TURNED_LOCAL, /* those of local_rope */
    QC_LAYER_UNTURNED      /* none: the layer knows no positions */
} qc_layer_turn;

typedef struct {
    qc_forward_config config;
    const qc_family *family;
    const qc_layer_names *names; /* of the tensors of a layer */
    const qc_outer_names *outer; /* of those around */
    qc_rope rope, local_rope;
    qc_experts_shape experts;
    /* [config.layers]: the numbers of the layers in names, where not all are computed; else NULL */
    uint64_t *numbers;
    uint64_t media_rows;   /* of the embedding, behind those of the vocabulary */
    unsigned char *cross;  /* [layers]: those that see the states of images; NULL: there are none */
    uint64_t image_token;  /* the id from which on tokens see their image */
    uint64_t image_tokens; /* of the largest image, which the forward pass keeps room for */
    /* Of learned positions, the row of the first; the token with the number before it has none of
     * its own, and is not counted (RoBERTa's padding). 0: all tokens are alike. */
    uint64_t first_position;
    uint64_t types;       /* of tokens */
    unsigned char *turns; /* [layers]: qc_layer_turn */
    uint64_t *windows;    /* [layers]: how many positions a token sees, including its own; 0: all */
    int qkv_bias, out_bias, mlp_bias;
    /* Attention and the feed-forward part both get the hidden states before the layer, each behind
     * its norm. */
    int parallel;
    qc_layer_gate gate;
    /* A head of q and k is head_dim wide, and its elements from turned_from to turned_from + turned
     * are turned. A head of values is value_dim wide. */
    uint64_t turned, turned_from, value_dim;
    /* Multi-head latent attention: the widths of what q, and k and v, come from. kv_rank 0: the
     * model has none; q_rank 0: q comes from the hidden states. */
    uint64_t q_rank, kv_rank;
    double score_scale;          /* of q k^T; 0: 1 / sqrt(head_dim) */
    double score_cap, logit_cap; /* 0: none */
    double embedding_scale, residual_scale, logit_divisor;
} qc_forward_shape;

/* The number that names give to a layer. */
static inline uint64_t qc_layer_number(const qc_forward_shape *s, uint64_t layer)
{
    return s->numbers ? s->numbers[layer] : layer;
}

/* The floats of a token's heads behind attention. */
static inline uint64_t qc_forward_attended(const qc_forward_shape *s)
{
    return s->config.heads * s->value_dim;
}

/* Strings and arrays live in the arena. QC_ERR_UNSUPPORTED for what qconv does not compute,
 * QC_ERR_INPUT for impossible values. Messages start with "config.json". */
QC_NODISCARD qc_status qc_forward_shape_read(qc_forward_shape *out, qc_arena *arena,
                                             const qc_json *config, qc_error *err);
/* The same with the layers that see the states of images. QC_ERR_UNSUPPORTED where there are none;
 * the message names --image-states. */
QC_NODISCARD qc_status qc_forward_shape_read_images(qc_forward_shape *out, qc_arena *arena,
                                                    const qc_json *config, qc_error *err);

#endif
