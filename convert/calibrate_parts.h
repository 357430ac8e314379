/* Inside calibrating: what its parts share. */
#ifndef QC_CONVERT_CALIBRATE_PARTS_H
#define QC_CONVERT_CALIBRATE_PARTS_H

#include "base/cpu.h"
#include "convert/calibrate.h"
#include "convert/eval_windows.h"
#include "convert/llama_layer.h"
#include "convert/progress.h"

#define QC_NO_JOB UINT32_MAX

/* --hessians: moments of fewer tokens than columns / this are too few to go by (an expert that was
 * seldom chosen): the weight is left to the search. */
#define QC_CALIBRATE_FEW_TOKENS 4u

/* Of this machine, in seconds an operation. */
typedef struct {
    double blas, forward;
} qc_calibrate_speed;

typedef struct {
    const qc_plan *plan;
    const qc_options *o;
    qc_calibrated *store; /* NULL: --dry-run */
    qc_calibrate_report *r;
    const qc_blas *blas;
    const qc_quant_ops *ops;
    qc_isa isa;
    unsigned threads;
    qc_feedback_options feedback; /* damping 0: by the number of tokens */
    qc_calibrate_speed speed;
    qc_llama_source source;
    qc_progress *progress; /* of predicted microseconds */
    qc_arena arena;
} qc_calibrator;

/* What lies ahead: seconds and bytes. */
typedef struct {
    uint32_t weights;
    double operations, seconds;
    uint64_t memory, disk;
} qc_calibrate_outlook;

/* ---- calibrate.c ---- */

/* Text of --calibrate, appended. */
QC_NODISCARD qc_status qc_calibrate_text(const qc_options *o, qc_strbuf *out, qc_error *err);
/* Is job's weight still to be made? */
int qc_calibrate_needs(const qc_calibrator *k, uint32_t job);
/* Says what lies ahead. inputs: "131,072 tokens (...)". */
void qc_calibrate_tell(const qc_calibrator *k, const qc_calibrate_outlook *a, const char *inputs);
/* Names weights that are left to the search, at most a few. why: "as the forward pass has no inputs
 * for them". */
void qc_calibrate_tell_left(const qc_calibrator *k, const uint32_t *jobs, uint32_t count,
                            const char *why);

/* ---- calibrate_weight.c ---- */

QC_NODISCARD qc_status qc_calibrate_measure(qc_calibrate_speed *out, const qc_calibrator *k,
                                            qc_error *err);
/* Factors second moments of so many tokens, taken over; c may be NULL. name: of the first weight,
 * for messages. */
QC_NODISCARD qc_status qc_calibrate_factor(const qc_calibrator *k, qc_feedback **out, uint64_t n,
                                           uint64_t tokens, double *h, double *c, const char *name,
                                           qc_error *err);
/* Quantizes a weight into the store; its arrays stay in *arrays, to be freed. */
QC_NODISCARD qc_status qc_calibrate_weight(const qc_calibrator *k, const qc_feedback *f,
                                           uint32_t job, const qc_llama_matrix *w,
                                           qc_calibrated_arrays *arrays, qc_error *err);
/* How a job's weight is stored. */
qc_feedback_form qc_calibrate_form(const qc_job *j);
/* Seconds of one factor, of one weight; a->memory grows to what both need beside moments. */
double qc_calibrate_factor_seconds(const qc_calibrator *k, uint64_t n, int cross);
double qc_calibrate_weight_seconds(const qc_calibrator *k, uint32_t job, int cross);
void qc_calibrate_progress(const qc_calibrator *k, double seconds);
/* Bytes of [n, n] doubles. */
uint64_t qc_calibrate_square_bytes(uint64_t n);
QC_NODISCARD qc_status qc_calibrate_square(double **out, uint64_t n, qc_error *err);

/* ---- the two ways ---- */

QC_NODISCARD qc_status qc_calibrate_model(qc_calibrator *k, qc_error *err);
QC_NODISCARD qc_status qc_calibrate_from_hessians(qc_calibrator *k, qc_error *err);

#endif
