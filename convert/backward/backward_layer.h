/* The gradients of a layer's linear layers, on the CPU, window by window: a chunk of windows passes
 * through the layer again, and the gradient of its outputs goes back. */
#ifndef QC_CONVERT_BACKWARD_LAYER_H
#define QC_CONVERT_BACKWARD_LAYER_H

#include "convert/forward/forward_phases.h"
#include "quant/gradient.h"

/* Takes the gradients of a linear layer's outputs, [tokens, rows of w], rows ld floats apart.
 * which: qc_layer_which, or a qc_expert_number (experts_layer.h). */
typedef qc_status (*qc_backward_take)(void *ctx, uint64_t which, const float *g, uint64_t ld,
                                      uint64_t tokens, qc_error *err);

typedef struct {
    const qc_blas *blas;
    const qc_quant_ops *ops;
    qc_backward_take take;
    void *ctx;
    uint64_t made, wide; /* floats of what Q, K and V give for a token; of gate and up */
    /* For the tokens of a chunk: */
    float *qkv;             /* q, k and v behind norms and positions */
    float *raw;             /* what Q, K and V give; of latents, then the gradients of that */
    float *middle;          /* the hidden states behind attention */
    float *gates;           /* gate and up, then their gradients; then those of q, k and v */
    float *added;           /* what attention adds to the hidden states, in front of its norm */
    float *ffn;             /* the same of the feed-forward part, then the gradient of its inputs */
    float *states;          /* gradients of what is added, then of the inputs of q, k and v */
    float *back;            /* gradients of the inputs of down, then of o */
    float *weights;         /* rows of a matrix as floats */
    unsigned char *scratch; /* of attention, for each thread */
    uint64_t scratch_each;
} qc_backward_layer;

/* The bytes of the buffers. Saturates. */
uint64_t qc_backward_layer_bytes(const qc_forward_shape *s, unsigned threads, uint64_t tokens,
                                 uint64_t longest);
/* Allocates buffers; blas, ops, take and ctx are set. Free it also after a failure. */
QC_NODISCARD qc_status qc_backward_layer_create(qc_backward_layer *out, const qc_forward_cpu *cpu,
                                                qc_error *err);
void qc_backward_layer_deinit(qc_backward_layer *b);

/* d [tokens, hidden] is the gradient of the hidden states behind the layer, of the whole batch, and
 * becomes that of those in front of it, which are p->hidden and stay as they are. Of a layer with
 * experts, d is that of the states behind attention (backward_experts.h). */
QC_NODISCARD qc_status qc_backward_layer_run(qc_backward_layer *b, qc_forward_cpu *cpu,
                                             const qc_forward_pass *p, float *d, qc_error *err);
/* dx [tokens, cols] += dy [tokens, rows] W; for what lies around the layers. */
QC_NODISCARD qc_status qc_backward_inputs(const qc_backward_layer *b, unsigned threads,
                                          const qc_forward_matrix *w, const qc_gradient_product *p,
                                          qc_error *err);

#endif
