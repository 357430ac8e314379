/* Shared by gpu_calibrate*.c; not for callers. */
#ifndef QC_CONVERT_GPU_CALIBRATE_INTERNAL_H
#define QC_CONVERT_GPU_CALIBRATE_INTERNAL_H

#include "convert/gpu/gpu_calibrate.h"
#include "convert/gpu/gpu_forward.h"
#include "kernels/cuda_feedback.h"

/* What the memory is for. */
#define OF_TEXT     "the activations of calibration"
#define OF_LAYER    "a layer's weights"
#define OF_PRODUCTS "a layer's products"
#define OF_MOMENTS  "the second moments of a linear layer's inputs"
#define OF_INPUTS   "the inputs of a linear layer"
#define OF_TIMED    "products that are timed"

/* One stream's side of a layer. */
typedef struct {
    qc_gpu_layer_run run;
    qc_gpu_memory matrices[QC_LAYER_MATRICES], vectors;
} qc_gpu_calibrator_side;

typedef struct {
    qc_calibrate_engine base;
    qc_gpu_forward f; /* without a text it has the device and the stream only */
    int text, has_layer;
    const qc_forward_shape *shape;
    qc_forward_batch batch;
    const qc_calibrate_states *states;
    const qc_forward_weights *weights; /* of x */
    qc_cuda_feedback_tools tools;
    qc_gpu_calibrator_side z, x;
    qc_gpu_memory inputs; /* floats: of x, then of z */
    uint64_t n;           /* of the moments; 0: none */
    double *h, *c;        /* c NULL: none */
    qc_gpu_memory scratch;
    qc_cuda_feedback *factor;
} qc_gpu_calibrator;

static inline qc_gpu_calibrator *qc_gpu_calibrator_of(qc_calibrate_engine *e)
{
    return (qc_gpu_calibrator *)e;
}

/* ---- gpu_calibrate_device.c ---- */

/* Makes an error that says what the device has no room for. */
QC_NODISCARD qc_status qc_gpu_calibrator_named(qc_status st, const char *what, qc_error *err);
/* As qc_gpu_grow; what: what the memory is for. */
QC_NODISCARD qc_status qc_gpu_calibrator_grow(qc_gpu_calibrator *g, qc_gpu_memory *m,
                                              uint64_t bytes, const char *what, qc_error *err);
void qc_gpu_calibrator_drop_moments(qc_gpu_calibrator *g);
void qc_gpu_calibrator_drop_factor(qc_gpu_calibrator *g);
void qc_gpu_calibrator_drop_side(qc_gpu_calibrator_side *s);
/* After an error, what was started may still read the host's arrays, so this waits for it. Returns
 * st. */
QC_NODISCARD qc_status qc_gpu_calibrator_settled(qc_gpu_calibrator *g, qc_status st, qc_error *err);
void qc_gpu_calibrator_close_device(qc_gpu_calibrator *g);
/* shape NULL: there is no text. */
QC_NODISCARD qc_status qc_gpu_calibrator_reopen(qc_gpu_calibrator *g, const qc_forward_shape *shape,
                                                uint64_t longest, qc_error *err);
/* As in qc_gpu_calibrating. */
QC_NODISCARD qc_status qc_gpu_calibrator_device_name(const char **out, qc_arena *arena,
                                                     const qc_cuda_device *device, qc_error *err);

/* ---- gpu_calibrate_speed.c: as in qc_calibrate_engine_ops ---- */

QC_NODISCARD qc_status qc_gpu_calibrator_measure(qc_calibrate_engine *e,
                                                 const qc_forward_shape *shape,
                                                 qc_calibrate_speed *out, qc_error *err);
qc_calibrate_room qc_gpu_calibrator_room_text(const qc_calibrate_engine *e,
                                              const qc_forward_shape *shape, uint64_t tokens,
                                              uint64_t longest);
qc_calibrate_room qc_gpu_calibrator_room_weight(const qc_calibrate_engine *e, uint64_t rows,
                                                uint64_t n, int cross, const qc_form *form,
                                                uint64_t block);

#endif
