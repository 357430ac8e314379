/* Makes the units of a pipeline from the plan, counts them, and puts them in the order in which
 * workers take them. */
#include "base/alloc.h"
#include "base/checked.h"
#include "convert/pipeline/pipeline_internal.h"

static uint64_t tensor_bytes(const qc_out_tensor *t)
{
    return t->st.end - t->st.begin;
}

int qc_pipeline_is_compressed(const qc_pipeline *p)
{
    return p->plan->options->compress;
}

/* A derived tensor that lies before the codes is deferred: a place is kept free for it. So is every
 * one when nothing is compressed, since all places are known then. */
static qc_unit_kind kind_of(const qc_pipeline *p, uint32_t tensor)
{
    const qc_output *o = &p->plan->outputs[tensor];
    const qc_job *j = &p->plan->jobs[o->job];
    if (o->part == QC_PART_MAIN)
        return QC_UNIT_MAIN;
    const uint64_t *begins = p->plan->layout.begins;
    if (!qc_pipeline_is_compressed(p) || begins[tensor] < begins[j->outputs[QC_PART_MAIN]])
        return QC_UNIT_DEFERRED;
    return QC_UNIT_DERIVED;
}

/* Is this a table that lies beside weights, and is the same beside all of them? */
static int is_same(const qc_pipeline *p, const qc_unit_state *u)
{
    return u->kind == QC_UNIT_DEFERRED &&
           !qc_job_part_is_own((qc_part)p->plan->outputs[u->tensor].part);
}

static uint32_t digest_count(const qc_pipeline *p, const qc_unit_state *u)
{
    if (is_same(p, u))
        return 0;
    return 1u + (qc_pipeline_is_compressed(p) != 0) + (u->kind == QC_UNIT_MAIN);
}

static void add_units(qc_pipeline *p, qc_unit_state model, uint64_t bytes, uint64_t piece,
                      uint32_t *at)
{
    for (uint64_t offset = 0; offset < bytes; offset += piece) {
        uint64_t n = bytes - offset < piece ? bytes - offset : piece;
        qc_unit_state *u = &p->units[(*at)++];
        *u = model;
        if (n > p->piece_bytes)
            p->piece_bytes = (uint32_t)n;
        if (u->kind == QC_UNIT_DEFERRED && qc_pipeline_is_compressed(p))
            u->stored_bytes = (uint32_t)qc_raw_frame_bytes((size_t)n);
        else
            u->stored_bytes = (uint32_t)n; /* corrected when compressed */
    }
}

static uint64_t header_piece(const qc_shard *s)
{
    return qc_layout_piece_bytes(s->header_bytes, 8);
}

uint32_t qc_unit_count(const qc_pipeline *p, uint32_t tensor)
{
    const qc_out_tensor t = qc_plan_tensor(p->plan, tensor);
    return (uint32_t)qc_ceil_div_u64(tensor_bytes(&t), t.piece_bytes ? t.piece_bytes : 1);
}

uint32_t qc_unit_shard(const qc_pipeline *p, uint32_t index)
{
    uint32_t low = 0, high = p->plan->layout.count;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (p->shards[mid].first_unit <= index)
            low = mid;
        else
            high = mid;
    }
    return low;
}

qc_unit qc_unit_planned(const qc_pipeline *p, uint32_t index)
{
    const qc_unit_state *s = &p->units[index];
    qc_unit u = {.index = index,
                 .tensor = s->tensor,
                 .kind = (qc_unit_kind)s->kind,
                 .shard = qc_unit_shard(p, index)};
    uint64_t bytes, piece, first;
    if (s->tensor == QC_NO_OUTPUT) {
        const qc_shard *sh = &p->plan->layout.shards[u.shard];
        bytes = sh->header_bytes;
        piece = header_piece(sh);
        first = p->shards[u.shard].first_unit;
    } else {
        const qc_out_tensor t = qc_plan_tensor(p->plan, s->tensor);
        bytes = tensor_bytes(&t);
        piece = t.piece_bytes;
        first = p->first_unit[s->tensor];
    }
    u.content_offset = (index - first) * piece;
    bytes -= u.content_offset;
    u.content_bytes = (uint32_t)(bytes < piece ? bytes : piece);
    return u;
}

qc_unit qc_unit_of(const qc_pipeline *p, uint32_t index)
{
    const qc_unit_state *s = &p->units[index];
    qc_unit u = qc_unit_planned(p, index);
    u.file_offset = qc_unit_place(s);
    u.stored_bytes = s->stored_bytes;
    return u;
}

qc_status qc_unit_read(const qc_pipeline *p, uint32_t index, qc_unit *out, qc_error *err)
{
    const qc_unit_state *s = &p->units[index];
    qc_digest all[3];
    const qc_digest *d = all;
    *out = qc_unit_of(p, index);
    if (is_same(p, s)) {
        out->content = p->same_content[p->plan->outputs[s->tensor].part];
        out->stored = p->same_stored[p->plan->outputs[s->tensor].part];
        return QC_OK;
    }
    QC_TRY(qc_file_pread(&p->digests, all, digest_count(p, s) * sizeof *all,
                         (uint64_t)index * sizeof all, err));
    out->content = *d++;
    if (qc_pipeline_is_compressed(p))
        out->stored = *d++;
    if (out->kind == QC_UNIT_MAIN)
        out->source = *d;
    return QC_OK;
}

qc_status qc_unit_put(qc_pipeline *p, const qc_unit *u, qc_error *err)
{
    qc_unit_state *s = &p->units[u->index];
    qc_digest all[3], *d = all;
    qc_unit_set_place(s, u->file_offset);
    s->stored_bytes = u->stored_bytes;
    if (is_same(p, s)) {
        qc_part part = p->plan->outputs[s->tensor].part;
        if (!qc_digest_equal(&u->content, &p->same_content[part]) ||
            (qc_pipeline_is_compressed(p) && !qc_digest_equal(&u->stored, &p->same_stored[part]))) {
            atomic_store(&p->misfit, 1);
            QC_FAIL(err, QC_ERR_CHECK,
                    "tensor '%s': its table is not that of other weights" QC_RESTART_ADVICE,
                    p->plan->jobs[p->plan->outputs[s->tensor].job].name);
        }
        return QC_OK;
    }
    *d++ = u->content;
    if (qc_pipeline_is_compressed(p))
        *d++ = u->stored;
    if (s->kind == QC_UNIT_MAIN)
        *d = u->source;
    return qc_file_pwrite(&p->digests, all, digest_count(p, s) * sizeof *all,
                          (uint64_t)u->index * sizeof all, err);
}

/* Makes the digests of the tables that are the same beside all weights. */
static qc_status make_same(qc_pipeline *p, qc_error *err)
{
    for (uint32_t i = 0; i < p->unit_count; i++) {
        const qc_unit_state *s = &p->units[i];
        static const qc_digest none;
        if (!is_same(p, s))
            continue;
        const qc_output *o = &p->plan->outputs[s->tensor];
        if (!qc_digest_equal(&p->same_content[o->part], &none))
            continue;
        const void *content = qc_job_part(p, o->job, o->part);
        size_t n = (size_t)qc_plan_tensor_bytes(p->plan, s->tensor), stored = qc_raw_frame_bytes(n);
        void *frame = NULL;
        p->same_content[o->part] = qc_digest_bytes(content, n);
        if (!qc_pipeline_is_compressed(p))
            continue;
        QC_TRY(qc_malloc(&frame, stored, err));
        qc_raw_frame_write(frame, content, n);
        p->same_stored[o->part] = qc_digest_bytes(frame, stored);
        qc_free(frame);
    }
    return QC_OK;
}

qc_status qc_units_make(qc_pipeline *p, qc_error *err)
{
    const qc_plan *plan = p->plan;
    uint64_t count = 0;
    for (uint32_t s = 0; s < plan->layout.count; s++) {
        const qc_shard *sh = &plan->layout.shards[s];
        count += qc_ceil_div_u64(sh->header_bytes, header_piece(sh));
    }
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        const qc_out_tensor t = qc_plan_tensor(plan, i);
        if (tensor_bytes(&t) > 0)
            count += qc_ceil_div_u64(tensor_bytes(&t), t.piece_bytes);
    }
    if (count > UINT32_MAX || plan->content_bytes >> 47) /* places have 48 bits */
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: too large for one conversion", plan->model->path);
    void *v = NULL;
    QC_TRY(qc_calloc(&v, (size_t)count, sizeof *p->units, err));
    p->units = v;
    QC_TRY(qc_calloc(&v, plan->tensor_count, sizeof *p->first_unit, err));
    p->first_unit = v;
    uint32_t at = 0;
    p->piece_bytes = 1;
    for (uint32_t s = 0; s < plan->layout.count; s++) {
        const qc_shard *sh = &plan->layout.shards[s];
        p->shards[s].first_unit = at;
        qc_unit_state header = {.tensor = QC_NO_OUTPUT, .kind = QC_UNIT_HEADER};
        add_units(p, header, sh->header_bytes, header_piece(sh), &at);
        for (uint32_t k = 0; k < sh->count; k++) {
            uint32_t tensor = sh->order[k];
            qc_unit_state u = {.tensor = tensor, .kind = kind_of(p, tensor)};
            p->first_unit[tensor] = at;
            const qc_out_tensor t = qc_plan_tensor(plan, tensor);
            add_units(p, u, tensor_bytes(&t), t.piece_bytes, &at);
        }
        p->shards[s].unit_count = at - p->shards[s].first_unit;
        atomic_init(&p->shards[s].left, p->shards[s].unit_count);
    }
    p->unit_count = at;
    QC_TRY(qc_file_open_scratch(&p->digests, p->out->staging, err));
    QC_TRY(make_same(p, err));
    for (uint32_t i = 0; i < plan->job_count; i++) {
        atomic_init(&p->jobs[i].recorded_end, 0);
        qc_job_reset(p, i);
    }
    return QC_OK;
}

void qc_job_reset(qc_pipeline *p, uint32_t job)
{
    const qc_job *j = &p->plan->jobs[job];
    qc_job_state *s = &p->jobs[job];
    uint32_t left = 0, derived = 0;
    for (int part = 0; part < QC_PART_COUNT; part++) {
        uint32_t t = j->outputs[part];
        for (uint32_t i = 0; t != QC_NO_OUTPUT && i < qc_unit_count(p, t); i++) {
            qc_unit_state *u = &p->units[p->first_unit[t] + i];
            u->kept = 0;
            u->written = 0;
            left += u->kind == QC_UNIT_MAIN;
            derived += u->kind == QC_UNIT_DERIVED;
            p->shards[qc_unit_shard(p, p->first_unit[t] + i)].kept = 0;
        }
    }
    qc_job_release(s);
    atomic_store(&s->left, left);
    atomic_store(&s->derived_left, derived);
    atomic_store(&s->recorded_end, 0);
    s->kept = s->finished = s->opened = 0;
}

uint64_t qc_unit_plain_place(const qc_pipeline *p, const qc_unit *u)
{
    uint64_t place = u->content_offset;
    if (u->tensor != QC_NO_OUTPUT)
        place += p->plan->layout.shards[u->shard].header_bytes + p->plan->layout.begins[u->tensor];
    return place;
}

/* Workers take units in file order, except that derived units come after the next threads - 1 main
 * units. Then the others have something to do while one worker finishes the weight. At most threads
 * - 1 workers can wait at the turnstile for a derived unit, so one is always left to take it. */
qc_status qc_units_dispatch(qc_pipeline *p, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_calloc(&v, p->unit_count, sizeof *p->dispatch, err));
    p->dispatch = v;
    uint32_t *late = NULL;
    QC_TRY(qc_calloc(&v, p->unit_count, sizeof *late, err));
    late = v; /* derived units that wait, oldest first */
    uint32_t late_begin = 0, late_end = 0, since = 0, n = 0;
    for (uint32_t i = 0; i < p->unit_count; i++) {
        const qc_unit_state *u = &p->units[i];
        if (u->kind == QC_UNIT_DEFERRED || u->kept || p->shards[qc_unit_shard(p, i)].foreign)
            continue;
        if (u->kind == QC_UNIT_DERIVED && p->threads > 1) {
            if (late_begin == late_end)
                since = 0;
            late[late_end++] = i;
            continue;
        }
        if (late_begin < late_end && since >= p->threads - 1) {
            while (late_begin < late_end)
                p->dispatch[n++] = late[late_begin++];
        }
        p->dispatch[n++] = i;
        since++;
    }
    while (late_begin < late_end)
        p->dispatch[n++] = late[late_begin++];
    p->dispatch_count = n;
    qc_free(late);
    return QC_OK;
}
