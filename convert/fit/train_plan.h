/* `qconv plan --mode train` finds the settings that fit, prints them, writes one as a
 * configuration, and measures it. */
#ifndef QC_CONVERT_TRAIN_PLAN_H
#define QC_CONVERT_TRAIN_PLAN_H

#include "convert/fit/train_memory.h"

/* Takes a plan after qc_plan_begin. It prints to standard output (text, or JSON with --json),
 * writes o->apply, and measures with o->profile. A budget without a GPU is QC_ERR_USAGE. If
 * something is to be applied and nothing fits, that is QC_ERR_CHECK. */
QC_NODISCARD qc_status qc_train_plan(const qc_train_options *o, const char *html,
                                     const qc_plan *plan, const qc_geometry *geometry,
                                     const qc_budget *budget, qc_error *err);

/* Writes the setting as a configuration: DeepSpeed's if the name of the file says so (it contains
 * "deepspeed" or "ds_"), else accelerate's. Both are JSON. (train_apply.c) */
QC_NODISCARD qc_status qc_train_config(qc_strbuf *out, const char *path, const qc_train_setting *s,
                                       const qc_train_place *place, qc_error *err);
/* Writes it to path. What was there is kept as path.backup. (train_apply.c) */
QC_NODISCARD qc_status qc_train_apply(const char *path, const qc_train_setting *s,
                                      const qc_train_place *place, qc_error *err);

/* What a setting really takes: qc_train_measure allocates what it needs on the first GPU.
 * (train_profile.c) */
typedef struct {
    const char *gpu;
    uint64_t context_bytes;   /* bytes that the CUDA context alone takes */
    uint64_t allocated_bytes; /* by how much the memory counter went down for all buffers */
    uint64_t asked_bytes;     /* the estimate without the context */
} qc_train_profile;
QC_NODISCARD qc_status qc_train_measure(qc_train_profile *out, qc_arena *arena, const qc_plan *plan,
                                        const qc_train_setting *s, qc_error *err);

#endif
