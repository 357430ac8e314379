/* Memory, copies and launches of the shim. They are operations of streams.
 *
 * Pageable host memory behaves as in CUDA: a copy from it to the device takes its bytes before the
 * call returns, and a copy to it waits. */
#include "shim_queue.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ---------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    *out = NULL;
    if ((e = qc_shim_no_capture()))
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
    if ((e = qc_shim_no_capture()))
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

/* Freeing waits for everything, because what is still queued may use the memory. */
static cudaError_t release(void *p, int host)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e || !p)
        return e;
    if ((e = qc_shim_no_capture()))
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

/* Stores the owner of [p, p + bytes) in *owner. Fails if the range goes past the allocation's
 * end. */
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
    pthread_mutex_lock(&qc_shim_lock);
    e = qc_shim_usable(s);
    int pageable = to_owner == QC_SHIM_UNKNOWN || from_owner == QC_SHIM_UNKNOWN;
    if (!e && pageable && s->capture) {
        s->capture->broken = 1;
        e = cudaErrorStreamCaptureUnsupported;
    }
    if (!e) {
        op *o = qc_shim_new_op(COPY, s->device);
        o->to = to;
        o->from = from;
        o->bytes = bytes;
        if (from_owner == QC_SHIM_UNKNOWN) {
            o->data = qc_shim_allocate(bytes);
            memcpy(o->data, from, bytes);
        }
        qc_shim_give(s, o);
        if (to_owner == QC_SHIM_UNKNOWN)
            qc_shim_run_until(s, s->queued);
    }
    pthread_mutex_unlock(&qc_shim_lock);
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
    pthread_mutex_lock(&qc_shim_lock);
    if (!(e = qc_shim_usable(s))) {
        op *o = qc_shim_new_op(FILL, s->device);
        o->to = to;
        o->byte = byte;
        o->bytes = bytes;
        qc_shim_give(s, o);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return qc_shim_error(e);
}

/* ---- launches -------------------------------------------------------------------------------- */

static cudaError_t launch_error(const char *name, const void *function, const unsigned grid[3],
                                const unsigned block[3], size_t shared_bytes, int device)
{
    qc_shim_note_launch(function, device);
    if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2] ||
        grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535 || block[0] > 1024 ||
        block[1] > 1024 || block[2] > 64 || (uint64_t)block[0] * block[1] * block[2] > 1024)
        return cudaErrorInvalidConfiguration;
    if (shared_bytes > qc_shim_shared_limit(function, device))
        return cudaErrorInvalidValue;
    return qc_shim_launch_error(name);
}

static void do_nothing(const void *closure)
{
    (void)closure;
}

void qc_shim_launch(const char *name, const void *function, const unsigned grid[3],
                    const unsigned block[3], size_t shared_bytes, void *stream, int overlaps,
                    void (*call)(const void *closure), const void *closure, size_t closure_bytes)
{
    int device;
    if (qc_shim_current(&device))
        return;
    cudaError_t e = launch_error(name, function, grid, block, shared_bytes, device);
    pthread_mutex_lock(&qc_shim_lock);
    struct CUstream_st *s = stream;
    if (!e && (qc_shim_usable(s) || s->device != device))
        e = cudaErrorInvalidResourceHandle;
    if (!e && overlaps && qc_shim_device_of(device)->sm < 90)
        e = cudaErrorNotSupported;
    if (!e) {
        op *o = qc_shim_new_op(KERNEL, device);
        o->data = qc_shim_allocate(closure_bytes);
        memcpy(o->data, closure, closure_bytes);
        o->stream_id = s->id;
        o->grid = (qc_shim_grid){.name = name,
                                 .device = device,
                                 .sm = qc_shim_device_of(device)->sm,
                                 .code = qc_shim_code_of(device),
                                 .overlaps = overlaps,
                                 .grid = {grid[0], grid[1], grid[2]},
                                 .block = {block[0], block[1], block[2]},
                                 .shared_bytes = shared_bytes,
                                 .call = qc_shim_launch_skipped(name) ? do_nothing : call,
                                 .closure = o->data};
        qc_shim_give(s, o);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    qc_shim_error(e);
}

int qc_shim_enqueue(void *stream, const char *name, void (*call)(void *), const void *arg,
                    size_t arg_bytes)
{
    (void)name;
    pthread_mutex_lock(&qc_shim_lock);
    struct CUstream_st *s = stream;
    cudaError_t e = qc_shim_usable(s);
    if (!e) {
        op *o = qc_shim_new_op(CALL, s->device);
        o->call = call;
        o->data = qc_shim_allocate(arg_bytes);
        memcpy(o->data, arg, arg_bytes);
        qc_shim_give(s, o);
    }
    pthread_mutex_unlock(&qc_shim_lock);
    return (int)qc_shim_error(e);
}
