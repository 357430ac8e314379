/* Checks what a journal says: the frames against the staged shards and, where the source's files
 * have another modification time, the source against the digests that were taken of it. */
#include "base/alloc.h"
#include "base/bytes.h"
#include "convert/pipeline/worker.h"
#include "convert/run/resume_internal.h"

#include <inttypes.h>
#include <string.h>

enum { DAMAGED = 1, OTHER_SCALES };

typedef struct {
    qc_resume *r;
    unsigned char *damaged;    /* per unit, written by one worker: DAMAGED or OTHER_SCALES */
    unsigned char *changed;    /* per file of the source: it has another time than recorded */
    unsigned char *again;      /* per job: see take_derived_out */
    atomic_uint_fast32_t next; /* the next unit to check */
    void (*progress)(void *ctx, uint64_t bytes);
    void *progress_ctx;
} checker;

/* A worker has one staged shard open at a time, because there may be more shards than file
 * handles. */
typedef struct {
    qc_file file; /* closed: the shard is missing */
    uint32_t shard;
} open_file;

static qc_status turn_to(open_file *o, const qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    if (o->shard == shard)
        return QC_OK;
    qc_file_discard(&o->file);
    o->shard = shard;
    QC_TRY(qc_path_stat(p->shards[shard].path, &kind, NULL, err));
    return kind == QC_PATH_MISSING ? QC_OK
                                   : qc_file_open_read(&o->file, p->shards[shard].path, err);
}

/* Compares the frame on the disk with its digest. */
static qc_status check_frame(checker *c, qc_worker *w, open_file *o, uint32_t index, qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_unit *u = &p->units[index];
    int compressed = qc_pipeline_is_compressed(p);
    unsigned char *buf = compressed ? w->stored : w->content;
    qc_error trouble = {0};
    QC_TRY(turn_to(o, p, u->shard, err));
    qc_status st = QC_ERR_TRUNCATED;
    if (o->file.fd >= 0)
        st = qc_file_pread(&o->file, buf, u->stored_bytes, u->file_offset, &trouble);
    if (st != QC_OK && st != QC_ERR_TRUNCATED) {
        if (err)
            *err = trouble;
        return st;
    }
    qc_digest found = qc_digest_bytes(buf, st == QC_OK ? u->stored_bytes : 0);
    c->damaged[index] = !qc_digest_equal(&found, compressed ? &u->stored : &u->content);
    if (c->progress)
        c->progress(c->progress_ctx, u->stored_bytes);
    return QC_OK;
}

/* Has a file that the tensor is read from another time? */
static int is_touched(const checker *c, const qc_plan *plan, const qc_checkpoint_tensor *t)
{
    int any = 0;
    for (size_t f = 0; f < plan->model->file_count; f++)
        any |= c->changed[f] && (f == t->file || (t->change && t->change->scattered));
    return any;
}

/* The scales of a weight that is stored as codes are in no digest. So where their file has another
 * time, the weight is made again. */
static int has_other_scales(const checker *c, const qc_plan *plan, const qc_job *j)
{
    uint32_t tensors[QC_JOB_TENSORS_MAX];
    size_t count = qc_job_tensors(j, tensors);
    for (size_t i = 0; i < count; i++) {
        if (tensors[i] != j->source && is_touched(c, plan, &plan->model->tensors[tensors[i]]))
            return 1;
    }
    return 0;
}

/* Does the source still hold what the frame was made of? */
static qc_status check_source(const checker *c, qc_worker *w, uint32_t index, qc_error *err)
{
    const qc_plan *plan = w->p->plan;
    const qc_unit *u = &w->p->units[index];
    qc_digest now;
    if (u->kind != QC_UNIT_MAIN)
        return QC_OK;
    const qc_job *j = &plan->jobs[plan->outputs[u->tensor].job];
    const qc_checkpoint_tensor *t = &plan->model->tensors[j->source];
    if (has_other_scales(c, plan, j)) {
        c->damaged[index] = OTHER_SCALES;
        return QC_OK;
    }
    if (!is_touched(c, plan, t))
        return QC_OK;
    QC_TRY(qc_unit_source(w, u, &now, err));
    if (!qc_digest_equal(&now, &u->source))
        QC_FAIL(err, QC_ERR_INPUT,
                "%s has changed since the conversion that %s holds began: tensor '%s' is not what "
                "it was" QC_RESTART_ADVICE,
                plan->model->files[t->file].path, w->p->out->path, t->name);
    return QC_OK;
}

static qc_status check_units(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    checker *c = ctx;
    qc_pipeline *p = c->r->p;
    qc_worker w;
    open_file o = {QC_FILE_CLOSED, UINT32_MAX};
    (void)index;
    qc_status st = qc_worker_init(&w, p, team, err);
    while (st == QC_OK) {
        uint32_t i = (uint32_t)atomic_fetch_add(&c->next, 1);
        if (i >= p->unit_count)
            break;
        if (!qc_resume_is_ours(p, i))
            continue;
        st = qc_worker_look_up(&w, err);
        if (st == QC_OK)
            st = check_frame(c, &w, &o, i, err);
        if (st == QC_OK)
            st = check_source(c, &w, i, err);
    }
    qc_file_discard(&o.file);
    qc_worker_deinit(&w);
    return st;
}

/* Checks the seek table, and that nothing lies behind it. A shard that fails is finished again. */
static qc_status check_table(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_shard_state *s = &p->shards[shard];
    open_file o = {QC_FILE_CLOSED, UINT32_MAX};
    uint64_t bytes = 0;
    void *v = NULL;
    size_t n = (size_t)s->table_bytes;
    QC_TRY(turn_to(&o, p, shard, err));
    s->kept = 0;
    if (o.file.fd < 0)
        return QC_OK;
    qc_status st = qc_file_size(&o.file, &bytes, err);
    if (st == QC_OK && bytes == s->file_bytes) {
        qc_digest found = qc_digest_bytes(NULL, 0);
        st = qc_malloc(&v, n, err);
        if (st == QC_OK)
            st = qc_file_pread(&o.file, v, n, bytes - n, err);
        if (st == QC_OK)
            found = qc_digest_bytes(v, n);
        s->kept = st == QC_OK && (n == 0 || qc_digest_equal(&found, &s->table));
    }
    qc_free(v);
    qc_file_discard(&o.file);
    return st;
}

/* Takes in the record of a job once more, where only derived frames of it are damaged, because they
 * are made from that record. */
static qc_status take_again(void *ctx, const qc_journal_record *record, qc_error *err)
{
    const checker *c = ctx;
    if (record->type != QC_RECORD_JOB || record->payload_bytes < 4)
        return QC_OK;
    uint32_t job = qc_load_le32(record->payload);
    if (job >= c->r->p->plan->job_count || !c->again[job])
        return QC_OK;
    return qc_resume_take_record(c->r, record, err);
}

/* Handles derived frames that are recorded by themselves but damaged or missing, while their job is
 * on the disk. That happens when the journal is ahead of the shards after a power loss. The job's
 * record has all that such frames are made of. */
static qc_status take_derived_out(checker *c, qc_error *err)
{
    qc_pipeline *p = c->r->p;
    int any = 0;
    for (uint32_t i = 0; i < p->unit_count; i++) {
        if (!c->damaged[i] || p->units[i].kind != QC_UNIT_DERIVED)
            continue;
        uint32_t job = p->plan->outputs[p->units[i].tensor].job;
        if (!p->jobs[job].kept)
            continue;
        c->again[job] = 1;
        any = 1;
        qc_job_reset(p, job);
    }
    return any ? qc_journal_read(c->r->path, take_again, c, NULL, err) : QC_OK;
}

/* Makes the journal no longer say DONE, because a shard's header or table has to be written again.
 * A BEGIN of any weight of the shard takes DONE back. */
static qc_status take_back_done(qc_resume *r, uint32_t shard, qc_error *err)
{
    const qc_plan *plan = r->p->plan;
    const qc_shard *s = &plan->layout.shards[shard];
    int done = r->found.done;
    r->found.done = r->found.committing = 0;
    return done && s->count > 0 ? qc_resume_add_begin(r, plan->outputs[s->order[0]].job, err)
                                : QC_OK;
}

static qc_status take_out(checker *c, qc_error *err)
{
    qc_resume *r = c->r;
    qc_pipeline *p = r->p;
    for (uint32_t i = 0; i < p->unit_count; i++)
        r->times_due |= c->damaged[i] == OTHER_SCALES;
    for (uint32_t i = 0; r->found.done && i < p->plan->layout.count; i++) {
        if (!p->shards[i].kept && !p->shards[i].foreign)
            QC_TRY(take_back_done(r, i, err));
    }
    for (uint32_t i = 0; i < p->unit_count; i++) {
        qc_unit *u = &p->units[i];
        if (!c->damaged[i])
            continue;
        if (u->kind == QC_UNIT_DERIVED) { /* see take_derived_out */
            QC_TRY(take_back_done(r, u->shard, err));
            continue;
        }
        p->shards[u->shard].kept = 0;
        if (u->kind == QC_UNIT_HEADER) {
            u->kept = 0;
            u->written = 0;
            QC_TRY(take_back_done(r, u->shard, err));
            continue;
        }
        r->found.done = r->found.committing = 0;
        u->recorded = u->recorded && c->damaged[i] != OTHER_SCALES;
        uint32_t job = p->plan->outputs[u->tensor].job;
        if (p->jobs[job].kept)
            QC_TRY(qc_resume_add_begin(r, job, err)); /* its records no longer count */
        qc_job_reset(p, job);
    }
    return take_derived_out(c, err);
}

static qc_status check_all(checker *c, qc_error *err)
{
    qc_resume *r = c->r;
    qc_pipeline *p = r->p;
    const qc_checkpoint *m = p->plan->model;
    int any_changed = !r->has_times;
    for (size_t i = 0; i < m->file_count; i++) {
        c->changed[i] = !r->has_times || r->times[i] != r->times_now[i];
        any_changed |= c->changed[i];
    }
    for (uint32_t i = 0; i < p->plan->layout.count; i++) {
        if (p->shards[i].kept && !p->shards[i].foreign)
            QC_TRY(check_table(p, i, err));
    }
    if (r->found.stored_kept > 0) /* a shard's header may be recorded where no weight is */
        QC_TRY(qc_team_run(p->threads, check_units, c, err));
    QC_TRY(take_out(c, err));
    /* As long as weights have to be made again only because of these times, the next run has to see
     * that too. */
    return any_changed && !r->times_due ? qc_resume_add_times(r, err) : QC_OK;
}

qc_status qc_resume_check(qc_resume *r, void (*progress)(void *ctx, uint64_t bytes),
                          void *progress_ctx, qc_error *err)
{
    checker c = {.r = r, .progress = progress, .progress_ctx = progress_ctx};
    atomic_init(&c.next, 0);
    QC_TRY(qc_calloc(&c.damaged, r->p->unit_count, 1, err));
    qc_status st = qc_calloc(&c.changed, r->p->plan->model->file_count, 1, err);
    if (st == QC_OK)
        st = qc_calloc(&c.again, r->p->plan->job_count, 1, err);
    if (st == QC_OK)
        st = check_all(&c, err);
    if (st == QC_OK)
        qc_resume_count(r);
    qc_free(c.again);
    qc_free(c.changed);
    qc_free(c.damaged);
    return st;
}
