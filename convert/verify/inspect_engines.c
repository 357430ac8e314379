/* Shows a finished checkpoint to the engines of convert/plan/engines.h. */
#include "convert/verify/inspect_facts.h"

#include <string.h>

/* Is it a matrix, and not a fixed part of a quantized one? */
static int is_weight(const qc_tensor_facts *tf)
{
    return !tf->is_state && tf->is_counted && tf->ndim == 2;
}

static qc_status gather_weights(qc_served *s, const qc_facts *f, qc_error *err)
{
    qc_served_weight *weights = NULL;
    QC_TRY(qc_arena_array(f->arena, &weights, f->model->tensor_count, err));
    s->weights = weights;
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_tensor_facts *tf = &f->tensors[i];
        weights[i] = (qc_served_weight){.is_weight = is_weight(tf),
                                        .is_stack = tf->scheme && !tf->is_state && tf->ndim == 3,
                                        .name = f->model->tensors[i].name,
                                        .elems = tf->elems};
        if (!tf->scheme || tf->is_state)
            continue;
        if (tf->coded && !qc_served_set_integers(&weights[i], tf->coded))
            s->foreign = tf->scheme;
        if (tf->stored && !tf->coded) {
            weights[i].scheme = tf->stored->stored_as;
            weights[i].block_elems = tf->stored->block_elems;
        }
    }
    return QC_OK;
}

qc_status qc_facts_ask_engines(qc_facts *f, unsigned engines, qc_error *err)
{
    const qc_json_node *config = f->model->config ? qc_json_root(f->model->config) : NULL;
    const qc_json_node *q = qc_json_get(config, "quantization_config");
    const char *method = qc_json_string_or(qc_json_get(q, "quant_method"), "");
    qc_served s = {.arena = f->arena,
                   .model = f->model,
                   .model_type = f->model_type ? f->model_type : "",
                   .skipped = qc_json_get(q, "llm_int8_skip_modules"),
                   .has_config = config != NULL,
                   .no_manifest = !f->manifest,
                   .finished = 1};
    for (size_t i = 0; i < f->model->file_count; i++)
        s.compressed |= f->model->files[i].compressed;
    if (strcmp(method, "qconv") == 0)
        s.own_form = qc_json_string_or(qc_json_get(q, "quant_type"), "unknown");
    QC_TRY(gather_weights(&s, f, err));
    /* What only loads outputs of qconv is not one of "all" engines for anything else. */
    f->asked = s.no_manifest && engines == QC_ENGINES_ALL ? engines & ~QC_ENGINES_OURS : engines;
    return qc_engines_check(&f->refused, &s, f->asked, err);
}
