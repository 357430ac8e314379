/* Threads: a single one, and a team of them that all run one function to its end.
 *
 * The team shares a stop flag: the first worker that fails stores its error, and all others see
 * qc_team_stopped() and return early. The caller's thread takes part as worker 0, so with one
 * thread no thread is created at all.
 *
 * Also here: the interrupt flag (base/interrupt.h), which a signal handler sets and every loop
 * looks at, and a turnstile that lets numbered work pass in order. */
#ifndef QC_BASE_WORKERS_H
#define QC_BASE_WORKERS_H

#include "base/interrupt.h"
#include "base/status.h"

#include <pthread.h>
#include <stdatomic.h>

/* Starts a thread with a stack of 2 MiB, however small the system's limit is (ulimit -s). A
 * failure's message begins with `what`, like "thread 2 of 8". It is QC_ERR_NOMEM, because the
 * system then has reached its limit of processes or memory. */
QC_NODISCARD qc_status qc_thread_start(pthread_t *thread, void *(*fn)(void *), void *arg,
                                       const char *what, qc_error *err);

#define QC_THREADS_MAX 1024u
/* What a caller of the library asks for: 0 becomes one thread per processor. QC_ERR_USAGE for more
 * than QC_THREADS_MAX. */
QC_NODISCARD qc_status qc_threads_wanted(unsigned *threads, qc_error *err);

typedef struct qc_team qc_team;

/* index runs from 0 to threads - 1. A return other than QC_OK stops the team; err is private to
 * this worker. */
typedef qc_status (*qc_worker_fn)(qc_team *team, unsigned index, void *ctx, qc_error *err);

/* Runs fn on `threads` threads (>= 1) and waits for all. Returns the error that came first; workers
 * that return QC_ERR_INTERRUPTED because the team stopped never hide it. */
QC_NODISCARD qc_status qc_team_run(unsigned threads, qc_worker_fn fn, void *ctx, qc_error *err);
/* Returns whether a worker failed or the process was interrupted. It is cheap: call it once for
 * each unit of work. */
int qc_team_stopped(const qc_team *team);
/* Returns QC_ERR_INTERRUPTED, with its message, once the team stopped; else QC_OK. */
QC_NODISCARD qc_status qc_check_stopped(const qc_team *team, qc_error *err);

/* Returns QC_ERR_INTERRUPTED, with its message, once the process was interrupted; else QC_OK. */
QC_NODISCARD qc_status qc_check_interrupted(qc_error *err);

/* Makes a lock and, unless it is NULL, a condition for qc_cond_wait_briefly; changes of the
 * system's clock do not affect its time-out. After a failure (QC_ERR_NOMEM) there is neither. */
QC_NODISCARD qc_status qc_lock_init(pthread_mutex_t *lock, pthread_cond_t *cond, qc_error *err);
void qc_lock_deinit(pthread_mutex_t *lock, pthread_cond_t *cond);
/* Waits on a condition of qc_lock_init for at most 50 ms. An interrupt comes from a signal handler,
 * which cannot signal a condition, so whoever waits must look at qc_team_stopped() between such
 * short waits. */
void qc_cond_wait_briefly(pthread_cond_t *cond, pthread_mutex_t *lock);

/* A turnstile: threads with rising numbers pass one at a time, in order. */
typedef struct {
    pthread_mutex_t lock; /* protects next; a leaf lock: nothing is locked while holding it */
    pthread_cond_t moved;
    uint64_t next;
} qc_turnstile;

QC_NODISCARD qc_status qc_turnstile_init(qc_turnstile *t, uint64_t first, qc_error *err);
void qc_turnstile_deinit(qc_turnstile *t);
/* Returns once it is this number's turn, or QC_ERR_INTERRUPTED when the team stopped before
 * that. */
QC_NODISCARD qc_status qc_turnstile_wait(qc_turnstile *t, uint64_t turn, const qc_team *team,
                                         qc_error *err);
/* Called by the thread whose turn it is: the next turn is `next`. */
void qc_turnstile_pass(qc_turnstile *t, uint64_t next);

#endif
