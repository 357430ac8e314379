/* Fused experts, as transformers 5 keeps them in memory and may save them:
 *
 *   P.mlp.experts.gate_up_proj [experts, 2 * inner, hidden]
 *   P.mlp.experts.down_proj    [experts, hidden, inner]
 *
 * and in FP8 beside each its block scales, P.mlp.experts.gate_up_proj_scale_inv and so on, stacked
 * alike. Each expert's matrices lie in there one after the other, as the released checkpoints have
 * them in tensors of their own. So splitting is naming parts of a file, and what is made of them
 * equals, byte for byte, what is made of a released checkpoint. */
#ifndef QC_CONVERT_EXPERT_SPLIT_H
#define QC_CONVERT_EXPERT_SPLIT_H

#include "formats/checkpoint.h"

/* For the model types whose layout is known, replace the fused tensors of c by one per expert and
 * matrix, under the released names; Mixtral's router gets its released name back, too. Stacks of
 * experts that stay are named in a warning. To be called right after opening, by commands that
 * quantize or, with fp8_only, decode: 16-bit stacks then stay as they are, without a word.
 * QC_ERR_INPUT where a released name is there already. */
QC_NODISCARD qc_status qc_experts_split(qc_checkpoint *c, int fp8_only, qc_error *err);

#endif
