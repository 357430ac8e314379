/* What the quantizing kernels share: the elements of the three source types, the largest magnitude,
 * the first bad element, and the search for an NF4 code. */
#ifndef QC_KERNELS_CUDA_QUANTIZE_INTERNAL_CUH
#define QC_KERNELS_CUDA_QUANTIZE_INTERNAL_CUH

#include "kernels/ptx.cuh"

#include "base/dtype.h"
#include "quant/quant_values.h"

/* The same values as in quant/quant_internal.h, which is C. */
#define QC_CUDA_TINY_ABSMAX 0x1p-100f
#define QC_CUDA_TINY_SCALE  0x1p64f
#define QC_CUDA_INT8_STEP   7.874015718698502e-3f
#define QC_CUDA_F32_INF     0x7f800000u
#define QC_CUDA_ROUND       0x1.8p23f /* in x + this the ulp is 1, and the low byte is an int8 */
#define QC_ALL_LANES        0xffffffffu

/* One source type. A word has 32 bits and holds `per_word` elements. */
template <qc_dtype dtype> struct qc_source;

template <> struct qc_source<QC_DTYPE_F32> {
    typedef float type;
    static constexpr int per_word = 1;
    static constexpr bool can_be_tiny = true;
    static __device__ __forceinline__ float get(uint32_t word, int)
    {
        return __uint_as_float(word);
    }
    static __device__ __forceinline__ float one(const void *src, uint64_t i)
    {
        return static_cast<const float *>(src)[i];
    }
    /* Returns the largest magnitude so far and in this word. NaN counts as the largest of all. */
    static __device__ __forceinline__ uint32_t largest(uint32_t so_far, uint32_t word)
    {
        return qc_float_largest(so_far, word);
    }
    /* Does the same over all parts of the word, and returns the bits of a float. */
    static __device__ __forceinline__ uint32_t largest_bits(uint32_t largest)
    {
        return largest;
    }
    /* Multiplies every element by QC_CUDA_TINY_SCALE, which is exact. Elements are below
     * QC_CUDA_TINY_ABSMAX. */
    static __device__ __forceinline__ uint32_t scale_up(uint32_t word)
    {
        return __float_as_uint(__fmul_rn(__uint_as_float(word), QC_CUDA_TINY_SCALE));
    }
};

template <> struct qc_source<QC_DTYPE_F16> {
    typedef uint16_t type;
    static constexpr int per_word = 2;
    static constexpr bool can_be_tiny = false; /* its smallest number is 2^-24 */
    static __device__ __forceinline__ float get(uint32_t word, int i)
    {
        return qc_float_of_half((uint16_t)(word >> 16 * i));
    }
    static __device__ __forceinline__ float one(const void *src, uint64_t i)
    {
        return qc_float_of_half(static_cast<const uint16_t *>(src)[i]);
    }
    static __device__ __forceinline__ uint32_t largest(uint32_t so_far, uint32_t word)
    {
        return qc_half2_largest(so_far, word);
    }
    static __device__ __forceinline__ uint32_t largest_bits(uint32_t largest)
    {
        uint32_t low = largest & 0xffffu, high = largest >> 16;
        return __float_as_uint(qc_float_of_half((uint16_t)(low > high ? low : high))) & 0x7fffffffu;
    }
    static __device__ __forceinline__ uint32_t scale_up(uint32_t word)
    {
        return word;
    }
};

template <> struct qc_source<QC_DTYPE_BF16> {
    typedef uint16_t type;
    static constexpr int per_word = 2;
    static constexpr bool can_be_tiny = true;
    static __device__ __forceinline__ float get(uint32_t word, int i)
    {
        return __uint_as_float(i ? word & 0xffff0000u : word << 16);
    }
    static __device__ __forceinline__ float one(const void *src, uint64_t i)
    {
        return qc_float_of_bf16(static_cast<const uint16_t *>(src)[i]);
    }
    static __device__ __forceinline__ uint32_t largest(uint32_t so_far, uint32_t word)
    {
        return qc_bf16x2_largest(so_far, word);
    }
    static __device__ __forceinline__ uint32_t largest_bits(uint32_t largest)
    {
        uint32_t low = largest << 16, high = largest & 0xffff0000u;
        return low > high ? low : high;
    }
    static __device__ __forceinline__ uint32_t scale_up(uint32_t word)
    {
        float low = __fmul_rn(get(word, 0), QC_CUDA_TINY_SCALE);
        float high = __fmul_rn(get(word, 1), QC_CUDA_TINY_SCALE);
        return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
    }
};

QC_DEVICE uint32_t qc_magnitude(float x)
{
    return __float_as_uint(x) & 0x7fffffffu;
}

/* Returns whether x has no code in a row of int8: it is NaN, infinite, or infinite as float16. */
QC_DEVICE bool qc_is_bad_row(float x)
{
    return (qc_half_of_float(x) & 0x7fffu) >= 0x7c00u;
}

QC_DEVICE void qc_bad_at(uint64_t *bad, uint64_t index)
{
    atomicMin(reinterpret_cast<unsigned long long *>(bad), (unsigned long long)index);
}

/* Returns the largest over the sixteen threads of a team. All of them get it. */
QC_DEVICE uint32_t qc_largest_of_team(uint32_t v)
{
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) {
        uint32_t other = __shfl_xor_sync(QC_ALL_LANES, v, mask);
        v = other > v ? other : v;
    }
    return v;
}

/* Finds the largest value over a team and its index, the lowest on ties. All threads get it. */
QC_DEVICE void qc_largest_at(float *largest, uint32_t *index)
{
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) {
        float other = __shfl_xor_sync(QC_ALL_LANES, *largest, mask);
        uint32_t other_index = __shfl_xor_sync(QC_ALL_LANES, *index, mask);
        if (other > *largest || (other == *largest && other_index < *index)) {
            *largest = other;
            *index = other_index;
        }
    }
}

/* Folds as qc_fold16 does. All lanes of the team get the sum. */
QC_DEVICE float qc_fold_team(float v)
{
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2)
        v = __fadd_rn(v, __shfl_xor_sync(QC_ALL_LANES, v, mask));
    return v;
}

/* Returns 1 / absmax, or 0 in a block of zeros. *up tells whether elements are to be multiplied by
 * QC_CUDA_TINY_SCALE first, by the rule for tiny blocks. */
QC_DEVICE float qc_inverse_absmax(float absmax, bool *up)
{
    *up = absmax < QC_CUDA_TINY_ABSMAX && absmax != 0.0f;
    if (absmax == 0.0f)
        return 0.0f;
    return __frcp_rn(*up ? __fmul_rn(absmax, QC_CUDA_TINY_SCALE) : absmax);
}

/* ---- NF4 ------------------------------------------------------------------------------------- */
/* Lane l of a warp keeps threshold l and code value l. So a shuffle is a table look-up without bank
 * conflicts. */

struct qc_nf4_tables {
    float threshold, code;
};

QC_DEVICE qc_nf4_tables qc_nf4_tables_of_lane(unsigned lane)
{
    static constexpr float thresholds[16] = {QC_NF4_THRESHOLD_VALUES};
    static constexpr float codes[16] = {QC_NF4_CODE_VALUES};
    qc_nf4_tables t = {thresholds[lane % 16], codes[lane % 16]};
    return t;
}

/* Returns a number whose low 5 bits are the code of y, |y| <= 1 + 2^-22, and whose other bits are
 * those of QC_NF4_GUESS_BITS. All lanes of the warp take part.
 *
 * With A = 2.84375, k = round(7 + 4 y (A - y^2)) is 0 .. 14, and code(y) is k or k + 1: the curve
 * goes through [i - 1/2, i + 1/2] at threshold i (by 0.017 at least; it was tried with every
 * float). So one comparison, with threshold k, is left. Adding 1.5 * 2^21, where the ulp of a float
 * is 1/4, rounds and leaves k in the low bits. t - y < 0 holds exactly when y > t. */
#define QC_NF4_GUESS_BITS 0x4a400000u

QC_DEVICE uint32_t qc_nf4_search(qc_nf4_tables tables, float y)
{
    float slope = __fmaf_rn(y, -y, 2.84375f);
    uint32_t guess = __float_as_uint(__fmaf_rn(y, slope, 0x1.8p21f + 1.75f));
    float threshold = __shfl_sync(QC_ALL_LANES, tables.threshold, (int)guess);
    return guess + (__float_as_uint(__fadd_rn(threshold, -y)) >> 31);
}

#endif
