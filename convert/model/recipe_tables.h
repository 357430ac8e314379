/* What the name of a tensor says about it: tables for known model types, general rules for the
 * rest. Names only decide what a tensor is; recipe.c decides what becomes of it.
 * Thread-safe: constant tables. Nothing here allocates. */
#ifndef QC_CONVERT_RECIPE_TABLES_H
#define QC_CONVERT_RECIPE_TABLES_H

#include "convert/model/recipe.h"

enum {
    QC_TRAIT_CONV1D = 1, /* stored [in, out]: quantizing transposes */
    QC_TRAIT_MODULE = 2, /* an nn.Linear in transformers, although it is no QC_ROLE_LINEAR */
    QC_TRAIT_FIXED = 4,  /* a buffer or the like: its dtype never changes */
    QC_TRAIT_MAYBE = 8,  /* a guess: may be a Linear, and --quantize may overrule it */
    QC_TRAIT_FLOAT = 16  /* transformers holds this Linear in 32 bit and never quantizes it */
};

typedef struct {
    qc_role role;
    unsigned traits;
    const char *why; /* a few words, static */
} qc_tensor_class;

typedef struct qc_model_table qc_model_table;

/* NULL for a model type without a table. */
const qc_model_table *qc_model_table_find(const char *model_type);
/* 1 and *out if the table knows the name, else 0. */
int qc_model_table_classify(const qc_model_table *t, const char *name, qc_tensor_class *out);
/* Does the output head share the embeddings when config.json does not say? */
int qc_model_table_tied(const qc_model_table *t);
/* The n-th other name that transformers may give a module in memory: *from at the start of a name
 * is *to there. 0 when there is no such n. */
int qc_model_table_rename(const qc_model_table *t, unsigned n, const char **from, const char **to);

/* What the general rules need to know of a model. */
typedef struct {
    const char *model_type;
    uint64_t vocab_size; /* 0: unknown */
    int has_experts;     /* config.json speaks of experts */
    int has_conv1d;      /* the model, or a part of it, is of a type that has Conv1D */
} qc_model_facts;

/* Weights with a dimension below this are not worth their scales: 32 x 32 weights save 1.5 kB in
 * NF4, and quant_map, nested_quant_map and quant_state take 1.4 kB. */
#define QC_MIN_GUESSED_DIM 32u

void qc_rules_classify(const qc_model_facts *facts, const qc_ckpt_tensor *t, qc_tensor_class *out);

/* An output head that is tied to the embeddings has no tensor of its own, yet a loader must know
 * not to turn it into a quantized module. Its name for a model type, "lm_head" where nothing else
 * is known. */
const char *qc_rules_hidden_head(const char *model_type);
/* Length of the path of BERT's prediction module within a name ("cls.predictions"), whose
 * "decoder" is such a head; 0 when it is not in there. */
size_t qc_rules_predictions_path(const char *name);

/* Modules that a class with another head may look for in a model of this type, whether the file has
 * them or not; NULL from some n on. */
const char *qc_rules_label_head(const char *model_type, unsigned n);
/* Does a model of this type have Conv1D modules, and is that the name of such a weight? */
int qc_rules_conv1d_type(const char *model_type);
int qc_rules_conv1d_name(const char *name);

#endif
