/* What the program does on GPUs, behind one table, so that it is built the same with and without
 * CUDA: gpu_*.c (plain C over kernels/) fill the table, no_gpu.c, linked instead of them in a build
 * without kernels, has none. Nothing else of convert/ calls kernels/.
 *
 * qconv links gpu_*.c with the CUDA kernels, or no_gpu.c; the tests also link gpu_*.c with the
 * kernels on the CPU shim (qconv_shim). */
#ifndef QC_CONVERT_GPU_WORK_H
#define QC_CONVERT_GPU_WORK_H

#include "base/dtype.h"
#include "base/status.h"
#include "convert/bench.h"
#include "convert/llama_stage.h"
#include "convert/recipe.h"
#include "kernels/cuda_device.h"
#include "quant/error_feedback.h"
#include "quant/quant_weights.h"
#include "quant/search_sums.h"

/* ---- quantizing (gpu_quantize.c) ---- */

/* How a weight is quantized. */
typedef struct {
    qc_scheme scheme;     /* NF4, INT8_ROWS or INT8_BLOCKS */
    qc_dtype dtype;       /* F32, F16 or BF16 */
    uint32_t block_elems; /* NF4 and INT8_BLOCKS */
    uint64_t cols;        /* INT8_ROWS */
    /* Scales as quant/scale_search.h finds them, else absmax. The other three are of blocks: double
     * quantization (slots then hold whole groups), its offset, and QC_SEARCH_REFIT. */
    int searched, nested, refit;
    float offset;
} qc_gpu_form;

/* A ring of slots on one device, for one thread: while the host fills one, others are copied and
 * quantized. Slots are used in turn. */
typedef struct qc_gpu_ring qc_gpu_ring;
#define QC_GPU_SLOTS 3u

/* What a slot came to; pinned memory of the ring, until the slot is begun again. */
typedef struct {
    const void *codes;   /* as the quantizers of quant_ops.h leave them */
    const float *absmax; /* of blocks, or SCB of rows */
    const float *errors; /* see kernels/cuda_quantize.h and quant/quant_collect.h */
    uint64_t bad;        /* lowest index that has no code, or UINT64_MAX: the rest is unspecified */
    /* Blocks of searched scales, which have no errors; the last two where they are nested. */
    const qc_search_sum *found;
    const uint8_t *absmax_codes;
    const float *nested_absmax;
} qc_gpu_result;

typedef struct {
    /* slot_bytes: of source; halved down to min_bytes while there is no room. QC_ERR_NOMEM when
     * even that has none (on the device or, pinned, on the host); QC_ERR_DEVICE for no such device.
     * Allocates all that the ring ever needs: 2 x QC_GPU_SLOTS x slot_bytes on either side;
     * for the first search a little more. */
    qc_status (*ring_create)(qc_gpu_ring **out, const qc_cuda_device *device, size_t slot_bytes,
                             size_t min_bytes, qc_error *err);
    void (*ring_destroy)(qc_gpu_ring *r); /* waits for what was started; accepts NULL */
    size_t (*ring_slot_bytes)(const qc_gpu_ring *r);
    /* Elements of a form that fit a slot with their results; a multiple of `step` (whole blocks, or
     * rows), 0 if not even one step fits. */
    uint64_t (*ring_elems)(const qc_gpu_ring *r, const qc_gpu_form *form, uint64_t step);
    /* Pinned memory of a slot that is not at work, to be filled with elements. */
    void *(*ring_source)(qc_gpu_ring *r, unsigned slot);
    /* Copy, quantize, copy back; returns at once. n > 0 elements, at most ring_elems. On any error
     * the ring must be destroyed. QC_ERR_NOMEM: the device had no room to run it. */
    qc_status (*ring_start)(qc_gpu_ring *r, unsigned slot, const qc_gpu_form *form, uint64_t n,
                            qc_error *err);
    /* Wait for a started slot. Errors as of ring_start. */
    qc_status (*ring_finish)(qc_gpu_ring *r, unsigned slot, qc_gpu_result *out, qc_error *err);
} qc_gpu_quantizer;

/* ---- comparing a layer with its original (gpu_validate.c) ---- */

/* What one size of batch came to. Sums of squares are over all outputs of the rows looked at: with
 * Y the quantized matmul's result, Z cuBLAS' with the original weights (sums in double, rounded,
 * where there is no cuBLAS), S sums in double of the quantized weights. */
typedef struct {
    uint64_t m, first; /* rows [first, first + m) of x: the question, as is timed */
    int timed;
    const char *path;    /* "gemv", ... */
    double seconds;      /* median; 0: not timed */
    double fp16_seconds; /* likewise; 0 without cuBLAS */
    double
        floor_seconds; /* no implementation is faster here: memory and tensor cores as measured */
    double output_ee, output_xx, output_max; /* Y - Z, Z, largest |Y - Z| */
    double kernel_ee, kernel_xx, kernel_max; /* Y - S, S, largest |Y - S| */
    uint64_t outputs;                        /* looked at */
} qc_gpu_compared;

typedef struct {
    const qc_weights *w; /* in host memory */
    uint64_t codes_bytes, scales_bytes, nested_bytes;
    qc_dtype dtype; /* F16 or BF16: x, results and the original weights */
    const void *x;  /* host, [rows, cols] */
    uint64_t rows;
    /* Rows [first, first + count) of the original weights in dtype. */
    qc_status (*read)(void *ctx, uint64_t first, uint64_t count, void *out, qc_error *err);
    void *ctx;
} qc_gpu_comparison;

typedef struct qc_gpu_comparer qc_gpu_comparer;

typedef struct {
    /* Measures the device's roof first. tuning: choices of kernels, copied; NULL: none. */
    qc_status (*create)(qc_gpu_comparer **out, const qc_cuda_device *device,
                        const qc_matmul_table *tuning, qc_error *err);
    void (*destroy)(qc_gpu_comparer *c); /* accepts NULL */
    /* Why times against fp16 cannot be taken, or NULL. */
    const char *(*no_gemm)(const qc_gpu_comparer *c);
    /* Answers each of out. QC_ERR_NOMEM when the device has no room for the layer: nothing is lost,
     * others may follow. */
    qc_status (*compare)(qc_gpu_comparer *c, const qc_gpu_comparison *in, qc_gpu_compared *out,
                         unsigned count, qc_error *err);
} qc_gpu_validator;

/* ---- layers of a language model (gpu_llama.c) ---- */

/* A Linear layer's weight in host memory: quantized, or dense F32, F16 or BF16. */
typedef struct {
    const qc_weights *quantized; /* NULL: dense */
    const void *dense;           /* [rows, cols] */
    qc_dtype dtype;
    uint64_t rows, cols;
    const float *bias; /* [rows], NULL: none */
} qc_gpu_matrix;

typedef struct {
    uint64_t hidden, intermediate, heads, kv_heads, head_dim;
    float norm_eps;
    uint64_t longest; /* window of tokens, in tokens */
    /* Rotary positions [longest, head_dim / 2], whatever scaling they have. Element i of a head
     * turns with element i + head_dim / 2. */
    const float *cosine, *sine;
} qc_gpu_decoder_form;

typedef struct {
    const float *input_norm, *attention_norm; /* [hidden], before attention and before the MLP */
    const float *q_norm, *k_norm; /* [head_dim] of each head, before it turns; or NULL */
    qc_gpu_matrix q, k, v, o, gate, up, down;
    uint64_t window; /* sliding; 0: none */
} qc_gpu_decoder_layer;

/* For one thread. Hidden states and logits are floats in host memory; kernels/cuda_llama.h says
 * with what precision the device computes. */
typedef struct qc_gpu_decoder qc_gpu_decoder;

typedef struct {
    /* QC_ERR_UNSUPPORTED: heads of more than 256 elements or an odd number of them. form's tables
     * are copied. tuning: choices of kernels, copied; NULL: none. */
    qc_status (*create)(qc_gpu_decoder **out, const qc_cuda_device *device,
                        const qc_gpu_decoder_form *form, const qc_matmul_table *tuning,
                        qc_error *err);
    void (*destroy)(qc_gpu_decoder *d); /* accepts NULL */
    /* hidden [sum of lengths, form->hidden] through one layer, in place; lengths [windows], each at
     * most form->longest. QC_ERR_NOMEM: the layer and one window do not fit the device. Results
     * are not looked at for infinity and NaN. */
    qc_status (*layer)(qc_gpu_decoder *d, const qc_gpu_decoder_layer *layer, float *hidden,
                       const uint64_t *lengths, uint64_t windows, qc_error *err);
    /* Takes the output head to the device, where it stays until another or destroy. */
    qc_status (*head)(qc_gpu_decoder *d, const qc_gpu_matrix *head, qc_error *err);
    /* out [n, rows of the head] of n rows of hidden states behind the final norm. */
    qc_status (*logits)(qc_gpu_decoder *d, const float *hidden, uint64_t n, float *out,
                        qc_error *err);
} qc_gpu_llama;

/* ---- calibrating (gpu_calibrate.c) ---- */

/* A text through the layers of a model in two streams, z through those that there were, x through
 * those that were quantized (convert/calibrate_model.c), the second moments of what linear layers
 * get, and what is made of them (kernels/cuda_feedback.h). For one thread. Any error leaves it good
 * for nothing but destroy, but those that say otherwise. */
typedef struct qc_gpu_calibrator qc_gpu_calibrator;

/* Of whole windows, in host memory; [tokens, hidden] and [tokens, heads * head_dim]. */
typedef struct {
    float *x, *z;
    float *x_attended, *z_attended;
    const uint64_t *lengths; /* [windows] */
    uint64_t windows;
} qc_gpu_states;

typedef struct {
    /* form NULL: no text, moments come from elsewhere. QC_ERR_DEVICE where cuBLAS or cuSOLVER
     * cannot be had, in one sentence; form's tables are copied. tuning: copied; NULL: none. */
    qc_status (*create)(qc_gpu_calibrator **out, const qc_cuda_device *device,
                        const qc_gpu_decoder_form *form, const qc_matmul_table *tuning,
                        qc_error *err);
    void (*destroy)(qc_gpu_calibrator *c); /* accepts NULL */
    /* What bytes depend on: "NVIDIA H200, cuBLAS 13.0.0, cuSOLVER 12.0.4". */
    const char *(*name)(const qc_gpu_calibrator *c);
    /* Takes a layer to the device, where it replaces the one before. Matrices and vectors that both
     * sides name by the same pointers are held once. QC_ERR_NOMEM: nothing of it is there. */
    qc_status (*layer)(qc_gpu_calibrator *c, const qc_gpu_decoder_layer *z,
                       const qc_gpu_decoder_layer *x, qc_error *err);
    /* x's matrix `part` is this from now on. */
    qc_status (*replace)(qc_gpu_calibrator *c, qc_llama_part part, const qc_gpu_matrix *m,
                         qc_error *err);
    /* Room for moments of n inputs, zero; cross: C as well. What factor made is gone. */
    qc_status (*moments)(qc_gpu_calibrator *c, uint64_t n, int cross, qc_error *err);
    /* All windows through a stage of the layer in both streams; see qc_llama_cpu_stage. AT_O fills
     * attended, AT_GATE reads it; AT_GATE and AT_END change x and z. add: what the stage's linear
     * layers get is added to the moments (of AT_END nothing). */
    qc_status (*stage)(qc_gpu_calibrator *c, qc_llama_stage stage, const qc_gpu_states *s, int add,
                       qc_error *err);
    /* A whole layer, all windows, both streams. */
    qc_status (*pass)(qc_gpu_calibrator *c, const qc_gpu_states *s, qc_error *err);
    /* Adds moments of x and z behind a norm with gain [hidden]: inputs of the head. */
    qc_status (*head)(qc_gpu_calibrator *c, const float *gain, const qc_gpu_states *s,
                      qc_error *err);
    /* Moments from elsewhere: h [n, n] host, lower triangle; takes the place of moments(). */
    qc_status (*take)(qc_gpu_calibrator *c, uint64_t n, const double *h, qc_error *err);
    /* Factors the moments, which are gone then; weights follow. QC_ERR_INPUT, QC_ERR_NONFINITE as
     * qc_feedback_open. */
    qc_status (*factor)(qc_gpu_calibrator *c, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err);
    /* A weight with these inputs, dense, in host memory; bias is not looked at. */
    qc_status (*weight)(qc_gpu_calibrator *c, const qc_feedback_form *form, const qc_gpu_matrix *w,
                        qc_feedback_out *out, qc_feedback_result *result, qc_error *err);
    /* Seconds an operation, measured in some tenths of a second: of products in float (moments,
     * weights), in double (factor; target), and of the forward pass (form not NULL). */
    qc_status (*measure)(qc_gpu_calibrator *c, double *single, double *dual, double *forward,
                         qc_error *err);
    /* Device memory, at the least, of: activations and workspaces; two streams of a layer of which
     * weights take `layer_bytes` in each; moments, factor and a weight [rows, n]. Saturates. */
    uint64_t (*bytes)(const qc_gpu_decoder_form *form, uint64_t layer_bytes, uint64_t n, int cross,
                      uint64_t rows, const qc_feedback_form *weight);
} qc_gpu_calibrating;

/* ---- all of it ---- */

typedef struct {
    /* Number of devices, or 0 and a sentence why. See kernels/cuda_device.h. */
    void (*device_count)(int *count, char *why, size_t why_bytes);
    /* QC_ERR_DEVICE if this build has no code for it. */
    qc_status (*device_open)(qc_cuda_device *out, int index, qc_error *err);
    qc_gpu_quantizer quantizer;
    qc_gpu_validator validator;
    qc_gpu_llama llama;
    qc_gpu_calibrating calibrating;
    /* qconv bench (gpu_bench.c): measure what q asks; rows go to the arena, and to sink as they
     * come. QC_ERR_CHECK: a kernel's result is wrong. */
    qc_status (*bench)(const qc_bench_request *q, const qc_bench_sink *sink, qc_arena *arena,
                       qc_bench_result *out, qc_error *err);
} qc_gpu_work;

/* NULL in a build without CUDA kernels. */
const qc_gpu_work *qc_gpu_work_get(void);
/* "CUDA 13.0: sm_75 sm_80 ..."; "none" in a build without. For --version and hardware. */
const char *qc_gpu_build(void);

#endif
