/* All PTX of qconv, one wrapper per instruction, and the conversions of 16-bit floats. Under
 * QC_CUDA_SHIM the same names come from tests/shim, where each does on the CPU what the PTX ISA
 * says, fragment layouts included.
 *
 * A wrapper for an instruction that the target does not have traps: kernels are chosen by compute
 * capability on the host (kernels/matmul_plan.h), so it is never reached.
 *
 * Source: PTX ISA 8.x, "Warp Level Matrix Multiply-Accumulate Instructions", "Data Movement". */
#ifndef QC_KERNELS_PTX_CUH
#define QC_KERNELS_PTX_CUH

#include "kernels/cuda_launch.cuh"

#ifdef QC_CUDA_SHIM
#include <shim_ptx.h>
#else

/* ---- loads ----------------------------------------------------------------------------------- */

/* Loads 16 bytes of global memory that are read once and not kept in L1. p: 16-byte aligned. */
QC_DEVICE uint4 qc_ld_stream_16(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* Shared memory by its address within the block: 32 bits, which arithmetic on bytes can make. */
QC_DEVICE uint32_t qc_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

QC_DEVICE uint32_t qc_ld_shared_4(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

/* cp.async (sm_80): 16 bytes from global to shared memory, past the registers; only the first
 * `bytes` (0 or 16) are read and the rest of the 16 is zero. Visible to the thread after
 * qc_cp_async_wait, to others after a barrier behind that. */
QC_DEVICE void qc_cp_async_16(void *shared, const void *global, unsigned bytes)
{
#if QC_ARCH >= 80
    unsigned s = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s), "l"(global), "r"(bytes)
                 : "memory");
#else
    (void)shared, (void)global, (void)bytes;
    __trap();
#endif
}

/* The same for what is read once and in order: L2 fetches the whole 128 bytes around it. */
QC_DEVICE void qc_cp_async_stream_16(void *shared, const void *global, unsigned bytes)
{
#if QC_ARCH >= 80
    unsigned s = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(s), "l"(global),
                 "r"(bytes)
                 : "memory");
#else
    (void)shared, (void)global, (void)bytes;
    __trap();
#endif
}

/* The same for 4 bytes, 0 or all of which are read. */
QC_DEVICE void qc_cp_async_4(void *shared, const void *global, unsigned bytes)
{
#if QC_ARCH >= 80
    unsigned s = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s), "l"(global), "r"(bytes)
                 : "memory");
#else
    (void)shared, (void)global, (void)bytes;
    __trap();
#endif
}

/* Closes the group of copies started since the last commit. */
QC_DEVICE void qc_cp_async_commit(void)
{
#if QC_ARCH >= 80
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    __trap();
#endif
}

/* Waits until at most `pending` of the newest groups are still under way. */
template <int pending> QC_DEVICE void qc_cp_async_wait(void)
{
#if QC_ARCH >= 80
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
    __trap();
#endif
}

/* ldmatrix (sm_75): four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of
 * matrix l / 8 (16 bytes, aligned); r[i] is then elements (lane / 4, 2 * (lane % 4) + {0, 1}) of
 * matrix i. */
QC_DEVICE void qc_ldmatrix_x4(uint32_t r[4], const void *row)
{
#if QC_ARCH >= 75
    unsigned s = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(s)
                 : "memory");
#else
    (void)r, (void)row;
    __trap();
#endif
}

/* ---- kernels behind one another ------------------------------------------------------------- */

/* Programmatic dependent launch (code for sm_90): a kernel launched with qc_cuda_launch_overlapping
 * may start before the kernel in front of it in the stream has ended, and even before the one in
 * front of that, if the kernel between them has released early. qc_grid_wait returns when the
 * kernel in front has ended and all of its writes are there. In other code it does nothing, and the
 * kernel must be launched so that it starts behind the other. The rules:
 *
 *   - Before the wait a thread reads nothing that a kernel before it in the stream may write, and
 *     writes to no global memory. Parameters, constants and shared memory are free; so are weights
 *     where the caller says that they are complete (qc_matmul_weights).
 *   - Every thread waits before it ends, also one that has nothing to do. The wait is for the
 *     kernel in front only; that the ones before that have ended too follows only if that
 *     kernel's threads have waited for them in turn. */
QC_DEVICE void qc_grid_wait(void)
{
#if QC_ARCH >= 90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Once all blocks have called this or ended, the next kernel may start. */
QC_DEVICE void qc_grid_release(void)
{
#if QC_ARCH >= 90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- between warps, by words of shared memory ------------------------------------------------ */

/* Adds v to *p and returns what was there: a release and an acquire within the block. */
QC_DEVICE uint32_t qc_shared_add(uint32_t *p, uint32_t v)
{
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(qc_shared_address(p)), "r"(v)
                 : "memory");
    return before;
}

/* Returns once another warp has set *p to v, and sees what that warp wrote before. */
QC_DEVICE void qc_shared_wait(const uint32_t *p, uint32_t v)
{
    uint32_t now;
    do
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                     : "=r"(now)
                     : "r"(qc_shared_address(p))
                     : "memory");
    while (now != v);
}

QC_DEVICE void qc_shared_set(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(qc_shared_address(p)), "r"(v)
                 : "memory");
}

/* ---- bits ------------------------------------------------------------------------------------ */

/* (a & mask) | b in one instruction. The compiler makes two of it where it sees that no bits meet,
 * because it then adds. */
QC_DEVICE uint32_t qc_and_or(uint32_t a, uint32_t mask, uint32_t b)
{
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(a), "r"(mask), "r"(b));
    return v;
}

/* Returns v, but the compiler does not know that it is v: what follows from it is calculated again
 * instead of kept, where registers are short. */
QC_DEVICE unsigned qc_anew(unsigned v)
{
    asm volatile("" : "+r"(v));
    return v;
}

/* ---- matrix products: d += a * b, float16 in, float accumulators ----------------------------- */

/* mma.m8n8k4 (sm_70): four products, one per quad pair: lanes 4q .. 4q+3 and 16+4q .. 16+4q+3. With
 * i = lane % 4 + (lane >= 16 ? 4 : 0):
 *   a[2]  row i of A (8x4), 4 halves in k order      b[2]  column i of B (4x8), likewise
 *   d[8]  element e: row (lane & 1) + (e & 2) + (lane >= 16 ? 4 : 0), column (e & 4) + (lane & 2) +
 *         (e & 1) */
QC_DEVICE void qc_mma_m8n8k4(float d[8], const uint32_t a[2], const uint32_t b[2])
{
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}

/* mma.m16n8k16 (sm_80). With g = lane / 4, t = lane % 4:
 *   a[4]  A (16x16): a[0] (g, 2t..), a[1] (g + 8, 2t..), a[2] (g, 2t + 8..), a[3] (g + 8, 2t + 8..)
 *   b[2]  B (16x8):  b[0] (k = 2t.., n = g), b[1] (k = 2t + 8.., n = g)
 *   d[4]  D (16x8):  d[0], d[1] (g, 2t..), d[2], d[3] (g + 8, 2t..) */
QC_DEVICE void qc_mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if QC_ARCH >= 80
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    (void)d, (void)a, (void)b;
    __trap();
#endif
}

/* d = a * b: the first of a sum. */
QC_DEVICE void qc_mma_m16n8k16_first(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if QC_ARCH >= 80
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
#else
    (void)d, (void)a, (void)b;
    __trap();
#endif
}

/* ---- 16-bit floats --------------------------------------------------------------------------- */
/* Narrowing rounds once, to nearest even, and overflows to infinity. A NaN stays a NaN, but its
 * bits are not specified: files that must equal the CPU in NaNs use quant/quant_half.h's rules on
 * the bits. */

QC_DEVICE float qc_float_of_half(uint16_t h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

QC_DEVICE uint16_t qc_half_of_float(float f)
{
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

/* lo in the lower 16 bits */
QC_DEVICE uint32_t qc_half2_of_floats(float lo, float hi)
{
#if QC_ARCH >= 80
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
#else
    return (uint32_t)qc_half_of_float(lo) | (uint32_t)qc_half_of_float(hi) << 16;
#endif
}

/* a * b, each half rounded on its own */
QC_DEVICE uint32_t qc_half2_mul(uint32_t a, uint32_t b)
{
    uint32_t v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

/* a * b + c, each half rounded once */
QC_DEVICE uint32_t qc_half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t v;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
    return v;
}

/* a - b, each half rounded on its own */
QC_DEVICE uint32_t qc_half2_sub(uint32_t a, uint32_t b)
{
    uint32_t v;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

QC_DEVICE float qc_float_of_bf16(uint16_t h)
{
    return __uint_as_float((uint32_t)h << 16);
}

QC_DEVICE uint16_t qc_bf16_of_float(float f)
{
    uint32_t u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x0040u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* ---- largest magnitudes ---------------------------------------------------------------------- */
/* The larger of a, whose sign bits are clear, and |b|; a NaN in either counts as larger than any
 * number. Below sm_80, where max drops NaNs, bit patterns are compared, whose order is the same. */

QC_DEVICE uint32_t qc_u16x2_largest_(uint32_t a, uint32_t b)
{
    b &= 0x7fff7fffu;
    uint32_t keep = (((a | 0x80008000u) - b) >> 15 & 0x00010001u) * 0xffffu;
    return (a & keep) | (b & ~keep);
}

QC_DEVICE uint32_t qc_float_largest(uint32_t a, uint32_t b)
{
#if QC_ARCH >= 80
    uint32_t v;
    asm("{\n.reg .f32 t;\nabs.f32 t, %2;\nmax.NaN.f32 %0, %1, t;\n}" : "=r"(v) : "r"(a), "r"(b));
    return v;
#else
    b &= 0x7fffffffu;
    return a > b ? a : b;
#endif
}

QC_DEVICE uint32_t qc_half2_largest(uint32_t a, uint32_t b)
{
#if QC_ARCH >= 80
    uint32_t v;
    asm("{\n.reg .b32 t;\nabs.f16x2 t, %2;\nmax.NaN.f16x2 %0, %1, t;\n}"
        : "=r"(v)
        : "r"(a), "r"(b));
    return v;
#else
    return qc_u16x2_largest_(a, b);
#endif
}

QC_DEVICE uint32_t qc_bf16x2_largest(uint32_t a, uint32_t b)
{
#if QC_ARCH >= 80
    uint32_t v;
    asm("{\n.reg .b32 t;\nabs.bf16x2 t, %2;\nmax.NaN.bf16x2 %0, %1, t;\n}"
        : "=r"(v)
        : "r"(a), "r"(b));
    return v;
#else
    return qc_u16x2_largest_(a, b);
#endif
}

#endif
#endif
