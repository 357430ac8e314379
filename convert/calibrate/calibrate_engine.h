/* An engine computes for calibrating: on the CPU (calibrate_cpu.c) or on a GPU (gpu_calibrate.c).
 * Both factor second moments and make weights with the factors. The caller reads weights, keeps
 * results and tells the user. The operations are called in this order: take, factor, weight for
 * each weight, and drop. An engine is for one thread, and it answers Ctrl-C. */
#ifndef QC_CONVERT_CALIBRATE_ENGINE_H
#define QC_CONVERT_CALIBRATE_ENGINE_H

#include "convert/calibrate/calibrate_internal.h"

/* The bytes of the host and of a GPU that the work on one layer takes. */
typedef struct {
    uint64_t host, device;
} qc_calibrate_room;

typedef struct {
    size_t engine_bytes; /* all zeros when an engine is opened */
    void (*close)(qc_calibrate_engine *e);
    /* Measures the speed in a few tenths of a second. */
    qc_status (*measure)(qc_calibrate_engine *e, qc_calibrate_speed *out, qc_error *err);
    /* The memory that is needed for the moments, the factor and a weight [rows, n] of a set. It
     * saturates. block: of qc_feedback_outputs, or 0. */
    qc_calibrate_room (*room_weight)(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_form *form, uint64_t block);

    /* Takes moments from elsewhere: h [n, n], of which the lower triangle counts, and c [n, n] or
     * NULL. They are from qc_malloc, and the engine frees them, also after an error. */
    qc_status (*take)(qc_calibrate_engine *e, uint64_t n, double *h, double *c, qc_error *err);
    /* These are qc_feedback_open of the moments and qc_feedback_weight; g: of the outputs, or
     * NULL. */
    qc_status (*factor)(qc_calibrate_engine *e, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err);
    qc_status (*weight)(qc_calibrate_engine *e, const qc_form *form, const float *w, uint64_t rows,
                        const qc_feedback_outputs *g, qc_feedback_out *out,
                        qc_feedback_result *result, qc_error *err);
    void (*drop)(qc_calibrate_engine *e); /* frees the moments and the factor, if there are any */
} qc_calibrate_engine_ops;

/* Every engine begins with this. */
struct qc_calibrate_engine {
    const qc_calibrate_engine_ops *ops;
    const qc_calibrator *k;
};

QC_NODISCARD qc_status qc_calibrate_engine_create(qc_calibrate_engine **out,
                                                  const qc_calibrate_engine_ops *ops,
                                                  const qc_calibrator *k, qc_error *err);
void qc_calibrate_engine_destroy(qc_calibrate_engine *e); /* NULL is fine */

extern const qc_calibrate_engine_ops qc_calibrate_cpu_ops;

/* What calibrating needs of a GPU. */
typedef struct qc_gpu_calibrating {
    const qc_calibrate_engine_ops *ops; /* its engine is on the first of the calibrator's devices */
    /* What the bytes depend on, in the arena: "NVIDIA H200, cuBLAS 13.0.0, cuSOLVER 12.0.4". It
     * opens and closes the device. QC_ERR_DEVICE, with one sentence, where cuBLAS or cuSOLVER
     * cannot be had. */
    qc_status (*name)(const char **out, qc_arena *arena, const qc_cuda_device *device,
                      qc_error *err);
} qc_gpu_calibrating;

/* The bytes of [n, n] doubles, and such a matrix of zeros, which is to be freed. */
uint64_t qc_calibrate_square_bytes(uint64_t n);
QC_NODISCARD qc_status qc_calibrate_square(double **out, uint64_t n, qc_error *err);

#endif
