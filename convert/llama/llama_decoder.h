/* The layers and the output head of a Llama-like model on a GPU, as the forward pass uses them
 * (llama_device.c). gpu_llama.c implements it. Calibrating names its layers in the same way
 * (calibrate_device.h). */
#ifndef QC_CONVERT_LLAMA_DECODER_H
#define QC_CONVERT_LLAMA_DECODER_H

#include "base/dtype.h"
#include "kernels/matmul_tuning.h"
#include "quant/quant_weights.h"

/* The weight of a linear layer in host memory: quantized, or dense in F32, F16 or BF16. */
typedef struct {
    const qc_weights *quantized; /* NULL: dense */
    const void *dense;           /* [rows, cols] */
    qc_dtype dtype;
    uint64_t rows, cols;
    const float *bias; /* [rows]; NULL: none */
} qc_gpu_matrix;

typedef struct {
    uint64_t hidden, intermediate, heads, kv_heads, head_dim;
    float norm_eps;
    uint64_t longest; /* number of tokens in the longest window */
    /* Rotary positions [longest, head_dim / 2], with whatever scaling they have. Element i of a
     * head turns with element i + head_dim / 2. */
    const float *cosine, *sine;
} qc_gpu_decoder_form;

typedef struct {
    const float *input_norm, *attention_norm; /* [hidden], before attention and before the MLP */
    const float *q_norm, *k_norm; /* [head_dim], of each head before it turns; NULL: none */
    qc_gpu_matrix q, k, v, o, gate, up, down;
    uint64_t window; /* of sliding attention; 0: there is none */
} qc_gpu_decoder_layer;

/* For one thread. Hidden states and logits are floats in host memory; kernels/cuda_llama.h says
 * with what precision the device computes. */
typedef struct qc_gpu_decoder qc_gpu_decoder;

typedef struct qc_gpu_llama {
    /* QC_ERR_UNSUPPORTED: heads have more than 256 elements or an odd number of them. The tables of
     * form are copied. tuning: the choices of kernels, which are copied; NULL: none. */
    qc_status (*create)(qc_gpu_decoder **out, const qc_cuda_device *device,
                        const qc_gpu_decoder_form *form, const qc_matmul_table *tuning,
                        qc_error *err);
    void (*destroy)(qc_gpu_decoder *d); /* accepts NULL */
    /* Takes hidden [sum of lengths, form->hidden] through one layer, in place. lengths [windows]:
     * each at most form->longest. QC_ERR_NOMEM: the layer and one window do not fit the device.
     * The results are not searched for infinity and NaN. */
    qc_status (*layer)(qc_gpu_decoder *d, const qc_gpu_decoder_layer *layer, float *hidden,
                       const uint64_t *lengths, uint64_t windows, qc_error *err);
    /* Takes the output head to the device, where it stays until another one comes or destroy. */
    qc_status (*head)(qc_gpu_decoder *d, const qc_gpu_matrix *head, qc_error *err);
    /* Computes out [n, rows of the head] for n rows of hidden states behind the final norm. */
    qc_status (*logits)(qc_gpu_decoder *d, const float *hidden, uint64_t n, float *out,
                        qc_error *err);
} qc_gpu_llama;

#endif
