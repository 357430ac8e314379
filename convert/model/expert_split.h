/* Fused experts, as transformers 5 keeps them in memory and may save them:
 *
 *   P.mlp.experts.gate_up_proj [experts, 2 * inner, hidden]
 *   P.mlp.experts.down_proj    [experts, hidden, inner]
 *
 * In FP8, each has its block scales beside it, stacked alike: P.mlp.experts.gate_up_proj_scale_inv
 * and so on. A fused tensor holds the matrices of all experts one after the other, each as the
 * released checkpoint holds it in a tensor of its own. So splitting only gives names to ranges of a
 * file, and the output equals, byte for byte, that of a released checkpoint.
 *
 * Llama 4, Qwen3-VL and gpt-oss are published with stacks in 16 bits, [experts, in, out], in which
 * gate and up lie side by side, and alternate in gpt-oss. They are read turned, tile by tile
 * (tensor_pieces.h), and codes are [out, in] as everywhere. What is decoded from codes becomes such
 * a stack again.
 *
 * A stack may be quantized, too: P.mlp.experts.gate_up_proj has the codes of NF4 or int8, and
 * .absmax, .quant_state... or .SCB lie beside it. No block of weights spans two experts, so codes
 * and scales are ranges as well. */
#ifndef QC_CONVERT_EXPERT_SPLIT_H
#define QC_CONVERT_EXPERT_SPLIT_H

#include "convert/families/type_table.h"
#include "convert/model/recipe_options.h"
#include "formats/bnb_state.h"
#include "formats/checkpoint.h"

/* For model types whose layout is known, replaces the fused tensors of c by one per expert and
 * matrix, under the released names. Mixtral's router gets its released name back, too. A warning
 * names stacks of experts that stay. Commands that quantize call this right after opening, and so
 * do commands that only decode, with fp8_only: 16-bit stacks then stay as they are, without a
 * warning. QC_ERR_INPUT if a released name is taken already. */
QC_NODISCARD qc_status qc_experts_split(qc_checkpoint *c, int fp8_only, qc_error *err);
/* The other way: replaces the tensors of each expert, in floats, NF4 or int8, by fused ones. Where
 * experts are fused already, or where there are none, it does nothing. QC_ERR_UNSUPPORTED if the
 * layout of the model type is not known; QC_ERR_INPUT if the experts of a layer are not alike. */
QC_NODISCARD qc_status qc_experts_join(qc_checkpoint *c, qc_error *err);
/* Does what the options say (--experts, --to). */
QC_NODISCARD qc_status qc_experts_arrange(qc_checkpoint *c, const qc_recipe_options *o,
                                          qc_error *err);
/* Warns of stacks of experts in floats that no recipe quantizes or decodes. */
QC_NODISCARD qc_status qc_experts_warn(qc_checkpoint *c, int fp8_only, int stacked, qc_error *err);
/* Makes of the experts' matrices, however they are stored, stacks in floats as the type's loaders
 * want them, [experts, in, out]. They are read as values of dtype. Where there are stacks already,
 * or none are turned, it does nothing. */
QC_NODISCARD qc_status qc_experts_decode(qc_checkpoint *c, qc_dtype dtype, qc_error *err);
/* Is t, by its name and shape, a stack of experts, or are the experts' matrices laid end to end
 * (dbrx)? granitemoe and jetmoe call theirs input_linear and output_linear. */
int qc_experts_look_stacked(const qc_checkpoint_tensor *t);
/* Do stacks of experts lie as [experts, out, in], in floats as in codes? Else it is not known, or
 * floats lie as [experts, in, out]. */
int qc_experts_known(const qc_checkpoint *c);
/* Is t a stack of experts in floats, in a layout that is known, which may become one of codes? 2:
 * it lies as [experts, in, out]. */
int qc_experts_is_stack(const qc_checkpoint *c, const qc_checkpoint_tensor *t);
/* Do stacks in floats become stacks of codes? So it was asked, or nobody can take them apart. */
int qc_experts_become_codes(const qc_checkpoint *c, const qc_recipe_options *o);
/* Does c have stacks of experts that are quantized? */
int qc_experts_are_stacked(const qc_checkpoint *c);

/* ---- for expert_join.c and recipe.c ---- */

/* Behind the name of the module that has them, "mlp." in most types. */
#define QC_EXPERTS_GATE_UP "experts.gate_up_proj"
#define QC_EXPERTS_DOWN    "experts.down_proj"
#define QC_EXPERTS_ROUTER  "mlp.gate.weight"

/* NULL: the type is not known, or its stacks cannot be taken apart, or there is no config.json. */
const qc_expert_names *qc_experts_names(const qc_checkpoint *c);

/* How the weights of a stack are stored: in floats, or in codes with what lies beside them. */
typedef enum {
    QC_EXPERTS_FLOATS,
    QC_EXPERTS_FP8,
    QC_EXPERTS_NF4,
    QC_EXPERTS_INT8,
    QC_EXPERTS_FORMS
} qc_expert_form;
enum { QC_NF4_CODES, QC_NF4_ABSMAX, QC_NF4_MAP, QC_NF4_NESTED, QC_NF4_NESTED_MAP, QC_NF4_STATE };
enum { QC_INT8_CODES, QC_INT8_SCB, QC_INT8_FORMAT };
enum { QC_EXPERTS_PARTS = 7 };

/* How the names of a part end: of a stack's, and of a matrix's in a released checkpoint. The last
 * is followed by NULL. */
typedef struct {
    const char *stack, *matrix;
} qc_expert_part;

extern const qc_expert_part qc_expert_parts[QC_EXPERTS_FORMS][QC_EXPERTS_PARTS];

/* Gives c these tensors. how says in what way it has another one of the same name: QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_experts_replace(qc_checkpoint *c, qc_checkpoint_tensor *tensors,
                                          size_t count, const char *how, qc_error *err);
/* Reads the quant_state t. */
QC_NODISCARD qc_status qc_expert_state_read(qc_bnb_state *out, const qc_checkpoint *c,
                                            qc_st_cursor *cursor, const qc_checkpoint_tensor *t,
                                            qc_error *err);
/* Makes t, whose name is set, the quant_state s. */
QC_NODISCARD qc_status qc_expert_state_make(qc_checkpoint *c, qc_checkpoint_tensor *t,
                                            const qc_bnb_state *s, qc_error *err);

#endif
