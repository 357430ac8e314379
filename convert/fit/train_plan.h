/* `qconv plan --mode train`: the settings that fit, printed, written as a configuration, measured.
 */
#ifndef QC_CONVERT_TRAIN_PLAN_H
#define QC_CONVERT_TRAIN_PLAN_H

#include "convert/fit/train_memory.h"

/* plan: after qc_plan_begin. Prints to standard output (text, or JSON with --json), writes
 * o->apply, measures with o->profile. QC_ERR_USAGE for a budget without a
 * GPU, QC_ERR_CHECK when something is to be applied and nothing fits. */
QC_NODISCARD qc_status qc_train_plan(const qc_train_options *o, const char *html,
                                     const qc_plan *plan, const qc_geometry *geometry,
                                     const qc_budget *budget, qc_error *err);

/* The setting as a configuration: DeepSpeed's if the file is called so ("deepspeed" or "ds_" in its
 * name), else accelerate's, both JSON. (train_apply.c) */
QC_NODISCARD qc_status qc_train_config(qc_strbuf *out, const char *path, const qc_train_setting *s,
                                       const qc_train_place *place, qc_error *err);
/* Writes it to path; what was there is kept as path.backup. (train_apply.c) */
QC_NODISCARD qc_status qc_train_apply(const char *path, const qc_train_setting *s,
                                      const qc_train_place *place, qc_error *err);

/* Allocate what the setting needs on the first GPU and see what it really takes.
 * (train_profile.c) */
typedef struct {
    const char *gpu;
    uint64_t context_bytes;   /* taken by the CUDA context alone */
    uint64_t allocated_bytes; /* that the memory counter went down by for all buffers */
    uint64_t asked_bytes;     /* the estimate without the context */
} qc_train_profile;
QC_NODISCARD qc_status qc_train_measure(qc_train_profile *out, qc_arena *arena, const qc_plan *plan,
                                        const qc_train_setting *s, qc_error *err);

#endif
