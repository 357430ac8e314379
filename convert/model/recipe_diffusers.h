/* What diffusers does differently from transformers when it loads a quantized model: which modules
 * its classes hold in 32 bit, and which modules a name on the skip list stands for.
 * Thread-safe: constant tables. */
#ifndef QC_CONVERT_RECIPE_DIFFUSERS_H
#define QC_CONVERT_RECIPE_DIFFUSERS_H

#include "convert/model/recipe_tables.h"

/* The class of a model of diffusers, _class_name of its config.json; NULL for any other model. */
const char *qc_diffusers_class(const qc_checkpoint *model);
#define QC_NAMESAKES_MAX 8u

/* The weights of modules at the top of the model for which the module of the weight `name` is
 * spared too, when they are on diffusers' skip list (indices): "proj_out.weight" for
 * "blocks.0.proj_out.weight". */
size_t qc_diffusers_namesakes(const qc_checkpoint *model, const char *name,
                              uint32_t out[QC_NAMESAKES_MAX]);
/* Corrects the classes of a model of diffusers: what class_name holds in 32 bit is neither
 * quantized nor cast, and what the general rules would spare can be spared without its namesakes.
 */
void qc_diffusers_correct(const char *class_name, const qc_checkpoint *model,
                          qc_tensor_class *classes);

#endif
