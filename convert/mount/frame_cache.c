#include "convert/mount/frame_cache.h"

#include "base/alloc.h"
#include "base/workers.h"

#include <pthread.h>
#include <signal.h>

#define ALIGN_BYTES 4096u
#define WANTED_MOST 64u
#define NO_FRAME    SIZE_MAX

typedef struct {
    void *bytes;        /* NULL until it is first used */
    size_t frame;       /* or NO_FRAME */
    unsigned pins;      /* whoever makes it has one, too */
    int made;           /* else it is in the making */
    uint64_t last_used; /* by the counter `uses` */
} slot;

struct qc_frame_cache {
    qc_frame_cache_options o;
    pthread_mutex_t lock;   /* protects all that follows; nothing else is locked under it */
    pthread_cond_t changed; /* a frame was made or let go */
    pthread_cond_t work;    /* a frame is wanted, or `stop` is set */
    slot *slots;
    uint32_t *slot_of; /* per frame: its slot + 1; 0: it has none */
    uint64_t uses;
    qc_frame_tools *tools; /* the first free_tools are free */
    unsigned free_tools;
    size_t wanted[WANTED_MOST]; /* a ring */
    size_t wanted_first, wanted_count;
    int stop;
    pthread_t *team;
    unsigned started;
};

/* Of the slots that nobody has pinned, the one that was used the longest ago; NULL: all are. */
static slot *free_slot(qc_frame_cache *c)
{
    slot *best = NULL;
    for (size_t i = 0; i < c->o.slots; i++) {
        slot *s = &c->slots[i];
        if (s->pins == 0 && (!best || s->last_used < best->last_used))
            best = s;
    }
    return best;
}

/* Called and left with the lock held, which is open while the frame is made. */
static qc_status make(qc_frame_cache *c, slot *s, size_t frame, qc_error *err)
{
    if (s->frame != NO_FRAME)
        c->slot_of[s->frame] = 0;
    s->frame = frame;
    s->pins = 1;
    s->made = 0;
    c->slot_of[frame] = (uint32_t)(s - c->slots) + 1;
    while (c->free_tools == 0)
        pthread_cond_wait(&c->changed, &c->lock);
    qc_frame_tools tools = c->tools[--c->free_tools];
    pthread_mutex_unlock(&c->lock);
    qc_status st =
        s->bytes ? QC_OK : qc_malloc_aligned(&s->bytes, ALIGN_BYTES, c->o.frame_bytes, err);
    if (st == QC_OK)
        st = c->o.make(c->o.ctx, frame, &tools, s->bytes, err);
    pthread_mutex_lock(&c->lock);
    c->tools[c->free_tools++] = tools;
    s->made = st == QC_OK;
    if (st != QC_OK) {
        c->slot_of[frame] = 0;
        s->frame = NO_FRAME;
        s->pins = 0;
        s->last_used = 0;
    }
    pthread_cond_broadcast(&c->changed);
    return st;
}

qc_status qc_frame_cache_pin(qc_frame_cache *c, size_t frame, const unsigned char **bytes,
                             qc_error *err)
{
    qc_status st = QC_OK;
    slot *s = NULL;
    pthread_mutex_lock(&c->lock);
    while (!s) {
        if (c->slot_of[frame] == 0) {
            s = free_slot(c);
            if (s)
                st = make(c, s, frame, err);
        } else if (c->slots[c->slot_of[frame] - 1].made) {
            s = &c->slots[c->slot_of[frame] - 1];
            s->pins++;
        }
        if (!s)
            pthread_cond_wait(&c->changed, &c->lock);
    }
    if (st == QC_OK) {
        s->last_used = ++c->uses;
        *bytes = s->bytes;
    }
    pthread_mutex_unlock(&c->lock);
    return st;
}

void qc_frame_cache_unpin(qc_frame_cache *c, size_t frame)
{
    pthread_mutex_lock(&c->lock);
    slot *s = &c->slots[c->slot_of[frame] - 1];
    if (--s->pins == 0)
        pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

void qc_frame_cache_want(qc_frame_cache *c, size_t frame)
{
    pthread_mutex_lock(&c->lock);
    int there = c->slot_of[frame] != 0 || c->wanted_count == WANTED_MOST;
    for (size_t i = 0; i < c->wanted_count && !there; i++)
        there = c->wanted[(c->wanted_first + i) % WANTED_MOST] == frame;
    if (!there) {
        c->wanted[(c->wanted_first + c->wanted_count++) % WANTED_MOST] = frame;
        pthread_cond_signal(&c->work);
    }
    pthread_mutex_unlock(&c->lock);
}

static void *make_wanted(void *arg)
{
    qc_frame_cache *c = arg;
    const unsigned char *bytes = NULL;
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (!c->stop && c->wanted_count == 0)
            pthread_cond_wait(&c->work, &c->lock);
        if (c->stop)
            break;
        size_t frame = c->wanted[c->wanted_first];
        c->wanted_first = (c->wanted_first + 1) % WANTED_MOST;
        c->wanted_count--;
        if (c->slot_of[frame] != 0)
            continue;
        pthread_mutex_unlock(&c->lock);
        if (qc_frame_cache_pin(c, frame, &bytes, NULL) == QC_OK)
            qc_frame_cache_unpin(c, frame);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Signals are for the threads of the program. */
static qc_status start_team(qc_frame_cache *c, qc_error *err)
{
    sigset_t all, before;
    qc_status st = QC_OK;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    while (st == QC_OK && c->started < c->o.threads) {
        st =
            qc_thread_start(&c->team[c->started], make_wanted, c, "a thread that reads ahead", err);
        c->started += st == QC_OK;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return st;
}

static qc_status init(qc_frame_cache *c, qc_error *err)
{
    QC_TRY(qc_calloc(&c->slots, c->o.slots, sizeof *c->slots, err));
    for (size_t i = 0; i < c->o.slots; i++)
        c->slots[i].frame = NO_FRAME;
    QC_TRY(qc_calloc(&c->slot_of, c->o.frame_count, sizeof *c->slot_of, err));
    QC_TRY(qc_calloc(&c->team, c->o.threads, sizeof *c->team, err));
    QC_TRY(qc_calloc(&c->tools, c->o.threads, sizeof *c->tools, err));
    while (c->free_tools < c->o.threads) {
        qc_frame_tools *t = &c->tools[c->free_tools++];
        QC_TRY(qc_frame_coder_create(&t->coder, err));
        QC_TRY(qc_malloc_aligned(&t->stored, ALIGN_BYTES, c->o.stored_bytes, err));
    }
    return start_team(c, err);
}

qc_status qc_frame_cache_create(qc_frame_cache **out, const qc_frame_cache_options *o,
                                qc_error *err)
{
    qc_frame_cache *c = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof *c, err));
    c->o = *o;
    if (pthread_mutex_init(&c->lock, NULL) != 0 || pthread_cond_init(&c->changed, NULL) != 0 ||
        pthread_cond_init(&c->work, NULL) != 0) {
        qc_free(c); /* on Linux none of them can fail */
        QC_FAIL(err, QC_ERR_NOMEM, "a mutex could not be made");
    }
    qc_status st = init(c, err);
    if (st != QC_OK) {
        qc_frame_cache_destroy(c);
        return st;
    }
    *out = c;
    return QC_OK;
}

void qc_frame_cache_destroy(qc_frame_cache *c)
{
    if (!c)
        return;
    pthread_mutex_lock(&c->lock);
    c->stop = 1;
    pthread_cond_broadcast(&c->work);
    pthread_mutex_unlock(&c->lock);
    for (unsigned i = 0; i < c->started; i++)
        (void)pthread_join(c->team[i], NULL);
    for (unsigned i = 0; i < c->free_tools; i++) {
        qc_frame_coder_destroy(c->tools[i].coder);
        qc_free(c->tools[i].stored);
    }
    for (size_t i = 0; c->slots && i < c->o.slots; i++)
        qc_free(c->slots[i].bytes);
    qc_free(c->tools);
    qc_free(c->team);
    qc_free(c->slot_of);
    qc_free(c->slots);
    pthread_cond_destroy(&c->work);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    qc_free(c);
}
