/* plan --mode train works out the memory that fine-tuning a model needs on each GPU, and settings
 * that fit.
 *
 * Training is data parallel: every GPU holds a replica, or its ZeRO share of one, and its own
 * micro-batch. docs/training.md has the formulas with their sources. This is pure arithmetic that
 * saturates and is thread-safe; it allocates nothing except where an arena is given. */
#ifndef QC_CONVERT_TRAIN_MEMORY_H
#define QC_CONVERT_TRAIN_MEMORY_H

#include "convert/fit/budget.h"
#include "convert/model/geometry.h"
#include "convert/plan/plan.h"

typedef enum { QC_TRAIN_FULL, QC_TRAIN_LORA, QC_TRAIN_QLORA } qc_train_method;
typedef enum {
    QC_OPTIMIZER_ADAMW,
    QC_OPTIMIZER_ADAM,
    QC_OPTIMIZER_ADAM8BIT,
    QC_OPTIMIZER_SGD
} qc_optimizer;
typedef enum { QC_PRECISION_BF16, QC_PRECISION_FP16, QC_PRECISION_FP32 } qc_precision;

/* The options of plan --mode train. What was not given is chosen. A member whose own value cannot
 * say that it was not given has a _given flag. */
typedef struct {
    int on;            /* --mode train */
    int context_given; /* --context was given; without it a shorter one may be taken */
    int method_given, optimizer_given, precision_given, zero_given, checkpointing_given;
    qc_train_method method;
    qc_optimizer optimizer;
    qc_precision precision;
    unsigned zero; /* ZeRO stage 0..3 */
    int checkpointing;
    uint64_t lora_rank;       /* default 16 */
    uint64_t effective_batch; /* sequences per optimizer step over all GPUs; default 32 */
    const char *apply;        /* configuration file to write, or NULL */
    int profile;              /* measure on a GPU instead of estimating */
} qc_train_options;

/* What the formulas need to know about a model. */
typedef struct {
    uint64_t parameters;
    uint64_t quantized_bytes; /* all tensors as the plan writes them, which are the base of QLoRA */
    uint64_t rank_elems;     /* sum of rows + columns over the linear weights: the cost of rank 1 */
    uint64_t largest_weight; /* elements of the largest quantized weight */
    uint64_t largest_layer;  /* parameters of the largest layer */
    const qc_geometry *geometry;
} qc_train_model;

/* The memory of each GPU. */
typedef struct {
    uint64_t parameters, gradients, optimizer, activations, batch_data, workspace, context;
    uint64_t total;
} qc_train_bytes;

/* The machine that it runs on. */
typedef struct {
    uint32_t gpus;
    uint64_t budget_bytes;  /* of the smallest */
    uint64_t context_bytes; /* CUDA context */
    uint64_t tokens;        /* of one sequence */
} qc_train_place;

typedef struct {
    qc_train_options options; /* with every choice made */
    uint64_t micro_batch;     /* the largest that fits, up to what the effective batch asks for;
                                 0: not even 1 fits */
    uint64_t accumulation;    /* steps that make up the effective batch */
    qc_train_bytes bytes;     /* at micro_batch, or at 1 when that is 0 */
} qc_train_setting;

#define QC_TRAIN_MAX_SETTINGS 6u

/* Fills out with sums over a plan (after qc_plan_begin). */
void qc_train_model_of(qc_train_model *out, const qc_plan *plan, const qc_geometry *geometry);
/* Returns the number of parameters that are trained: all of them, or those of the adapters. */
uint64_t qc_train_trained(const qc_train_model *m, const qc_train_options *t);
qc_train_bytes qc_train_estimate(const qc_train_model *m, const qc_train_options *t,
                                 const qc_train_place *place, uint64_t micro_batch);
/* Finds the micro_batch of a qc_train_setting by bisection. */
uint64_t qc_train_largest_batch(const qc_train_model *m, const qc_train_options *t,
                                const qc_train_place *place);
/* Finds settings for every method that `wanted` leaves open, in the order full, LoRA, QLoRA: first
 * the one that fits with the least recomputation and communication, then the one with the largest
 * micro-batch if that is another. Where nothing fits, it takes the one that is least over. Returns
 * their number. */
unsigned qc_train_settings(const qc_train_model *m, const qc_train_options *wanted,
                           const qc_train_place *place,
                           qc_train_setting out[QC_TRAIN_MAX_SETTINGS]);
/* Writes "QLoRA r16, 8-bit Adam, checkpointing, ZeRO-2" or the like. */
#define QC_TRAIN_LABEL_BYTES 96
const char *qc_train_label(char out[QC_TRAIN_LABEL_BYTES], const qc_train_options *t);

extern const char *const qc_train_method_names[3];    /* "full", "lora", "qlora" */
extern const char *const qc_train_optimizer_names[4]; /* "adamw", "adam", "adam8bit", "sgd" */
extern const char *const qc_train_precision_names[3]; /* "bf16", "fp16", "fp32" */

#endif
