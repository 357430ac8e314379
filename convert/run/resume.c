#include "convert/run/resume.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/float_bits.h"
#include "convert/pipeline/pipeline.h"
#include "convert/run/resume_internal.h"

#include <inttypes.h>
#include <string.h>

#define JOB_HEAD_BYTES  52u
#define PART_HEAD_BYTES 8u
#define SHARD_BYTES     36u
#define TIME_BYTES      16u
#define IDENTITY_MAX    ((size_t)256 << 20)
#define QC_DIGEST_BYTES (sizeof(qc_digest))

_Static_assert(QC_UNIT_RECORD_BYTES == 4 + 4 + 8 + 3 * sizeof(qc_digest), "a unit's record");

/* ---- Bytes of records ---- */

static void put_unit(unsigned char *b, const qc_unit *u)
{
    qc_store_le32(b, u->index);
    qc_store_le32(b + 4, u->stored_bytes);
    qc_store_le64(b + 8, u->file_offset);
    memcpy(b + 16, &u->content, QC_DIGEST_BYTES);
    memcpy(b + 32, &u->stored, QC_DIGEST_BYTES);
    memcpy(b + 48, &u->source, QC_DIGEST_BYTES);
}

/* ---- Taking records in ---- */

static qc_status refuse_record(const qc_resume *r, const qc_journal_record *record, qc_error *err)
{
    QC_FAIL(err, QC_ERR_INPUT,
            "%s: the record that ends at byte %" PRIu64
            " (type %u) does not fit this conversion" QC_RESTART_ADVICE,
            r->path, record->end, record->type);
}

/* Takes in one unit that the record says is written. A main or deferred unit has to belong to
 * `job`; a unit of a record without a job (QC_NO_OUTPUT) is one that was not finished with its
 * job. */
static qc_status take_unit(qc_resume *r, const qc_journal_record *record, const unsigned char *b,
                           uint32_t job, qc_error *err)
{
    qc_pipeline *p = r->p;
    uint32_t index = qc_load_le32(b), stored = qc_load_le32(b + 4);
    if (index >= p->unit_count)
        return refuse_record(r, record, err);
    qc_unit *u = &p->units[index];
    uint64_t place = qc_load_le64(b + 8);
    int whole = u->kind == QC_UNIT_MAIN || u->kind == QC_UNIT_DEFERRED;
    if (whole != (job != QC_NO_OUTPUT) || (whole && p->plan->outputs[u->tensor].job != job))
        return refuse_record(r, record, err);
    if (qc_pipeline_is_compressed(p)
            ? stored > qc_frame_bound(u->content_bytes) || stored == 0 || place >> 48 != 0
            : stored != u->content_bytes || place != qc_unit_plain_place(p, u))
        return refuse_record(r, record, err);
    u->stored_bytes = stored;
    u->file_offset = place;
    memcpy(&u->content, b + 16, QC_DIGEST_BYTES);
    memcpy(&u->stored, b + 32, QC_DIGEST_BYTES);
    memcpy(&u->source, b + 48, QC_DIGEST_BYTES);
    u->kept = u->recorded = u->written = 1;
    return QC_OK;
}

/* Counts the units that a job's record has: its main ones and those with a place kept free.
 * *missing is how many of them are not kept. */
static uint32_t whole_units(const qc_pipeline *p, uint32_t job, uint32_t *missing)
{
    uint32_t count = 0;
    *missing = 0;
    const qc_job *j = &p->plan->jobs[job];
    for (uint32_t t = j->first_output; t < j->first_output + qc_job_output_count(j); t++) {
        const uint32_t units = qc_unit_count(p, t);
        for (uint32_t i = 0; i < units; i++) {
            const qc_unit *u = &p->units[p->first_unit[t] + i];
            if (u->kind == QC_UNIT_DERIVED)
                continue;
            count++;
            *missing += !u->kept;
        }
    }
    return count;
}

static int part_goes_along(const qc_pipeline *p, uint32_t job, int part)
{
    return qc_role_tensor_is_own((qc_role_tensor)part) &&
           qc_job_awaits(p, job, (qc_role_tensor)part);
}

static qc_status take_job(qc_resume *r, const qc_journal_record *record, qc_error *err)
{
    qc_pipeline *p = r->p;
    const unsigned char *b = record->payload, *end = b + record->payload_bytes;
    int have[QC_ROLE_TENSOR_COUNT] = {0};
    uint32_t job = qc_load_le32(b), units = qc_load_le32(b + 4), parts = qc_load_le32(b + 8);
    qc_job_state *s = &p->jobs[job];
    qc_job_reset(p, job);
    s->error.rel_mse = qc_f64_of_bits(qc_load_le64(b + 12));
    s->error.max_err = qc_f64_of_bits(qc_load_le64(b + 20));
    s->error.max_index = qc_load_le64(b + 28);
    s->outputs.rounded = qc_f64_of_bits(qc_load_le64(b + 36));
    s->outputs.calibrated = qc_f64_of_bits(qc_load_le64(b + 44));
    b += JOB_HEAD_BYTES;
    if (units > (uint64_t)(end - b) / QC_UNIT_RECORD_BYTES)
        return refuse_record(r, record, err);
    for (uint32_t i = 0; i < units; i++, b += QC_UNIT_RECORD_BYTES)
        QC_TRY(take_unit(r, record, b, job, err));
    uint32_t missing = 0;
    if (units != whole_units(p, job, &missing) || missing > 0)
        return refuse_record(r, record, err);
    for (uint32_t i = 0; i < parts; i++) {
        if (end - b < (ptrdiff_t)PART_HEAD_BYTES)
            return refuse_record(r, record, err);
        uint32_t part = qc_load_le32(b), bytes = qc_load_le32(b + 4);
        b += PART_HEAD_BYTES;
        if (part >= QC_ROLE_TENSOR_COUNT || have[part] || bytes > (uint64_t)(end - b))
            return refuse_record(r, record, err);
        QC_TRY(qc_job_take_role_tensor(p, job, (qc_role_tensor)part, b, bytes, err));
        have[part] = 1;
        b += bytes;
    }
    for (int part = 0; part < QC_ROLE_TENSOR_COUNT; part++)
        if (b != end || (part_goes_along(p, job, part) && !have[part]))
            return refuse_record(r, record, err);
    atomic_store(&s->left, 0);
    s->kept = s->finished = s->begun = 1;
    atomic_store(&s->recorded, 1);
    if (atomic_load(&s->derived_left) == 0)
        qc_job_release(s);
    r->has_work = 1;
    return QC_OK;
}

static qc_status take_single(qc_resume *r, const qc_journal_record *record, qc_error *err)
{
    qc_pipeline *p = r->p;
    uint32_t index = qc_load_le32(record->payload);
    int again = index < p->unit_count && p->units[index].kept;
    QC_TRY(take_unit(r, record, record->payload, QC_NO_OUTPUT, err));
    const qc_unit *u = &p->units[index];
    p->shards[u->shard].kept = 0;
    if (u->kind == QC_UNIT_HEADER || again)
        return QC_OK;
    qc_job_state *s = &p->jobs[p->plan->outputs[u->tensor].job];
    if (!s->kept)
        return refuse_record(r, record, err);
    if (atomic_fetch_sub(&s->derived_left, 1) == 1)
        qc_job_release(s);
    return QC_OK;
}

/* Takes in how far the conversion had come. Work that begins again takes DONE and COMMIT back. */
static qc_status take_end(void *ctx, const qc_journal_record *record, qc_error *err)
{
    qc_resume_found *found = ctx;
    (void)err;
    if (record->type == QC_RECORD_BEGIN || record->type == QC_RECORD_JOB ||
        record->type == QC_RECORD_UNIT)
        found->done = found->committing = 0;
    found->done |= record->type == QC_RECORD_DONE;
    if (record->type == QC_RECORD_COMMIT && record->payload_bytes == QC_DIGEST_BYTES) {
        found->committing = 1;
        memcpy(&found->manifest, record->payload, QC_DIGEST_BYTES);
    }
    return QC_OK;
}

/* Reads a journal, if it is there. */
static qc_status read_journal(const char *path, qc_journal_fn fn, void *ctx, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    return kind == QC_PATH_MISSING ? QC_OK : qc_journal_read(path, fn, ctx, NULL, err);
}

qc_status qc_resume_read_commit(qc_resume_found *found, const char *path, qc_error *err)
{
    memset(found, 0, sizeof *found);
    return read_journal(path, take_end, found, err);
}

/* Has a record the length of its type, and does it speak of a job or shard that there is? */
static int fits(const qc_resume *r, const qc_journal_record *record)
{
    const qc_plan *plan = r->p->plan;
    const size_t bytes = record->payload_bytes;
    switch (record->type) {
    case QC_RECORD_TIMES:
        return bytes == plan->model->file_count * TIME_BYTES;
    case QC_RECORD_BEGIN:
        return bytes == 4 && qc_load_le32(record->payload) < plan->job_count;
    case QC_RECORD_JOB:
        return bytes >= JOB_HEAD_BYTES && qc_load_le32(record->payload) < plan->job_count;
    case QC_RECORD_UNIT:
        return bytes == QC_UNIT_RECORD_BYTES;
    case QC_RECORD_SHARD:
        return bytes == SHARD_BYTES && qc_load_le32(record->payload) < plan->layout.count;
    case QC_RECORD_COMMIT:
        return bytes == QC_DIGEST_BYTES;
    default:
        return 1;
    }
}

qc_status qc_resume_take_record(void *ctx, const qc_journal_record *record, qc_error *err)
{
    qc_resume *r = ctx;
    qc_pipeline *p = r->p;
    const unsigned char *b = record->payload;
    if ((!r->has_identity && record->type != QC_RECORD_IDENTITY) || !fits(r, record))
        return refuse_record(r, record, err);
    QC_TRY(take_end(&r->found, record, err));
    switch (record->type) {
    case QC_RECORD_IDENTITY:
        QC_TRY(qc_identity_compare((const char *)b, record->payload_bytes, r->identity.data,
                                   r->identity.len, r->d->path, err));
        r->has_identity = 1;
        return QC_OK;
    case QC_RECORD_TIMES:
        for (size_t i = 0; i < p->plan->model->file_count; i++)
            r->times[i] = qc_load_le64(b + i * TIME_BYTES);
        r->has_times = 1;
        return QC_OK;
    case QC_RECORD_BEGIN:
        p->jobs[qc_load_le32(b)].begun = 1;
        return QC_OK;
    case QC_RECORD_JOB:
        return take_job(r, record, err);
    case QC_RECORD_UNIT:
        return take_single(r, record, err);
    case QC_RECORD_SHARD: {
        qc_shard_state *s = &p->shards[qc_load_le32(b)];
        s->file_bytes = qc_load_le64(b + 4);
        s->table_bytes = qc_load_le64(b + 12);
        memcpy(&s->table, b + 20, QC_DIGEST_BYTES);
        s->kept = s->table_bytes <= s->file_bytes;
        return QC_OK;
    }
    default:
        return QC_OK; /* DONE, COMMIT and types that nobody writes say nothing of the pipeline */
    }
}

/* ---- Counting what was taken in ---- */

int qc_resume_is_ours(const qc_pipeline *p, uint32_t unit)
{
    return p->units[unit].kept && !p->shards[p->units[unit].shard].foreign;
}

void qc_resume_count(qc_resume *r)
{
    const qc_pipeline *p = r->p;
    qc_resume_found *f = &r->found;
    f->jobs_kept = 0;
    f->jobs_redone = r->begun_before;
    f->bytes_kept = f->stored_kept = 0;
    for (uint32_t i = 0; i < p->plan->job_count; i++) {
        const qc_job *j = &p->plan->jobs[i];
        if (!p->jobs[i].kept)
            continue;
        f->jobs_kept++;
        f->jobs_redone -= p->jobs[i].begun;
        f->bytes_kept += p->plan->model->tensors[j->source].bytes + j->absorbed_bytes;
    }
    for (uint32_t i = 0; i < p->unit_count; i++)
        f->stored_kept += qc_resume_is_ours(p, i) ? p->units[i].stored_bytes : 0;
}

/* ---- Recording ---- */

qc_status qc_resume_add_begin(void *resume, uint32_t job, qc_error *err)
{
    qc_resume *r = resume;
    unsigned char b[4];
    qc_store_le32(b, job);
    return qc_journal_append(r->journal, QC_RECORD_BEGIN, b, sizeof b, err);
}

static qc_status add_unit(void *resume, uint32_t unit, qc_error *err)
{
    qc_resume *r = resume;
    unsigned char b[QC_UNIT_RECORD_BYTES];
    put_unit(b, &r->p->units[unit]);
    return qc_journal_append(r->journal, QC_RECORD_UNIT, b, sizeof b, err);
}

static qc_status add_shard(void *resume, uint32_t shard, qc_error *err)
{
    qc_resume *r = resume;
    const qc_shard_state *s = &r->p->shards[shard];
    unsigned char b[SHARD_BYTES];
    qc_store_le32(b, shard);
    qc_store_le64(b + 4, s->file_bytes);
    qc_store_le64(b + 12, s->table_bytes);
    memcpy(b + 20, &s->table, QC_DIGEST_BYTES);
    return qc_journal_append(r->journal, QC_RECORD_SHARD, b, sizeof b, err);
}

static qc_status add_job(void *resume, uint32_t job, qc_error *err)
{
    qc_resume *r = resume;
    const qc_pipeline *p = r->p;
    const qc_job *j = &p->plan->jobs[job];
    const qc_job_state *s = &p->jobs[job];
    uint32_t missing = 0, units = whole_units(p, job, &missing), parts = 0;
    size_t bytes = JOB_HEAD_BYTES + (size_t)units * QC_UNIT_RECORD_BYTES;
    unsigned char *record = NULL;
    for (int part = 0; part < QC_ROLE_TENSOR_COUNT; part++) {
        if (!part_goes_along(p, job, part))
            continue;
        parts++;
        bytes += PART_HEAD_BYTES +
                 (size_t)qc_plan_tensor_bytes(p->plan, qc_job_output(j, (qc_role_tensor)part));
    }
    QC_TRY(qc_malloc(&record, bytes, err));
    unsigned char *b = record;
    qc_store_le32(b, job);
    qc_store_le32(b + 4, units);
    qc_store_le32(b + 8, parts);
    qc_store_le64(b + 12, qc_f64_bits(s->error.rel_mse));
    qc_store_le64(b + 20, qc_f64_bits(s->error.max_err));
    qc_store_le64(b + 28, s->error.max_index);
    qc_store_le64(b + 36, qc_f64_bits(s->outputs.rounded));
    qc_store_le64(b + 44, qc_f64_bits(s->outputs.calibrated));
    b += JOB_HEAD_BYTES;
    for (uint32_t t = j->first_output; t < j->first_output + qc_job_output_count(j); t++) {
        const uint32_t count = qc_unit_count(p, t);
        for (uint32_t i = 0; i < count; i++) {
            const qc_unit *u = &p->units[p->first_unit[t] + i];
            if (u->kind == QC_UNIT_DERIVED)
                continue;
            put_unit(b, u);
            b += QC_UNIT_RECORD_BYTES;
        }
    }
    for (int part = 0; part < QC_ROLE_TENSOR_COUNT; part++) {
        if (!part_goes_along(p, job, part))
            continue;
        size_t n = (size_t)qc_plan_tensor_bytes(p->plan, qc_job_output(j, (qc_role_tensor)part));
        qc_store_le32(b, (uint32_t)part);
        qc_store_le32(b + 4, (uint32_t)n);
        memcpy(b + PART_HEAD_BYTES, qc_job_role_tensor(p, job, (qc_role_tensor)part), n);
        b += PART_HEAD_BYTES + n;
    }
    qc_status st = qc_journal_append(r->journal, QC_RECORD_JOB, record, bytes, err);
    if (st == QC_OK)
        atomic_store(&r->recorded, 1);
    qc_free(record);
    return st;
}

/* ---- Opening ---- */

qc_status qc_resume_add_times(qc_resume *r, qc_error *err)
{
    const qc_checkpoint *m = r->p->plan->model;
    unsigned char *b = NULL;
    QC_TRY(qc_calloc(&b, m->file_count, TIME_BYTES, err));
    for (size_t i = 0; i < m->file_count; i++) {
        qc_store_le64(b + i * TIME_BYTES, r->times_now[i]);
        qc_store_le64(b + i * TIME_BYTES + 8, m->files[i].file_bytes);
    }
    qc_status st =
        qc_journal_append(r->journal, QC_RECORD_TIMES, b, m->file_count * TIME_BYTES, err);
    qc_free(b);
    return st;
}

qc_status qc_resume_path(qc_arena *arena, const char **out, const char *staging,
                         unsigned part_index, unsigned part_count, qc_error *err)
{
    return qc_arena_printf(arena, out, err, "%s/" QC_JOURNAL_NAME, staging, part_index + 1,
                           part_count);
}

qc_status qc_resume_open(qc_resume **out, qc_pipeline *p, qc_output_dir *d, unsigned part_index,
                         unsigned part_count, qc_error *err)
{
    const qc_checkpoint *m = p->plan->model;
    qc_resume *r = NULL;
    qc_status st = QC_OK;
    *out = NULL;
    QC_TRY(qc_calloc(&r, 1, sizeof(qc_resume), err));
    r->p = p;
    r->d = d;
    qc_arena_init(&r->arena);
    qc_strbuf_init(&r->identity, IDENTITY_MAX);
    QC_TRY_GOTO(st, failed,
                qc_resume_path(&r->arena, &r->path, d->staging, part_index, part_count, err));
    QC_TRY_GOTO(st, failed, qc_identity_make(&r->identity, p->plan, part_count, err));
    QC_TRY_GOTO(st, failed,
                qc_arena_alloc(&r->arena, &r->times, m->file_count, sizeof *r->times, err));
    QC_TRY_GOTO(st, failed,
                qc_arena_alloc(&r->arena, &r->times_now, m->file_count, sizeof *r->times, err));
    for (size_t i = 0; i < m->file_count; i++)
        r->times_now[i] = (uint64_t)m->files[i].stamp.modified_ns;
    st = qc_journal_open(&r->journal, r->path, qc_resume_take_record, r, NULL, err);
    if (st == QC_ERR_UNSUPPORTED)
        st = QC_ERROR(
            err, st,
            "%s: the journal of an interrupted conversion does not begin as one of this "
            "version of qconv does: it is damaged, or of another version" QC_RESTART_ADVICE,
            r->path);
    QC_TRY_GOTO(st, failed, st);
    if (!r->has_identity) {
        QC_TRY_GOTO(st, failed,
                    qc_journal_append(r->journal, QC_RECORD_IDENTITY, r->identity.data,
                                      r->identity.len, err));
        QC_TRY_GOTO(st, failed, qc_resume_add_times(r, err));
        QC_TRY_GOTO(st, failed, qc_journal_sync(r->journal, err));
    } else {
        for (uint32_t i = 0; i < p->plan->job_count; i++)
            r->begun_before += p->jobs[i].begun != 0;
        r->found.continued = r->has_work;
        qc_resume_count(r);
    }
    r->recorder = (qc_recorder){.ctx = r,
                                .journal = r->journal,
                                .begin = qc_resume_add_begin,
                                .job = add_job,
                                .unit = add_unit,
                                .shard = add_shard};
    p->recorder = &r->recorder;
    *out = r;
    return QC_OK;
failed:
    qc_resume_close(r);
    return st;
}

void qc_resume_close(qc_resume *r)
{
    if (!r)
        return;
    if (r->p->recorder == &r->recorder)
        r->p->recorder = NULL;
    qc_journal_close(r->journal);
    qc_strbuf_deinit(&r->identity);
    qc_arena_deinit(&r->arena);
    qc_free(r);
}

const qc_resume_found *qc_resume_found_of(const qc_resume *r)
{
    return &r->found;
}

int qc_resume_has_work(const qc_resume *r)
{
    return r->has_work || atomic_load(&r->recorded);
}

qc_status qc_resume_done(qc_resume *r, qc_error *err)
{
    if (r->found.done)
        return QC_OK;
    if (r->times_due)
        QC_TRY(qc_resume_add_times(r, err));
    QC_TRY(qc_journal_sync(r->journal, err));
    QC_TRY(qc_journal_append(r->journal, QC_RECORD_DONE, NULL, 0, err));
    r->found.done = 1;
    return qc_journal_sync(r->journal, err);
}

qc_status qc_resume_commit(qc_resume *r, const qc_digest *manifest, qc_error *err)
{
    QC_TRY(qc_journal_append(r->journal, QC_RECORD_COMMIT, manifest, QC_DIGEST_BYTES, err));
    return qc_journal_sync(r->journal, err);
}

/* ---- Times of the source, and the journals of other parts ---- */

/* Returns the first file of the source that has another time now, or the number of files. */
static size_t first_changed(const qc_resume *r, const uint64_t *times)
{
    size_t i = 0;
    while (i < r->p->plan->model->file_count && times[i] == r->times_now[i])
        i++;
    return i;
}

int qc_resume_is_done(const qc_resume *r)
{
    return r->found.done && r->has_times &&
           first_changed(r, r->times) == r->p->plan->model->file_count;
}

qc_status qc_resume_take_part(qc_resume *r, unsigned part_index, unsigned part_count,
                              int same_times, qc_resume_found *found, qc_error *err)
{
    const qc_checkpoint *m = r->p->plan->model;
    qc_resume other = {.p = r->p, .d = r->d, .identity = r->identity};
    memset(found, 0, sizeof *found);
    qc_arena_init(&other.arena);
    qc_status st =
        qc_resume_path(&other.arena, &other.path, r->d->staging, part_index, part_count, err);
    if (st == QC_OK)
        st = qc_arena_alloc(&other.arena, &other.times, m->file_count, sizeof *other.times, err);
    if (st == QC_OK)
        st = read_journal(other.path, qc_resume_take_record, &other, err);
    if (st == QC_OK && other.found.done && same_times && other.has_times) {
        const size_t changed = first_changed(r, other.times);
        if (changed < m->file_count)
            st = QC_ERROR(err, QC_ERR_INPUT,
                          "%s was modified since part %u read it; start part %u again, which "
                          "compares what it read with what is there now",
                          m->files[changed].path, part_index + 1, part_index + 1);
    }
    if (st == QC_OK)
        *found = other.found;
    qc_arena_deinit(&other.arena);
    return st;
}
