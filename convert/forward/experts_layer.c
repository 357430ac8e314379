#include "convert/forward/experts_layer.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <string.h>

/* ---- finding ---- */

typedef struct {
    const qc_forward_finder *f;
    const qc_experts_shape *s;
    uint64_t number, hidden; /* of the layer; floats of a state */
    qc_forward_layer *layer;
} search;

static qc_status one(const search *a, const char *module, uint64_t rows, uint64_t cols, int bias,
                     qc_forward_linear *out, qc_error *err)
{
    QC_TRY(qc_forward_find_linear(a->f, module, rows, cols, bias, out, err));
    a->layer->read_bytes = qc_sat_add(a->layer->read_bytes, out->read_bytes);
    return QC_OK;
}

/* Returns the memory of an expert whose modules begin with `prefix`. */
static qc_status expert(const search *a, const char *prefix, const char *const names[],
                        uint64_t inner, qc_expert_linears *out, uint64_t *memory, qc_error *err)
{
    const char *module = NULL;
    *memory = 0;
    for (int i = 0; i < QC_EXPERT_MATRICES; i++) {
        int down = i == QC_EXPERT_DOWN;
        QC_TRY(qc_arena_printf(a->f->arena, &module, err, "%slayers.%" PRIu64 ".%s.%s",
                               a->f->prefix, a->number, prefix, names[i]));
        QC_TRY(one(a, module, down ? a->hidden : inner, down ? inner : a->hidden, 0,
                   &out->linear[i], err));
        *memory = qc_sat_add(*memory, out->linear[i].memory_bytes);
    }
    return QC_OK;
}

static qc_status find_router(const search *a, qc_experts_layer *out, qc_error *err)
{
    const qc_experts_names *names = a->s->names;
    const char *name = NULL;
    QC_TRY(qc_arena_printf(a->f->arena, &name, err, "%slayers.%" PRIu64 ".%s", a->f->prefix,
                           a->number, names->router));
    QC_TRY(one(a, name, out->count, a->hidden, a->s->clamped, &out->router, err));
    out->correction = out->shared_gate.tensor = QC_NO_TENSOR;
    if (names->correction) {
        QC_TRY(qc_arena_printf(a->f->arena, &name, err, "%slayers.%" PRIu64 ".%s", a->f->prefix,
                               a->number, names->correction));
        QC_TRY(qc_forward_find_vector(a->f, name, out->count, &out->correction, err));
    }
    if (!names->shared_gate || a->s->shared == 0)
        return QC_OK;
    QC_TRY(qc_arena_printf(a->f->arena, &name, err, "%slayers.%" PRIu64 ".%s", a->f->prefix,
                           a->number, names->shared_gate));
    return one(a, name, 1, a->hidden, 0, &out->shared_gate, err);
}

static qc_status find_separate(const search *a, qc_experts_layer *out, uint64_t *largest,
                               qc_error *err)
{
    const qc_experts_names *n = a->s->names;
    const char *const released[] = {n->gate, n->up, n->down};
    const char *prefix = NULL;
    uint64_t memory = 0;
    for (uint64_t e = 0; e < out->count; e++) {
        QC_TRY(qc_arena_printf(a->f->arena, &prefix, err, "%s.%" PRIu64, n->experts, e));
        QC_TRY(expert(a, prefix, released, a->s->inner, &out->experts[e], &memory, err));
        *largest = qc_max_u64(*largest, memory);
    }
    return QC_OK;
}

/* gpt-oss: gate and up are one matrix, whose rows take turns. */
static qc_status find_stacked(const search *a, qc_experts_layer *out, uint64_t *largest,
                              qc_error *err)
{
    const qc_experts_names *n = a->s->names;
    const char *const names[] = {n->gate, NULL, n->down};
    const uint64_t rows[] = {2 * a->s->inner, 0, a->hidden};
    const uint64_t cols[] = {a->hidden, 0, a->s->inner};
    qc_expert_linears each;
    memset(&each, 0, sizeof each);
    for (int i = 0; i < QC_EXPERT_MATRICES; i++) {
        const char *name = NULL;
        qc_expert_stack *t = &out->stacks[i];
        each.linear[i] = (qc_forward_linear){.tensor = QC_NO_TENSOR, .bias = QC_NO_TENSOR};
        if (!names[i])
            continue;
        QC_TRY(qc_arena_printf(a->f->arena, &name, err, "%slayers.%" PRIu64 ".%s.%s", a->f->prefix,
                               a->number, n->experts, names[i]));
        QC_TRY(qc_expert_stack_find(t, a->f, name, out->count, rows[i], cols[i], err));
        each.linear[i].rows = t->rows;
        each.linear[i].cols = t->cols;
        each.linear[i].read_bytes = t->read_bytes;
        each.linear[i].memory_bytes = t->memory_bytes;
        *largest = qc_sat_add(*largest, t->memory_bytes);
        a->layer->read_bytes =
            qc_sat_add(a->layer->read_bytes, qc_sat_mul(out->count, t->read_bytes));
    }
    for (uint64_t e = 0; e < out->count; e++)
        out->experts[e] = each;
    return QC_OK;
}

qc_status qc_experts_find(const qc_forward_finder *f, const qc_forward_shape *s, uint64_t number,
                          qc_forward_layer *out, qc_error *err)
{
    static const char *const plain[] = {"gate_proj", "up_proj", "down_proj"};
    const search a = {f, &s->experts, number, s->config.hidden, out};
    qc_experts_layer *l = NULL;
    uint64_t largest = 0, memory = 0;
    QC_TRY(qc_arena_alloc(f->arena, &l, 1, sizeof *l, err));
    l->count = a.s->routing.experts;
    QC_TRY(qc_arena_alloc(f->arena, &l->experts, (size_t)l->count, sizeof *l->experts, err));
    QC_TRY(find_router(&a, l, err));
    for (int i = 0; i < QC_EXPERT_MATRICES; i++)
        l->stacks[i].tensor = QC_NO_TENSOR;
    QC_TRY(a.s->clamped ? find_stacked(&a, l, &largest, err) : find_separate(&a, l, &largest, err));
    l->shared.linear[0].tensor = QC_NO_TENSOR;
    if (a.s->shared > 0)
        QC_TRY(expert(&a, a.s->names->shared, plain, a.s->shared, &l->shared, &memory, err));
    l->memory_bytes = qc_sat_add(l->router.memory_bytes, qc_max_u64(largest, memory));
    out->memory_bytes = qc_sat_add(out->memory_bytes, l->memory_bytes);
    out->experts = l;
    return QC_OK;
}

/* ---- reading ---- */

const qc_expert_linears *qc_expert_of(const qc_experts_layer *l, uint64_t i)
{
    if (i < l->count)
        return &l->experts[i];
    return l->shared.linear[QC_EXPERT_GATE].tensor == QC_NO_TENSOR ? NULL : &l->shared;
}

qc_status qc_expert_read(qc_expert_weights *out, const qc_forward_source *s,
                         const qc_experts_layer *l, uint64_t i, qc_error *err)
{
    const qc_expert_linears *linears = qc_expert_of(l, i);
    memset(out, 0, sizeof *out);
    for (int m = 0; m < QC_EXPERT_MATRICES; m++) {
        if (linears->linear[m].tensor != QC_NO_TENSOR)
            QC_TRY(qc_forward_matrix_read(&out->matrices[m], s, &linears->linear[m], err));
        else if (i < l->count && l->stacks[m].tensor != QC_NO_TENSOR)
            QC_TRY(qc_expert_stack_read(&out->matrices[m], s, &l->stacks[m], i, err));
    }
    return QC_OK;
}

void qc_expert_deinit(qc_expert_weights *w)
{
    for (int i = 0; i < QC_EXPERT_MATRICES; i++)
        qc_forward_matrix_deinit(&w->matrices[i]);
}

qc_status qc_router_read(qc_router_weights *out, const qc_forward_source *s,
                         const qc_experts_layer *l, qc_error *err)
{
    memset(out, 0, sizeof *out);
    QC_TRY(qc_forward_matrix_read(&out->router, s, &l->router, err));
    if (l->correction == QC_NO_TENSOR)
        return QC_OK;
    QC_TRY(qc_forward_vector_read(&out->correction, s, l->correction, err));
    if (qc_forward_finite(out->correction, l->count, NULL) != QC_OK)
        QC_FAIL(err, QC_ERR_NONFINITE, "tensor '%s' has an element that is not finite",
                s->checkpoint->tensors[l->correction].name);
    return QC_OK;
}

void qc_router_deinit(qc_router_weights *w)
{
    qc_forward_matrix_deinit(&w->router);
    qc_free(w->correction);
    memset(w, 0, sizeof *w);
}
