#include "convert/validate/validate_pair.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_rules.h"
#include "convert/model/recipe_stored.h"
#include "convert/term/glob.h"
#include "convert/term/size_text.h"

#include <stdlib.h>

typedef struct {
    qc_arena *arena;
    const qc_checkpoint *output, *model;
    qc_stored_set in_output, in_model;
    qc_coded_set out_coded, coded; /* in OUT; in MODEL */
    const qc_family *table;
    const char **sources; /* per tensor of OUT: the one that the manifest says it was made from, or
                             NULL */
} matcher;

static qc_status shapes_differ(const matcher *m, const qc_validate_pair *p, const uint64_t *dims,
                               unsigned ndim, qc_error *err)
{
    char ours[QC_SHAPE_TEXT_BYTES], theirs[QC_SHAPE_TEXT_BYTES];
    QC_FAIL(err, QC_ERR_CHECK,
            "%s: tensor '%s' is %s, but in %s it is %s%s, so one was not made from the other",
            m->output->path, p->name, qc_text_shape(ours, p->stored->dims, p->stored->ndim),
            m->model->path, qc_text_shape(theirs, dims, ndim),
            p->transpose ? " and is to be transposed" : "");
}

/* Sets why_not, or checks that the shapes agree. */
static qc_status match(const matcher *m, qc_validate_pair *p, qc_error *err)
{
    const char *source = m->sources[p->out_tensor] ? m->sources[p->out_tensor] : p->name;
    const qc_coded_weight *out = m->out_coded.weights[p->out_tensor];
    uint32_t index = qc_coded_index(&m->coded, m->model, source);
    if (index == QC_NO_TENSOR && out)
        index = qc_coded_index(&m->coded, m->model, out->name);
    if (index == QC_NO_TENSOR) {
        p->why_not = "its source is not in the model";
        return QC_OK;
    }
    const qc_checkpoint_tensor *t = &m->model->tensors[index];
    p->source = t->name;
    p->model_tensor = (uint32_t)(t - m->model->tensors);
    if (m->in_model.weights[p->model_tensor]) {
        p->why_not = "it is quantized in the model as well";
        return QC_OK;
    }
    const uint64_t *dims = t->dims;
    unsigned ndim = t->ndim;
    p->coded = m->coded.weights[p->model_tensor];
    p->dtype = t->dtype;
    if (p->coded) {
        dims = p->coded->dims;
        ndim = p->coded->ndim;
        p->dtype = p->coded->dtype;
    } else if (!qc_dtype_is_quantizable(t->dtype)) {
        p->why_not = "its source has a type that qconv does not read";
        return QC_OK;
    } else if (ndim > 2 && !qc_experts_is_stack(m->model, t)) {
        /* transformers writes them as [experts, in, out] while the codes are [experts, out, in],
         * and nothing in the file tells the two apart. */
        p->why_not =
            "it is a stack of experts in 16 bit, and the order of its dimensions is not known";
        return QC_OK;
    }
    p->transpose = !p->coded && (ndim == 2 ? qc_family_is_conv1d(m->table, t->name)
                                           : qc_experts_is_stack(m->model, t) == 2);
    int same = ndim == p->stored->ndim;
    for (unsigned i = 0; same && i < ndim; i++)
        same = dims[p->transpose && i + 2 >= ndim ? 2 * ndim - 3 - i : i] == p->stored->dims[i];
    return same ? QC_OK : shapes_differ(m, p, dims, ndim, err);
}

qc_status qc_validate_pair_up(qc_validate_pairs *out, qc_arena *arena, const qc_checkpoint *output,
                              const qc_manifest *manifest, const qc_checkpoint *model,
                              qc_error *err)
{
    matcher m = {.arena = arena, .output = output, .model = model};
    *out = (qc_validate_pairs){0};
    QC_TRY(qc_stored_find_codes(&m.in_output, &m.out_coded, arena, output, err));
    QC_TRY(qc_stored_find(&m.in_model, arena, model, err));
    QC_TRY(qc_coded_find(&m.coded, arena, model, err));
    if (m.in_output.count == 0)
        QC_FAIL(err, QC_ERR_INPUT, QC_STORED_NONE, output->path);
    m.table = qc_family_of(model);
    QC_TRY(qc_arena_array(arena, &m.sources, output->tensor_count, err));
    for (size_t i = 0; manifest && i < manifest->tensor_count; i++) {
        const uint32_t t = qc_checkpoint_find_index(output, manifest->tensors[i].name);
        if (t != QC_NO_TENSOR)
            m.sources[t] = manifest->tensors[i].source_name;
    }
    QC_TRY(qc_arena_array(arena, &out->pairs, m.in_output.count, err));
    for (uint32_t i = 0; i < (uint32_t)output->tensor_count; i++) {
        const qc_stored_weight *s = m.in_output.weights[i];
        if (!s)
            continue;
        qc_validate_pair *p = &out->pairs[out->count++];
        *p = (qc_validate_pair){.name = output->tensors[i].name,
                                .stored = s,
                                .out_tensor = i,
                                .model_tensor = QC_NO_TENSOR,
                                .rows = 1,
                                .cols = s->ndim ? s->dims[s->ndim - 1] : 1,
                                .bytes = qc_stored_bytes(output, i, s),
                                .dtype = s->dtype};
        for (unsigned d = 0; d + 1 < s->ndim; d++)
            if (qc_mul_u64(p->rows, s->dims[d], &p->rows))
                QC_FAIL(err, QC_ERR_SHAPE, "tensor '%s' has more rows than 64 bits can count",
                        p->name);
        QC_TRY(match(&m, p, err));
    }
    qsort(out->pairs, out->count, sizeof *out->pairs, qc_by_natural);
    return QC_OK;
}
