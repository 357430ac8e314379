/* How times of GPU kernels are taken: rotation, launches, order of turns, rounds, percentiles,
 * floors. */
#include "convert/validate/timing.h"
#include "tests/fixtures/test.h"

#define MIB ((uint64_t)1 << 20)

TEST(copies)
{
    const uint64_t l2 = 50 * MIB;
    for (uint64_t each = MIB; each < 1000 * MIB; each = each * 3 / 2 + 1) {
        uint64_t n = qc_timing_copies(each, each, l2, UINT64_MAX);
        assert_true(n >= 2 && n * each > 4 * l2);
        assert_true(n == 2 || (n - 1) * each <= 4 * l2); /* and none too many */
    }
    assert_int_equal(qc_timing_copies(1000, 1000, l2, UINT64_MAX), 256); /* small ones: a limit */
    /* As many as there is room for, but one at least. */
    assert_int_equal(qc_timing_copies(35 * MIB, 35 * MIB, l2, 100 * MIB), 2);
    assert_int_equal(qc_timing_copies(470 * MIB, 470 * MIB, l2, 500 * MIB), 1);
    assert_int_equal(qc_timing_copies(470 * MIB, 470 * MIB, l2, 0), 1);
    assert_int_equal(qc_timing_copies(0, 0, l2, 0), 2);
    /* Codes that lie there twice and are read once. */
    assert_int_equal(qc_timing_copies(35 * MIB, 70 * MIB, l2, UINT64_MAX), 6);
    assert_int_equal(qc_timing_copies(35 * MIB, 70 * MIB, l2, 300 * MIB), 4);
    assert_int_equal(qc_timing_copies(MIB, MIB, UINT64_MAX, UINT64_MAX), 256);
}

TEST(launches)
{
    assert_int_equal(qc_timing_launches(6, 20, 7.2, 2000), 282); /* 278 and then whole turns */
    assert_int_equal(qc_timing_launches(2, 20, 5000, 2000), 20);
    assert_int_equal(qc_timing_launches(3, 20, 5000, 2000), 21);
    assert_int_equal(qc_timing_launches(90, 20, 5000, 2000), 90);
    assert_int_equal(qc_timing_launches(1, 20, 0.001, 2000), 2048);
    assert_int_equal(qc_timing_launches(1, 20, 0, 2000), 20); /* a clock that stands still */
}

TEST(turns)
{
    const uint32_t two[] = {0, 1, 1, 0, 1, 0, 0, 1};
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(qc_timing_turn(i / 4, i % 4, 2), two[i]);
    /* Everybody twice a round, once in each half: no drift of the clock favours one. */
    for (uint32_t n = 1; n <= 5; n++)
        for (uint32_t round = 0; round < 4; round++) {
            unsigned seen[2][5] = {{0}};
            uint32_t place[5] = {0};
            for (uint32_t step = 0; step < 2 * n; step++) {
                uint32_t who = qc_timing_turn(round, step, n);
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
    assert_int_equal(qc_timing_rounds(30, 0.01, 10), 30);
    assert_int_equal(qc_timing_rounds(30, 1, 20), 20);
    assert_int_equal(qc_timing_rounds(30, 100, 10), 2);
    assert_int_equal(qc_timing_rounds(30, 1, -5), 2);
    assert_int_equal(qc_timing_rounds(1, 100, 1), 1);
    assert_int_equal(qc_timing_rounds(30, 0, 10), 30);
    assert_int_equal(qc_timing_rounds(30, 0, 0), 30);
}

TEST(spreads)
{
    double eleven[] = {10, 2, 8, 4, 6, 0, 7, 3, 9, 5, 1};
    qc_spread s = qc_spread_of(eleven, 11);
    assert_float_equal(s.median, 5, 1e-12);
    assert_float_equal(s.p10, 1, 1e-12);
    assert_float_equal(s.p90, 9, 1e-12);
    assert_int_equal(s.samples, 11);
    double two[] = {3, 1};
    s = qc_spread_of(two, 2);
    assert_float_equal(s.median, 2, 1e-12);
    assert_float_equal(s.p10, 1.2, 1e-12);
    assert_float_equal(s.p90, 2.8, 1e-12);
    double one[] = {7};
    s = qc_spread_of(one, 1);
    assert_float_equal(s.p10, 7, 0);
    assert_float_equal(s.p90, 7, 0);
    assert_int_equal(qc_spread_of(one, 0).samples, 0);
    s = qc_spread_rate((qc_spread){2, 1, 4, 9}, 8);
    assert_float_equal(s.median, 4, 1e-12);
    assert_float_equal(s.p10, 2, 1e-12); /* the slowest tenth */
    assert_float_equal(s.p90, 8, 1e-12);
    assert_int_equal(s.samples, 9);
    assert_int_equal(qc_spread_rate((qc_spread){2, 0, 4, 9}, 8).samples, 0);
    assert_int_equal(qc_spread_rate((qc_spread){0}, 8).samples, 0);
}

TEST(floors)
{
    assert_int_equal(qc_product_bytes(1000, 2, 3, 5), 1000 + 2 * 2 * 5 + 2 * 2 * 3);
    assert_true(qc_product_flops(4096, 28672, 8192) == 2.0 * 4096 * 28672 * 8192);
    qc_gpu_roof roof = {.copy_gbps = {4000, 3900, 4100, 30}, .gemm_tflops = {700, 690, 710, 30}};
    /* 4 MB at 4000 GB/s: 1 us; 7e9 operations at 700 TFLOP/s: 10 us. The later one counts. */
    assert_float_equal(qc_roof_floor_us(&roof, 4000000, 7e7), 1, 1e-9);
    assert_float_equal(qc_roof_floor_us(&roof, 4000000, 7e9), 10, 1e-9);
    /* What moves the most counts: a copy of ours, or reading. */
    roof.kernel_copy_gbps.median = 5000;
    assert_float_equal(qc_roof_copy_gbps(&roof), 5000, 0);
    assert_float_equal(qc_roof_floor_us(&roof, 4000000, 7e7), 0.8, 1e-9);
    roof.read_gbps.median = 8000;
    assert_float_equal(qc_roof_copy_gbps(&roof), 5000, 0);
    assert_float_equal(qc_roof_memory_gbps(&roof), 8000, 0);
    assert_float_equal(qc_roof_floor_us(&roof, 4000000, 7e7), 0.5, 1e-9);
    roof.kernel_copy_gbps = roof.read_gbps = (qc_spread){0};
    roof.gemm_tflops = (qc_spread){0};
    assert_float_equal(qc_roof_floor_us(&roof, 4000000, 7e9), 1, 1e-9);
    roof.copy_gbps = (qc_spread){0};
    assert_float_equal(qc_roof_floor_us(&roof, 4000000, 7e9), 0, 0);
}
