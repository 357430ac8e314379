/* What the files that calibrate share. */
#ifndef QC_CONVERT_CALIBRATE_INTERNAL_H
#define QC_CONVERT_CALIBRATE_INTERNAL_H

#include "base/cpu.h"
#include "convert/calibrate/calibrate.h"
#include "convert/model/weight_read.h"
#include "convert/term/progress.h"

#define QC_NO_JOB UINT32_MAX

/* Moments of fewer tokens than columns / this say too little, as for an expert that was seldom
 * chosen. Such a weight is left to the search. */
#define QC_CALIBRATE_FEW_TOKENS 4u

typedef struct qc_calibrate_engine qc_calibrate_engine; /* calibrate_engine.h */

/* The speed of this machine in seconds for one operation. Factors and weights take longer than
 * their products alone, by these two ratios. */
typedef struct {
    double single, dual; /* products of floats; products of doubles, as in the factor */
    double factor_slower, weight_slower;
    /* Where outputs do not count alike, beyond weight_slower: of a sweep over a column of a block
     * of outputs, per output, and per output and output of the block. Blocks run side by side. */
    double coupled, coupled_pair;
} qc_calibrate_speed;

/* What the matrices of a double quantized stack have in common (calibrate_stack.c). */
typedef struct {
    uint32_t job;
    float *most;  /* [groups of the stack] nested absmax, without data */
    float *least; /* [groups] the smallest scale; only while it is made */
    double scale_sum;
    float offset;
} qc_calibrate_groups;

typedef struct {
    const qc_plan *plan;
    const qc_plan_options *o; /* the plan's */
    qc_calibrated *store;     /* NULL: --dry-run */
    qc_calibrate_report *r;
    const qc_blas *blas;       /* NULL: on a GPU */
    const qc_devices *devices; /* with moments of a file: the first is used; NULL: the CPU */
    qc_calibrate_engine *engine;
    const qc_quant_ops *ops;
    qc_isa isa;
    unsigned threads;
    qc_feedback_options feedback; /* damping 0: chosen by the number of tokens */
    qc_calibrate_speed speed;     /* the engine's */
    qc_weight_reader reader;
    qc_calibrate_groups *groups; /* one for each stack at hand */
    uint32_t group_count;
    qc_progress *progress; /* counts predicted microseconds */
    /* Where only costs are wanted (calibrate.h), and the candidates; else NULL. */
    double (*costs)[QC_CANDIDATES];
    qc_candidate_form (*forms)[QC_CANDIDATES];
    qc_arena arena;
} qc_calibrator;

/* What lies ahead. Memory and disk are in bytes. */
typedef struct {
    uint32_t weights;
    double operations, seconds;
    uint64_t memory, device_memory, disk;
} qc_calibrate_outlook;

/* ---- calibrate_weight.c ---- */

/* Are moments of n inputs of so many tokens too few to calibrate with? */
int qc_calibrate_few(uint64_t n, uint64_t tokens);
/* Is the job's weight still to be made? */
int qc_calibrate_needs(const qc_calibrator *k, uint32_t job);
/* Returns QC_ERR_NOMEM where the GPU is too small, before any work begins. */
QC_NODISCARD qc_status qc_calibrate_check_room(const qc_calibrator *k,
                                               const qc_calibrate_outlook *a, qc_error *err);
/* Warns of weights that are left to the search, and names a few. why: "as the forward pass has no
 * inputs for them". */
void qc_calibrate_tell_left(const qc_calibrator *k, const uint32_t *jobs, uint32_t count,
                            const char *why);

/* Factors the engine's moments, which are of so many tokens. name: of the first weight, for
 * messages. */
QC_NODISCARD qc_status qc_calibrate_factor(const qc_calibrator *k, uint64_t n, int cross,
                                           uint64_t tokens, const char *name, qc_error *err);
/* Quantizes a weight with the engine's factor into the store, or finds its costs where these are
 * wanted; g: of its outputs, or NULL. */
QC_NODISCARD qc_status qc_calibrate_weight(qc_calibrator *k, uint32_t number,
                                           const qc_feedback_outputs *g, qc_error *err);
/* Predicts the seconds that one weight takes. block: as of qc_calibrate_set. */
double qc_calibrate_weight_seconds(const qc_calibrator *k, uint32_t job, int cross, uint64_t block);
void qc_calibrate_progress(const qc_calibrator *k, double seconds);

/* A weight with the moments of its inputs and maybe of its outputs. */
typedef struct {
    uint32_t number;
    int cross;
    uint64_t block, outputs_bytes; /* sizes of its outputs' moments; 0: outputs count alike */
} qc_calibrate_one;

/* Adds to *a what such a weight takes, but for weights and disk. factor: that of its moments as
 * well. */
void qc_calibrate_one_ahead(const qc_calibrator *k, const qc_calibrate_one *one, int factor,
                            qc_calibrate_outlook *a);

/* ---- calibrate_stack.c ---- */

/* Looks at all matrices of the stack of a weight to be made, if they share groups of scales, or an
 * offset of them, and were not looked at yet. After the last such look comes
 * qc_calibrate_groups_end, and then weights may be quantized. */
QC_NODISCARD qc_status qc_calibrate_groups_look(qc_calibrator *k, uint32_t number, qc_error *err);
void qc_calibrate_groups_end(qc_calibrator *k);
void qc_calibrate_groups_drop(qc_calibrator *k);
/* Returns where feedback puts a weight, and what a matrix shares with others. */
qc_feedback_out qc_calibrate_out(const qc_calibrator *k, uint32_t number,
                                 const qc_calibrated_arrays *a);
/* Quantizes w [rows, cols] as --scale search does, into arrays of qc_calibrated_alloc; scales of
 * unsigned forms are not quantized themselves. */
QC_NODISCARD qc_status qc_calibrate_search(const qc_calibrator *k, uint32_t number, const float *w,
                                           const qc_calibrated_arrays *a, qc_error *err);
/* Quantizes a matrix of a stack as if no text were there, into the store. */
QC_NODISCARD qc_status qc_calibrate_searched(qc_calibrator *k, uint32_t number, qc_error *err);

/* ---- the two ways ---- */

QC_NODISCARD qc_status qc_calibrate_from_hessians(qc_calibrator *k, qc_error *err);
QC_NODISCARD qc_status qc_calibrate_from_door(qc_calibrator *k, qc_error *err);

#endif
