/* llm_int8_skip_modules lists the modules that a loader must leave as they are. It has to use names
 * that every loader matches.
 *
 *   transformers 4   equal to the path or to its last component, or followed by "." within it
 *   transformers 5   a regular expression at the start of the path up to a component's end, or the
 *                    end of the path (5.0: at the start up to anywhere)
 *   vLLM             equal to a component, or a whole number of components from the start
 *
 * All of them match a whole plain path, and it catches nothing else, so that is what we write. An
 * output head called lm_head is written as that alone, whatever comes before it. Anchors ("^", "$")
 * would suit transformers 5 alone.
 *
 * A module often has another name in memory than in the file, and versions differ in it. Then we
 * write every name that transformers 4 or 5 gives it. A submodel that stays as a whole (a vision
 * tower, a projector) is written as one name instead of all its modules, which works even if a
 * version renames what is inside. A name that is not a plain path of the file is left out if any of
 * these rules would match a quantized module with it.
 *
 * vLLM holds fused groups as one module (fused_groups.h) and looks for its name alone, so
 * that is added where all members stay. transformers has no such module, and its name harms
 * nothing there. */
#ifndef QC_CONVERT_RECIPE_SKIP_H
#define QC_CONVERT_RECIPE_SKIP_H

#include "convert/model/recipe.h"
#include "convert/model/recipe_rules.h"

typedef struct {
    qc_arena *arena;
    const qc_family *table; /* may be NULL */
    const qc_checkpoint *model;
    const qc_recipe_entry *entries; /* a tensor's each */
    int composite;            /* config.json has one configuration for each of several submodels */
    int has_language_model;   /* some name has the component "language_model" */
    unsigned detectors;       /* which lists of a detector's heads are there, one bit each */
    const char *last_whole;   /* the submodel that the last module belonged to, or NULL */
    const char *last_divided; /* the same, but something in that one is quantized */
    const char **names;
    uint32_t count;
} qc_skip_list;

void qc_skip_init(qc_skip_list *l, qc_arena *arena, const qc_checkpoint *model,
                  const qc_recipe_entry *entries);
/* Adds a module of the file, or the submodel that it belongs to, under all its names. */
QC_NODISCARD qc_status qc_skip_add(qc_skip_list *l, const char *module, size_t len, qc_error *err);
/* Adds the names that engines give a fused group, if all of it stays in 16 bits. They look for
 * these names alone: without them vLLM would quantize again what was kept. Nothing is added unless
 * the weight is the first member, nor for an expert, which has no module of its own there. */
QC_NODISCARD qc_status qc_skip_add_fused(qc_skip_list *l, uint32_t weight, qc_error *err);
/* Adds a module that the file need not have, unless its name would catch a quantized one. */
QC_NODISCARD qc_status qc_skip_add_absent(qc_skip_list *l, const char *name, qc_error *err);
/* Adds a name or pattern as somebody else wrote it. */
QC_NODISCARD qc_status qc_skip_add_as_is(qc_skip_list *l, const char *name, qc_error *err);
/* Returns the name of the member of a quantization_config that lists such modules: the member that
 * it has, or else the one that its quant_method uses. */
const char *qc_skip_key(const qc_json_node *quantization);
/* Gives the names in natural order, each once. */
void qc_skip_finish(qc_skip_list *l, const char ***names, uint32_t *count);

#endif
