/* Double quantization: the offset, the groups, what comes back. */
#include "tests/fixtures/quant_testing.h"

#define OPS qc_quant_ops_for(QC_ISA_SCALAR)

static int bf16_holds(float x)
{
    return (qc_f32_bits(x) & 0xffffu) == 0;
}

TEST(test_offset)
{
    qt_rng rng = qt_rng_start("offset");
    float *a = qt_alloc(10000, sizeof *a);
    assert_true(qc_nested_offset(NULL, 0) == 0.0f);
    for (unsigned round = 0; round < 300; round++) {
        uint64_t n = 1 + qt_below(&rng, round % 10 ? 300 : 10000);
        double sum = 0.0, scale = pow(10.0, 60.0 * qt_uniform(&rng) - 30.0);
        for (uint64_t i = 0; i < n; i++) {
            a[i] = (float)(fabs((double)qt_randn(&rng)) * scale);
            sum += (double)a[i];
        }
        float offset = qc_nested_offset(a, n), mean = (float)(sum / (double)n);
        assert_true(bf16_holds(offset));
        assert_true(offset == qc_f32_from_bf16(qc_bf16_from_f32(mean)));
        assert_true(fabs((double)offset - sum / (double)n) <= sum / (double)n * 0x1.01p-8);
    }
    /* to nearest even, exactly half way */
    a[0] = 1.0f + 0x1p-8f;
    assert_true(qc_nested_offset(a, 1) == 1.0f);
    a[0] = 1.0f + 0x3p-8f;
    assert_true(qc_nested_offset(a, 1) == 1.0f + 0x4p-8f);
    /* the sum would overflow float, and the mean rounds beyond bfloat16: stays finite */
    for (unsigned i = 0; i < 1000; i++)
        a[i] = FLT_MAX;
    assert_true(qc_nested_offset(a, 1000) == 0x1.fep127f);
    for (unsigned i = 0; i < 1000; i++)
        a[i] = 0x1p127f;
    assert_true(qc_nested_offset(a, 1000) == 0x1p127f);
    free(a);
    /* addition in float would lose every one of the small ones */
    a = qt_alloc(1000000, sizeof *a);
    a[0] = 0x1p30f;
    for (unsigned i = 1; i < 1000000; i++)
        a[i] = 63.0f;
    assert_true(qc_nested_offset(a, 1000000) ==
                qc_f32_from_bf16(qc_bf16_from_f64((0x1p30 + 63.0 * 999999) / 1e6)));
    free(a);
}

static void check_quantize(const float *a, uint64_t n, float offset)
{
    uint64_t groups = n / 256 + (n % 256 != 0);
    uint8_t *codes = qt_alloc(n, 1);
    float *nested = qt_alloc(groups, sizeof *nested), *back = qt_alloc(n, sizeof *back);
    OPS->nested_quantize(a, n, offset, codes, nested);
    OPS->nested_dequantize(codes, nested, qc_dynamic_map, n, 256, offset, back);
    for (uint64_t g = 0; g < groups; g++) {
        uint64_t first = g * 256, end = first + 256 < n ? first + 256 : n;
        float largest = 0.0f;
        for (uint64_t i = first; i < end; i++)
            largest = fmaxf(largest, fabsf(a[i] - offset));
        assert_true(nested[g] == largest);
        for (uint64_t i = first; i < end; i++) {
            float d = a[i] - offset, scale = largest;
            if (largest > 0.0f && isinf(1.0f / largest)) {
                d *= 0x1p64f;
                scale *= 0x1p64f;
            }
            /* nearest, found by looking at all 256. A tie with the midpoint, which is rounded to
             * float, may go either way here; which way is pinned in unit_quant_tables.c */
            double y = largest > 0.0f ? (double)(d * (1.0f / scale)) : 0.0;
            double least = 10.0;
            for (unsigned j = 0; j < 256; j++)
                least = fmin(least, fabs(y - (double)qc_dynamic_map[j]));
            double found = fabs(y - (double)qc_dynamic_map[codes[i]]);
            QT_CHECK(found <= least + fabs(y) * 0x1p-22, "y = %a: code %d is %a away, nearest %a",
                     y, codes[i], found, least);
            float product = qc_dynamic_map[codes[i]] * nested[g];
            float want = product + offset;
            assert_true(qc_f32_bits(back[i]) == qc_f32_bits(want));
        }
    }
    free(codes);
    free(nested);
    free(back);
}

TEST(test_quantize)
{
    qt_rng rng = qt_rng_start("quantize");
    float *a = qt_alloc(3000, sizeof *a);
    for (unsigned round = 0; round < 200; round++) {
        uint64_t n = 1 + qt_below(&rng, round % 5 ? 700 : 3000);
        double scale = pow(10.0, 74.0 * qt_uniform(&rng) - 42.0);
        for (uint64_t i = 0; i < n; i++)
            a[i] = (float)(fabs((double)qt_randn(&rng)) * scale);
        check_quantize(a, n, qc_nested_offset(a, n));
        check_quantize(a, n, 0.0f);
    }
    free(a);
}

/* Groups of equal scales: nothing is left after the offset, or one and the same remainder. */
TEST(test_equal_scales)
{
    float a[300], nested[2], back[300];
    uint8_t codes[300];
    for (unsigned i = 0; i < 300; i++)
        a[i] = 0.75f;
    float offset = qc_nested_offset(a, 300);
    assert_true(offset == 0.75f);
    OPS->nested_quantize(a, 300, offset, codes, nested);
    OPS->nested_dequantize(codes, nested, qc_dynamic_map, 300, 256, offset, back);
    assert_true(nested[0] == 0.0f && nested[1] == 0.0f);
    for (unsigned i = 0; i < 300; i++)
        assert_true(codes[i] == 127 && back[i] == 0.75f);
    for (unsigned i = 0; i < 300; i++)
        a[i] =
            0.1f; /* no bfloat16: the offset is off by a remainder, of which +1 or -0.99 remain */
    offset = qc_nested_offset(a, 300);
    OPS->nested_quantize(a, 300, offset, codes, nested);
    OPS->nested_dequantize(codes, nested, qc_dynamic_map, 300, 256, offset, back);
    for (unsigned i = 0; i < 300; i++) {
        assert_true(codes[i] == (a[0] > offset ? 255 : 0));
        assert_true(fabsf(back[i] - 0.1f) < 0.1f * 0x1p-15f);
    }
}

TEST(test_other_block_and_map)
{
    const uint8_t codes[7] = {0, 1, 2, 3, 255, 254, 0};
    const float nested[3] = {2.0f, 3.0f, -4.0f};
    float map[256], back[7];
    for (unsigned i = 0; i < 256; i++)
        map[i] = (float)i;
    OPS->nested_dequantize(codes, nested, map, 7, 3, 0.5f, back);
    const float want[7] = {0.5f, 2.5f, 4.5f, 9.5f, 765.5f, 762.5f, 0.5f};
    for (unsigned i = 0; i < 7; i++)
        assert_true(back[i] == want[i]);
    OPS->nested_dequantize(codes, nested, map, 0, 256, 0.5f, NULL);
    OPS->nested_quantize(NULL, 0, 0.5f, NULL, NULL);
    /* two roundings, not one: (1 + 2^-12)^2 - 1 loses its last bit */
    const float one[1] = {1.0f + 0x1p-12f};
    map[0] = 1.0f + 0x1p-12f;
    OPS->nested_dequantize(codes, one, map, 1, 256, -1.0f, back);
    assert_true(back[0] == 0x1p-11f);
}
