/* What is known of model types besides their modules, of those that have a family (family.h) and of
 * others: what their layers keep from one token to the next, how their experts are called, and the
 * heads that a file may lack. Thread-safe: all is constant, and nothing allocates. */
#ifndef QC_CONVERT_TYPE_TABLE_H
#define QC_CONVERT_TYPE_TABLE_H

#include <stddef.h>
#include <stdint.h>

/* Is the word true of the type? convert/families/model_types.txt has the words. */
int qc_type_is(const char *word, const char *type);

/* ---- caches ---- */

typedef enum {
    QC_LAYER_FULL,
    QC_LAYER_SLIDING,
    QC_LAYER_CHUNKED,
    QC_LAYER_STATE, /* a state instead of keys and values */
    QC_LAYER_BOTH,  /* attention and a state in one layer */
    QC_LAYER_NONE   /* an MLP or experts alone */
} qc_layer_kind;

/* What the layers of some types keep. Sums are calculated (shape_text.h); where one is NULL, the
 * row without types has it. */
typedef struct {
    const char *types; /* " a b "; NULL: all others */
    /* The kinds of layers where config.json has no list of them: `in` where `when` is not 0, or the
     * layers whose numbers `list` has, and `out` elsewhere. The numbers begin with list_first. */
    qc_layer_kind in, out;
    const char *when, *list;
    unsigned list_first;
    int needs_list; /* a type without the list is like all others */
    /* The elements of keys and values that a layer has for a token. */
    const char *full, *sliding;
    const char *window;      /* the field with the window of sliding layers */
    uint64_t missing_window; /* the window where that field is missing */
    /* The elements of a recurrent layer's state, in 16 bit and in single precision. */
    const char *state, *f32_state;
    unsigned heads, kv_heads, head_dim; /* where config.json has none; 0: the usual rule */
} qc_cache_row;

const qc_cache_row *qc_cache_row_of(const char *type);
/* The row of all other types. */
const qc_cache_row *qc_cache_row_usual(void);

/* ---- experts ---- */

/* The names of experts in a released checkpoint. */
typedef struct {
    const char *types;            /* " a b " */
    const char *path;             /* "mlp.experts" */
    const char *gate, *up, *down; /* matrices */
    const char *router;           /* "mlp.gate.weight" there; NULL: it is the same */
    const char *stacks;           /* "mlp": the module in whose `experts` their stacks are */
    unsigned traits;
} qc_expert_names;

enum {
    /* Stacks in floats are published as [experts, in, out], with gate and up side by side, and
     * loaders take floats in no other form. */
    QC_EXPERTS_TURNED = 1,
    /* Gate and up alternate in a stack, so it cannot be taken apart. There are no other names. */
    QC_EXPERTS_WHOLE = 2,
    /* Loaders have modules for each expert where weights are codes, and no place for a stack. */
    QC_EXPERTS_MODULES = 4,
    /* transformers 5.24 turns a stack where its shape says that it lies turned (Transpose with
     * check_dims, conversion_mapping.py), and 4.57 always: square ones are not known. */
    QC_EXPERTS_BY_SHAPE = 8
};

/* Returns NULL for a type whose experts' layout is not known. */
const qc_expert_names *qc_expert_names_of(const char *type);

/* ---- fused modules ---- */

#define QC_FUSED_MEMBERS 3u /* at most */

/* Modules of these names below one parent are one module in an engine, whatever the type. The rows
 * were read from the packed_modules_mapping and the stacked weights of all models of vLLM 0.32.0;
 * the lists in config.json have `other` beside vLLM's name. transformers fuses nothing of this. */
typedef struct {
    const char *members[QC_FUSED_MEMBERS]; /* the last are NULL where there are fewer */
    const char *fused;                     /* the module in vLLM and most other engines */
    const char *other;                     /* the module in some engine, or NULL */
    const char *parent; /* the row counts only below a module of this name; NULL: below all */
} qc_fused_row;

/* Finds the row of a module below a parent; both are the last components of names, and not
 * terminated. NULL if there is none. */
const qc_fused_row *qc_fused_row_of(const char *module, size_t len, const char *parent,
                                    size_t parent_len);

/* ---- heads ---- */

/* Returns the name of an output head that is tied to the embeddings and has no tensor of its own. A
 * loader must know not to turn it into a quantized module. It is "lm_head" if nothing else is known
 * for the type. */
const char *qc_type_hidden_head(const char *type);
/* Returns the n-th module that a class with another head may look for in a model of this type,
 * whether the file has it or not. NULL when there are no more. */
const char *qc_type_label_head(const char *type, unsigned n);

#endif
