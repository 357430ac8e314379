/* Calibrates the experts of a mixture, one expert at a time.
 *
 * Each stream routes its own tokens, because the router sees what comes to it. The moments of an
 * expert are of the tokens that x, the stream behind the quantized layers, sends to it: those are
 * what it will get. z's inputs of the same tokens are what they would have been, whether z sends
 * them to this expert or not. All tokens count alike, whatever weight the router gives them.
 *
 * The inputs of gate and up have the moments of the states behind the norm; then gate and up are
 * quantized, and the inputs of down are computed with them in x, and without in z. At last both
 * streams go through the expert, each with its own tokens and weights. So the moments of one expert
 * are in memory at a time.
 *
 * Where fewer tokens than a quarter of its inputs come to a weight, it is left to the search. Where
 * fewer than a quarter of its outputs (of a block of them) passed backwards through it, outputs
 * count alike (calibrate_outputs.h). */
#ifndef QC_CONVERT_CALIBRATE_EXPERTS_H
#define QC_CONVERT_CALIBRATE_EXPERTS_H

#include "convert/calibrate/calibrate_outputs.h"
#include "convert/forward/experts.h"

/* How many weights with too few tokens are named. */
#define QC_FEW_NAMED 3u

typedef struct {
    qc_calibrator *k;
    const qc_forward_tensors *tensors;
    const uint32_t *job_of; /* per tensor of the source; QC_NO_JOB: not to be made */
    uint64_t tokens;        /* of the text */
    qc_calibrate_outputs *outputs;
    uint64_t layer; /* at hand */
    float *x_hidden, *z_hidden;
    qc_experts_cpu x, z;
    int apart; /* x and z differ, because something was quantized before this layer */
    uint32_t few, few_experts;
    struct {
        uint32_t job;
        uint64_t tokens;
    } named[QC_FEW_NAMED];
} qc_calibrate_experts;

/* ---- before ---- */

/* Is a weight of the layer's experts still to be made? */
int qc_calibrate_experts_need(const qc_calibrate_experts *e, const qc_experts_layer *l);
/* Sets marks[] to 1 for all weights of the layer's experts. */
void qc_calibrate_experts_mark(const qc_calibrate_experts *e, const qc_experts_layer *l,
                               unsigned char *marks);
/* Adds the work on a layer's experts to *a, by as many tokens for each expert as if they all got
 * the same. Returns the room that it needs besides the weights. */
qc_calibrate_room qc_calibrate_experts_ahead(const qc_calibrate_experts *e,
                                             const qc_experts_layer *l, qc_calibrate_outlook *a);
/* The memory of the buffers. */
uint64_t qc_calibrate_experts_bytes(const qc_calibrate_experts *e);

/* ---- doing it ---- */

/* Makes the buffers. states->x_attended and states->z_attended have room for hidden states, and
 * are written over. */
QC_NODISCARD qc_status qc_calibrate_experts_open(qc_calibrate_experts *e,
                                                 const qc_calibrate_states *states, qc_error *err);
void qc_calibrate_experts_close(qc_calibrate_experts *e); /* accepts zeros */
/* Takes both streams from behind attention to behind the layer, and makes the weights that are to
 * be made. norm: in front of the experts. apart: x and z differ already. *apart is set if they
 * differ behind it. */
QC_NODISCARD qc_status qc_calibrate_experts_layer(qc_calibrate_experts *e, uint64_t layer,
                                                  const qc_experts_layer *l, const float *norm,
                                                  int *apart, qc_error *err);
/* Warns of the weights that too few tokens came to. */
void qc_calibrate_experts_tell_few(const qc_calibrate_experts *e);

#endif
