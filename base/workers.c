#include "base/workers.h"

#include "base/alloc.h"
#include "base/cpu.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define BRIEFLY_NS        50000000L
#define SECOND_NS         1000000000L
#define STACK_LEAST_BYTES ((size_t)2 << 20)

qc_status qc_thread_start(pthread_t *thread, void *(*fn)(void *), void *arg, const char *what,
                          qc_error *err)
{
    pthread_attr_t attr;
    size_t stack = 0;
    int e = pthread_attr_init(&attr);
    if (e == 0) {
        e = pthread_attr_getstacksize(&attr, &stack);
        if (e == 0 && stack < STACK_LEAST_BYTES)
            e = pthread_attr_setstacksize(&attr, STACK_LEAST_BYTES);
        if (e == 0)
            e = pthread_create(thread, &attr, fn, arg);
        (void)pthread_attr_destroy(&attr);
    }
    if (e != 0)
        QC_FAIL(err, QC_ERR_NOMEM,
                "%s could not be started: %s (the limit on processes or on memory leaves no room "
                "for it; raise 'ulimit -u' or 'ulimit -v')",
                what, strerror(e));
    return QC_OK;
}

qc_status qc_threads_wanted(unsigned *threads, qc_error *err)
{
    if (*threads > QC_THREADS_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "%u threads; expected 1 to %u, or 0 for one per processor",
                *threads, QC_THREADS_MAX);
    if (*threads == 0)
        *threads = qc_cpu_count() < QC_THREADS_MAX ? qc_cpu_count() : QC_THREADS_MAX;
    return QC_OK;
}

struct qc_team {
    atomic_int stop;
    pthread_mutex_t lock; /* protects first and first_status; a leaf lock */
    qc_status first_status;
    qc_error first;
    qc_worker_fn fn;
    void *ctx;
};

typedef struct {
    qc_team *team;
    unsigned index;
    pthread_t thread;
} team_member;

static atomic_int interrupt_flag;

void qc_interrupt(void)
{
    atomic_store(&interrupt_flag, 1);
}

int qc_interrupted(void)
{
    return atomic_load_explicit(&interrupt_flag, memory_order_relaxed);
}

qc_status qc_check_interrupted(qc_error *err)
{
    return qc_interrupted() ? QC_ERROR(err, QC_ERR_INTERRUPTED, "interrupted") : QC_OK;
}

void qc_interrupt_clear(void)
{
    atomic_store(&interrupt_flag, 0);
}

int qc_team_stopped(const qc_team *team)
{
    return qc_interrupted() || atomic_load_explicit(&team->stop, memory_order_relaxed);
}

qc_status qc_check_stopped(const qc_team *team, qc_error *err)
{
    return qc_team_stopped(team) ? QC_ERROR(err, QC_ERR_INTERRUPTED, "interrupted") : QC_OK;
}

static void *member_main(void *arg)
{
    team_member *m = arg;
    qc_team *t = m->team;
    qc_error err = {0};
    qc_status st = t->fn(t, m->index, t->ctx, &err);
    if (st != QC_OK) {
        pthread_mutex_lock(&t->lock);
        if (t->first_status == QC_OK ||
            (t->first_status == QC_ERR_INTERRUPTED && st != QC_ERR_INTERRUPTED)) {
            t->first_status = st;
            t->first = err;
        }
        pthread_mutex_unlock(&t->lock);
        atomic_store(&t->stop, 1);
    }
    return NULL;
}

qc_status qc_team_run(unsigned threads, qc_worker_fn fn, void *ctx, qc_error *err)
{
    qc_team team = {.fn = fn, .ctx = ctx, .first_status = QC_OK};
    team_member *members = NULL;
    QC_TRY(qc_calloc(&members, threads, sizeof *members, err));
    unsigned started = 1;
    qc_status created = qc_lock_init(&team.lock, NULL, err);
    if (created != QC_OK) {
        qc_free(members);
        return created;
    }
    for (unsigned i = 0; i < threads; i++) {
        members[i].team = &team;
        members[i].index = i;
    }
    for (; started < threads; started++) {
        char what[64];
        (void)snprintf(what, sizeof what, "thread %u of %u", started + 1, threads);
        created =
            qc_thread_start(&members[started].thread, member_main, &members[started], what, err);
        if (created != QC_OK)
            break;
    }
    if (created != QC_OK)
        atomic_store(&team.stop, 1);
    else
        (void)member_main(&members[0]);
    for (unsigned i = 1; i < started; i++)
        (void)pthread_join(members[i].thread, NULL);
    pthread_mutex_destroy(&team.lock);
    qc_free(members);
    QC_TRY(created);
    if (team.first_status == QC_ERR_INTERRUPTED)
        QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
    if (team.first_status != QC_OK && err)
        *err = team.first;
    return team.first_status;
}

qc_status qc_lock_init(pthread_mutex_t *lock, pthread_cond_t *cond, qc_error *err)
{
    pthread_condattr_t attr;
    if (pthread_mutex_init(lock, NULL) != 0)
        QC_FAIL(err, QC_ERR_NOMEM, "a mutex could not be made");
    int e = cond ? pthread_condattr_init(&attr) : 0;
    if (cond && e == 0) {
        e = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        if (e == 0)
            e = pthread_cond_init(cond, &attr);
        (void)pthread_condattr_destroy(&attr);
    }
    if (e == 0)
        return QC_OK;
    pthread_mutex_destroy(lock);
    QC_FAIL(err, QC_ERR_NOMEM, "a condition variable could not be made");
}

void qc_lock_deinit(pthread_mutex_t *lock, pthread_cond_t *cond)
{
    if (cond)
        pthread_cond_destroy(cond);
    pthread_mutex_destroy(lock);
}

void qc_cond_wait_briefly(pthread_cond_t *cond, pthread_mutex_t *lock)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += BRIEFLY_NS;
    if (until.tv_nsec >= SECOND_NS) {
        until.tv_nsec -= SECOND_NS;
        until.tv_sec++;
    }
    (void)pthread_cond_timedwait(cond, lock, &until);
}

qc_status qc_turnstile_init(qc_turnstile *t, uint64_t first, qc_error *err)
{
    t->next = first;
    return qc_lock_init(&t->lock, &t->moved, err);
}

void qc_turnstile_deinit(qc_turnstile *t)
{
    pthread_cond_destroy(&t->moved);
    pthread_mutex_destroy(&t->lock);
}

qc_status qc_turnstile_wait(qc_turnstile *t, uint64_t turn, const qc_team *team, qc_error *err)
{
    qc_status st = QC_OK;
    pthread_mutex_lock(&t->lock);
    while (t->next != turn && st == QC_OK) {
        st = qc_check_stopped(team, err);
        if (st == QC_OK)
            qc_cond_wait_briefly(&t->moved, &t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return st;
}

void qc_turnstile_pass(qc_turnstile *t, uint64_t next)
{
    pthread_mutex_lock(&t->lock);
    t->next = next;
    pthread_cond_broadcast(&t->moved);
    pthread_mutex_unlock(&t->lock);
}
