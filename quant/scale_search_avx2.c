/* The search with AVX2: what is done per element. Orders and meaning: scale_search_internal.h; the
 * shape is that of scale_search_avx512.c. Sixteen lanes are two vectors. Tables of 32 entries are
 * gathered: they lie in L1, and a choice among four permutes took as long. */
#include "quant/quant_avx2_internal.h"
#include "quant/quant_simd_tables.h"
#include "quant/scale_search_internal.h"

#include <math.h>

#define CANDIDATES (2 * QC_SEARCH_FACTORS)

/* l and l + 4, 2, 1 */
QC_INLINE float fold8(__m256 a)
{
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

QC_INLINE float fold(const __m256 lanes[2])
{
    return fold8(_mm256_add_ps(lanes[0], lanes[1]));
}

QC_INLINE __m256 magnitude(__m256 x)
{
    return _mm256_castsi256_ps(qc_magnitude_f32(x));
}

QC_INLINE float largest_of(__m256 x)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

/* NaN may keep its payload where a cast makes it quiet: nobody looks at it. */
static void widen(const void *src, qc_dtype dtype, uint32_t n, float *x)
{
    const uint32_t whole = n / 8 * 8;
    if (dtype == QC_DTYPE_BF16)
        for (uint32_t i = 0; i < whole; i += 8)
            _mm256_store_ps(x + i, qc_load8(src, QC_DTYPE_BF16, i));
    else
        for (uint32_t i = 0; i < whole; i += 8)
            _mm256_store_ps(x + i, qc_load8(src, dtype, i));
    if (n > whole) {
        uint64_t overflow;
        qc_quant_ops_avx2.cast((const unsigned char *)src + whole * (qc_dtype_bits(dtype) / 8),
                               dtype, n - whole, x + whole, QC_DTYPE_F32, &overflow);
    }
}

/* ---- screen ---------------------------------------------------------------------------------- */

typedef struct {
    __m256i of[4]; /* totals of 8 candidates each */
} totals;

/* Rows of up to QC_SEARCH_RUN elements. Two chains: saturating sums of parts, added with
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

static void look(const float *x, uint32_t n, const uint16_t (*screen)[CANDIDATES],
                 qc_search_look *out)
{
    _Alignas(64) int16_t offsets[QC_BLOCK_MAX];
    __m256i most = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += 8)
        most = _mm256_max_epu32(most, qc_magnitude_f32(_mm256_load_ps(x + i)));
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
    out->absmax = _mm_cvtss_f32(_mm_castsi128_ps(a));
    if (!(out->absmax >= QC_TINY_ABSMAX) || !isfinite(out->absmax))
        return;
    const __m256 k = _mm256_set1_ps((1.0f / out->absmax) * 127.0f);
    __m256 xx[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (uint32_t i = 0; i < n; i += 16) {
        __m256i level[2];
        for (unsigned h = 0; h < 2; h++) {
            __m256 z = _mm256_mul_ps(_mm256_load_ps(x + i + 8 * h), k);
            xx[h] = _mm256_fmadd_ps(z, z, xx[h]);
            level[h] = _mm256_slli_epi32(_mm256_cvtps_epi32(z), 6);
        }
        qc_store(offsets + i,
                 _mm256_permute4x64_epi64(_mm256_packs_epi32(level[0], level[1]), 0xd8));
    }
    out->xx = fold(xx);
    if (!screen)
        return;
    _Static_assert(CANDIDATES * sizeof(uint16_t) == 64, "offsets are levels times 64");
    totals t;
    for (unsigned h = 0; h < 4; h++)
        t.of[h] = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += QC_SEARCH_RUN)
        add_rows(&t, (const unsigned char *)screen[127], offsets + i,
                 n - i < QC_SEARCH_RUN ? n - i : QC_SEARCH_RUN);
    for (unsigned h = 0; h < 4; h++)
        qc_store(out->total + 8 * h, t.of[h]);
    out->best = lowest_of(&t);
}

/* ---- errors ---------------------------------------------------------------------------------- */

QC_INLINE __m256i bucket_of(__m256 y)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 inside = _mm256_min_ps(_mm256_max_ps(y, _mm256_sub_ps(_mm256_setzero_ps(), one)), one);
    __m256i k = _mm256_cvtps_epi32(_mm256_mul_ps(inside, _mm256_set1_ps(QC_NF4_BUCKETS)));
    return _mm256_and_si256(k, _mm256_set1_epi32(31));
}

QC_INLINE __m256 int8_code(__m256 y)
{
    const __m256 magic = _mm256_set1_ps(0x1.8p23f);
    __m256 q = _mm256_sub_ps(_mm256_add_ps(y, magic), magic);
    q = _mm256_min_ps(q, _mm256_set1_ps(127.0f));
    return _mm256_max_ps(q, _mm256_set1_ps(-127.0f));
}

QC_INLINE __m256 residue(const qc_search_tables *t, __m256 y, int is_nf4)
{
    if (!is_nf4)
        return _mm256_sub_ps(y, int8_code(y));
    __m256i k = bucket_of(y);
    __m256 low = _mm256_sub_ps(y, _mm256_i32gather_ps(t->nf4_low, k, 4));
    __m256 high = _mm256_sub_ps(y, _mm256_i32gather_ps(t->nf4_high, k, 4));
    return _mm256_min_ps(magnitude(low), magnitude(high));
}

QC_INLINE void errors_of(const qc_search_tables *t, const float *x, uint32_t n, int is_nf4,
                         const float *inv, unsigned count, float *rr)
{
    __m256 sum[4][2];
    for (unsigned j = 0; j < count; j++)
        sum[j][0] = sum[j][1] = _mm256_setzero_ps();
    for (uint32_t i = 0; i < n; i += 16)
        for (unsigned h = 0; h < 2; h++) {
            __m256 v = _mm256_load_ps(x + i + 8 * h);
            for (unsigned j = 0; j < count; j++) {
                __m256 r = residue(t, _mm256_mul_ps(v, _mm256_set1_ps(inv[j])), is_nf4);
                sum[j][h] = _mm256_fmadd_ps(r, r, sum[j][h]);
            }
        }
    for (unsigned j = 0; j < count; j++)
        rr[j] = fold(sum[j]);
}

static void errors(const qc_search_tables *t, const float *x, uint32_t n, int is_nf4,
                   const float *inv, unsigned count, float *rr)
{
    unsigned j = 0;
    for (; j + 4 <= count; j += 4) {
        if (is_nf4)
            errors_of(t, x, n, 1, inv + j, 4, rr + j);
        else
            errors_of(t, x, n, 0, inv + j, 4, rr + j);
    }
    if (j + 2 <= count && is_nf4) {
        errors_of(t, x, n, 1, inv + j, 2, rr + j);
        j += 2;
    }
    for (; j < count; j++)
        errors_of(t, x, n, is_nf4, inv + j, 1, rr + j);
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* 32 codes, a dword each, as bytes in order. */
QC_INLINE __m256i bytes_of(const __m256i v[4])
{
    __m256i words_low = _mm256_packs_epi32(v[0], v[1]), words_high = _mm256_packs_epi32(v[2], v[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_low, words_high), order);
}

static float encode_nf4(const float *x, uint32_t n, float inv, float s, uint8_t *codes)
{
    const qc_simd_tables *t = qc_simd_tables_get();
    const __m256 by = _mm256_set1_ps(inv), scale = _mm256_set1_ps(s);
    __m256 largest = _mm256_setzero_ps();
    for (uint32_t i = 0; i < n; i += 32) {
        __m256i code[4];
        for (unsigned h = 0; h < 4; h++) {
            __m256 v = _mm256_load_ps(x + i + 8 * h);
            __m256 y = _mm256_mul_ps(v, by);
            __m256i k = bucket_of(y);
            __m256 threshold = _mm256_i32gather_ps(t->nf4_threshold, k, 4);
            __m256i above = _mm256_castps_si256(_mm256_cmp_ps(y, threshold, _CMP_GT_OQ));
            code[h] = _mm256_sub_epi32(_mm256_i32gather_epi32(t->nf4_base, k, 4), above);
            __m256 c = _mm256_i32gather_ps(qc_nf4_code, code[h], 4);
            __m256 e = magnitude(_mm256_sub_ps(v, _mm256_mul_ps(c, scale)));
            largest = _mm256_max_ps(largest, e);
        }
        __m256i pairs = _mm256_maddubs_epi16(bytes_of(code), _mm256_set1_epi16(1 << 8 | 16));
        pairs = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0xd8);
        qc_store_half(codes + i / 2, _mm256_castsi256_si128(pairs));
    }
    return largest_of(largest);
}

static float encode_int8(const float *x, uint32_t n, float inv, float s, uint8_t *codes)
{
    const __m256 by = _mm256_set1_ps(inv), scale = _mm256_set1_ps(s);
    const __m256 step = _mm256_set1_ps(QC_INT8_STEP);
    __m256 largest = _mm256_setzero_ps();
    for (uint32_t i = 0; i < n; i += 32) {
        __m256i code[4];
        for (unsigned h = 0; h < 4; h++) {
            __m256 v = _mm256_load_ps(x + i + 8 * h);
            __m256 q = int8_code(_mm256_mul_ps(v, by));
            __m256 seen = _mm256_mul_ps(_mm256_mul_ps(q, step), scale);
            largest = _mm256_max_ps(largest, magnitude(_mm256_sub_ps(v, seen)));
            code[h] = _mm256_cvtps_epi32(q);
        }
        qc_store(codes + i, bytes_of(code));
    }
    return largest_of(largest);
}

static float encode(const float *x, uint32_t n, int is_nf4, float inv, float s, uint8_t *codes)
{
    return is_nf4 ? encode_nf4(x, n, inv, s, codes) : encode_int8(x, n, inv, s, codes);
}

static float encode_row(const float *x, const float *h, uint32_t n, float inv, float scb,
                        int8_t *codes, float *ee, float *xx)
{
    const __m256 by = _mm256_set1_ps(inv), scale = _mm256_set1_ps(scb);
    const __m256 step = _mm256_set1_ps(QC_INT8_STEP), zero = _mm256_setzero_ps();
    __m256 largest = zero, ee_sum[2] = {zero, zero}, xx_sum[2] = {zero, zero};
    for (uint32_t i = 0; i < n; i += 32) {
        __m256i code[4];
        for (unsigned p = 0; p < 4; p++) {
            __m256 v = _mm256_load_ps(x + i + 8 * p);
            __m256 q = int8_code(_mm256_mul_ps(_mm256_load_ps(h + i + 8 * p), by));
            __m256 e = _mm256_sub_ps(v, _mm256_mul_ps(_mm256_mul_ps(q, scale), step));
            ee_sum[p % 2] = _mm256_fmadd_ps(e, e, ee_sum[p % 2]);
            xx_sum[p % 2] = _mm256_fmadd_ps(v, v, xx_sum[p % 2]);
            largest = _mm256_max_ps(largest, magnitude(e));
            code[p] = _mm256_cvtps_epi32(q);
        }
        qc_store(codes + i, bytes_of(code));
    }
    *ee = fold(ee_sum);
    *xx = fold(xx_sum);
    return largest_of(largest);
}

static const qc_search_steps steps = {&qc_quant_ops_avx2, widen, look, errors, encode,
                                      encode_row,         NULL,  NULL, NULL};

#include "quant/scale_search_driver.h"

const qc_search_ops qc_search_ops_avx2 = {QC_ISA_AVX2, search_blocks, search_rows};
