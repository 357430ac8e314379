/* The families of models. Only model_tensors*.c include this. */
#ifndef QC_CONVERT_MODEL_TENSORS_INTERNAL_H
#define QC_CONVERT_MODEL_TENSORS_INTERNAL_H

#include "convert/known/tensor_maker.h"

/* Each of these functions adds all tensors of its models. */
QC_NODISCARD qc_status qc_maker_decoder(qc_tensor_maker *m, const char *base, qc_error *err);
/* qwen3_5, qwen3_5_moe and qwen3_next. */
QC_NODISCARD qc_status qc_maker_qwen35(qc_tensor_maker *m, qc_error *err);
/* Adds a decoder below "language_model." and a vision tower: gemma3, mistral3, llama4. */
QC_NODISCARD qc_status qc_maker_with_tower(qc_tensor_maker *m, qc_error *err);
QC_NODISCARD qc_status qc_maker_mllama(qc_tensor_maker *m, qc_error *err);
QC_NODISCARD qc_status qc_maker_bert(qc_tensor_maker *m, qc_error *err);
QC_NODISCARD qc_status qc_maker_gpt2(qc_tensor_maker *m, qc_error *err);
QC_NODISCARD qc_status qc_maker_granite_hybrid(qc_tensor_maker *m, qc_error *err);
QC_NODISCARD qc_status qc_maker_gpt_neox(qc_tensor_maker *m, qc_error *err);

#endif
