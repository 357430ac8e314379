/* The thin calls over the CUDA runtime that cuda_device.h declares.
 *
 * One source serves CUDA 11.8 to 13: facts of a device come from cudaDeviceGetAttribute (CUDA 13
 * took members away from cudaDeviceProp), graphs from cudaGraphInstantiateWithFlags (the same in
 * all). */
#include "kernels/cuda_device.h"

#include "base/text.h"
#include "kernels/cuda_internal.h"

#include <stdio.h>
#include <string.h>

/* What kernels/CMakeLists.txt built: "75-real 80-real 90-virtual" and the same for people. */
#ifdef QC_CUDA_CODE
static const char built_code[] = QC_CUDA_CODE;
static const char built_words[] = QC_CUDA_BUILD;
#else
static const char built_code[] = "0-virtual";
static const char built_words[] = "on the CPU shim";
#endif

const char *qc_cuda_build(void)
{
    return built_words;
}

/* Ends a call that gives something back: nobody can be told of an error, and the next call must not
 * be blamed. */
static void given_back(cudaError_t code)
{
    if (code != cudaSuccess)
        (void)cudaGetLastError();
}

/* ---- devices --------------------------------------------------------------------------------- */

static void say_why_none(cudaError_t code, char *why, size_t why_bytes)
{
    int driver = 0;
    const char *words = NULL;
    if (!why || why_bytes == 0)
        return;
    if (cudaDriverGetVersion(&driver) != cudaSuccess)
        driver = 0;
    if (code == cudaSuccess || code == cudaErrorNoDevice)
        words = "the NVIDIA driver shows no GPU";
    else if (code == cudaErrorInsufficientDriver && driver == 0)
        words = "the NVIDIA driver was not found";
    if (words)
        (void)snprintf(why, why_bytes, "%s", words);
    else if (code == cudaErrorInsufficientDriver)
        (void)snprintf(why, why_bytes,
                       "the NVIDIA driver is too old: it has CUDA %d.%d, but this build needs "
                       "%d.%d; install a newer driver",
                       driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                       CUDART_VERSION % 1000 / 10);
    else
        (void)snprintf(why, why_bytes, "CUDA cannot start: %s", cudaGetErrorString(code));
}

void qc_cuda_device_count(int *count, char *why, size_t why_bytes)
{
    cudaError_t code = cudaGetDeviceCount(count);
    if (code != cudaSuccess)
        *count = 0;
    if (*count <= 0)
        say_why_none(code, why, why_bytes);
    given_back(code);
}

static qc_status read_facts(qc_cuda_device *d, qc_error *err)
{
    struct cudaDeviceProp properties;
    uint64_t major, minor, multiprocessors, l2, shared, shared_all, threads, warp;
    const struct {
        uint64_t *value;
        enum cudaDeviceAttr which;
    } facts[] = {
        {&major, cudaDevAttrComputeCapabilityMajor},
        {&minor, cudaDevAttrComputeCapabilityMinor},
        {&multiprocessors, cudaDevAttrMultiProcessorCount},
        {&l2, cudaDevAttrL2CacheSize},
        {&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin},
        {&shared_all, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
        {&threads, cudaDevAttrMaxThreadsPerMultiProcessor},
        {&warp, cudaDevAttrWarpSize},
    };
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++) {
        int value = 0;
        QC_TRY(qc_cuda_check(cudaDeviceGetAttribute(&value, facts[i].which, d->index),
                             "asking for a device's properties", err));
        *facts[i].value = value > 0 ? (uint64_t)value : 0;
    }
    QC_TRY(qc_cuda_check(cudaGetDeviceProperties(&properties, d->index),
                         "asking for a device's name", err));
    QC_TRY(qc_cuda_check(cudaDeviceGetPCIBusId(d->pci, (int)sizeof d->pci, d->index),
                         "asking for a device's bus", err));
    QC_TRY(qc_cuda_check(cudaDriverGetVersion(&d->driver_version),
                         "asking for the driver's version", err));
    QC_TRY(qc_cuda_check(cudaRuntimeGetVersion(&d->runtime_version),
                         "asking for the runtime's version", err));
    (void)snprintf(d->name, sizeof d->name, "%.*s", (int)sizeof d->name - 1, properties.name);
    /* CUDA writes the hexadecimal digits of a bus in capitals, but the kernel and NVML do not. */
    for (char *c = d->pci; *c; c++)
        if (*c >= 'A' && *c <= 'F')
            *c = (char)(*c - 'A' + 'a');
    d->memory_bytes = properties.totalGlobalMem;
    d->sm = (unsigned)(major * 10 + minor);
    d->multiprocessors = (unsigned)multiprocessors;
    d->l2_bytes = l2;
    d->shared_block_bytes = (uint32_t)shared;
    d->shared_multiprocessor_bytes = (uint32_t)shared_all;
    d->warps_multiprocessor = (uint32_t)(threads / (warp ? warp : 32));
    return QC_OK;
}

/* Reads what the device's kernels were compiled for. The runtime answers only for the current
 * device. */
static qc_status read_code(qc_cuda_device *d, qc_error *err)
{
    int before = d->index;
    QC_TRY(qc_cuda_check(cudaGetDevice(&before), "asking for the current device", err));
    if (before != d->index)
        QC_TRY(qc_cuda_use(d, err));
    qc_status st = qc_cuda_compiled_for(&d->code, err);
    if (before != d->index)
        given_back(cudaSetDevice(before));
    return st;
}

qc_status qc_cuda_usable(qc_error *err)
{
    int count = 0;
    char why[256] = "";
    qc_cuda_device_count(&count, why, sizeof why);
    if (count == 0)
        QC_FAIL(err, QC_ERR_DEVICE, "GPUs cannot be used: %s", why);
    return QC_OK;
}

qc_status qc_cuda_device_open(qc_cuda_device *out, int index, qc_error *err)
{
    int count = 0;
    char why[256] = "";
    if (!out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_cuda_device_open: out is NULL");
    memset(out, 0, sizeof *out);
    qc_cuda_device_count(&count, why, sizeof why);
    if (count == 0)
        QC_FAIL(err, QC_ERR_DEVICE, "there is no cuda:%d: %s", index, why);
    if (index < 0 || index >= count)
        QC_FAIL(err, QC_ERR_DEVICE, "there is no cuda:%d; CUDA shows %d GPU%s", index, count,
                qc_plural((uint64_t)count));
    out->index = index;
    QC_TRY(read_facts(out, err));
    if (!qc_cuda_code_runs(built_code, out->sm))
        QC_FAIL(err, QC_ERR_DEVICE,
                "cuda:%d (%s) is an sm_%u, and this build has no code for it (%s); "
                "docs/building.md says how to build for it",
                index, out->name, out->sm, built_words);
    return read_code(out, err);
}

qc_status qc_cuda_use(const qc_cuda_device *device, qc_error *err)
{
    if (!device)
        QC_FAIL(err, QC_ERR_USAGE, "qc_cuda_use: the device is NULL");
    return qc_cuda_check(cudaSetDevice(device->index), "choosing a device", err);
}

qc_status qc_cuda_current(int *index, qc_error *err)
{
    return qc_cuda_check(cudaGetDevice(index), "asking for the current device", err);
}

qc_status qc_cuda_memory(uint64_t *free_bytes, uint64_t *total_bytes, qc_error *err)
{
    size_t f = 0, t = 0;
    QC_TRY(qc_cuda_check(cudaMemGetInfo(&f, &t), "asking for a device's free memory", err));
    *free_bytes = f;
    *total_bytes = t;
    return QC_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static qc_status allocate(void *out, size_t bytes, int pinned, qc_error *err)
{
    char what[96];
    void *p = NULL;
    cudaError_t code = cudaSuccess;
    /* Portable memory is pinned for every device, not only the current one. */
    if (bytes > 0)
        code = pinned ? cudaHostAlloc(&p, bytes, cudaHostAllocPortable) : cudaMalloc(&p, bytes);
    (void)snprintf(what, sizeof what, "allocating %zu bytes of %s memory", bytes,
                   pinned ? "pinned" : "device");
    memcpy(out, &p, sizeof p);
    return qc_cuda_check(code, what, err);
}

qc_status(qc_cuda_malloc)(void *out, size_t bytes, qc_error *err)
{
    return allocate(out, bytes, 0, err);
}

void qc_cuda_free(void *p)
{
    if (p)
        given_back(cudaFree(p));
}

qc_status(qc_cuda_host_malloc)(void *out, size_t bytes, qc_error *err)
{
    return allocate(out, bytes, 1, err);
}

void qc_cuda_host_free(void *p)
{
    if (p)
        given_back(cudaFreeHost(p));
}

static qc_status copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                      const char *what, qc_cuda_stream s, qc_error *err)
{
    if (bytes == 0)
        return QC_OK;
    return qc_cuda_check(cudaMemcpyAsync(to, from, bytes, kind, s), what, err);
}

qc_status qc_cuda_to_device(void *device, const void *host, size_t bytes, qc_cuda_stream s,
                            qc_error *err)
{
    return copy(device, host, bytes, cudaMemcpyHostToDevice, "copying to the device", s, err);
}

qc_status qc_cuda_to_host(void *host, const void *device, size_t bytes, qc_cuda_stream s,
                          qc_error *err)
{
    return copy(host, device, bytes, cudaMemcpyDeviceToHost, "copying to the host", s, err);
}

qc_status qc_cuda_copy(void *to, const void *from, size_t bytes, qc_cuda_stream s, qc_error *err)
{
    return copy(to, from, bytes, cudaMemcpyDeviceToDevice, "copying on the device", s, err);
}

qc_status qc_cuda_fill(void *device, int byte, size_t bytes, qc_cuda_stream s, qc_error *err)
{
    if (bytes == 0)
        return QC_OK;
    return qc_cuda_check(cudaMemsetAsync(device, byte, bytes, s), "filling device memory", err);
}

/* ---- streams and events ---------------------------------------------------------------------- */

qc_status qc_cuda_stream_create(qc_cuda_stream *out, qc_error *err)
{
    *out = NULL;
    return qc_cuda_check(cudaStreamCreateWithFlags(out, cudaStreamNonBlocking), "making a stream",
                         err);
}

void qc_cuda_stream_destroy(qc_cuda_stream s)
{
    if (s)
        given_back(cudaStreamDestroy(s));
}

qc_status qc_cuda_stream_synchronize(qc_cuda_stream s, qc_error *err)
{
    return qc_cuda_check(cudaStreamSynchronize(s), "waiting for a stream", err);
}

qc_status qc_cuda_event_create(qc_cuda_event *out, int timing, qc_error *err)
{
    /* A thread that waits for an event without timing sleeps, and leaves the CPU to others. */
    unsigned flags = timing ? cudaEventDefault : cudaEventDisableTiming | cudaEventBlockingSync;
    *out = NULL;
    return qc_cuda_check(cudaEventCreateWithFlags(out, flags), "making an event", err);
}

void qc_cuda_event_destroy(qc_cuda_event e)
{
    if (e)
        given_back(cudaEventDestroy(e));
}

qc_status qc_cuda_event_record(qc_cuda_event e, qc_cuda_stream s, qc_error *err)
{
    return qc_cuda_check(cudaEventRecord(e, s), "recording an event", err);
}

qc_status qc_cuda_event_synchronize(qc_cuda_event e, qc_error *err)
{
    return qc_cuda_check(cudaEventSynchronize(e), "waiting for an event", err);
}

qc_status qc_cuda_stream_wait(qc_cuda_stream s, qc_cuda_event e, qc_error *err)
{
    return qc_cuda_check(cudaStreamWaitEvent(s, e, 0), "making a stream wait", err);
}

qc_status qc_cuda_event_elapsed(double *milliseconds, qc_cuda_event begin, qc_cuda_event end,
                                qc_error *err)
{
    float ms = 0;
    QC_TRY(qc_cuda_check(cudaEventElapsedTime(&ms, begin, end), "reading a time", err));
    *milliseconds = (double)ms;
    return QC_OK;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

qc_status qc_cuda_capture_begin(qc_cuda_stream s, qc_error *err)
{
    /* The capture is thread-local: what other threads do meanwhile is neither captured nor
     * forbidden. */
    return qc_cuda_check(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal),
                         "beginning to capture", err);
}

qc_status qc_cuda_capture_end(qc_cuda_graph *out, qc_cuda_stream s, qc_error *err)
{
    cudaGraph_t graph = NULL;
    *out = NULL;
    QC_TRY(qc_cuda_check(cudaStreamEndCapture(s, &graph), "ending to capture", err));
    qc_status st =
        qc_cuda_check(cudaGraphInstantiateWithFlags(out, graph, 0), "making a graph", err);
    given_back(cudaGraphDestroy(graph));
    if (st != QC_OK)
        *out = NULL;
    return st;
}

qc_status qc_cuda_capture_of(unsigned long long *id, qc_cuda_stream s, qc_error *err)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    *id = 0;
#if CUDART_VERSION >= 13000
    cudaError_t code = cudaStreamGetCaptureInfo(s, &status, id, NULL, NULL, NULL, NULL);
#else
    cudaError_t code = cudaStreamGetCaptureInfo_v2(s, &status, id, NULL, NULL, NULL);
#endif
    QC_TRY(qc_cuda_check(code, "asking whether a stream is captured", err));
    if (status == cudaStreamCaptureStatusNone)
        *id = 0;
    return QC_OK;
}

qc_status qc_cuda_graph_launch(qc_cuda_graph g, qc_cuda_stream s, qc_error *err)
{
    return qc_cuda_check(cudaGraphLaunch(g, s), "launching a graph", err);
}

void qc_cuda_graph_destroy(qc_cuda_graph g)
{
    if (g)
        given_back(cudaGraphExecDestroy(g));
}
