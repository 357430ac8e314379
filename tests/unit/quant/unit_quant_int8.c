/* int8 by rows and by blocks against a plain reading of the definition. */
#include "tests/fixtures/quant_testing.h"

#define OPS qc_quant_ops_for(QC_ISA_SCALAR)

/* Codes, scales, largest error and sums of a matrix, element by element. */
static void check_rows(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols)
{
    int8_t *codes = qt_alloc(rows * cols, 1);
    float *scb = qt_alloc(rows, sizeof *scb);
    qc_piece_sums sums;
    double ee = 0.0, xx = 0.0, max_err = 0.0;
    uint64_t max_index = 0;
    OPS->int8_rows_quantize(src, dtype, rows, cols, codes, scb, &sums);
    assert_int_equal(sums.bad, QC_BAD_NONE);
    for (uint64_t r = 0; r < rows; r++) {
        float absmax = 0.0f;
        for (uint64_t i = r * cols; i < (r + 1) * cols; i++) {
            float x = (float)qt_get(src, dtype, i);
            absmax = fmaxf(absmax, fabsf(qc_f32_from_f16(qc_f16_from_f32(x))));
        }
        QT_CHECK(scb[r] == absmax, "row %" PRIu64 ": scb %a, expected %a", r, (double)scb[r],
                 (double)absmax);
        for (uint64_t i = r * cols; i < (r + 1) * cols; i++) {
            float x = (float)qt_get(src, dtype, i);
            float h = qc_f32_from_f16(qc_f16_from_f32(x));
            float inverse = absmax > 0.0f ? 1.0f / absmax : 0.0f;
            float scale = inverse * 127.0f, scaled = h * scale;
            long want = lrint((double)scaled); /* half to even */
            QT_CHECK(codes[i] == want && labs(want) <= 127, "%s element %" PRIu64 " = %a: %d, %ld",
                     qc_dtype_name(dtype), i, (double)x, codes[i], want);
            float product = (float)codes[i] * scb[r], restored = product * 7.874015718698502e-3f;
            float e = x - restored;
            ee += (double)e * (double)e;
            xx += (double)x * (double)x;
            if ((double)fabsf(e) > max_err) {
                max_err = (double)fabsf(e);
                max_index = i;
            }
        }
    }
    QT_CHECK(sums.max_err == max_err && sums.max_index == max_index,
             "largest error %a at %" PRIu64 ", expected %a at %" PRIu64, sums.max_err,
             sums.max_index, max_err, max_index);
    QT_CHECK(fabs(sums.sum_ee - ee) <= 1e-5 * ee + 1e-38 * (double)(rows * cols), "sum_ee %g, %g",
             sums.sum_ee, ee);
    QT_CHECK(fabs(sums.sum_xx - xx) <= 1e-5 * xx + 1e-38 * (double)(rows * cols), "sum_xx %g, %g",
             sums.sum_xx, xx);
    free(codes);
    free(scb);
}

TEST(test_rows_random)
{
    static const uint64_t widths[] = {1, 2, 3, 15, 16, 17, 64, 1000, 1023, 1024, 1025, 2049, 5000};
    qt_rng rng = qt_rng_start("rows");
    double *memory = qt_alloc(4 * 5000 + 2, sizeof *memory);
    for (unsigned round = 0; round < 13 * 4 * 6; round++) {
        uint64_t cols = widths[round % 13], rows = 1 + qt_below(&rng, 4);
        qc_dtype dtype = qt_float_types[round / 13 % 4];
        unsigned char *src = (unsigned char *)memory + qt_below(&rng, 8);
        double scale = pow(10.0, 8.0 * qt_uniform(&rng) - 4.0 - (round % 7 == 0 ? 6.0 : 0.0));
        for (uint64_t i = 0; i < rows * cols; i++)
            qt_put(src, dtype, i, fmod((double)qt_randn(&rng) * scale, 65000.0));
        check_rows(src, dtype, rows, cols);
    }
    free(memory);
}

/* Every 16-bit pattern that float16 can hold, beside assorted largest elements. */
TEST(test_rows_every_half)
{
    uint16_t *src = qt_alloc(66 * 1024, sizeof *src);
    static const double companions[] = {0.0, 1.0, 65280.0, 0x1p-14, 0x1p-24};
    for (unsigned d = 2; d < 4; d++) {
        for (unsigned c = 0; c < 5; c++) {
            uint64_t n = 0;
            for (uint32_t u = 0; u < 65536; u++) {
                uint64_t bits = u;
                double x = qt_get(&bits, qt_float_types[d], 0);
                if (!(fabs(x) < 65520.0))
                    continue;
                if (n % 100 == 0)
                    qt_put(src, qt_float_types[d], n++, companions[c]);
                src[n++] = (uint16_t)u;
            }
            check_rows(src, qt_float_types[d], n / 100, 100);
            check_rows(src, qt_float_types[d], 3, n / 3);
        }
    }
    free(src);
}

/* No float16 absmax brings a code beyond 127: three roundings above the quotient are too few. */
TEST(test_rows_never_exceed_127)
{
    for (uint32_t u = 1; u < QC_F16_INF; u++) {
        uint16_t src[2] = {(uint16_t)u, (uint16_t)(u | 0x8000u)};
        int8_t codes[2];
        float scb;
        qc_piece_sums sums;
        OPS->int8_rows_quantize(src, QC_DTYPE_F16, 1, 2, codes, &scb, &sums);
        QT_CHECK(codes[0] == 127 && codes[1] == -127, "absmax %04x: %d", (unsigned)u, codes[0]);
    }
}

TEST(test_rows_zero_and_empty)
{
    float src[6] = {0.0f, -0.0f, 0.0f, 1.0f, -0x1p-26f, 0.0f};
    int8_t codes[6] = {9, 9, 9, 9, 9, 9};
    float scb[3] = {9.0f, 9.0f, 9.0f};
    qc_piece_sums sums;
    OPS->int8_rows_quantize(src, QC_DTYPE_F32, 3, 2, codes, scb, &sums);
    assert_true(scb[0] == 0.0f && scb[1] == 1.0f && scb[2] == 0.0f);
    assert_true(codes[0] == 0 && codes[1] == 0 && codes[3] == 127 && codes[4] == 0);
    assert_true(sums.max_err == 0x1p-26 && sums.max_index == 4); /* flushed by float16 */
    OPS->int8_rows_quantize(NULL, QC_DTYPE_F32, 0, 100, NULL, NULL, &sums);
    assert_true(sums.sum_xx == 0.0 && sums.bad == QC_BAD_NONE);
    OPS->int8_rows_quantize(NULL, QC_DTYPE_F32, 2, 0, NULL, scb, &sums);
    assert_true(scb[0] == 0.0f && scb[1] == 0.0f);
}

/* The lowest of equal errors is named, across runs and rows. */
TEST(test_rows_tie)
{
    float *src = qt_alloc(3 * 3000, sizeof *src);
    for (uint64_t i = 0; i < 3 * 3000; i++)
        src[i] = i % 3000 == 0 ? 127.0f : 5.0f;
    src[1500] = src[2999] = src[4500] = 5.25f;
    int8_t *codes = qt_alloc(9000, 1);
    float scb[3];
    qc_piece_sums sums;
    OPS->int8_rows_quantize(src, QC_DTYPE_F32, 3, 3000, codes, scb, &sums);
    assert_int_equal(sums.max_index, 1500);
    free(src);
    free(codes);
}

TEST(test_rows_offenders)
{
    static const struct {
        double x;
        qc_bad_kind bad;
    } cases[] = {{(double)NAN, QC_BAD_NONFINITE},
                 {(double)INFINITY, QC_BAD_NONFINITE},
                 {-(double)INFINITY, QC_BAD_NONFINITE},
                 {65520.0, QC_BAD_RANGE},
                 {-70000.0, QC_BAD_RANGE},
                 {65519.996, QC_BAD_NONE},
                 {1e300, QC_BAD_RANGE}};
    for (unsigned c = 0; c < sizeof cases / sizeof *cases; c++) {
        for (unsigned d = 0; d < 4; d++) {
            for (uint64_t bad = 0; bad<2100; bad += bad> 40 && bad < 1000 ? 61 : 1) {
                static double src[2100];
                static int8_t codes[2100];
                float scb[2];
                qc_piece_sums sums;
                qc_dtype dtype = qt_float_types[d];
                for (uint64_t i = 0; i < 2100; i++)
                    qt_put(src, dtype, i, 1.0);
                qt_put(src, dtype, bad, cases[c].x);
                /* after the storage type had its rounding */
                double x = qt_get(src, dtype, bad);
                qc_bad_kind want = !isfinite(x)         ? QC_BAD_NONFINITE
                                   : fabs(x) >= 65520.0 ? QC_BAD_RANGE
                                                        : QC_BAD_NONE;
                assert_true(want == cases[c].bad || dtype != QC_DTYPE_F64);
                qt_put(src, dtype, 2099, bad < 2099 && want ? (double)NAN : x);
                OPS->int8_rows_quantize(src, dtype, 2, 1050, codes, scb, &sums);
                QT_CHECK(sums.bad == want && (!want || sums.bad_index == bad),
                         "%s %g at %" PRIu64 ": %d at %" PRIu64, qc_dtype_name(dtype), cases[c].x,
                         bad, (int)sums.bad, sums.bad_index);
            }
        }
    }
}

static void check_blocks(const void *src, qc_dtype dtype, uint64_t n, uint32_t block)
{
    uint64_t blocks = n / block + (n % block != 0);
    int8_t *codes = qt_alloc(n, 1);
    float *absmax = qt_alloc(blocks, sizeof *absmax);
    qc_block_error *errors = qt_alloc(blocks, sizeof *errors);
    qc_piece_sums sums;
    double ee = 0.0, xx = 0.0;
    OPS->int8_blocks_quantize(src, dtype, n, block, codes, absmax, errors, &sums);
    assert_int_equal(sums.bad, QC_BAD_NONE);
    for (uint64_t k = 0; k < blocks; k++) {
        uint64_t first = k * block, end = first + block < n ? first + block : n;
        float want = 0.0f;
        for (uint64_t i = first; i < end; i++)
            want = fmaxf(want, fabsf((float)qt_get(src, dtype, i)));
        assert_true(absmax[k] == want);
        for (uint64_t i = first; i < end; i++) {
            float x = (float)qt_get(src, dtype, i), a = want;
            double c = (double)codes[i] / 127.0;
            if (a > 0.0f && isinf(1.0f / a * 127.0f)) {
                x *= 0x1p64f;
                a *= 0x1p64f;
            }
            float inverse = a > 0.0f ? 1.0f / a : 0.0f, scale = inverse * 127.0f;
            long code = lrint((double)(x * scale));
            QT_CHECK(codes[i] == code && labs(code) <= 127, "%s block %u element %" PRIu64 ": %d",
                     qc_dtype_name(dtype), block, i, codes[i]);
            if (a > 0.0f) {
                double e = (double)x / (double)a - c;
                QT_CHECK(fabs(e) <= (double)qc_f32_from_bf16(errors[k].peak) + 1e-6, "peak");
                ee += e * e * (double)want * (double)want;
                xx +=
                    ((double)x / (double)a) * ((double)x / (double)a) * (double)want * (double)want;
            }
        }
    }
    /* y is a float, off by up to 2^-22 of itself and in the same direction as the error at worst */
    double allowed = 1e-5 * ee + 0x1p-21 * sqrt(ee * xx) + 0x1p-44 * xx;
    QT_CHECK(fabs(sums.sum_ee - ee) <= allowed, "sum_ee %g, %g", sums.sum_ee, ee);
    QT_CHECK(fabs(sums.sum_xx - xx) <= 1e-5 * xx, "sum_xx %g, %g", sums.sum_xx, xx);
    free(codes);
    free(absmax);
    free(errors);
}

TEST(test_blocks_random)
{
    qt_rng rng = qt_rng_start("blocks");
    double *memory = qt_alloc(3 * 4096 + 20, sizeof *memory);
    for (unsigned round = 0; round < 400; round++) {
        uint32_t block = 32u << round % 8;
        qc_dtype dtype = qt_float_types[round / 8 % 4];
        uint64_t n = 1 + qt_below(&rng, 3 * block + 2);
        unsigned char *src = (unsigned char *)memory + qt_below(&rng, 8);
        double scale = dtype == QC_DTYPE_F16 ? 1.0 : pow(10.0, 75.0 * qt_uniform(&rng) - 40.0);
        for (uint64_t i = 0; i < n; i++)
            qt_put(src, dtype, i, (double)qt_randn(&rng) * scale);
        check_blocks(src, dtype, n, block);
    }
    free(memory);
}

/* Every absmax mantissa and exponent keeps +-127 at the ends, and 2^k scaling changes nothing. */
TEST(test_blocks_extremes)
{
    qt_rng rng = qt_rng_start("block extremes");
    for (unsigned i = 0; i < 2000000; i++) {
        float a = fabsf(qt_any_float(&rng)), src[2] = {a, -a}, absmax;
        int8_t codes[2];
        qc_piece_sums sums;
        OPS->int8_blocks_quantize(src, QC_DTYPE_F32, 2, 64, codes, &absmax, NULL, &sums);
        QT_CHECK(a == 0.0f || (codes[0] == 127 && codes[1] == -127), "absmax %a: %d", (double)a,
                 codes[0]);
    }
    for (int exponent = -139; exponent <= 120; exponent++) {
        float src[64], absmax;
        int8_t codes[64];
        uint64_t overflow;
        qc_piece_sums sums;
        for (int i = 0; i < 64; i++)
            src[i] = ldexpf((float)(4 * i - 126), exponent - (exponent < -130 ? 0 : 1));
        src[63] = ldexpf(127.0f, exponent - (exponent < -130 ? 0 : 1));
        OPS->int8_blocks_quantize(src, QC_DTYPE_F32, 64, 64, codes, &absmax, NULL, &sums);
        for (int i = 0; i < 63; i++)
            QT_CHECK(codes[i] == 4 * i - 126, "2^%d: %d", exponent, codes[i]);
        float restored[64];
        OPS->int8_blocks_dequantize(codes, &absmax, 64, 64, restored, QC_DTYPE_F32, &overflow);
        assert_true(overflow == UINT64_MAX);
        for (int i = 0; i < 64; i++)
            assert_true(fabs((double)restored[i] - (double)src[i]) <=
                        fabs((double)src[i]) * 0x1p-22 + 0x1p-149);
    }
}

TEST(test_dequantize)
{
    static const qc_dtype targets[3] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    qt_rng rng = qt_rng_start("dequantize");
    int8_t codes[1000];
    float scales[1000];
    double dst[1002];
    for (unsigned round = 0; round < 2000; round++) {
        qc_dtype to = targets[round % 3];
        uint64_t cols = 1 + qt_below(&rng, 100), rows = qt_below(&rng, 1000 / cols), overflow;
        uint64_t want = UINT64_MAX;
        int by_rows = round % 2;
        uint32_t block = by_rows ? (uint32_t)cols : 32;
        uint64_t n = by_rows ? rows * cols : 1 + qt_below(&rng, 1000);
        for (unsigned i = 0; i < 1000; i++) {
            codes[i] = (int8_t)((int)qt_below(&rng, 255) - 127);
            scales[i] = (float)qt_uniform(&rng) * (round % 5 ? 1.0f : 65700.0f);
        }
        unsigned char *out = (unsigned char *)dst + round % 4;
        if (by_rows)
            OPS->int8_rows_dequantize(codes, scales, rows, cols, out, to, &overflow);
        else
            OPS->int8_blocks_dequantize(codes, scales, n, 32, out, to, &overflow);
        for (uint64_t i = 0; i < n; i++) {
            float code = (float)codes[i], scale = scales[i / block];
            float x = by_rows ? code * scale : code * 7.874015718698502e-3f;
            x = (float)((double)x * (double)(by_rows ? 7.874015718698502e-3f : scale));
            double exact = (double)code * (double)scale / 127.0, expected[1];
            assert_true(fabs((double)x - exact) <= fabs(exact) * 0x1p-22 + 0x1p-149);
            qt_put(expected, to, 0, (double)x);
            assert_memory_equal(out + i * qt_size(to), expected, qt_size(to));
            if (isinf(qt_get(expected, to, 0)) && want == UINT64_MAX)
                want = i;
        }
        assert_true(overflow == want);
    }
}

TEST(test_blocks_offenders)
{
    for (uint64_t bad = 0; bad < 150; bad++) {
        float src[150], absmax[3];
        int8_t codes[150];
        qc_piece_sums sums;
        for (uint64_t i = 0; i < 150; i++)
            src[i] = i == bad ? NAN : i > bad ? -INFINITY : 0.5f;
        OPS->int8_blocks_quantize(src, QC_DTYPE_F32, 150, 64, codes, absmax, NULL, &sums);
        assert_int_equal(sums.bad, QC_BAD_NONFINITE);
        assert_int_equal(sums.bad_index, bad);
    }
}
