/* Weights that are stored as integers or NVFP4 with scales, recognised by the tensors beside them:
 *
 *   M.weight I8 [out, in]                    compressed-tensors: int-quantized, naive-quantized
 *     M.weight_scale [1], [out, 1] or [out, groups], F32, F16 or BF16
 *     M.weight_zero_point I8, shaped like the scales; absent: 0
 *   M.weight_packed I32 [out, words]         compressed-tensors: pack-quantized, 2 to 8 bit
 *     M.weight_shape I64 [2], M.weight_scale as above
 *     M.weight_zero_point I32 [words, groups], packed along the rows, or I8; absent: 0
 *     words: ceil(in * bits / 32); before compressed-tensors 0.18 no code lay in two words:
 *     ceil(in / floor(32 / bits)), which is the same for 2, 4 and 8 bit
 *   M.qweight I32 [in * bits / 32, out]      GPTQ, 4 and 8 bit
 *     M.qzeros I32 [groups, out * bits / 32], M.scales [groups, out]
 *   M.qweight I32 [in, out / 8]              AWQ, 4 bit ("gemm")
 *     M.qzeros I32 [groups, out / 8], M.scales [groups, out]
 *   M.weight U8 [out, in / 2], or [experts, ...]     ModelOpt: NVFP4, the low half first
 *     M.weight_scale F8_E4M3 [out, in / 16], M.weight_scale_2 F32, one or one for each expert
 *   P U8 [experts, in / 2, out], P_weight_scale, P_weight_scale_2    ModelOpt: Llama 4, gpt-oss
 *   M.weight_packed U8 [out, in / 2]         compressed-tensors: nvfp4-pack-quantized
 *     M.weight_scale F8_E4M3 [out, in / 16], M.weight_global_scale F32, which divides
 *   M.weight_g_idx, M.g_idx I32 [in]         the group of each column, if they are out of order
 *
 * config.json must not contradict them. It alone says whether GPTQ's zero points are stored less
 * one, so GPTQ without it is not read. docs/recipes.md describes all this for users. */
#ifndef QC_CONVERT_RECIPE_PACKED_H
#define QC_CONVERT_RECIPE_PACKED_H

#include "convert/model/recipe_coded.h"

/* Returns how many words n codes of a weight in pack-quantized take. */
uint64_t qc_packed_words(const qc_coded_weight *w, uint64_t n);

/* Adds such weights to the set, and their scales and so on to its owners. dtype: of the model.
 * QC_ERR_INPUT where tensors or config.json contradict each other, QC_ERR_UNSUPPORTED for a
 * quantization_config that says something of them which is not read. Weights in a form that is not
 * read (other bit widths, other kernels' layouts) are left out. */
QC_NODISCARD qc_status qc_packed_find(qc_coded_set *set, qc_arena *arena,
                                      const qc_checkpoint *model, qc_dtype dtype, qc_error *err);

/* If tensor i holds codes of NVFP4 that cannot be read, says by words that follow "was packed by"
 * who wrote them and what is missing; otherwise NULL. */
const char *qc_nvfp4_trouble(const qc_checkpoint *model, uint32_t i);

#endif
