/* What diffusers does differently from transformers when it loads a quantized model: which modules
 * its classes hold in 32 bits, and which modules a name on the skip list stands for. Thread-safe:
 * the tables are constant. */
#ifndef QC_CONVERT_RECIPE_DIFFUSERS_H
#define QC_CONVERT_RECIPE_DIFFUSERS_H

#include "convert/model/recipe.h"
#include "convert/model/recipe_rules.h"

/* Returns the class of a diffusers model, _class_name in its config.json; NULL for another. */
const char *qc_diffusers_class(const qc_checkpoint *model);
#define QC_NAMESAKES_MAX 8u

/* Corrects the classes of a diffusers model. What class_name holds in 32 bits is neither quantized
 * nor cast. The classes are also changed so that whatever stays plain can do so without affecting
 * modules of the same name that are quantized. */
void qc_diffusers_correct(const char *class_name, const qc_checkpoint *model,
                          qc_tensor_class *classes);

/* Refuses a weight that stays plain while one with the same last name does not. diffusers cannot
 * leave a module at the top of the model plain without doing the same to all modules whose last
 * component is its name. */
QC_NODISCARD qc_status qc_diffusers_check_namesakes(const qc_checkpoint *model,
                                                    const qc_recipe_entry *entries, qc_error *err);

#endif
