/* The wrappers of kernels/ptx_hopper.cuh on the CPU shim: same names, same contracts (which stand
 * there). shim_async.c tells when things happen and what is found out. */
#ifndef QC_SHIM_HOPPER_H
#define QC_SHIM_HOPPER_H

#include <shim_ptx.h>

static inline void qc_mbarrier_init(uint64_t *barrier, uint32_t count)
{
    qc_shim_mbarrier_init(barrier, count);
}
static inline void qc_mbarrier_ready(void)
{
    qc_shim_mbarrier_ready();
}
static inline void qc_mbarrier_arrive(uint64_t *barrier)
{
    qc_shim_mbarrier_arrive(barrier, 0);
}
static inline void qc_mbarrier_arrive_copied(uint64_t *barrier)
{
    qc_shim_mbarrier_arrive_copied(barrier);
}
static inline void qc_mbarrier_expect(uint64_t *barrier, uint32_t bytes)
{
    qc_shim_mbarrier_arrive(barrier, bytes);
}
static inline void qc_mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    qc_shim_mbarrier_wait(barrier, parity);
}
static inline void qc_bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
    qc_shim_bulk_load(shared, global, bytes, barrier);
}

template <int count> static inline void qc_registers_fewer(void)
{
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "what setmaxnreg takes");
    qc_shim_registers("setmaxnreg.dec", count);
}
template <int count> static inline void qc_registers_more(void)
{
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "what setmaxnreg takes");
    qc_shim_registers("setmaxnreg.inc", count);
}

static inline void qc_wgmma_operand(uint32_t (&a)[4])
{
    (void)a;
}
static inline void qc_wgmma_fence(void)
{
    qc_shim_wgmma_fence();
}
static inline void qc_wgmma_commit(void)
{
    qc_shim_wgmma_commit();
}
template <int pending> static inline void qc_wgmma_wait(void)
{
    qc_shim_wgmma_wait(pending);
}

namespace qc_shim
{
/* How sums are rounded: shim_ptx.h, matrix products. */
QC_SHIM_UNSEEN static inline void wgmma_multiply(unsigned n, const uint32_t (*a)[4],
                                                 const uint16_t *b, float *d)
{
    float rows[16][16], column[16];
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned h = 0; h < 2; h++) {
            rows[g][2 * t + h] = half_of(a[lane], h);
            rows[g + 8][2 * t + h] = half_of(a[lane], 2 + h);
            rows[g][2 * t + 8 + h] = half_of(a[lane], 4 + h);
            rows[g + 8][2 * t + 8 + h] = half_of(a[lane], 6 + h);
        }
    }
    for (unsigned j = 0; j < n; j++) {
        for (unsigned k = 0; k < 16; k++)
            column[k] = float_of_half(b[(j / 8 * 2 + k / 8) * 64 + j % 8 * 8 + k % 8]);
        for (unsigned row = 0; row < 16; row++) {
            unsigned lane = row % 8 * 4 + j % 8 / 2;
            float *sum = &d[lane * (n / 2) + j / 8 * 4 + row / 8 * 2 + j % 2];
            for (unsigned k = 0; k < 16; k++)
                *sum += rows[row][k] * column[k];
        }
    }
}
} // namespace qc_shim

template <unsigned half>
static inline void qc_wgmma(float (&d)[half], const uint32_t (&a)[4], uint64_t b, int add)
{
    constexpr unsigned n = 2 * half;
    static_assert(n == 16 || n == 32 || n == 64 || n == 128 || n == 256, "as in ptx_hopper.cuh");
    const qc_shim_product p = {n, add, b, a, d, qc_shim::wgmma_multiply};
    qc_shim_wgmma(&p);
}

#endif
