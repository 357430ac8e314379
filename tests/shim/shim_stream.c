/* Streams, events, copies, launches and graphs of the shim.
 *
 * A stream is a queue of operations that nobody works on: they run in the thread that waits for one
 * of them (or at once, or now and then: QC_SHIM_STREAMS). An event remembers a place in a stream;
 * waiting for it runs that stream up to there, whatever it takes of other streams first. Stopping
 * for it is in itself an operation, so the order between streams is exactly what was asked for, and
 * as late as it may be.
 *
 * Pageable host memory is as CUDA has it: such a copy to the device takes its bytes before the call
 * returns, one to the host waits. The default stream is refused: the project does not use it.
 *
 * lock guards everything here; it is not held while an operation runs. */
#include "shim_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum { KERNEL, CALL, HOST_CALL, COPY, FILL, RECORD, WAIT, GRAPH } op_kind;

typedef struct op {
    struct op *next;
    op_kind kind;
    unsigned refs; /* of ops of a graph: the graphs */
    int device;
    qc_shim_grid grid; /* KERNEL */
    void (*call)(void *);
    void *data; /* owned: closure of KERNEL, argument of CALL, bytes of a pageable COPY */
    void *to;
    const void *from;
    size_t bytes;
    int byte;
    cudaEvent_t event;                /* RECORD */
    uint64_t stream_id, stream_place; /* WAIT: until that stream has done so much */
    struct CUgraphExec_st *graph;
} op;

typedef struct {
    op *first, **last;
} op_list;

typedef struct capture {
    uint64_t id;
    struct CUstream_st *origin;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    int broken;
    op_list ops;
} capture;

struct CUstream_st {
    struct CUstream_st *next;
    uint64_t id;
    int device;
    op_list ops;
    uint64_t queued, done; /* operations so far */
    int busy;              /* somebody runs the first one */
    unsigned waiting;      /* threads that look at it */
    int destroyed;
    capture *capture;
};

struct CUevent_st {
    unsigned refs; /* the handle's, and RECORD operations */
    int device, timing, recorded;
    uint64_t stream_id, stream_place;
    double seconds;
    uint64_t captured; /* id of the capture it was last recorded in; 0: none */
};

struct CUgraph_st {
    op **ops;
    size_t count;
};
struct CUgraphExec_st {
    op **ops;
    size_t count;
    unsigned refs;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams;
static uint64_t stream_ids;
static uint64_t capture_ids;

static void *allocate(size_t bytes)
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

static void drop_ops(op **ops, size_t count)
{
    for (size_t i = 0; i < count; i++)
        drop_op(ops[i]);
    free(ops);
}

static void drop_graph(struct CUgraphExec_st *g)
{
    if (--g->refs)
        return;
    drop_ops(g->ops, g->count);
    free(g);
}

static void drop_op(op *o)
{
    if (--o->refs)
        return;
    if (o->event)
        drop_event(o->event);
    if (o->graph)
        drop_graph(o->graph);
    free(o->data);
    free(o);
}

static op *new_op(op_kind kind, int device)
{
    op *o = allocate(sizeof(*o));
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
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s->id == id)
            return s;
    return NULL;
}

/* NULL: it has ended. */
static capture *capture_of_id(uint64_t id)
{
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s->capture && s->capture->id == id)
            return s->capture;
    return NULL;
}

static void run_until(struct CUstream_st *s, uint64_t place);

/* With the memory of the devices at both ends in reach. */
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

/* Without the lock. */
static void run_op(op *o)
{
    switch (o->kind) {
    case KERNEL:
        qc_shim_memory_open(o->device);
        qc_shim_run_grid(&o->grid);
        qc_shim_memory_close(o->device);
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
        pthread_mutex_lock(&lock);
        o->event->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
        pthread_mutex_unlock(&lock);
        break;
    }
    case WAIT: {
        pthread_mutex_lock(&lock);
        struct CUstream_st *s = stream_of_id(o->stream_id);
        if (s)
            run_until(s, o->stream_place);
        pthread_mutex_unlock(&lock);
        break;
    }
    case GRAPH:
        for (size_t i = 0; i < o->graph->count; i++)
            run_op(o->graph->ops[i]);
        break;
    }
}

/* The first operation of s, which nobody runs. With the lock, which is given up meanwhile. */
static void run_one(struct CUstream_st *s)
{
    op *o = s->ops.first;
    s->busy = 1;
    pthread_mutex_unlock(&lock);
    run_op(o);
    pthread_mutex_lock(&lock);
    s->ops.first = o->next;
    drop_op(o);
    s->done++;
    s->busy = 0;
    pthread_cond_broadcast(&changed);
}

/* With the lock. A destroyed stream may be gone afterwards. */
static void run_until(struct CUstream_st *s, uint64_t place)
{
    s->waiting++;
    while (s->done < place)
        if (s->busy)
            pthread_cond_wait(&changed, &lock);
        else
            run_one(s);
    s->waiting--;
    if (!s->destroyed || s->waiting || s->busy || s->done < s->queued)
        return;
    for (struct CUstream_st **p = &streams; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            free(s);
            return;
        }
}

/* In the mixed mode now and then an operation of some stream. With the lock. */
static void stir(void)
{
    uint64_t r;
    if (qc_shim_get_streams(&r) != QC_SHIM_MIXED)
        return;
    unsigned count = 0;
    for (struct CUstream_st *s = streams; s; s = s->next)
        count++;
    if (!count || r >> 62 == 0)
        return;
    unsigned chosen = (unsigned)(r % count);
    struct CUstream_st *s = streams;
    while (chosen--)
        s = s->next;
    if (s->done < s->queued)
        run_until(s, s->done + 1);
}

/* Takes o. With the lock. */
static void give(struct CUstream_st *s, op *o)
{
    if (s->capture) {
        append(&s->capture->ops, o);
        return;
    }
    append(&s->ops, o);
    s->queued++;
    uint64_t r;
    if (qc_shim_get_streams(&r) == QC_SHIM_EAGER)
        run_until(s, s->queued);
    else
        stir();
}

/* cudaSuccess, or why s is no stream to use. With the lock. */
static cudaError_t usable(const struct CUstream_st *s)
{
    for (const struct CUstream_st *x = streams; x; x = x->next)
        if (x == s && !x->destroyed)
            return cudaSuccess;
    return cudaErrorInvalidResourceHandle;
}

/* What may not be done while this thread, or in the global mode anybody, captures. */
static cudaError_t no_capture(void)
{
    cudaError_t e = cudaSuccess;
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *s = streams; s; s = s->next) {
        capture *c = s->capture;
        if (!c || c->mode == cudaStreamCaptureModeRelaxed ||
            (c->mode == cudaStreamCaptureModeThreadLocal &&
             !pthread_equal(c->thread, pthread_self())))
            continue;
        c->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    pthread_mutex_unlock(&lock);
    return e;
}

void qc_shim_drain_device(int device)
{
    pthread_mutex_lock(&lock);
    for (int found = 1; found;) {
        found = 0;
        for (struct CUstream_st *s = streams; s; s = s->next)
            if ((device == QC_SHIM_HOST || s->device == device) &&
                (s->done < s->queued || s->destroyed)) {
                /* The list may be another one afterwards. */
                run_until(s, s->queued);
                found = 1;
                break;
            }
    }
    pthread_mutex_unlock(&lock);
}

int qc_shim_streams_exist(void)
{
    pthread_mutex_lock(&lock);
    int any = streams != NULL;
    pthread_mutex_unlock(&lock);
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
    struct CUstream_st *s = allocate(sizeof(*s));
    s->device = device;
    pthread_mutex_lock(&lock);
    s->id = ++stream_ids;
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
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

/* What is queued still runs, when somebody waits for the device. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = usable(s);
    if (!e) {
        s->destroyed = 1;
        run_until(s, 0);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = usable(s);
    if (!e && s->capture) {
        s->capture->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    if (!e) {
        stir();
        run_until(s, s->queued);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

/* Asking moves the stream on by one operation, so that a loop around it ends. */
cudaError_t cudaStreamQuery(cudaStream_t s)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = usable(s);
    if (!e && s->capture) {
        s->capture->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    if (!e && s->done < s->queued) {
        run_until(s, s->done + 1);
        e = cudaErrorNotReady;
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

cudaError_t cudaDeviceSynchronize(void)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (!e)
        e = no_capture();
    if (!e)
        qc_shim_drain_device(device);
    return qc_shim_error(e);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*call)(void *), void *data)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = usable(s);
    if (!e) {
        op *o = new_op(HOST_CALL, s->device);
        o->call = call;
        o->to = data;
        give(s, o);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

/* ---- events ---------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    struct CUevent_st *x = allocate(sizeof(*x));
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
    pthread_mutex_lock(&lock);
    drop_event(e);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    pthread_mutex_lock(&lock);
    cudaError_t code = usable(s);
    if (!code && (!e || e->device != s->device))
        code = cudaErrorInvalidResourceHandle;
    if (!code && s->capture) {
        e->captured = s->capture->id;
    } else if (!code) {
        op *o = new_op(RECORD, s->device);
        o->event = e;
        e->refs += 2; /* one for here: the operation may run at once */
        e->captured = 0;
        e->recorded = 1;
        e->stream_id = s->id;
        e->stream_place = s->queued + 1;
        give(s, o);
        drop_event(e);
    }
    pthread_mutex_unlock(&lock);
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
    pthread_mutex_lock(&lock);
    if (e->captured) {
        code = cudaErrorStreamCaptureUnsupported;
    } else if (!event_done(e)) {
        stir();
        struct CUstream_st *s = stream_of_id(e->stream_id);
        if (s)
            run_until(s, e->stream_place);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(code);
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (!e)
        return qc_shim_error(cudaErrorInvalidResourceHandle);
    cudaError_t code = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (e->captured) {
        code = cudaErrorStreamCaptureUnsupported;
    } else if (!event_done(e)) {
        struct CUstream_st *s = stream_of_id(e->stream_id);
        run_until(s, s->done + 1);
        code = cudaErrorNotReady;
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(code);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    if (!begin || !end || !begin->timing || !end->timing)
        return qc_shim_error(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&lock);
    cudaError_t code = !begin->recorded || !end->recorded       ? cudaErrorInvalidResourceHandle
                       : !event_done(begin) || !event_done(end) ? cudaErrorNotReady
                                                                : cudaSuccess;
    if (!code)
        *milliseconds = (float)((end->seconds - begin->seconds) * 1e3);
    pthread_mutex_unlock(&lock);
    return qc_shim_error(code);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    pthread_mutex_lock(&lock);
    cudaError_t code = usable(s);
    if (!code && !e)
        code = cudaErrorInvalidResourceHandle;
    if (!code && flags)
        code = cudaErrorInvalidValue;
    if (!code && e->captured) {
        /* A stream joins the capture; the order in which work was given stays. */
        capture *c = capture_of_id(e->captured);
        if (!c || (s->capture && s->capture != c))
            code = cudaErrorStreamCaptureUnsupported;
        else
            s->capture = c;
    } else if (!code && s->capture) {
        if (e->recorded) {
            s->capture->broken = 1;
            code = cudaErrorStreamCaptureUnsupported;
        }
    } else if (!code && e->recorded && e->stream_id != s->id) {
        op *o = new_op(WAIT, s->device);
        o->stream_id = e->stream_id;
        o->stream_place = e->stream_place;
        give(s, o);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(code);
}

/* ---- memory ---------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    *out = NULL;
    if ((e = no_capture()))
        return qc_shim_error(e);
    if (!bytes)
        return cudaSuccess;
    if (!qc_shim_malloc_fails())
        *out = qc_shim_memory_new(bytes, device);
    return qc_shim_error(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    (void)flags;
    if (e)
        return e;
    *out = NULL;
    if ((e = no_capture()))
        return qc_shim_error(e);
    if (!bytes)
        return cudaSuccess;
    if (!qc_shim_malloc_fails())
        *out = qc_shim_memory_new(bytes, QC_SHIM_HOST);
    return qc_shim_error(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    return cudaHostAlloc(out, bytes, cudaHostAllocDefault);
}

/* Freeing waits for everything: what is still queued may use it. */
static cudaError_t release(void *p, int host)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e || !p)
        return e;
    if ((e = no_capture()))
        return qc_shim_error(e);
    qc_shim_drain_device(QC_SHIM_HOST);
    return qc_shim_error(qc_shim_memory_free(p, host) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaFree(void *p)
{
    return release(p, 0);
}

cudaError_t cudaFreeHost(void *p)
{
    return release(p, 1);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    int owner = qc_shim_memory_owner(p, NULL, NULL);
    *out = (struct cudaPointerAttributes){
        .type = owner >= 0              ? cudaMemoryTypeDevice
                : owner == QC_SHIM_HOST ? cudaMemoryTypeHost
                                        : cudaMemoryTypeUnregistered,
        .device = owner >= 0 ? owner : -1,
    };
    return cudaSuccess;
}

/* The owner of [p, p + bytes) to *owner; an error if it goes on after the allocation's end. */
static cudaError_t owner_of_range(const void *p, size_t bytes, int *owner)
{
    const void *base;
    size_t size;
    *owner = qc_shim_memory_owner(p, &base, &size);
    if (*owner == QC_SHIM_UNKNOWN)
        return p ? cudaSuccess : cudaErrorInvalidValue;
    size_t before = (size_t)((const char *)p - (const char *)base);
    return bytes <= size - before ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    int device, to_owner, from_owner;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
        return qc_shim_error(cudaErrorInvalidMemcpyDirection);
    if (!bytes)
        return cudaSuccess;
    if ((e = owner_of_range(to, bytes, &to_owner)) ||
        (e = owner_of_range(from, bytes, &from_owner)))
        return qc_shim_error(e);
    if (kind != cudaMemcpyDefault &&
        ((to_owner >= 0) != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
         (from_owner >= 0) != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)))
        return qc_shim_error(cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    e = usable(s);
    int pageable = to_owner == QC_SHIM_UNKNOWN || from_owner == QC_SHIM_UNKNOWN;
    if (!e && pageable && s->capture) {
        s->capture->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    if (!e) {
        op *o = new_op(COPY, s->device);
        o->to = to;
        o->from = from;
        o->bytes = bytes;
        if (from_owner == QC_SHIM_UNKNOWN) {
            o->data = allocate(bytes);
            memcpy(o->data, from, bytes);
        }
        give(s, o);
        if (to_owner == QC_SHIM_UNKNOWN)
            run_until(s, s->queued);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t s)
{
    int device, owner;
    cudaError_t e = qc_shim_current(&device);
    if (e || !bytes)
        return e;
    e = owner_of_range(to, bytes, &owner);
    if (!e && owner == QC_SHIM_UNKNOWN)
        e = cudaErrorInvalidValue;
    if (e)
        return qc_shim_error(e);
    pthread_mutex_lock(&lock);
    if (!(e = usable(s))) {
        op *o = new_op(FILL, s->device);
        o->to = to;
        o->byte = byte;
        o->bytes = bytes;
        give(s, o);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

/* ---- launches -------------------------------------------------------------------------------- */

static cudaError_t launch_error(const void *function, const unsigned grid[3],
                                const unsigned block[3], size_t shared_bytes, int device)
{
    if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2] ||
        grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535 || block[0] > 1024 ||
        block[1] > 1024 || block[2] > 64 || (uint64_t)block[0] * block[1] * block[2] > 1024)
        return cudaErrorInvalidConfiguration;
    if (shared_bytes > qc_shim_shared_limit(function, device))
        return cudaErrorInvalidValue;
    return qc_shim_launch_fails() ? cudaErrorLaunchOutOfResources : cudaSuccess;
}

void qc_shim_launch(const char *name, const void *function, const unsigned grid[3],
                    const unsigned block[3], size_t shared_bytes, void *stream,
                    void (*call)(const void *closure), const void *closure, size_t closure_bytes)
{
    int device;
    if (qc_shim_current(&device))
        return;
    cudaError_t e = launch_error(function, grid, block, shared_bytes, device);
    pthread_mutex_lock(&lock);
    struct CUstream_st *s = stream;
    if (!e && (usable(s) || s->device != device))
        e = cudaErrorInvalidResourceHandle;
    if (!e) {
        op *o = new_op(KERNEL, device);
        o->data = allocate(closure_bytes);
        memcpy(o->data, closure, closure_bytes);
        o->grid = (qc_shim_grid){.name = name,
                                 .device = device,
                                 .sm = qc_shim_device_of(device)->sm,
                                 .grid = {grid[0], grid[1], grid[2]},
                                 .block = {block[0], block[1], block[2]},
                                 .shared_bytes = shared_bytes,
                                 .call = call,
                                 .closure = o->data};
        give(s, o);
    }
    pthread_mutex_unlock(&lock);
    qc_shim_error(e);
}

int qc_shim_enqueue(void *stream, const char *name, void (*call)(void *), const void *arg,
                    size_t arg_bytes)
{
    (void)name;
    pthread_mutex_lock(&lock);
    struct CUstream_st *s = stream;
    cudaError_t e = usable(s);
    if (!e) {
        op *o = new_op(CALL, s->device);
        o->call = call;
        o->data = allocate(arg_bytes);
        memcpy(o->data, arg, arg_bytes);
        give(s, o);
    }
    pthread_mutex_unlock(&lock);
    return (int)qc_shim_error(e);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = usable(s);
    if (!e && s->capture)
        e = cudaErrorIllegalState;
    if (!e) {
        capture *c = allocate(sizeof(*c));
        c->id = ++capture_ids;
        c->origin = s;
        c->mode = mode;
        c->thread = pthread_self();
        s->capture = c;
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    *out = NULL;
    pthread_mutex_lock(&lock);
    cudaError_t e = usable(s);
    capture *c = e ? NULL : s->capture;
    if (!e && (!c || c->origin != s))
        e = cudaErrorIllegalState;
    if (!e) {
        struct CUgraph_st *g = allocate(sizeof(*g));
        for (const op *o = c->ops.first; o; o = o->next)
            g->count++;
        g->ops = allocate(g->count * sizeof(*g->ops));
        size_t i = 0;
        for (op *o = c->ops.first; o; o = o->next)
            g->ops[i++] = o;
        for (struct CUstream_st *x = streams; x; x = x->next)
            if (x->capture == c)
                x->capture = NULL;
        if (c->broken) {
            drop_ops(g->ops, g->count);
            free(g);
            e = cudaErrorStreamCaptureInvalidated;
        } else {
            *out = g;
        }
        free(c);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = usable(s);
    if (!e)
        *out = !s->capture          ? cudaStreamCaptureStatusNone
               : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t g,
                                          unsigned long long flags)
{
    (void)flags;
    if (!g)
        return qc_shim_error(cudaErrorInvalidValue);
    struct CUgraphExec_st *x = allocate(sizeof(*x));
    x->refs = 1;
    x->count = g->count;
    x->ops = allocate(g->count * sizeof(*x->ops));
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < g->count; i++) {
        x->ops[i] = g->ops[i];
        x->ops[i]->refs++;
    }
    pthread_mutex_unlock(&lock);
    *out = x;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long flags)
{
    return cudaGraphInstantiateWithFlags(out, g, flags);
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    if (!g)
        return qc_shim_error(cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    drop_ops(g->ops, g->count);
    free(g);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g)
{
    if (!g)
        return qc_shim_error(cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    drop_graph(g);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = g ? usable(s) : cudaErrorInvalidValue;
    if (!e) {
        op *o = new_op(GRAPH, s->device);
        o->graph = g;
        g->refs++;
        give(s, o);
    }
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t g, cudaStream_t s)
{
    pthread_mutex_lock(&lock);
    cudaError_t e = g ? usable(s) : cudaErrorInvalidValue;
    pthread_mutex_unlock(&lock);
    return qc_shim_error(e);
}
