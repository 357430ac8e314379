/* float16 and bfloat16 as plain integers: exact conversions without compiler or CPU support.
 *
 * Every narrowing rounds once, to nearest even, subnormals included; a result that is too large
 * becomes infinity. A NaN stays a NaN: its sign and the upper bits of its payload are kept, and it
 * becomes quiet, as with the x86 conversion instructions.
 *
 * How narrowing works on magnitudes, for the three ranges of the result:
 *
 *   normal     add half an ulp (less one bit if the last kept bit is even) to the bit pattern, move
 *              the exponent's bias, shift; a carry runs into the exponent, as it should
 *   subnormal  add a power of two whose ulp is the spacing of subnormals; the addition rounds, and
 *              the mantissa bits of the sum are the result
 *   too large  infinity, from the midpoint between the largest number and the next power of two on
 * */
#ifndef QC_QUANT_QUANT_HALF_H
#define QC_QUANT_QUANT_HALF_H

#include "base/dtype.h"
#include "base/float_bits.h"

#include <stdint.h>

#define QC_F32_INF  0x7f800000u
#define QC_F64_INF  0x7ff0000000000000u
#define QC_F16_INF  0x7c00u
#define QC_BF16_INF 0x7f80u

static inline float qc_f32_from_bf16(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    if ((u & 0x7fffffffu) > QC_F32_INF)
        u |= 0x00400000u;
    return qc_f32_of_bits(u);
}

static inline float qc_f32_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = h & 0x7fffu;
    if (magnitude > QC_F16_INF)
        return qc_f32_of_bits(sign | 0x7fc00000u | magnitude << 13);
    if (magnitude == QC_F16_INF)
        return qc_f32_of_bits(sign | QC_F32_INF);
    if (magnitude < 0x0400u) /* subnormal: a multiple of 2^-24 */
        return qc_f32_of_bits(sign | qc_f32_bits((float)magnitude * 0x1p-24f));
    return qc_f32_of_bits(sign | ((magnitude << 13) + (112u << 23)));
}

static inline uint16_t qc_bf16_from_f32(float f)
{
    uint32_t u = qc_f32_bits(f);
    if ((u & 0x7fffffffu) > QC_F32_INF)
        return (uint16_t)(u >> 16 | 0x0040u);
    /* The exponent range is float's, so subnormals and overflow need no case of their own. */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static inline uint16_t qc_f16_from_f32(float f)
{
    uint32_t u = qc_f32_bits(f);
    uint32_t sign = u >> 16 & 0x8000u;
    uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > QC_F32_INF)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x03ffu));
    if (magnitude >= 0x477ff000u) /* 65520 */
        return (uint16_t)(sign | QC_F16_INF);
    if (magnitude < 0x38800000u) { /* 2^-14; the ulp of 0.5f is 2^-24 */
        float shifted = qc_f32_of_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (qc_f32_bits(shifted) - 0x3f000000u));
    }
    magnitude += 0x0fffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (magnitude - (112u << 23)) >> 13);
}

static inline uint16_t qc_f16_from_f64(double d)
{
    uint64_t u = qc_f64_bits(d);
    uint32_t sign = (uint32_t)(u >> 48) & 0x8000u;
    uint64_t magnitude = u & 0x7fffffffffffffffu;
    double a = qc_f64_of_bits(magnitude);
    if (magnitude > QC_F64_INF)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 42 & 0x03ffu));
    if (a >= 65520.0)
        return (uint16_t)(sign | QC_F16_INF);
    if (a < 0x1p-14) /* the ulp of 2^28 is 2^-24 */
        return (uint16_t)(sign | (qc_f64_bits(a + 0x1p28) - qc_f64_bits(0x1p28)));
    magnitude += 0x1ffffffffffu + (magnitude >> 42 & 1u);
    return (uint16_t)(sign | (magnitude - ((uint64_t)(1023 - 15) << 52)) >> 42);
}

static inline uint16_t qc_bf16_from_f64(double d)
{
    uint64_t u = qc_f64_bits(d);
    uint32_t sign = (uint32_t)(u >> 48) & 0x8000u;
    uint64_t magnitude = u & 0x7fffffffffffffffu;
    double a = qc_f64_of_bits(magnitude);
    if (magnitude > QC_F64_INF)
        return (uint16_t)(sign | 0x7fc0u | (magnitude >> 45 & 0x007fu));
    if (a >= 0x1.ffp127)
        return (uint16_t)(sign | QC_BF16_INF);
    if (a < 0x1p-126) /* the ulp of 2^-81 is 2^-133 */
        return (uint16_t)(sign | (qc_f64_bits(a + 0x1p-81) - qc_f64_bits(0x1p-81)));
    magnitude += 0xfffffffffffu + (magnitude >> 45 & 1u);
    return (uint16_t)(sign | (magnitude - ((uint64_t)(1023 - 127) << 52)) >> 45);
}

/* Returns the smallest bfloat16 that is not below f; f >= 0 and finite. */
static inline uint16_t qc_bf16_above(float f)
{
    return (uint16_t)((qc_f32_bits(f) + 0xffffu) >> 16);
}

/* BF16 or F16. */
static inline double qc_f64_of_half(qc_dtype dtype, uint16_t h)
{
    return (double)(dtype == QC_DTYPE_BF16 ? qc_f32_from_bf16(h) : qc_f32_from_f16(h));
}

#endif
