/* NF4 against a plain reading of the definition: one element at a time, the decision tree of the
 * CUDA kernel, sums in double. */
#include "tests/fixtures/quant_testing.h"

#define OPS qc_quant_ops_for(QC_ISA_SCALAR)

static const uint32_t block_sizes[8] = {32, 64, 128, 256, 512, 1024, 2048, 4096};

typedef struct {
    uint8_t *codes;
    float *absmax;
    qc_block_error *errors;
    qc_piece_sums sums;
    uint64_t n, blocks;
    uint32_t block;
} result;

static result quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block)
{
    result r = {.n = n, .block = block, .blocks = n / block + (n % block != 0)};
    r.codes = qt_alloc((n + 1) / 2, 1);
    r.absmax = qt_alloc(r.blocks, sizeof *r.absmax);
    r.errors = qt_alloc(r.blocks, sizeof *r.errors);
    OPS->nf4_quantize(src, dtype, n, block, r.codes, r.absmax, r.errors, &r.sums);
    return r;
}

static void result_free(result *r)
{
    free(r->codes);
    free(r->absmax);
    free(r->errors);
}

/* Codes and scales by the definition. */
static void check_result(const result *r, const void *src, qc_dtype dtype, const char *what)
{
    assert_int_equal(r->sums.bad, QC_BAD_NONE);
    for (uint64_t k = 0; k < r->blocks; k++) {
        uint64_t first = k * r->block, end = first + r->block < r->n ? first + r->block : r->n;
        float absmax = 0.0f;
        for (uint64_t i = first; i < end; i++)
            absmax = fmaxf(absmax, fabsf((float)qt_get(src, dtype, i)));
        QT_CHECK(qc_f32_bits(absmax) == qc_f32_bits(r->absmax[k]), "%s: absmax %a, expected %a",
                 what, (double)r->absmax[k], (double)absmax);
        for (uint64_t i = first; i < end; i++) {
            float x = (float)qt_get(src, dtype, i), a = absmax;
            if (absmax > 0.0f && isinf(1.0f / absmax)) {
                x *= 0x1p64f;
                a *= 0x1p64f;
            }
            unsigned want = absmax > 0.0f ? qt_nf4_tree(x * (1.0f / a)) : 7;
            unsigned found = qt_nibble(r->codes, i);
            QT_CHECK(found == want,
                     "%s %s block %u: element %" PRIu64 " = %a: code %u, expected %u", what,
                     qc_dtype_name(dtype), r->block, i, (double)x, found, want);
        }
    }
    if (r->n % 2)
        assert_int_equal(r->codes[r->n / 2] & 15, 7);
}

static void check_source(const void *src, qc_dtype dtype, uint64_t n, uint32_t block,
                         const char *what)
{
    result r = quantize(src, dtype, n, block);
    check_result(&r, src, dtype, what);
    result_free(&r);
}

TEST(test_random)
{
    qt_rng rng = qt_rng_start("random");
    double *memory = qt_alloc(3 * 4096 + 20, sizeof *memory);
    for (unsigned round = 0; round < 400; round++) {
        uint32_t block = block_sizes[round % 8];
        qc_dtype dtype = qt_float_types[round / 8 % 4];
        uint64_t n = 1 + qt_below(&rng, 3 * block + 2);
        unsigned char *src = (unsigned char *)memory + qt_below(&rng, 8);
        double scale = dtype == QC_DTYPE_F16 ? 1.0 : pow(10.0, 70.0 * qt_uniform(&rng) - 35.0);
        for (uint64_t i = 0; i < n; i++)
            qt_put(src, dtype, i, (double)qt_randn(&rng) * scale);
        check_source(src, dtype, n, block, "random");
    }
    free(memory);
}

/* Each finite 16-bit pattern, beside companions that set absmax far above, near, and at it. */
TEST(test_every_half)
{
    uint16_t src[2 * 65536];
    for (unsigned d = 2; d < 4; d++) {
        qc_dtype dtype = qt_float_types[d];
        static const double companions[] = {0.0, 1.0, 60000.0, 0x1p-20};
        for (unsigned c = 0; c < 4; c++) {
            uint64_t n = 0;
            for (uint32_t u = 0; u < 65536; u++) {
                uint64_t bits = u;
                if (!isfinite(qt_get(&bits, dtype, 0)))
                    continue;
                if (n % 32 == 0)
                    qt_put(src, dtype, n++, companions[c]);
                src[n++] = (uint16_t)u;
            }
            check_source(src, dtype, n, 32, "every half");
            check_source(src, dtype, n, 4096, "every half");
        }
    }
}

TEST(test_thresholds)
{
    float src[64] = {0};
    for (int exponent = -149 + 24; exponent <= 127; exponent++) {
        for (unsigned t = 0; t < 15; t++) {
            for (int ulps = -2; ulps <= 2; ulps++) {
                float y = qt_step(qc_nf4_threshold[t], ulps);
                src[0] = ldexpf(1.0f, exponent);
                src[1] = ldexpf(y, exponent);
                if (ldexp((double)y, exponent) != (double)src[1])
                    continue; /* not a float at this scale */
                result r = quantize(src, QC_DTYPE_F32, 64, 64);
                unsigned want = ulps > 0 ? t + 1 : t; /* a tie stays below */
                QT_CHECK(r.codes[0] == (15u << 4 | want), "2^%d, threshold %u %+d: byte %02x",
                         exponent, t, ulps, r.codes[0]);
                result_free(&r);
            }
        }
    }
}

TEST(test_packing)
{
    float src[33];
    for (unsigned i = 0; i < 33; i++)
        src[i] = qc_nf4_code[i % 16];
    result r = quantize(src, QC_DTYPE_F32, 32, 32);
    for (unsigned i = 0; i < 16; i++) /* even element in the high nibble */
        assert_int_equal(r.codes[i], (2 * i % 16) << 4 | (2 * i + 1) % 16);
    result_free(&r);
    r = quantize(src, QC_DTYPE_F32, 33, 32); /* the 33rd is -1 in a block of its own */
    assert_int_equal(r.codes[16], 0x07);
    assert_true(r.absmax[1] == 1.0f);
    result_free(&r);
}

TEST(test_zero_blocks)
{
    float src[64 * 3 + 1] = {0};
    src[64] = -0.0f;
    src[130] = 0x1p-149f;
    result r = quantize(src, QC_DTYPE_F32, 193, 64);
    for (unsigned i = 0; i < 97; i++)
        assert_int_equal(r.codes[i], i == 65 ? 0xf7 : 0x77);
    assert_true(r.absmax[0] == 0.0f && r.absmax[1] == 0.0f && r.absmax[3] == 0.0f);
    assert_int_equal(qc_f32_bits(r.absmax[1]), 0);
    assert_true(r.absmax[2] == 0x1p-149f);
    assert_int_equal(r.errors[0].rc | r.errors[0].cc | r.errors[0].peak, 0);
    assert_true(r.sums.sum_ee == 0.0 && r.sums.sum_xx == 0x1p-298);
    result_free(&r);
}

/* Codes of a block do not change when it is scaled by a power of two, down to where bits are lost
 * (and so across the limit below which 1 / absmax overflows) and up to where
 * 1 / absmax becomes subnormal. */
TEST(test_power_of_two)
{
    qt_rng rng = qt_rng_start("power of two");
    float src[128], scaled[128];
    for (unsigned round = 0; round < 200; round++) {
        for (unsigned i = 0; i < 128; i++) { /* 8 bits from 2^-6 up: exact down to 2^-136 */
            float x = qc_f32_from_bf16(qc_bf16_from_f32(qt_randn(&rng)));
            src[i] = fabsf(x) < 0x1p-6f ? 0.0f : x;
        }
        result want = quantize(src, QC_DTYPE_F32, 128, 64);
        for (int exponent = -136; exponent <= 122; exponent++) {
            for (unsigned i = 0; i < 128; i++) {
                scaled[i] = ldexpf(src[i], exponent);
                assert_true(ldexp((double)src[i], exponent) == (double)scaled[i]);
            }
            result found = quantize(scaled, QC_DTYPE_F32, 128, 64);
            QT_CHECK(memcmp(found.codes, want.codes, 64) == 0, "scaled by 2^%d: codes differ",
                     exponent);
            QT_CHECK(memcmp(found.errors, want.errors, 2 * sizeof *want.errors) == 0,
                     "scaled by 2^%d: errors differ", exponent);
            assert_true(found.sums.sum_ee == ldexp(want.sums.sum_ee, 2 * exponent));
            assert_true(found.sums.sum_xx == ldexp(want.sums.sum_xx, 2 * exponent));
            for (unsigned k = 0; k < 2; k++)
                assert_true(found.absmax[k] == ldexpf(want.absmax[k], exponent));
            result_free(&found);
        }
        result_free(&want);
    }
}

/* A NaN or an infinity at each position of every kind of block, with others behind it. */
TEST(test_offenders)
{
    static const double offenders[] = {(double)NAN, -(double)NAN, (double)INFINITY,
                                       -(double)INFINITY};
    for (unsigned d = 0; d < 4; d++) {
        for (unsigned o = 0; o < 4; o++) {
            for (uint64_t bad = 0; bad < 150; bad++) {
                double src[150];
                for (uint64_t i = 0; i < 150; i++)
                    qt_put(src, qt_float_types[d], i, i > bad && i % 3 == 0 ? offenders[1] : 0.5);
                qt_put(src, qt_float_types[d], bad, offenders[o]);
                result r = quantize(src, qt_float_types[d], 150, 64);
                QT_CHECK(r.sums.bad == QC_BAD_NONFINITE && r.sums.bad_index == bad,
                         "%s: %d at %" PRIu64 ", expected %" PRIu64,
                         qc_dtype_name(qt_float_types[d]), (int)r.sums.bad, r.sums.bad_index, bad);
                result_free(&r);
            }
        }
    }
    double f64[3] = {0x1.fffffefffffffp127, -0x1.ffffffp127, (double)NAN};
    result r = quantize(f64, QC_DTYPE_F64, 3, 64);
    assert_int_equal(r.sums.bad, QC_BAD_RANGE);
    assert_int_equal(r.sums.bad_index, 1);
    result_free(&r);
}

TEST(test_empty)
{
    qc_piece_sums sums;
    uint64_t overflow = 3;
    memset(&sums, 0x5a, sizeof sums);
    OPS->nf4_quantize(NULL, QC_DTYPE_F32, 0, 64, NULL, NULL, NULL, &sums);
    assert_true(sums.sum_xx == 0.0 && sums.sum_ee == 0.0 && sums.max_err == 0.0);
    assert_int_equal(sums.bad, QC_BAD_NONE);
    OPS->nf4_dequantize(NULL, NULL, qc_nf4_code, 0, 64, NULL, QC_DTYPE_F16, &overflow);
    assert_true(overflow == UINT64_MAX);
}

/* Sums and per-block errors against double, on every block size and a short tail. */
TEST(test_sums)
{
    qt_rng rng = qt_rng_start("sums");
    for (unsigned b = 0; b < 8; b++) {
        uint32_t block = block_sizes[b];
        uint64_t n = 5u * block + 13;
        float *src = qt_alloc(n, sizeof *src);
        for (uint64_t i = 0; i < n; i++)
            src[i] = qt_randn(&rng) * 0.02f;
        result r = quantize(src, QC_DTYPE_F32, n, block);
        double ee = 0.0, xx = 0.0;
        for (uint64_t k = 0; k < r.blocks; k++) {
            double a = (double)r.absmax[k], rc = 0.0, cc = 0.0, peak = 0.0;
            for (uint64_t i = k * block; i < n && i < (k + 1) * block; i++) {
                double c = (double)qc_nf4_code[qt_nibble(r.codes, i)];
                double e = (double)src[i] / a - c;
                ee += e * e * a * a;
                xx += (double)src[i] * (double)src[i];
                rc += e * c;
                cc += c * c;
                peak = fmax(peak, fabs(e));
            }
            assert_true(fabs((double)qc_f32_from_bf16(r.errors[k].rc) - rc) <=
                        fabs(rc) * 0x1p-8 + 1e-4);
            assert_true(fabs((double)qc_f32_from_bf16(r.errors[k].cc) - cc) <= cc * 0x1p-8);
            double stored = (double)qc_f32_from_bf16(r.errors[k].peak);
            assert_true(stored >= peak - 1e-6 && stored <= peak * (1 + 0x1p-7) + 1e-6);
        }
        assert_true(fabs(r.sums.sum_ee - ee) <= 1e-5 * ee);
        assert_true(fabs(r.sums.sum_xx - xx) <= 1e-5 * xx);
        assert_true(r.sums.max_err == 0.0 && r.sums.max_index == 0);
        /* without errors: the same codes, no sums */
        result plain = quantize(src, QC_DTYPE_F32, n, block);
        OPS->nf4_quantize(src, QC_DTYPE_F32, n, block, plain.codes, plain.absmax, NULL,
                          &plain.sums);
        assert_memory_equal(plain.codes, r.codes, (n + 1) / 2);
        assert_true(plain.sums.sum_ee == 0.0 && plain.sums.sum_xx == 0.0);
        result_free(&plain);
        result_free(&r);
        free(src);
    }
}

/* Two roundings, each the nearest: the product to float, that to the type asked for. */
TEST(test_dequantize)
{
    static const qc_dtype targets[3] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    qt_rng rng = qt_rng_start("dequantize");
    uint8_t codes[600];
    float absmax[40], map[16];
    double dst[1100];
    for (unsigned round = 0; round < 2000; round++) {
        uint32_t block = block_sizes[qt_below(&rng, 5)];
        uint64_t n = 1 + qt_below(&rng, 1000), overflow, want = UINT64_MAX;
        qc_dtype to = targets[round % 3];
        for (unsigned i = 0; i < 600; i++)
            codes[i] = (uint8_t)qt_next(&rng);
        for (unsigned i = 0; i < 40; i++)
            absmax[i] = round % 2 ? qt_any_float(&rng) : (float)qt_uniform(&rng) * 65600.0f;
        for (unsigned i = 0; i < 16; i++)
            map[i] = round % 4 == 3 ? (float)(qt_uniform(&rng) - 0.5) : qc_nf4_code[i];
        unsigned char *out = (unsigned char *)dst + round % 4;
        OPS->nf4_dequantize(codes, absmax, map, n, block, out, to, &overflow);
        for (uint64_t i = 0; i < n; i++) {
            double exact = (double)map[qt_nibble(codes, i)] * (double)absmax[i / block];
            double expected[1];
            qt_put(expected, to, 0, (double)(float)exact);
            assert_memory_equal(out + i * qt_size(to), expected, qt_size(to));
            if (isinf(qt_get(expected, to, 0)) && want == UINT64_MAX)
                want = i;
        }
        assert_true(overflow == want);
    }
    /* an infinite scale is not an overflow of this function's making */
    absmax[0] = INFINITY;
    codes[0] = 0xff;
    uint64_t overflow;
    OPS->nf4_dequantize(codes, absmax, qc_nf4_code, 2, 64, dst, QC_DTYPE_F16, &overflow);
    assert_true(overflow == UINT64_MAX);
}
