/* The forward pass of a Llama-family language model, layer by layer in constant memory.
 *
 * Llama, Mistral, Qwen2, Qwen3 (config.json's model_type and architectures): RMS norm, rotary
 * positions (default, linear, llama3 and yarn scaling), grouped-query attention (with the biases of
 * Qwen2, the q and k norms of Qwen3, sliding windows where the configuration has them in use),
 * SwiGLU, tied or own output head. Others are refused by name.
 *
 * A checkpoint is any that formats/checkpoint.h opens: 16 and 32 bit, or quantized (qconv's output
 * compressed or not, bitsandbytes' form). Linear layers that are quantized go through the
 * dequant-matmul kernels: quant/matmul_ops.h on the CPU, kernels/matmul.h on a GPU. Everything
 * else is computed in float.
 *
 * The hidden states of a batch of windows pass through one layer at a time; of the weights one
 * layer is in memory, or less. Results do not depend on threads or instruction set, nor on how
 * windows are batched. */
#ifndef QC_CONVERT_LLAMA_H
#define QC_CONVERT_LLAMA_H

#include "base/cpu.h"
#include "convert/device/device_choice.h"
#include "convert/term/progress.h"
#include "formats/checkpoint.h"

/* Of config.json. */
typedef struct {
    const char *model_type; /* "llama", "mistral", "qwen2", "qwen3" */
    uint64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary;
    uint64_t context; /* max_position_embeddings; 0: not said */
    double norm_eps;
    int tied;         /* the head is the embedding */
    int64_t bos, eos; /* -1: none */
} qc_llama_config;

typedef struct qc_llama qc_llama;

typedef struct {
    unsigned threads;
    const qc_devices *devices; /* NULL or none: the CPU; else the first GPU */
    qc_isa isa;
    qc_progress *progress; /* bytes of weights read; NULL is fine */
} qc_llama_tools;

/* Checks everything (names, shapes, what the configuration asks for) before anything is computed.
 * dir: for messages. c is borrowed. */
QC_NODISCARD qc_status qc_llama_open(qc_llama **out, const char *dir, const qc_checkpoint *c,
                                     const qc_llama_tools *tools, qc_error *err);
void qc_llama_close(qc_llama *m); /* NULL is fine */
const qc_llama_config *qc_llama_config_of(const qc_llama *m);

/* Windows of tokens: independent sequences, one after the other. */
typedef struct {
    const uint32_t *ids;     /* of all windows */
    const uint64_t *lengths; /* [count] */
    uint64_t count;
    uint64_t tokens; /* sum of lengths */
} qc_llama_batch;

/* Bytes that qc_llama_hidden allocates at most for this many tokens, weights of a layer included;
 * not the caller's `out`, nor the head that qc_llama_logits keeps. Saturates. */
uint64_t qc_llama_memory(const qc_llama *m, uint64_t tokens, uint64_t longest);

/* Hidden states behind the final norm: out [tokens, hidden] floats. QC_ERR_INPUT for an id out of
 * the vocabulary; QC_ERR_NONFINITE when a layer's result is not finite, naming the layer. */
QC_NODISCARD qc_status qc_llama_hidden(qc_llama *m, const qc_llama_batch *batch, float *out,
                                       qc_error *err);

/* Logits of n rows of hidden states: out [n, vocabulary]. The head is read once and kept until
 * qc_llama_close. */
QC_NODISCARD qc_status qc_llama_logits(qc_llama *m, const float *hidden, uint64_t n, float *out,
                                       qc_error *err);

#endif
