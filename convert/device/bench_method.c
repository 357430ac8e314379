#include "convert/device/bench.h"

#include "base/checked.h"

#include <stdlib.h>

#define MAX_COPIES   256u
#define MAX_LAUNCHES 2048u
#define MIN_ROUNDS   2u
/* The least launches of a graph, as convert/gpu/gpu_bench_matmul.c and gpu_bench_time.c make it. */
#define LEAST_LAUNCHES 20
#define LEAST_GRAPH_US 2000.0

uint32_t qc_bench_copies(uint64_t read_each, uint64_t held_each, uint64_t l2_bytes,
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

uint32_t qc_bench_launches(uint32_t copies, uint32_t least, double us, double min_us)
{
    double want = us > 0 ? min_us / us : 0;
    uint32_t launches = want < MAX_LAUNCHES ? (uint32_t)want + 1 : MAX_LAUNCHES;
    if (launches < least)
        launches = least;
    return (launches + copies - 1) / copies * copies;
}

uint32_t qc_bench_turn(uint32_t round, uint32_t step, uint32_t contenders)
{
    uint32_t i = step < contenders ? step : 2 * contenders - 1 - step;
    return round % 2 ? contenders - 1 - i : i;
}

uint32_t qc_bench_rounds(uint32_t wanted, double round_seconds, double share_seconds)
{
    double share = share_seconds > 0 ? share_seconds : 0;
    uint32_t rounds = wanted;
    if (share < round_seconds * wanted)
        rounds = (uint32_t)(share / round_seconds);
    if (rounds < MIN_ROUNDS)
        rounds = MIN_ROUNDS;
    return rounds < wanted ? rounds : wanted;
}

static double graph_us(double launch_us)
{
    double us = LEAST_LAUNCHES * launch_us;
    return us > LEAST_GRAPH_US ? us : LEAST_GRAPH_US;
}

/* The least microseconds of half a round. Where no roofs were measured (--tune measures none),
 * those of some GPU do as well, because only proportions count. */
static double round_cost(const qc_bench_request *q, const qc_bench_result *r, uint32_t shape,
                         uint64_t m)
{
    const qc_bench_roof some = {.copy_gbps.median = 1000, .gemm_tflops.median = 100};
    const qc_bench_roof *roof = qc_bench_memory_gbps(&r->roof) > 0 ? &r->roof : &some;
    uint64_t n = q->shapes[shape].n, k = q->shapes[shape].k;
    double flops = qc_bench_flops(m, n, k), us = 0;
    if (!r->device.no_gemm && !q->tune)
        us += graph_us(qc_bench_floor_us(roof, qc_bench_bytes(2 * n * k, m, n, k), flops));
    for (uint32_t i = 0; i < q->scheme_count; i++) {
        uint64_t weight = qc_bench_weight_bytes(q->schemes[i], n, k);
        us += (q->packed ? 2 : 1) *
              graph_us(qc_bench_floor_us(roof, qc_bench_bytes(weight, m, n, k), flops));
    }
    return us;
}

double qc_bench_share(const qc_bench_request *q, const qc_bench_result *r, uint32_t shape,
                      uint32_t m, double seconds)
{
    double mine = round_cost(q, r, shape, q->m[m]), all = 0;
    for (uint32_t s = shape; s < q->shape_count; s++)
        for (uint32_t i = s == shape ? m : 0; i < q->m_count; i++)
            all += round_cost(q, r, s, q->m[i]);
    return seconds > 0 ? seconds * mine / all : 0;
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

qc_bench_spread qc_bench_spread_of(double *samples, uint32_t count)
{
    qc_bench_spread s = {0, 0, 0, count};
    if (!count)
        return s;
    qsort(samples, count, sizeof *samples, by_value);
    s.median = rank(samples, count, 0.5);
    s.p10 = rank(samples, count, 0.1);
    s.p90 = rank(samples, count, 0.9);
    return s;
}

qc_bench_spread qc_bench_spread_rate(qc_bench_spread s, double scale)
{
    qc_bench_spread r = {0, 0, 0, s.samples};
    if (!s.samples || !(s.p10 > 0))
        return (qc_bench_spread){0, 0, 0, 0};
    r.median = scale / s.median;
    r.p10 = scale / s.p90;
    r.p90 = scale / s.p10;
    return r;
}
