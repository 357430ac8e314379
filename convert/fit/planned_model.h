/* A model that is planned for a budget: recipe, segments, sizes and placement in one go. The
 * command `plan` answers from it, a suggestion is checked with it, and convert --vram carries it
 * out. */
#ifndef QC_CONVERT_PLANNED_MODEL_H
#define QC_CONVERT_PLANNED_MODEL_H

#include "convert/fit/auto_choice.h"
#include "convert/fit/fit.h"

typedef struct {
    qc_recipe recipe;
    qc_segments segments;
    qc_plan plan;         /* begun, not laid out */
    qc_geometry geometry; /* with --tp that of one card's share, else the model's */
    uint64_t *segment_bytes, *largest_weight;
    qc_auto_result chosen; /* --to auto only */
    qc_fit fit;
} qc_planned_model;

/* Plans a model. options has `to` and fit.context filled in (qc_plan_defaults). Everything lives in
 * the arena, and *out points into itself, so do not copy it. A model that does not fit is no
 * error. Without --vram, which --bits does not need, the fit is empty and has no budget. */
QC_NODISCARD qc_status qc_planned_model_make(qc_planned_model *out, qc_arena *arena,
                                             const qc_plan_subject *subject,
                                             const qc_plan_options *options, qc_error *err);
/* Lays out the shards for the fit's placement: a shard ends where the device changes. With --tp
 * there is one set of shards, of which vLLM gives every card its share. */
QC_NODISCARD qc_status qc_planned_model_lay_out(qc_planned_model *m, qc_error *err);
/* Returns QC_ERR_CHECK, with how much is short and where, if it does not fit. path names the
 * model. */
QC_NODISCARD qc_status qc_planned_model_check(const qc_planned_model *m, const char *path,
                                              qc_error *err);
/* Places a planned model on other devices. Its recipe and plan do not depend on them, and *out
 * borrows both. */
QC_NODISCARD qc_status qc_planned_model_replace(qc_planned_model *out, qc_arena *arena,
                                                const qc_planned_model *m,
                                                const qc_plan_subject *subject,
                                                const qc_plan_options *options, qc_error *err);
/* Fills in what was not given: `to` becomes nf4, or keep for a checkpoint in bitsandbytes' form
 * or with most of its parameters in 4 bits or fewer already; the context becomes 8192, or the
 * model's limit if that is less. */
QC_NODISCARD qc_status qc_plan_defaults(qc_plan_options *options, qc_arena *arena,
                                        const qc_plan_subject *subject, qc_error *err);

#endif
