/* What a family of models is: its modules with their roles and shapes, and what else is known of
 * its model types, in one table (family_table.c). The recipe takes the roles from it, plans without
 * weights the shapes, device maps and tensor parallelism its words. docs/recipes.md and
 * docs/guides/add-a-model-family.md explain it. A model type that no family has is left to general
 * rules (convert/model/recipe_rules.h). Thread-safe: all is constant, and nothing allocates. */
#ifndef QC_CONVERT_FAMILY_H
#define QC_CONVERT_FAMILY_H

#include "formats/checkpoint.h"

typedef enum {
    QC_ROLE_LINEAR,
    QC_ROLE_EMBEDDING,
    QC_ROLE_HEAD,   /* output head, tied or not */
    QC_ROLE_ROUTER, /* MoE gate */
    QC_ROLE_NORM,
    QC_ROLE_BIAS,
    QC_ROLE_CONV,
    QC_ROLE_STATE,  /* scales and the like of a quantized weight, MXFP4 scales */
    QC_ROLE_PACKED, /* a weight that is quantized already: bitsandbytes' U8 codes, MXFP4 blocks */
    QC_ROLE_OTHER
} qc_role;

enum {
    QC_TRAIT_CONV1D = 1, /* stored [in, out]: quantizing transposes */
    QC_TRAIT_MODULE = 2, /* an nn.Linear in transformers, although it is no QC_ROLE_LINEAR */
    QC_TRAIT_FIXED = 4,  /* a buffer or the like: its dtype never changes */
    QC_TRAIT_MAYBE = 8,  /* a guess: may be a Linear, and --quantize may overrule it */
    QC_TRAIT_FLOAT = 16, /* transformers holds this Linear in 32 bit and never quantizes it */
    QC_TRAITS_OF_TENSOR = 31,
    /* For rows alone, of the tensors that a configuration means: */
    QC_TRAIT_F32 = 32,   /* in single precision */
    QC_TRAIT_U8 = 64,    /* bytes */
    QC_TRAIT_PLAIN = 128 /* a Linear in 16 bit where the others are in FP8 */
};

typedef struct {
    qc_role role;
    unsigned traits;
    const char *why; /* a few words, static */
} qc_tensor_class;

/* How vLLM splits a tensor over cards, as read from the code of vLLM 0.32.0. */
typedef enum {
    QC_SPLIT_UNKNOWN,
    QC_SPLIT_WHOLE,
    QC_SPLIT_COLUMNS,
    QC_SPLIT_KV_HEADS,
    QC_SPLIT_FUSED_QKV, /* q, k and v in one matrix */
    QC_SPLIT_ROWS,
    QC_SPLIT_VOCABULARY,
    QC_SPLIT_SINKS, /* one number for each head */
    QC_SPLIT_ABSENT /* vLLM does not load it */
} qc_split;

/* How the name of a row becomes names of tensors. */
typedef enum {
    QC_ROW_MODULE, /* its weight has the role; it may have a bias, and scales in FP8 */
    QC_ROW_NORM,   /* weight and bias (of old: gamma and beta) are a norm's */
    QC_ROW_TENSOR, /* the tensor itself */
    QC_ROW_SHAPE   /* the tensor itself, on whose role the general rules decide */
} qc_row_kind;

/* Names are literal, except for '#' (a run of digits; of a row: the number of an expert) and
 * '{a|b|}' (any of these, also nothing). Shapes and conditions are calculated
 * (convert/families/shape_text.h). */
typedef struct {
    const char *name;
    qc_row_kind kind;
    qc_role role;
    qc_split split;
    unsigned traits;
    const char *shape; /* "q, hidden"; NULL: only its role is known */
    const char *when;  /* when there is such a tensor; NULL: always */
    const char *bias;  /* when it has a bias; NULL: never */
    const char *why;   /* NULL: the role says it */
} qc_family_row;

/* Rows below a prefix. '%' in it stands for the prefix of the family. */
typedef struct {
    const char *prefix;
    const qc_family_row *rows; /* ends with a row without a name */
    const char *at;            /* the prefix in a released checkpoint; NULL: it is `prefix` */
    const char *count;         /* how often: "layers"; NULL: once */
    const char *when;
    int extra; /* layers beyond the model's own, which are numbered anew */
} qc_family_group;

typedef struct {
    const char *from, *to;
} qc_module_rename;

typedef struct {
    const char *type;              /* one model type */
    const char *words;             /* words that are true of it: " ATTENTION_BIAS TIED " */
    const char *names;             /* '%' as a pattern: "{model.|}" */
    const char *base;              /* '%' in a released checkpoint: "model." */
    const qc_family_group *groups; /* ends with a group without a prefix */
    const char *need;              /* fields of config.json without which there are no shapes */
    const qc_module_rename *renames;
} qc_family;

extern const qc_family qc_families[];
extern const size_t qc_family_count;

/* Returns the family of a model type, or NULL if it has none. */
const qc_family *qc_family_find(const char *model_type);
/* Returns the family of the model type that config.json names, or NULL. */
const qc_family *qc_family_of(const qc_checkpoint *model);
/* Is the word true of the family, which may be NULL? */
int qc_family_is(const qc_family *f, const char *word);
/* Does the family, which may be NULL, know the name as that of a weight that lies [in, out]? */
int qc_family_is_conv1d(const qc_family *f, const char *name);
/* Returns 1 and sets *out if the family knows the name, else 0. */
int qc_family_classify(const qc_family *f, const char *name, qc_tensor_class *out);
/* Returns how vLLM splits a tensor of this name, or a scale or bias of it; QC_SPLIT_UNKNOWN where
 * the family, which may be NULL, does not know the name. */
qc_split qc_family_split(const qc_family *f, const char *name);
/* Says where in the model a name belongs, in whichever spelling it is written: returns the rest of
 * the name behind the prefix of the first group that it fits, and sets *prefix (as the group has
 * it) and the number of the layer, 0 where the prefix has none. NULL if it fits no group. */
const char *qc_family_place(const qc_family *f, const char *name, const char **prefix,
                            uint64_t *number);
/* Returns the last component of a parameter's name, such as "weight" or "weight_scale"; "" where
 * the tensor is no parameter of a module. */
const char *qc_family_parameter(const char *name);
/* Finds the n-th other name that transformers may give a module in memory: *from at the start of
 * a name becomes *to there. Returns 0 when there is no such n. */
int qc_family_rename(const qc_family *f, unsigned n, const char **from, const char **to);

#endif
