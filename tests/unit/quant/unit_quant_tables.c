/* The constant tables: values, order, where they come from, and the two forms of the search. */
#include "tests/fixtures/quant_testing.h"

#include "formats/digest.h"
#include "quant/quant_internal.h"

/* Bytes whose SHA-256 is that of bitsandbytes' map, e732639a 65f497b4 ad684bb1 66a44677 08255edd
 * 5207757d e8b8f0c7 e1fda89c. */
TEST(test_dynamic_map_digest)
{
    char hex[QC_DIGEST_HEX_BYTES];
    qc_digest d = qc_digest_bytes(qc_dynamic_map, sizeof qc_dynamic_map);
    qc_digest_hex(&d, hex);
    assert_string_equal(hex, "e87f3d8e52e6fc558c54cbcb05904087");
}

static int compare_floats(const void *a, const void *b)
{
    float x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* create_dynamic_map as PyTorch computes it where its linspace was compiled with FMA. */
TEST(test_dynamic_map_recipe)
{
    static const float powers[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1e0f};
    float map[256];
    unsigned count = 0;
    for (unsigned e = 0; e < 7; e++) {
        unsigned n = (1u << e) + 1, half = n / 2;
        float step = (1.0f - 0.1f) / (float)(n - 1), b[65];
        for (unsigned k = 0; k < n; k++)
            b[k] = k < half ? fmaf(step, (float)k, 0.1f) : fmaf(-step, (float)(n - 1 - k), 1.0f);
        for (unsigned k = 0; k + 1 < n; k++) {
            float mean = (b[k] + b[k + 1]) / 2.0f;
            map[count++] = powers[e] * mean;
            map[count++] = -(powers[e] * mean);
        }
    }
    map[count++] = 0.0f;
    map[count++] = 1.0f;
    assert_int_equal(count, 256);
    qsort(map, 256, sizeof *map, compare_floats);
    for (unsigned i = 0; i < 256; i++)
        QT_CHECK(qc_f32_bits(map[i]) == qc_f32_bits(qc_dynamic_map[i]), "entry %u", i);
    assert_int_equal(qc_f32_bits(qc_dynamic_map[QC_DYNAMIC_ZERO]), 0);
    assert_true(qc_dynamic_map[255] == 1.0f && qc_dynamic_map[0] > -1.0f);
}

TEST(test_nf4_codes)
{
    static const uint32_t bits[16] = {0xbf800000, 0xbf3239b1, 0xbf066b30, 0xbeca32a0,
                                      0xbe91a24d, 0xbe3d353f, 0xbdba7871, 0x00000000,
                                      0x3da2faff, 0x3e24cae3, 0x3e7c04dd, 0x3ead033a,
                                      0x3ee1a4b8, 0x3f1007ab, 0x3f3913b3, 0x3f800000};
    static const float decimal[16] = {
        -1.0f,
        -0.6961928009986877f,
        -0.5250730514526367f,
        -0.39491748809814453f,
        -0.28444138169288635f,
        -0.18477343022823334f,
        -0.09105003625154495f,
        0.0f,
        0.07958029955625534f,
        0.16093020141124725f,
        0.24611230194568634f,
        0.33791524171829224f,
        0.44070982933044434f,
        0.5626170039176941f,
        0.7229568362236023f,
        1.0f,
    };
    for (unsigned i = 0; i < 16; i++) {
        assert_int_equal(qc_f32_bits(qc_nf4_code[i]), bits[i]);
        assert_int_equal(qc_f32_bits(decimal[i]), bits[i]);
    }
    assert_true(qc_nf4_code[QC_NF4_ZERO] == 0.0f);
}

TEST(test_nf4_thresholds)
{
    static const uint32_t bits[15] = {0xbf591cd9, 0xbf1c5270, 0xbeeb8480, 0xbeadea76, 0xbe703cec,
                                      0xbe0d38bc, 0xbd3a7871, 0x3d22faff, 0x3df64863, 0x3e5067e0,
                                      0x3e9582d4, 0x3ec753f9, 0x3f006d03, 0x3f248daf, 0x3f5c89d9};
    for (unsigned i = 0; i < 15; i++) {
        float t = qc_nf4_threshold[i];
        assert_int_equal(qc_f32_bits(t), bits[i]);
        /* the kernel's own tree turns exactly here, and a tie stays below */
        assert_int_equal(qt_nf4_tree(t), i);
        assert_int_equal(qt_nf4_tree(qt_step(t, 1)), i + 1);
        /* the four that are not the midpoint in float are one ulp off */
        float midpoint = (qc_nf4_code[i] + qc_nf4_code[i + 1]) * 0.5f;
        int differs = i == 0 || i == 8 || i == 12 || i == 14;
        assert_int_equal(t != midpoint, differs);
        assert_true(t == midpoint || t == qt_step(midpoint, 1) || t == qt_step(midpoint, -1));
    }
}

static unsigned thresholds_below(float x)
{
    unsigned lower = 0, upper = 255; /* thresholds [0, lower) are below x, [upper, 255) are not */
    while (lower < upper) {
        unsigned middle = (lower + upper) / 2;
        if (x > qc_dynamic_threshold[middle])
            lower = middle + 1;
        else
            upper = middle;
    }
    return lower;
}

static void check_search(float x)
{
    unsigned pivot = qc_dynamic_search(x), count = thresholds_below(x);
    QT_CHECK(pivot == count, "x = %a: pivot search %u, thresholds %u", (double)x, pivot, count);
}

TEST(test_search_forms_agree)
{
    qt_rng rng = qt_rng_start("dynamic search");
    unsigned up = 0;
    for (unsigned j = 0; j < 255; j++) {
        float a = qc_dynamic_map[j], b = qc_dynamic_map[j + 1], midpoint = (a + b) * 0.5f;
        assert_true(a < midpoint && midpoint < b);
        for (int ulps = -3; ulps <= 3; ulps++) {
            check_search(qt_step(qc_dynamic_threshold[j], ulps));
            check_search(qt_step(midpoint, ulps));
            check_search(qt_step(a, ulps));
        }
        assert_int_equal(qc_dynamic_search(qt_step(midpoint, -1)), j);
        assert_int_equal(qc_dynamic_search(qt_step(midpoint, 1)), j + 1);
        up += qc_dynamic_search(midpoint) == j + 1;
        assert_int_equal(qc_dynamic_search(a), j);
    }
    assert_int_equal(up, 127); /* as counted with the CUDA kernel's code */
    check_search(-0.0f);
    check_search(FLT_MAX);
    check_search(-FLT_MAX);
    check_search(0x1p-149f);
    check_search(-0x1p-149f);
    assert_int_equal(qc_dynamic_search(-1.0f), 0);
    assert_int_equal(qc_dynamic_search(1.0f), 255);
    assert_int_equal(qc_dynamic_search(0.0f), QC_DYNAMIC_ZERO);
    for (unsigned i = 0; i < 5000000; i++) {
        check_search((float)(2.0 * qt_uniform(&rng) - 1.0));
        check_search(qt_any_float(&rng));
    }
}

TEST(test_block_sizes_and_dispatch)
{
    for (uint64_t b = 0; b < 10000; b++) {
        int want = b == 32 || b == 64 || b == 128 || b == 256 || b == 512 || b == 1024 ||
                   b == 2048 || b == 4096;
        assert_int_equal(qc_block_size_valid(b), want);
    }
    assert_int_equal(qc_block_size_valid((UINT64_C(1) << 32) + 64), 0);
    assert_int_equal(qc_block_size_valid(UINT64_MAX), 0);
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        const qc_quant_ops *ops = qc_quant_ops_for((qc_isa)isa);
        assert_non_null(ops);
        assert_true((int)ops->isa <= isa);
    }
    assert_ptr_equal(qc_quant_ops_for(QC_ISA_SCALAR), &qc_quant_ops_scalar);
}
