/* The body of weight_lanes*.c; defines the table QC_LANES_TABLE. It has no include guard, because
 * each of them includes it once. */
#include "quant/quant_half.h"
#include "quant/weight_lanes.h"

#include <math.h>
#include <string.h>

/* Sixteen lanes, in as many registers as they take; results do not depend on that. */
typedef float float_lanes __attribute__((vector_size(QC_LANES * sizeof(float))));
typedef int32_t int_lanes __attribute__((vector_size(QC_LANES * sizeof(int32_t))));

static qc_lane_sums errors(const float *x, const float *value, uint32_t n)
{
    float_lanes ee = {0}, xx = {0}, a, v;
    int_lanes peak = {0}, magnitude, larger;
    uint32_t i = 0;
    for (; i + QC_LANES <= n; i += QC_LANES) {
        memcpy(&a, x + i, sizeof a);
        memcpy(&v, value + i, sizeof v);
        v = a - v;
        ee += v * v;
        xx += a * a;
        memcpy(&magnitude, &v, sizeof v);
        magnitude &= 0x7fffffff;
        larger = magnitude > peak;
        peak = (magnitude & larger) | (peak & ~larger);
    }
    for (; i < n; i++) {
        float e = x[i] - value[i];
        uint32_t l = i % QC_LANES;
        int32_t bits = (int32_t)(qc_f32_bits(e) & 0x7fffffffu);
        ee[l] += e * e;
        xx[l] += x[i] * x[i];
        peak[l] = bits > peak[l] ? bits : peak[l];
    }
    float lanes[QC_LANES];
    qc_lane_sums s;
    memcpy(lanes, &ee, sizeof ee);
    s.ee = qc_fold16(lanes);
    memcpy(lanes, &xx, sizeof xx);
    s.xx = qc_fold16(lanes);
    int32_t most = 0;
    for (uint32_t l = 0; l < QC_LANES; l++)
        most = peak[l] > most ? peak[l] : most;
    s.peak = (uint32_t)most;
    return s;
}

static uint32_t outside(const float *x, const float *low, const float *high, uint32_t n,
                        float slack)
{
    uint32_t inside = 0;
    for (uint32_t i = 0; i < n; i++)
        inside += (uint32_t)((x[i] >= low[i] - slack) & (x[i] <= high[i] + slack));
    return n - inside;
}

static uint32_t outside8(const float *x, const float *value, const int8_t *codes, uint32_t n,
                         float reach)
{
    uint32_t inside = 0;
    for (uint32_t i = 0; i < n; i++) {
        int end = (codes[i] >= 127) | (codes[i] <= -127);
        int beyond = (fabsf(x[i]) >= fabsf(value[i])) & ((x[i] < 0.0f) == (value[i] < 0.0f));
        inside += (uint32_t)((fabsf(x[i] - value[i]) <= reach) | (end & beyond));
    }
    return n - inside;
}

static uint32_t above(const float *x, uint32_t n, float top)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        count += (uint32_t)(fabsf(x[i]) > top);
    return count;
}

#ifndef QC_LANES_CODES4
static qc_lane_sums codes4(const float *x, const uint8_t *codes, const float *scales,
                           const qc_lane_tables *t, uint32_t n, uint32_t block, float slack,
                           uint32_t *out)
{
    float ee[QC_LANES] = {0}, xx[QC_LANES] = {0};
    uint32_t peak = 0;
    for (uint32_t first = 0, k = 0; first < n; first += block, k++) {
        uint32_t end = n - first < block ? n : first + block, inside = 0;
        float scale = scales[k], give = fabsf(scale) * slack;
        const float *low = scale < 0.0f ? t->high : t->low;
        const float *high = scale < 0.0f ? t->low : t->high;
        for (uint32_t i = first; i < end; i++) {
            unsigned c = i % 2 ? codes[i / 2] & 15u : codes[i / 2] >> 4;
            float e = x[i] - t->map[c] * scale;
            uint32_t l = i / 2 % QC_LANES, magnitude = qc_f32_bits(e) & 0x7fffffffu;
            ee[l] += e * e;
            xx[l] += x[i] * x[i];
            peak = magnitude > peak ? magnitude : peak;
            inside +=
                (uint32_t)((x[i] >= low[c] * scale - give) & (x[i] <= high[c] * scale + give));
        }
        out[k] = end - first - inside;
    }
    return (qc_lane_sums){qc_fold16(ee), qc_fold16(xx), peak};
}
#define QC_LANES_CODES4 codes4
#endif

const qc_lanes QC_LANES_TABLE = {errors, outside, QC_LANES_CODES4, outside8, above};
