#include "quant/quant_avx512_internal.h"
#include "quant/quant_half.h"
#include "quant/weight_lanes.h"

#include <math.h>

typedef struct {
    __m512 ee, xx;
    __m512i peak;
} sums512;

/* Takes sixteen elements and returns the mask of those inside of their borders. */
QC_INLINE __mmask16 step16(__m512 x, __m512i code, __m512 map, __m512 low, __m512 high,
                           __m512 scale, __m512 give, sums512 *s)
{
    __m512 e = _mm512_sub_ps(x, _mm512_mul_ps(_mm512_permutexvar_ps(code, map), scale));
    __m512 from = _mm512_sub_ps(_mm512_mul_ps(_mm512_permutexvar_ps(code, low), scale), give);
    __m512 to = _mm512_add_ps(_mm512_mul_ps(_mm512_permutexvar_ps(code, high), scale), give);
    s->ee = _mm512_add_ps(s->ee, _mm512_mul_ps(e, e));
    s->xx = _mm512_add_ps(s->xx, _mm512_mul_ps(x, x));
    s->peak = _mm512_max_epu32(s->peak, qc_magnitude_f32(e));
    return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, from, _CMP_GE_OQ), x, to, _CMP_LE_OQ);
}

static qc_lane_sums codes4_avx512(const float *x, const uint8_t *codes, const float *scales,
                                  const qc_lane_tables *t, uint32_t n, uint32_t block, float slack,
                                  uint32_t *out)
{
    sums512 s = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_si512()};
    __m512 map = _mm512_loadu_ps(t->map);
    __m512 lows = _mm512_loadu_ps(t->low), highs = _mm512_loadu_ps(t->high);
    for (uint32_t first = 0, k = 0; first < n; first += block, k++) {
        uint32_t end = n - first < block ? n : first + block, inside = 0;
        __m512 scale = _mm512_set1_ps(scales[k]), give = _mm512_set1_ps(fabsf(scales[k]) * slack);
        __m512 low = scales[k] < 0.0f ? highs : lows, high = scales[k] < 0.0f ? lows : highs;
        for (uint32_t i = first; i < end; i += 32) {
            __m512i c = _mm512_cvtepu8_epi32(
                _mm_loadu_si128((const __m128i *)(const void *)(codes + i / 2)));
            qc_pair p = qc_split_f32(x + i);
            __mmask16 even =
                step16(p.even, _mm512_srli_epi32(c, 4), map, low, high, scale, give, &s);
            __mmask16 odd = step16(p.odd, _mm512_and_si512(c, _mm512_set1_epi32(15)), map, low,
                                   high, scale, give, &s);
            inside += (uint32_t)__builtin_popcount((uint32_t)even << 16 | odd);
        }
        out[k] = end - first - inside;
    }
    float lanes[2][QC_LANES];
    _mm512_storeu_ps(lanes[0], s.ee);
    _mm512_storeu_ps(lanes[1], s.xx);
    return (qc_lane_sums){qc_fold16(lanes[0]), qc_fold16(lanes[1]),
                          _mm512_reduce_max_epu32(s.peak)};
}

#define QC_LANES_CODES4 codes4_avx512
#define QC_LANES_TABLE  qc_lanes_avx512
#include "quant/weight_lanes_body.h"
