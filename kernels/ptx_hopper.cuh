/* PTX of sm_90a: matrix products of a warpgroup (wgmma), barriers that count bytes (mbarrier), and
 * bulk copies to shared memory. Only code for sm_90a has these instructions; elsewhere a wrapper
 * traps, and matmul_wgmma.cu is the only caller. Under QC_CUDA_SHIM the same names come from
 * tests/shim.
 *
 * Source: PTX ISA 8.x, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions",
 * "Parallel Synchronization and Communication Instructions: mbarrier", "cp.async.bulk". */
#ifndef QC_KERNELS_PTX_HOPPER_CUH
#define QC_KERNELS_PTX_HOPPER_CUH

#include "kernels/ptx.cuh"

/* Describes B of a warpgroup's product: `address` is that of the matrix with the first 8 k and the
 * first 8 columns, from which the one with the next 8 k lies `next_k` bytes on and the one with the
 * next 8 columns 128. */
QC_DEVICE uint64_t qc_wgmma_b(uint32_t address, uint32_t next_k)
{
    return (uint64_t)(address >> 4 & 0x3fffu) | (uint64_t)(next_k >> 4) << 16 |
           (uint64_t)(128 >> 4) << 32;
}

#ifdef QC_CUDA_SHIM
#include <shim_hopper.h>
#else

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define QC_HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define QC_HOPPER_ASM(...) __trap()
#endif

/* ---- barriers that count bytes --------------------------------------------------------------- */
/* A barrier lies in shared memory. A phase of it ends when `count` arrivals have come and all bytes
 * that were announced have arrived. Phases have the parities 0, 1, 0, ... */

/* One thread calls this, then qc_mbarrier_ready; the others use the barrier behind a barrier of the
 * block. */
QC_DEVICE void qc_mbarrier_init(uint64_t *barrier, uint32_t count)
{
    QC_HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(qc_shared_address(barrier)),
                  "r"(count)
                  : "memory");
}

/* Makes barriers that this thread has initialized visible to bulk copies. */
QC_DEVICE void qc_mbarrier_ready(void)
{
    QC_HOPPER_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
}

QC_DEVICE void qc_mbarrier_arrive(uint64_t *barrier)
{
    QC_HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(qc_shared_address(barrier))
                  : "memory");
}

/* Arrives as soon as all cp.async of this thread are there, without making the thread wait. */
QC_DEVICE void qc_mbarrier_arrive_copied(uint64_t *barrier)
{
    QC_HOPPER_ASM(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(qc_shared_address(barrier))
        : "memory");
}

/* Arrives, and announces bytes that copies will bring in this phase. */
QC_DEVICE void qc_mbarrier_expect(uint64_t *barrier, uint32_t bytes)
{
    QC_HOPPER_ASM(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(qc_shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

/* Waits until the phase of this parity has ended. (The phase in front of the first counts as one of
 * parity 1 that has.) */
QC_DEVICE void qc_mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(qc_shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
#else
    (void)barrier, (void)parity;
    __trap();
#endif
}

/* Copies bytes, a multiple of 16, from global to shared memory, both 16-byte aligned. The barrier
 * gets them as bytes that have arrived. What is read here was written before the kernel, or was
 * waited for with qc_grid_wait. */
QC_DEVICE void qc_bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
    QC_HOPPER_ASM(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(qc_shared_address(shared)),
        "l"(global), "r"(bytes), "r"(qc_shared_address(barrier))
        : "memory");
}

/* ---- registers ------------------------------------------------------------------------------- */
/* All four warps of a warpgroup call these: its threads then have so many registers, a multiple of
 * 8. Those that one warpgroup gives up another one can get, which waits for them. */

template <int count> QC_DEVICE void qc_registers_fewer(void)
{
    QC_HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count> QC_DEVICE void qc_registers_more(void)
{
    QC_HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

/* ---- products of a warpgroup ----------------------------------------------------------------- */
/* Four warps, the first of which has a number that 4 divides, multiply together. With g = lane / 4,
 * t = lane % 4 and w the warp's number in the group:
 *
 *   a[4]      A (64 x 16), rows 16 w + .. as in qc_mma_m16n8k16
 *   B         (16 x n) in shared memory: 8 x 8 matrices of 128 bytes, of which a row is 16 bytes
 *             with the 8 elements of one column of B in k order
 *   d[n / 2]  D (64 x n): d[4 i + e] is row 16 w + g + 8 (e / 2), column 8 i + 2 t + e % 2
 *
 * Products run on their own. Neither a nor d may be touched, nor B written, until they were waited
 * for. */

/* Comes before the first product, and before products whose a or d were written since. */
QC_DEVICE void qc_wgmma_fence(void)
{
    QC_HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Comes before qc_wgmma_fence: the compiler has the operand complete here, and not only when the
 * product begins that needs it. */
QC_DEVICE void qc_wgmma_operand(uint32_t (&a)[4])
{
    QC_HOPPER_ASM("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

/* Closes the group of products that were started since the last commit. */
QC_DEVICE void qc_wgmma_commit(void)
{
    QC_HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` of the newest groups are still running. */
template <int pending> QC_DEVICE void qc_wgmma_wait(void)
{
    QC_HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* d = a b, or with `add` d += a b; the size of d says n: 16, 32, 64, 128 or 256. */

#define QC_F4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QC_F16(d, i) QC_F4(d, i), QC_F4(d, i + 4), QC_F4(d, i + 8), QC_F4(d, i + 12)

QC_DEVICE void qc_wgmma(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int add)
{
    QC_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
                  "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
                  "%0, %1, %2, %3, %4, %5, %6, %7"
                  "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
                  : QC_F4(d, 0), QC_F4(d, 4)
                  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

QC_DEVICE void qc_wgmma(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add)
{
    QC_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                  "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                  "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
                  : QC_F16(d, 0)
                  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

QC_DEVICE void qc_wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add)
{
    QC_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                  "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                  "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                  : QC_F16(d, 0), QC_F16(d, 16)
                  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

QC_DEVICE void qc_wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add)
{
    QC_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                  "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                  "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
                  : QC_F16(d, 0), QC_F16(d, 16), QC_F16(d, 32), QC_F16(d, 48)
                  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

QC_DEVICE void qc_wgmma(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add)
{
    QC_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
                  "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
                  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "
                  "%110, %111, "
                  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "
                  "%125, %126, %127"
                  "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;\n}"
                  : QC_F16(d, 0), QC_F16(d, 16), QC_F16(d, 32), QC_F16(d, 48), QC_F16(d, 64),
                    QC_F16(d, 80), QC_F16(d, 96), QC_F16(d, 112)
                  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef QC_F4
#undef QC_F16

#endif
#endif
