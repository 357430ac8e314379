/* Captures and graphs of the shim. A graph is a list of operations that are launched as one. Where
 * several streams were captured, each operation knows which operations of the others it waits for.
 * They run in an order that keeps that and nothing else: in every second graph the stream where the
 * capture began goes as far as it can before the others, and in the rest it goes last. */
#include "shim_queue.h"

#include <stdlib.h>
#include <string.h>

static uint64_t capture_ids, graphs_made; /* under the lock */

/* ---- streams of a capture -------------------------------------------------------------------- */

void qc_shim_join(capture *c, struct CUstream_st *s, const lane_clock *behind)
{
    if (!s->capture) {
        if (c->lanes == QC_SHIM_LANES)
            qc_shim_fault("more streams in one capture than the shim has room for");
        s->capture = c;
        s->lane = c->lanes++;
        s->behind = (lane_clock){{0}};
    }
    for (unsigned i = 0; i < QC_SHIM_LANES; i++)
        if (s->behind.done[i] < behind->done[i])
            s->behind.done[i] = behind->done[i];
}

static int is_covered(const lane_clock *part, const lane_clock *all)
{
    for (unsigned i = 0; i < QC_SHIM_LANES; i++)
        if (part->done[i] > all->done[i])
            return 0;
    return 1;
}

/* Puts ops[count], which are in the order in which they were given, into the order in which they
 * run. */
static void put_in_order(op **ops, size_t count, int origin_last)
{
    op **rest = qc_shim_allocate(count * sizeof(*rest));
    memcpy(rest, ops, count * sizeof(*rest));
    lane_clock ran = {{0}};
    for (size_t i = 0; i < count; i++) {
        size_t next = count;
        for (size_t j = 0; j < count; j++)
            if (rest[j] && is_covered(&rest[j]->behind, &ran) &&
                (next == count || (origin_last && rest[j]->lane > rest[next]->lane) ||
                 (!origin_last && rest[j]->lane < rest[next]->lane)))
                next = j;
        ops[i] = rest[next];
        ran.done[rest[next]->lane]++;
        rest[next] = NULL;
    }
    free(rest);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = qc_shim_usable(s);
    if (!e && s->capture)
        e = cudaErrorIllegalState;
    if (!e) {
        capture *c = qc_shim_allocate(sizeof(*c));
        c->id = ++capture_ids;
        c->origin = s;
        c->mode = mode;
        c->thread = pthread_self();
        qc_shim_join(c, s, &c->given);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    *out = NULL;
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = qc_shim_usable(s);
    capture *c = e ? NULL : s->capture;
    if (!e && (!c || c->origin != s))
        e = cudaErrorIllegalState;
    if (!e) {
        struct CUgraph_st *g = qc_shim_allocate(sizeof(*g));
        for (const op *o = c->ops.first; o; o = o->next)
            g->count++;
        g->ops = qc_shim_allocate(g->count * sizeof(*g->ops));
        size_t i = 0;
        for (op *o = c->ops.first; o; o = o->next)
            g->ops[i++] = o;
        for (struct CUstream_st *x = qc_shim_streams; x; x = x->next)
            if (x->capture == c)
                x->capture = NULL;
        if (c->broken || !is_covered(&c->given, &s->behind)) {
            qc_shim_drop_ops(g->ops, g->count);
            free(g);
            e = c->broken ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined;
        } else {
            *out = g;
        }
        free(c);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = qc_shim_usable(s);
    if (!e)
        *out = !s->capture          ? cudaStreamCaptureStatusNone
               : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const void **dependencies, const void **edges, size_t *count)
{
    cudaError_t e = graph || dependencies || edges || count ? cudaErrorNotSupported
                                                            : cudaStreamIsCapturing(s, status);
    if (e)
        return qc_shim_error(e);
    pthread_mutex_lock(&qc_shim_lock);
    if (id)
        *id = s->capture ? s->capture->id : 0;
    pthread_mutex_unlock(&qc_shim_lock);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t g,
                                          unsigned long long flags)
{
    (void)flags;
    if (!g)
        return qc_shim_error(cudaErrorInvalidValue);
    struct CUgraphExec_st *x = qc_shim_allocate(sizeof(*x));
    x->refs = 1;
    x->count = g->count;
    x->ops = qc_shim_allocate(g->count * sizeof(*x->ops));
    pthread_mutex_lock(&qc_shim_lock);
    for (size_t i = 0; i < g->count; i++) {
        x->ops[i] = g->ops[i];
        x->ops[i]->refs++;
    }
    put_in_order(x->ops, x->count, graphs_made++ % 2);
    pthread_mutex_unlock(&qc_shim_lock);
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
    pthread_mutex_lock(&qc_shim_lock);
    qc_shim_drop_ops(g->ops, g->count);
    free(g);
    pthread_mutex_unlock(&qc_shim_lock);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g)
{
    if (!g)
        return qc_shim_error(cudaErrorInvalidValue);
    pthread_mutex_lock(&qc_shim_lock);
    qc_shim_drop_graph(g);
    pthread_mutex_unlock(&qc_shim_lock);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = g ? qc_shim_usable(s) : cudaErrorInvalidValue;
    if (!e) {
        op *o = qc_shim_new_op(GRAPH, s->device);
        o->graph = g;
        g->refs++;
        qc_shim_give(s, o);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t g, cudaStream_t s)
{
    pthread_mutex_lock(&qc_shim_lock);
    cudaError_t e = g ? qc_shim_usable(s) : cudaErrorInvalidValue;
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}
