/* The forward pass of a language model, layer by layer in constant memory.
 *
 * It computes the families of family.h (config.json's model_type and architectures): decoders with
 * RMS norms, rotary positions, grouped-query or multi-head latent attention, and gated feed-forward
 * parts. Other models are refused by name.
 *
 * The checkpoint may be any that formats/checkpoint.h opens: with 16 or 32 bits, or quantized
 * (qconv's output, compressed or not, or bitsandbytes' form). Quantized linear layers use the
 * dequant-matmul kernels: quant/matmul_ops.h on the CPU, kernels/matmul.h on a GPU. Everything else
 * is computed in float.
 *
 * The hidden states of a batch of windows pass through one layer at a time, and the weights of at
 * most one layer are in memory. Results depend neither on threads or instruction set, nor on how
 * windows are batched. */
#ifndef QC_CONVERT_FORWARD_H
#define QC_CONVERT_FORWARD_H

#include "base/cpu.h"
#include "convert/device/device_choice.h"
#include "convert/term/progress.h"
#include "formats/checkpoint.h"

/* The shape of a model, from config.json. */
typedef struct {
    const char *model_type;
    uint64_t layers; /* that are computed */
    uint64_t hidden, intermediate, heads, kv_heads, head_dim, vocabulary;
    uint64_t context; /* max_position_embeddings; 0: config.json does not say */
    double norm_eps;
    int tied;         /* the head is the embedding */
    int64_t bos, eos; /* -1: none */
} qc_llama_config;

typedef struct qc_llama qc_llama;

typedef struct {
    unsigned threads;
    /* The first of these GPUs computes. If it is NULL or has no GPU, the CPU does. */
    const qc_devices *devices;
    qc_isa isa;
    qc_progress *progress; /* counts the bytes of weights that are read; may be NULL */
} qc_llama_tools;

/* Checks everything (names, shapes, what the configuration asks for) before anything is computed.
 * dir is for messages. c is borrowed. */
QC_NODISCARD qc_status qc_llama_open(qc_llama **out, const char *dir, const qc_checkpoint *c,
                                     const qc_llama_tools *tools, qc_error *err);
/* Returns the model_type where the CPU computes it and a GPU does not, else NULL. config may be
 * NULL. qc_llama_open refuses such a model with a GPU. */
const char *qc_llama_cpu_only(const qc_json *config);
void qc_llama_close(qc_llama *m); /* accepts NULL */
const qc_llama_config *qc_llama_config_of(const qc_llama *m);

/* Windows of tokens: independent sequences, one after the other. */
typedef struct {
    const uint32_t *ids;     /* ids of all windows */
    const uint64_t *lengths; /* [count] */
    uint64_t count;
    uint64_t tokens; /* sum of lengths */
} qc_llama_batch;

/* The bytes that qc_llama_hidden allocates at most for this many tokens, including the weights of a
 * layer. It does not count the caller's `out`, nor the head that qc_llama_logits keeps.
 * Saturates. */
uint64_t qc_llama_memory(const qc_llama *m, uint64_t tokens, uint64_t longest);

/* Computes the hidden states behind the final norm: out is [tokens, hidden] floats. QC_ERR_INPUT
 * for an id outside the vocabulary. QC_ERR_NONFINITE when a layer's result is not finite; the
 * message names the layer. */
QC_NODISCARD qc_status qc_llama_hidden(qc_llama *m, const qc_llama_batch *batch, float *out,
                                       qc_error *err);

/* Computes the logits of n rows of hidden states: out is [n, vocabulary]. The head is read once and
 * kept until qc_llama_close. */
QC_NODISCARD qc_status qc_llama_logits(qc_llama *m, const float *hidden, uint64_t n, float *out,
                                       qc_error *err);

#endif
