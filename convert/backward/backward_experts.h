/* The gradients of the linear layers of a layer's experts, on the CPU. As on the way forward
 * (convert/forward/experts.h) one expert at a time is in memory, for all tokens of the batch that
 * go to it. A token's gradient goes back through its experts by their weights, and through the
 * weights and the router's scores. What chooses the experts has no gradient, so corrections have
 * none.
 *
 * The order is: qc_backward_experts_begin, qc_backward_expert for every expert that tokens go to
 * and for the shared ones, qc_backward_experts_end. Results do not depend on threads. */
#ifndef QC_CONVERT_BACKWARD_EXPERTS_H
#define QC_CONVERT_BACKWARD_EXPERTS_H

#include "convert/backward/backward_layer.h"
#include "convert/forward/experts.h"

typedef struct {
    qc_experts_cpu x;  /* its sum: gradients of the normed states, of the whole batch */
    float *middle;     /* [tokens, hidden]: the states behind attention, which the caller sets */
    float *back;       /* [a piece, intermediate]: gradients of the inputs of down */
    float *shares;     /* [tokens, chosen]: gradients of the weights of a token's experts */
    const float *norm; /* [hidden], borrowed */
    qc_router_weights router;
    qc_forward_matrix shared_gate;
} qc_backward_experts;

/* The bytes of the buffers. Saturates. */
uint64_t qc_backward_experts_bytes(const qc_forward_shape *s, unsigned threads, uint64_t tokens);
/* Free it also after a failure; a struct of zeros may be freed too. */
QC_NODISCARD qc_status qc_backward_experts_create(qc_backward_experts *out,
                                                  const qc_forward_shape *s,
                                                  const qc_forward_tools *tools, uint64_t tokens,
                                                  qc_error *err);
void qc_backward_experts_deinit(qc_backward_experts *e);

/* Reads the router and routes all tokens. norm: in front of the experts. */
QC_NODISCARD qc_status qc_backward_experts_begin(qc_backward_experts *e, const qc_forward_source *s,
                                                 const qc_experts_layer *l, const float *norm,
                                                 qc_error *err);
/* The tokens of expert i; i = the number of experts: of the shared ones. */
qc_expert_tokens qc_backward_expert_tokens(const qc_backward_experts *e, uint64_t i);
/* Reads expert i and takes d [tokens, hidden], the gradients of the states behind the layer,
 * through it. Its linear layers' gradients go to b->take. */
QC_NODISCARD qc_status qc_backward_expert(qc_backward_experts *e, const qc_backward_layer *b,
                                          const qc_forward_source *s, const qc_experts_layer *l,
                                          uint64_t i, const float *d, qc_error *err);
/* d becomes the gradients of the states behind attention. QC_ERR_NONFINITE does not name the
 * layer. */
QC_NODISCARD qc_status qc_backward_experts_end(qc_backward_experts *e, const qc_backward_layer *b,
                                               float *d, qc_error *err);

/* One token's gradient through its router: of the weights of its experts, d [r->chosen] -> of the
 * router's logits, out [r->experts]. scores [r->experts], chosen and weights: as qc_route_token
 * gives them. d is written over. Thread-safe: yes. */
void qc_backward_route(const qc_routing *r, const float *scores, const uint32_t *chosen,
                       const float *weights, float *d, float *out);

#endif
