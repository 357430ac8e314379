/* Shared by the AVX2 files: reading sources, and folding 8 blocks at once.
 *
 * Folding. A block leaves a vector of 8 lanes to be folded (l with l + 4, 2, 1; of 16 lanes, l and
 * l + 8 are two vectors that the block itself adds). Eight blocks are folded together, and the
 * first step needs no shuffles: each vector is stored as two halves (vextract to memory needs no
 * vector port) into rows where the same half of two blocks makes up one vector:
 *
 *     block b = 4 * p + g:   half h -> row[g][h], position p
 *     row[g][0] + row[g][1]: 4 lanes left of each of 2 blocks
 *
 * What remains are two steps of two shuffles and an operation on the four g, after which lane b
 * belongs to block b: 13 operations for 8 blocks. Rows must not be read right after they were
 * written (a wide load cannot be forwarded from narrow stores), so callers fold a group of blocks
 * while they work on the next. */
#ifndef QC_QUANT_QUANT_AVX2_INTERNAL_H
#define QC_QUANT_QUANT_AVX2_INTERNAL_H

#include "quant/quant_internal.h"

#include <immintrin.h>

#define QC_INLINE static inline __attribute__((always_inline))
#define QC_GROUP  8u /* blocks folded together */

typedef struct {
    _Alignas(32) uint32_t lanes[4][2][QC_GROUP]; /* [g][half][4 * p + lane of the half] */
} qc_fold_rows;

typedef enum { QC_FOLD_ADD, QC_FOLD_MAX_F32, QC_FOLD_MAX_U16, QC_FOLD_MAX_U32 } qc_fold_op;

QC_INLINE __m256i qc_load(const void *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

QC_INLINE void qc_store(void *at, __m256i v)
{
    _mm256_storeu_si256((__m256i *)at, v);
}

QC_INLINE __m128i qc_load_half(const void *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

QC_INLINE void qc_store_half(void *at, __m128i v)
{
    _mm_storeu_si128((__m128i *)at, v);
}

/* Loads the same 16 bytes to both 128-bit lanes. */
QC_INLINE __m256i qc_load_twice(const void *at)
{
    return _mm256_broadcastsi128_si256(qc_load_half(at));
}

/* Prefetches the line QC_AHEAD bytes further on, which need not exist: a prefetch does not
 * fault. */
#define QC_AHEAD 4096u
QC_INLINE void qc_prefetch(const void *at)
{
    _mm_prefetch((const char *)((uintptr_t)at + QC_AHEAD), _MM_HINT_T0);
}

QC_INLINE void qc_fold_store(qc_fold_rows *rows, unsigned block, __m256i v)
{
    uint32_t *row = rows->lanes[block & 3u][0] + (block & ~3u);
    qc_store_half(row, _mm256_castsi256_si128(v));
    qc_store_half(row + QC_GROUP, _mm256_extracti128_si256(v, 1));
}

QC_INLINE __m256i qc_fold_apply(qc_fold_op op, __m256i a, __m256i b)
{
    __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    if (op == QC_FOLD_ADD)
        return _mm256_castps_si256(_mm256_add_ps(x, y));
    if (op == QC_FOLD_MAX_F32)
        return _mm256_castps_si256(_mm256_max_ps(x, y));
    return op == QC_FOLD_MAX_U16 ? _mm256_max_epu16(a, b) : _mm256_max_epu32(a, b);
}

/* Lane b of the result is block b's 8 lanes, folded. With MAX_U16 two words of each are left. */
QC_INLINE __m256i qc_fold8x8(qc_fold_op op, const qc_fold_rows *rows)
{
    __m256i v[4], w[2];
    for (unsigned g = 0; g < 4; g++)
        v[g] = qc_fold_apply(op, qc_load(rows->lanes[g][0]), qc_load(rows->lanes[g][1]));
    for (unsigned g = 0; g < 2; g++)
        w[g] = qc_fold_apply(op, _mm256_unpacklo_epi64(v[2 * g], v[2 * g + 1]),
                             _mm256_unpackhi_epi64(v[2 * g], v[2 * g + 1]));
    __m256 a = _mm256_castsi256_ps(w[0]), b = _mm256_castsi256_ps(w[1]);
    return qc_fold_apply(op, _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                         _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)));
}

QC_INLINE __m256i qc_magnitude_f32(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

/* Loads 8 elements from i on, as floats. */
QC_INLINE __m256 qc_load8(const void *src, qc_dtype dtype, uint64_t i)
{
    const unsigned char *base = src;
    if (dtype == QC_DTYPE_F32)
        return _mm256_castsi256_ps(qc_load(base + i * 4));
    if (dtype == QC_DTYPE_F64) {
        __m128 low = _mm256_cvtpd_ps(_mm256_castsi256_pd(qc_load(base + i * 8)));
        __m128 high = _mm256_cvtpd_ps(_mm256_castsi256_pd(qc_load(base + i * 8 + 32)));
        return _mm256_set_m128(high, low);
    }
    __m128i half = qc_load_half(base + i * 2);
    if (dtype == QC_DTYPE_F16)
        return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* 16 neighbouring elements, split into those of even and of odd index. */
typedef struct {
    __m256 even;
    __m256 odd;
} qc_pair;

QC_INLINE qc_pair qc_split_bf16(const void *at)
{
    __m256i v = qc_load(at);
    return (qc_pair){_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
                     _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(-65536)))};
}

QC_INLINE qc_pair qc_split_f16(const void *at)
{
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0,
                                           1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m256i v = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(qc_load(at), order), 0xd8);
    return (qc_pair){_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                     _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}

QC_INLINE qc_pair qc_split_f32(const void *at)
{
    const unsigned char *base = at;
    __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(qc_load_half(base)),
                                        qc_load_half(base + 32), 1);
    __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(qc_load_half(base + 16)),
                                        qc_load_half(base + 48), 1);
    __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return (qc_pair){_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd)};
}

QC_INLINE __m256i qc_round_bf16(__m256 x) /* x must not be NaN; the result is in the low words */
{
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    u = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_srli_epi32(u, 16);
}

/* Narrows 8 dwords of at most 16 bits each to words. */
QC_INLINE __m128i qc_narrow_words(__m256i v)
{
    v = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0xd8);
    return _mm256_castsi256_si128(v);
}

/* ---- sixteen lanes in two registers: contracts in quant_wide.h ------------------------------- */

/* Beside those there are here, for the files of this table alone:
 *
 *   qc_wide_div                       quotients
 *   qc_wide_magnitude                 |x|
 *   qc_wide_equal                     one bit for each lane that is equal
 *   qc_wide_through_f16, _bf16        rounded to that type and widened again; bf16: no lane is NaN
 *   qc_wide_of_int8, _of_biased       sixteen bytes as floats: I8, or U8 less a bias */

typedef struct {
    __m256 low, high;
} qc_wide;

typedef struct {
    __m256i low, high;
} qc_wide_int;

QC_INLINE qc_wide qc_wide_all(float value)
{
    return (qc_wide){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

QC_INLINE qc_wide_int qc_wide_int_all(int32_t value)
{
    return (qc_wide_int){_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}

QC_INLINE qc_wide qc_wide_load(const float *at)
{
    return (qc_wide){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}

QC_INLINE void qc_wide_store(float *at, qc_wide v)
{
    _mm256_storeu_ps(at, v.low);
    _mm256_storeu_ps(at + 8, v.high);
}

/* Returns all ones in the lanes below n, zeros in the others. */
QC_INLINE __m256i qc_lanes_below(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

QC_INLINE qc_wide qc_wide_read(const void *src, qc_dtype dtype, uint64_t i)
{
    return (qc_wide){qc_load8(src, dtype, i), qc_load8(src, dtype, i + 8)};
}

QC_INLINE qc_wide qc_wide_add(qc_wide a, qc_wide b)
{
    return (qc_wide){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

QC_INLINE qc_wide qc_wide_round_even(qc_wide x)
{
    const int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return (qc_wide){_mm256_round_ps(x.low, how), _mm256_round_ps(x.high, how)};
}

QC_INLINE qc_wide qc_wide_between(qc_wide v, qc_wide lowest, qc_wide highest)
{
    return (qc_wide){_mm256_max_ps(_mm256_min_ps(v.low, highest.low), lowest.low),
                     _mm256_max_ps(_mm256_min_ps(v.high, highest.high), lowest.high)};
}

QC_INLINE qc_wide qc_wide_sub(qc_wide a, qc_wide b)
{
    return (qc_wide){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

QC_INLINE qc_wide qc_wide_mul(qc_wide a, qc_wide b)
{
    return (qc_wide){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

QC_INLINE qc_wide qc_wide_div(qc_wide a, qc_wide b)
{
    return (qc_wide){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

QC_INLINE qc_wide qc_wide_fma(qc_wide a, qc_wide b, qc_wide c)
{
    return (qc_wide){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

QC_INLINE qc_wide qc_wide_magnitude(qc_wide x)
{
    return (qc_wide){_mm256_castsi256_ps(qc_magnitude_f32(x.low)),
                     _mm256_castsi256_ps(qc_magnitude_f32(x.high))};
}

QC_INLINE qc_wide qc_wide_larger(qc_wide most, qc_wide x)
{
    x = qc_wide_magnitude(x);
    return (qc_wide){_mm256_max_ps(most.low, x.low), _mm256_max_ps(most.high, x.high)};
}

QC_INLINE float qc_wide_largest(qc_wide x)
{
    __m256 v = _mm256_max_ps(x.low, x.high);
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

QC_INLINE float qc_wide_fold(qc_wide x)
{
    __m256 v = _mm256_add_ps(x.low, x.high);
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

QC_INLINE qc_wide_int qc_wide_larger_bits(qc_wide_int most, qc_wide x)
{
    return (qc_wide_int){_mm256_max_epu32(most.low, qc_magnitude_f32(x.low)),
                         _mm256_max_epu32(most.high, qc_magnitude_f32(x.high))};
}

QC_INLINE uint32_t qc_wide_largest_bits(qc_wide_int bits)
{
    __m256i v = _mm256_max_epu32(bits.low, bits.high);
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(a);
}

QC_INLINE uint32_t qc_wide_equal(qc_wide x, qc_wide y)
{
    int low = _mm256_movemask_ps(_mm256_cmp_ps(x.low, y.low, _CMP_EQ_OQ));
    int high = _mm256_movemask_ps(_mm256_cmp_ps(x.high, y.high, _CMP_EQ_OQ));
    return (uint32_t)(low | high << 8);
}

QC_INLINE __m256 qc_through_f16(__m256 x)
{
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

QC_INLINE qc_wide qc_wide_through_f16(qc_wide x)
{
    return (qc_wide){qc_through_f16(x.low), qc_through_f16(x.high)};
}

QC_INLINE __m256 qc_through_bf16(__m256 x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(qc_round_bf16(x), 16));
}

QC_INLINE qc_wide qc_wide_through_bf16(qc_wide x)
{
    return (qc_wide){qc_through_bf16(x.low), qc_through_bf16(x.high)};
}

QC_INLINE qc_wide_int qc_wide_round(qc_wide x)
{
    return (qc_wide_int){_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
}

QC_INLINE qc_wide qc_wide_of_int(qc_wide_int v)
{
    return (qc_wide){_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)};
}

QC_INLINE qc_wide qc_wide_of_int8(const int8_t *at)
{
    __m128i bytes = qc_load_half(at);
    return qc_wide_of_int(
        (qc_wide_int){_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}

QC_INLINE qc_wide qc_wide_of_biased(const uint8_t *at, float bias)
{
    __m128i bytes = qc_load_half(at);
    const qc_wide code = qc_wide_of_int(
        (qc_wide_int){_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
    return qc_wide_sub(code, qc_wide_all(bias));
}

QC_INLINE void qc_wide_store_words(void *at, qc_wide_int v)
{
    qc_store(at, _mm256_permute4x64_epi64(_mm256_packs_epi32(v.low, v.high), 0xd8));
}

QC_INLINE void qc_wide_store_biased(void *at, qc_wide_int v, int bias)
{
    __m256i words = _mm256_packs_epi32(v.low, v.high); /* 0-3, 8-11; 4-7, 12-15 */
    __m256i bytes = _mm256_packs_epi16(words, words);
    __m128i all =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    qc_store_half(at, _mm_add_epi8(all, _mm_set1_epi8((char)bias)));
}

QC_INLINE void qc_wide_store_nibbles(void *at, qc_wide_int a, qc_wide_int b, int bias,
                                     int low_first)
{
    const __m256i places = _mm256_set1_epi16(low_first ? 16 << 8 | 1 : 1 << 8 | 16);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(a.low, a.high), _mm256_packs_epi32(b.low, b.high));
    bytes =
        _mm256_add_epi8(_mm256_permutevar8x32_epi32(bytes, order), _mm256_set1_epi8((char)bias));
    __m256i pairs = _mm256_maddubs_epi16(bytes, places);
    pairs = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0xd8);
    qc_store_half(at, _mm256_castsi256_si128(pairs));
}

typedef struct {
    qc_fold_rows of[2];
} qc_wide_rows;

QC_INLINE void qc_wide_fold_store(qc_fold_op op, qc_wide_rows *rows, unsigned row, qc_wide_int v)
{
    qc_fold_store(&rows->of[row / QC_GROUP], row % QC_GROUP, qc_fold_apply(op, v.low, v.high));
}

QC_INLINE qc_wide_int qc_wide_fold16(qc_fold_op op, const qc_wide_rows *rows)
{
    return (qc_wide_int){qc_fold8x8(op, &rows->of[0]), qc_fold8x8(op, &rows->of[1])};
}

QC_INLINE qc_wide_int qc_wide_bits(qc_wide x)
{
    return (qc_wide_int){_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}

QC_INLINE qc_wide qc_wide_of_bits(qc_wide_int bits)
{
    return (qc_wide){_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
}

#endif
