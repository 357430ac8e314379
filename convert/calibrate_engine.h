/* What calibrating computes with: the CPU (calibrate_cpu.c), or a GPU (calibrate_gpu.c). Both go
 * through a text layer by layer in two streams, x and z (convert/calibrate_model.c), add up second
 * moments, factor them and make weights of them; what is read, kept and told is the caller's.
 *
 * Of an engine's operations the order is: text, once; layer, then of this layer moments, stage,
 * factor, weight, quantized, drop for each group, or pass; head as a stage. Without a text: take,
 * factor, weight, drop. For one thread; answers Ctrl-C. */
#ifndef QC_CONVERT_CALIBRATE_ENGINE_H
#define QC_CONVERT_CALIBRATE_ENGINE_H

#include "convert/calibrate_parts.h"
#include "convert/calibrate_states.h"

/* Of this machine, in seconds an operation. Factors and weights take some times the time of their
 * products: the rest of their work. */
typedef struct {
    double single, dual; /* products of floats; of doubles (of the factor) */
    double forward;
    double factor_slower, weight_slower;
} qc_calibrate_speed;

/* Bytes that work on one layer takes, of the host and of a GPU. */
typedef struct {
    uint64_t host, device;
} qc_calibrate_room;

typedef struct {
    void (*destroy)(qc_calibrate_engine *e); /* accepts NULL */
    /* Measures it, in a few tenths of a second. shape: of the model whose text is to come, or
     * NULL. */
    qc_status (*measure)(qc_calibrate_engine *e, const qc_llama_shape *shape,
                         qc_calibrate_speed *out, qc_error *err);
    /* Saturate. activations: of text. group: moments, factor and the weights of one group, of which
     * this is one. layer: of which the source's weights take so many bytes. */
    qc_calibrate_room (*room_text)(const qc_calibrate_engine *e, const qc_llama_shape *shape,
                                   uint64_t tokens, uint64_t longest);
    qc_calibrate_room (*room_layer)(const qc_calibrate_engine *e, uint64_t bytes);
    qc_calibrate_room (*room_weight)(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_feedback_form *form);

    /* All borrowed until destroy. */
    qc_status (*text)(qc_calibrate_engine *e, const qc_llama_shape *shape,
                      const qc_llama_batch *batch, const qc_calibrate_states *states,
                      qc_error *err);
    /* Borrowed until the next layer. */
    qc_status (*layer)(qc_calibrate_engine *e, uint64_t number, const qc_llama_weights *z,
                       const qc_llama_weights *x, qc_error *err);
    /* x's matrix `part` has become another, quantized one. */
    qc_status (*quantized)(qc_calibrate_engine *e, qc_llama_part part, qc_error *err);
    /* Moments of n inputs, zero; cross: C as well. */
    qc_status (*moments)(qc_calibrate_engine *e, uint64_t n, int cross, qc_error *err);
    /* All windows through a stage; add: its inputs to the moments. seconds: for the progress. */
    qc_status (*stage)(qc_calibrate_engine *e, qc_llama_stage stage, int add, double seconds,
                       qc_error *err);
    qc_status (*pass)(qc_calibrate_engine *e, double seconds, qc_error *err);
    /* Inputs of the head, behind the norm with this gain [hidden], to the moments. */
    qc_status (*head)(qc_calibrate_engine *e, const float *gain, qc_error *err);
    /* Moments from elsewhere: h [n, n], lower triangle, of qc_malloc; taken over in any case. */
    qc_status (*take)(qc_calibrate_engine *e, uint64_t n, double *h, qc_error *err);
    /* As qc_feedback_open of the moments, as qc_feedback_weight. */
    qc_status (*factor)(qc_calibrate_engine *e, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err);
    qc_status (*weight)(qc_calibrate_engine *e, const qc_feedback_form *form,
                        const qc_llama_matrix *w, qc_feedback_out *out, qc_feedback_result *result,
                        qc_error *err);
    void (*drop)(qc_calibrate_engine *e); /* moments and factor; without them nothing */
} qc_calibrate_engine_ops;

/* The beginning of an engine. */
struct qc_calibrate_engine {
    const qc_calibrate_engine_ops *ops;
    const qc_calibrator *k;
};

QC_NODISCARD qc_status qc_calibrate_cpu_create(qc_calibrate_engine **out, const qc_calibrator *k,
                                               qc_error *err);
/* On the first of k->devices. QC_ERR_DEVICE where it has no cuBLAS or cuSOLVER. */
QC_NODISCARD qc_status qc_calibrate_gpu_create(qc_calibrate_engine **out, const qc_calibrator *k,
                                               qc_error *err);
/* What the bytes depend on: "NVIDIA H200, cuBLAS ...", to the arena. Opens and closes it. */
QC_NODISCARD qc_status qc_calibrate_gpu_name(const char **out, qc_arena *arena,
                                             const qc_devices *devices, qc_error *err);

/* A weight as floats; *owned is to be freed, and NULL where w is floats already. */
QC_NODISCARD qc_status qc_calibrate_floats(const qc_quant_ops *ops, const qc_llama_matrix *w,
                                           const float **out, void **owned, qc_error *err);
/* Bytes of [n, n] doubles; zeros, to be freed. */
uint64_t qc_calibrate_square_bytes(uint64_t n);
QC_NODISCARD qc_status qc_calibrate_square(double **out, uint64_t n, qc_error *err);

#endif
