/* The forward pass of a language model or an encoder, layer by layer in constant memory.
 *
 * It computes the families of family.h (config.json's model_type and architectures): decoders with
 * RMS or layer norms, rotary or learned positions, grouped-query or multi-head latent attention,
 * and feed-forward parts with a gate or without; and encoders as BERT. Other models are refused by
 * name.
 *
 * The checkpoint may be any that formats/checkpoint.h opens: with 16 or 32 bits, or quantized
 * (qconv's output, compressed or not, or bitsandbytes' form). Quantized linear layers use the
 * dequant-matmul kernels (quant/matmul_ops.h). Everything else is computed in float.
 *
 * The hidden states of a batch of windows pass through one layer at a time, and the weights of at
 * most one layer are in memory. Results depend neither on threads or instruction set, nor on how
 * windows are batched. */
#ifndef QC_CONVERT_FORWARD_H
#define QC_CONVERT_FORWARD_H

#include "base/cpu.h"
#include "convert/family/forward_shape.h"
#include "convert/forward/image_states.h"
#include "convert/term/progress.h"
#include "formats/checkpoint.h"

typedef struct qc_forward qc_forward;

typedef struct {
    unsigned threads;
    qc_isa isa;
    qc_progress *progress; /* counts the bytes of weights that are read; may be NULL */
    /* What layers that look at images see; NULL: these layers are left out. Borrowed. */
    qc_image_states *images;
} qc_forward_tools;

/* Checks everything (names, shapes, what the configuration asks for) before anything is computed.
 * dir is for messages. c is borrowed. */
QC_NODISCARD qc_status qc_forward_open(qc_forward **out, const char *dir, const qc_checkpoint *c,
                                       const qc_forward_tools *tools, qc_error *err);
void qc_forward_close(qc_forward *m); /* accepts NULL */
const qc_forward_config *qc_forward_config_of(const qc_forward *m);

/* Windows of tokens: independent sequences, one after the other. */
typedef struct {
    const uint32_t *ids;     /* ids of all windows */
    const uint64_t *lengths; /* [count] */
    uint64_t count;
    uint64_t tokens; /* sum of lengths */
    /* [count]: the sequence of each window, whose image it sees. NULL: each is its own. */
    const uint64_t *sequences;
} qc_forward_batch;

/* The bytes that qc_forward_hidden allocates at most for this many tokens, including the weights of
 * a layer. It does not count the caller's `out`, nor the head that qc_forward_logits keeps.
 * Saturates. */
uint64_t qc_forward_memory(const qc_forward *m, uint64_t tokens, uint64_t longest);

/* The bytes of the head that qc_forward_logits keeps. */
uint64_t qc_forward_head_memory(const qc_forward *m);
/* The part of qc_forward_memory that the states of an image take, with its keys and values; 0
 * without images. */
uint64_t qc_forward_image_memory(const qc_forward *m);

/* Checks what qc_forward_hidden checks of a batch: its ids, and that its sequences have images. */
QC_NODISCARD qc_status qc_forward_check(const qc_forward *m, const qc_forward_batch *batch,
                                        qc_error *err);
/* Computes the hidden states behind the final norm, or those of an encoder behind its last layer:
 * out is [tokens, hidden] floats. QC_ERR_INPUT
 * for an id outside the vocabulary. QC_ERR_NONFINITE when a layer's result is not finite; the
 * message names the layer. */
QC_NODISCARD qc_status qc_forward_hidden(qc_forward *m, const qc_forward_batch *batch, float *out,
                                         qc_error *err);

/* Computes the logits of n rows of hidden states: out is [n, vocabulary]. The head is read once and
 * kept until qc_forward_close. An encoder has none. */
QC_NODISCARD qc_status qc_forward_logits(qc_forward *m, const float *hidden, uint64_t n, float *out,
                                         qc_error *err);

#endif
