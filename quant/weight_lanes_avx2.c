#include "quant/quant_avx2_internal.h"
#include "quant/quant_half.h"
#include "quant/weight_lanes.h"

#include <math.h>

typedef struct {
    __m256 low, high; /* entries 0 .. 7 and 8 .. 15 */
} table16;

QC_INLINE table16 load_table(const float *t)
{
    return (table16){_mm256_loadu_ps(t), _mm256_loadu_ps(t + 8)};
}

/* Bit 3 of a code chooses the half. */
QC_INLINE __m256 look_up(table16 t, __m256i code)
{
    __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, code),
                            _mm256_permutevar8x32_ps(t.high, code), half);
}

typedef struct {
    __m256 ee, xx;
    __m256i peak;
} sums256;

/* Takes eight elements and returns the bits of those inside of their borders. */
QC_INLINE uint32_t step8(__m256 x, __m256i code, const table16 t[3], __m256 scale, __m256 give,
                         sums256 *s)
{
    __m256 e = _mm256_sub_ps(x, _mm256_mul_ps(look_up(t[0], code), scale));
    __m256 from = _mm256_sub_ps(_mm256_mul_ps(look_up(t[1], code), scale), give);
    __m256 to = _mm256_add_ps(_mm256_mul_ps(look_up(t[2], code), scale), give);
    s->ee = _mm256_add_ps(s->ee, _mm256_mul_ps(e, e));
    s->xx = _mm256_add_ps(s->xx, _mm256_mul_ps(x, x));
    s->peak = _mm256_max_epu32(s->peak, qc_magnitude_f32(e));
    return (uint32_t)_mm256_movemask_ps(
        _mm256_and_ps(_mm256_cmp_ps(x, from, _CMP_GE_OQ), _mm256_cmp_ps(x, to, _CMP_LE_OQ)));
}

static qc_lane_sums codes4_avx2(const float *x, const uint8_t *codes, const float *scales,
                                const qc_lane_tables *t, uint32_t n, uint32_t block, float slack,
                                uint32_t *out)
{
    /* lanes 0 .. 7 and 8 .. 15: the first and the second 16 of 32 elements */
    sums256 s[2] = {{_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_si256()},
                    {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_si256()}};
    for (uint32_t first = 0, k = 0; first < n; first += block, k++) {
        uint32_t end = n - first < block ? n : first + block, inside = 0;
        int turned = scales[k] < 0.0f;
        table16 tables[3] = {load_table(t->map), load_table(turned ? t->high : t->low),
                             load_table(turned ? t->low : t->high)};
        __m256 scale = _mm256_set1_ps(scales[k]), give = _mm256_set1_ps(fabsf(scales[k]) * slack);
        for (uint32_t i = first; i < end; i += 16) {
            __m256i c = _mm256_cvtepu8_epi32(
                _mm_loadl_epi64((const __m128i *)(const void *)(codes + i / 2)));
            qc_pair p = qc_split_f32(x + i);
            sums256 *to = &s[i / 16 % 2];
            uint32_t even = step8(p.even, _mm256_srli_epi32(c, 4), tables, scale, give, to);
            uint32_t odd =
                step8(p.odd, _mm256_and_si256(c, _mm256_set1_epi32(15)), tables, scale, give, to);
            inside += (uint32_t)__builtin_popcount(even << 8 | odd);
        }
        out[k] = end - first - inside;
    }
    float lanes[2][QC_LANES];
    uint32_t peaks[QC_LANES], peak = 0;
    for (int h = 0; h < 2; h++) {
        _mm256_storeu_ps(lanes[0] + 8 * h, s[h].ee);
        _mm256_storeu_ps(lanes[1] + 8 * h, s[h].xx);
        qc_store(peaks + 8 * h, s[h].peak);
    }
    for (uint32_t l = 0; l < QC_LANES; l++)
        peak = peaks[l] > peak ? peaks[l] : peak;
    return (qc_lane_sums){qc_fold16(lanes[0]), qc_fold16(lanes[1]), peak};
}

#define QC_LANES_CODES4 codes4_avx2
#define QC_LANES_TABLE  qc_lanes_avx2
#include "quant/weight_lanes_body.h"

/* A 'verify --against' took 0.90 of the time with vectors of 64 bytes: decisions/0031. */
const qc_lanes qc_lanes_avx512 = {errors, outside, codes4_avx2, outside8, above};
