/* What a conversion is to make of each tensor. The functions are in scheme.c. */
#ifndef QC_CONVERT_RECIPE_OPTIONS_H
#define QC_CONVERT_RECIPE_OPTIONS_H

#include <stdint.h>

/* AUTO chooses a scheme per weight, for a budget. KEEP leaves every tensor as it is, but shards,
 * compression and digests are made anew. */
typedef enum {
    QC_TO_NF4,
    QC_TO_INT2,
    QC_TO_INT3,
    QC_TO_INT4,
    QC_TO_INT5,
    QC_TO_INT6,
    QC_TO_INT7,
    QC_TO_INT8,
    QC_TO_AUTO,
    QC_TO_FP16,
    QC_TO_BF16,
    QC_TO_KEEP
} qc_to;
#define QC_TO_NAMES                                                                                \
    "nf4", "int2", "int3", "int4", "int5", "int6", "int7", "int8", "auto", "fp16", "bf16", "keep"
/* Whose format the quantized weights have. OWN is what qconv alone reads; no option has it. */
typedef enum {
    QC_FORMAT_BITSANDBYTES,
    QC_FORMAT_COMPRESSED_TENSORS,
    QC_FORMAT_AWQ,
    QC_FORMAT_OWN
} qc_format;
#define QC_FORMAT_NAMES "bitsandbytes", "compressed-tensors", "awq"
/* How the experts of a layer are written: a tensor for all of them, as transformers 5 holds them,
 * or as they are released. AS_FOUND takes them apart where weights are quantized. */
typedef enum { QC_EXPERTS_AS_FOUND, QC_EXPERTS_SEPARATE, QC_EXPERTS_STACKED } qc_experts;
typedef enum { QC_REST_KEEP, QC_REST_BF16, QC_REST_FP16 } qc_rest;
#define QC_REST_NAMES "keep", "bf16", "fp16"

/* How scales that are not calibrated are found. ABSMAX takes the largest magnitude, as bitsandbytes
 * does. SEARCH takes the scale with the least squared error. REFIT does that too, and then chooses
 * the scales of the scales anew for what it found. */
typedef enum { QC_SCALE_ABSMAX, QC_SCALE_SEARCH, QC_SCALE_REFIT } qc_scale_method;
#define QC_SCALE_NAMES "absmax", "search", "refit"

/* --keep GLOB or --quantize GLOB, in the order given (those of a recipe file first). The last match
 * wins. */
typedef struct {
    int quantize; /* 0: keep */
    const char *glob;
} qc_rule;

/* Strings and rules are borrowed. */
typedef struct {
    qc_to to;
    int to_given;         /* plan only, where --to may be left out */
    qc_format format;     /* COMPRESSED_TENSORS with integers of 2 to 7 bits */
    int activations_16;   /* --activation-bits 16: only the weights are 8-bit integers */
    uint32_t block_elems; /* 0: not given */
    int per_channel;      /* --block-size channel: a scale for each row */
    int double_quant;     /* 1 unless --no-double-quant */
    qc_scale_method scale;
    qc_rest rest;
    qc_rule *rules;
    uint32_t rule_count;
    const char *compute_dtype; /* "bfloat16", "float16", "float32" or NULL: chosen */
    const char *schemes;       /* --to auto: the candidates, "int4,int6"; NULL: those by default */
    double bits;               /* --to auto: average bits of a weight; 0: the devices decide */
    const char *importance;    /* --to auto: the file that says how much weights count, or NULL */
    /* MXFP4 experts get the scheme of --to instead of staying as they are */
    int requantize;
    int drop_mtp; /* leave out multi-token prediction layers */
    /* rules and --to auto may split what engines hold as one module (fused_groups.h) */
    int split_fused;
    qc_experts experts; /* --experts */
} qc_recipe_options;

/* Does it quantize? nf4, the integers and auto do. */
int qc_to_quantizes(qc_to to);

/* The names as users type them: QC_TO_NAMES, QC_FORMAT_NAMES and so on. They are constants. */
const char *qc_to_name(qc_to to);
const char *qc_format_name(qc_format format);
const char *qc_rest_name(qc_rest rest);
/* Returns NULL where nothing is quantized. */
const char *qc_scale_name(const qc_recipe_options *o);

#endif
