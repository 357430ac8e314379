/* Weights that bitsandbytes or qconv quantized, recognised by the tensors beside them:
 *
 *   M.weight.quant_state.bitsandbytes__nf4   or __fp4: 4-bit codes in M.weight
 *   M.weight.quant_state.qconv__int8         block-wise int8 in M.weight
 *   M.SCB beside an I8 M.weight              row-wise int8 (LLM.int8)
 *   P.quant_state..., P.SCB beside P         the same for a stack of experts, [experts, out, in]
 *
 * docs/format.md has the layouts. Every size is checked against the shape the state names. */
#ifndef QC_CONVERT_RECIPE_STORED_H
#define QC_CONVERT_RECIPE_STORED_H

#include "convert/model/recipe_coded.h"

#define QC_NO_TENSOR UINT32_MAX

/* The message of whoever needs such weights, about a path that has none. */
#define QC_STORED_NONE                                                                             \
    "%s: no weight in it is quantized in NF4, FP4, int8 or integers of compressed-tensors "        \
    "without "                                                                                     \
    "zero points or act-order"

typedef struct {
    const qc_stored_weight **weights; /* per tensor: how it is stored, NULL if it is not */
    uint32_t *owners; /* per tensor: the weight whose state it is, or QC_NO_TENSOR */
    uint32_t count;   /* number of stored weights */
} qc_stored_set;

/* Returns the number of weights that share a scale; 0: each row has one. */
static inline uint64_t qc_stored_block(const qc_stored_weight *w)
{
    return qc_schemes[w->stored_as].by_rows ? 0 : w->block_elems;
}

/* The arrays have one element per tensor of the model and live in the arena. QC_ERR_INPUT when a
 * state does not fit its weight, QC_ERR_UNSUPPORTED for a form of bitsandbytes that qconv does not
 * read. */
QC_NODISCARD qc_status qc_stored_find(qc_stored_set *out, qc_arena *arena,
                                      const qc_checkpoint *model, qc_error *err);
/* Says how integers of compressed-tensors are stored that one of the schemes makes (symmetric,
 * scales by row or by groups in order), with weight_scale as absmax. Its dtype, F32, F16 or BF16,
 * is also that of the weight. *out is NULL for all others. */
QC_NODISCARD qc_status qc_stored_of_integers(const qc_stored_weight **out, qc_arena *arena,
                                             const qc_checkpoint *model, uint32_t tensor,
                                             const qc_coded_weight *w, qc_error *err);
/* Says the same of a weight that qconv wrote in AWQ's order, whose zero points are all 8. Its codes
 * and scales are numbered as they are made (awq_layout.h). */
QC_NODISCARD qc_status qc_stored_of_awq(const qc_stored_weight **out, qc_arena *arena,
                                        const qc_checkpoint *model, const qc_coded_weight *w,
                                        qc_error *err);
/* The name of the scheme of integers in texts: that of its row where there is one, else "w4a8" or
 * the like; "gptq", "awq". */
QC_NODISCARD qc_status qc_integers_name(const char **out, qc_arena *arena, const qc_coded_weight *w,
                                        qc_error *err);
/* Of integers of compressed-tensors: the bits of activations, which are those that the coding has
 * by custom where config.json is silent; the columns that share a scale, 0 where a row has one. */
unsigned qc_integers_activation_bits(const qc_coded_weight *w);
uint64_t qc_integers_block(const qc_coded_weight *w);
/* Finds the coded weights, too, and adds all such integers to the stored ones. Only callers that
 * look at codes want that: what qc_stored_find alone gives is decoded as stored, while integers are
 * decoded as coded weights (recipe_coded.h). */
QC_NODISCARD qc_status qc_stored_find_codes(qc_stored_set *set, qc_coded_set *coded,
                                            qc_arena *arena, const qc_checkpoint *model,
                                            qc_error *err);

#endif
