/* The experts of one layer: which tensors they are, and how they lie in memory while they are
 * computed (experts.h). */
#ifndef QC_CONVERT_FORWARD_EXPERTS_LAYER_H
#define QC_CONVERT_FORWARD_EXPERTS_LAYER_H

#include "convert/forward/experts_stack.h"

/* The matrices of an expert. gpt-oss has gate and up in one, as the gate, and no up. */
typedef enum { QC_EXPERT_GATE, QC_EXPERT_UP, QC_EXPERT_DOWN, QC_EXPERT_MATRICES } qc_expert_which;

/* ---- in the checkpoint ---- */

/* A matrix that an expert does not have, or that is in a stack, has QC_NO_TENSOR. */
typedef struct {
    qc_forward_linear linear[QC_EXPERT_MATRICES];
} qc_expert_linears;

struct qc_experts_layer {
    qc_forward_linear router, shared_gate; /* the gate has QC_NO_TENSOR where there is none */
    uint32_t correction;                   /* QC_NO_TENSOR: there is none */
    uint64_t count;
    qc_expert_linears *experts; /* [count] */
    qc_expert_linears shared;   /* all shared experts as one; QC_NO_TENSOR where there are none */
    /* gpt-oss: the matrices of all experts, where `experts` has only sizes. tensor is QC_NO_TENSOR
     * where experts are apart, and of up. */
    qc_expert_stack stacks[QC_EXPERT_MATRICES];
    uint64_t memory_bytes; /* of the router and the largest expert, or the shared ones if larger */
};

/* Finds the experts of layer `number`, which has some, and adds what they read to out->read_bytes,
 * and their memory to out->memory_bytes. */
QC_NODISCARD qc_status qc_experts_find(const qc_forward_finder *f, const qc_forward_shape *s,
                                       uint64_t number, qc_forward_layer *out, qc_error *err);

/* ---- in memory ---- */

typedef struct {
    qc_forward_matrix matrices[QC_EXPERT_MATRICES];
} qc_expert_weights;

typedef struct {
    qc_forward_matrix router;
    float *correction; /* NULL: there is none */
} qc_router_weights;

/* The number of matrix `part` of expert i among a layer's linear layers, behind those of
 * qc_layer_which. i = count: of the shared ones. */
static inline uint64_t qc_expert_number(uint64_t i, int part)
{
    return QC_LAYER_ALL_MATRICES + i * QC_EXPERT_MATRICES + (uint64_t)part;
}
/* Returns expert i of a layer; i = count: the shared ones. NULL: there is none. */
const qc_expert_linears *qc_expert_of(const qc_experts_layer *l, uint64_t i);
/* Reads expert i, or the shared ones. Free the results also after a failure; structs of zeros may
 * be freed too. */
QC_NODISCARD qc_status qc_expert_read(qc_expert_weights *out, const qc_forward_source *s,
                                      const qc_experts_layer *l, uint64_t i, qc_error *err);
void qc_expert_deinit(qc_expert_weights *w);
/* QC_ERR_NONFINITE for corrections that are not finite. */
QC_NODISCARD qc_status qc_router_read(qc_router_weights *out, const qc_forward_source *s,
                                      const qc_experts_layer *l, qc_error *err);
void qc_router_deinit(qc_router_weights *w);

#endif
