#include "convert/pipeline/syncer.h"

#include "base/alloc.h"
#include "convert/pipeline/pipeline_internal.h"

#include <time.h>

#define ROUND_MS 1000

struct qc_syncer {
    qc_pipeline *p;
    pthread_t thread;
    pthread_mutex_t lock; /* protects what follows; a leaf lock */
    pthread_cond_t told;
    int stop;   /* the thread is to end at once */
    int finish; /* the thread is to end after one more round */
    /* These belong to the thread, and to the caller after it has ended. */
    unsigned char *named; /* [shards]: the name of the file is on the disk */
    qc_status status;
    qc_error error;
};

/* The syncer uses a handle of its own, because the workers' handle of a complete shard may be
 * closed already (pipeline.c, OPEN_COMPLETE). */
static qc_status sync_shard(qc_syncer *s, uint32_t shard, qc_error *err)
{
    qc_pipeline *p = s->p;
    qc_shard_state *state = &p->shards[shard];
    qc_file f = QC_FILE_CLOSED;
    if (!atomic_exchange(&state->unsynced, 0))
        return QC_OK;
    int complete = atomic_exchange(&state->complete, 0);
    QC_TRY(qc_file_open_update(&f, state->path, err));
    qc_status st = qc_file_write_out(&f, err);
    if (st == QC_OK && !p->keep_cache)
        qc_file_hint_done(&f, 0, 0); /* bytes written since then stay */
    if (st == QC_OK)
        st = qc_file_close(&f, err);
    qc_file_discard(&f);
    if (st == QC_OK && complete)
        st = qc_shard_close(p, shard, err);
    if (st != QC_OK || s->named[shard])
        return st;
    s->named[shard] = 1;
    return qc_dir_sync(p->out->staging, err);
}

/* Waits for the next round, or until told. *last: this round is to be the last one. */
static int wait_for_round(qc_syncer *s, int *last)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ROUND_MS / 1000;
    pthread_mutex_lock(&s->lock);
    int r = 0;
    while (!s->stop && !s->finish && r == 0)
        r = pthread_cond_timedwait(&s->told, &s->lock, &until);
    int stop = s->stop;
    *last = s->finish;
    pthread_mutex_unlock(&s->lock);
    return stop;
}

static void *syncer_main(void *arg)
{
    qc_syncer *s = arg;
    qc_pipeline *p = s->p;
    int last = 0;
    while (!last && s->status == QC_OK && !wait_for_round(s, &last)) {
        for (uint32_t i = 0; s->status == QC_OK && i < p->plan->layout.count; i++)
            if (!p->shards[i].foreign)
                s->status = sync_shard(s, i, &s->error);
        if (s->status == QC_OK && p->recorder && p->recorder->journal)
            s->status = qc_journal_sync(p->recorder->journal, &s->error);
    }
    if (s->status != QC_OK)
        atomic_store(&p->halted, 1);
    return NULL;
}

static void destroy(qc_syncer *s)
{
    qc_lock_deinit(&s->lock, &s->told);
    qc_free(s->named);
    qc_free(s);
}

qc_status qc_syncer_start(qc_syncer **out, qc_pipeline *p, qc_error *err)
{
    qc_syncer *s = NULL;
    QC_TRY(qc_calloc(&s, 1, sizeof(qc_syncer), err));
    qc_status st = qc_calloc(&s->named, p->plan->layout.count, sizeof *s->named, err);
    s->p = p;
    if (st == QC_OK)
        st = qc_lock_init(&s->lock, &s->told, err);
    if (st != QC_OK) {
        qc_free(s->named);
        qc_free(s);
        return st;
    }
    st = qc_thread_start(&s->thread, syncer_main, s, "the thread that syncs files", err);
    if (st != QC_OK) {
        destroy(s);
        return st;
    }
    *out = s;
    return QC_OK;
}

qc_status qc_syncer_finish(qc_syncer *s, qc_status ended, qc_error *err)
{
    pthread_mutex_lock(&s->lock);
    s->stop = ended != QC_OK;
    s->finish = ended == QC_OK;
    pthread_cond_signal(&s->told);
    pthread_mutex_unlock(&s->lock);
    (void)pthread_join(s->thread, NULL);
    qc_status st = ended;
    if (s->status != QC_OK && (ended == QC_OK || ended == QC_ERR_INTERRUPTED)) {
        st = s->status;
        if (err)
            *err = s->error;
    }
    destroy(s);
    return st;
}
