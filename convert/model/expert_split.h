/* Fused experts, as transformers 5 keeps them in memory and may save them:
 *
 *   P.mlp.experts.gate_up_proj [experts, 2 * inner, hidden]
 *   P.mlp.experts.down_proj    [experts, hidden, inner]
 *
 * In FP8, each has its block scales beside it, stacked alike: P.mlp.experts.gate_up_proj_scale_inv
 * and so on. A fused tensor holds the matrices of all experts one after the other, each as the
 * released checkpoint holds it in a tensor of its own. So splitting only gives names to ranges of a
 * file, and the output equals, byte for byte, that of a released checkpoint. */
#ifndef QC_CONVERT_EXPERT_SPLIT_H
#define QC_CONVERT_EXPERT_SPLIT_H

#include "formats/checkpoint.h"

/* For model types whose layout is known, replaces the fused tensors of c by one per expert and
 * matrix, under the released names. Mixtral's router gets its released name back, too. A warning
 * names stacks of experts that stay. Commands that quantize call this right after opening, and so
 * do commands that only decode, with fp8_only: 16-bit stacks then stay as they are, without a
 * warning. QC_ERR_INPUT if a released name is taken already. */
QC_NODISCARD qc_status qc_experts_split(qc_checkpoint *c, int fp8_only, qc_error *err);

#endif
