/* --to auto: a scheme for every weight, so that the predicted error of the model is least within
 * every device's budget.
 *
 *   measure   relative squared error of every candidate scheme on sampled rows of every weight
 *   weigh     docs/decisions/0006: how much a weight's error matters to the model's output
 *   solve     knapsack over contiguous placement: cuts and schemes together
 *
 * Deterministic: same model, options and budget give the same choice on any machine. */
#ifndef QC_CONVERT_AUTO_CHOICE_H
#define QC_CONVERT_AUTO_CHOICE_H

#include "convert/budget.h"
#include "convert/fit.h"
#include "convert/geometry.h"
#include "convert/plan.h"
#include "convert/segments.h"

/* Candidates of --schemes, in order of size. */
enum {
    QC_AUTO_NF4 = 1,    /* block 64 */
    QC_AUTO_NF4_32 = 2, /* block 32 */
    QC_AUTO_INT8 = 4,   /* rows */
    QC_AUTO_16BIT = 8   /* as it is */
};

typedef struct {
    const char *group; /* what was chosen together: "layer 12 mlp.down_proj", all its experts */
    uint32_t weights;
    uint64_t elems;
    double importance;
    double rel_mse[4]; /* per candidate, 16bit 0; NaN where it is not a candidate */
    uint64_t bytes[4];
    unsigned chosen; /* index */
} qc_auto_group;

typedef struct {
    qc_auto_group *groups;
    uint32_t group_count;
    double predicted;  /* weighed error of the choice */
    double uniform[4]; /* of each uniform scheme; NaN where it is not a candidate */
    int uniform_fits[4];
    uint64_t sampled_rows, sampled_bytes;
    int measured; /* 0: there are no weights to read; errors are those of normal random weights */
    uint64_t count_chosen[4], bytes_chosen[4];
} qc_auto_result;

/* Sets scheme and block_elems of recipe's entries (made with options->to == QC_TO_AUTO: every
 * weight that would be quantized is marked QC_SCHEME_NF4). Without a budget: QC_ERR_USAGE.
 * When not even the smallest choice fits, that is chosen, and the caller's fit says so. */
QC_NODISCARD qc_status qc_auto_choose(qc_auto_result *out, qc_arena *arena, qc_recipe *recipe,
                                      const qc_checkpoint *model, int has_weights,
                                      const qc_segments *segments, const qc_geometry *geometry,
                                      const qc_budget *budget, const qc_options *options,
                                      qc_error *err);
/* --explain: one row per group, and what the uniform schemes would give. */
QC_NODISCARD qc_status qc_auto_explain(const qc_auto_result *r, qc_strbuf *out, qc_error *err);

#endif
