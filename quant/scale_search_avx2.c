/* The search with AVX2: what is done with vectors; the steps over elements are scale_search_body.h.
 * Orders and meaning: scale_search_internal.h. Tables of 32 entries are gathered: they lie in L1,
 * and a choice among four permutes took as long. */
#include "quant/quant_avx2.h"
#include "quant/quant_half.h"
#include "quant/quant_simd_tables.h"
#include "quant/quant_wide.h"
#include "quant/scale_search_internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define CANDIDATES (2 * QC_SEARCH_FACTORS)

/* ---- screen ---------------------------------------------------------------------------------- */

typedef struct {
    __m256i of[4]; /* totals of 8 candidates each */
} totals;

/* Adds rows of up to QC_SEARCH_RUN elements in two chains: saturating sums of parts, added with
 * saturation, are the saturated sum. */
QC_INLINE void add_rows(totals *t, const unsigned char *middle, const int16_t *offsets, uint32_t n)
{
    const __m256i zero = _mm256_setzero_si256();
    __m256i low[2] = {zero, zero}, high[2] = {zero, zero};
    for (uint32_t i = 0; i < n; i += 4)
        for (unsigned k = 0; k < 4; k++) {
            const unsigned char *row = middle + offsets[i + k];
            low[k % 2] = _mm256_adds_epu16(low[k % 2], qc_load(row));
            high[k % 2] = _mm256_adds_epu16(high[k % 2], qc_load(row + 32));
        }
    const __m256i run[2] = {_mm256_adds_epu16(low[0], low[1]), _mm256_adds_epu16(high[0], high[1])};
    for (unsigned h = 0; h < 4; h++) {
        __m128i half =
            h % 2 ? _mm256_extracti128_si256(run[h / 2], 1) : _mm256_castsi256_si128(run[h / 2]);
        t->of[h] = _mm256_add_epi32(t->of[h], _mm256_cvtepu16_epi32(half));
    }
}

QC_INLINE uint32_t lowest_of(const totals *t)
{
    __m256i v = _mm256_min_epu32(_mm256_min_epu32(t->of[0], t->of[1]),
                                 _mm256_min_epu32(t->of[2], t->of[3]));
    __m128i a = _mm_min_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_min_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_min_epu32(a, _mm_shuffle_epi32(a, 0xb1));
    const __m256i least = _mm256_broadcastd_epi32(a);
    uint32_t mask = 0;
    for (unsigned h = 0; h < 4; h++) {
        __m256 equal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(t->of[h], least));
        mask |= (uint32_t)_mm256_movemask_ps(equal) << 8 * h;
    }
    return (uint32_t)__builtin_ctz(mask);
}

/* Makes the totals of a block and returns the candidate of the least. */
QC_INLINE uint32_t screen_rows(const uint16_t (*screen)[CANDIDATES], const int16_t *offsets,
                               uint32_t n, uint32_t *total)
{
    totals t;
    for (unsigned h = 0; h < 4; h++)
        t.of[h] = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += QC_SEARCH_RUN)
        add_rows(&t, (const unsigned char *)screen[127], offsets + i,
                 qc_min_u32(n - i, QC_SEARCH_RUN));
    for (unsigned h = 0; h < 4; h++)
        qc_store(total + 8 * h, t.of[h]);
    return lowest_of(&t);
}

/* Stores levels times 64, which are the offsets of rows. */
QC_INLINE void store_offsets(int16_t *offsets, qc_wide z)
{
    _Static_assert(CANDIDATES * sizeof(uint16_t) == 64, "offsets are levels times 64");
    qc_wide_int level = qc_wide_round(z);
    level.low = _mm256_slli_epi32(level.low, 6);
    level.high = _mm256_slli_epi32(level.high, 6);
    qc_wide_store_words(offsets, level);
}

/* ---- errors ---------------------------------------------------------------------------------- */

QC_INLINE __m256i bucket_of(__m256 y)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 inside = _mm256_min_ps(_mm256_max_ps(y, _mm256_sub_ps(_mm256_setzero_ps(), one)), one);
    __m256i k = _mm256_cvtps_epi32(_mm256_mul_ps(inside, _mm256_set1_ps(QC_NF4_BUCKETS)));
    return _mm256_and_si256(k, _mm256_set1_epi32(31));
}

/* The two NF4 values, one of which is nearest to y, by bucket. */
typedef struct {
    const float *low, *high;
} neighbours;

QC_INLINE neighbours load_neighbours(const qc_search_tables *t)
{
    return (neighbours){t->nf4_low, t->nf4_high};
}

QC_INLINE __m256 nf4_residue8(const neighbours *t, __m256 y)
{
    __m256i k = bucket_of(y);
    __m256 low = _mm256_sub_ps(y, _mm256_i32gather_ps(t->low, k, 4));
    __m256 high = _mm256_sub_ps(y, _mm256_i32gather_ps(t->high, k, 4));
    return _mm256_min_ps(_mm256_castsi256_ps(qc_magnitude_f32(low)),
                         _mm256_castsi256_ps(qc_magnitude_f32(high)));
}

QC_INLINE qc_wide nf4_residue(const neighbours *t, qc_wide y)
{
    return (qc_wide){nf4_residue8(t, y.low), nf4_residue8(t, y.high)};
}

/* ---- codes ----------------------------------------------------------------------------------- */

typedef const qc_simd_tables *code_tables;

QC_INLINE code_tables load_codes(const qc_simd_tables *t)
{
    return t;
}

QC_INLINE __m256i nf4_code8(const qc_simd_tables *t, __m256 y)
{
    __m256i k = bucket_of(y);
    __m256 threshold = _mm256_i32gather_ps(t->nf4_threshold, k, 4);
    __m256i above = _mm256_castps_si256(_mm256_cmp_ps(y, threshold, _CMP_GT_OQ));
    return _mm256_sub_epi32(_mm256_i32gather_epi32(t->nf4_base, k, 4), above);
}

QC_INLINE qc_wide_int nf4_code(const code_tables *t, qc_wide y)
{
    return (qc_wide_int){nf4_code8(*t, y.low), nf4_code8(*t, y.high)};
}

QC_INLINE qc_wide nf4_value(const code_tables *t, qc_wide_int code)
{
    (void)t;
    return (qc_wide){_mm256_i32gather_ps(qc_nf4_code, code.low, 4),
                     _mm256_i32gather_ps(qc_nf4_code, code.high, 4)};
}

#define QC_SEARCH_QUANT_OPS qc_quant_ops_avx2
#define QC_SEARCH_TOGETHER  4u /* sums in registers */
#include "quant/scale_search_body.h"

static const qc_search_steps steps = {&qc_quant_ops_avx2, widen, look, errors, encode, encode_row};

#include "quant/scale_search_driver.h"

const qc_search_ops qc_search_ops_avx2 = {QC_ISA_AVX2, search_blocks};
