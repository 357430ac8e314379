/* --to auto chooses a scheme for every weight, so that the predicted error of the model is as small
 * as the budget of every device allows.
 *
 *   measure   finds the relative squared error of every candidate on sampled rows (auto_measure.h)
 *   weigh     multiplies it by how much a weight's error matters to the model's output
 *             (docs/decisions/0006), or asks second moments (docs/decisions/0028) or their
 *             traces (auto_traces.h) how far it moves the model's answer
 *   solve     chooses cuts and schemes together: a knapsack over contiguous placement
 *             (auto_solve.h)
 *
 * The experts of one projection in one layer are measured together and make up a group; every other
 * weight is a group of its own. Groups that engines hold as one module (fused_groups.h) have one
 * choice, and so have all experts of a layer, unless --split-fused says otherwise. With --bits the
 * bytes of all choosable weights together are the budget. Else the GPUs are filled, or the cpu
 * where the budget names no GPU. A cpu or disk tier beside GPUs is not filled with precision,
 * because what lies there crosses the host link for every token.
 *
 * A weight in FP8, and with --requantize a stack of experts in MXFP4, may stay as it is, with its
 * codes and scales bit for bit. Then it has no error.
 * The choice is deterministic: the same model, options and budget give the same one on any
 * machine. */
#ifndef QC_CONVERT_AUTO_CHOICE_H
#define QC_CONVERT_AUTO_CHOICE_H

#include "convert/fit/auto_measure.h"
#include "convert/fit/budget.h"
#include "convert/fit/fit.h"
#include "convert/model/geometry.h"
#include "convert/model/segments.h"
#include "convert/plan/plan.h"
#include "formats/json_writer.h"

#define QC_AUTO_MAX_NOTES 5u

/* What costs are made of. */
typedef enum {
    QC_WEIGHED_ROLES,   /* the roles of weights: importance * rel_mse */
    QC_WEIGHED_MOMENTS, /* second moments: KL divergences in nats */
    QC_WEIGHED_TRACES   /* the traces of --importance: estimates of the same */
} qc_weighed;

typedef struct {
    const char *name; /* "layer 12 mlp.experts.*.down_proj" */
    uint32_t weights;
    uint64_t elems;
    double importance;
    double mean_square;                /* of the sampled weights; 0: none were measured */
    unsigned holds;                    /* bit c is set where candidate c can hold these weights */
    unsigned char step[QC_CANDIDATES]; /* the step at which it does (qc_candidate_step) */
    double rel_mse[QC_CANDIDATES];     /* 0 for 16 bit; NaN where it is no candidate */
    double cost[QC_CANDIDATES];        /* by which it was chosen; NaN where it is no candidate */
    uint64_t bytes[QC_CANDIDATES];
    unsigned chosen;    /* index of the candidate */
    const char *reason; /* why there was nothing to choose, or NULL */
} qc_auto_group;

typedef struct qc_auto_result {
    qc_auto_group *groups;
    uint32_t group_count;
    const qc_candidate *rows; /* [QC_CANDIDATES] */
    unsigned candidates;      /* bit c is set for candidate c */
    int fits;                 /* 0: not even the smallest choice fits; then that was chosen */
    double predicted;         /* sum of the costs of what was chosen */
    double bound;             /* no choice that fits has less; NaN when nothing fits */
    double uniform
        [QC_CANDIDATES]; /* the same sum with each scheme for all; NaN where it is no candidate */
    int uniform_fits[QC_CANDIDATES];
    uint64_t sampled_rows, sampled_bytes;
    int together; /* some groups were chosen as one */
    int measured; /* 0: there were no weights; errors are of normal random weights */
    qc_weighed weighed;
    int mixed;     /* int8 lies beside NF4, which no configuration of bitsandbytes can say; that
                      of compressed-tensors can say its mixtures */
    int mixed_fp8; /* FP8 is kept beside either of them, which none can say either */
    int spills;    /* does not fit, but the budget has tiers for the rest of the smallest choice */
    /* What the caller should know of the choice, if anything: sentences without a full stop. */
    const char *notes[QC_AUTO_MAX_NOTES];
    unsigned note_count;
    uint64_t count_chosen[QC_CANDIDATES],
        bytes_chosen[QC_CANDIDATES]; /* counts and bytes of the weights */
} qc_auto_result;

/* Finds costs of candidates from second moments: qc_calibrate_costs, whose header says more. */
typedef qc_status (*qc_auto_weigh)(double (*costs)[QC_CANDIDATES],
                                   qc_candidate_form (*forms)[QC_CANDIDATES], const qc_plan *plan,
                                   qc_error *err);

/* What stays the same, however often a model is planned. */
typedef struct {
    const qc_call *call;
    const qc_checkpoint *model;
    const qc_geometry *geometry;
    int has_weights;
    /* An earlier choice of this model with other options, or NULL. Its errors are taken, and no
     * weight is read again. */
    const qc_auto_result *measured;
    qc_auto_weigh weigh; /* NULL: there are no moments */
} qc_plan_subject;

/* Sets scheme and block_elems of recipe's entries, and lists its skip_modules anew. The recipe was
 * made with options->recipe.to == QC_TO_AUTO, so every weight that would be quantized is marked
 * QC_SCHEME_NF4. Without a budget this is QC_ERR_USAGE. Weights of dtypes that the quantizers do
 * not read stay as they are. Unless --schemes names it, int8 is no candidate if a card of the
 * budget does not run it. When not even the smallest choice fits, that one is chosen, and the
 * caller's fit says that it does not fit. The model's weights are read if it has some and nothing
 * was measured before. All memory comes from the arena. */
QC_NODISCARD qc_status qc_auto_choose(qc_auto_result *out, qc_arena *arena, qc_recipe *recipe,
                                      const qc_plan_subject *subject, const qc_segments *segments,
                                      const qc_plan_options *options, qc_error *err);
/* Returns the smallest candidate that all weights could have, or QC_CANDIDATE_16BIT. */
unsigned qc_auto_smallest(const qc_auto_result *r);
/* Returns "int8 lies beside NF4" or the like where no loader but qconv reads the choice, or NULL
 * where others do. */
const char *qc_auto_mixture(const qc_auto_result *r);
/* Writes what --explain shows: what the uniform schemes would give, and what was chosen by kind and
 * range of layers. With `all` there is a row for each group instead. */
QC_NODISCARD qc_status qc_auto_explain(const qc_auto_result *r, int all, qc_strbuf *out,
                                       qc_error *err);
/* Writes the member "auto"; docs/recipes.md has what is in it. It has the groups only if `explain`
 * is set. */
void qc_auto_json(const qc_auto_result *r, int explain, qc_json_writer *w);

#endif
