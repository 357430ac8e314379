/* Threads: one by itself, and a team of them that run one function to its end.
 *
 * The team shares a stop flag: the first worker that fails stores its error, everybody else sees
 * qc_team_stopped() and returns early. The caller's thread takes part as worker 0, so one thread
 * means no thread is created at all.
 *
 * Also here: the interrupt flag that a signal handler sets and every loop looks at, and a turnstile
 * that lets numbered pieces of work pass in order.
 */
#ifndef QC_BASE_WORKERS_H
#define QC_BASE_WORKERS_H

#include "base/status.h"

#include <pthread.h>
#include <stdatomic.h>

/* Start a thread, with 2 MiB of stack however small the limit is (ulimit -s). `what` begins the
 * sentence of a failure, "thread 2 of 8": QC_ERR_NOMEM, as it is a limit of the system on processes
 * or memory that leaves no room for it. */
QC_NODISCARD qc_status qc_thread_start(pthread_t *thread, void *(*fn)(void *), void *arg,
                                       const char *what, qc_error *err);

typedef struct qc_team qc_team;

/* index: 0 .. threads-1. A non-OK return stops the team; err is private to this worker. */
typedef qc_status (*qc_worker_fn)(qc_team *team, unsigned index, void *ctx, qc_error *err);

/* Run fn on `threads` threads (>= 1) and wait for all. Returns the first error in time; workers
 * that return QC_ERR_INTERRUPTED because the team stopped never hide it. */
QC_NODISCARD qc_status qc_team_run(unsigned threads, qc_worker_fn fn, void *ctx, qc_error *err);
/* True once any worker failed or the process was interrupted. Cheap; call it per piece of work. */
int qc_team_stopped(const qc_team *team);

/* Async-signal-safe: may be called from a handler. */
void qc_interrupt(void);
int qc_interrupted(void);
void qc_interrupt_clear(void);

/* A condition for the wait below, whose time no change of the clock touches; not 0: it failed. */
int qc_cond_init(pthread_cond_t *cond);
/* Wait on a condition of qc_cond_init for at most 50 ms. An interrupt comes from a signal handler,
 * which cannot signal a condition: every wait looks at qc_team_stopped() between such short waits.
 */
void qc_cond_wait_briefly(pthread_cond_t *cond, pthread_mutex_t *lock);

/* Turnstile: pieces of work with rising numbers pass one at a time, in order. */
typedef struct {
    pthread_mutex_t lock; /* protects next; a leaf lock: nothing is locked while holding it */
    pthread_cond_t moved;
    uint64_t next;
} qc_turnstile;

QC_NODISCARD qc_status qc_turnstile_init(qc_turnstile *t, uint64_t first, qc_error *err);
void qc_turnstile_deinit(qc_turnstile *t);
/* Returns once it is this number's turn; QC_ERR_INTERRUPTED when the team stopped before. */
QC_NODISCARD qc_status qc_turnstile_wait(qc_turnstile *t, uint64_t turn, const qc_team *team,
                                         qc_error *err);
/* By the one whose turn it is: the next turn is `next`. */
void qc_turnstile_pass(qc_turnstile *t, uint64_t next);

#endif
