/* With --calibrate, what errors of a weight's outputs do to the model's answer: G of
 * quant/error_feedback.h, by a backward pass through the model before any weight is made. */
#ifndef QC_CONVERT_CALIBRATE_OUTPUTS_H
#define QC_CONVERT_CALIBRATE_OUTPUTS_H

#include "convert/backward/backward.h"
#include "convert/calibrate/calibrate_engine.h"

/* The tokens that pass backwards, at most: windows spread over those of the text. And the outputs
 * of a block of G. */
#define QC_CALIBRATE_OUTPUT_TOKENS 32768u
#define QC_CALIBRATE_OUTPUT_BLOCK  1024u

typedef struct {
    const qc_calibrator *k;
    const uint32_t *job_of;
    qc_backward_task task;
    qc_eval_windows windows; /* in the arena */
    qc_forward_batch batch;
    qc_backward *made; /* NULL: outputs count alike */
    /* Weights whose outputs count alike, as too few tokens passed backwards through them. */
    uint32_t few, first_few;
} qc_calibrate_outputs;

/* Decides whether both sides count, and how: task.block is 0 where outputs count alike.
 * QC_ERR_UNSUPPORTED where --sided two cannot be had. windows: the calibration text's. *out must
 * stay where it is. */
QC_NODISCARD qc_status qc_calibrate_outputs_choose(qc_calibrate_outputs *out, qc_calibrator *k,
                                                   const qc_forward_tensors *t,
                                                   const uint32_t *job_of,
                                                   const qc_eval_windows *windows, qc_error *err);
/* The outputs of a block of a weight's G, or 0. */
uint64_t qc_calibrate_outputs_block(const qc_calibrate_outputs *o, uint64_t rows);
/* Adds what the backward pass takes. It has its own time, but its moments stay in memory. */
void qc_calibrate_outputs_ahead(const qc_calibrate_outputs *o, qc_calibrate_outlook *a);
QC_NODISCARD qc_status qc_calibrate_outputs_make(qc_calibrate_outputs *o, qc_error *err);
/* Describes G of a linear layer (backward.h's number) in *room, and returns room. NULL where
 * outputs count alike, also because of too few tokens, which is noted. */
const qc_feedback_outputs *qc_calibrate_outputs_of(qc_calibrate_outputs *o, uint64_t layer,
                                                   uint64_t which, uint32_t job,
                                                   qc_feedback_outputs *room);
/* Warns of the weights that too few tokens passed backwards through. */
void qc_calibrate_outputs_tell_few(const qc_calibrate_outputs *o);
void qc_calibrate_outputs_close(qc_calibrate_outputs *o); /* accepts zeros */

#endif
