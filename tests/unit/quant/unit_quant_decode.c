/* Every code of the 8-bit floats and every pair of code and scale of MXFP4, against the formulas of
 * the OCP specifications in double arithmetic; tiles of every position. */
#include "quant/quant_decode.h"
#include "tests/fixtures/test.h"

#include <math.h>

static void same(float have, double want, const char *what, unsigned code)
{
    float f = (float)want;
    if (isnan(want) ? !isnan(have) : memcmp(&have, &f, sizeof f) != 0)
        fail_msg("%s, code 0x%02x: expected %a, found %a", what, code, want, (double)have);
}

/* (-1)^s * 2^(e - bias) * (1 + m / 2^M), or 2^(1 - bias) * m / 2^M for e = 0. */
static double formula(unsigned code, int man_bits, int bias)
{
    int e = (int)(code & 0x7F) >> man_bits, m = (int)code & ((1 << man_bits) - 1);
    double fraction = ldexp(m, -man_bits);
    double v = e == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, e - bias);
    return code & 0x80 ? -v : v;
}

TEST(tables)
{
    float t[256];
    qc_f8_table(QC_DTYPE_F8_E4M3, t);
    for (unsigned c = 0; c < 256; c++)
        same(t[c], (c & 0x7F) == 0x7F ? (double)NAN : formula(c, 3, 7), "E4M3", c);
    assert_true(t[0x7E] == 448.0f && t[0x01] == 0x1p-9f && t[0x08] == 0x1p-6f && t[0x38] == 1.0f);
    qc_f8_table(QC_DTYPE_F8_E5M2, t);
    for (unsigned c = 0; c < 256; c++) {
        double want = formula(c, 2, 15), infinity = (double)INFINITY;
        if ((c & 0x7F) >= 0x7C)
            want = (c & 3) ? (double)NAN : c & 0x80 ? -infinity : infinity;
        same(t[c], want, "E5M2", c);
    }
    assert_true(t[0x7B] == 57344.0f && t[0x01] == 0x1p-16f && t[0x3C] == 1.0f);
    qc_f8_table(QC_DTYPE_F8_E8M0, t);
    for (unsigned c = 0; c < 256; c++)
        same(t[c], c == 255 ? (double)NAN : ldexp(1, (int)c - 127), "E8M0", c);
    qc_f8_table(QC_DTYPE_F8_E4M3FNUZ, t);
    assert_true(isnan(t[0]));
}

/* E2M1: 1 sign bit, 2 of exponent with bias 1, 1 of mantissa. */
static double e2m1(unsigned code)
{
    unsigned e = code >> 1 & 3, m = code & 1;
    double v = e == 0 ? 0.5 * m : ldexp(1 + 0.5 * m, (int)e - 1);
    return code & 8 ? -v : v;
}

TEST(mxfp4_all_codes)
{
    for (unsigned scale = 0; scale < 256; scale++) {
        /* Two blocks; codes 0 to 15 in the low nibbles, 15 to 0 in the high ones. */
        uint8_t bytes[2 * QC_MXFP4_BYTES], scales[2] = {127, (uint8_t)scale};
        float out[2 * QC_MXFP4_BLOCK];
        uint64_t bad = 0, want_bad = UINT64_MAX;
        for (unsigned i = 0; i < 32; i++)
            bytes[i] = (uint8_t)(i % 16 | (15 - i % 16) << 4);
        qc_mxfp4_decode(bytes, scales, 2, out, &bad);
        for (unsigned i = 0; i < 64; i++) {
            unsigned low = i / 2 % 16, code = i % 2 ? 15 - low : low;
            double want = scale == 255 && i >= 32
                              ? (double)NAN
                              : e2m1(code) * ldexp(1, i < 32 ? 0 : (int)scale - 127);
            if (fabs(want) >= ldexp(1, 128))
                want = want > 0 ? (double)INFINITY : -(double)INFINITY;
            if (!isfinite(want) && want_bad == UINT64_MAX)
                want_bad = i;
            same(out[i], want, "MXFP4", scale << 4 | code);
            uint32_t bits;
            memcpy(&bits, &out[i], sizeof bits);
            if (isfinite(want))
                assert_int_equal(bits & 0xFFFF, 0); /* bfloat16 holds it */
        }
        assert_true(bad == want_bad);
        assert_int_equal(bad == UINT64_MAX, scale < 253);
    }
}

TEST(tiles_of_every_place)
{
    enum { ROWS = 7, COLS = 11 };
    uint8_t codes[ROWS * COLS];
    float table[256], out[ROWS * COLS], scales[ROWS * COLS];
    qc_f8_table(QC_DTYPE_F8_E4M3, table);
    for (unsigned i = 0; i < ROWS * COLS; i++) {
        codes[i] = (uint8_t)(i * 37 % 127 | (i % 3 ? 0x80u : 0));
        scales[i] = 0.3f + 0.11f * (float)i;
    }
    for (uint64_t tr = 1; tr <= ROWS + 1; tr++) {
        for (uint64_t tc = 1; tc <= COLS + 1; tc++) {
            qc_tile_scales t = {COLS, tr, tc, (COLS + tc - 1) / tc, scales};
            for (uint64_t first = 0; first < ROWS * COLS; first += 5) {
                uint64_t n = ROWS * COLS - first < 30 ? ROWS * COLS - first : 30, bad = 0;
                qc_f8_decode(codes + first, table, &t, first, n, out, &bad);
                assert_true(bad == UINT64_MAX);
                for (uint64_t i = 0; i < n; i++) {
                    uint64_t r = (first + i) / COLS, c = (first + i) % COLS;
                    float scale = scales[r / tr * t.tiles_across + c / tc];
                    assert_true(out[i] == table[codes[first + i]] * scale);
                }
            }
        }
    }
}

TEST(first_bad_is_the_lowest)
{
    uint8_t codes[100] = {0};
    float table[256], out[100], scale = 1.0f, huge = 3e38f;
    uint64_t bad = 0;
    qc_tile_scales t = {10, 10, 10, 1, &scale};
    qc_f8_table(QC_DTYPE_F8_E4M3, table);
    codes[77] = 0xFF;
    codes[31] = 0x7F;
    qc_f8_decode(codes, table, &t, 0, 100, out, &bad);
    assert_int_equal(bad, 31);
    qc_f8_decode(codes + 40, table, &t, 40, 60, out, &bad);
    assert_int_equal(bad, 37);
    memset(codes, 0x38, sizeof codes);
    codes[5] = 0x40; /* 2 * 3e38 */
    t.scales = &huge;
    qc_f8_decode(codes, table, &t, 0, 100, out, &bad);
    assert_int_equal(bad, 5);
    qc_f8_decode(codes, table, &t, 0, 0, out, &bad);
    assert_true(bad == UINT64_MAX);
    qc_mxfp4_decode(codes, codes, 0, out, &bad);
    assert_true(bad == UINT64_MAX);
}
