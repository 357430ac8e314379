#include "convert/validate/timing.h"

#include "base/checked.h"

#include <math.h>
#include <stdlib.h>

#define MAX_COPIES   256u
#define MAX_LAUNCHES 2048u
#define MIN_ROUNDS   2u

uint32_t qc_timing_copies(uint64_t read_each, uint64_t held_each, uint64_t l2_bytes,
                          uint64_t limit_bytes)
{
    if (read_each == 0 || held_each == 0)
        return 2;
    uint64_t copies = qc_sat_mul(4, l2_bytes) / read_each;
    copies = qc_sat_add(copies, 1);
    if (copies < 2)
        copies = 2;
    if (copies > MAX_COPIES)
        copies = MAX_COPIES;
    if (copies > limit_bytes / held_each)
        copies = limit_bytes / held_each;
    return copies ? (uint32_t)copies : 1;
}

uint32_t qc_timing_launches(uint32_t copies, uint32_t least, double us, double min_us)
{
    double want = us > 0 ? min_us / us : 0;
    uint32_t launches = want < MAX_LAUNCHES ? (uint32_t)want + 1 : MAX_LAUNCHES;
    if (launches < least)
        launches = least;
    return (launches + copies - 1) / copies * copies;
}

uint32_t qc_timing_turn(uint32_t round, uint32_t step, uint32_t contenders)
{
    uint32_t i = step < contenders ? step : 2 * contenders - 1 - step;
    return round % 2 ? contenders - 1 - i : i;
}

uint32_t qc_timing_rounds(uint32_t wanted, double round_seconds, double seconds)
{
    uint32_t rounds = wanted;
    if (seconds < round_seconds * wanted)
        rounds = seconds > 0 ? (uint32_t)(seconds / round_seconds) : 0;
    if (rounds < MIN_ROUNDS)
        rounds = MIN_ROUNDS;
    return rounds < wanted ? rounds : wanted;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The samples are sorted, and count > 0. */
static double rank(const double *samples, uint32_t count, double q)
{
    double at = q * (count - 1);
    uint32_t i = (uint32_t)at;
    if (i + 1 >= count)
        return samples[count - 1];
    return samples[i] + (at - i) * (samples[i + 1] - samples[i]);
}

qc_spread qc_spread_of(double *samples, uint32_t count)
{
    qc_spread s = {0, 0, 0, count};
    if (!count)
        return s;
    qsort(samples, count, sizeof *samples, by_value);
    s.median = rank(samples, count, 0.5);
    s.p10 = rank(samples, count, 0.1);
    s.p90 = rank(samples, count, 0.9);
    return s;
}

qc_spread qc_spread_rate(qc_spread s, double scale)
{
    qc_spread r = {0, 0, 0, s.samples};
    if (!s.samples || !(s.p10 > 0))
        return (qc_spread){0, 0, 0, 0};
    r.median = scale / s.median;
    r.p10 = scale / s.p90;
    r.p90 = scale / s.p10;
    return r;
}

uint64_t qc_product_bytes(uint64_t weight_bytes, uint64_t m, uint64_t n, uint64_t k)
{
    return weight_bytes + 2 * m * k + 2 * m * n;
}

double qc_product_flops(uint64_t m, uint64_t n, uint64_t k)
{
    return 2 * (double)m * (double)n * (double)k;
}

double qc_roof_copy_gbps(const qc_gpu_roof *roof)
{
    return fmax(roof->copy_gbps.median, roof->kernel_copy_gbps.median);
}

double qc_roof_memory_gbps(const qc_gpu_roof *roof)
{
    return fmax(qc_roof_copy_gbps(roof), roof->read_gbps.median);
}

double qc_roof_floor_us(const qc_gpu_roof *roof, uint64_t bytes, double flops)
{
    const double gbps = qc_roof_memory_gbps(roof);
    double memory = 0, compute = 0;
    if (gbps > 0)
        memory = (double)bytes / gbps / 1e3;
    if (roof->gemm_tflops.median > 0)
        compute = flops / roof->gemm_tflops.median / 1e6;
    return memory > compute ? memory : compute;
}
