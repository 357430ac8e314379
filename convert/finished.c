#include "convert/finished.h"

#include "base/arena.h"
#include "convert/make_manifest.h"

#include <string.h>

static int same_text(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

static int same_placement(const qc_manifest_placement *a, const qc_manifest_placement *b)
{
    if (a->device_count != b->device_count)
        return 0;
    for (size_t i = 0; i < a->device_count; i++)
        if (!same_text(a->devices[i].name, b->devices[i].name) ||
            a->devices[i].tensor_bytes != b->devices[i].tensor_bytes)
            return 0;
    return a->device_count == 0 ||
           (same_text(a->vram, b->vram) && !(a->margin < b->margin) && !(a->margin > b->margin) &&
            a->context == b->context && a->batch == b->batch && a->images == b->images &&
            a->kv_bits == b->kv_bits && a->mla_expanded == b->mla_expanded);
}

static int same_options(const qc_manifest *a, const qc_manifest *b)
{
    if (!same_text(a->qconv_version, b->qconv_version) ||
        !same_text(a->zstd_version, b->zstd_version) || a->compressed != b->compressed ||
        a->level != b->level || !same_text(a->to, b->to) || a->block_elems != b->block_elems ||
        a->double_quant != b->double_quant || !same_text(a->rest, b->rest) ||
        !same_text(a->compute_dtype, b->compute_dtype) ||
        a->max_shard_bytes != b->max_shard_bytes || !same_text(a->scale, b->scale) ||
        a->rule_count != b->rule_count)
        return 0;
    for (size_t i = 0; i < a->rule_count; i++)
        if (!same_text(a->rules[i], b->rules[i]))
            return 0;
    return same_placement(&a->placement, &b->placement);
}

static int same_sources(const qc_manifest *a, const qc_manifest *b)
{
    if (a->source_count != b->source_count)
        return 0;
    for (size_t i = 0; i < a->source_count; i++)
        if (!same_text(a->sources[i].name, b->sources[i].name) ||
            a->sources[i].bytes != b->sources[i].bytes ||
            !qc_digest_equal(&a->sources[i].header, &b->sources[i].header))
            return 0;
    return 1;
}

/* name: scratch. */
static qc_status same_tensor(int *same, const qc_manifest_tensor *t, const qc_plan *plan,
                             uint32_t tensor, qc_strbuf *name, qc_error *err)
{
    const qc_out_tensor o = qc_plan_tensor(plan, tensor);
    const qc_output *made = &plan->outputs[tensor];
    const qc_job *j = &plan->jobs[made->job];
    QC_TRY(qc_out_tensor_name(name, &o, err));
    *same = same_text(t->name, name->data) && t->dtype == o.st.dtype && t->ndim == o.st.ndim &&
            memcmp(t->dims, o.st.dims, t->ndim * sizeof *t->dims) == 0 && t->begin == o.st.begin &&
            t->end == o.st.end && t->shard == o.shard && t->piece_bytes == o.piece_bytes &&
            (made->part != QC_PART_MAIN ||
             (same_text(t->scheme, qc_scheme_name(j->scheme)) &&
              same_text(t->source_name, plan->model->tensors[j->source].name)));
    return QC_OK;
}

static qc_status same_tensors(int *same, const qc_manifest *m, const qc_plan *plan, qc_error *err)
{
    size_t n = 0;
    *same = 0;
    if (m->shard_count != plan->layout.count || m->tensor_count != plan->tensor_count)
        return QC_OK;
    for (uint32_t i = 0; i < plan->layout.count; i++) {
        const qc_shard *s = &plan->layout.shards[i];
        if (!same_text(m->shards[i].name, s->name) ||
            m->shards[i].header_bytes != s->header_bytes || m->shards[i].device != s->device)
            return QC_OK;
    }
    qc_strbuf name;
    qc_strbuf_init(&name, SIZE_MAX / 2);
    qc_status st = QC_OK;
    *same = 1;
    for (uint32_t i = 0; i < plan->layout.count; i++) {
        const qc_shard *s = &plan->layout.shards[i];
        for (uint32_t k = 0; st == QC_OK && *same && k < s->count; k++)
            st = same_tensor(same, &m->tensors[n++], plan, s->order[k], &name, err);
    }
    qc_strbuf_deinit(&name);
    return st;
}

qc_status qc_manifest_is_of_plan(int *same, const qc_manifest *m, const qc_plan *plan,
                                 const qc_fit *fit, qc_error *err)
{
    qc_manifest head;
    QC_TRY(qc_manifest_head(&head, plan, fit, err));
    *same = same_options(m, &head) && same_sources(m, &head);
    return *same ? same_tensors(same, m, plan, err) : QC_OK;
}

qc_status qc_output_is_of_plan(int *same, const char *out, const qc_plan *plan, const qc_fit *fit,
                               qc_error *err)
{
    qc_arena arena;
    qc_manifest m;
    *same = 0;
    qc_arena_init(&arena);
    qc_status st = qc_manifest_load(&m, &arena, out, err);
    if (st == QC_OK)
        st = qc_manifest_is_of_plan(same, &m, plan, fit, err);
    else if (st == QC_ERR_INPUT || st == QC_ERR_CHECK)
        st = QC_OK;
    qc_arena_deinit(&arena);
    return st;
}
