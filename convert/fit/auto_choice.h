/* --to auto: a scheme for every weight, so that the predicted error of the model is least within
 * every device's budget.
 *
 *   measure   relative squared error of every candidate on sampled rows (auto_measure.h)
 *   weigh     times how much a weight's error matters to the model's output (docs/decisions/0006)
 *   solve     knapsack over contiguous placement: cuts and schemes together (auto_solve.h)
 *
 * Chosen together (a group) are the experts of one projection in one layer; every other weight is a
 * group of its own. The devices filled are the GPUs, or the cpu where the budget names none; a cpu
 * or disk tier beside GPUs is not filled with precision, because what lies there crosses the host
 * link for every token.
 *
 * A weight in FP8, and with --requantize a stack of experts in MXFP4, may stay as it is, codes and
 * scales bit for bit: no error.
 * Deterministic: same model, options and budget give the same choice on any machine. */
#ifndef QC_CONVERT_AUTO_CHOICE_H
#define QC_CONVERT_AUTO_CHOICE_H

#include "convert/fit/auto_measure.h"
#include "convert/fit/budget.h"
#include "convert/fit/fit.h"
#include "convert/model/geometry.h"
#include "convert/model/segments.h"
#include "convert/plan/plan.h"
#include "formats/json_writer.h"

/* Candidates of --schemes, in order of size; bit c is candidate c of auto_measure.h. */
enum {
    QC_AUTO_NF4 = 1,    /* block 64 */
    QC_AUTO_NF4_32 = 2, /* block 32 */
    QC_AUTO_INT8 = 4,   /* rows */
    QC_AUTO_16BIT = 8   /* as it is; of a weight in FP8 or MXFP4, its codes and scales */
};

#define QC_AUTO_MAX_NOTES 2u

typedef struct {
    const char *name; /* what was chosen together: "layer 12 mlp.experts.*.down_proj" */
    uint32_t weights;
    uint64_t elems;
    double importance;
    double rel_mse[QC_AUTO_CHOICES]; /* 16bit 0; NaN where it is not a candidate */
    uint64_t bytes[QC_AUTO_CHOICES];
    unsigned chosen;    /* index */
    const char *reason; /* why there was nothing to choose, or NULL */
} qc_auto_group;

typedef struct qc_auto_result {
    qc_auto_group *groups;
    uint32_t group_count;
    unsigned candidates;             /* bits */
    int fits;                        /* 0: not even the smallest choice does; that was chosen */
    double predicted;                /* sum of importance * rel_mse of the choice */
    double bound;                    /* no choice that fits has less; NaN when nothing fits */
    double uniform[QC_AUTO_CHOICES]; /* of each scheme for all; NaN where it is not a candidate */
    int uniform_fits[QC_AUTO_CHOICES];
    uint64_t sampled_rows, sampled_bytes;
    int measured;  /* 0: there are no weights to read; errors are those of normal random weights */
    int mixed;     /* int8 beside NF4: no configuration of bitsandbytes says that */
    int mixed_fp8; /* nor FP8 kept beside either */
    int spills;    /* !fits, but the budget has tiers for what the smallest choice has too much */
    /* Sentences without a full stop: what the caller should know of the choice, if anything. */
    const char *notes[QC_AUTO_MAX_NOTES];
    unsigned note_count;
    uint64_t count_chosen[QC_AUTO_CHOICES], bytes_chosen[QC_AUTO_CHOICES]; /* of weights */
} qc_auto_result;

/* What stays the same however often a model is planned. */
typedef struct {
    const qc_call *call;
    const qc_checkpoint *model;
    const qc_geometry *geometry;
    int has_weights;
    const qc_auto_result *measured; /* an earlier choice of this model with other options: its
                                       errors are taken, no weight is read again. NULL: none */
} qc_plan_subject;

/* "nf4", "nf4-32", "int8", "16bit". */
const char *qc_auto_choice_name(unsigned index);
/* Candidates of --schemes; NULL means all. QC_ERR_USAGE naming those there are. */
QC_NODISCARD qc_status qc_auto_parse_schemes(const char *text, unsigned *candidates, qc_error *err);
/* How much the error of the weight of this name matters; see docs/decisions/0006. */
double qc_auto_importance(const char *name);

/* Sets scheme and block_elems of recipe's entries (made with options->recipe.to == QC_TO_AUTO:
 * every weight that would be quantized is marked QC_SCHEME_NF4) and lists its skip_modules anew.
 * Without a budget: QC_ERR_USAGE. Weights of dtypes that the quantizers do not read stay as they
 * are. Without --schemes int8 is no candidate if a card of the budget does not run it. When not
 * even the smallest choice fits, that is chosen, and the caller's fit says so. Reads the model's
 * weights if it has some and nothing was measured. All memory in the arena. */
QC_NODISCARD qc_status qc_auto_choose(qc_auto_result *out, qc_arena *arena, qc_recipe *recipe,
                                      const qc_plan_subject *subject, const qc_segments *segments,
                                      const qc_budget *budget, const qc_plan_options *options,
                                      qc_error *err);
/* "int8 lies beside NF4" and the like, for what no loader but qconv reads; NULL if nothing does. */
const char *qc_auto_mixture(const qc_auto_result *r);
/* --explain: what the uniform schemes would give, and what was chosen by kind and range of layers;
 * all: a row for each group instead. */
QC_NODISCARD qc_status qc_auto_explain(const qc_auto_result *r, int all, qc_strbuf *out,
                                       qc_error *err);
/* One object, as the value of "auto"; docs/recipes.md has its members. Groups only if `explain`. */
void qc_auto_json(const qc_auto_result *r, int explain, qc_json_writer *w);

#endif
