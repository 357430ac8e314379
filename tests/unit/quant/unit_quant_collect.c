/* The host's part of quantizing on a GPU: from lane sums, here made in plain C in the order of
 * quant_internal.h, to what the scalar functions leave. */
#include "tests/fixtures/quant_testing.h"

#include "quant/quant_collect.h"
#include "quant/quant_internal.h"

#include <string.h>

#define OPS qc_quant_ops_for(QC_ISA_SCALAR)

static void same_sums(const qc_piece_sums *got, const qc_piece_sums *want)
{
    QT_CHECK(qc_f64_bits(got->sum_xx) == qc_f64_bits(want->sum_xx) &&
                 qc_f64_bits(got->sum_ee) == qc_f64_bits(want->sum_ee) &&
                 qc_f64_bits(got->max_err) == qc_f64_bits(want->max_err) &&
                 got->max_index == want->max_index && got->bad == want->bad &&
                 got->bad_index == want->bad_index,
             "sums %a %a %a at %" PRIu64 ", not %a %a %a at %" PRIu64, got->sum_xx, got->sum_ee,
             got->max_err, got->max_index, want->sum_xx, want->sum_ee, want->max_err,
             want->max_index);
}

/* rr, rc, cc and peak of a block */
static void block_lanes(const float *x, uint32_t n, float absmax, const float *c, float out[4])
{
    float rr[QC_LANES] = {0}, rc[QC_LANES] = {0}, cc[QC_LANES] = {0}, peak = 0;
    float up = absmax < QC_TINY_ABSMAX ? QC_TINY_SCALE : 1.0f;
    float inv = absmax == 0.0f ? 0.0f : 1.0f / (absmax * up);
    for (uint32_t i = 0; i < n; i++) {
        unsigned l = i / 2 % QC_LANES;
        float r = x[i] * up * inv - c[i];
        rr[l] = fmaf(r, r, rr[l]);
        rc[l] = fmaf(r, c[i], rc[l]);
        cc[l] = fmaf(c[i], c[i], cc[l]);
        peak = fmaxf(peak, fabsf(r));
    }
    out[0] = qc_fold16(rr), out[1] = qc_fold16(rc), out[2] = qc_fold16(cc), out[3] = peak;
}

TEST(test_blocks)
{
    qt_rng rng = qt_rng_start(__func__);
    enum { N = 5 * 128 + 37, BLOCK = 128, BLOCKS = 6 };
    float x[N], absmax[BLOCKS], lanes[BLOCKS * 4], c[BLOCK];
    int8_t codes[N];
    qc_block_error want[BLOCKS], got[BLOCKS];
    qc_piece_sums want_sums, got_sums;
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int round = 0; round < 20; round++) {
            for (unsigned i = 0; i < N; i++) {
                float r = qt_randn(&rng);
                x[i] = i / 128 == 1 ? 0.0f : i / 128 == 2 ? r * 0x1p-130f : r;
            }
            if (nf4)
                OPS->nf4_quantize(x, QC_DTYPE_F32, N, BLOCK, (uint8_t *)codes, absmax, want,
                                  &want_sums);
            else
                OPS->int8_blocks_quantize(x, QC_DTYPE_F32, N, BLOCK, codes, absmax, want,
                                          &want_sums);
            for (unsigned b = 0; b < BLOCKS; b++) {
                uint32_t n = b == BLOCKS - 1 ? N % BLOCK : BLOCK;
                for (uint32_t i = 0; i < n; i++)
                    c[i] = nf4 ? qc_nf4_code[qt_nibble((uint8_t *)codes, b * BLOCK + i)]
                               : (float)codes[b * BLOCK + i] * QC_INT8_STEP;
                block_lanes(x + b * BLOCK, n, absmax[b], c, lanes + 4 * b);
            }
            qc_blocks_collect(absmax, lanes, BLOCKS, got, &got_sums);
            same_sums(&got_sums, &want_sums);
            assert_memory_equal(got, want, sizeof want);
        }
}

TEST(test_rows)
{
    qt_rng rng = qt_rng_start(__func__);
    enum { ROWS = 3, COLS = 2500, RUNS = 3 };
    static float x[ROWS * COLS], lanes[ROWS * RUNS * 4];
    static int8_t codes[ROWS * COLS];
    float scb[ROWS];
    qc_piece_sums want, got;
    for (int round = 0; round < 10; round++) {
        for (unsigned i = 0; i < ROWS * COLS; i++)
            x[i] = round % 2 ? qt_randn(&rng) : (float)qt_below(&rng, 3) + 0.25f; /* ties */
        OPS->int8_rows_quantize(x, QC_DTYPE_F32, ROWS, COLS, codes, scb, &want);
        for (unsigned run = 0; run < ROWS * RUNS; run++) {
            unsigned row = run / RUNS, first = run % RUNS * QC_ROW_FLUSH;
            float ee[QC_LANES] = {0}, xx[QC_LANES] = {0}, most = 0;
            uint32_t column = 0;
            for (unsigned i = 0; i < QC_ROW_FLUSH && first + i < COLS; i++) {
                unsigned at = row * COLS + first + i, l = i % QC_LANES;
                float e = x[at] - ((float)codes[at] * scb[row]) * QC_INT8_STEP;
                ee[l] = fmaf(e, e, ee[l]);
                xx[l] = fmaf(x[at], x[at], xx[l]);
                if (fabsf(e) > most)
                    most = fabsf(e), column = i;
            }
            float *out = lanes + 4 * run;
            out[0] = qc_fold16(ee), out[1] = qc_fold16(xx), out[2] = most;
            out[3] = qc_f32_of_bits(column);
        }
        qc_rows_collect(lanes, NULL, ROWS, COLS, &got);
        same_sums(&got, &want);
    }
}

/* Integers by rows: in units of the scale's square, also of a negative scale. */
TEST(test_rows_of_integers)
{
    static const float scales[] = {0.1f, -3.0f};
    static const float lanes[2][2][4] = {{{1.0f, 2.0f, 0.25f, 0.0f}, {0x1p-30f, 5.0f, 0.5f, 0.0f}},
                                         {{3.0f, 4.0f, 0.5f, 0.0f}, {7.0f, 6.0f, 0.0f, 0.0f}}};
    const double s2[] = {(double)0.1f * (double)0.1f, 9.0};
    qc_piece_sums got;
    qc_rows_collect(&lanes[0][0][0], scales, 2, 1500, &got);
    const qc_piece_sums want = {.bad = QC_BAD_NONE,
                                .sum_ee = ((s2[0] + 0x1p-30 * s2[0]) + 27.0) + 63.0,
                                .sum_xx = ((2.0 * s2[0] + 5.0 * s2[0]) + 36.0) + 54.0,
                                .max_err = 0.5,
                                .max_index = 1024};
    same_sums(&got, &want);
}

/* In the order of blocks; of equal errors the first counts. */
TEST(test_search)
{
    static const qc_search_sum found[] = {{0x1p-60, 3.0, 0.25f, 7},
                                          {1.0, 0x1p53, 0.5f, 9},
                                          {0x1p-53, 1.0, 0.5f, 1},
                                          {0x1p-53, 1.0, 0.125f, 2}};
    qc_piece_sums got;
    qc_search_collect(found, 4, 64, &got);
    const qc_piece_sums want = {.bad = QC_BAD_NONE,
                                .sum_ee = ((0x1p-60 + 1.0) + 0x1p-53) + 0x1p-53,
                                .sum_xx = ((3.0 + 0x1p53) + 1.0) + 1.0,
                                .max_err = 0.5,
                                .max_index = 64 + 9};
    same_sums(&got, &want);
}

TEST(test_nothing)
{
    qc_piece_sums zero = {.bad = QC_BAD_NONE}, got;
    memset(&got, 0xff, sizeof got);
    qc_blocks_collect(NULL, NULL, 0, NULL, &got);
    same_sums(&got, &zero);
    memset(&got, 0xff, sizeof got);
    qc_rows_collect(NULL, NULL, 0, 5, &got);
    same_sums(&got, &zero);
    memset(&got, 0xff, sizeof got);
    qc_search_collect(NULL, 0, 64, &got);
    same_sums(&got, &zero);
}
