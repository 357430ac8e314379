/* What config.json says about how a model of the Llama family computes. Fields are read as
 * transformers 4 and 5 read them, with their defaults. Whatever would make the model compute
 * differently from llama.c is refused by name. */
#ifndef QC_CONVERT_LLAMA_CONFIG_H
#define QC_CONVERT_LLAMA_CONFIG_H

#include "convert/llama/experts_config.h"
#include "convert/llama/llama.h"

/* Rotary positions turn dimension pair i of a head by position * frequency i. Sources: Su et al.
 * 2021 (RoPE). linear: Chen et al. 2023. dynamic: the base changes beyond the context only. llama3:
 * Llama 3.1's scaling by wavelength. yarn: Peng et al. 2023. */
typedef enum {
    QC_ROPE_DEFAULT,
    QC_ROPE_LINEAR,
    QC_ROPE_DYNAMIC, /* like DEFAULT up to the context; longer windows are refused */
    QC_ROPE_LLAMA3,
    QC_ROPE_YARN
} qc_rope_kind;

typedef struct {
    qc_rope_kind kind;
    double theta;
    double factor;
    double original;  /* LLAMA3, YARN: the context before scaling */
    double low, high; /* LLAMA3 */
    double beta_fast, beta_slow;
    double magnitude; /* cos and sin are multiplied by it; 1 except for YARN */
    int truncate;     /* YARN: round to whole dimensions */
} qc_rope;

typedef struct qc_llama_family qc_llama_family; /* family.h */

typedef struct {
    qc_llama_config config;
    const qc_llama_family *family;
    qc_rope rope;
    qc_experts_shape experts;
    uint64_t *windows; /* [layers]: how many positions a token sees, including its own; 0: all */
    int qkv_bias, out_bias, mlp_bias;
    int head_norms; /* q and k have norms for each head: Qwen3 */
} qc_llama_shape;

/* Strings and arrays live in the arena. QC_ERR_UNSUPPORTED for what qconv does not compute,
 * QC_ERR_INPUT for impossible values. Messages start with "config.json". */
QC_NODISCARD qc_status qc_llama_shape_read(qc_llama_shape *out, qc_arena *arena,
                                           const qc_json *config, qc_error *err);

/* Computes frequencies [head_dim / 2] in float, as transformers does. */
void qc_rope_frequencies(const qc_rope *r, uint64_t head_dim, float *frequencies);
/* Computes cos and sin [positions, head_dim / 2] of float angles, times the magnitude. */
void qc_rope_table(const qc_rope *r, const float *frequencies, uint64_t head_dim,
                   uint64_t positions, float *cosines, float *sines);
/* Allocates and computes both. They are one allocation, which *cosines owns. */
QC_NODISCARD qc_status qc_rope_tables(float **cosines, float **sines, const qc_llama_shape *shape,
                                      uint64_t positions, qc_error *err);

#endif
