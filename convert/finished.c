#include "convert/finished.h"

#include "base/alloc.h"
#include "base/arena.h"
#include "base/checked.h"
#include "base/cpu.h"
#include "base/workers.h"
#include "convert/make_manifest.h"
#include "convert/progress.h"

#include <stdatomic.h>
#include <string.h>

#define READ_BYTES (1u << 20)

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

/* ---- weights of the source ------------------------------------------------------------------ */

typedef struct {
    const qc_plan *plan;
    const qc_manifest_tensor *tensors; /* in the order of the plan's shards */
    const uint32_t *rows;              /* those to be compared: their numbers */
    uint32_t count;
    atomic_uint_fast32_t next;
    atomic_int differs;
    qc_progress *progress;
} comparison;

typedef struct {
    qc_st_cursor *cursor;
    qc_digest_state *hash;
    unsigned char *bytes;
} reader;

static const qc_job *job_of(const qc_plan *plan, uint32_t row)
{
    return &plan->jobs[plan->outputs[plan->layout.shards[0].order[row]].job];
}

/* One piece of the source; *at is moved behind it. */
static qc_status hash_piece(const comparison *c, const reader *r, const qc_ckpt_tensor *from,
                            uint64_t piece_bytes, uint64_t *at, qc_digest *out, qc_error *err)
{
    uint64_t end = from->bytes - *at < piece_bytes ? from->bytes : *at + piece_bytes;
    qc_digest_reset(r->hash);
    while (*at < end) {
        size_t n = end - *at < READ_BYTES ? (size_t)(end - *at) : READ_BYTES;
        QC_TRY(qc_checkpoint_read(c->plan->model, r->cursor, from, *at, r->bytes, n, err));
        qc_digest_update(r->hash, r->bytes, n);
        qc_progress_add(c->progress, n);
        *at += n;
    }
    *out = qc_digest_finish(r->hash);
    return QC_OK;
}

static qc_status compare_weight(comparison *c, qc_team *team, const reader *r, uint32_t row,
                                qc_error *err)
{
    const qc_manifest_tensor *t = &c->tensors[row];
    const qc_ckpt_tensor *from = &c->plan->model->tensors[job_of(c->plan, row)->source];
    uint64_t piece_bytes = t->source_piece_bytes, at = 0;
    uint64_t count = piece_bytes ? qc_ceil_div_u64(from->bytes, piece_bytes) : 0;
    void *v = NULL;
    if (count == 0)
        return QC_OK;
    QC_TRY(qc_calloc(&v, (size_t)count, sizeof(qc_digest), err));
    qc_digest *pieces = v;
    qc_status st = QC_OK;
    for (uint64_t i = 0; st == QC_OK && i < count && !atomic_load(&c->differs); i++) {
        if (qc_team_stopped(team))
            st = qc_error_set(err, QC_ERR_INTERRUPTED, __FILE__, __LINE__, "interrupted");
        else
            st = hash_piece(c, r, from, piece_bytes, &at, &pieces[i], err);
    }
    if (st == QC_OK && at == from->bytes) {
        qc_digest found = qc_digest_root(pieces, (size_t)count);
        if (!qc_digest_equal(&found, &t->source))
            atomic_store(&c->differs, 1);
    }
    qc_free(pieces);
    return st;
}

static qc_status compare_some(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    comparison *c = ctx;
    reader r = {NULL, NULL, NULL};
    void *v = NULL;
    (void)index;
    qc_status st = qc_st_cursor_create(&r.cursor, err);
    if (st == QC_OK)
        st = qc_digest_create(&r.hash, err);
    if (st == QC_OK)
        st = qc_malloc(&v, READ_BYTES, err);
    r.bytes = v;
    while (st == QC_OK && !atomic_load(&c->differs)) {
        uint32_t i = (uint32_t)atomic_fetch_add(&c->next, 1);
        if (i >= c->count)
            break;
        st = compare_weight(c, team, &r, c->rows[i], err);
    }
    qc_free(r.bytes);
    qc_digest_destroy(r.hash);
    qc_st_cursor_destroy(r.cursor);
    return st;
}

static qc_status compare_weights(comparison *c, const uint32_t *part_of, unsigned index,
                                 qc_error *err)
{
    const qc_plan *plan = c->plan;
    const qc_options *o = plan->options;
    uint64_t bytes = 0;
    void *v = NULL;
    QC_TRY(qc_calloc(&v, plan->tensor_count, sizeof(uint32_t), err));
    uint32_t *rows = v;
    c->rows = rows;
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        uint32_t tensor = plan->layout.shards[0].order[i];
        const qc_output *made = &plan->outputs[tensor];
        const qc_job *j = job_of(plan, i);
        if ((part_of && part_of[qc_plan_tensor(plan, tensor).shard] != index) ||
            made->part != QC_PART_MAIN || j->entry->transpose ||
            plan->model->files[plan->model->tensors[j->source].file].saved)
            continue;
        rows[c->count++] = i;
        bytes += plan->model->tensors[j->source].bytes;
    }
    qc_status st =
        qc_progress_create(&c->progress, o, "comparing the source with what is there", bytes, err);
    if (st == QC_OK)
        st = qc_team_run(o->threads ? o->threads : qc_cpu_count(), compare_some, c, err);
    qc_progress_destroy(c->progress);
    qc_free(rows);
    return st;
}

qc_status qc_manifest_is_of_weights(int *same, const qc_manifest *m, const qc_plan *plan,
                                    const uint32_t *part_of, unsigned index, qc_error *err)
{
    comparison c = {.plan = plan, .tensors = m->tensors};
    atomic_init(&c.next, 0);
    atomic_init(&c.differs, 0);
    *same = 0;
    if (m->tensor_count != plan->tensor_count)
        return QC_OK;
    QC_TRY(compare_weights(&c, part_of, index, err));
    *same = !atomic_load(&c.differs);
    return QC_OK;
}

qc_status qc_output_is_of_weights(int *same, const char *out, const qc_plan *plan,
                                  const uint32_t *part_of, unsigned index, qc_error *err)
{
    qc_arena arena;
    qc_manifest m;
    *same = 0;
    qc_arena_init(&arena);
    qc_status st = qc_manifest_load(&m, &arena, out, err);
    if (st == QC_OK)
        st = qc_manifest_is_of_weights(same, &m, plan, part_of, index, err);
    else if (st == QC_ERR_INPUT || st == QC_ERR_CHECK)
        st = QC_OK;
    qc_arena_deinit(&arena);
    return st;
}
