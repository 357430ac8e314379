/* The forward pass of a Llama-family model on the CPU: one layer over some whole windows.
 *
 * Buffers, for T tokens in work at a time:
 *   a [T, hidden]                         normed states, then what is added to the hidden states
 *   b [T, max(q + 2 kv, 2 intermediate)]  q, k and v of a token side by side; gate and up
 *   c [T, q]                              what attention gives
 * Every phase is shared among threads by rows of weights, tokens, or heads of a window; no sum is
 * cut, so results do not depend on threads. */
#ifndef QC_CONVERT_LLAMA_FORWARD_H
#define QC_CONVERT_LLAMA_FORWARD_H

#include "convert/llama/llama_layer.h"
#include "quant/decoder_ops.h"
#include "quant/matmul_ops.h"

/* Tokens in work at a time, but at least one window. */
#define QC_LLAMA_TOKENS 1024u

typedef struct {
    const qc_llama_shape *shape;
    unsigned threads;
    const qc_matmul_ops *matmul;
    const qc_decoder_ops *decoder;
    qc_llama_batch batch;
    uint64_t *starts;    /* [windows + 1]: first token */
    uint64_t *tasks;     /* [windows + 1]: first task of attention */
    uint32_t *positions; /* [tokens] */
    float *cosines, *sines;
    float *a, *b, *c;
    unsigned char *scratch; /* one part per thread */
    uint64_t scratch_each;
} qc_llama_cpu;

/* What create allocates. Saturates. */
uint64_t qc_llama_cpu_bytes(const qc_llama_shape *shape, unsigned threads, uint64_t tokens,
                            uint64_t longest);
/* Of a batch, borrowed. To be freed also after a failure. QC_ERR_UNSUPPORTED for windows longer
 * than rotary positions of type dynamic are computed for. */
QC_NODISCARD qc_status qc_llama_cpu_create(qc_llama_cpu *out, const qc_llama_shape *shape,
                                           const qc_llama_tools *tools, const qc_llama_batch *batch,
                                           qc_error *err);
void qc_llama_cpu_deinit(qc_llama_cpu *cpu);

/* hidden: of the whole batch, [tokens, hidden]. QC_ERR_NONFINITE without the layer's name. */
QC_NODISCARD qc_status qc_llama_cpu_layer(qc_llama_cpu *cpu, const qc_llama_weights *w,
                                          uint64_t layer, float *hidden, qc_error *err);

/* ---- in stages, for who wants to see the inputs of linear layers ---- */

/* Whole windows that are in work together: QC_LLAMA_TOKENS at most, but at least one window. Zeros:
 * before the first. */
typedef struct {
    uint64_t window, end; /* windows [window, end) */
    uint64_t start, tokens;
} qc_llama_chunk;

/* Goes on to the next; 0: there is none. */
int qc_llama_cpu_next(const qc_llama_cpu *cpu, qc_llama_chunk *c);

/* *x: inputs of the stage's linear layers, [chunk's tokens, n], rows *ldx floats apart, until the
 * next call; nothing at the end. hidden [tokens, hidden], attended [tokens, q] (inputs of o, for
 * AT_GATE only): of the whole batch. All stages in a row give what qc_llama_cpu_layer gives. */
QC_NODISCARD qc_status qc_llama_cpu_stage(qc_llama_cpu *cpu, const qc_llama_weights *w,
                                          uint64_t layer, const qc_llama_chunk *at,
                                          qc_llama_stage stage, float *hidden,
                                          const float *attended, const float **x, uint64_t *ldx,
                                          qc_error *err);

/* In place. */
QC_NODISCARD qc_status qc_llama_cpu_norm(qc_llama_cpu *cpu, const float *weight, float *hidden,
                                         qc_error *err);
/* y [n, rows] = x [n, cols] W^T + bias; needs no batch. */
QC_NODISCARD qc_status qc_llama_cpu_matmul(const qc_matmul_ops *ops, unsigned threads,
                                           const qc_llama_matrix *w, const float *x, uint64_t n,
                                           float *y, qc_error *err);

#endif
