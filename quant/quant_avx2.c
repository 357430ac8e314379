/* The AVX2 table. The quantizers are in quant_avx2_blocks.c and quant_rows_body.h, the loops that
 * are bound by memory in quant_table_body.h; their operations on vectors are here.
 *
 * NF4 to 16-bit types: the 16 values are cut into their lower and upper bytes; 32 weights are then
 * four vpshufb of 128 bits and four unpacks. To floats: two vpermps and a blend for 8.
 *
 * nested_quantize: one gather from qc_simd_tables.nested per 8 values; see there. */
#include "quant/quant_half.h"
#include "quant/quant_simd.h"
#include "quant/quant_simd_tables.h"
#include "quant/quant_wide.h"

#include <string.h>

/* ---- narrowing ------------------------------------------------------------------------------- */

/* Returns all ones in lanes that are finite but become infinite in dtype. A signed comparison
 * replaces an unsigned one of |x| - from, because both sides have their top bit flipped. */
QC_INLINE __m256i overflows8(__m256 x, qc_dtype dtype)
{
    const uint32_t from = dtype == QC_DTYPE_F16 ? 0x477ff000u : 0x7f7f8000u, top = 1u << 31;
    __m256i above = _mm256_add_epi32(qc_magnitude_f32(x), _mm256_set1_epi32((int)(top - from)));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(top + QC_F32_INF - from)), above);
}

/* Returns one bit for each such lane; there is hardly ever one. */
QC_INLINE uint16_t overflows(qc_wide x, qc_dtype dtype)
{
    if (dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        return 0;
    __m256i low = overflows8(x.low, dtype), high = overflows8(x.high, dtype);
    __m256i any = _mm256_or_si256(low, high);
    if (__builtin_expect(_mm256_testz_si256(any, any), 1))
        return 0;
    int mask = _mm256_movemask_ps(_mm256_castsi256_ps(low));
    return (uint16_t)(mask | _mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8);
}

/* Returns 8 words of F16 or BF16. */
QC_INLINE __m128i to_half8(__m256 x, qc_dtype dtype)
{
    if (dtype == QC_DTYPE_F16)
        return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i u = _mm256_castps_si256(x);
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return qc_narrow_words(_mm256_blendv_epi8(qc_round_bf16(x), quiet, nan));
}

typedef struct {
    __m128i low, high;
} halves;

QC_INLINE halves to_half(qc_wide x, qc_dtype dtype)
{
    return (halves){to_half8(x.low, dtype), to_half8(x.high, dtype)};
}

QC_INLINE void store8(__m256 x, void *dst, qc_dtype dtype, uint64_t i)
{
    unsigned char *base = dst;
    if (dtype == QC_DTYPE_F32) {
        qc_store(base + i * 4, _mm256_castps_si256(x));
    } else if (dtype == QC_DTYPE_F64) {
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        qc_store(base + i * 8, _mm256_castpd_si256(low));
        qc_store(base + i * 8 + 32, _mm256_castpd_si256(high));
    } else {
        qc_store_half(base + i * 2, to_half8(x, dtype));
    }
}

QC_INLINE void store16(qc_wide x, void *dst, qc_dtype dtype, uint64_t i)
{
    store8(x.low, dst, dtype, i);
    store8(x.high, dst, dtype, i + 8);
}

/* ---- NF4 ------------------------------------------------------------------------------------- */

/* Turns whole multiples of 32 elements of one block into F16 or BF16. low_first: the first code of
 * a byte is in the low nibble. */
QC_INLINE void nf4_to_half(const uint8_t *codes, uint64_t n, halves values, int low_first,
                           unsigned char *dst)
{
    const __m128i low_byte = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(15);
    const __m128i low =
        _mm_packus_epi16(_mm_and_si128(values.low, low_byte), _mm_and_si128(values.high, low_byte));
    const __m128i high =
        _mm_packus_epi16(_mm_srli_epi16(values.low, 8), _mm_srli_epi16(values.high, 8));
    for (uint64_t i = 0; i < n; i += 32) {
        __m128i bytes = qc_load_half(codes + i / 2);
        __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, low_first ? 0 : 4), nibble);
        __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, low_first ? 4 : 0), nibble);
        __m128i a = _mm_unpacklo_epi8(even, odd), b = _mm_unpackhi_epi8(even, odd);
        __m128i a0 = _mm_shuffle_epi8(low, a), a1 = _mm_shuffle_epi8(high, a);
        __m128i b0 = _mm_shuffle_epi8(low, b), b1 = _mm_shuffle_epi8(high, b);
        qc_store_half(dst + i * 2, _mm_unpacklo_epi8(a0, a1));
        qc_store_half(dst + i * 2 + 16, _mm_unpackhi_epi8(a0, a1));
        qc_store_half(dst + i * 2 + 32, _mm_unpacklo_epi8(b0, b1));
        qc_store_half(dst + i * 2 + 48, _mm_unpackhi_epi8(b0, b1));
    }
}

QC_INLINE void nf4_to_f32(const uint8_t *codes, uint64_t n, qc_wide values, int low_first,
                          unsigned char *dst)
{
    for (uint64_t i = 0; i < n; i += 8) {
        int four;
        memcpy(&four, codes + i / 2, sizeof four);
        __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
        __m256i index = _mm256_or_si256(_mm256_srli_epi64(bytes, low_first ? 0 : 4),
                                        _mm256_slli_epi64(bytes, low_first ? 28 : 32));
        __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); /* 8 or more */
        __m256 x = _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.low, index),
                                    _mm256_permutevar8x32_ps(values.high, index), upper);
        qc_store(dst + i * 4, _mm256_castps_si256(x));
    }
}

/* ---- casts ----------------------------------------------------------------------------------- */

QC_INLINE __m256 widen_quiet8(const void *src, qc_dtype dtype, uint64_t i)
{
    __m256 x = qc_load8(src, dtype, i);
    if (dtype != QC_DTYPE_BF16)
        return x;
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x00400000));
    return _mm256_or_ps(x, _mm256_and_ps(nan, quiet));
}

QC_INLINE qc_wide widen_quiet(const void *src, qc_dtype dtype, uint64_t i)
{
    return (qc_wide){widen_quiet8(src, dtype, i), widen_quiet8(src, dtype, i + 8)};
}

/* Returns which of 4 doubles are finite and too large for a float. */
QC_INLINE unsigned doubles_overflow4(const unsigned char *at)
{
    const __m256d no_sign = _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX));
    __m256d a = _mm256_and_pd(_mm256_castsi256_pd(qc_load(at)), no_sign);
    __m256d large = _mm256_cmp_pd(a, _mm256_set1_pd(0x1.ffffffp127), _CMP_GE_OQ);
    __m256d finite = _mm256_cmp_pd(a, _mm256_set1_pd(0x1.fffffffffffffp1023), _CMP_LE_OQ);
    return (unsigned)_mm256_movemask_pd(_mm256_and_pd(large, finite));
}

QC_INLINE uint16_t doubles_overflow(const void *src, uint64_t i)
{
    const unsigned char *at = (const unsigned char *)src + i * 8;
    uint32_t lanes = 0;
    for (unsigned part = 0; part < 4; part++)
        lanes |= doubles_overflow4(at + 32 * part) << 4 * part;
    return (uint16_t)lanes;
}

/* ---- double quantization --------------------------------------------------------------------- */

/* Returns the codes in the low bytes of 8 lanes. */
QC_INLINE __m256i nested_codes(__m256 x, const qc_simd_tables *tables)
{
    const __m256i first_key = _mm256_set1_epi32(QC_NESTED_FIRST);
    __m256i bits = _mm256_castps_si256(x), magnitude = qc_magnitude_f32(x);
    __m256i key = _mm256_srli_epi32(magnitude, QC_NESTED_SHIFT);
    key = _mm256_sub_epi32(_mm256_max_epu32(key, first_key), first_key);
    __m256i sign = _mm256_srai_epi32(bits, 31);
    key = _mm256_or_si256(key, _mm256_and_si256(sign, _mm256_set1_epi32((int)QC_NESTED_KEYS)));
    __m256i low = _mm256_and_si256(magnitude, _mm256_set1_epi32(QC_NESTED_LOW));
    __m256i entry = _mm256_i32gather_epi32((const int *)(const void *)tables->nested, key, 4);
    __m256i field = _mm256_srli_epi32(_mm256_add_epi32(entry, low), QC_NESTED_SHIFT);
    return _mm256_and_si256(_mm256_xor_si256(field, sign), _mm256_set1_epi32(0xff));
}

QC_INLINE void store_nested_codes(qc_wide x, const qc_simd_tables *tables, uint8_t *codes)
{
    __m256i words = _mm256_packus_epi32(nested_codes(x.low, tables), nested_codes(x.high, tables));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    qc_store_half(
        codes, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

QC_INLINE qc_wide look_up(const float *map, const uint8_t *codes)
{
    const __m128i bytes = qc_load_half(codes);
    return (qc_wide){
        _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(bytes), 4),
        _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), 4),
    };
}

#define QC_QUANT_ISA        QC_ISA_AVX2
#define QC_QUANT_TABLE      qc_quant_ops_avx2
#define QC_QUANT_NAME(call) qc_avx2_##call

/* Row-wise int8 with AVX2. Per vector of 8: widen 2, product, to integer, 2 to narrow, back 1, two
 * products, e, two fma, and, max: 13, that is 35 cycles for 64 columns, besides 11 for the first
 * pass. */
#include "quant/quant_rows_body.h"
#include "quant/quant_rows_int_body.h"
#include "quant/quant_table_body.h"
