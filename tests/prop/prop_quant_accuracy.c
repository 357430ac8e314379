/* What the quantizers achieve: bitsandbytes' own acceptance limits, and idempotence. */
#include "tests/fixtures/quant_testing.h"

static const qc_quant_ops *ops;

/* ---- bitsandbytes' limits -------------------------------------------------------------------- */

/* tests/test_functional.py of bitsandbytes: mean and deviation of the mean absolute and the mean
 * relative error of randn(1024, 1024); the limit is mean + 7 deviations. */
static const struct {
    uint32_t block;
    double abs_mean, abs_sd, rel_mean, rel_sd;
} nf4_limits[8] = {
    {32, .067746, .000069, .189726, .000304},   {64, .072798, .000074, .203339, .000340},
    {128, .076831, .000091, .215237, .000391},  {256, .080337, .000102, .226105, .000398},
    {512, .083547, .000143, .236079, .000544},  {1024, .086610, .000187, .245370, .000600},
    {2048, .089592, .000251, .254163, .000747}, {4096, .092547, .000360, .262473, .000999},
};

#define SIDE  1024u
#define ELEMS (SIDE * SIDE)

static void mean_errors(const float *x, const float *restored, double *mean_abs, double *mean_rel)
{
    double sum_abs = 0.0, sum_rel = 0.0;
    for (uint64_t i = 0; i < ELEMS; i++) {
        double e = fabs((double)x[i] - (double)restored[i]);
        sum_abs += e;
        sum_rel += e / (fabs((double)x[i]) + 1e-8);
    }
    *mean_abs = sum_abs / ELEMS;
    *mean_rel = sum_rel / ELEMS;
}

TEST(test_nf4_limits)
{
    qt_rng rng = qt_rng_start("nf4 limits");
    float *x = qt_alloc(ELEMS, sizeof *x), *restored = qt_alloc(ELEMS, sizeof *restored);
    float *absmax = qt_alloc(ELEMS / 32, sizeof *absmax), *final = qt_alloc(ELEMS / 32, sizeof *x);
    float *nested = qt_alloc(ELEMS / 32 / 256, sizeof *nested);
    uint8_t *codes = qt_alloc(ELEMS / 2, 1), *scales = qt_alloc(ELEMS / 32, 1);
    uint64_t overflow;
    qc_piece_sums sums;
    for (uint64_t i = 0; i < ELEMS; i++)
        x[i] = qt_randn(&rng);
    for (unsigned l = 0; l < 8; l++) {
        uint32_t block = nf4_limits[l].block;
        uint64_t blocks = ELEMS / block;
        double mean_abs, mean_rel, dq_abs, dq_rel, scale_error = 0.0;
        ops->nf4_quantize(x, QC_DTYPE_F32, ELEMS, block, codes, absmax, NULL, &sums);
        ops->nf4_dequantize(codes, absmax, qc_nf4_code, ELEMS, block, restored, QC_DTYPE_F32,
                            &overflow);
        mean_errors(x, restored, &mean_abs, &mean_rel);
        float offset = qc_nested_offset(absmax, blocks);
        ops->nested_quantize(absmax, blocks, offset, scales, nested);
        ops->nested_dequantize(scales, nested, qc_dynamic_map, blocks, 256, offset, final);
        for (uint64_t k = 0; k < blocks; k++)
            scale_error += fabs((double) final[k] - (double)absmax[k]) / (double)absmax[k];
        scale_error /= (double)blocks;
        ops->nf4_dequantize(codes, final, qc_nf4_code, ELEMS, block, restored, QC_DTYPE_F32,
                            &overflow);
        mean_errors(x, restored, &dq_abs, &dq_rel);
        print_message("nf4 block %4u: abs %.6f rel %.6f; double-quantized abs %.6f rel %.6f, "
                      "scales off by %.4f %%\n",
                      block, mean_abs, mean_rel, dq_abs, dq_rel, scale_error * 100);
        assert_true(mean_abs < nf4_limits[l].abs_mean + 7 * nf4_limits[l].abs_sd);
        assert_true(mean_rel < nf4_limits[l].rel_mean + 7 * nf4_limits[l].rel_sd);
        /* no better than the method can be, either: the test itself would be wrong */
        assert_true(mean_abs > nf4_limits[l].abs_mean - 7 * nf4_limits[l].abs_sd);
        assert_true(dq_abs < 0.11 && dq_rel < 0.28 && dq_abs < mean_abs * 1.005);
        assert_true(scale_error < 0.0035);
        if (block == 64)
            assert_true(scale_error > 0.0012 && scale_error < 0.0020);
    }
    free(x);
    free(restored);
    free(absmax);
    free(final);
    free(nested);
    free(codes);
    free(scales);
}

TEST(test_int8_limits)
{
    qt_rng rng = qt_rng_start("int8 limits");
    float *x = qt_alloc(ELEMS, sizeof *x), *restored = qt_alloc(ELEMS, sizeof *restored);
    float *scales = qt_alloc(ELEMS / 32, sizeof *scales);
    int8_t *codes = qt_alloc(ELEMS, 1);
    uint64_t overflow, off_by_one = 0;
    double mean_abs, mean_rel;
    qc_piece_sums sums;
    for (uint64_t i = 0; i < ELEMS; i++)
        x[i] = qt_randn(&rng);
    ops->int8_rows_quantize(x, QC_DTYPE_F32, SIDE, SIDE, codes, scales, &sums);
    /* bitsandbytes: not more than one apart from 127 x / absmax in exact arithmetic, and apart at
     * all in at most one element of 500 */
    for (uint64_t i = 0; i < ELEMS; i++) {
        double h = (double)qc_f32_from_f16(qc_f16_from_f32(x[i]));
        long difference = labs(codes[i] - lrint(h * 127.0 / (double)scales[i / SIDE]));
        assert_true(difference <= 1);
        off_by_one += (uint64_t)difference;
    }
    assert_true(off_by_one <= ELEMS / 500);
    ops->int8_rows_dequantize(codes, scales, SIDE, SIDE, restored, QC_DTYPE_F32, &overflow);
    mean_errors(x, restored, &mean_abs, &mean_rel);
    print_message("int8 rows: abs %.6f rel %.6f, rel_mse %.3e, %" PRIu64 " codes off by one\n",
                  mean_abs, mean_rel, sums.sum_ee / sums.sum_xx, off_by_one);
    assert_true(mean_abs < 0.0075);
    for (uint32_t block = 32; block <= 4096; block *= 2) {
        ops->int8_blocks_quantize(x, QC_DTYPE_F32, ELEMS, block, codes, scales, NULL, &sums);
        ops->int8_blocks_dequantize(codes, scales, ELEMS, block, restored, QC_DTYPE_F32, &overflow);
        mean_errors(x, restored, &mean_abs, &mean_rel);
        /* An even spread within steps of absmax / 127 errs by a quarter step on average; the
         * largest element of a block does not err. */
        double quarter_step = 0.0;
        for (uint64_t k = 0; k < ELEMS / block; k++)
            quarter_step += (double)scales[k] / 508.0;
        quarter_step *= (double)(block - 1) / ELEMS;
        print_message("int8 block %4u: abs %.6f rel %.6f, expected %.6f\n", block, mean_abs,
                      mean_rel, quarter_step);
        assert_true(fabs(mean_abs / quarter_step - 1.0) < 0.01 && mean_rel < 0.06);
    }
    free(x);
    free(restored);
    free(scales);
    free(codes);
}

/* ---- idempotence ----------------------------------------------------------------------------- */

/* Quantizing what was restored gives the same codes and scales: the largest element of a block has
 * code 0 or 15, whose value is +-1, so absmax comes back as it was. */
TEST(test_idempotence)
{
    static const uint64_t n = 40000 + 13;
    qt_rng rng = qt_rng_start("idempotence");
    float *x = qt_alloc(n, sizeof *x),
          *absmax[2] = {qt_alloc(n / 32 + 1, 4), qt_alloc(n / 32 + 1, 4)};
    uint8_t *codes[2] = {qt_alloc(n, 1), qt_alloc(n, 1)};
    uint64_t overflow;
    qc_piece_sums sums;
    for (uint32_t block = 32; block <= 4096; block *= 2) {
        for (unsigned round = 0; round < 6; round++) {
            double scale = round == 0 ? 1.0 : pow(10.0, 70.0 * qt_uniform(&rng) - 35.0);
            for (uint64_t i = 0; i < n; i++)
                x[i] = (float)((double)qt_randn(&rng) * scale);
            for (unsigned pass = 0; pass < 2; pass++) {
                ops->nf4_quantize(x, QC_DTYPE_F32, n, block, codes[pass], absmax[pass], NULL,
                                  &sums);
                ops->nf4_dequantize(codes[pass], absmax[pass], qc_nf4_code, n, block, x,
                                    QC_DTYPE_F32, &overflow);
            }
            assert_memory_equal(codes[0], codes[1], (n + 1) / 2);
            assert_memory_equal(absmax[0], absmax[1], (n / block + 1) * sizeof(float));
            for (uint64_t i = 0; i < n; i++)
                x[i] = (float)((double)qt_randn(&rng) * scale);
            for (unsigned pass = 0; pass < 2; pass++) {
                ops->int8_blocks_quantize(x, QC_DTYPE_F32, n, block, (int8_t *)codes[pass],
                                          absmax[pass], NULL, &sums);
                ops->int8_blocks_dequantize((int8_t *)codes[pass], absmax[pass], n, block, x,
                                            QC_DTYPE_F32, &overflow);
            }
            assert_memory_equal(codes[0], codes[1], n);
        }
    }
    free(x);
    for (unsigned pass = 0; pass < 2; pass++) {
        free(absmax[pass]);
        free(codes[pass]);
    }
}

int main(void)
{
    int failed = 0;
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        ops = qc_quant_ops_for((qc_isa)isa);
        if (!qt_has_table((qc_isa)isa))
            continue;
        printf("%s\n", qc_isa_name(ops->isa));
        fflush(stdout);
        failed += test_run_all(NULL);
    }
    return failed ? 1 : 0;
}
