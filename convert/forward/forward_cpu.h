/* The forward pass of a model on the CPU takes some whole windows through one layer.
 *
 * It has these buffers, where T is the number of tokens in work at a time:
 *
 *   a [T, hidden]                          normed states, then what is added to the hidden states
 *   b [T, max(q + k + v, 2 intermediate)]  q, k and v of a token side by side; gate and up (without
 *                                          a gate only the first)
 *   c [T, attended]                        what attention gives
 *   d [T, latents]                         of multi-head latent attention
 *
 * and those of forward_cross.h, where layers look at images.
 *
 * Threads share every phase by rows of weights, by tokens, or by heads of a window. No sum is
 * split, so results do not depend on threads. */
#ifndef QC_CONVERT_FORWARD_CPU_H
#define QC_CONVERT_FORWARD_CPU_H

#include "convert/forward/forward_cross.h"
#include "convert/forward/forward_layer.h"
#include "quant/decoder_ops.h"
#include "quant/matmul_ops.h"

/* How many tokens are in work at a time; but there is always at least one window. */
#define QC_FORWARD_TOKENS 1024u

typedef struct {
    const qc_forward_shape *shape;
    unsigned threads;
    const qc_matmul_ops *matmul;
    const qc_decoder_ops *decoder;
    qc_forward_batch batch;
    uint64_t *starts;    /* [windows + 1]: each window's first token */
    uint64_t *tasks;     /* [windows + 1]: each window's first task of attention */
    uint32_t *positions; /* [tokens]: rows of the rotary tables */
    qc_rope_tables rope, local_rope;
    float *a, *b, *c, *d;
    qc_cross *cross;        /* NULL: no layer looks at images */
    unsigned char *scratch; /* each thread has its own range of it */
    uint64_t scratch_each;
} qc_forward_cpu;

/* The bytes that qc_forward_cpu_create allocates. Saturates. */
uint64_t qc_forward_cpu_bytes(const qc_forward_shape *shape, unsigned threads, uint64_t tokens,
                              uint64_t longest);
/* Allocates the buffers for a batch, which is borrowed. Free it also after a failure.
 * QC_ERR_UNSUPPORTED for windows that are longer than rotary positions of type dynamic are computed
 * for. */
QC_NODISCARD qc_status qc_forward_cpu_create(qc_forward_cpu *out, const qc_forward_shape *shape,
                                             const qc_forward_tools *tools,
                                             const qc_forward_batch *batch, qc_error *err);
void qc_forward_cpu_deinit(qc_forward_cpu *cpu);

/* hidden is that of the whole batch, [tokens, hidden]. A layer with experts ends behind attention,
 * and experts.h goes on. QC_ERR_NONFINITE does not name the layer. */
QC_NODISCARD qc_status qc_forward_cpu_layer(qc_forward_cpu *cpu, const qc_forward_weights *w,
                                            uint64_t layer, float *hidden, qc_error *err);

/* ---- up to a point, for callers that want to see the inputs of linear layers ---- */

/* The whole windows that are in work together: QC_FORWARD_TOKENS tokens at most, but at least one
 * window. A struct of zeros stands before the first. */
typedef struct {
    uint64_t window, end; /* windows [window, end) */
    uint64_t start, tokens;
} qc_forward_chunk;

/* Goes on to the next windows. Returns 0 if there are none. */
int qc_forward_cpu_next(const qc_forward_cpu *cpu, qc_forward_chunk *c);

/* The whole batch on its way through a layer. */
typedef struct {
    const qc_forward_weights *w;
    uint64_t layer;
    float *hidden; /* [tokens, hidden] */
    float *
        attended; /* [tokens, qc_forward_attended]: the inputs of o, which AT_GATE or AT_END reads */
} qc_forward_pass;

/* The inputs of the linear layers at a point: [the chunk's tokens, n], with rows `ld` floats
 * apart. */
typedef struct {
    const float *x;
    uint64_t ld;
} qc_forward_inputs;

/* Takes a chunk to a point. *out is valid until the next call; AT_END and AT_IMAGE have none: the
 * states do not depend on the chunk (forward_cross.h). All points in a row give what
 * qc_forward_cpu_layer gives. */
QC_NODISCARD qc_status qc_forward_cpu_at(qc_forward_cpu *cpu, const qc_forward_pass *p,
                                         const qc_forward_chunk *at, qc_forward_point point,
                                         qc_forward_inputs *out, qc_error *err);

/* Computes the norm in place; without weights there is none. */
QC_NODISCARD qc_status qc_forward_cpu_norm(qc_forward_cpu *cpu, const float *weight, float *hidden,
                                           qc_error *err);
/* Scales and caps logits [n, vocabulary] in place, where the family does. */
QC_NODISCARD qc_status qc_forward_cpu_finish_logits(const qc_forward_shape *shape,
                                                    const qc_forward_tools *tools, float *logits,
                                                    uint64_t n, qc_error *err);
/* Allocates a buffer for a batch, 64-byte aligned, to be freed by qc_free; out points to a pointer.
 * QC_ERR_NOMEM also for UINT64_MAX, which is what a size saturates at. */
QC_NODISCARD qc_status qc_forward_cpu_allocate(void *out, uint64_t bytes, qc_error *err);
/* Computes y [n, rows] = x [n, cols] W^T + bias. It needs no batch. */
QC_NODISCARD qc_status qc_forward_cpu_matmul(const qc_matmul_ops *ops, unsigned threads,
                                             const qc_forward_matrix *w, const float *x, uint64_t n,
                                             float *y, qc_error *err);

#endif
