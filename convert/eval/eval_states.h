/* How far the hidden states of an encoder are from the original's, one window at a time.
 * docs/eval.md has the formulas. Everything is summed in double, in the order of tokens and
 * windows. One owner, no threads. */
#ifndef QC_CONVERT_EVAL_STATES_H
#define QC_CONVERT_EVAL_STATES_H

#include "convert/eval/eval.h"

typedef struct {
    uint64_t count, room;
    double distance_sum, cosine_sum;
    float *distances, *cosines; /* [room], owned */
    double *means;              /* [2 * wide], owned: the embeddings of a window */
    uint64_t wide;
} qc_eval_states;

/* room is how many windows there will be at most, and wide the elements of a hidden state. Free it
 * also after a failure. */
QC_NODISCARD qc_status qc_eval_states_init(qc_eval_states *s, uint64_t room, uint64_t wide,
                                           qc_error *err);
void qc_eval_states_deinit(qc_eval_states *s);
/* Adds a window: hidden states [tokens, wide] of the output and of the original. Call it at most
 * `room` times. QC_ERR_NONFINITE where the distance is no number. */
QC_NODISCARD qc_status qc_eval_states_add(qc_eval_states *s, const float *output,
                                          const float *original, uint64_t tokens, qc_error *err);
/* Sets encoder and everything from distance_mean to cosine_max of *out. It sorts what s keeps, so s
 * takes no more windows afterwards. */
void qc_eval_states_finish(qc_eval_states *s, qc_eval_result *out);

#endif
