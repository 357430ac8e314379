/* A matrix of all experts of a layer in one tensor, of which one expert is read at a time:
 *
 *   P_blocks, P_scales  MXFP4 (gpt-oss as released): [experts, rows, cols], decoded to float
 *   P                   NF4, FP4 or int8 (qconv): [experts, rows, cols]
 *   P                   16 or 32 bits (transformers): [experts, cols, rows], turned when it is read
 *   P_bias              [experts, rows] */
#ifndef QC_CONVERT_FORWARD_EXPERTS_STACK_H
#define QC_CONVERT_FORWARD_EXPERTS_STACK_H

#include "convert/forward/forward_find.h"

typedef struct {
    uint32_t tensor, bias;
    const qc_stored_weight *stored; /* NF4, FP4 or int8, else NULL */
    const qc_coded_weight *coded;   /* MXFP4, else NULL */
    uint64_t experts, rows, cols;
    uint64_t read_bytes, memory_bytes; /* of one expert */
} qc_expert_stack;

/* Finds `name`, and its bias. The errors are those of qc_forward_find_linear. */
QC_NODISCARD qc_status qc_expert_stack_find(qc_expert_stack *out, const qc_forward_finder *f,
                                            const char *name, uint64_t experts, uint64_t rows,
                                            uint64_t cols, qc_error *err);
/* Reads the matrix of one expert. Free it with qc_forward_matrix_deinit, also after a failure. */
QC_NODISCARD qc_status qc_expert_stack_read(qc_forward_matrix *out, const qc_forward_source *s,
                                            const qc_expert_stack *stack, uint64_t expert,
                                            qc_error *err);

#endif
