/* Weights in 8-bit floats, MXFP4, NVFP4 or integers with scales (recipe_packed.h), recognised by
 * the tensors beside them, never by config.json alone, which may be wrong:
 *
 *   M.weight F8_E4M3 or F8_E5M2 [out, in] with
 *     M.weight_scale_inv   one scale per block (DeepSeek-V3, transformers' fp8), or one in all
 *     M.weight_scale       one in all, one per row, or one per block (compressed-tensors, fbgemm)
 *     nothing              the codes are the weights (a plain cast)
 *   P_blocks U8 [experts, out, in/32, 16] with P_scales U8 [experts, out, in/32]   MXFP4 (gpt-oss)
 *
 * A weight is its code times its scale. docs/recipes.md describes it for users. */
#ifndef QC_CONVERT_RECIPE_CODED_H
#define QC_CONVERT_RECIPE_CODED_H

#include "convert/model/recipe.h"

typedef struct {
    const qc_coded_weight **weights; /* per tensor: how it is coded, NULL if it is not */
    uint32_t *owners;                /* per tensor: the weight whose scale it is, or UINT32_MAX */
    uint32_t count;                  /* number of coded weights */
} qc_coded_set;

/* The arrays have one element per tensor and live in the arena. QC_ERR_INPUT when scales do not fit
 * their weight, QC_ERR_UNSUPPORTED for scales of a form that qconv does not read. */
QC_NODISCARD qc_status qc_coded_find(qc_coded_set *out, qc_arena *arena, const qc_checkpoint *model,
                                     qc_error *err);

/* Returns the name of a coding in messages and tables. */
const char *qc_coding_name(qc_coding coding);
/* Is it one of recipe_packed.h's, which have another name or shape than their weight? */
int qc_coding_is_packed(qc_coding coding);
unsigned qc_coded_bits(const qc_coded_weight *w); /* bits of a code: 2 to 8 */
/* Returns the index of the tensor that holds the weight with this name: the tensor of that name, or
 * the codes of the weight that is called so when it is decoded, or, of a name that ends in
 * "weight_packed", the weight that those codes would be of. UINT32_MAX if there is none. */
uint32_t qc_coded_index(const qc_coded_set *set, const qc_checkpoint *model, const char *name);

/* The rows and columns of the blocks that share a scale, from config.json, or 128 x 128 if it has
 * none. */
QC_NODISCARD qc_status qc_coded_block(uint64_t block[2], const qc_checkpoint *model, qc_error *err);

/* If the weight at index i cannot be read because another tool packed it, the tool's name;
 * otherwise NULL. Tensor names decide first. config.json's quant_method counts only for a tensor of
 * integers that nothing else explains. */
const char *qc_foreign_tool(const qc_checkpoint *model, uint32_t i);

/* Returns a member of config.json, or of its text_config, where multimodal models have it; NULL if
 * there is none. (recipe.c) */
const qc_json_node *qc_config_get(const qc_checkpoint *model, const char *key);
/* Returns the dtype that config.json names, or `missing` where it names none that is known. */
qc_dtype qc_config_dtype(const qc_checkpoint *model, qc_dtype missing);

#endif
