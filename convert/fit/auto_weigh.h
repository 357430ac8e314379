/* Costs of --to auto from second moments of inputs and outputs, or from their traces: how far each
 * candidate of a weight moves the model's answer, in nats (docs/decisions/0028). */
#ifndef QC_CONVERT_AUTO_WEIGH_H
#define QC_CONVERT_AUTO_WEIGH_H

#include "convert/fit/auto_choice.h"

typedef struct {
    qc_arena *arena;       /* owns the note */
    const qc_plan *plan;   /* made from the recipe before the choice */
    const uint32_t *first; /* per group: its first weight, and one more at the end */
    uint32_t *tensors;     /* per weight; with moments it becomes its job */
} qc_auto_weights;

/* Sets the costs of out's groups and out->weighed. Weights are weighed by moments all together or
 * not at all, as the two kinds of cost cannot be compared: where a weight has no moments, a note
 * says so and weighed stays 0. */
QC_NODISCARD qc_status qc_auto_weigh_groups(qc_auto_result *out, const qc_auto_weights *w,
                                            qc_auto_weigh weigh, qc_error *err);
/* Sets the costs of out's groups by traces; products as qc_auto_read_traces has them, and w->plan
 * is not needed. Weights that the file lacks matter as much as is usual for their roles, and a note
 * says how many they are. */
QC_NODISCARD qc_status qc_auto_weigh_by_traces(qc_auto_result *out, const qc_auto_weights *w,
                                               const double *products, qc_error *err);

#endif
