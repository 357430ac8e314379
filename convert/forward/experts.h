/* Takes the hidden states of a batch through the experts of a layer on the CPU.
 *
 * First the router says for every token of the batch where it goes. Then one expert at a time is
 * read and computes the tokens that go to it, at most QC_FORWARD_TOKENS at once, and what it gives
 * is added up, times the token's weight. An expert that no token goes to is not read. The shared
 * experts come last; they are one more expert, to which all tokens go.
 *
 * Results depend neither on threads nor on batches: a token's sum has its experts in the order of
 * their numbers, and everything else is computed for each token by itself.
 *
 * qc_experts_run does all of it. Calibrating takes the steps one by one, because it quantizes an
 * expert between them. */
#ifndef QC_CONVERT_FORWARD_EXPERTS_H
#define QC_CONVERT_FORWARD_EXPERTS_H

#include "convert/forward/experts_layer.h"
#include "convert/forward/experts_route.h"
#include "quant/matmul_ops.h"

/* The tokens that go to an expert, in the order of the batch. */
typedef struct {
    const uint32_t *tokens; /* [count]; NULL: all, from the first on */
    const float *weights;   /* [count]; NULL: each counts 1, or what the shared gate says */
    uint64_t count;
} qc_expert_tokens;

/* All buffers for one batch. */
typedef struct {
    const qc_forward_shape *shape;
    const qc_decoder_ops *decoder;
    const qc_matmul_ops *matmul;
    unsigned threads;
    uint64_t tokens;
    float *sum;       /* [tokens, hidden]: what the experts give */
    float *own_sum;   /* NULL: sum is the caller's */
    uint32_t *chosen; /* [tokens, chosen] */
    float *weights;   /* [tokens, chosen] */
    uint64_t *starts; /* [experts + 1]: where an expert's tokens begin in the two lists below */
    uint32_t *list;   /* [tokens * chosen] */
    float *list_weights;
    float *logits; /* [a piece, experts] */
    float *room;   /* qc_route_room for each thread */
    float *x, *y;  /* [a piece, hidden]: normed states; what an expert gives */
    float *gate;   /* [a piece, intermediate], twice as wide where gates are clamped */
    float *up;     /* [a piece, intermediate] */
    float *shares; /* [a piece]: how much the shared experts count */
} qc_experts_cpu;

/* The bytes of qc_experts_create, and of what its steps allocate in addition. own_sum: the sums are
 * among them. Saturates. */
uint64_t qc_experts_bytes(const qc_forward_shape *shape, unsigned threads, uint64_t tokens,
                          int own_sum);
/* sum: room for the sums, [tokens, hidden]; NULL: it is allocated. shape is borrowed. Free it also
 * after a failure. */
QC_NODISCARD qc_status qc_experts_create(qc_experts_cpu *out, const qc_forward_shape *shape,
                                         const qc_forward_tools *tools, uint64_t tokens, float *sum,
                                         qc_error *err);
void qc_experts_deinit(qc_experts_cpu *x); /* accepts a struct of zeros */

/* Takes hidden [tokens, hidden], the states behind attention, to those behind the layer. norm
 * [hidden]: the gain of the norm in front of the experts. QC_ERR_NONFINITE does not name the
 * layer. */
QC_NODISCARD qc_status qc_experts_run(qc_experts_cpu *x, const qc_forward_source *s,
                                      const qc_experts_layer *l, const float *norm, float *hidden,
                                      qc_error *err);

/* ---- step by step ---- */

/* The states of a batch and the norm in front of the experts. */
typedef struct {
    float *hidden;
    const float *norm;
} qc_experts_states;

/* Routes all tokens, and sets the sums to zero. */
QC_NODISCARD qc_status qc_experts_route(qc_experts_cpu *x, const qc_router_weights *w,
                                        const qc_experts_states *h, qc_error *err);
/* Returns the tokens of an expert, and those of the shared ones. */
qc_expert_tokens qc_experts_tokens(const qc_experts_cpu *x, uint64_t expert);
qc_expert_tokens qc_experts_all(const qc_experts_cpu *x);
/* Returns up to QC_FORWARD_TOKENS tokens from `first` on. */
qc_expert_tokens qc_experts_piece(const qc_expert_tokens *t, uint64_t first);

/* Computes x->x, the inputs of gate and up, for a piece that begins with token `first` of its
 * expert's. */
QC_NODISCARD qc_status qc_experts_inputs(qc_experts_cpu *x, const qc_experts_states *h,
                                         const qc_expert_tokens *piece, uint64_t first,
                                         qc_error *err);
/* Computes *inner [n, columns of down], the inputs of down, from x->x. It is valid until the next
 * call. */
QC_NODISCARD qc_status qc_experts_gate(qc_experts_cpu *x, const qc_expert_weights *w, uint64_t n,
                                       float **inner, qc_error *err);
/* Computes x->shares, how much the shared experts count for each of n tokens, from x->x: the
 * sigmoid of their gate. */
QC_NODISCARD qc_status qc_experts_shares(qc_experts_cpu *x, const qc_forward_matrix *gate,
                                         uint64_t n, qc_error *err);
/* Computes what the expert gives from `inner` and adds it to the sums. shared_gate: NULL where
 * there is none. */
QC_NODISCARD qc_status qc_experts_add(qc_experts_cpu *x, const qc_expert_weights *w,
                                      const float *inner, const qc_expert_tokens *piece,
                                      uint64_t first, const qc_forward_matrix *shared_gate,
                                      qc_error *err);
/* Takes an expert's tokens through it: the three steps above, piece by piece. */
QC_NODISCARD qc_status qc_experts_pass(qc_experts_cpu *x, const qc_expert_weights *w,
                                       const qc_experts_states *h, const qc_expert_tokens *tokens,
                                       const qc_forward_matrix *shared_gate, qc_error *err);
/* Adds the sums to the hidden states. */
QC_NODISCARD qc_status qc_experts_leave(qc_experts_cpu *x, float *hidden, qc_error *err);

#endif
