/* How qconv bench measures: rotation, launches, order of turns, rounds, percentiles. */
#include "convert/device/bench.h"
#include "tests/fixtures/test.h"

#define MIB ((uint64_t)1 << 20)

TEST(copies)
{
    const uint64_t l2 = 50 * MIB;
    for (uint64_t each = MIB; each < 1000 * MIB; each = each * 3 / 2 + 1) {
        uint64_t n = qc_bench_copies(each, each, l2, UINT64_MAX);
        assert_true(n >= 2 && n * each > 4 * l2);
        assert_true(n == 2 || (n - 1) * each <= 4 * l2); /* and none too many */
    }
    assert_int_equal(qc_bench_copies(1000, 1000, l2, UINT64_MAX), 256); /* small ones: a limit */
    /* As many as there is room for, but one at least. */
    assert_int_equal(qc_bench_copies(35 * MIB, 35 * MIB, l2, 100 * MIB), 2);
    assert_int_equal(qc_bench_copies(470 * MIB, 470 * MIB, l2, 500 * MIB), 1);
    assert_int_equal(qc_bench_copies(470 * MIB, 470 * MIB, l2, 0), 1);
    assert_int_equal(qc_bench_copies(0, 0, l2, 0), 2);
    /* Codes that lie there twice and are read once. */
    assert_int_equal(qc_bench_copies(35 * MIB, 70 * MIB, l2, UINT64_MAX), 6);
    assert_int_equal(qc_bench_copies(35 * MIB, 70 * MIB, l2, 300 * MIB), 4);
    assert_int_equal(qc_bench_copies(MIB, MIB, UINT64_MAX, UINT64_MAX), 256);
}

TEST(launches)
{
    assert_int_equal(qc_bench_launches(6, 20, 7.2, 2000), 282); /* 278 and then whole turns */
    assert_int_equal(qc_bench_launches(2, 20, 5000, 2000), 20);
    assert_int_equal(qc_bench_launches(3, 20, 5000, 2000), 21);
    assert_int_equal(qc_bench_launches(90, 20, 5000, 2000), 90);
    assert_int_equal(qc_bench_launches(1, 20, 0.001, 2000), 2048);
    assert_int_equal(qc_bench_launches(1, 20, 0, 2000), 20); /* a clock that stands still */
}

TEST(turns)
{
    const uint32_t two[] = {0, 1, 1, 0, 1, 0, 0, 1};
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(qc_bench_turn(i / 4, i % 4, 2), two[i]);
    /* Everybody twice a round, once in each half: no drift of the clock favours one. */
    for (uint32_t n = 1; n <= 5; n++)
        for (uint32_t round = 0; round < 4; round++) {
            unsigned seen[2][5] = {{0}};
            uint32_t place[5] = {0};
            for (uint32_t step = 0; step < 2 * n; step++) {
                uint32_t who = qc_bench_turn(round, step, n);
                assert_true(who < n);
                seen[step / n][who]++;
                place[who] += step;
            }
            for (uint32_t i = 0; i < n; i++) {
                assert_int_equal(seen[0][i], 1);
                assert_int_equal(seen[1][i], 1);
                assert_int_equal(place[i], 2 * n - 1);
            }
        }
}

TEST(rounds)
{
    assert_int_equal(qc_bench_rounds(30, 0.01, 10), 30);
    assert_int_equal(qc_bench_rounds(30, 1, 20), 20);
    assert_int_equal(qc_bench_rounds(30, 100, 10), 2);
    assert_int_equal(qc_bench_rounds(30, 1, -5), 2);
    assert_int_equal(qc_bench_rounds(1, 100, 1), 1);
    assert_int_equal(qc_bench_rounds(30, 0, 10), 30);
    assert_int_equal(qc_bench_rounds(30, 0, 0), 30);
}

/* A round at the roof, as docs/bench.md calculates it. */
static double round_seconds(const qc_bench_request *q, const qc_bench_roof *roof, uint32_t shape,
                            uint64_t m)
{
    const qc_bench_shape *s = &q->shapes[shape];
    uint64_t weights[3] = {2 * s->n * s->k};
    double us = 0;
    for (uint32_t i = 0; i < q->scheme_count; i++)
        weights[1 + i] = qc_bench_weight_bytes(q->schemes[i], s->n, s->k);
    for (uint32_t i = 0; i <= q->scheme_count; i++) {
        double graph = 20 * qc_bench_floor_us(roof, qc_bench_bytes(weights[i], m, s->n, s->k),
                                              qc_bench_flops(m, s->n, s->k));
        us += 2 * (graph > 2000 ? graph : 2000);
    }
    return us / 1e6;
}

/* The shapes that the first minutes on a GPU are for: every point gets as many rounds as the
 * others, whatever it costs, and with very little time its two. A share in equal parts gave the
 * first points 30 rounds and left the last ones out. */
TEST(shares)
{
    static const qc_bench_shape shapes[] = {{"given", "a", 28672, 8192, 0, 0, {0}},
                                            {"given", "b", 8192, 28672, 0, 0, {0}},
                                            {"given", "c", 8192, 8192, 0, 0, {0}},
                                            {"given", "d", 1024, 8192, 0, 0, {0}}};
    static const uint64_t m[] = {1, 8, 16, 32, 64, 256, 1024, 4096};
    static const qc_bench_scheme schemes[] = {QC_BENCH_NF4, QC_BENCH_INT8};
    const qc_bench_request q = {.shapes = shapes,
                                .shape_count = 4,
                                .m = m,
                                .m_count = 8,
                                .schemes = schemes,
                                .scheme_count = 2};
    const qc_bench_result r = {.roof = {.copy_gbps.median = 2800, .gemm_tflops.median = 600}};
    double all = 0;
    for (uint32_t s = 0; s < 4; s++)
        for (uint32_t i = 0; i < 8; i++)
            all += round_seconds(&q, &r.roof, s, m[i]);
    assert_true(all > 1.3 && all < 1.7); /* docs/bench.md: about 1.5 s for a round of everything */
    const double budgets[] = {1, 5 * all, 15 * all, 1000 * all};
    for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
        double left = budgets[b];
        uint32_t want = budgets[b] < 2 * all ? 2 : (uint32_t)(budgets[b] / all + 1e-6);
        for (uint32_t s = 0; s < 4; s++)
            for (uint32_t i = 0; i < 8; i++) {
                double round = round_seconds(&q, &r.roof, s, m[i]);
                uint32_t rounds =
                    qc_bench_rounds(30, round, qc_bench_share(&q, &r, s, i, left) + 1e-9);
                assert_int_equal(rounds, want < 30 ? want : 30);
                left -= rounds * round;
            }
        assert_true(left >= -2 * all);
    }
    /* The last one has all that is left. */
    assert_float_equal(qc_bench_share(&q, &r, 3, 7, 7.5), 7.5, 1e-9);
    assert_true(qc_bench_share(&q, &r, 0, 0, -1) == 0);
}

TEST(spreads)
{
    double eleven[] = {10, 2, 8, 4, 6, 0, 7, 3, 9, 5, 1};
    qc_bench_spread s = qc_bench_spread_of(eleven, 11);
    assert_float_equal(s.median, 5, 1e-12);
    assert_float_equal(s.p10, 1, 1e-12);
    assert_float_equal(s.p90, 9, 1e-12);
    assert_int_equal(s.samples, 11);
    double two[] = {3, 1};
    s = qc_bench_spread_of(two, 2);
    assert_float_equal(s.median, 2, 1e-12);
    assert_float_equal(s.p10, 1.2, 1e-12);
    assert_float_equal(s.p90, 2.8, 1e-12);
    double one[] = {7};
    s = qc_bench_spread_of(one, 1);
    assert_float_equal(s.p10, 7, 0);
    assert_float_equal(s.p90, 7, 0);
    assert_int_equal(qc_bench_spread_of(one, 0).samples, 0);
    s = qc_bench_spread_rate((qc_bench_spread){2, 1, 4, 9}, 8);
    assert_float_equal(s.median, 4, 1e-12);
    assert_float_equal(s.p10, 2, 1e-12); /* the slowest tenth */
    assert_float_equal(s.p90, 8, 1e-12);
    assert_int_equal(s.samples, 9);
    assert_int_equal(qc_bench_spread_rate((qc_bench_spread){2, 0, 4, 9}, 8).samples, 0);
    assert_int_equal(qc_bench_spread_rate((qc_bench_spread){0}, 8).samples, 0);
}
