/* The recipe: which tensor of a checkpoint becomes what.
 *
 * qconv quantizes every weight that transformers would turn into a quantized Linear for the model's
 * type, and nothing else: not embeddings, norms, biases, routers, lm_head, tied heads under either
 * name, convolutions, buffers. Known model types have a table of their own, and unknown ones follow
 * general rules. docs/recipes.md lists both.
 *
 * A checkpoint that is quantized already (bitsandbytes' or qconv's own) is recognised by its state
 * tensors. Its weights can be dequantized (--to bf16, --to fp16) or kept. */
#ifndef QC_CONVERT_RECIPE_H
#define QC_CONVERT_RECIPE_H

#include "convert/families/family.h"
#include "convert/model/fused_groups.h"
#include "convert/model/scheme.h"
#include "formats/checkpoint.h"

const char *qc_role_name(qc_role r);

/* A weight that bitsandbytes, qconv or a tool for compressed-tensors quantized, with the places of
 * its role tensors. */
typedef struct {
    qc_scheme stored_as; /* one that quantizes */
    const char *name;    /* the scheme in texts: "fp4" and "w4a8" have no row of their own */
    int fp4;             /* stored like NF4, but with another map: use quant_map */
    uint32_t absmax;     /* tensor index of absmax or SCB */
    uint32_t quant_map;  /* UINT32_MAX where there is none */
    uint32_t nested_absmax, nested_map;
    uint64_t block_elems; /* see qc_stored_block */
    uint64_t nested_block_elems;
    float nested_offset;
    qc_dtype dtype; /* the weight's dtype before it was quantized */
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS]; /* shape of the weight */
} qc_stored_weight;

typedef enum {
    QC_CODING_FP8,
    QC_CODING_MXFP4,
    QC_CODING_INT,    /* compressed-tensors' int-quantized and naive-quantized: bytes */
    QC_CODING_PACKED, /* compressed-tensors' pack-quantized */
    QC_CODING_GPTQ,
    QC_CODING_AWQ,
    QC_CODING_NVFP4, /* compressed-tensors' and ModelOpt's */
    QC_CODING_COUNT
} qc_coding;

/* What a config.json of compressed-tensors says of integers, beyond what their tensors show. It is
 * all 0 where config.json says nothing. */
typedef struct {
    unsigned bits;            /* bits of a code, whose place may be wider */
    unsigned activation_bits; /* 16: activations are not quantized */
    int by_rows;              /* each row has a scale ("channel") */
    int static_activations;   /* their scale is in the file */
    int float_activations;
} qc_integer_args;

/* A weight in 8-bit floats, MXFP4, NVFP4 or integers with scales. It is decoded to float before
 * anything else is done with it. */
typedef struct {
    qc_coding coding;
    /* the model's dtype: config.json's, or bfloat16 if it names none */
    qc_dtype dtype;
    uint32_t scales;               /* tensor index; UINT32_MAX: the codes are the weights */
    uint64_t tile_rows, tile_cols; /* rows and columns of weights that share a scale */
    uint64_t tiles_across;         /* number of scales in one row of them */
    /* The rest is of integers and NVFP4 only. */
    uint32_t zeros;       /* tensor index of the zero points; UINT32_MAX: it is the middle code */
    uint32_t group_index; /* tensor index of each column's group; UINT32_MAX: they are in order */
    unsigned bits;        /* bits of a code */
    int padded;           /* no code lies in two words, as compressed-tensors packed before 0.18 */
    int zero_add;         /* added to a stored zero point */
    uint32_t global;      /* NVFP4: tensor index of the scale of all scales, or of each expert's */
    int divides; /* NVFP4: they are divided by it, and code 8 is -0; else times it, and 0 */
    qc_integer_args said;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS]; /* shape of the weight: [out, in], or that of a stack of experts */
    const char *name;           /* the name that it has when it is decoded */
} qc_coded_weight;

typedef struct {
    qc_scheme scheme : 8;
    qc_role role : 8;
    /* Conv1D: the weight is quantized as [out, in] from [in, out], or that is undone. Stacked
     * experts in 16 bits: they are written as [experts, in, out], as transformers has them, from
     * [experts, out, in]. */
    unsigned transpose : 8;
    qc_dtype out_dtype : 8; /* for CAST and DEQUANT; otherwise the tensor's own */
    uint32_t block_elems;   /* NF4, INT8_BLOCKS: weights per scale */
    const char *why;        /* a few words: "linear", "embedding", "--keep *.q_proj.*", ... */
    /* for DEQUANT, and for KEEP of a quantized weight; otherwise NULL */
    const qc_stored_weight *stored;
    /* for a coded weight, whatever becomes of it; otherwise NULL */
    const qc_coded_weight *coded;
    /* The index of the weight whose scale or state this tensor is; UINT32_MAX for all others. */
    uint32_t owner;
    int unasked; /* a matrix stays as it is, and neither a rule nor --to auto chose so */
} qc_recipe_entry;

typedef struct {
    const char *model_type; /* "llama", ...; "" when config.json has none */
    int known_type;
    qc_recipe_entry *entries; /* one per checkpoint tensor, same order */
    /* The modules that stay in 16 bits although they are a Linear (head, routers, kept ones),
     * without ".weight", in natural order, and what engines call fused groups of such modules. They
     * become llm_int8_skip_modules. If some weights are decoded while others stay quantized, the
     * list holds the modules that config.json named and the decoded ones. */
    const char **skip_modules;
    uint32_t skip_count;
    int input_is_quantized;     /* by bitsandbytes or qconv */
    int input_is_coded;         /* FP8, MXFP4, NVFP4 or integers with scales */
    int keeps_coded;            /* some weight stays so, which its loader has to know */
    int mtp_dropped;            /* --drop-mtp left something out */
    qc_fused_widenings widened; /* rules that count for more than they name */
} qc_recipe;

/* Strings and arrays live in the arena. QC_ERR_USAGE for a glob that matches nothing, or only
 * tensors that cannot be quantized. QC_ERR_UNSUPPORTED where NF4 is asked of a checkpoint that is
 * quantized already; its message says what to do instead. */
QC_NODISCARD qc_status qc_recipe_make(qc_recipe *out, qc_arena *arena, const qc_checkpoint *model,
                                      const qc_recipe_options *options, qc_error *err);

/* Lets the scales of coded weights follow their weight: they are written where it is
 * kept, and otherwise not. Call this after the schemes of such weights have changed (--to auto). */
void qc_recipe_settle_scales(qc_recipe *recipe, const qc_checkpoint *model);
/* Makes skip_modules anew. Call this after the schemes of entries have changed (--to auto). */
QC_NODISCARD qc_status qc_recipe_list_skipped(qc_recipe *recipe, qc_arena *arena,
                                              const qc_checkpoint *model,
                                              const qc_recipe_options *options, qc_error *err);

#endif
