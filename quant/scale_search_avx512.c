/* The search with AVX-512: what is done with vectors, and sixteen blocks side by side; the steps
 * over elements are scale_search_body.h. Orders and meaning: scale_search_internal.h.
 *
 * The screen is the largest part, and bound by loads: per element the offset of its row and the
 * row itself, 32 totals of 16 bits in one vector, one saturating addition. That makes a little more
 * than a cycle per element for 32 candidates, where one exact error takes 9 operations for 16
 * elements: what is nearest to y is one of two values looked up by a bucket of 1/15, and the lesser
 * of both distances is taken without asking which. */
#include "quant/quant_avx2.h"
#include "quant/quant_half.h"
#include "quant/quant_simd_tables.h"
#include "quant/quant_wide.h"
#include "quant/scale_search_internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define CANDIDATES (2 * QC_SEARCH_FACTORS)

static const float magic = 0x1.8p23f; /* its lowest bits are an integer */

/* ---- screen ---------------------------------------------------------------------------------- */

/* Adds rows of up to QC_SEARCH_RUN elements, whose byte offsets from `middle` are given, in four
 * chains: saturating sums of parts, added with saturation, are the saturated sum. */
QC_INLINE __m512i add_rows(const unsigned char *middle, const int16_t *offsets, uint32_t n)
{
    __m512i sum[4];
    for (unsigned k = 0; k < 4; k++)
        sum[k] = _mm512_setzero_si512();
    for (uint32_t i = 0; i < n; i += 8)
        for (unsigned k = 0; k < 8; k++)
            sum[k % 4] = _mm512_adds_epu16(sum[k % 4], _mm512_load_si512(middle + offsets[i + k]));
    return _mm512_adds_epu16(_mm512_adds_epu16(sum[0], sum[1]), _mm512_adds_epu16(sum[2], sum[3]));
}

QC_INLINE uint32_t lowest_of(__m512i low, __m512i high)
{
    __m512i least = _mm512_set1_epi32((int)_mm512_reduce_min_epu32(_mm512_min_epu32(low, high)));
    uint32_t mask = _mm512_cmpeq_epi32_mask(high, least);
    mask = mask << 16 | _mm512_cmpeq_epi32_mask(low, least);
    return (uint32_t)__builtin_ctz(mask);
}

/* Makes the totals of a block and returns the candidate of the least. offsets: levels times 64 */
QC_INLINE uint32_t screen_rows(const uint16_t (*screen)[CANDIDATES], const int16_t *offsets,
                               uint32_t n, uint32_t *total)
{
    const unsigned char *middle = (const unsigned char *)screen[127];
    __m512i low = _mm512_setzero_si512(), high = low;
    for (uint32_t i = 0; i < n; i += QC_SEARCH_RUN) {
        uint32_t count = qc_min_u32(n - i, QC_SEARCH_RUN);
        __m512i run = add_rows(middle, offsets + i, count);
        low = _mm512_add_epi32(low, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(run)));
        high = _mm512_add_epi32(high, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(run, 1)));
    }
    _mm512_store_si512(total, low);
    _mm512_store_si512(total + 16, high);
    return lowest_of(low, high);
}

/* Stores levels times 64, which are the offsets of rows. */
QC_INLINE void store_offsets(int16_t *offsets, __m512 z)
{
    _Static_assert(CANDIDATES * sizeof(uint16_t) == 64, "offsets are levels times 64");
    qc_wide_store_words(offsets, _mm512_slli_epi32(_mm512_cvtps_epi32(z), 6));
}

/* ---- errors ---------------------------------------------------------------------------------- */

QC_INLINE __m512i bucket_of(__m512 y)
{
    __m512 inside =
        _mm512_range_ps(y, _mm512_set1_ps(1.0f), 0x02); /* lesser magnitude, sign of y */
    return _mm512_castps_si512(
        _mm512_fmadd_ps(inside, _mm512_set1_ps(QC_NF4_BUCKETS), _mm512_set1_ps(magic)));
}

QC_INLINE __m512 table32(const __m512 *table, __m512i index)
{
    return _mm512_permutex2var_ps(table[0], index, table[1]);
}

/* The two NF4 values, one of which is nearest to y, by bucket. */
typedef struct {
    __m512 low[2], high[2];
} neighbours;

QC_INLINE neighbours load_neighbours(const qc_search_tables *t)
{
    return (neighbours){{_mm512_load_ps(t->nf4_low), _mm512_load_ps(t->nf4_low + 16)},
                        {_mm512_load_ps(t->nf4_high), _mm512_load_ps(t->nf4_high + 16)}};
}

QC_INLINE __m512 nf4_residue(const neighbours *t, __m512 y)
{
    const __m512i k = bucket_of(y);
    return _mm512_range_ps(_mm512_sub_ps(y, table32(t->low, k)),
                           _mm512_sub_ps(y, table32(t->high, k)), 0x0a); /* the lesser magnitude */
}

/* ---- codes ----------------------------------------------------------------------------------- */

typedef struct {
    __m512 threshold[2], value;
    __m512i base[2];
} code_tables;

QC_INLINE code_tables load_codes(const qc_simd_tables *t)
{
    return (code_tables){{_mm512_load_ps(t->nf4_threshold), _mm512_load_ps(t->nf4_threshold + 16)},
                         _mm512_loadu_ps(qc_nf4_code),
                         {_mm512_load_si512(t->nf4_base), _mm512_load_si512(t->nf4_base + 16)}};
}

QC_INLINE __m512i nf4_code(const code_tables *t, __m512 y)
{
    __m512i k = bucket_of(y);
    __m512i code = _mm512_permutex2var_epi32(t->base[0], k, t->base[1]);
    __mmask16 above = _mm512_cmp_ps_mask(y, table32(t->threshold, k), _CMP_GT_OQ);
    return _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1));
}

QC_INLINE __m512 nf4_value(const code_tables *t, __m512i code)
{
    return _mm512_permutexvar_ps(code, t->value);
}

#define QC_SEARCH_QUANT_OPS qc_quant_ops_avx512
#define QC_SEARCH_TOGETHER  16u /* sums in registers */
#include "quant/scale_search_body.h"

static const qc_search_steps steps = {
    &qc_quant_ops_avx512, widen, look, errors, encode, encode_row};

#include "quant/scale_search_driver.h"

const qc_search_ops qc_search_ops_avx512 = {QC_ISA_AVX512, search_blocks};
