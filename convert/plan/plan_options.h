/* The options that the bytes of a conversion's output depend on, besides the model. The identity of
 * a conversion (convert/run/identity.c) is made of exactly these. */
#ifndef QC_CONVERT_PLAN_OPTIONS_H
#define QC_CONVERT_PLAN_OPTIONS_H

#include "convert/model/recipe_options.h"

#include <stddef.h>

typedef enum { QC_TIER_GPU, QC_TIER_CPU, QC_TIER_DISK } qc_tier;

typedef struct {
    const char *name; /* "cuda:0", "cpu", "disk" */
    qc_tier tier;
    const struct qc_card *card; /* NULL: only a size was given */
    uint64_t total_bytes;       /* UINT64_MAX: no limit (disk) */
} qc_device;

/* The devices of --vram (convert/fit/budget.h). */
typedef struct {
    const char *text; /* as given */
    qc_device *devices;
    uint32_t count;     /* 0: --vram was not given */
    uint32_t gpu_count; /* the first ones */
} qc_budget;

/* How a model lies on several GPUs. */
typedef enum {
    QC_PARALLEL_LAYERS, /* each layer lies whole on one of them */
    QC_PARALLEL_TENSOR  /* each holds a share of every layer, as vLLM splits them */
} qc_parallel;

/* Where the model will lie and what will run there, for plan and for convert --vram. A shard ends
 * where the device changes. */
typedef struct {
    qc_budget vram;
    double margin;    /* usable share of each device, 0 < margin <= 1; default 0.9 */
    uint64_t context; /* tokens of one sequence; 0: 8192, or the model's limit if that is less */
    uint64_t batch;   /* sequences at once; default 1 */
    uint64_t images;  /* images of each sequence, for models with cross-attention; default 1 */
    unsigned kv_bits; /* bits of each cached element: 8, 16 or 32; default 16 */
    int mla_expanded; /* --mla expanded: keys and values are cached per head */
    /* --mla absorbed: attention computes with the cached latent. If neither is set, the latent is
     * cached, and a layer expands all of it to compute. */
    int mla_absorbed;
    uint64_t prefill; /* tokens of a prompt that are read at once; 0: the whole prompt */
    int prefill_given;
    uint64_t cuda_context_bytes; /* on each GPU; default 500 MB */
    qc_parallel parallel;        /* TENSOR: over all GPUs of --vram */
    int plugin;                  /* --for vllm-qconv: --to auto may take what that alone splits */
    unsigned tensor_parallel;    /* --tp: over so many, which --vram has to name; 0: not given */
} qc_fit_options;

/* --hessians. Without it nothing is calibrated. */
typedef struct {
    const char *hessians; /* file or folder of second moments, or "fd:N"; NULL: not given */
    struct qc_door *door; /* open, where hessians is "fd:N"; borrowed (calibrate_door.h) */
    double damping;       /* 0: qconv chooses by the number of tokens */
    unsigned sided;       /* 1 or 2; 0: not given */
} qc_calibrate_options;

/* Do the options ask for calibrating? */
static inline int qc_calibrates(const qc_calibrate_options *o)
{
    return o->hessians != NULL;
}

typedef struct {
    qc_recipe_options recipe;
    qc_fit_options fit;
    qc_calibrate_options calibrate;
    int compress;             /* 1: zstd (default), 0: none */
    int compress_level;       /* 1..19, default 1 */
    uint64_t max_shard_bytes; /* default 5 GB */
} qc_plan_options;

#endif
