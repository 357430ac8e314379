/* Sixteen lanes in a register of AVX-512: reading sources, and folding 16 blocks at once.
 *
 * Folding. A block leaves a vector of 16 lanes to be folded (l with l + 8, 4, 2, 1). Sixteen blocks
 * are folded together. The first step needs no shuffle: vectors are stored in halves (vextract to
 * memory needs no vector port), the same half of blocks 2j and 2j + 1 side by side:
 *
 *     row j, half 0 = lanes 0..7 of 2j, 0..7 of 2j + 1      half 1 = lanes 8..15 of both
 *
 * What remains are three steps of blend, shuffle and operation, and one permute, after which lane b
 * belongs to block b: 30 operations for 16 blocks instead of 45 in registers. Quarters would save
 * the shuffles of the second step as well (21), but cost twice the stores. Rows must not be read
 * right after they were written: a wide load cannot be forwarded from narrow stores. */
#ifndef QC_QUANT_QUANT_AVX512_INTERNAL_H
#define QC_QUANT_QUANT_AVX512_INTERNAL_H

#include "quant/quant_internal.h"

#include <immintrin.h>

/* Without optimization gcc's intrinsics that take a constant are macros, and the 0xFFFF that
 * becomes a signed short is in them. */
#ifndef __OPTIMIZE__
#pragma GCC diagnostic ignored "-Wsign-conversion"
#endif

#define QC_INLINE static inline __attribute__((always_inline))
#define QC_GROUP  16u /* blocks folded together */

#define QC_FOLD_STRIDE 32u /* lanes of a row: of two blocks */
#define QC_FOLD_LANES  (QC_GROUP / 2 * QC_FOLD_STRIDE)

typedef enum { QC_FOLD_ADD, QC_FOLD_MAX_U32 } qc_fold_op;

QC_INLINE void qc_fold_store(uint32_t *rows, unsigned block, __m512i v)
{
    uint32_t *row = rows + block / 2 * QC_FOLD_STRIDE + block % 2 * 8;
    _mm256_store_si256((__m256i *)(void *)row, _mm512_castsi512_si256(v));
    _mm256_store_si256((__m256i *)(void *)(row + 16), _mm512_extracti64x4_epi64(v, 1));
}

QC_INLINE __m512i qc_fold_apply(qc_fold_op op, __m512i a, __m512i b)
{
    if (op == QC_FOLD_ADD)
        return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
    return _mm512_max_epu32(a, b);
}

/* Lane b of the result is block b's 16 lanes, folded. */
QC_INLINE __m512i qc_fold16x16(qc_fold_op op, const uint32_t *rows)
{
    const __m512i cross4 = _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13);
    const __m512i cross1 =
        _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
    __m512i v[8], w[4], x[2];
    for (unsigned j = 0; j < 8; j++, rows += QC_FOLD_STRIDE)
        v[j] = qc_fold_apply(op, _mm512_load_si512(rows), _mm512_load_si512(rows + 16));
    for (unsigned j = 0; j < 4; j++)
        w[j] = qc_fold_apply(op, _mm512_mask_blend_epi64(0xcc, v[j], v[j + 4]),
                             _mm512_permutex2var_epi64(v[j], cross4, v[j + 4]));
    for (unsigned j = 0; j < 2; j++)
        x[j] = qc_fold_apply(op, _mm512_mask_blend_epi64(0xaa, w[j], w[j + 2]),
                             _mm512_castpd_si512(_mm512_shuffle_pd(
                                 _mm512_castsi512_pd(w[j]), _mm512_castsi512_pd(w[j + 2]), 0x55)));
    /* lane: bit 3 = bit 0 of the block, bits 2, 1, 0 = bits 3, 2, 1 */
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    __m512i y = qc_fold_apply(op, _mm512_mask_blend_epi32(0xaaaa, x[0], x[1]),
                              _mm512_permutex2var_epi32(x[0], cross1, x[1]));
    return _mm512_permutexvar_epi32(order, y);
}

QC_INLINE __m512i qc_magnitude_f32(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* Loads 16 elements from i on, as floats. */
QC_INLINE __m512 qc_load16(const void *src, qc_dtype dtype, uint64_t i)
{
    const unsigned char *base = src;
    if (dtype == QC_DTYPE_F32)
        return _mm512_loadu_ps(base + i * 4);
    if (dtype == QC_DTYPE_F64) {
        __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(base + i * 8));
        __m256 high = _mm512_cvtpd_ps(_mm512_loadu_pd(base + i * 8 + 64));
        return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
    __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(base + i * 2));
    if (dtype == QC_DTYPE_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* ---- sixteen lanes in one register: contracts in quant_wide.h -------------------------------- */

typedef __m512 qc_wide;
typedef __m512i qc_wide_int;

QC_INLINE qc_wide qc_wide_all(float value)
{
    return _mm512_set1_ps(value);
}

QC_INLINE qc_wide_int qc_wide_int_all(int32_t value)
{
    return _mm512_set1_epi32(value);
}

QC_INLINE qc_wide qc_wide_load(const float *at)
{
    return _mm512_loadu_ps(at);
}

QC_INLINE void qc_wide_store(float *at, qc_wide v)
{
    _mm512_storeu_ps(at, v);
}

QC_INLINE qc_wide qc_wide_read(const void *src, qc_dtype dtype, uint64_t i)
{
    return qc_load16(src, dtype, i);
}

QC_INLINE qc_wide qc_wide_add(qc_wide a, qc_wide b)
{
    return _mm512_add_ps(a, b);
}

QC_INLINE qc_wide qc_wide_round_even(qc_wide x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

QC_INLINE qc_wide qc_wide_between(qc_wide v, qc_wide lowest, qc_wide highest)
{
    return _mm512_max_ps(_mm512_min_ps(v, highest), lowest);
}

QC_INLINE qc_wide qc_wide_sub(qc_wide a, qc_wide b)
{
    return _mm512_sub_ps(a, b);
}

QC_INLINE qc_wide qc_wide_mul(qc_wide a, qc_wide b)
{
    return _mm512_mul_ps(a, b);
}

QC_INLINE qc_wide qc_wide_fma(qc_wide a, qc_wide b, qc_wide c)
{
    return _mm512_fmadd_ps(a, b, c);
}

QC_INLINE qc_wide qc_wide_larger(qc_wide most, qc_wide x)
{
    return _mm512_range_ps(most, x, 0x0b); /* larger magnitude, sign cleared */
}

QC_INLINE float qc_wide_largest(qc_wide x)
{
    return _mm512_reduce_max_ps(x);
}

QC_INLINE float qc_wide_fold(qc_wide x)
{
    __m256 v = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

QC_INLINE qc_wide_int qc_wide_larger_bits(qc_wide_int most, qc_wide x)
{
    return _mm512_max_epu32(most, qc_magnitude_f32(x));
}

QC_INLINE uint32_t qc_wide_largest_bits(qc_wide_int bits)
{
    return _mm512_reduce_max_epu32(bits);
}

QC_INLINE qc_wide_int qc_wide_round(qc_wide x)
{
    return _mm512_cvtps_epi32(x);
}

QC_INLINE qc_wide qc_wide_of_int(qc_wide_int v)
{
    return _mm512_cvtepi32_ps(v);
}

QC_INLINE void qc_wide_store_words(void *at, qc_wide_int v)
{
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(v));
}

QC_INLINE void qc_wide_store_biased(void *at, qc_wide_int v, int bias)
{
    const __m128i bytes = _mm512_cvtepi32_epi8(v);
    _mm_storeu_si128((__m128i *)at, _mm_add_epi8(bytes, _mm_set1_epi8((char)bias)));
}

QC_INLINE void qc_wide_store_nibbles(void *at, qc_wide_int a, qc_wide_int b, int bias,
                                     int low_first)
{
    const __m256i places = _mm256_set1_epi16(low_first ? 16 << 8 | 1 : 1 << 8 | 16);
    __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
    bytes = _mm256_add_epi8(bytes, _mm256_set1_epi8((char)bias));
    __m256i pairs = _mm256_maddubs_epi16(bytes, places);
    _mm_storeu_si128((__m128i *)at, _mm256_cvtepi16_epi8(pairs));
}

typedef struct {
    _Alignas(64) uint32_t lanes[QC_FOLD_LANES];
} qc_wide_rows;

QC_INLINE void qc_wide_fold_store(qc_fold_op op, qc_wide_rows *rows, unsigned row, qc_wide_int v)
{
    (void)op;
    qc_fold_store(rows->lanes, row, v);
}

QC_INLINE qc_wide_int qc_wide_fold16(qc_fold_op op, const qc_wide_rows *rows)
{
    return qc_fold16x16(op, rows->lanes);
}

QC_INLINE qc_wide_int qc_wide_bits(qc_wide x)
{
    return _mm512_castps_si512(x);
}

QC_INLINE qc_wide qc_wide_of_bits(qc_wide_int bits)
{
    return _mm512_castsi512_ps(bits);
}

#endif
