/* What a layer of a model may consist of, and how the tensors of it are called. */
#ifndef QC_CONVERT_FAMILY_LAYER_NAMES_H
#define QC_CONVERT_FAMILY_LAYER_NAMES_H

/* The linear layers of a layer, by their matrices. */
typedef enum {
    QC_LAYER_Q,
    QC_LAYER_K,
    QC_LAYER_V,
    QC_LAYER_O,
    QC_LAYER_GATE,
    QC_LAYER_UP,
    QC_LAYER_DOWN,
    QC_LAYER_MATRICES, /* those of Llama */
    /* Of multi-head latent attention, where Q gives what Q_B makes q of (or q itself), K what KV_B
     * makes keys and values of, and there is no V. */
    QC_LAYER_Q_B = QC_LAYER_MATRICES,
    QC_LAYER_KV_B,
    QC_LAYER_ALL_MATRICES
} qc_layer_which;

typedef enum {
    QC_LAYER_INPUT_NORM,    /* of the hidden states before attention */
    QC_LAYER_ATTENDED_NORM, /* of what attention adds to them, or of the sum (NORMS_SUMS) */
    QC_LAYER_POST_NORM,     /* of the hidden states behind attention */
    QC_LAYER_FFN_NORM,      /* the same of the feed-forward part */
    QC_LAYER_Q_NORM,
    QC_LAYER_K_NORM,
    QC_LAYER_Q_A_NORM, /* of what Q_B and KV_B get */
    QC_LAYER_KV_A_NORM,
    QC_LAYER_NORMS,
    QC_LAYER_SINKS = QC_LAYER_NORMS, /* no norm: qc_attend_io's */
    QC_LAYER_ATTENDED_GATE,          /* one number, whose tanh multiplies what attention adds */
    QC_LAYER_FFN_GATE,               /* the same of the feed-forward part */
    QC_LAYER_VECTORS
} qc_layer_vector;

/* What a gate goes through, or what is between the two matrices of a feed-forward part that has
 * none. */
typedef enum { QC_LAYER_SILU, QC_LAYER_GELU_TANH, QC_LAYER_GELU, QC_LAYER_RELU } qc_layer_gate;

/* What the feed-forward part of a layer is. */
typedef enum {
    QC_LAYER_DENSE,  /* gate, up and down; or only the first and the last of them */
    QC_LAYER_EXPERTS /* a router and experts */
} qc_layer_ffn;

/* The names of a layer's tensors, below "model.layers.N.". NULL: the family does not have it. A
 * matrix that holds the rows of those behind it as well stands for them: qkv_proj at Q where there
 * are no K and V, gate_up_proj at GATE where there is no UP. */
typedef struct qc_layer_names {
    const char *matrices[QC_LAYER_ALL_MATRICES];
    const char *vectors[QC_LAYER_VECTORS];
} qc_layer_names;

/* The names of what is around the layers, with what is in front of a layer's number. All are below
 * the prefix but for the head. NULL: the family does not have it. */
typedef struct {
    const char *layers;    /* "layers." */
    const char *embedding; /* "embed_tokens" */
    const char *positions; /* learned ones, which are added to the embedding */
    const char *types;     /* of tokens, of which the first is added */
    const char *embedded;  /* the norm of that sum */
    const char *norm;      /* behind the last layer */
    const char *head;      /* "lm_head" */
} qc_outer_names;

#endif
