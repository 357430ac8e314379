/* What gpu_llama.c and gpu_calibrate.c share: the layers of a Llama-like decoder on a GPU, step by
 * step. All work is put on one stream. The device must be current (qc_cuda_use). */
#ifndef QC_CONVERT_GPU_FORWARD_H
#define QC_CONVERT_GPU_FORWARD_H

#include "convert/forward/forward_decoder.h"
#include "kernels/cuda_llama.h"
#include "kernels/matmul.h"

#define QC_GPU_TOKENS          4096u /* in a chunk, or the longest window if that is longer */
#define QC_GPU_WORKSPACE_MOST  ((uint64_t)256 << 20)
#define QC_GPU_WORKSPACE_LEAST ((uint64_t)16 << 20) /* no smaller workspace is tried */

typedef struct {
    uint64_t rows, cols;
    int is_dense; /* also integers, which are dequantized on the way: no kernel reads their codes */
    uint16_t *half; /* dense */
    int *exponent;  /* dense */
    uint32_t *largest;
    qc_weights stored; /* quantized; its arrays are on the device */
    void *prepared;
    qc_matmul_weights ready;
    float *bias;              /* or NULL */
    uint64_t workspace_bytes; /* for products with it; the splitting of K depends on it */
} qc_gpu_device_matrix;

/* An allocation on the device that can grow. */
typedef struct {
    unsigned char *base;
    uint64_t bytes;
} qc_gpu_memory;

/* Cuts an allocation into arrays, one after the other. base NULL: it only counts their bytes. */
typedef struct {
    unsigned char *base;
    uint64_t used;
} qc_gpu_cutter;

/* The activations of a chunk of tokens. */
typedef struct {
    uint64_t tokens; /* how many tokens there is room for */
    float *hidden, *q, *k, *v, *attended;
    uint16_t *x, *a, *b;       /* halves: x goes into products, a and b come out of them */
    int *exponent, *exponent2; /* exponents of x, before and behind SwiGLU */
    uint32_t *position;
    qc_cuda_query_tile *tiles;
} qc_gpu_activations;

/* The state of whoever computes layers. All zeros mean that nothing has been allocated. */
typedef struct {
    qc_cuda_device device;
    qc_forward_config form;
    uint64_t longest;     /* the tokens of the longest window */
    float *cosine, *sine; /* of rotary positions [longest, head_dim / 2], on the device */
    qc_matmul *handle;
    qc_cuda_stream stream;
    qc_gpu_memory tables, room, workspace;
    qc_gpu_activations act;
    uint32_t *position;        /* host, [act.tokens] */
    qc_cuda_query_tile *tiles; /* host, [act.tokens] */
} qc_gpu_forward;

/* A layer on the device, and a chunk of whole windows that goes through it. */
typedef struct {
    qc_gpu_device_matrix matrices[QC_LAYER_MATRICES];
    float *vectors[QC_LAYER_VECTORS]; /* NULL if the family does not have it */
    uint32_t window;
    uint64_t rows; /* of the chunk */
    uint32_t tiles;
} qc_gpu_layer_run;

/* ---- memory ---- */

uint64_t qc_gpu_aligned(uint64_t bytes);
/* Returns the product of the three. Saturates. */
uint64_t qc_gpu_bytes_of(uint64_t tokens, uint64_t each, uint64_t size);
/* Makes m at least this large. Its bytes are then not initialised. */
QC_NODISCARD qc_status qc_gpu_grow(qc_gpu_forward *d, qc_gpu_memory *m, uint64_t bytes,
                                   qc_error *err);
void qc_gpu_drop(qc_gpu_memory *m);
void *qc_gpu_cut(qc_gpu_cutter *c, uint64_t bytes);
qc_gpu_activations qc_gpu_lay_activations(const qc_forward_config *f, uint64_t tokens,
                                          qc_gpu_cutter *c);

/* Free it with deinit, also after an error. QC_ERR_UNSUPPORTED as qc_gpu_llama.create. */
QC_NODISCARD qc_status qc_gpu_forward_init(qc_gpu_forward *d, const qc_cuda_device *device,
                                           const qc_forward_shape *shape, uint64_t longest,
                                           qc_error *err);
/* Waits for what was started; nothing may still use the memory that is given back. */
void qc_gpu_forward_settle(qc_gpu_forward *d);
void qc_gpu_forward_deinit(qc_gpu_forward *d);

/* ---- weights ---- */

/* Bytes of the stage that qc_gpu_fill_matrix needs for this matrix: a dense one as it comes, or
 * integers and the floats that they are dequantized to. 0: none. */
uint64_t qc_gpu_stage_bytes(const qc_forward_matrix *m);
/* Decides where the arrays of a weight lie. Nothing is copied yet. */
qc_gpu_device_matrix qc_gpu_lay_matrix(const qc_forward_matrix *m, qc_gpu_cutter *c);
/* Copies a weight to its place and makes it ready. stage: qc_gpu_stage_bytes. *workspace: what
 * products of `tokens` rows need. */
QC_NODISCARD qc_status qc_gpu_fill_matrix(qc_gpu_forward *d, const qc_forward_matrix *m,
                                          qc_gpu_device_matrix *out, void *stage, uint64_t tokens,
                                          uint64_t *workspace, qc_error *err);
QC_NODISCARD qc_status qc_gpu_make_workspace(qc_gpu_forward *d, uint64_t bytes, qc_error *err);
/* Weights that are taken to the device together. */
typedef struct {
    const qc_forward_matrix *in; /* [count] */
    qc_gpu_device_matrix *out;   /* [count] */
    unsigned count;
    uint64_t tokens;      /* rows of the products that they are for */
    uint64_t extra_bytes; /* bytes for the caller, behind the weights */
} qc_gpu_weights;
/* Takes all of them into `memory` and makes the workspace for their products, a smaller one where
 * memory is short. *extra: where the caller's bytes are; NULL is fine. */
QC_NODISCARD qc_status qc_gpu_take_weights(qc_gpu_forward *d, const qc_gpu_weights *w,
                                           qc_gpu_memory *memory, unsigned char **extra,
                                           qc_error *err);
/* The bytes that the vectors of a layer take, and taking them there. window: of sliding attention;
 * 0: there is none. */
uint64_t qc_gpu_vectors_bytes(const qc_gpu_forward *d);
QC_NODISCARD qc_status qc_gpu_take_vectors(qc_gpu_forward *d, const qc_forward_weights *w,
                                           uint64_t window, unsigned char *memory,
                                           qc_gpu_layer_run *out, qc_error *err);
/* y = x W^T. *out says how to read y: with which exponents and which bias. */
QC_NODISCARD qc_status qc_gpu_multiply(qc_gpu_forward *d, const qc_gpu_device_matrix *w,
                                       const uint16_t *x, const int *exponent, uint64_t rows,
                                       uint16_t *y, qc_cuda_product *out, qc_error *err);

/* ---- a chunk of windows, in d->act ---- */

QC_NODISCARD qc_status qc_gpu_check_windows(const qc_gpu_forward *d, const uint64_t *lengths,
                                            uint64_t windows, qc_error *err);
/* Finds the windows from *next on that go together, with most_tokens or one window, and returns the
 * number of their tokens. *next is then the window behind them. */
uint64_t qc_gpu_next_windows(const uint64_t *lengths, uint64_t windows, uint64_t most_tokens,
                             uint64_t *next);
/* Sends the positions and tiles of `count` windows to the device and sets r->rows and r->tiles. The
 * stream must have finished the windows before. */
QC_NODISCARD qc_status qc_gpu_step_windows(qc_gpu_forward *d, qc_gpu_layer_run *r,
                                           const uint64_t *lengths, uint64_t count, qc_error *err);
/* hidden -> x, exponent: behind the norm with this gain. */
QC_NODISCARD qc_status qc_gpu_step_norm(qc_gpu_forward *d, const qc_gpu_layer_run *r,
                                        const float *gain, qc_error *err);
/* hidden -> attended. */
QC_NODISCARD qc_status qc_gpu_step_attend(qc_gpu_forward *d, const qc_gpu_layer_run *r,
                                          qc_error *err);
/* Adds o of attended to hidden. */
QC_NODISCARD qc_status qc_gpu_step_o(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err);
/* hidden -> x, exponent2: the inputs of down. */
QC_NODISCARD qc_status qc_gpu_step_gate(qc_gpu_forward *d, const qc_gpu_layer_run *r,
                                        qc_error *err);
/* Adds down of x, exponent2 to hidden. */
QC_NODISCARD qc_status qc_gpu_step_down(qc_gpu_forward *d, const qc_gpu_layer_run *r,
                                        qc_error *err);
/* Takes the hidden states of the chunk from the host through the whole layer and back. */
QC_NODISCARD qc_status qc_gpu_step_layer(qc_gpu_forward *d, const qc_gpu_layer_run *r,
                                         float *hidden, qc_error *err);
/* Returns the bytes of the chunk's hidden states. */
size_t qc_gpu_hidden_bytes(const qc_gpu_forward *d, const qc_gpu_layer_run *r);

#endif
