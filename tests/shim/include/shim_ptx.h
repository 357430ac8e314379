/* The wrappers of kernels/ptx.cuh on the CPU shim: same names, same contracts (which stand there).
 * Faults that hardware would answer with a trap or with garbage end the process. */
#ifndef QC_SHIM_PTX_H
#define QC_SHIM_PTX_H

#include <shim_launch.h>

namespace qc_shim
{
QC_SHIM_UNSEEN static inline float float_of_half(uint16_t h)
{
    /* Subnormals come out right as well: the factor moves the exponent's bias. */
    float f = __uint_as_float((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
    uint32_t u = __float_as_uint(f) | (uint32_t)(h & 0x8000) << 16;
    if ((h & 0x7c00) == 0x7c00)
        u |= 0x7f800000u;
    return __uint_as_float(u);
}

/* Rounded once, to nearest even; NaN is 0x7fff, as cvt has it. */
static inline uint16_t half_of_double(double v)
{
    if (v != v)
        return 0x7fff;
    uint16_t sign = signbit(v) ? 0x8000 : 0;
    double a = fabs(v);
    if (a >= 65520.0)
        return sign | 0x7c00;
    int exponent;
    (void)frexp(a > 0x1p-15 ? a : 0x1p-15, &exponent); /* a in [2^(exponent - 1), 2^exponent) */
    int unit = exponent - 11 < -24 ? -24 : exponent - 11;
    /* In units of the last place; 2048 of them is the next power of two, which the sum carries. */
    uint16_t units = (uint16_t)nearbyint(ldexp(a, -unit));
    return (uint16_t)(sign | (unsigned)((unit + 24) * 1024 + units));
}
} // namespace qc_shim

/* ---- loads ----------------------------------------------------------------------------------- */

static inline uint4 qc_ld_stream_16(const void *p)
{
    if (reinterpret_cast<uintptr_t>(p) % 16)
        qc_shim_fault("16-byte load from %p, which is not aligned", p);
    uint4 v;
    memcpy(&v, p, sizeof(v));
    return v;
}

/* As on hardware, the block's own does not start at 0. */
static inline uint32_t qc_shared_address(const void *p)
{
    const char *first = static_cast<const char *>(qc_shim_shared(0, 1));
    return qc_shim_shared_begin + (uint32_t)(static_cast<const char *>(p) - first);
}

static inline uint32_t qc_ld_shared_4(uint32_t address)
{
    const char *p = static_cast<const char *>(qc_shim_shared(0, 1)) +
                    ((int32_t)address - (int32_t)qc_shim_shared_begin);
    qc_shim_check_shared("ld.shared", p, 4);
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void qc_grid_wait(void)
{
    qc_shim_grid_wait();
}
static inline void qc_grid_release(void)
{
    qc_shim_grid_release();
}

static inline uint32_t qc_shared_add(uint32_t *p, uint32_t v)
{
    qc_shim_check_shared("an addition", p, sizeof(*p));
    return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
static inline void qc_shared_wait(const uint32_t *p, uint32_t v)
{
    qc_shim_shared_wait(p, v);
}
static inline void qc_shared_set(uint32_t *p, uint32_t v)
{
    qc_shim_shared_set(p, v);
}

static inline void qc_cp_async_16(void *shared, const void *global, unsigned bytes)
{
    qc_shim_cp_async(shared, global, 16, bytes);
}
static inline void qc_cp_async_stream_16(void *shared, const void *global, unsigned bytes)
{
    qc_shim_cp_async(shared, global, 16, bytes);
}
static inline void qc_cp_async_4(void *shared, const void *global, unsigned bytes)
{
    qc_shim_cp_async(shared, global, 4, bytes);
}
static inline void qc_cp_async_commit(void)
{
    qc_shim_cp_commit();
}
template <int pending> static inline void qc_cp_async_wait(void)
{
    qc_shim_cp_wait(pending);
}

namespace qc_shim
{
struct matrix_rows {
    uint32_t row[4]; /* read when the lane arrives */
    uint32_t *out;
};

QC_SHIM_UNSEEN static inline void ldmatrix_compute(void *const *args, unsigned mask)
{
    (void)mask;
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned i = 0; i < 4; i++)
            static_cast<matrix_rows *>(args[lane])->out[i] =
                static_cast<matrix_rows *>(args[8 * i + lane / 4])->row[lane % 4];
}

struct product {
    float *d;
    uint32_t a[4], b[2];
};

/* Element (i, k) of A and (k, j) of B of m8n8k4, in the quad pair of `quad`. */
QC_SHIM_UNSEEN static inline unsigned lane_884(unsigned quad, unsigned i)
{
    return 4 * quad + i % 4 + (i >= 4 ? 16 : 0);
}

QC_SHIM_UNSEEN static inline float half_of(const uint32_t *words, unsigned index)
{
    return qc_shim::float_of_half((uint16_t)(words[index / 2] >> 16 * (index % 2)));
}

QC_SHIM_UNSEEN static inline void mma_884_compute(void *const *args, unsigned mask)
{
    (void)mask;
    for (unsigned quad = 0; quad < 4; quad++) {
        float a[8][4], b[4][8];
        for (unsigned i = 0; i < 8; i++) {
            const product *p = static_cast<product *>(args[lane_884(quad, i)]);
            for (unsigned k = 0; k < 4; k++) {
                a[i][k] = half_of(p->a, k);
                b[k][i] = half_of(p->b, k);
            }
        }
        for (unsigned member = 0; member < 8; member++) {
            unsigned lane = lane_884(quad, member);
            product *p = static_cast<product *>(args[lane]);
            for (unsigned e = 0; e < 8; e++) {
                unsigned row = (lane & 1) + (e & 2) + (lane >= 16 ? 4 : 0);
                unsigned column = (e & 4) + (lane & 2) + (e & 1);
                for (unsigned k = 0; k < 4; k++)
                    p->d[e] += a[row][k] * b[k][column];
            }
        }
    }
}

QC_SHIM_UNSEEN static inline void mma_16816_compute(void *const *args, unsigned mask)
{
    (void)mask;
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        const product *p = static_cast<product *>(args[lane]);
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned h = 0; h < 2; h++) {
            a[g][2 * t + h] = half_of(p->a, h);
            a[g + 8][2 * t + h] = half_of(p->a, 2 + h);
            a[g][2 * t + 8 + h] = half_of(p->a, 4 + h);
            a[g + 8][2 * t + 8 + h] = half_of(p->a, 6 + h);
            b[2 * t + h][g] = half_of(p->b, h);
            b[2 * t + 8 + h][g] = half_of(p->b, 2 + h);
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        product *p = static_cast<product *>(args[lane]);
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned e = 0; e < 4; e++) {
            unsigned row = g + (e & 2 ? 8 : 0), column = 2 * t + (e & 1);
            for (unsigned k = 0; k < 16; k++)
                p->d[e] += a[row][k] * b[k][column];
        }
    }
}
} // namespace qc_shim

static inline unsigned qc_anew(unsigned v)
{
    return v;
}

static inline void qc_ldmatrix_x4(uint32_t r[4], const void *row)
{
    qc_shim_need_sm("ldmatrix", 75);
    qc_shim_check_shared("ldmatrix", row, 16);
    qc_shim::matrix_rows m;
    memcpy(m.row, row, 16);
    m.out = r;
    qc_shim_collect("ldmatrix", 0xffffffffu, &m, qc_shim::ldmatrix_compute);
}

/* ---- matrix products ------------------------------------------------------------------------- */
/* Products of two halves are exact in float; they are added to d one after another in k order, each
 * sum rounded to nearest. Hardware adds the products of an instruction (or of 4 or 8 of its k) to d
 * in one go, in fixed point relative to the largest, and cuts off: sums whose parts are all exact
 * are the same, others differ in the last bits of a float. */

static inline void qc_mma_m8n8k4(float d[8], const uint32_t a[2], const uint32_t b[2])
{
    qc_shim_need_sm("mma.m8n8k4", 70);
    qc_shim::product p = {d, {a[0], a[1], 0, 0}, {b[0], b[1]}};
    qc_shim_collect("mma.m8n8k4", 0xffffffffu, &p, qc_shim::mma_884_compute);
}

static inline void qc_mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    qc_shim_need_sm("mma.m16n8k16", 80);
    qc_shim::product p = {d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    qc_shim_collect("mma.m16n8k16", 0xffffffffu, &p, qc_shim::mma_16816_compute);
}

static inline void qc_mma_m16n8k16_first(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    qc_mma_m16n8k16(d, a, b);
}

/* ---- 16-bit floats --------------------------------------------------------------------------- */

static inline float qc_float_of_half(uint16_t h)
{
    return qc_shim::float_of_half(h);
}

static inline uint16_t qc_half_of_float(float f)
{
    return qc_shim::half_of_double(f);
}

static inline uint32_t qc_half2_of_floats(float lo, float hi)
{
    return (uint32_t)qc_half_of_float(lo) | (uint32_t)qc_half_of_float(hi) << 16;
}

namespace qc_shim
{
/* f on both halves; in double, where products and differences of halves are exact. */
template <typename F, typename... Words> static inline uint32_t half2(F f, Words... words)
{
    uint32_t out = 0;
    for (unsigned shift = 0; shift < 32; shift += 16) {
        double v = f((double)qc_shim::float_of_half((uint16_t)(words >> shift))...);
        out |= (uint32_t)qc_shim::half_of_double(v) << shift;
    }
    return out;
}
} // namespace qc_shim

static inline uint32_t qc_half2_mul(uint32_t a, uint32_t b)
{
    return qc_shim::half2([](double x, double y) { return x * y; }, a, b);
}

/* The product is exact in double. So is the sum, except where it overflows a half, and where the
 * product, which has 22 bits, is so much smaller than z that the half is z in any case. */
static inline uint32_t qc_half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    return qc_shim::half2([](double x, double y, double z) { return x * y + z; }, a, b, c);
}

static inline uint32_t qc_and_or(uint32_t a, uint32_t mask, uint32_t b)
{
    return (a & mask) | b;
}

static inline uint32_t qc_half2_sub(uint32_t a, uint32_t b)
{
    return qc_shim::half2([](double x, double y) { return x - y; }, a, b);
}

static inline float qc_float_of_bf16(uint16_t h)
{
    return __uint_as_float((uint32_t)h << 16);
}

static inline uint16_t qc_bf16_of_float(float f)
{
    uint32_t u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x0040u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* max.NaN of magnitudes on the bit patterns, whose order is that of the numbers */
static inline uint32_t qc_float_largest(uint32_t a, uint32_t b)
{
    b &= 0x7fffffffu;
    return a > b ? a : b;
}

static inline uint32_t qc_half2_largest(uint32_t a, uint32_t b)
{
    b &= 0x7fff7fffu;
    uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    uint32_t high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return high << 16 | low;
}

static inline uint32_t qc_bf16x2_largest(uint32_t a, uint32_t b)
{
    return qc_half2_largest(a, b);
}

#endif
