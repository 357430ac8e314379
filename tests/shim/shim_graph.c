/* Captures and graphs of the shim: a graph is a list of operations in the order in which they were
 * given, launched as one. */
#include "shim_queue.h"

#include <stdlib.h>

static uint64_t capture_ids; /* with the lock */

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
        s->capture = c;
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
        if (c->broken) {
            qc_shim_drop_ops(g->ops, g->count);
            free(g);
            e = cudaErrorStreamCaptureInvalidated;
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
