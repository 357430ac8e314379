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
    if (o->role == QC_ROLE_TENSOR_MAIN)
        return QC_UNIT_MAIN;
    const uint64_t *begins = p->plan->layout.begins;
    if (!qc_pipeline_is_compressed(p) || begins[tensor] < begins[j->first_output])
        return QC_UNIT_DEFERRED;
    return QC_UNIT_DERIVED;
}

static void add_units(qc_pipeline *p, qc_unit model, uint64_t bytes, uint64_t unit_bytes,
                      uint32_t *at)
{
    for (uint64_t offset = 0; offset < bytes; offset += unit_bytes) {
        uint64_t n = bytes - offset < unit_bytes ? bytes - offset : unit_bytes;
        qc_unit *u = &p->units[*at];
        *u = model;
        u->index = (*at)++;
        u->content_offset = offset;
        u->content_bytes = u->stored_bytes = (uint32_t)n; /* corrected when compressed */
        if (n > p->unit_bytes)
            p->unit_bytes = (uint32_t)n;
        if (u->kind == QC_UNIT_DEFERRED && qc_pipeline_is_compressed(p))
            u->stored_bytes = (uint32_t)qc_raw_frame_bytes((size_t)n);
    }
}

static uint64_t header_unit(const qc_shard *s)
{
    return qc_layout_piece_bytes(s->header_bytes, 8);
}

uint32_t qc_unit_count(const qc_pipeline *p, uint32_t tensor)
{
    uint32_t end = p->first_unit[tensor];
    while (end < p->unit_count && p->units[end].tensor == tensor)
        end++;
    return end - p->first_unit[tensor];
}

qc_status qc_units_make(qc_pipeline *p, qc_error *err)
{
    const qc_plan *plan = p->plan;
    uint64_t count = 0;
    for (uint32_t s = 0; s < plan->layout.count; s++) {
        const qc_shard *sh = &plan->layout.shards[s];
        count += qc_ceil_div_u64(sh->header_bytes, header_unit(sh));
    }
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        const qc_out_tensor t = qc_plan_tensor(plan, i);
        if (tensor_bytes(&t) > 0)
            count += qc_ceil_div_u64(tensor_bytes(&t), t.piece_bytes);
    }
    if (count > UINT32_MAX || plan->content_bytes >> 47) /* a recorded place has 48 bits */
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s is too large for one conversion", plan->model->path);
    QC_TRY(qc_calloc(&p->units, (size_t)count, sizeof *p->units, err));
    QC_TRY(qc_calloc(&p->first_unit, plan->tensor_count, sizeof *p->first_unit, err));
    uint32_t at = 0;
    p->unit_bytes = 1;
    for (uint32_t s = 0; s < plan->layout.count; s++) {
        const qc_shard *sh = &plan->layout.shards[s];
        p->shards[s].first_unit = at;
        qc_unit header = {.tensor = QC_NO_OUTPUT, .shard = s, .kind = QC_UNIT_HEADER};
        add_units(p, header, sh->header_bytes, header_unit(sh), &at);
        for (uint32_t k = 0; k < sh->count; k++) {
            uint32_t tensor = sh->order[k];
            qc_unit u = {.tensor = tensor, .shard = s, .kind = (uint8_t)kind_of(p, tensor)};
            p->first_unit[tensor] = at;
            const qc_out_tensor t = qc_plan_tensor(plan, tensor);
            add_units(p, u, tensor_bytes(&t), t.piece_bytes, &at);
        }
        p->shards[s].unit_count = at - p->shards[s].first_unit;
        atomic_init(&p->shards[s].left, p->shards[s].unit_count);
    }
    p->unit_count = at;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        atomic_init(&p->jobs[i].recorded, 0);
        qc_job_reset(p, i);
    }
    return QC_OK;
}

void qc_job_reset(qc_pipeline *p, uint32_t job)
{
    const qc_job *j = &p->plan->jobs[job];
    qc_job_state *s = &p->jobs[job];
    uint32_t left = 0, derived = 0;
    for (uint32_t t = j->first_output; t < j->first_output + qc_job_output_count(j); t++) {
        const uint32_t count = qc_unit_count(p, t);
        for (uint32_t i = 0; i < count; i++) {
            qc_unit *u = &p->units[p->first_unit[t] + i];
            u->kept = 0;
            u->written = u->zeros = u->lost = 0;
            left += u->kind == QC_UNIT_MAIN;
            derived += u->kind == QC_UNIT_DERIVED;
            p->shards[u->shard].kept = 0;
        }
    }
    qc_job_release(s);
    atomic_store(&s->left, left);
    atomic_store(&s->derived_left, derived);
    atomic_store(&s->recorded, 0);
    s->kept = s->finished = s->opened = s->not_finite = 0;
}

qc_status qc_shard_close(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    pthread_mutex_lock(&p->shard_lock);
    qc_status st = qc_file_close(&p->shards[shard].file, err);
    pthread_mutex_unlock(&p->shard_lock);
    atomic_fetch_sub(&p->waiting, 1);
    return st;
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
    QC_TRY(qc_calloc(&p->dispatch, p->unit_count, sizeof *p->dispatch, err));
    uint32_t *late = NULL;
    QC_TRY(qc_calloc(&late, p->unit_count, sizeof *late,
                     err)); /* derived units that wait, oldest first */
    uint32_t late_begin = 0, late_end = 0, since = 0, n = 0;
    for (uint32_t i = 0; i < p->unit_count; i++) {
        const qc_unit *u = &p->units[i];
        if (u->kind == QC_UNIT_DEFERRED || u->kept || p->shards[u->shard].foreign)
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

/* ---- what is kept of a job until its last derived tensor is written ---- */

qc_status qc_job_need_work(qc_job_state *s, qc_error *err)
{
    return s->work ? QC_OK : qc_calloc(&s->work, 1, sizeof *s->work, err);
}

void qc_job_release(qc_job_state *s)
{
    qc_job_work *w = s->work;
    if (!w)
        return;
    qc_free(w->sums);
    qc_free(w->absmax);
    qc_free(w->block_errors);
    qc_free(w->sample_absmax);
    qc_free(w->nested_codes);
    qc_free(w->nested_absmax);
    qc_free(w->state_json);
    qc_free(w);
    s->work = NULL;
}

const void *qc_job_role_tensor(const qc_pipeline *p, uint32_t job, qc_role_tensor role)
{
    static const unsigned char row_major = 0;
    static const qc_job_work none;
    const qc_job_work *s = p->jobs[job].work ? p->jobs[job].work : &none;
    switch (role) {
    case QC_ROLE_TENSOR_ABSMAX:
        return p->plan->jobs[job].form.nested ? (const void *)s->nested_codes : s->absmax;
    case QC_ROLE_TENSOR_QUANT_MAP:
        return qc_nf4_code;
    case QC_ROLE_TENSOR_NESTED_ABSMAX:
        return s->nested_absmax;
    case QC_ROLE_TENSOR_NESTED_MAP:
        return qc_dynamic_map;
    case QC_ROLE_TENSOR_STATE:
        return s->state_json;
    case QC_ROLE_TENSOR_SCB:
    case QC_ROLE_TENSOR_SCALE:
        return s->absmax;
    case QC_ROLE_TENSOR_SHAPE:
        return p->plan->jobs[job].dims;
    case QC_ROLE_TENSOR_FORMAT:
        return &row_major;
    case QC_ROLE_TENSOR_ZEROS: /* of the same bytes, which are not kept */
    case QC_ROLE_TENSOR_MAIN:
    case QC_ROLE_TENSOR_COUNT:
        break;
    }
    return NULL;
}

int qc_role_tensor_is_own(qc_role_tensor role)
{
    return role == QC_ROLE_TENSOR_ABSMAX || role == QC_ROLE_TENSOR_NESTED_ABSMAX ||
           role == QC_ROLE_TENSOR_STATE || role == QC_ROLE_TENSOR_SCB ||
           role == QC_ROLE_TENSOR_SCALE;
}
