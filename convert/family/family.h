/* What distinguishes the families of models that the forward pass computes. A family is one file,
 * family_*.c, with a row for each of its types: how a layer's tensors are called, how its attention
 * and its feed-forward part compute, and what a missing field of config.json means. What a row
 * cannot say, a function of the family reads. */
#ifndef QC_CONVERT_FAMILY_H
#define QC_CONVERT_FAMILY_H

#include "convert/family/forward_shape.h"

enum {
    QC_FAMILY_QKV_BIAS = 1 << 0,             /* q, k and v have biases, whatever config.json says */
    QC_FAMILY_READS_ATTENTION_BIAS = 1 << 1, /* attention_bias: q, k and v have them */
    QC_FAMILY_OUT_BIAS = 1 << 2,             /* and so has o */
    QC_FAMILY_BIASED = 1 << 3,               /* where attention_bias is missing, it is true */
    QC_FAMILY_READS_MLP_BIAS = 1 << 4,
    QC_FAMILY_WIDE_NORMS = 1 << 5,    /* norms of q and k go over all heads, else over each */
    QC_FAMILY_NORMS_ADD_ONE = 1 << 6, /* norms multiply by 1 + weight */
    QC_FAMILY_TIED = 1 << 7,          /* where tie_word_embeddings is missing, it is true */
    QC_FAMILY_READS_PART = 1 << 8,    /* partial_rotary_factor */
    QC_FAMILY_SIDE_BY_SIDE = 1 << 9,  /* a rotary pair is two neighbours, else i and i + half */
    QC_FAMILY_SU_IS_LONGROPE = 1 << 10 /* rotary types "su" and "yarn" are "longrope" */,
    QC_FAMILY_LOCAL_ROPE = 1 << 11,    /* layers that slide have rotary parameters of their own */
    QC_FAMILY_READS_PATTERN = 1 << 12, /* sliding_window_pattern */
    QC_FAMILY_TEXT_CONFIG = 1 << 13,   /* the fields are in text_config */
    QC_FAMILY_SCALES_SCORES = 1 << 14, /* by the square of YaRN's mscale_all_dim */
    QC_FAMILY_MLP_BIAS = 1 << 16,      /* whatever config.json says */
    QC_FAMILY_LAYER_NORMS = 1 << 17,   /* norms subtract the mean and have biases */
    QC_FAMILY_UNGATED = 1 << 18,       /* feed-forward parts have no gate */
    QC_FAMILY_BY_HEAD = 1 << 19,       /* q, k and v of a head lie one behind the other */
    /* Positions are learned vectors that are added to the embedding, and nothing is turned. */
    QC_FAMILY_LEARNED_POSITIONS = 1 << 20,
    QC_FAMILY_CONV1D = 1 << 21,     /* matrices of layers with 16 or 32 bits are stored [in, out] */
    QC_FAMILY_NORMS_SUMS = 1 << 22, /* norms of what is added norm the sum instead */
    /* There is no head, and a token sees all tokens of its window. All architectures count whose
     * name begins as the row says, as their heads change no hidden state. */
    QC_FAMILY_ENCODER = 1 << 23
};

/* How the fields of config.json are called. NULL: the family does not read it. */
typedef struct {
    const char *layers, *hidden, *intermediate, *heads, *kv_heads, *head_dim, *context, *norm_eps;
    const char *gate;
} qc_family_fields;

extern const qc_family_fields qc_family_fields_bert; /* GPT-NeoX has them, too */

/* Which layers see only the last sliding_window positions. */
typedef enum {
    QC_SLIDES_NEVER,
    QC_SLIDES_ALWAYS,
    /* As layer_types says; and where it is missing: */
    QC_SLIDES_FROM,     /* with use_sliding_window, those from max_window_layers on */
    QC_SLIDES_UNTURNED, /* with use_sliding_window, those without rotary positions */
    QC_SLIDES_PATTERN   /* all but each pattern-th */
} qc_family_slides;

/* What config.json is read into, and from where. */
typedef struct {
    qc_forward_shape *out;
    qc_arena *arena;
    const qc_json_node *top;  /* of config.json */
    const qc_json_node *root; /* its fields: top, or text_config */
    const qc_family *family;
    double theta, rotary_part; /* where the fields are missing; the family's, unless `read` says */
    int images;                /* layers that see the states of images are to be computed */
} qc_family_reader;

struct qc_family {
    const char *model_type, *architecture;
    const char *other_architecture; /* means the same; NULL: there is none */
    /* With a blank between: "a. " is "a." or nothing. NULL: "model.". The first that the file has
     * counts. */
    const char *prefixes;
    const qc_family_fields *fields; /* NULL: those of Llama */
    const qc_layer_names *names;
    const qc_layer_names *cross_names; /* of layers that see the states of images; NULL: none */
    const qc_outer_names *outer;       /* NULL: those of Llama */
    qc_layer_ffn ffn;                  /* of its layers */
    qc_layer_gate gate;
    qc_family_slides slides;
    unsigned traits; /* QC_FAMILY_* */
    /* Reads what is the family's own, behind sizes and before rotary positions and windows. NULL:
     * there is nothing. */
    qc_status (*read)(qc_family_reader *r, qc_error *err);
    /* Where the fields are missing: */
    uint64_t heads;      /* 0: the field has to be there */
    uint64_t kv_heads;   /* 0: as many as heads */
    uint64_t head_dim;   /* 0: hidden / heads */
    uint64_t vocabulary; /* 0: the field has to be there */
    uint64_t wider;      /* intermediate is so many times hidden; 0: the field has to be there */
    uint64_t window;     /* 0: none */
    uint64_t pattern;
    double theta;       /* 0: 10000 */
    double local_theta; /* of layers that slide, with QC_FAMILY_LOCAL_ROPE; 0: as of the others */
    double rotary_part; /* 0: 1 */
    double norm_eps;    /* 0: 1e-6 */
    int64_t bos, eos;   /* -1: none */
};

/* Returns NULL where the type is not computed. */
const qc_family *qc_family_of(const char *model_type);
#define QC_FAMILY_LIST_BYTES 512
/* Writes "llama, mistral, qwen2 and qwen3". Returns text. */
const char *qc_family_list(char text[QC_FAMILY_LIST_BYTES]);

/* ---- names that several families have ---- */

#define QC_NAMES_QKV                                                                               \
    [QC_LAYER_Q] = "self_attn.q_proj", [QC_LAYER_K] = "self_attn.k_proj",                          \
    [QC_LAYER_V] = "self_attn.v_proj", [QC_LAYER_O] = "self_attn.o_proj"
#define QC_NAMES_GATED                                                                             \
    [QC_LAYER_GATE] = "mlp.gate_proj", [QC_LAYER_UP] = "mlp.up_proj",                              \
    [QC_LAYER_DOWN] = "mlp.down_proj"
#define QC_NAMES_GATE_UP [QC_LAYER_GATE] = "mlp.gate_up_proj", [QC_LAYER_DOWN] = "mlp.down_proj"
#define QC_NAMES_TWO_NORMS                                                                         \
    [QC_LAYER_INPUT_NORM] = "input_layernorm", [QC_LAYER_POST_NORM] = "post_attention_layernorm"
#define QC_NAMES_QK_NORMS                                                                          \
    [QC_LAYER_Q_NORM] = "self_attn.q_norm", [QC_LAYER_K_NORM] = "self_attn.k_norm"

extern const qc_layer_names qc_layer_names_plain; /* those of Llama */

/* ---- the types of each file ---- */

extern const qc_family qc_family_llama[6];
extern const qc_family qc_family_gemma[4];
extern const qc_family qc_family_phi3[1];
extern const qc_family qc_family_granite[1];
extern const qc_family qc_family_olmo2[2];
extern const qc_family qc_family_smollm3[1];
extern const qc_family qc_family_glm4[2];
extern const qc_family qc_family_deepseek[2];
extern const qc_family qc_family_mixtures[5];
extern const qc_family qc_family_gpt_oss[1];
extern const qc_family qc_family_gpt2[1];
extern const qc_family qc_family_gpt_neox[1];
extern const qc_family qc_family_bert[4];

#endif
