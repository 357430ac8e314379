/* The CPU shim's CUDA runtime: memory, errors, lazy streams, events, graphs, several devices. */
#include "tests/shim/shim_testing.h"

#include <pthread.h>

namespace
{
static __global__ void add_kernel(int *p, int n, int by)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n)
        p[i] += by;
}

static __global__ void touch_kernel(unsigned char *p, long at, int write)
{
    if (write)
        p[at] = 1;
    else
        __threadfence(), p[0] = (unsigned char)(p[at] + p[0]);
}

static int *pinned(size_t n)
{
    void *p;
    CUDA_OK(cudaHostAlloc(&p, n * sizeof(int), cudaHostAllocPortable));
    return (int *)p;
}

static cudaStream_t stream()
{
    cudaStream_t s;
    CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void test_poison(void **)
{
    int *host = pinned(100), *p;
    for (int i = 0; i < 100; i++)
        assert_int_equal(host[i], -1);
    CUDA_OK(cudaMalloc((void **)&p, 100 * sizeof(int)));
    assert_int_equal((uintptr_t)p % 256, 0);
    cudaStream_t s = stream();
    host[99] = 0;
    CUDA_OK(cudaMemcpyAsync(host, p, 400, cudaMemcpyDeviceToHost, s));
    CUDA_OK(cudaStreamSynchronize(s));
    assert_int_equal(host[99], -1);
    uint64_t bytes;
    assert_int_equal(qc_shim_allocations(&bytes), 2);
    assert_int_equal(bytes, 800);
    CUDA_OK(cudaFree(p));
    CUDA_OK(cudaFreeHost(host));
    CUDA_OK(cudaStreamDestroy(s));
    assert_int_equal(qc_shim_allocations(NULL), 0);
}

static void test_limits(void **)
{
    void *a, *b;
    size_t left, total;
    qc_shim_set_devices("sm_80:108:1MiB");
    CUDA_OK(cudaMalloc(&a, 1 << 19));
    CUDA_OK(cudaMemGetInfo(&left, &total));
    assert_int_equal(left, 1 << 19);
    assert_int_equal(total, 1 << 20);
    assert_int_equal(cudaMalloc(&b, (1 << 19) + 1), cudaErrorMemoryAllocation);
    assert_null(b);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    assert_int_equal(cudaMalloc(&b, SIZE_MAX), cudaErrorMemoryAllocation);
    CUDA_OK(cudaMalloc(&b, 1 << 19));
    CUDA_OK(cudaFree(a));
    CUDA_OK(cudaMalloc(&a, 1 << 18));
    CUDA_OK(cudaFree(a));
    CUDA_OK(cudaFree(b));
    CUDA_OK(cudaFree(NULL));
    assert_int_equal(cudaFree(&left), cudaErrorInvalidValue);
    qc_shim_fail_malloc(2);
    CUDA_OK(cudaMalloc(&a, 10));
    assert_int_equal(cudaHostAlloc(&b, 10, 0), cudaErrorMemoryAllocation);
    CUDA_OK(cudaHostAlloc(&b, 10, 0));
    CUDA_OK(cudaFree(a));
    CUDA_OK(cudaFreeHost(b));
    (void)cudaGetLastError();
    qc_shim_set_devices("sm_90:132:4GiB");
}

static bool touch(size_t bytes, long at, int write)
{
    unsigned char *p;
    cudaStream_t s = stream();
    CUDA_OK(cudaMalloc((void **)&p, bytes));
    QC_LAUNCH(touch_kernel, 1, 1, 0, s, p, at, write);
    CUDA_OK(cudaStreamSynchronize(s));
    CUDA_OK(cudaFree(p));
    CUDA_OK(cudaStreamDestroy(s));
    return true;
}

static bool host_touches()
{
    int *p;
    CUDA_OK(cudaMalloc((void **)&p, 100));
    return *(volatile int *)p == 3;
}

static bool touches_freed()
{
    int *p, *q;
    cudaStream_t s = stream();
    CUDA_OK(cudaMalloc((void **)&p, 400));
    CUDA_OK(cudaMalloc((void **)&q, 400));
    QC_LAUNCH(add_kernel, 1, 1, 0, s, p, 1, 1);
    cudaGraph_t g;
    cudaGraphExec_t x;
    CUDA_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    QC_LAUNCH(add_kernel, 1, 1, 0, s, p, 1, 1);
    CUDA_OK(cudaStreamEndCapture(s, &g));
    CUDA_OK(cudaGraphInstantiateWithFlags(&x, g, 0));
    CUDA_OK(cudaFree(p));
    CUDA_OK(cudaGraphLaunch(x, s));
    CUDA_OK(cudaStreamSynchronize(s));
    return true;
}

static bool other_device()
{
    int *p;
    qc_shim_set_devices("sm_90:1:1MiB,sm_90:1:1MiB");
    CUDA_OK(cudaMalloc((void **)&p, 400));
    CUDA_OK(cudaSetDevice(1));
    cudaStream_t s = stream();
    QC_LAUNCH(add_kernel, 1, 1, 0, s, p, 1, 1);
    return true;
}

struct hidden {
    int *p;
};

static __global__ void hidden_kernel(hidden h)
{
    *h.p = 1;
}

static bool other_device_hidden()
{
    hidden h;
    qc_shim_set_devices("sm_90:1:1MiB,sm_90:1:1MiB");
    CUDA_OK(cudaMalloc((void **)&h.p, 400));
    CUDA_OK(cudaSetDevice(1));
    cudaStream_t s = stream();
    QC_LAUNCH(hidden_kernel, 1, 1, 0, s, h);
    CUDA_OK(cudaStreamSynchronize(s));
    return true;
}

static bool host_argument()
{
    static int here;
    cudaStream_t s = stream();
    QC_LAUNCH(add_kernel, 1, 1, 0, s, &here, 1, 1);
    return true;
}

static void test_bounds(void **)
{
    char text[1000];
    auto inside = []() { return touch(1000, 999, 1) && touch(1000, 0, 1) && touch(512, 511, 0); };
    assert_int_equal(shim_in_child(inside, text, sizeof(text)), SHIM_RIGHT);
    shim_expect_fault([]() { return touch(512, 512, 0); },
                      "0 bytes past the end of allocation 1 of 512 bytes on device 0: kernel "
                      "touch_kernel, block (0,0,0), thread (0,0,0)");
    shim_expect_fault([]() { return touch(1000, 1024, 1); }, "24 bytes past the end of allocation");
    shim_expect_fault([]() { return touch(1000, 1000, 1); },
                      "the byte 0 past the end of allocation 1 of 1000 bytes on device 0 was "
                      "written");
    shim_expect_fault([]() { return touch(1000, -1, 1); },
                      "the byte 1 before allocation 1 of 1000");
    shim_expect_fault([]() { return touch(4096, -1, 0); }, "1 bytes before allocation 1 of 4096");
    shim_expect_fault(host_touches, "host code touches byte 0 of allocation 1 of 100 bytes");
    shim_expect_fault(touches_freed, "touches allocation 1 of 400 bytes on device 0 after it was "
                                     "freed: kernel add_kernel");
    shim_expect_fault(other_device, "argument 0 of kernel add_kernel is memory of device 0");
    shim_expect_fault(other_device_hidden, "touches allocation 1 of 400 bytes on device 0 from "
                                           "device 1: kernel hidden_kernel");
    shim_expect_fault(host_argument, "argument 0 of kernel add_kernel is no memory of the device");
}

/* ---- launches -------------------------------------------------------------------------------- */

struct big_shared {
    unsigned char byte[100 << 10];
};

static __global__ void big_kernel(int *out)
{
    QC_SHARED(big_shared, s);
    s.byte[sizeof(s.byte) - 1] = 1;
    *out = s.byte[sizeof(s.byte) - 1];
}

static void test_configurations(void **)
{
    device_array<int> out(1);
    const struct {
        dim3 grid, block;
        size_t shared;
        cudaError_t want;
    } cases[] = {
        {0, 1, 0, cudaErrorInvalidConfiguration},
        {1, 0, 0, cudaErrorInvalidConfiguration},
        {1, 1025, 0, cudaErrorInvalidConfiguration},
        {1, dim3(32, 33), 0, cudaErrorInvalidConfiguration},
        {1, dim3(1, 1, 65), 0, cudaErrorInvalidConfiguration},
        {dim3(1, 65536), 1, 0, cudaErrorInvalidConfiguration},
        {1, 1, (48 << 10) + 1, cudaErrorInvalidValue},
        {1, 1, 48 << 10, cudaSuccess},
        {1, 1024, 0, cudaSuccess},
    };
    for (const auto &c : cases) {
        QC_LAUNCH(add_kernel, c.grid, c.block, c.shared, out.s, out.p, 1, 1);
        assert_int_equal(cudaPeekAtLastError(), c.want);
        assert_int_equal(cudaGetLastError(), c.want);
        assert_int_equal(cudaGetLastError(), cudaSuccess);
    }
    QC_LAUNCH(add_kernel, 1, 1, 0, (cudaStream_t) nullptr, out.p, 1, 1);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    qc_shim_fail_launch(1);
    QC_LAUNCH(add_kernel, 1, 1, 0, out.s, out.p, 1, 1);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchOutOfResources);

    const void *big = (const void *)big_kernel;
    QC_LAUNCH(big_kernel, 1, 1, sizeof(big_shared), out.s, out.p);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    assert_int_equal(
        cudaFuncSetAttribute(big, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1),
        cudaErrorInvalidValue);
    (void)cudaGetLastError();
    CUDA_OK(
        cudaFuncSetAttribute(big, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(big_shared)));
    SHIM_RUN(out, big_kernel, 1, 1, sizeof(big_shared), out.p);
    int found;
    out.get(&found);
    assert_int_equal(found, 1);
}

static bool too_little_shared()
{
    device_array<int> out(1);
    SHIM_RUN(out, big_kernel, 1, 1, 1000, out.p);
    cudaDeviceSynchronize();
    return true;
}

static void test_shared_size(void **)
{
    shim_expect_fault(too_little_shared,
                      "the kernel uses 102400 bytes of shared memory, launched with 1000");
}

/* ---- streams --------------------------------------------------------------------------------- */

static void test_lazy(void **)
{
    cudaStream_t a = stream(), b = stream();
    cudaEvent_t e;
    CUDA_OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    int *host = pinned(4), *p;
    CUDA_OK(cudaMalloc((void **)&p, 16));
    for (int i = 0; i < 4; i++)
        host[i] = i;
    uint64_t before = qc_shim_kernels_run();
    CUDA_OK(cudaMemcpyAsync(p, host, 16, cudaMemcpyHostToDevice, a));
    QC_LAUNCH(add_kernel, 1, 4, 0, a, p, 4, 10);
    CUDA_OK(cudaEventRecord(e, a));
    CUDA_OK(cudaStreamWaitEvent(b, e, 0));
    QC_LAUNCH(add_kernel, 1, 4, 0, b, p, 4, 100);
    CUDA_OK(cudaMemcpyAsync(host, p, 16, cudaMemcpyDeviceToHost, b));
    QC_LAUNCH(add_kernel, 1, 4, 0, a, p, 4, 1000);
    /* Nothing has run, so the source may still be spoilt. */
    assert_int_equal(qc_shim_kernels_run(), before);
    host[0] = 7;
    /* b takes a along as far as the event. */
    CUDA_OK(cudaStreamSynchronize(b));
    assert_int_equal(qc_shim_kernels_run(), before + 2);
    assert_int_equal(host[0], 117);
    assert_int_equal(host[3], 113);
    /* Asking moves on. */
    assert_int_equal(cudaStreamQuery(a), cudaErrorNotReady);
    assert_int_equal(cudaStreamQuery(a), cudaSuccess);
    assert_int_equal(qc_shim_kernels_run(), before + 3);
    (void)cudaGetLastError();
    /* Of a destroyed stream the rest runs when somebody waits for the device. */
    QC_LAUNCH(add_kernel, 1, 4, 0, a, p, 4, 1);
    CUDA_OK(cudaStreamDestroy(a));
    assert_int_equal(cudaStreamSynchronize(a), cudaErrorInvalidResourceHandle);
    (void)cudaGetLastError();
    assert_int_equal(qc_shim_kernels_run(), before + 3);
    CUDA_OK(cudaFree(p));
    assert_int_equal(qc_shim_kernels_run(), before + 4);
    CUDA_OK(cudaEventDestroy(e));
    CUDA_OK(cudaStreamDestroy(b));
    CUDA_OK(cudaFreeHost(host));
}

/* Pageable memory: taken before the call returns, or waited for. */
static void test_pageable(void **)
{
    device_array<int> p(4);
    int host[4] = {1, 2, 3, 4}, back[4] = {};
    CUDA_OK(cudaMemcpyAsync(p.p, host, 16, cudaMemcpyHostToDevice, p.s));
    host[2] = 9;
    CUDA_OK(cudaMemcpyAsync(back, p.p, 16, cudaMemcpyDeviceToHost, p.s));
    assert_int_equal(back[2], 3);
}

static void test_eager(void **)
{
    device_array<int> p(4);
    uint64_t before = qc_shim_kernels_run();
    qc_shim_set_streams("eager");
    QC_LAUNCH(add_kernel, 1, 4, 0, p.s, p.p, 4, 1);
    assert_int_equal(qc_shim_kernels_run(), before + 1);
    qc_shim_set_streams("lazy");
    QC_LAUNCH(add_kernel, 1, 4, 0, p.s, p.p, 4, 1);
    assert_int_equal(qc_shim_kernels_run(), before + 1);
}

static void test_copies_checked(void **)
{
    device_array<int> p(4), q(4);
    int *host = pinned(4);
    const struct {
        void *to;
        const void *from;
        size_t bytes;
        enum cudaMemcpyKind kind;
        cudaError_t want;
    } cases[] = {
        {p.p, host, 16, cudaMemcpyHostToDevice, cudaSuccess},
        {p.p, host, 16, cudaMemcpyDefault, cudaSuccess},
        {p.p, q.p, 16, cudaMemcpyDeviceToDevice, cudaSuccess},
        {p.p + 1, host, 12, cudaMemcpyHostToDevice, cudaSuccess},
        {p.p, host, 17, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
        {host + 1, p.p, 16, cudaMemcpyDeviceToHost, cudaErrorInvalidValue},
        {p.p, host, 16, cudaMemcpyDeviceToHost, cudaErrorInvalidValue},
        {host, p.p, 16, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
        {p.p, q.p, 16, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
        {NULL, host, 16, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
        {NULL, NULL, 0, cudaMemcpyHostToDevice, cudaSuccess},
    };
    for (const auto &c : cases) {
        assert_int_equal(cudaMemcpyAsync(c.to, c.from, c.bytes, c.kind, p.s), c.want);
        assert_int_equal(cudaGetLastError(), c.want);
    }
    assert_int_equal(cudaMemcpyAsync(p.p, host, 4, cudaMemcpyHostToDevice, NULL),
                     cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaMemsetAsync(host + 1, 0, 16, p.s), cudaErrorInvalidValue);
    CUDA_OK(cudaMemsetAsync(p.p, 0x11, 16, p.s));
    int found[4];
    p.get(found);
    assert_int_equal(found[3], 0x11111111);
    (void)cudaGetLastError();
    CUDA_OK(cudaFreeHost(host));
}

static void test_events(void **)
{
    cudaEvent_t begin, end, plain;
    float ms;
    device_array<int> p(4);
    CUDA_OK(cudaEventCreate(&begin));
    CUDA_OK(cudaEventCreate(&end));
    CUDA_OK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming));
    CUDA_OK(cudaEventSynchronize(begin)); /* never recorded: done */
    CUDA_OK(cudaEventRecord(begin, p.s));
    QC_LAUNCH(add_kernel, 1, 4, 0, p.s, p.p, 4, 1);
    CUDA_OK(cudaEventRecord(end, p.s));
    CUDA_OK(cudaEventRecord(plain, p.s));
    assert_int_equal(cudaEventElapsedTime(&ms, begin, end), cudaErrorNotReady);
    assert_int_equal(cudaEventQuery(end), cudaErrorNotReady);
    CUDA_OK(cudaEventSynchronize(end));
    CUDA_OK(cudaEventQuery(end));
    CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    assert_true(ms >= 0 && ms < 60000);
    CUDA_OK(cudaStreamSynchronize(p.s));
    assert_int_equal(cudaEventElapsedTime(&ms, begin, plain), cudaErrorInvalidResourceHandle);
    /* Destroyed before it was reached. */
    CUDA_OK(cudaEventRecord(end, p.s));
    CUDA_OK(cudaEventDestroy(end));
    CUDA_OK(cudaEventDestroy(begin));
    CUDA_OK(cudaEventDestroy(plain));
    CUDA_OK(cudaStreamSynchronize(p.s));
    (void)cudaGetLastError();
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static void test_graphs(void **)
{
    device_array<int> p(4);
    cudaStream_t other = stream();
    cudaEvent_t fork, join;
    cudaGraph_t g;
    cudaGraphExec_t x;
    int found[4];
    enum cudaStreamCaptureStatus status;
    CUDA_OK(cudaEventCreate(&fork));
    CUDA_OK(cudaEventCreate(&join));
    CUDA_OK(cudaMemsetAsync(p.p, 0, 16, p.s));
    CUDA_OK(cudaStreamBeginCapture(p.s, cudaStreamCaptureModeThreadLocal));
    CUDA_OK(cudaStreamIsCapturing(p.s, &status));
    assert_int_equal(status, cudaStreamCaptureStatusActive);
    QC_LAUNCH(add_kernel, 1, 4, 0, p.s, p.p, 4, 1);
    CUDA_OK(cudaEventRecord(fork, p.s));
    CUDA_OK(cudaStreamWaitEvent(other, fork, 0));
    QC_LAUNCH(add_kernel, 1, 2, 0, other, p.p, 2, 10);
    CUDA_OK(cudaEventRecord(join, other));
    CUDA_OK(cudaStreamWaitEvent(p.s, join, 0));
    QC_LAUNCH(add_kernel, 1, 1, 0, p.s, p.p, 1, 100);
    CUDA_OK(cudaStreamEndCapture(p.s, &g));
    CUDA_OK(cudaGraphInstantiateWithFlags(&x, g, 0));
    CUDA_OK(cudaGraphDestroy(g));
    p.get(found);
    assert_int_equal(found[0], 0);
    for (int i = 0; i < 3; i++)
        CUDA_OK(cudaGraphLaunch(x, p.s));
    CUDA_OK(cudaGraphExecDestroy(x)); /* launched already: runs */
    p.get(found);
    assert_int_equal(found[0], 333);
    assert_int_equal(found[1], 33);
    assert_int_equal(found[3], 3);
    /* Waiting breaks a capture. */
    CUDA_OK(cudaStreamBeginCapture(p.s, cudaStreamCaptureModeThreadLocal));
    assert_int_equal(cudaStreamSynchronize(p.s), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(p.s, &g), cudaErrorStreamCaptureInvalidated);
    assert_null(g);
    CUDA_OK(cudaStreamBeginCapture(p.s, cudaStreamCaptureModeThreadLocal));
    void *m;
    assert_int_equal(cudaMalloc(&m, 1), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(p.s, &g), cudaErrorStreamCaptureInvalidated);
    assert_int_equal(cudaStreamEndCapture(p.s, &g), cudaErrorIllegalState);
    (void)cudaGetLastError();
    CUDA_OK(cudaEventDestroy(fork));
    CUDA_OK(cudaEventDestroy(join));
    CUDA_OK(cudaStreamDestroy(other));
}

/* Of streams in one capture only what waits for another comes after it: without the event one of
 * two graphs has the other order. A stream that the first one does not wait for ends the capture.
 */
static void test_graph_order(void **)
{
    device_array<int> p(1);
    cudaStream_t other = stream();
    cudaEvent_t fork, join;
    CUDA_OK(cudaEventCreate(&fork));
    CUDA_OK(cudaEventCreate(&join));
    for (int waits = 0; waits < 2; waits++) {
        int found[2];
        for (int i = 0; i < 2; i++) {
            cudaGraph_t g;
            cudaGraphExec_t x;
            CUDA_OK(cudaStreamBeginCapture(p.s, cudaStreamCaptureModeThreadLocal));
            CUDA_OK(cudaEventRecord(fork, p.s));
            CUDA_OK(cudaStreamWaitEvent(other, fork, 0));
            CUDA_OK(cudaMemsetAsync(p.p, 1, 4, p.s));
            if (waits) {
                CUDA_OK(cudaEventRecord(fork, p.s));
                CUDA_OK(cudaStreamWaitEvent(other, fork, 0));
            }
            CUDA_OK(cudaMemsetAsync(p.p, 2, 4, other));
            CUDA_OK(cudaEventRecord(join, other));
            CUDA_OK(cudaStreamWaitEvent(p.s, join, 0));
            CUDA_OK(cudaStreamEndCapture(p.s, &g));
            CUDA_OK(cudaGraphInstantiateWithFlags(&x, g, 0));
            CUDA_OK(cudaGraphDestroy(g));
            CUDA_OK(cudaGraphLaunch(x, p.s));
            p.get(&found[i]);
            CUDA_OK(cudaGraphExecDestroy(x));
        }
        assert_int_equal(found[0] == found[1], waits);
        assert_true(!waits || found[0] == 0x02020202);
    }
    cudaGraph_t g;
    unsigned long long id = 0, same = 0;
    enum cudaStreamCaptureStatus status;
    CUDA_OK(cudaStreamBeginCapture(p.s, cudaStreamCaptureModeThreadLocal));
    CUDA_OK(cudaEventRecord(fork, p.s));
    CUDA_OK(cudaStreamWaitEvent(other, fork, 0));
    CUDA_OK(cudaStreamGetCaptureInfo(p.s, &status, &id, nullptr, nullptr, nullptr, nullptr));
    CUDA_OK(cudaStreamGetCaptureInfo(other, &status, &same, nullptr, nullptr, nullptr, nullptr));
    assert_true(id && id == same);
    CUDA_OK(cudaMemsetAsync(p.p, 2, 4, other));
    assert_int_equal(cudaStreamEndCapture(p.s, &g), cudaErrorStreamCaptureUnjoined);
    assert_null(g);
    CUDA_OK(cudaStreamGetCaptureInfo(other, &status, &id, nullptr, nullptr, nullptr, nullptr));
    assert_true(status == cudaStreamCaptureStatusNone && id == 0);
    (void)cudaGetLastError();
    CUDA_OK(cudaEventDestroy(fork));
    CUDA_OK(cudaEventDestroy(join));
    CUDA_OK(cudaStreamDestroy(other));
}

/* ---- devices --------------------------------------------------------------------------------- */

static void test_devices(void **)
{
    int count, v;
    struct cudaDeviceProp prop;
    qc_shim_set_devices("sm_90:132:8GiB,sm_70:80:512MiB");
    CUDA_OK(cudaGetDeviceCount(&count));
    assert_int_equal(count, 2);
    CUDA_OK(cudaGetDeviceProperties(&prop, 1));
    assert_int_equal(prop.major * 10 + prop.minor, 70);
    assert_int_equal(prop.multiProcessorCount, 80);
    assert_true(prop.totalGlobalMem == 512u << 20);
    CUDA_OK(cudaDeviceGetAttribute(&v, cudaDevAttrMaxSharedMemoryPerBlockOptin, 1));
    assert_int_equal(v, 96 << 10);
    assert_int_equal(cudaSetDevice(2), cudaErrorInvalidDevice);
    assert_int_equal(cudaSetDevice(-1), cudaErrorInvalidDevice);
    CUDA_OK(cudaSetDevice(1));
    CUDA_OK(cudaGetDevice(&v));
    assert_int_equal(v, 1);
    {
        /* A stream of another device takes no kernels, and no events. */
        device_array<int> p(1);
        cudaEvent_t e;
        CUDA_OK(cudaSetDevice(0));
        device_array<int> q(1);
        QC_LAUNCH(add_kernel, 1, 1, 0, p.s, q.p, 1, 1);
        assert_int_equal(cudaGetLastError(), cudaErrorInvalidResourceHandle);
        CUDA_OK(cudaEventCreate(&e));
        assert_int_equal(cudaEventRecord(e, p.s), cudaErrorInvalidResourceHandle);
        CUDA_OK(cudaEventDestroy(e));
        CUDA_OK(cudaSetDevice(1));
    }
    (void)cudaGetLastError();
    qc_shim_set_devices("none");
    assert_int_equal(cudaGetDeviceCount(&count), cudaErrorNoDevice);
    assert_int_equal(count, 0);
    void *p;
    assert_int_equal(cudaMalloc(&p, 1), cudaErrorNoDevice);
    qc_shim_set_devices("nodriver");
    assert_int_equal(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
    (void)cudaGetLastError();
    qc_shim_set_devices("sm_90:132:4GiB");
}

/* ---- threads --------------------------------------------------------------------------------- */

enum { WORKERS = 3, ROUNDS = 20, ELEMENTS = 500 };

static void *worker(void *arg)
{
    int *result = (int *)arg;
    device_array<int> p(ELEMENTS);
    int found[ELEMENTS];
    CUDA_OK(cudaMemsetAsync(p.p, 0, sizeof(found), p.s));
    for (int i = 0; i < ROUNDS; i++) {
        QC_LAUNCH(add_kernel, 2, 256, 0, p.s, p.p, ELEMENTS, *result);
        CUDA_OK(cudaStreamSynchronize(p.s));
    }
    p.get(found);
    int right = 1;
    for (int v : found)
        right &= v == ROUNDS * *result;
    *result = right;
    return NULL;
}

static void test_threads(void **)
{
    pthread_t threads[WORKERS];
    int results[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        results[i] = i + 1;
        assert_int_equal(pthread_create(&threads[i], NULL, worker, &results[i]), 0);
    }
    for (int i = 0; i < WORKERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(results[i], 1);
    }
    assert_int_equal(qc_shim_allocations(NULL), 0);
}
} // namespace

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_poison),         cmocka_unit_test(test_limits),
        cmocka_unit_test(test_configurations), cmocka_unit_test(test_shared_size),
        cmocka_unit_test(test_lazy),           cmocka_unit_test(test_pageable),
        cmocka_unit_test(test_eager),          cmocka_unit_test(test_copies_checked),
        cmocka_unit_test(test_events),         cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_graph_order),    cmocka_unit_test(test_devices),
        cmocka_unit_test(test_threads),
    };
    /* First, for the numbers of allocations in its words. */
    const struct CMUnitTest first[] = {cmocka_unit_test(test_bounds)};
    int failed = cmocka_run_group_tests_name("bounds", first, NULL, NULL);
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
