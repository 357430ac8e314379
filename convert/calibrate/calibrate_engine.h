/* An engine computes for calibrating: on the CPU (calibrate_cpu.c) or on a GPU (gpu_calibrate.c).
 * Both factor second moments and make weights with the factors. The CPU's also takes a text through
 * a model layer by layer in two streams, x and z (calibrate_model.c), and adds up their moments;
 * a GPU's leaves the operations for that NULL. The caller reads weights, keeps results and tells
 * the user.
 *
 * The operations are called in this order. With a text: text once; then for each layer first layer,
 * and after it either pass, or for each set of linear layers moments, reach, factor, weight and
 * drop; for the head, head takes the place of reach. Without a text: take, factor, weight and drop.
 * An engine is for one thread, and it answers Ctrl-C. */
#ifndef QC_CONVERT_CALIBRATE_ENGINE_H
#define QC_CONVERT_CALIBRATE_ENGINE_H

#include "convert/calibrate/calibrate_internal.h"
#include "convert/term/scratch_memory.h"

/* ---- calibrate_states.c ---- */

/* The hidden states of a calibration text in both passes, and what their attention gave. They are
 * in memory up to a limit, and beyond it in an unnamed file of the staging folder. The environment
 * variable QCONV_STATES_MEMORY sets another limit, in MiB. */
#define QC_CALIBRATE_STATES_MEMORY ((uint64_t)1 << 30)
#define QC_CALIBRATE_FEWER         "take fewer tokens with --calibration-tokens"

typedef struct {
    float *x, *z;                   /* [tokens, hidden] */
    float *x_attended, *z_attended; /* [tokens, q] */
    qc_scratch_memory memory;
} qc_calibrate_states;

/* Returns where files without a name go: the staging folder, or before there is a plan TMPDIR. */
const char *qc_calibrate_folder(const qc_calibrator *k);
/* Returns the bytes of states that may be in memory. */
uint64_t qc_calibrate_states_memory(void);
/* Returns the bytes of states that this text needs. Saturates. */
uint64_t qc_calibrate_states_bytes(uint64_t tokens, uint64_t hidden, uint64_t q);
/* Returns QC_ERR_NOSPACE where the file does not fit the disk. s is to be closed also after a
 * failure. */
QC_NODISCARD qc_status qc_calibrate_states_open(qc_calibrate_states *s, const qc_calibrator *k,
                                                uint64_t tokens, uint64_t hidden, uint64_t q,
                                                qc_error *err);
void qc_calibrate_states_close(qc_calibrate_states *s); /* accepts zeros */

/* ---- engines ---- */

/* The speed of this machine in seconds for one operation. Factors and weights take longer than
 * their products alone, by these two ratios. */
typedef struct {
    double single, dual; /* products of floats; products of doubles, as in the factor */
    double forward;
    double factor_slower, weight_slower;
    /* Where outputs do not count alike, beyond weight_slower: of a sweep over a column of a block
     * of outputs, per output, and per output and output of the block. Blocks run side by side. */
    double coupled, coupled_pair;
} qc_calibrate_speed;

/* The bytes of the host and of a GPU that the work on one layer takes. */
typedef struct {
    uint64_t host, device;
} qc_calibrate_room;

typedef struct {
    size_t bytes; /* of an engine, which begins as zeros */
    void (*close)(qc_calibrate_engine *e);
    /* Measures the speed in a few tenths of a second. */
    qc_status (*measure)(qc_calibrate_engine *e, qc_calibrate_speed *out, qc_error *err);
    /* The memory that is needed for the activations of a text, and for the moments, the factor and
     * a weight [rows, n] of a set. Both saturate. block: of qc_feedback_outputs, or 0. */
    qc_calibrate_room (*room_text)(const qc_calibrate_engine *e, const qc_forward_shape *shape,
                                   uint64_t tokens, uint64_t longest);
    qc_calibrate_room (*room_weight)(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_form *form, uint64_t block);

    /* The engine borrows all of these until it is closed. */
    qc_status (*text)(qc_calibrate_engine *e, const qc_forward_shape *shape,
                      const qc_forward_batch *batch, const qc_calibrate_states *states,
                      qc_error *err);
    /* The engine borrows z and x until the next layer. */
    qc_status (*layer)(qc_calibrate_engine *e, uint64_t number, const qc_forward_weights *z,
                       const qc_forward_weights *x, qc_error *err);
    /* Makes room for the moments of n inputs and sets them to zero; cross: C as well. */
    qc_status (*moments)(qc_calibrate_engine *e, uint64_t n, int cross, qc_error *err);
    /* Takes all windows to a point of the layer; to AT_IMAGE each image once. add: the inputs of
     * its linear layers are added to the moments. seconds: for the progress. */
    qc_status (*reach)(qc_calibrate_engine *e, qc_forward_point point, int add, double seconds,
                       qc_error *err);
    /* Adds inputs of both streams to the moments: [tokens, n], without gaps. */
    qc_status (*add)(qc_calibrate_engine *e, const float *x, const float *z, uint64_t tokens,
                     qc_error *err);
    /* Takes all windows through the whole layer; through one with experts up to these. */
    qc_status (*pass)(qc_calibrate_engine *e, double seconds, qc_error *err);
    /* Adds the inputs of the head, behind the norm with this gain [hidden], to the moments. */
    qc_status (*head)(qc_calibrate_engine *e, const float *gain, qc_error *err);
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
    const qc_calibrate_engine_ops *ops; /* of an engine on the first of its calibrator's devices */
    /* What the bytes depend on, in the arena: "NVIDIA H200, cuBLAS 13.0.0, cuSOLVER 12.0.4". It
     * opens and closes the device. QC_ERR_DEVICE, with one sentence, where cuBLAS or cuSOLVER
     * cannot be had. */
    qc_status (*name)(const char **out, qc_arena *arena, const qc_cuda_device *device,
                      qc_error *err);
} qc_gpu_calibrating;

/* Weights that have the same n inputs, of so many tokens. cross: C is made as well as H. */
typedef struct {
    const uint32_t *jobs; /* QC_NO_JOB: not to be made */
    unsigned count;
    uint64_t n, tokens;
    int cross;
    uint64_t block; /* of the outputs' moments, at most; 0: outputs count alike */
} qc_calibrate_set;

/* Adds moments, factor and weights of a set to *a, where one of its weights is to be made. Returns
 * the room that they need together. */
qc_calibrate_room qc_calibrate_set_ahead(const qc_calibrator *k, const qc_calibrate_set *s,
                                         qc_calibrate_outlook *a);
qc_calibrate_room qc_calibrate_larger(qc_calibrate_room a, qc_calibrate_room b);

/* The bytes of [n, n] doubles, and such a matrix of zeros, which is to be freed. */
uint64_t qc_calibrate_square_bytes(uint64_t n);
QC_NODISCARD qc_status qc_calibrate_square(double **out, uint64_t n, qc_error *err);

#endif
