/* Gradients of what a decoder layer computes, in float: for y of decoder_ops.h or of a product, and
 * the gradient dy of some loss with respect to y, the gradient dx with respect to its input x.
 *
 * Sums are in double and in index order, but those of matrix products are OpenBLAS's. So results
 * depend on the processor (blas.h) and not on threads. Functions without a status do not allocate
 * and are thread-safe. */
#ifndef QC_QUANT_GRADIENT_H
#define QC_QUANT_GRADIENT_H

#include "quant/blas.h"
#include "quant/decoder_ops.h"

/* ---- products ---- */

/* dx [tokens, cols] += dy [tokens, rows] W [rows, cols]; rows of dy and dx are so many floats
 * apart. */
typedef struct {
    const float *dy, *w;
    float *dx;
    uint64_t tokens, rows, cols, dy_stride, dx_stride;
} qc_gradient_product;

/* QC_ERR_SHAPE where a size is beyond OpenBLAS's int. QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_gradient_multiply(const qc_blas *b, unsigned threads,
                                            const qc_gradient_product *p, qc_error *err);

/* ---- norms, positions and gates ---- */

/* RMS norm and layer norm of x [n]. The gradient of weights and biases is not made. dx may be dy.
 */
void qc_gradient_norm(const float *x, const float *weight, const float *dy, uint64_t n, float eps,
                      float *dx);
void qc_gradient_layer_norm(const float *x, const float *weight, const float *dy, uint64_t n,
                            float eps, float *dx);
/* Rotary positions, in place: d [2 * half] is turned back. side_by_side: as rotate_pairs has it. */
void qc_gradient_rotate(float *d, const float *cosines, const float *sines, uint64_t half,
                        int side_by_side);

typedef enum {
    QC_GRADIENT_SILU,
    QC_GRADIENT_GELU_TANH,
    QC_GRADIENT_GELU,
    QC_GRADIENT_RELU
} qc_gradient_gate;

/* Of y = act(gate) * up, or of y = act(gate) where up is NULL. gate and up become their gradients.
 * Returns the sum of dy y, which is the gradient of a factor of all y. */
double qc_gradient_gates(qc_gradient_gate act, float *gate, float *up, const float *dy, uint64_t n);
/* The same of y = (clip(up, -limit, limit) + 1) g sigmoid(alpha g) with g = min(gate, limit), where
 * gates and ups take turns in both [2 n] (gpt-oss). */
double qc_gradient_clamped_gates(float *both, float limit, float alpha, const float *dy,
                                 uint64_t n);

/* ---- attention ---- */

/* The gradients of io's q, k and v, which lie as those do: with their strides and steps. `out` is
 * the gradient of io->out, with out_stride. io->keys must be 0. */
typedef struct {
    const float *out;
    float *q, *k, *v;
} qc_gradient_attention;

/* The query heads of key head kv, all tokens. scratch: of so many bytes, 64-byte aligned; they
 * saturate. Attention is computed anew (Dao et al. 2022). The caller checks that tokens and strides
 * are below QC_GRADIENT_MOST. */
#define QC_GRADIENT_MOST 0x3fffffffu
void qc_gradient_attend(const qc_blas *b, const qc_decoder_ops *ops, const qc_attend_io *io,
                        const qc_gradient_attention *d, uint64_t kv, void *scratch);
uint64_t qc_gradient_attend_bytes(uint64_t tokens);

/* ---- the loss ---- */

/* Turns the logits of a token into the gradient of its cross entropy with a label that is drawn
 * from the model's own distribution p: p - onehot(label). The label is the first one up to which
 * the sum of p reaches `uniform`, a number in [0, 1). The mean over tokens of the products of such
 * gradients is the Fisher information (Martens 2014, Kunstner et al. 2019); labels of the text
 * would give something else. Returns the label, or n where a logit is not finite. */
uint64_t qc_gradient_sampled(const qc_decoder_ops *ops, float *logits, uint64_t n, double uniform);
/* A uniform number in [0, 1) for a token: the same for the same number (Steele et al. 2014,
 * SplitMix64). */
double qc_gradient_uniform(uint64_t number);

#endif
