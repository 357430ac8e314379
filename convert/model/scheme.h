/* The schemes, that is, what may become of a tensor: one row of a table for each of them. Whoever
 * has to know something of a scheme reads its row instead of comparing schemes. */
#ifndef QC_CONVERT_SCHEME_H
#define QC_CONVERT_SCHEME_H

#include "base/dtype.h"
#include "base/status.h"
#include "convert/model/recipe_options.h"
#include "quant/quant_form.h"

#include <stdint.h>

typedef enum {
    QC_SCHEME_KEEP, /* copied bit for bit */
    QC_SCHEME_CAST, /* to out_dtype */
    QC_SCHEME_NF4,
    QC_SCHEME_INT8_ROWS,   /* LLM.int8 */
    QC_SCHEME_INT8_BLOCKS, /* block-wise int8 with absmax, qconv's own form */
    /* compressed-tensors: integers in groups of a row's weights, or with a scale for each row
     * ("channel"). W8A8 has activations in 8 bits, the others have them in 16. Where two suit what
     * is asked for or found, the later one is meant. */
    QC_SCHEME_W4A16_CHANNEL,
    QC_SCHEME_W4A16,
    QC_SCHEME_W8A16,
    QC_SCHEME_W8A16_CHANNEL,
    QC_SCHEME_W8A8,
    QC_SCHEME_W2A16_CHANNEL,
    QC_SCHEME_W2A16,
    QC_SCHEME_W3A16_CHANNEL,
    QC_SCHEME_W3A16,
    QC_SCHEME_W5A16_CHANNEL,
    QC_SCHEME_W5A16,
    QC_SCHEME_W6A16_CHANNEL,
    QC_SCHEME_W6A16,
    QC_SCHEME_W7A16_CHANNEL,
    QC_SCHEME_W7A16,
    QC_SCHEME_AWQ,     /* W4A16's codes in AWQ's order, with scales in F16 (awq_layout.h) */
    QC_SCHEME_DEQUANT, /* a quantized weight is decoded to out_dtype */
    /* not written: it is the state of a weight that is decoded, or it is left out */
    QC_SCHEME_ABSORBED
} qc_scheme;
#define QC_SCHEME_COUNT (QC_SCHEME_ABSORBED + 1)

/* The output tensors that a weight may become, in their order. */
typedef enum {
    QC_ROLE_TENSOR_MAIN,
    QC_ROLE_TENSOR_ABSMAX,        /* U8 (nested) or F32 */
    QC_ROLE_TENSOR_QUANT_MAP,     /* F32 [16] */
    QC_ROLE_TENSOR_NESTED_ABSMAX, /* F32 */
    QC_ROLE_TENSOR_NESTED_MAP,    /* F32 [256] */
    QC_ROLE_TENSOR_STATE,         /* U8, JSON */
    QC_ROLE_TENSOR_SCB,           /* F32 [rows] */
    QC_ROLE_TENSOR_FORMAT,        /* U8 scalar 0: row-major */
    QC_ROLE_TENSOR_SCALE,         /* [rows, groups] of the weight's dtype; AWQ: [groups, rows] */
    QC_ROLE_TENSOR_SHAPE,         /* I64 [2]: rows and columns */
    QC_ROLE_TENSOR_ZEROS,         /* I32 [groups, rows / 8]: zero points of 8 */
    QC_ROLE_TENSOR_COUNT
} qc_role_tensor;

typedef struct {
    const char *name; /* as in the manifest and in texts */
    qc_to to;         /* the value of --to that makes it; only where bits is not 0 */
    /* The operations of its codes; NULL: the scheme does not quantize. */
    const qc_form_ops *form;
    unsigned bits; /* bits of a code: 2 to 8; 0: the scheme does not quantize */
    int by_rows;   /* one scale for each row; otherwise one for each block */
    /* The block size where --block-size is not given. 0: --block-size has to choose the scheme, or
     * it has no blocks. */
    uint32_t default_block;
    qc_format format;         /* who reads it */
    unsigned activation_bits; /* in compressed-tensors: 8 or 16 */
    /* Whether its scales can be searched, and whether the search then needs a sample of the
     * weight's groups, which tells the offset of nested scales; otherwise that is 0. */
    int samples_offset;
    int needs_int8_matmul; /* bitsandbytes multiplies with it, and not every card has it */
    qc_dtype code_dtype;   /* dtype of the tensor with the codes */
    /* Bit r is set for qc_role_tensor r. A weight whose scales are not nested lacks the nested
     * ones. */
    unsigned role_tensors;
    const char *quant_type;   /* as the state of a weight says it; NULL: there is no state */
    const char *state_suffix; /* end of that state's name; NULL: there is none */
} qc_scheme_row;

/* What --to auto may take for a weight: each format has a table of them in order of size, whose
 * last row, "16bit", leaves the weight as it is. The rows between the others and that have no name
 * and are never taken. NF4 and INT8 are rows of bitsandbytes' table. */
#define QC_CANDIDATES 9u
enum {
    QC_CANDIDATE_NF4,
    QC_CANDIDATE_NF4_32,
    QC_CANDIDATE_INT8,
    QC_CANDIDATE_16BIT = QC_CANDIDATES - 1
};
/* The forms that a candidate may have, from the one that is wanted on: groups of 128, 64, 32, and a
 * scale for each row; with int8 that first, then groups, and that again for what had to avoid
 * it. */
#define QC_CANDIDATE_STEPS 5u

typedef struct {
    const char *name; /* as --schemes has it; NULL: the row is free */
    const char *why;  /* for the recipe */
    qc_scheme scheme;
    uint32_t block_elems;
    int asked_only;  /* it is taken only where --schemes names it */
    qc_scheme other; /* of a scheme in groups that by rows, and the reverse; KEEP: it has neither,
                        and no step but its first */
} qc_candidate;

/* How a weight is held with a candidate at one of its steps. */
typedef struct {
    qc_scheme scheme;
    uint32_t block_elems;
} qc_candidate_form;

/* Returns the candidates [QC_CANDIDATES] of --format and --activation-bits. */
const qc_candidate *qc_candidates_of(const qc_recipe_options *o);
/* Parses those of --schemes, bit c for qc_candidates_of(o)[c]; without it those are meant that need
 * not be asked for. QC_ERR_USAGE names those that there are. */
QC_NODISCARD qc_status qc_candidates_parse(const qc_recipe_options *o, unsigned *candidates,
                                           qc_error *err);
/* Finds the form of a step; 0: the candidate has no such step. */
int qc_candidate_step(const qc_candidate *c, unsigned step, qc_candidate_form *form);

/* Indexed by qc_scheme. */
extern const qc_scheme_row qc_schemes[QC_SCHEME_COUNT];

const char *qc_scheme_name(qc_scheme s);
int qc_scheme_is_quantized(qc_scheme s);
/* Writes "nf4 b64": a scheme, by its name, with its block size; 0: it has none. */
#define QC_SCHEME_TEXT_BYTES 64u
const char *qc_scheme_text(char out[QC_SCHEME_TEXT_BYTES], const char *name, uint64_t block_elems);
/* Finds the quantizing scheme of --to, --format, --activation-bits and --block-size. There is one
 * for each value of --to for which qc_to_quantizes() is true; for "auto" it is the one with the
 * fewest bits. */
qc_scheme qc_scheme_of_options(const qc_recipe_options *o);
/* Returns the block size that goes with that scheme; 0: it has no blocks. */
uint32_t qc_scheme_block_of_options(const qc_recipe_options *o);
/* Why a weight with rows of so many elements cannot have that scheme, or NULL. compressed-tensors
 * has the weights of Linear modules (cols is 0 for others), in whole groups and 32-bit words. With
 * "auto" one of the candidates is enough. */
const char *qc_scheme_obstacle(const qc_recipe_options *o, uint64_t cols);
/* Returns the same for a form of a candidate of "auto". */
const char *qc_candidate_obstacle(qc_candidate_form form, uint64_t cols);
/* How the numbers of a weight with this scheme lie, but for the offset of nested scales; those of
 * compressed-tensors are F32 here. ops is NULL where the scheme does not quantize. */
qc_form qc_scheme_form(qc_scheme s, uint64_t cols, uint64_t block_elems, int nested);
/* Returns the dtype of compressed-tensors' scales of a weight of this dtype: the same, or F32 for
 * F64. */
qc_dtype qc_scheme_scale_dtype(qc_dtype dtype);
/* Returns the bytes that the codes of so many weights take. */
uint64_t qc_scheme_code_bytes(qc_scheme s, uint64_t elems);

#endif
