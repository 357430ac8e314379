/* What a decoder layer computes besides its matmuls, in float.
 *
 * Every table gives the same bits: sums run in the stated order, each product and each sum is
 * rounded (no fused operations), and e^x is a polynomial of our own. Element k of a sum over a
 * vector goes to lane k % 16; lanes are folded as qc_fold16 does.
 * Thread-safe: yes. Allocates: no. NaN and infinity come out as such, or as NaN. */
#ifndef QC_QUANT_DECODER_OPS_H
#define QC_QUANT_DECODER_OPS_H

#include "base/cpu.h"

#include <stdint.h>

/* Attention of one window: token t sees the tokens max(0, t - span + 1) .. t; with span 0 it sees
 * all up to t. Where `keys` is not 0, every token sees that many rows of k and v, which need not be
 * those of the tokens, and there is no span. Query head h uses key and value head h / group.
 * Strides are in floats: from a token to the next, and as a step from a head to the next. */
typedef struct {
    const float *q; /* [tokens][heads][head_dim] */
    const float *k; /* [tokens][heads / group][head_dim] */
    const float *v; /* [tokens][heads / group][value_dim] */
    float *out;     /* [tokens][heads][value_dim], heads side by side */
    uint64_t q_stride, kv_stride, out_stride;
    uint64_t q_step, k_step, v_step;
    uint64_t tokens, group, head_dim, value_dim, span, keys;
    float scale; /* of q k^T */
    float cap;   /* scores s become cap tanh(s / cap) (Gemma 2); 0: they stay */
    /* [heads]: the score of a key without a value, which each token sees besides (gpt-oss); or
     * NULL */
    const float *sinks;
} qc_attend_io;

typedef struct {
    qc_isa isa;
    /* RMS norm (Zhang and Sennrich 2019): out = weight * (x / sqrt(mean(x^2) + eps)). out may be
     * x. */
    void (*norm)(const float *x, const float *weight, uint64_t n, float eps, float *out);
    /* Layer norm (Ba et al. 2016): out = weight * ((x - mean) * (1 / sqrt(variance + eps))) + bias,
     * where the variance is the mean of (x - mean)^2. out may be x. */
    void (*layer_norm)(const float *x, const float *weight, const float *bias, uint64_t n,
                       float eps, float *out);
    /* Rotary positions of one head, x [2 * half]: the pair x[i], x[i + half] is rotated by an
     * angle, which is given by its cosine and sine. */
    void (*rotate)(float *x, const float *cosines, const float *sines, uint64_t half);
    /* The same for pairs that lie side by side, x[2 i] and x[2 i + 1]. */
    void (*rotate_pairs)(float *x, const float *cosines, const float *sines, uint64_t half);
    /* SwiGLU (Shazeer 2020): gate = gate / (1 + e^-gate) * up. */
    void (*swiglu)(float *gate, const float *up, uint64_t n);
    /* The same with GELU in its form with tanh (Hendrycks and Gimpel 2016):
     * gate = gate / 2 * (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))) * up. */
    void (*geglu)(float *gate, const float *up, uint64_t n);
    /* Activations without a gate: max(x, 0); GELU (Hendrycks and Gimpel 2016), which is
     * x / 2 (1 + erf(x / sqrt(2))), within 6e-7 of itself for x >= -4 and 1e-10 below; and
     * its form with tanh as above. */
    void (*relu)(float *x, uint64_t n);
    void (*gelu)(float *x, uint64_t n);
    void (*gelu_tanh)(float *x, uint64_t n);
    /* x = cap tanh(x / cap) */
    void (*softcap)(float *x, uint64_t n, float cap);
    /* Softmax(q k^T scale) v for the query heads of key head kv and for tokens [first,
     * first + count), where count is at most qc_attend_tokens. Keys go by in blocks of 64 from the
     * window's start; maximum and sum are carried from block to block (Milakov and Gimelshein 2018,
     * Dao et al. 2022). scratch: qc_attend_scratch_bytes, 64-byte aligned. */
    void (*attend)(const qc_attend_io *io, uint64_t kv, uint64_t first, uint64_t count,
                   void *scratch);
    /* out[i] = e^x[i], within 2 units in the last place; 0 where the result is below 2^-126. */
    void (*exponential)(const float *x, uint64_t n, float *out);
} qc_decoder_ops;

/* Chooses as qc_quant_ops_for does. */
const qc_decoder_ops *qc_decoder_ops_for(qc_isa isa);
/* Returns how many tokens one call of attend takes at most; the bits do not depend on how they are
 * cut. */
uint64_t qc_attend_tokens(uint64_t group);
/* Returns the bytes of scratch that attend needs; it saturates. */
uint64_t qc_attend_scratch_bytes(uint64_t group, uint64_t head_dim, uint64_t value_dim);

#endif
