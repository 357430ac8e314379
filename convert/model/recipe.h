/* The recipe: which tensor of a checkpoint becomes what.
 *
 * Quantized is every weight that transformers would turn into a quantized Linear for the model's
 * type, and nothing else: not embeddings, norms, biases, routers, lm_head, tied heads under either
 * name, convolutions, buffers. Known model types have a table of their own; an unknown type goes by
 * stated rules. docs/recipes.md lists both.
 *
 * A checkpoint that is quantized already (bitsandbytes' or qconv's own) is recognised by its
 * state tensors: its weights can be dequantized (--to bf16, --to fp16) or kept. */
#ifndef QC_CONVERT_RECIPE_H
#define QC_CONVERT_RECIPE_H

#include "convert/model/recipe_options.h"
#include "formats/checkpoint.h"

typedef enum {
    QC_SCHEME_KEEP, /* bit for bit */
    QC_SCHEME_CAST, /* to out_dtype */
    QC_SCHEME_NF4,
    QC_SCHEME_INT8_ROWS,   /* LLM.int8 */
    QC_SCHEME_INT8_BLOCKS, /* block-wise int8 with absmax, qconv's own form */
    QC_SCHEME_DEQUANT,     /* a quantized weight back to out_dtype */
    QC_SCHEME_ABSORBED     /* not written: state of a weight that is decoded, or left out */
} qc_scheme;

const char *qc_scheme_name(qc_scheme s); /* as in the manifest: "keep", "cast", "nf4", "int8",
                                            "int8-block", "dequant" */

typedef enum {
    QC_ROLE_LINEAR,
    QC_ROLE_EMBEDDING,
    QC_ROLE_HEAD,   /* output head, tied or not */
    QC_ROLE_ROUTER, /* MoE gate */
    QC_ROLE_NORM,
    QC_ROLE_BIAS,
    QC_ROLE_CONV,
    QC_ROLE_STATE,  /* scales and the like of a quantized weight, MXFP4 scales */
    QC_ROLE_PACKED, /* a weight already quantized: bitsandbytes U8 codes, MXFP4 blocks */
    QC_ROLE_OTHER
} qc_role;

const char *qc_role_name(qc_role r);

/* For a weight quantized by bitsandbytes or qconv: where its parts are. */
typedef struct {
    qc_scheme stored_as; /* QC_SCHEME_NF4, QC_SCHEME_INT8_ROWS or QC_SCHEME_INT8_BLOCKS */
    int fp4;             /* stored_as NF4 form, but with another map: use quant_map */
    uint32_t absmax;     /* tensor index of absmax or SCB */
    uint32_t quant_map;  /* UINT32_MAX where there is none */
    uint32_t nested_absmax, nested_map;
    uint64_t block_elems;
    uint64_t nested_block_elems;
    float nested_offset;
    qc_dtype dtype; /* of the weight before quantization */
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS]; /* logical shape */
} qc_stored_weight;

typedef enum { QC_CODING_FP8, QC_CODING_MXFP4 } qc_coding;

/* For a weight in 8-bit floats or MXFP4, which is decoded to float before anything else. */
typedef struct {
    qc_coding coding;
    qc_dtype dtype;                /* of the model: config.json's, bfloat16 where it has none */
    uint32_t scales;               /* tensor index; UINT32_MAX: the codes are the weights */
    uint64_t tile_rows, tile_cols; /* FP8: weights that share a scale */
    uint64_t tiles_across;         /* FP8: scales in a row of them */
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS]; /* of the weight: [out, in], MXFP4 [experts, out, in] */
    const char *name;           /* what it is called when it is decoded */
} qc_coded_weight;

typedef struct {
    qc_scheme scheme : 8;
    qc_role role : 8;
    unsigned transpose : 8; /* Conv1D: quantize [out, in] from [in, out], or turn that back; stacked
                               experts in 16 bit: write [experts, in, out], as transformers has
                               them, from [experts, out, in] */
    qc_dtype out_dtype : 8; /* for CAST and DEQUANT; else the tensor's own */
    uint32_t block_elems;   /* NF4, INT8_BLOCKS: weights per scale */
    const char *why;        /* a few words: "linear", "embedding", "--keep *.q_proj.*", ... */
    const qc_stored_weight *stored; /* for DEQUANT (and KEEP of a quantized weight), else NULL */
    const qc_coded_weight *coded;   /* of a weight in FP8 or MXFP4, whatever becomes of it */
    uint32_t owner; /* the weight whose scale or state this is, a tensor index; else UINT32_MAX */
} qc_recipe_entry;

typedef struct {
    const char *model_type; /* "llama", ...; "" when config.json has none */
    int known_type;
    qc_recipe_entry *entries; /* one per checkpoint tensor, same order */
    /* Modules left in 16 bit although they are a Linear (head, routers, kept ones), without
     * ".weight", in natural order: becomes llm_int8_skip_modules. Where weights are decoded while
     * others stay as they are: those that config.json named, and the decoded ones. */
    const char **skip_modules;
    uint32_t skip_count;
    int input_is_quantized; /* by bitsandbytes or qconv */
    int input_is_coded;     /* FP8 or MXFP4 */
    int keeps_coded;        /* some weight stays quantized, FP8 or MXFP4: its loader has to know */
    int mtp_dropped;        /* --drop-mtp took something out */
} qc_recipe;

/* Strings and arrays live in the arena. QC_ERR_USAGE for a glob that matches nothing, or that
 * matches only what cannot be quantized; QC_ERR_UNSUPPORTED for asking NF4 of a checkpoint that is
 * quantized already, with a sentence that says what to do instead. */
QC_NODISCARD qc_status qc_recipe_make(qc_recipe *out, qc_arena *arena, const qc_checkpoint *model,
                                      const qc_recipe_options *options, qc_error *err);

/* Scales of weights in FP8 and MXFP4 go with their weight: written where it is kept, else not. To
 * be called after schemes of such weights have changed (--to auto). */
void qc_recipe_settle_scales(qc_recipe *recipe, const qc_checkpoint *model);
/* Makes skip_modules anew after schemes of entries have changed (--to auto). */
QC_NODISCARD qc_status qc_recipe_list_skipped(qc_recipe *recipe, qc_arena *arena,
                                              const qc_checkpoint *model,
                                              const qc_recipe_options *options, qc_error *err);

#endif
