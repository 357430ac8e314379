/* What the name and shape of a tensor say about it where no family knows the name: general rules.
 * A name decides only what a tensor is; recipe.c decides what becomes of it. Thread-safe; nothing
 * here allocates. */
#ifndef QC_CONVERT_RECIPE_RULES_H
#define QC_CONVERT_RECIPE_RULES_H

#include "convert/families/family.h"

/* What the general rules need to know of a model. */
typedef struct {
    const char *model_type;
    uint64_t vocab_size; /* 0: unknown */
    int has_experts;     /* config.json mentions experts */
    int has_conv1d;      /* the model, or a submodel of it, has a type with Conv1D */
} qc_model_facts;

/* Weights with a dimension below this are not worth their scales: NF4 saves 1.5 kB on 32 x 32
 * weights, while quant_map, nested_quant_map and quant_state take 1.4 kB. */
#define QC_MIN_GUESSED_DIM 32u

void qc_rules_classify(const qc_model_facts *facts, const qc_checkpoint_tensor *t,
                       qc_tensor_class *out);

/* Returns the length of the path of BERT's prediction module within a name ("cls.predictions"),
 * whose "decoder" is a head that may be tied; 0 if the name does not contain it. */
size_t qc_rules_predictions_path(const char *name);

/* Is this the name of a Conv1D's weight, in a model that has such modules? */
int qc_rules_conv1d_name(const char *name);
/* Is a tensor for multi-token prediction alone? Layers from num_hidden_layers on are (DeepSeek-V3,
 * GLM-4.5), and what has "mtp" or "mtp_..." in its path (Qwen3-Next, Qwen3.5, ERNIE-4.5). */
int qc_rules_predicts_more(const char *name, uint64_t layers);

#endif
