/* plan --mode train: the memory of fine-tuning a model, and settings that fit.
 *
 * Formulas with their sources: docs/planning.md, "Training". Pure arithmetic. */
#ifndef QC_CONVERT_TRAIN_MEMORY_H
#define QC_CONVERT_TRAIN_MEMORY_H

#include "convert/budget.h"
#include "convert/geometry.h"
#include "convert/plan.h"
#include "convert/segments.h"

/* Per GPU. */
typedef struct {
    uint64_t parameters, gradients, optimizer, activations, batch_data, workspace, context;
    uint64_t total;
} qc_train_bytes;

typedef struct {
    uint64_t parameters;   /* of the model */
    uint64_t trained;      /* of those (LoRA: of the adapters) */
    uint64_t weight_bytes; /* as held for the forward pass: quantized for QLoRA */
} qc_train_model;

typedef struct {
    const char *label;        /* "QLoRA, 8-bit Adam, checkpointing" */
    qc_train_options options; /* what it stands for */
    uint64_t micro_batch;     /* largest that fits; 0: not even 1 */
    uint64_t accumulation;    /* for the effective batch wanted */
    qc_train_bytes bytes;     /* at micro_batch (at 1 when that is 0) */
    int fits;
} qc_train_setting;

/* The plan of `plan --mode train`: prints it (text or JSON), writes --apply, measures with
 * --profile. What cmd_plan.c calls when options->train.on. */
QC_NODISCARD qc_status qc_train_plan(const qc_options *o, const qc_checkpoint *model,
                                     const qc_recipe *recipe, const qc_plan *plan,
                                     const qc_geometry *geometry, const qc_budget *budget,
                                     qc_error *err);

#endif
