/* What the ceilings need beyond kernels/ptx.cuh: clocks, the number of the multiprocessor, loads
 * with hints, and programmatic dependent launch. On the shim, something stands in for each of them.
 * This file also finds how many blocks fit.
 *
 * Source: PTX ISA 8.x, "Special Registers", "ld", "griddepcontrol". */
#ifndef QC_BENCH_CEILINGS_PTX_CUH
#define QC_BENCH_CEILINGS_PTX_CUH

#include "bench/ceilings.h"
#include "kernels/ptx.cuh"

#ifdef QC_CUDA_SHIM

#include <time.h>

QC_DEVICE uint64_t qc_ceiling_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

QC_DEVICE uint64_t qc_ceiling_clock(void)
{
    return qc_ceiling_ns();
}

/* On the shim, blocks run one after the other. */
QC_DEVICE unsigned qc_ceiling_place(void)
{
    return blockIdx.x;
}

template <bool prefetch> QC_DEVICE uint2 qc_ceiling_load_8(const void *p)
{
    if (reinterpret_cast<uintptr_t>(p) % 8)
        qc_shim_fault("8-byte load from %p, which is not aligned", p);
    uint2 v;
    memcpy(&v, p, sizeof(v));
    return v;
}

/* The shim copies at once. Waiting is a barrier of all lanes of the warp. */
QC_DEVICE void qc_ceiling_bulk_begin(uint64_t *)
{
}

QC_DEVICE void qc_ceiling_bulk_copy(void *shared, const void *global, unsigned bytes, uint64_t *)
{
    qc_shim_need_sm("cp.async.bulk", 90);
    for (unsigned i = 0; i < bytes; i += 16)
        qc_shim_check_shared("cp.async.bulk", static_cast<unsigned char *>(shared) + i, 16);
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16)
        qc_shim_fault("cp.async.bulk from %p to %p, which are not both aligned", global, shared);
    memcpy(shared, global, bytes);
}

QC_DEVICE void qc_ceiling_bulk_wait(uint64_t *, unsigned)
{
    __syncwarp();
}

QC_DEVICE void qc_ceiling_next_may_begin(void)
{
}

QC_DEVICE void qc_ceiling_wait_previous(void)
{
}

#else

/* The multiprocessor's clock. What the thread does before it has begun before it. */
QC_DEVICE uint64_t qc_ceiling_clock(void)
{
    uint64_t v;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(v)::"memory");
    return v;
}

/* Nanoseconds, the same on all multiprocessors. They move in steps of up to a microsecond. */
QC_DEVICE uint64_t qc_ceiling_ns(void)
{
    uint64_t v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
    return v;
}

QC_DEVICE unsigned qc_ceiling_place(void)
{
    unsigned v;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
    return v;
}

/* Loads 8 bytes that are read once. With `prefetch`, L2 is to fetch the 128 bytes around them. */
template <bool prefetch> QC_DEVICE uint2 qc_ceiling_load_8(const void *p)
{
    uint2 v;
    if constexpr (!prefetch) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(v.x), "=r"(v.y)
                     : "l"(p));
    } else {
#if QC_ARCH >= 80
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                     : "=r"(v.x), "=r"(v.y)
                     : "l"(p));
#else
        (void)p;
        v = make_uint2(0, 0);
        __trap();
#endif
    }
    return v;
}

/* cp.async.bulk (sm_90, PTX ISA 8.0): one thread asks for bytes (a multiple of 16) to be copied
 * from global to shared memory, both 16-byte aligned. One thread sets up a barrier in shared memory
 * and tells it how many bytes to expect. The barrier's phases count from 0, and a wait names the
 * parity of a phase. */
#if QC_ARCH >= 90 && __CUDACC_VER_MAJOR__ >= 12
QC_DEVICE void qc_ceiling_bulk_begin(uint64_t *barrier)
{
    unsigned b = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

QC_DEVICE void qc_ceiling_bulk_copy(void *shared, const void *global, unsigned bytes,
                                    uint64_t *barrier)
{
    unsigned s = (unsigned)__cvta_generic_to_shared(shared);
    unsigned b = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(s),
                 "l"(global), "r"(bytes), "r"(b)
                 : "memory");
}

QC_DEVICE void qc_ceiling_bulk_wait(uint64_t *barrier, unsigned parity)
{
    unsigned b = (unsigned)__cvta_generic_to_shared(barrier), done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(b), "r"(parity)
                     : "memory");
}
#else
QC_DEVICE void qc_ceiling_bulk_begin(uint64_t *barrier)
{
    (void)barrier;
    __trap();
}

QC_DEVICE void qc_ceiling_bulk_copy(void *shared, const void *global, unsigned bytes,
                                    uint64_t *barrier)
{
    (void)shared, (void)global, (void)bytes, (void)barrier;
    __trap();
}

QC_DEVICE void qc_ceiling_bulk_wait(uint64_t *barrier, unsigned parity)
{
    (void)barrier, (void)parity;
    __trap();
}
#endif

/* griddepcontrol (sm_90). A kernel that was not launched to overlap goes on at once. */
QC_DEVICE void qc_ceiling_next_may_begin(void)
{
#if QC_ARCH >= 90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

QC_DEVICE void qc_ceiling_wait_previous(void)
{
#if QC_ARCH >= 90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif

/* qc_mma_m8n8k4 where it is an instruction. From sm_80 on it is a subroutine with a stack, which is
 * not to be measured, so this traps. */
QC_DEVICE void qc_ceiling_mma_884(float d[8], const uint32_t a[2], const uint32_t b[2])
{
#if QC_ARCH < 80 || defined(QC_CUDA_SHIM)
    qc_mma_m8n8k4(d, a, b);
#else
    (void)d, (void)a, (void)b;
    __trap();
#endif
}

/* ---- spans ----------------------------------------------------------------------------------- */

/* All threads of the block call both of these. What lies between them is timed. */
QC_DEVICE void qc_ceiling_span_begin(qc_ceiling_span *spans)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        spans[blockIdx.x].multiprocessor = qc_ceiling_place();
        spans[blockIdx.x].ns_begin = qc_ceiling_ns();
        spans[blockIdx.x].clock_begin = qc_ceiling_clock();
    }
}

QC_DEVICE void qc_ceiling_span_end(qc_ceiling_span *spans)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        spans[blockIdx.x].clock_end = qc_ceiling_clock();
        spans[blockIdx.x].ns_end = qc_ceiling_ns();
    }
}

/* ---- host ------------------------------------------------------------------------------------ */

/* How many blocks of a kernel a multiprocessor of the current device has room for. It is 0 if the
 * kernel's shared memory is more than a block can have. */
template <typename Kernel>
static inline qc_status qc_ceiling_room(unsigned *out, Kernel *kernel, unsigned threads,
                                        size_t shared_bytes, const char *what, qc_error *err)
{
    size_t most = 0;
    *out = 0;
    QC_TRY(qc_cuda_shared_most(&most, what, err));
    if (shared_bytes > most)
        return QC_OK;
    QC_TRY(qc_cuda_allow_shared(kernel, shared_bytes, what, err));
#ifdef QC_CUDA_SHIM
    (void)threads;
    *out = 2;
#else
    int blocks = 0;
    QC_TRY(qc_cuda_check(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, (int)threads, shared_bytes),
        what, err));
    *out = (unsigned)blocks;
#endif
    /* Roofs are measured with all of these blocks. */
    return qc_cuda_carve_out(reinterpret_cast<const void *>(kernel), shared_bytes, *out, what, err);
}

#endif
