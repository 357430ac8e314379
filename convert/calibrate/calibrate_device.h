/* What calibrating needs of a GPU: a text that goes through the layers of a model in two streams,
 * the second moments of what linear layers get, and the factors and weights that are made of them.
 * calibrate_gpu.c uses it, gpu_calibrate.c implements it. This header includes nothing of gpu/, so
 * gpu/ may include it. */
#ifndef QC_CONVERT_CALIBRATE_DEVICE_H
#define QC_CONVERT_CALIBRATE_DEVICE_H

#include "convert/llama/llama_decoder.h"
#include "convert/llama/llama_stage.h"
#include "quant/error_feedback.h"

/* Stream z goes through the layers as they were, stream x through those that were quantized
 * (calibrate_model.c); kernels/cuda_feedback.h makes the weights. For one thread. After an error
 * nothing but destroy is allowed, except where a function says otherwise. */
typedef struct qc_gpu_calibrator qc_gpu_calibrator;

/* The states of whole windows in host memory: [tokens, hidden] and [tokens, heads * head_dim]. */
typedef struct {
    float *x, *z;
    float *x_attended, *z_attended;
    const uint64_t *lengths; /* [windows] */
    uint64_t windows;
} qc_gpu_states;

/* What is to be counted by `bytes`; zeros count for nothing. */
typedef struct {
    const qc_gpu_decoder_form *form; /* activations and workspaces of a text, or NULL */
    uint64_t layer_bytes;            /* two streams of a layer whose weights take this in each */
    uint64_t n;                      /* moments of n inputs and their factor */
    int cross;                       /* with cross moments */
    uint64_t rows;                   /* a weight [rows, n] in this form, or NULL */
    const qc_feedback_form *weight;
} qc_gpu_calibrating_size;

typedef struct qc_gpu_calibrating {
    /* form NULL: there is no text, and the moments come from elsewhere. QC_ERR_DEVICE, with one
     * sentence, where cuBLAS or cuSOLVER cannot be had. The tables of form are copied, and so is
     * tuning; NULL: none. */
    qc_status (*create)(qc_gpu_calibrator **out, const qc_cuda_device *device,
                        const qc_gpu_decoder_form *form, const qc_matmul_table *tuning,
                        qc_error *err);
    void (*destroy)(qc_gpu_calibrator *c); /* accepts NULL */
    /* What the bytes depend on: "NVIDIA H200, cuBLAS 13.0.0, cuSOLVER 12.0.4". */
    const char *(*name)(const qc_gpu_calibrator *c);
    /* Takes a layer to the device, where it replaces the one before. Matrices and vectors that both
     * streams name by the same pointers are held once. QC_ERR_NOMEM: nothing of it is there. */
    qc_status (*layer)(qc_gpu_calibrator *c, const qc_gpu_decoder_layer *z,
                       const qc_gpu_decoder_layer *x, qc_error *err);
    /* From now on m is matrix `part` of stream x. */
    qc_status (*replace)(qc_gpu_calibrator *c, qc_llama_part part, const qc_gpu_matrix *m,
                         qc_error *err);
    /* Makes room for the moments of n inputs and sets them to zero; cross: C as well. The result of
     * factor is gone. */
    qc_status (*moments)(qc_gpu_calibrator *c, uint64_t n, int cross, qc_error *err);
    /* Takes all windows through a stage of the layer in both streams; see qc_llama_cpu_stage. AT_O
     * fills the attended arrays and AT_GATE reads them; AT_GATE and AT_END change x and z. add: the
     * inputs of the stage's linear layers are added to the moments (AT_END has none). */
    qc_status (*stage)(qc_gpu_calibrator *c, qc_llama_stage stage, const qc_gpu_states *s, int add,
                       qc_error *err);
    /* Takes all windows of both streams through the whole layer. */
    qc_status (*pass)(qc_gpu_calibrator *c, const qc_gpu_states *s, qc_error *err);
    /* Adds the moments of x and z behind a norm with gain [hidden]: the inputs of the head. */
    qc_status (*head)(qc_gpu_calibrator *c, const float *gain, const qc_gpu_states *s,
                      qc_error *err);
    /* Takes moments from elsewhere, instead of moments() and stages: h [n, n] in host memory, of
     * which the lower triangle counts. */
    qc_status (*take)(qc_gpu_calibrator *c, uint64_t n, const double *h, qc_error *err);
    /* Factors the moments, which are gone afterwards; weights may follow. QC_ERR_INPUT and
     * QC_ERR_NONFINITE as qc_feedback_open. */
    qc_status (*factor)(qc_gpu_calibrator *c, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err);
    /* Quantizes a weight with these inputs, which is dense and in host memory. Its bias is not
     * looked at. */
    qc_status (*weight)(qc_gpu_calibrator *c, const qc_feedback_form *form, const qc_gpu_matrix *w,
                        qc_feedback_out *out, qc_feedback_result *result, qc_error *err);
    /* Seconds for one operation, measured in a few tenths of a second: of products in float (the
     * moments and weights), of products in double (the factor and the target), and of the forward
     * pass (only with a form). */
    qc_status (*measure)(qc_gpu_calibrator *c, double *single, double *dual, double *forward,
                         qc_error *err);
    /* The device memory that is needed at the least for all that size names. Saturates. */
    uint64_t (*bytes)(const qc_gpu_calibrating_size *size);
} qc_gpu_calibrating;

#endif
