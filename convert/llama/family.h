/* What distinguishes the families of models that the forward pass computes. A family is one file,
 * family_*.c, with a row for each of its types: how a layer's tensors are called, how its attention
 * and its feed-forward part compute, and what a missing field of config.json means. Whatever a row
 * cannot say is read by a function of the family. */
#ifndef QC_CONVERT_LLAMA_FAMILY_H
#define QC_CONVERT_LLAMA_FAMILY_H

#include "convert/llama/llama_layer.h"

/* The names of a layer's tensors, below "model.layers.N.". NULL: the family does not have it. */
typedef struct {
    const char *matrices[QC_LLAMA_MATRICES];
    const char *vectors[QC_LLAMA_VECTORS];
} qc_llama_names;

enum {
    QC_FAMILY_QKV_BIAS = 1,             /* q, k and v have biases, whatever config.json says */
    QC_FAMILY_READS_ATTENTION_BIAS = 2, /* attention_bias: q, k, v and o have them */
    QC_FAMILY_READS_MLP_BIAS = 4,
    QC_FAMILY_HEAD_NORMS = 8, /* q and k have norms for each head */
    /* sliding_window is that of every layer; or as use_sliding_window and layer_types say */
    QC_FAMILY_SLIDES = 16,
    QC_FAMILY_SLIDES_IF_ASKED = 32,
    QC_FAMILY_ON_GPU = 64 /* gpu_llama.c computes it, too */
};

struct qc_llama_family {
    const char *model_type, *architecture;
    const char *other_architecture; /* means the same; NULL: there is none */
    const qc_llama_names *names;
    qc_llama_ffn ffn; /* of its layers */
    unsigned traits;  /* QC_FAMILY_* */
    /* Where the fields are missing: */
    uint64_t kv_heads; /* 0: as many as heads */
    uint64_t head_dim; /* 0: hidden / heads */
    int64_t bos, eos;
    double theta, norm_eps; /* of rotary positions; 0: 10000 and 1e-6 */
};

/* Returns NULL where the type is not computed. */
const qc_llama_family *qc_llama_family_of(const char *model_type);
/* "llama, mistral, qwen2 and qwen3" */
const char *qc_llama_family_list(void);

extern const qc_llama_names qc_llama_names_plain; /* those of Llama */

/* The types of each file. */
extern const qc_llama_family qc_family_llama[4];
extern const qc_llama_family qc_family_mixtures[3];

#endif
