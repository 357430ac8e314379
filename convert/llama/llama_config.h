/* What config.json says about how a model of the Llama family computes, field by field as
 * transformers 4 and 5 read it, with their defaults; whatever would make it compute otherwise than
 * llama.c does is refused by name. */
#ifndef QC_CONVERT_LLAMA_CONFIG_H
#define QC_CONVERT_LLAMA_CONFIG_H

#include "convert/llama/llama.h"

/* Rotary positions: dimension pair i of a head turns by position * frequency i.
 * Sources: Su et al. 2021 (RoPE); linear: Chen et al. 2023; dynamic: base changed beyond the
 * context only; llama3: Llama 3.1's by wavelength; yarn: Peng et al. 2023. */
typedef enum {
    QC_ROPE_DEFAULT,
    QC_ROPE_LINEAR,
    QC_ROPE_DYNAMIC, /* as DEFAULT up to the context; longer windows are refused */
    QC_ROPE_LLAMA3,
    QC_ROPE_YARN
} qc_rope_kind;

typedef struct {
    qc_rope_kind kind;
    double theta;
    double factor;
    double original;  /* LLAMA3, YARN: context before scaling */
    double low, high; /* LLAMA3 */
    double beta_fast, beta_slow;
    double magnitude; /* cos and sin are multiplied with it; 1 but for YARN */
    int truncate;     /* YARN: whole dimensions */
} qc_rope;

typedef struct {
    qc_llama_config config;
    qc_rope rope;
    uint64_t *windows; /* [layers]: positions that a token sees, itself included; 0: all */
    int qkv_bias, out_bias, mlp_bias;
    int head_norms; /* of q and k: Qwen3 */
} qc_llama_shape;

/* Strings and arrays live in the arena. QC_ERR_UNSUPPORTED for what is not computed, QC_ERR_INPUT
 * for values that cannot be; messages start with "config.json". */
QC_NODISCARD qc_status qc_llama_shape_read(qc_llama_shape *out, qc_arena *arena,
                                           const qc_json *config, qc_error *err);

/* frequencies: [head_dim / 2], in float as transformers computes them. */
void qc_rope_frequencies(const qc_rope *r, uint64_t head_dim, float *frequencies);
/* cos and sin: [positions, head_dim / 2] of float angles, times the magnitude. */
void qc_rope_table(const qc_rope *r, const float *frequencies, uint64_t head_dim,
                   uint64_t positions, float *cosines, float *sines);

#endif
