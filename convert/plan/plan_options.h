/* What the bytes of a conversion's output depend on, beside the model. The identity of a conversion
 * (convert/run/identity.c) is made of exactly this. */
#ifndef QC_CONVERT_PLAN_OPTIONS_H
#define QC_CONVERT_PLAN_OPTIONS_H

#include "convert/model/recipe_options.h"

/* Where the model is to lie and what is to run there: plan, and convert --vram. Shards end where
 * the device changes. */
typedef struct {
    const char *vram; /* --vram as given, or NULL; see convert/fit/budget.h */
    double margin;    /* usable share of each device, 0 < margin <= 1; default 0.9 */
    uint64_t context; /* tokens of one sequence; 0: 8192, or the model's limit if that is less */
    uint64_t batch;   /* sequences at once; default 1 */
    uint64_t images;  /* per sequence, for models with cross-attention; default 1 */
    unsigned kv_bits; /* per cached element: 8, 16 or 32; default 16 */
    int mla_expanded; /* --mla expanded: keys and values are cached per head */
    int mla_absorbed; /* --mla absorbed: attention computes with the latent that is cached. Neither:
                         the latent is cached, and a layer expands all of it to compute */
    uint64_t prefill; /* tokens of a prompt read at once; 0: the whole prompt */
    uint64_t cuda_context_bytes; /* per GPU; default 500 MB */
} qc_fit_options;

/* --calibrate and --hessians. Without a text and without hessians nothing is calibrated. */
typedef struct {
    const char *text;     /* FILE, or "default": the bundled text; NULL: not given */
    const char *hessians; /* file or folder of second moments; NULL: not given */
    uint64_t max_tokens;  /* 0: QC_CALIBRATE_TOKENS, or all of the text if that is less */
    uint64_t context;     /* tokens of a window; 0: chosen */
    double damping;       /* 0: chosen by the number of tokens */
} qc_calibrate_options;

#define QC_CALIBRATE_TOKENS 131072u

/* Does it ask for calibrating? */
static inline int qc_calibrates(const qc_calibrate_options *o)
{
    return o->text || o->hessians;
}

typedef struct {
    qc_recipe_options recipe;
    qc_fit_options fit;
    qc_calibrate_options calibrate; /* its tokenizer is the call's */
    int compress;                   /* 1: zstd (default), 0: none */
    int compress_level;             /* 1..19, default 1 */
    uint64_t max_shard_bytes;       /* default 5 GB */
} qc_plan_options;

#endif
