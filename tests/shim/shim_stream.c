/* Streams and events of the shim.
 *
 * A stream is a queue of operations that no thread of its own works on. They run in the thread that
 * waits for one of them (or at once, or now and then: QC_SHIM_STREAMS). An event remembers a place
 * in a stream. Waiting for it runs that stream up to there, and before that whatever this needs of
 * other streams. A stream that waits for an event does so by an operation too, so the order between
 * streams is exactly what was asked for, and each thing is as late as it may be.
 *
 * The default stream is refused, because the project does not use it. */
#include "shim_queue.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

pthread_mutex_t qc_shim_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
struct CUstream_st *qc_shim_streams;
static uint64_t stream_ids;

void *qc_shim_allocate(size_t bytes)
{
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p)
        qc_shim_fault("no memory for an operation");
    return p;
}

/* ---- operations ------------------------------------------------------------------------------ */

static void drop_event(cudaEvent_t e)
{
    if (!--e->refs)
        free(e);
}

static void drop_op(op *o);

void qc_shim_drop_ops(op **ops, size_t count)
{
    for (size_t i = 0; i < count; i++)
        drop_op(ops[i]);
    free(ops);
}

void qc_shim_drop_graph(struct CUgraphExec_st *g)
{
    if (--g->refs)
        return;
    qc_shim_drop_ops(g->ops, g->count);
    free(g);
}

static void drop_op(op *o)
{
    if (--o->refs)
        return;
    if (o->event)
        drop_event(o->event);
    if (o->graph)
        qc_shim_drop_graph(o->graph);
    free(o->data);
    free(o);
}

op *qc_shim_new_op(op_kind kind, int device)
{
    op *o = qc_shim_allocate(sizeof(*o));
    o->kind = kind;
    o->device = device;
    o->refs = 1;
    return o;
}

static void append(op_list *list, op *o)
{
    if (!list->first)
        list->last = &list->first;
    o->next = NULL;
    *list->last = o;
    list->last = &o->next;
}

static struct CUstream_st *stream_of_id(uint64_t id)
{
    for (struct CUstream_st *s = qc_shim_streams; s; s = s->next)
        if (s->id == id)
            return s;
    return NULL;
}

/* NULL if it has ended. */
capture *qc_shim_capture_of_id(uint64_t id)
{
    for (struct CUstream_st *s = qc_shim_streams; s; s = s->next)
        if (s->capture && s->capture->id == id)
            return s->capture;
    return NULL;
}

/* Runs a copy while the memory of the devices at both ends is open. */
static void run_copy(const op *o)
{
    int to = qc_shim_memory_owner(o->to, NULL, NULL);
    int from = o->data ? QC_SHIM_HOST : qc_shim_memory_owner(o->from, NULL, NULL);
    if (to >= 0)
        qc_shim_memory_open(to);
    if (from >= 0)
        qc_shim_memory_open(from);
    memmove(o->to, o->data ? o->data : o->from, o->bytes);
    if (from >= 0)
        qc_shim_memory_close(from);
    if (to >= 0)
        qc_shim_memory_close(to);
}

/* Whether b was launched to overlap a, which is before it. */
static int overlap(const op *a, const op *b)
{
    return a->kind == KERNEL && b->kind == KERNEL && b->grid.overlaps &&
           a->stream_id == b->stream_id;
}

/* Runs kernels of which each overlaps the one before it. As for run_op, the caller does not hold
 * the lock. */
static void run_kernels(op *const *ops, size_t count)
{
    const qc_shim_grid **grids = qc_shim_allocate(count * sizeof(*grids));
    for (size_t i = 0; i < count; i++)
        grids[i] = &ops[i]->grid;
    qc_shim_memory_open(ops[0]->device);
    qc_shim_run_grids(grids, count);
    qc_shim_memory_close(ops[0]->device);
    free(grids);
}

static void run_op(op *o);

static void run_ops(op *const *ops, size_t count)
{
    for (size_t i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count && overlap(ops[i + n - 1], ops[i + n]);)
            n++;
        if (ops[i]->kind == KERNEL)
            run_kernels(ops + i, n);
        else
            run_op(ops[i]);
    }
}

static void run_op(op *o)
{
    switch (o->kind) {
    case KERNEL:
        run_kernels(&o, 1);
        break;
    case CALL:
        qc_shim_memory_open(o->device);
        o->call(o->data);
        qc_shim_memory_close(o->device);
        break;
    case HOST_CALL:
        o->call(o->to);
        break;
    case COPY:
        run_copy(o);
        break;
    case FILL:
        qc_shim_memory_open(o->device);
        memset(o->to, o->byte, o->bytes);
        qc_shim_memory_close(o->device);
        break;
    case RECORD: {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        pthread_mutex_lock(&qc_shim_lock);
        o->event->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
        pthread_mutex_unlock(&qc_shim_lock);
        break;
    }
    case WAIT: {
        pthread_mutex_lock(&qc_shim_lock);
        struct CUstream_st *s = stream_of_id(o->stream_id);
        if (s)
            qc_shim_run_until(s, o->stream_place);
        pthread_mutex_unlock(&qc_shim_lock);
        break;
    }
    case GRAPH:
        run_ops(o->graph->ops, o->graph->count);
        break;
    }
}

/* Runs the first operation of s, which nobody else runs, and the kernels after it that overlap it.
 * The caller holds the lock, which is given up meanwhile. */
static void run_one(struct CUstream_st *s)
{
    size_t count = 1;
    for (op *o = s->ops.first; o->next && overlap(o, o->next); o = o->next)
        count++;
    op **ops = qc_shim_allocate(count * sizeof(*ops));
    ops[0] = s->ops.first;
    for (size_t i = 1; i < count; i++)
        ops[i] = ops[i - 1]->next;
    s->busy = 1;
    pthread_mutex_unlock(&qc_shim_lock);
    run_ops(ops, count);
    pthread_mutex_lock(&qc_shim_lock);
    s->ops.first = ops[count - 1]->next;
    s->done += count;
    qc_shim_drop_ops(ops, count);
    s->busy = 0;
    pthread_cond_broadcast(&changed);
}

/* The caller holds the lock. A destroyed stream may be gone afterwards. */
void qc_shim_run_until(struct CUstream_st *s, uint64_t place)
{
    s->waiting++;
    while (s->done < place)
        if (s->busy)
            pthread_cond_wait(&changed, &qc_shim_lock);
        else
            run_one(s);
    s->waiting--;
    if (!s->destroyed || s->waiting || s->busy || s->done < s->queued)
        return;
    for (struct CUstream_st **p = &qc_shim_streams; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            free(s);
            return;
        }
}

/* In the mixed mode, runs an operation of some stream now and then. The caller holds the lock. */
static void stir(void)
{
    uint64_t r;
    if (qc_shim_get_streams(&r) != QC_SHIM_MIXED)
        return;
    unsigned count = 0;
    for (struct CUstream_st *s = qc_shim_streams; s; s = s->next)
        count++;
    if (!count || r >> 62 == 0)
        return;
    unsigned chosen = (unsigned)(r % count);
    struct CUstream_st *s = qc_shim_streams;
    while (chosen--)
        s = s->next;
    if (s->done < s->queued)
        qc_shim_run_until(s, s->done + 1);
}

/* Takes over o. The caller holds the lock. */
void qc_shim_give(struct CUstream_st *s, op *o)
{
    if (s->capture) {
        o->lane = s->lane;
        o->behind = s->behind;
        s->behind.done[s->lane] = ++s->capture->given.done[s->lane];
        append(&s->capture->ops, o);
        return;
    }
    append(&s->ops, o);
    s->queued++;
    uint64_t r;
    if (qc_shim_get_streams(&r) == QC_SHIM_EAGER)
        qc_shim_run_until(s, s->queued);
    else
        stir();
}

/* cudaSuccess, or why s cannot be used. The caller holds the lock. */
cudaError_t qc_shim_usable(const struct CUstream_st *s)
{
    for (const struct CUstream_st *x = qc_shim_streams; x; x = x->next)
        if (x == s && !x->destroyed)
            return qc_shim_is_dead() ? cudaErrorIllegalAddress : cudaSuccess;
    return cudaErrorInvalidResourceHandle;
}

/* Returns an error for what may not be done while this thread captures, or in the global mode while
 * anybody does. */
cudaError_t qc_shim_no_capture(void)
{
    cudaError_t e = cudaSuccess;
    pthread_mutex_lock(&qc_shim_lock);
    for (struct CUstream_st *s = qc_shim_streams; s; s = s->next) {
        capture *c = s->capture;
        if (!c || c->mode == cudaStreamCaptureModeRelaxed ||
            (c->mode == cudaStreamCaptureModeThreadLocal &&
             !pthread_equal(c->thread, pthread_self())))
            continue;
        c->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return e;
}

void qc_shim_drain_device(int device)
{
    pthread_mutex_lock(&qc_shim_lock);
    for (int found = 1; found;) {
        found = 0;
        for (struct CUstream_st *s = qc_shim_streams; s; s = s->next)
            if ((device == QC_SHIM_HOST || s->device == device) && s->done < s->queued) {
                /* The list may be a different one afterwards. */
                qc_shim_run_until(s, s->queued);
                found = 1;
                break;
            }
    }
    pthread_mutex_unlock(&qc_shim_lock);
}

int qc_shim_streams_exist(void)
{
    pthread_mutex_lock(&qc_shim_lock);
    int any = qc_shim_streams != NULL;
    pthread_mutex_unlock(&qc_shim_lock);
    return any;
}

/* ---- streams --------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    if (flags & ~(unsigned)cudaStreamNonBlocking)
        return qc_shim_error(cudaErrorInvalidValue);
    struct CUstream_st *s = qc_shim_allocate(sizeof(*s));
    s->device = device;
    pthread_mutex_lock(&qc_shim_lock);
    s->id = ++stream_ids;
    s->next = qc_shim_streams;
    qc_shim_streams = s;
    pthread_mutex_unlock(&qc_shim_lock);
    *out = s;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out)
{
    return cudaStreamCreateWithFlags(out, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    (void)priority;
    return cudaStreamCreateWithFlags(out, flags);
}

/* What is queued still runs when somebody waits for the device. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = qc_shim_usable(s);
    if (!e) {
        s->destroyed = 1;
        qc_shim_run_until(s, 0);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = qc_shim_usable(s);
    if (!e && s->capture) {
        s->capture->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    if (!e) {
        stir();
        qc_shim_run_until(s, s->queued);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

/* Asking moves the stream on by one operation, so that a loop around it ends. */
cudaError_t cudaStreamQuery(cudaStream_t s)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = qc_shim_usable(s);
    if (!e && s->capture) {
        s->capture->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    if (!e && s->done < s->queued) {
        qc_shim_run_until(s, s->done + 1);
        e = cudaErrorNotReady;
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

cudaError_t cudaDeviceSynchronize(void)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (!e)
        e = qc_shim_no_capture();
    if (!e)
        qc_shim_drain_device(device);
    return qc_shim_error(e);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*call)(void *), void *data)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = qc_shim_usable(s);
    if (!e) {
        op *o = qc_shim_new_op(HOST_CALL, s->device);
        o->call = call;
        o->to = data;
        qc_shim_give(s, o);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

/* ---- events ---------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    struct CUevent_st *x = qc_shim_allocate(sizeof(*x));
    x->refs = 1;
    x->device = device;
    x->timing = !(flags & cudaEventDisableTiming);
    *out = x;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    if (!e)
        return qc_shim_error(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&qc_shim_lock);
    drop_event(e);
    pthread_mutex_unlock(&qc_shim_lock);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t code = qc_shim_usable(s);
    if (!code && (!e || e->device != s->device))
        code = cudaErrorInvalidResourceHandle;
    if (!code && s->capture) {
        e->captured = s->capture->id;
        e->behind = s->behind;
    } else if (!code) {
        op *o = qc_shim_new_op(RECORD, s->device);
        o->event = e;
        e->refs += 2; /* one is for here: the operation may run at once */
        e->captured = 0;
        e->recorded = 1;
        e->stream_id = s->id;
        e->stream_place = s->queued + 1;
        qc_shim_give(s, o);
        drop_event(e);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(code);
}

static int event_done(const struct CUevent_st *e)
{
    const struct CUstream_st *s = e->recorded ? stream_of_id(e->stream_id) : NULL;
    return !s || s->done >= e->stream_place;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    if (!e)
        return qc_shim_error(cudaErrorInvalidResourceHandle);
    cudaError_t code = cudaSuccess;
    pthread_mutex_lock(&qc_shim_lock);
    if (e->captured) {
        code = cudaErrorStreamCaptureUnsupported;
    } else if (!event_done(e)) {
        stir();
        struct CUstream_st *s = stream_of_id(e->stream_id);
        if (s)
            qc_shim_run_until(s, e->stream_place);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(code);
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (!e)
        return qc_shim_error(cudaErrorInvalidResourceHandle);
    cudaError_t code = cudaSuccess;
    pthread_mutex_lock(&qc_shim_lock);
    if (e->captured) {
        code = cudaErrorStreamCaptureUnsupported;
    } else if (!event_done(e)) {
        struct CUstream_st *s = stream_of_id(e->stream_id);
        qc_shim_run_until(s, s->done + 1);
        code = cudaErrorNotReady;
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(code);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    if (!begin || !end || !begin->timing || !end->timing)
        return qc_shim_error(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t code = !begin->recorded || !end->recorded       ? cudaErrorInvalidResourceHandle
                       : !event_done(begin) || !event_done(end) ? cudaErrorNotReady
                                                                : cudaSuccess;
    if (!code)
        *milliseconds = (float)((end->seconds - begin->seconds) * 1e3);
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(code);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t code = qc_shim_usable(s);
    if (!code && !e)
        code = cudaErrorInvalidResourceHandle;
    if (!code && flags)
        code = cudaErrorInvalidValue;
    if (!code && e->captured) {
        capture *c = qc_shim_capture_of_id(e->captured);
        if (!c || (s->capture && s->capture != c))
            code = cudaErrorStreamCaptureUnsupported;
        else
            qc_shim_join(c, s, &e->behind);
    } else if (!code && s->capture) {
        if (e->recorded) {
            s->capture->broken = 1;
            code = cudaErrorStreamCaptureUnsupported;
        }
    } else if (!code && e->recorded && e->stream_id != s->id) {
        op *o = qc_shim_new_op(WAIT, s->device);
        o->stream_id = e->stream_id;
        o->stream_place = e->stream_place;
        qc_shim_give(s, o);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(code);
}
