/* Shared by the AVX2 files: reading sources, and folding 8 blocks at once.
 *
 * Folding. A block leaves a vector of 8 lanes to be folded (l with l + 4, 2, 1; of 16 lanes, l and
 * l + 8 are two vectors that the block itself adds). Eight blocks are folded together, without
 * shuffles for the first step: each vector is stored as two halves (vextract to memory needs no
 * vector port) into rows where the same half of two blocks makes up one vector:
 *
 *     block b = 4 * p + g:   half h -> row[g][h], position p
 *     row[g][0] + row[g][1]: 4 lanes left of each of 2 blocks
 *
 * Two steps of two shuffles and an operation on the four g remain, after which lane b belongs to
 * block b: 13 operations for 8 blocks. Rows must not be read right after they were written (a wide
 * load cannot be forwarded from narrow stores), so callers fold a group of blocks while the next is
 * under way. */
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

/* 16 bytes in both lanes. */
QC_INLINE __m256i qc_load_twice(const void *at)
{
    return _mm256_broadcastsi128_si256(qc_load_half(at));
}

/* Asks for the line QC_AHEAD bytes further on, which need not exist: a prefetch does not fault. */
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

/* Lane b of the result: the 8 lanes of block b folded. MAX_U16: two words are left of each. */
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

/* 8 elements from i on, as floats. */
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

/* 16 consecutive elements, split into those of even and of odd index. */
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

QC_INLINE __m256i qc_round_bf16(__m256 x) /* x not NaN; the result in the low words */
{
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    u = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_srli_epi32(u, 16);
}

/* 8 dwords of at most 16 bits each, as words. */
QC_INLINE __m128i qc_narrow_words(__m256i v)
{
    v = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0xd8);
    return _mm256_castsi256_si128(v);
}

#endif
