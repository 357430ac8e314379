/* llm_int8_skip_modules: what a loader must leave as it is, in names that every loader matches.
 *
 *   transformers 4   equal to the path or to its last component, or followed by "." within it
 *   transformers 5   a regular expression at the start of the path up to a component's end, or the
 *                    end of the path (5.0: at the start up to anywhere)
 *   vLLM             equal to a component, or a whole number of components from the start
 *
 * A whole plain path is matched by all of them and catches nothing else, so that is what is
 * written; an output head called lm_head goes by that alone, whatever is before it. Anchors ("^",
 * "$") would suit transformers 5 alone. Where transformers gives a module another name in memory
 * than the file, both are written. */
#ifndef QC_CONVERT_RECIPE_SKIP_H
#define QC_CONVERT_RECIPE_SKIP_H

#include "convert/recipe_tables.h"

typedef struct {
    qc_arena *arena;
    const qc_model_table *table; /* may be NULL */
    const char **names;
    uint32_t count, capacity;
} qc_skip_list;

QC_NODISCARD qc_status qc_skip_init(qc_skip_list *l, qc_arena *arena, const qc_model_table *table,
                                    qc_error *err);
QC_NODISCARD qc_status qc_skip_add(qc_skip_list *l, const char *module, size_t len, qc_error *err);
/* A name or pattern as somebody else wrote it. */
QC_NODISCARD qc_status qc_skip_add_as_is(qc_skip_list *l, const char *name, qc_error *err);
/* The member of a quantization_config that lists such modules: the one it has, else that of its
 * quant_method. */
const char *qc_skip_key(const qc_json_node *quantization);
/* In natural order, each name once. */
void qc_skip_finish(qc_skip_list *l, const char ***names, uint32_t *count);

#endif
