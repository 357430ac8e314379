/* What --to auto works on, and its groups (auto_groups.c), for auto_choice.c. */
#ifndef QC_CONVERT_AUTO_INTERNAL_H
#define QC_CONVERT_AUTO_INTERNAL_H

#include "convert/fit/auto_choice.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/model/fused_groups.h"

typedef struct {
    uint32_t segment; /* its own, or the one that this one follows in the end */
    uint32_t tensor;
    const char *key; /* "model.layers.12.mlp.experts.*.up_proj" */
} qc_auto_member;

/* What engines hold as one module is chosen as one: a fused group, the experts of a layer, or
 * else a weight by itself. */
typedef struct {
    uint32_t segment;
    uint32_t first;          /* a group of the qc_auto_module */
    const qc_fused_row *row; /* NULL for experts, and for a weight by itself */
    const char *name;        /* names a weight of the first group */
    size_t len;              /* bytes of the module's path in that name, or of its parent's */
} qc_auto_module;

typedef struct {
    qc_auto_result *out;
    qc_arena *arena; /* owns the result */
    qc_arena *scratch;
    qc_recipe *recipe;
    const qc_call *call;
    const qc_checkpoint *model;
    const qc_segments *segments;
    const qc_geometry *geometry;
    qc_geometry share; /* with --tp: of one card, for the fit */
    uint32_t ranks;    /* the cards of --tp; 0: layers are placed whole */
    const qc_plan_options *options;
    qc_fit_options fit; /* with the devices to fill only */
    unsigned candidates;
    qc_auto_member *members;
    uint32_t member_count;
    uint32_t *first_member;  /* per group, and one more at the end */
    uint32_t *item_of;       /* per group: its item, or UINT32_MAX */
    qc_auto_module *modules; /* per item */
    qc_auto_item *items;
    uint32_t item_count;
    /* Per group and candidate: its bytes where it lies. With --tp they are those of a card, or
     * QC_TP_UNSPLIT. */
    uint64_t (*room)[QC_CANDIDATES];
    uint64_t *fixed;         /* per segment: bytes of what is not chosen, in the same way */
    uint64_t *fixed_largest; /* per segment: elements of the largest quantized weight in that */
    unsigned *chosen;        /* per item */
    uint64_t *scale_bytes;   /* per tensor: scales that are written if it is kept coded */
} qc_chooser;

/* Do average bits decide, wherever the model will lie? */
static inline int qc_auto_by_bits(const qc_chooser *c)
{
    return c->options->recipe.bits > 0;
}

/* Returns the segment that this one follows in the end, or itself. */
uint32_t qc_auto_resolve(const qc_segments *s, uint32_t segment);
/* Returns NULL where the weight is not coded. */
const qc_coded_weight *qc_auto_coded_of(const qc_chooser *c, uint32_t tensor);
int qc_auto_is_choosable(const qc_chooser *c, uint32_t tensor);
/* Finds rows and columns as they are written; a stack counts the rows of all experts. */
void qc_auto_shape_of(const qc_chooser *c, uint32_t tensor, uint64_t *rows, uint64_t *cols);
/* Returns how candidate k holds the weights of a group. */
qc_candidate_form qc_auto_form_of(const qc_chooser *c, uint32_t g, unsigned k);
uint64_t qc_auto_quantized_bytes(const qc_chooser *c, uint32_t tensor, qc_scheme scheme,
                                 uint32_t block_elems);
/* Makes candidate k an entry's scheme, as the weight's group g holds it. */
void qc_auto_set_entry(const qc_chooser *c, uint32_t g, qc_recipe_entry *e, uint32_t tensor,
                       unsigned k);
QC_NODISCARD qc_status qc_auto_find_groups(qc_chooser *c, qc_error *err);
/* Finds the items, and which group is in which. */
QC_NODISCARD qc_status qc_auto_find_items(qc_chooser *c, qc_error *err);
/* Finds the candidates that each group may have, and the bytes of each. */
QC_NODISCARD qc_status qc_auto_find_candidates(qc_chooser *c, qc_error *err);

#endif
