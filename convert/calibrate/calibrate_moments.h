/* The way from second moments that were captured elsewhere to codes and scales, which a file of
 * --hessians and the requests of a door share: weights find their moments by name, those with the
 * same ones share a factor, and a stack of experts is made as a whole or not at all. */
#ifndef QC_CONVERT_CALIBRATE_MOMENTS_H
#define QC_CONVERT_CALIBRATE_MOMENTS_H

#include "convert/calibrate/calibrate_internal.h"
#include "convert/calibrate/hessians.h"

/* What is known of a weight's moments, as a set. */
enum {
    QC_MOMENTS_SEEN = 1,        /* a file had moments of it, or of a matrix of its stack */
    QC_MOMENTS_FEW = 2,         /* of too few tokens */
    QC_MOMENTS_ALIKE = 4,       /* there were none of its outputs */
    QC_MOMENTS_FEW_OUTPUTS = 8, /* those of its outputs were of too few tokens */
    QC_MOMENTS_BOTH = 16,       /* of its inputs and of its outputs */
    QC_MOMENTS_HERE = 32        /* the file that is being opened has moments of it */
};

/* A weight that a file has moments of. */
typedef struct {
    uint32_t moments; /* their number in the file */
    uint32_t number;  /* the weight's number */
    uint32_t module;
    qc_hessians_outputs outputs; /* blocks 0: outputs count alike */
} qc_moments_pair;

/* What a file calls a weight: its name without ".weight", and of a matrix of a stack with its
 * place, as in "model.layers.0.mlp.experts.down_proj[3]". */
typedef struct {
    const char *module;
    uint32_t number;
} qc_moments_name;

typedef struct {
    qc_calibrator *k;
    qc_moments_name *names; /* names of all weights, sorted */
    uint32_t name_count;
    unsigned char *known; /* [numbers] QC_MOMENTS_ of all files so far */
    /* ---- of the file that is open ---- */
    const char *path;
    qc_hessians *h;
    qc_moments_pair *pairs;    /* weights to be made; those with the same moments are together */
    uint32_t *searched, *left; /* matrices of stacks to be searched; weights that are not made */
    uint32_t count, searched_count, left_count;
    uint64_t tokens; /* the most tokens that any moments are of */
} qc_moments;

/* Lists the names of all weights, in the calibrator's arena. What the store holds counts as
 * seen. */
QC_NODISCARD qc_status qc_moments_begin(qc_moments *m, qc_calibrator *k, qc_error *err);

/* Opens a file, checks it against the plan, and sorts its weights into those to be made and those
 * that are left. QC_ERR_INPUT where it is of another model, QC_ERR_SHAPE where a shape is wrong.
 * two: with the moments of outputs. Close it also after a failure. */
QC_NODISCARD qc_status qc_moments_open(qc_moments *m, const char *path, int two, qc_error *err);
/* Says what the weights to be made take. */
void qc_moments_ahead(const qc_moments *m, qc_calibrate_outlook *a);
/* Makes them. Where only costs are wanted, it finds those. */
QC_NODISCARD qc_status qc_moments_run(qc_moments *m, qc_error *err);
void qc_moments_close(qc_moments *m); /* accepts one that is closed */

/* Lists the weights whose known facts are `are` among those of `of`; returns their number. */
uint32_t qc_moments_list(const qc_moments *m, unsigned of, unsigned are, uint32_t *out);
/* Warns of the weights that are left to the search, and counts them in the report. why: of those
 * that no file had moments of. */
QC_NODISCARD qc_status qc_moments_tell_left(const qc_moments *m, const char *why, qc_error *err);

#endif
