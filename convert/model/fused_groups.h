/* Which weights the engines that serve a model hold as one: queries, keys and values; gate and up;
 * the experts of a layer. Such a fused group needs one choice, because one module has one scheme: a
 * member that was kept in 16 bits among quantized ones does not load, or is quantized again. The
 * rows are in convert/families/type_table.c. */
#ifndef QC_CONVERT_FUSED_GROUPS_H
#define QC_CONVERT_FUSED_GROUPS_H

#include "convert/families/type_table.h"
#include "convert/model/recipe_options.h"
#include "formats/checkpoint.h"

/* A group of a checkpoint. It has at least two members, in the row's order. */
typedef struct {
    const qc_fused_row *row;
    uint32_t tensors[QC_FUSED_MEMBERS]; /* indexes of the weights */
    unsigned count;
    size_t parent_len; /* the length of "model.layers.0.self_attn" in each name */
} qc_fused_group;

/* Finds the group that weight i is a member of. Returns 0 if it is in none, or alone. */
int qc_fused_group_of(qc_fused_group *out, const qc_checkpoint *model, uint32_t i);

/* Returns the length of "model.layers.0.mlp.experts" in the name of a weight of a numbered expert
 * ("....experts.7.up_proj.weight"); 0 for other weights. */
size_t qc_expert_stem(const char *name);

/* What becomes of a weight, as far as it matters to its group. */
typedef enum {
    QC_FUSED_KEPT,
    QC_FUSED_QUANTIZED,
    QC_FUSED_FIXED /* kept, and it cannot be quantized */
} qc_fused_state;

/* What a rule did to groups of which it named some members only. */
typedef struct {
    uint32_t groups;           /* groups that it was widened in; if 0, the rest is not set */
    const qc_fused_row *row;   /* the row of the first such group */
    const char *first;         /* and its parent */
    const char *named, *added; /* and its members: "q_proj", "k_proj and v_proj" */
} qc_fused_widening;

typedef struct {
    qc_fused_widening *list; /* one for each rule */
    uint32_t count;
} qc_fused_widenings;

/* Makes every rule that would split a group count for the whole group; of several rules the last
 * one does. rule_of has the index of each weight's rule, or UINT32_MAX, and is changed; why gets a
 * text for each weight that a rule was widened to. A group that no rule splits stays as it is, and
 * so does one that a rule would quantize only in part. */
QC_NODISCARD qc_status qc_fused_widen(qc_fused_widenings *out, qc_arena *arena,
                                      const qc_checkpoint *model, const qc_recipe_options *options,
                                      const qc_fused_state *states, uint32_t *rule_of,
                                      const char **why, qc_error *err);

#endif
