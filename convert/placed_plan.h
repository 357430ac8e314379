/* convert --vram: a plan whose shards are cut at the boundaries of devices.
 *
 *   recipe -> geometry -> segments -> [schemes, --to auto] -> sizes -> fit -> devices -> shards
 *
 * Everything is worked out from shapes and config.json; --to auto reads samples of the weights.
 * All memory in the arena given. */
#ifndef QC_CONVERT_PLACED_PLAN_H
#define QC_CONVERT_PLACED_PLAN_H

#include "convert/auto_choice.h"
#include "convert/budget.h"
#include "convert/fit.h"
#include "convert/geometry.h"
#include "convert/plan.h"
#include "convert/segments.h"

typedef struct {
    qc_budget budget;
    qc_geometry geometry;
    qc_segments segments;
    qc_fit fit;
    qc_auto_result choice; /* --to auto */
    int chosen;            /* choice is set */
} qc_placed_plan;

/* options->fit.vram is given. Sets schemes of the recipe with --to auto. `plan` is laid out. A
 * model that does not fit is QC_ERR_CHECK and says by how much, and where. */
QC_NODISCARD qc_status qc_placed_plan_make(qc_placed_plan *out, qc_plan *plan, qc_arena *arena,
                                           const qc_checkpoint *model, qc_recipe *recipe,
                                           const qc_options *options, qc_error *err);

#endif
