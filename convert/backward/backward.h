/* Second moments of the gradients of linear layers' outputs, for calibrating both sides
 * (quant/error_feedback.h): G = mean over tokens of g g^T, where g is the gradient of a token's
 * cross entropy, with a label drawn from the model's own distribution, with respect to what a
 * linear layer gives for this token. So G is the factor of outputs in a Kronecker-factored Fisher
 * information (Martens and Grosse 2015). It is computed in blocks on its diagonal.
 *
 * The text passes through the model once, and the inputs of each layer are kept. Then the gradient
 * goes back from the last layer, which is computed anew from its inputs, window by window; through
 * a mixture's experts one by one, where G is the mean over the tokens that go to an expert. At most
 * one layer's weights are in memory, and one expert's. Results depend on the processor, not on
 * threads. */
#ifndef QC_CONVERT_BACKWARD_H
#define QC_CONVERT_BACKWARD_H

#include "convert/forward/experts_layer.h"
#include "quant/blas.h"

typedef struct {
    const qc_forward_source *source;
    const qc_forward_tensors *tensors;
    const qc_forward_batch *batch;
    qc_forward_tools tools;
    const qc_blas *blas;
    uint64_t block; /* outputs of a block of G */
    /* Where files without a name go whose bytes are more than `memory`. */
    const char *folder;
    uint64_t memory;
    /* Is G of this linear layer wanted? which: a qc_layer_which, or a qc_expert_number. */
    int (*wants)(const void *ctx, uint64_t layer, uint64_t which);
    /* So many operations are done. */
    void (*did)(void *ctx, double operations);
    void *ctx;
} qc_backward_task;

typedef struct qc_backward qc_backward;

#define QC_BACKWARD_FEWER   "take fewer tokens with --calibration-tokens"
#define QC_BACKWARD_WITHOUT "--sided one does without them"

/* Why qconv makes no gradients of a model: "its layers look at images"; or NULL. */
const char *qc_backward_not_made(const qc_forward_shape *s);

/* QC_ERR_NONFINITE names the layer; QC_ERR_NOSPACE; QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_backward_run(qc_backward **out, const qc_backward_task *task,
                                       qc_error *err);
void qc_backward_close(qc_backward *b); /* accepts NULL */
/* The blocks of G, [blocks][block][block], zero beyond the last output; NULL if it was not wanted,
 * or no token went to this expert. It lives until b is closed. */
const float *qc_backward_moments(const qc_backward *b, uint64_t layer, uint64_t which);
/* The tokens that it is the mean of. */
uint64_t qc_backward_tokens(const qc_backward *b, uint64_t layer, uint64_t which);
/* A linear layer, by its number; rows is 0 if there is none. */
const qc_forward_linear *qc_backward_linear(const qc_forward_tensors *t, uint64_t layer,
                                            uint64_t which);
/* How many numbers a layer has. */
uint64_t qc_backward_count(const qc_forward_tensors *t, uint64_t layer);

/* What qc_backward_run takes: operations, and bytes of memory and of files. kept: the part of the
 * memory that its result keeps. */
typedef struct {
    double operations;
    uint64_t memory, disk, kept;
} qc_backward_outlook;
qc_backward_outlook qc_backward_ahead(const qc_backward_task *task);

#endif
