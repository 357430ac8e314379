/* The layers and the output head of a Llama-like model on a GPU, as the forward pass uses them
 * (forward.c). gpu_llama.c implements it. */
#ifndef QC_CONVERT_FORWARD_DECODER_H
#define QC_CONVERT_FORWARD_DECODER_H

#include "convert/forward/forward_layer.h"

/* For one thread. Hidden states and logits are floats in host memory; kernels/cuda_llama.h says
 * with what precision the device computes. */
typedef struct qc_gpu_decoder qc_gpu_decoder;

typedef struct qc_gpu_llama {
    /* longest: the tokens of the longest window. QC_ERR_UNSUPPORTED: heads have more than 256
     * elements or an odd number of them. */
    qc_status (*create)(qc_gpu_decoder **out, const qc_cuda_device *device,
                        const qc_forward_shape *shape, uint64_t longest, qc_error *err);
    void (*destroy)(qc_gpu_decoder *d); /* accepts NULL */
    /* Takes hidden [sum of lengths, hidden] through one layer, in place. window: of sliding
     * attention; 0: there is none. lengths [windows]: each at most `longest`. QC_ERR_NOMEM: the
     * layer and one window do not fit the device. The results are not searched for infinity and
     * NaN. */
    qc_status (*layer)(qc_gpu_decoder *d, const qc_forward_weights *w, uint64_t window,
                       float *hidden, const uint64_t *lengths, uint64_t windows, qc_error *err);
    /* Takes the output head to the device, where it stays until another one comes or destroy. */
    qc_status (*head)(qc_gpu_decoder *d, const qc_forward_matrix *head, qc_error *err);
    /* Computes out [n, rows of the head] for n rows of hidden states behind the final norm. */
    qc_status (*logits)(qc_gpu_decoder *d, const float *hidden, uint64_t n, float *out,
                        qc_error *err);
} qc_gpu_llama;

#endif
