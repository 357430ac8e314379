#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/hardware/host_facts.h"
#include "convert/model/awq_layout.h"
#include "convert/pipeline/syncer.h"

#include <inttypes.h>
#include <string.h>

/* This is a target for the whole process, of which the buffers of the workers take most. */
#define MEMORY_TARGET_BYTES (400u << 20)
#define PIECE_TARGET_BYTES  (8u << 20)

/* The files of a conversion may fill one part in so many of free memory. */
#define CACHE_SHARE 4u
/* Source bytes that are on their way to the team, beyond what it reads just now. */
#define READ_AHEAD_BYTES (64u << 20)

/* This many complete shards stay open until the syncer has been there, because the kernel forgets
 * that a page could not be written when nobody has the file open. Where one round has more of them,
 * they are small. */
#define OPEN_COMPLETE 8u

unsigned qc_pipeline_default_threads(int level)
{
    size_t each = QC_SOURCE_STEP_BYTES + PIECE_TARGET_BYTES + qc_frame_bound(PIECE_TARGET_BYTES) +
                  qc_frame_coder_bytes(level, PIECE_TARGET_BYTES);
    size_t fit = MEMORY_TARGET_BYTES / each;
    unsigned cpus = qc_cpu_count();
    return fit == 0 ? 1 : cpus < fit ? cpus : (unsigned)fit;
}

/* ---- Shards --------------------------------------------------------------------------------- */

/* The worker that first writes to a staged file opens it, the worker that records its last frame
 * completes it with a seek table, and it is closed once it is on the disk. */

static qc_status open_shard(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_shard_state *s = &p->shards[shard];
    qc_status st = QC_OK;
    pthread_mutex_lock(&p->shard_lock);
    if (s->file.fd < 0)
        st = qc_file_open_update(&s->file, s->path, err);
    pthread_mutex_unlock(&p->shard_lock);
    return st;
}

static qc_status write_table(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_shard_state *s = &p->shards[shard];
    qc_strbuf table;
    qc_strbuf_init(&table, SIZE_MAX / 2);
    qc_frame *frames = NULL;
    QC_TRY(qc_calloc(&frames, s->unit_count, sizeof(qc_frame), err));
    uint64_t content = 0;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        const qc_unit *u = &p->units[s->first_unit + i];
        frames[i] = (qc_frame){u->file_offset, content, u->stored_bytes, u->content_bytes};
        content += u->content_bytes;
    }
    qc_status st = qc_seek_table_build(&table, frames, s->unit_count, err);
    if (st == QC_OK)
        st = qc_file_pwrite(&s->file, table.data, table.len, s->next_offset, err);
    if (st == QC_OK) {
        s->table = qc_digest_bytes(table.data, table.len);
        s->table_bytes = table.len;
        s->file_bytes = s->next_offset + table.len;
    }
    qc_strbuf_deinit(&table);
    qc_free(frames);
    return st;
}

static qc_status finish_shard(qc_pipeline *p, uint32_t shard, qc_error *err)
{
    qc_shard_state *s = &p->shards[shard];
    const qc_shard *sh = &p->plan->layout.shards[shard];
    s->file_bytes = sh->header_bytes + sh->data_bytes;
    QC_TRY(open_shard(p, shard, err));
    if (qc_pipeline_is_compressed(p))
        QC_TRY(write_table(p, shard, err));
    QC_TRY(
        qc_file_resize(&s->file, s->file_bytes, err)); /* an earlier run may have written further */
    if (p->recorder)
        QC_TRY(p->recorder->shard(p->recorder->ctx, shard, err));
    if (atomic_fetch_add(&p->waiting, 1) >= OPEN_COMPLETE)
        QC_TRY(qc_shard_close(p, shard, err));
    else
        atomic_store(&s->complete, 1);
    atomic_store(&s->unsynced, 1);
    return QC_OK;
}

static qc_status write_unit(qc_pipeline *p, qc_unit *u, const void *stored, qc_error *err)
{
    qc_shard_state *s = &p->shards[u->shard];
    QC_TRY(open_shard(p, u->shard, err));
    QC_TRY(qc_file_pwrite(&s->file, stored, u->stored_bytes, u->file_offset, err));
    qc_file_hint_write_back(&s->file, u->file_offset, u->stored_bytes);
    u->written = 1;
    atomic_store(&s->unsynced, 1);
    return QC_OK;
}

/* `count` more units of a shard are written, and recorded if anything is recorded. */
static qc_status count_units(qc_pipeline *p, uint32_t shard, uint32_t count, qc_error *err)
{
    if (count > 0 && atomic_fetch_sub(&p->shards[shard].left, count) == count)
        return finish_shard(p, shard, err);
    return QC_OK;
}

/* Records a unit that is not finished together with its job. */
static qc_status record_unit(qc_pipeline *p, const qc_unit *u, qc_error *err)
{
    if (p->recorder)
        QC_TRY(p->recorder->unit(p->recorder->ctx, u->index, err));
    return count_units(p, u->shard, 1, err);
}

/* ---- Work ----------------------------------------------------------------------------------- */

/* Goes on from unit `next`: steps over units that are kept or not ours, gives the deferred units
 * their places, and stops at the first whose place depends on its worker. */
static qc_status step_over(qc_pipeline *p, uint32_t *next, qc_error *err)
{
    for (; *next < p->unit_count; ++*next) {
        qc_unit *u = &p->units[*next];
        qc_shard_state *s = &p->shards[u->shard];
        if (s->foreign)
            continue;
        if (u->kept && u->file_offset != s->next_offset) {
            atomic_store(&p->misfit, 1);
            QC_FAIL(err, QC_ERR_CHECK,
                    "%s: a frame of the interrupted conversion lies at %" PRIu64
                    ", where this one comes to %" PRIu64 QC_RESTART_ADVICE,
                    s->path, u->file_offset, s->next_offset);
        }
        if (!u->kept && u->kind != QC_UNIT_DEFERRED)
            break;
        u->file_offset = s->next_offset;
        s->next_offset += u->stored_bytes;
    }
    return QC_OK;
}

/* Compresses, places and writes the unit, whose content is at `content`. */
static qc_status commit_unit(qc_worker *w, qc_unit *u, const void *content, qc_error *err)
{
    qc_pipeline *p = w->p;
    if (!qc_pipeline_is_compressed(p)) {
        u->file_offset = qc_unit_plain_place(p, u);
        return write_unit(p, u, content, err);
    }
    size_t len = 0;
    if (u->kind == QC_UNIT_DEFERRED) {
        qc_raw_frame_write(w->stored, content, u->content_bytes);
        len = u->stored_bytes;
    } else {
        QC_TRY(qc_frame_encode(w->coder, p->plan->options->compress_level, content,
                               u->content_bytes, w->stored, qc_frame_bound(u->content_bytes), &len,
                               err));
        u->stored_bytes = (uint32_t)len;
        /* The units behind it get their places, too, as far as they are known. */
        uint32_t next = u->index + 1;
        QC_TRY(qc_turnstile_wait(&p->turnstile, u->index, w->team, err));
        u->file_offset = p->shards[u->shard].next_offset;
        p->shards[u->shard].next_offset += u->stored_bytes;
        QC_TRY(step_over(p, &next, err));
        qc_turnstile_pass(&p->turnstile, next);
    }
    u->stored = qc_digest_bytes(w->stored, len);
    return write_unit(p, u, w->stored, err);
}

static qc_status commit_derived(qc_worker *w, qc_unit *u, qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_output *o = &p->plan->outputs[u->tensor];
    const unsigned char *content =
        (const unsigned char *)qc_job_role_tensor(p, o->job, o->role) + u->content_offset;
    if (o->role == QC_ROLE_TENSOR_ZEROS)
        content = memset(w->content, QC_AWQ_ZEROS, u->content_bytes);
    u->content = qc_digest_bytes(content, u->content_bytes);
    return commit_unit(w, u, content, err);
}

/* Finishes a job whose last main unit is written. */
static qc_status finish_job(qc_worker *w, uint32_t job, qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    qc_job_state *s = &p->jobs[job];
    uint32_t count = qc_unit_count(p, j->first_output);
    QC_TRY(qc_job_finish(w, err));
    for (uint32_t t = j->first_output + 1; t < j->first_output + qc_job_output_count(j); t++) {
        qc_unit *units = &p->units[p->first_unit[t]];
        const uint32_t deferred = units->kind == QC_UNIT_DEFERRED ? qc_unit_count(p, t) : 0;
        for (uint32_t i = 0; i < deferred; i++)
            QC_TRY(commit_derived(w, &units[i], err));
        count += deferred;
    }
    QC_TRY(qc_source_files_look(p->plan, job, err));
    if (p->recorder) {
        QC_TRY(p->recorder->job(p->recorder->ctx, job, err));
        atomic_store(&s->recorded, 1);
    }
    QC_TRY(count_units(p, p->units[p->first_unit[j->first_output]].shard, count, err));
    if (atomic_load(&s->derived_left) == 0)
        qc_job_release(s);
    else
        qc_job_trim(p, job);
    pthread_mutex_lock(&p->finish_lock);
    s->finished = 1;
    pthread_cond_broadcast(&p->finish_cond);
    pthread_mutex_unlock(&p->finish_lock);
    return QC_OK;
}

static qc_status do_header(qc_worker *w, qc_unit *u, qc_error *err)
{
    const qc_plan *plan = w->p->plan;
    qc_strbuf text;
    qc_strbuf_init(&text, (size_t)QC_ST_MAX_HEADER_BYTES + 16);
    qc_status st = qc_layout_header(&text, &plan->layout, u->shard, qc_plan_tensors(plan), err);
    if (st == QC_OK) {
        const char *content = text.data + u->content_offset;
        u->content = qc_digest_bytes(content, u->content_bytes);
        st = commit_unit(w, u, content, err);
    }
    qc_strbuf_deinit(&text);
    return st == QC_OK ? record_unit(w->p, u, err) : st;
}

/* Records that work on the job begins, so that a run that goes on after this one can tell what is
 * done again. */
static qc_status record_begin(qc_pipeline *p, uint32_t job, qc_error *err)
{
    qc_job_state *s = &p->jobs[job];
    if (!p->recorder)
        return QC_OK;
    pthread_mutex_lock(&p->finish_lock);
    int begun = s->begun;
    s->begun = 1;
    pthread_mutex_unlock(&p->finish_lock);
    return begun ? QC_OK : p->recorder->begin(p->recorder->ctx, job, err);
}

/* A frame that was recorded and then lost must come out as it was, because the frames beside it
 * were made of that source. */
static qc_status check_again(qc_pipeline *p, const qc_unit *then, const qc_unit *now, qc_error *err)
{
    if (qc_digest_equal(&then->source, &now->source) &&
        qc_digest_equal(&then->content, &now->content))
        return QC_OK;
    const qc_job *j = &p->plan->jobs[p->plan->outputs[now->tensor].job];
    atomic_store(&p->misfit, 1);
    QC_FAIL(err, QC_ERR_INPUT,
            "%s: tensor '%s' was made again and is not what it was in the conversion that %s "
            "holds: the file has changed since, or this machine computes wrongly" QC_RESTART_ADVICE,
            p->plan->model->files[p->plan->model->tensors[j->source].file].path, j->name,
            p->out->path);
}

static void begin_item(qc_worker *w, uint32_t item)
{
    qc_read_ahead *reads = &w->p->reads;
    qc_read_range r;
    qc_read_ahead_take(reads, item);
    if (qc_read_ahead_is_direct(reads, item, &r) &&
        !qc_direct_begin(w->direct, r.file, r.offset, r.bytes))
        qc_read_ahead_no_direct(reads, item);
}

/* Takes the next unit already, so that the device reads on while the caller compresses and writes
 * this one. Only a main unit is taken early: a derived one may lie before the unit with which the
 * caller is about to wait at the turnstile, and the caller would wait for itself. */
static void take_early(qc_worker *w)
{
    qc_pipeline *p = w->p;
    uint_fast32_t item = atomic_load(&p->next_dispatch);
    if (item >= p->dispatch_count || p->units[p->dispatch[item]].kind != QC_UNIT_MAIN ||
        !atomic_compare_exchange_strong(&p->next_dispatch, &item, item + 1))
        return;
    w->early = (uint32_t)item;
    begin_item(w, w->early);
}

/* *item is the number of what the worker is to do. Returns 0 where nothing is left. */
static int take(qc_worker *w, uint32_t *item)
{
    *item = w->early;
    w->early = QC_NO_ITEM;
    if (*item != QC_NO_ITEM)
        return 1;
    *item = (uint32_t)atomic_fetch_add(&w->p->next_dispatch, 1);
    if (*item >= w->p->dispatch_count)
        return 0;
    begin_item(w, *item);
    return 1;
}

/* Returns the number of source bytes from which the first n content bytes of a main tensor come, as
 * they lie in the file, without absorbed_bytes. For all content bytes it is exactly all source
 * bytes. */
static uint64_t source_share(const qc_job *j, uint64_t n)
{
    const uint64_t share = qc_min_u64(qc_job_source_bytes(j, n), j->source_bytes);
    if (j->entry->coded || j->entry->stored)
        return share;
    return share * qc_dtype_bits(j->model_dtype) / qc_dtype_bits(j->dtype);
}

static qc_status do_main(qc_worker *w, qc_unit *u, uint32_t item, qc_error *err)
{
    qc_pipeline *p = w->p;
    uint32_t job = p->plan->outputs[u->tensor].job;
    const qc_job *j = &p->plan->jobs[job];
    const qc_unit then = *u;
    QC_TRY(record_begin(p, job, err));
    QC_TRY(qc_unit_make(w, u, err));
    if (u->recorded)
        QC_TRY(check_again(p, &then, u, err));
    qc_read_ahead_done(&p->reads, item);
    if (w->direct)
        qc_direct_end(w->direct);
    take_early(w);
    QC_TRY(commit_unit(w, u, w->content, err));
    if (p->progress)
        p->progress(p->progress_ctx, source_share(j, u->content_offset + u->content_bytes) -
                                         source_share(j, u->content_offset));
    if (atomic_fetch_sub(&p->jobs[job].left, 1) != 1)
        return QC_OK;
    if (p->progress)
        p->progress(p->progress_ctx, j->absorbed_bytes);
    return finish_job(w, job, err);
}

static qc_status do_derived(qc_worker *w, qc_unit *u, qc_error *err)
{
    qc_pipeline *p = w->p;
    qc_job_state *s = &p->jobs[p->plan->outputs[u->tensor].job];
    QC_TRY(qc_worker_wait(w, &s->finished, err));
    QC_TRY(commit_derived(w, u, err));
    QC_TRY(record_unit(p, u, err));
    if (atomic_fetch_sub(&s->derived_left, 1) == 1)
        qc_job_release(s);
    return QC_OK;
}

/* Tells what the unit that is dispatched as number `item` reads of the source. A weight that is
 * turned is read over and over, in no order that would help, so nothing is told of it. */
static qc_read_range source_range(void *ctx, uint32_t item)
{
    const qc_pipeline *p = ctx;
    qc_read_range r = {0};
    const qc_unit *u = &p->units[p->dispatch[item]];
    if (u->kind != QC_UNIT_MAIN)
        return r;
    const qc_checkpoint *m = p->plan->model;
    r.group = p->plan->outputs[u->tensor].job;
    const qc_job *j = &p->plan->jobs[r.group];
    const qc_checkpoint_tensor *t = &m->tensors[j->source];
    const qc_coded_weight *coded = j->entry->coded;
    if (j->entry->transpose || j->by_groups ||
        (coded && (coded->coding == QC_CODING_GPTQ || coded->coding == QC_CODING_AWQ)))
        return r;
    const uint64_t at = qc_job_source_bytes(j, u->content_offset);
    qc_checkpoint_stored_range(m, t, at,
                               qc_job_source_bytes(j, u->content_offset + u->content_bytes) - at,
                               &r.file, &r.offset, &r.bytes);
    return r;
}

static qc_status run_worker(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    qc_pipeline *p = ctx;
    qc_worker w;
    qc_status st = qc_worker_init(&w, p, team, err);
    if (st == QC_OK)
        st = qc_worker_take_gpu(&w, index, err);
    while (st == QC_OK) {
        st = qc_worker_look_up(&w, err);
        if (st != QC_OK)
            break;
        uint32_t i;
        if (!take(&w, &i))
            break;
        qc_unit *unit = &p->units[p->dispatch[i]];
        switch ((qc_unit_kind)unit->kind) {
        case QC_UNIT_HEADER:
            st = do_header(&w, unit, err);
            break;
        case QC_UNIT_MAIN:
            st = do_main(&w, unit, i, err);
            break;
        case QC_UNIT_DERIVED:
            st = do_derived(&w, unit, err);
            break;
        case QC_UNIT_DEFERRED:
            st = QC_ERROR(err, QC_ERR_INTERNAL, "a deferred unit was dispatched");
            break;
        }
    }
    qc_worker_deinit(&w);
    return st;
}

qc_status qc_pipeline_init(qc_pipeline *p, const qc_plan *plan, qc_output_dir *out, qc_isa isa,
                           unsigned threads, qc_error *err)
{
    memset(p, 0, sizeof *p);
    p->plan = plan;
    p->ops = qc_quant_ops_for(isa);
    p->search = qc_search_ops_for(isa);
    p->out = out;
    p->threads = threads;
    atomic_init(&p->gpu_elems, 0);
    atomic_init(&p->misfit, 0);
    atomic_init(&p->waiting, 0);
    atomic_flag_clear(&p->gpu_told);
    atomic_init(&p->halted, 0);
    QC_TRY(qc_calloc(&p->jobs, plan->job_count, sizeof *p->jobs, err));
    QC_TRY(qc_calloc(&p->shards, plan->layout.count, sizeof *p->shards, err));
    for (uint32_t i = 0; i < plan->layout.count; i++)
        p->shards[i].file = QC_FILE_CLOSED;
    for (uint32_t i = 0; i < plan->layout.count; i++) {
        const char *name = plan->layout.shards[i].name;
        if (qc_pipeline_is_compressed(p))
            QC_TRY(qc_arena_printf(out->arena, &name, err, "%s.zst", name));
        QC_TRY(qc_output_dir_stage(out, name, &p->shards[i].path, err));
    }
    /* The files of a large conversion would push out what other programs keep in free memory, and
     * would be gone themselves before anybody reads them again. */
    qc_host_facts host;
    QC_TRY(qc_host_read(&host, p->out->arena, "", err));
    p->keep_cache = plan->source_bytes + plan->content_bytes < host.memory_free_bytes / CACHE_SHARE;
    QC_TRY(qc_units_make(p, err));
    if (qc_pipeline_is_compressed(p)) {
        QC_TRY(qc_turnstile_init(&p->turnstile, 0, err));
        p->have_turnstile = 1;
    }
    QC_TRY(qc_lock_init(&p->shard_lock, NULL, err));
    QC_TRY(qc_lock_init(&p->finish_lock, &p->finish_cond, err));
    p->have_locks = 1;
    return QC_OK;
}

/* Counts what is left to do, now that it is known what is kept. */
static qc_status count_what_is_left(qc_pipeline *p, qc_error *err)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < p->plan->layout.count; i++) {
        qc_shard_state *s = &p->shards[i];
        uint32_t kept = 0;
        s->next_offset = 0;
        for (uint32_t k = 0; k < s->unit_count; k++)
            kept += p->units[s->first_unit + k].kept != 0;
        atomic_store(&s->left, s->unit_count - kept);
        atomic_store(&s->unsynced, kept > 0 && !s->foreign); /* maybe in the page cache only */
    }
    if (qc_pipeline_is_compressed(p)) {
        QC_TRY(step_over(p, &next, err));
        qc_turnstile_pass(&p->turnstile, next);
    }
    for (uint32_t i = 0; i < p->plan->layout.count; i++) {
        qc_shard_state *s = &p->shards[i];
        if (s->foreign || s->kept || atomic_load(&s->left) > 0)
            continue;
        /* The table comes behind the shard's last frame. The turnstile may not have come here yet;
         * when it does, it steps over the shard from its beginning. */
        uint64_t come = s->next_offset;
        const qc_unit *last = &p->units[s->first_unit + s->unit_count - 1];
        s->next_offset = last->file_offset + last->stored_bytes;
        QC_TRY(finish_shard(p, i, err));
        s->next_offset = come;
    }
    return qc_units_dispatch(p, err);
}

qc_status qc_pipeline_run(qc_pipeline *p, qc_error *err)
{
    for (uint32_t i = 0; p->progress && i < p->plan->job_count; i++) {
        const qc_job *j = &p->plan->jobs[i];
        if (qc_unit_count(p, j->first_output) == 0)
            p->progress(p->progress_ctx, j->absorbed_bytes); /* an empty weight has no work */
    }
    QC_TRY(count_what_is_left(p, err));
    QC_TRY(qc_read_ahead_init(&p->reads, p->dispatch_count, source_range, p, READ_AHEAD_BYTES,
                              !p->keep_cache, 1, err));
    QC_TRY(qc_syncer_start(&p->syncer, p, err));
    qc_status st = qc_team_run(p->threads, run_worker, p, err);
    return qc_syncer_finish(p->syncer, st, err);
}

void qc_pipeline_deinit(qc_pipeline *p)
{
    if (p->jobs) {
        for (uint32_t i = 0; i < p->plan->job_count; i++)
            qc_job_release(&p->jobs[i]);
    }
    if (p->shards) {
        for (uint32_t i = 0; i < p->plan->layout.count; i++)
            qc_file_discard(&p->shards[i].file);
    }
    qc_read_ahead_deinit(&p->reads);
    if (p->have_turnstile)
        qc_turnstile_deinit(&p->turnstile);
    if (p->have_locks) {
        qc_lock_deinit(&p->finish_lock, &p->finish_cond);
        qc_lock_deinit(&p->shard_lock, NULL);
    }
    qc_free(p->jobs);
    qc_free(p->shards);
    qc_free(p->units);
    qc_free(p->first_unit);
    qc_free(p->dispatch);
    memset(p, 0, sizeof *p);
}
