/* qc_cuda_feedback_weight against qc_feedback_weight with the same factor: errors within 1e-3, few
 * codes that differ. The factor is the CPU's, uploaded. */
#include "tests/fixtures/device_memory_counted.h"
#include "tests/fixtures/feedback_device_fixture.h"

#include "base/workers.h"

/* Shares of codes and scales that differ. */
static void compare(const made *got, const made *want, double most, const char *what)
{
    const uint64_t elems = want->rows * want->n;
    uint64_t codes = 0, scales = 0;
    for (uint64_t i = 0; i < elems; i++)
        codes += code_of(got, i) != code_of(want, i);
    for (uint64_t b = 0; b < want->blocks; b++)
        scales += fabsf(got->absmax[b] - want->absmax[b]) > 1e-5f * fabsf(want->absmax[b]);
    if (getenv("QC_TEST_SHOW"))
        print_message("%s: %.5f of codes, %.5f of scales; %.6g %.6g, not %.6g %.6g\n", what,
                      (double)codes / (double)elems, (double)scales / (double)want->blocks,
                      got->result.rounded, got->result.calibrated, want->result.rounded,
                      want->result.calibrated);
    QT_CHECK((double)codes <= most * (double)elems, "%s: %" PRIu64 " codes of %" PRIu64, what,
             codes, elems);
    QT_CHECK((double)scales <= most * (double)want->blocks + 2.0,
             "%s: %" PRIu64 " scales of %" PRIu64, what, scales, want->blocks);
    QT_CHECK(got->offset == want->offset || fabsf(got->offset / want->offset - 1.0f) < 1e-5f,
             "%s: offset %g, not %g", what, (double)got->offset, (double)want->offset);
    QT_CHECK(fabs(got->result.rounded / want->result.rounded - 1.0) < 1e-3 &&
                 fabs(got->result.calibrated / want->result.calibrated - 1.0) < 2e-3,
             "%s: errors %g and %g, not %g and %g", what, got->result.rounded,
             got->result.calibrated, want->result.rounded, want->result.calibrated);
}

typedef struct {
    qc_form form;
    uint64_t rows, n;
    int cross, dead, pieces;
    unsigned sweeps;
    qc_dtype dtype;
} a_case;

#define PACKED(bits, block, dtype)                                                                 \
    {                                                                                              \
        .ops = &qc_form_w##bits##a16, .block_elems = (block), .scale_dtype = QC_DTYPE_##dtype      \
    }

/* Small ones, and n above a super of 512 columns. */
static const a_case cases[] = {
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 0}, 40, 192, 0, 0, 0, 0, QC_DTYPE_F32},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 1}, 40, 192, 1, 1, 0, 3, QC_DTYPE_BF16},
    {{.ops = &qc_form_nf4, .block_elems = 32, .nested = 1}, 260, 96, 0, 0, 1, 1, QC_DTYPE_F16},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 0}, 33, 101, 1, 0, 0, 2, QC_DTYPE_F32},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 0}, 150, 101, 0, 1, 1, 1, QC_DTYPE_F32},
    {{.ops = &qc_form_nf4, .block_elems = 128, .nested = 0}, 1, 256, 0, 0, 0, 4, QC_DTYPE_F32},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 1}, 6, 576, 0, 0, 0, 2, QC_DTYPE_F32},
    {{.ops = &qc_form_int8_rows, .block_elems = 0, .nested = 0}, 10, 520, 1, 0, 1, 2, QC_DTYPE_F32},
    {{.ops = &qc_form_int8_rows, .block_elems = 0, .nested = 0}, 37, 50, 0, 1, 1, 2, QC_DTYPE_BF16},
    {{.ops = &qc_form_int8_blocks, .block_elems = 64, .nested = 0},
     40,
     128,
     0,
     0,
     0,
     2,
     QC_DTYPE_F32},
    {{.ops = &qc_form_int8_blocks, .block_elems = 64, .nested = 1},
     140,
     128,
     1,
     0,
     1,
     1,
     QC_DTYPE_F32},
    {{.ops = &qc_form_int8_blocks, .block_elems = 256, .nested = 1},
     12,
     512,
     0,
     0,
     0,
     2,
     QC_DTYPE_F32},
    {{.ops = &qc_form_nf4, .block_elems = 1024, .nested = 0}, 3, 1024, 0, 0, 0, 1, QC_DTYPE_F32},
    {PACKED(4, 128, BF16), 40, 256, 1, 1, 0, 3, QC_DTYPE_BF16},
    {PACKED(4, 32, F16), 70, 96, 0, 0, 0, 2, QC_DTYPE_F16},
    {PACKED(4, 0, F32), 12, 600, 0, 0, 0, 2, QC_DTYPE_F32},
    {PACKED(4, 0, BF16), 9, 75, 0, 1, 1, 1, QC_DTYPE_F32},
    {PACKED(2, 64, F16), 33, 128, 0, 0, 1, 2, QC_DTYPE_F32},
    {PACKED(3, 128, BF16), 40, 256, 1, 1, 0, 2, QC_DTYPE_BF16},
    {PACKED(5, 32, F16), 70, 96, 0, 0, 1, 2, QC_DTYPE_F16},
    {PACKED(5, 0, BF16), 9, 75, 0, 1, 1, 1, QC_DTYPE_F32},
    {PACKED(6, 64, BF16), 40, 128, 1, 0, 0, 2, QC_DTYPE_F32},
    {PACKED(7, 0, F32), 12, 600, 0, 0, 1, 2, QC_DTYPE_F32},
    {PACKED(8, 64, F16), 40, 128, 1, 0, 1, 2, QC_DTYPE_F16},
    {PACKED(8, 0, BF16), 10, 520, 0, 0, 0, 2, QC_DTYPE_BF16},
    {{.ops = &qc_form_w8a8, .block_elems = 0, .scale_dtype = QC_DTYPE_F16},
     37,
     50,
     0,
     1,
     1,
     2,
     QC_DTYPE_F32},
};

TEST(weights_are_the_cpus)
{
    qt_rng rng = qt_rng_start("gpu weights");
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        const a_case c = cases[i];
        char what[64];
        data d = make_data(&rng, c.n, c.n < 300 ? 2 * c.n : 60, c.dead);
        float *w = make_weight(&rng, c.rows, c.n);
        void *source = qt_alloc(c.rows * c.n, qt_size(c.dtype));
        for (uint64_t k = 0; k < c.rows * c.n; k++) {
            qt_put(source, c.dtype, k, (double)w[k]);
            w[k] = (float)qt_get(source, c.dtype, k);
        }
        const qc_feedback_options options = {c.n < 300 ? TEST_DAMPING : 1.0, c.sweeps};
        qc_feedback *f = open_with(&d, c.cross, 1, options, NULL);
        qc_cuda_feedback gpu = upload(f);
        made want = quantize_with(f, c.form, w, c.rows, c.n);
        made got = quantize_on_device(&gpu, c.form, source, c.dtype, c.rows, NULL, 0);
        (void)snprintf(what, sizeof what, "case %u", i);
        /* 8 bits: steps are finer, so that more values lie near the middle of two */
        const double most = c.form.ops->bits == 4 ? 0.02 : 0.05;
        compare(&got, &want, most, what);
        if (c.pieces) {
            made parts = quantize_on_device(&gpu, c.form, source, c.dtype, c.rows, NULL, 1);
            (void)snprintf(what, sizeof what, "case %u in pieces", i);
            compare(&parts, &got, most, what);
            free_made(&parts);
        }
        free_made(&got);
        free_made(&want);
        drop(&gpu);
        qc_feedback_close(f);
        free(source);
        free(w);
        free_data(&d);
    }
}

TEST(what_is_refused)
{
    qt_rng rng = qt_rng_start("gpu refused");
    data d = make_data(&rng, 96, 200, 0);
    qc_feedback *f = open_with(&d, 0, 1, (qc_feedback_options){TEST_DAMPING, 1}, NULL);
    qc_cuda_feedback gpu = upload(f);
    float *w = make_weight(&rng, 50, 96), absmax[75];
    uint8_t codes[50 * 96], absmax_codes[75];
    float nested[1];
    qc_feedback_out out = {.codes = codes,
                           .absmax = absmax,
                           .absmax_codes = absmax_codes,
                           .nested_absmax = nested,
                           .nested_offset = NAN};
    qc_feedback_result result;
    qc_form form = {.ops = &qc_form_nf4, .block_elems = 64, .nested = 0};
    const uint64_t before = dm_bytes();
    assert_true(before > 96 * 96 * 4); /* the factor */
    w[7 * 96 + 5] = INFINITY;
    w[41 * 96] = NAN;
    assert_int_equal(
        qc_cuda_feedback_weight(&gpu, &form, w, QC_DTYPE_F32, 50, NULL, &out, &result, &qd.err),
        QC_ERR_NONFINITE);
    assert_string_equal(qd.err.msg, "the weight in row 7, column 5 is not finite");
    w[7 * 96 + 5] = 0.0f; /* the other in a later piece */
    assert_int_equal(qc_cuda_feedback_weight_within(&gpu, &form, w, QC_DTYPE_F32, 50, NULL, 1, &out,
                                                    &result, &qd.err),
                     QC_ERR_NONFINITE);
    assert_string_equal(qd.err.msg, "the weight in row 41, column 0 is not finite");
    w[41 * 96] = 0.0f;
    form.block_elems = 48;
    assert_int_equal(
        qc_cuda_feedback_weight(&gpu, &form, w, QC_DTYPE_F32, 50, NULL, &out, &result, &qd.err),
        QC_ERR_USAGE);
    form.block_elems = 64;
    qc_interrupt();
    assert_int_equal(
        qc_cuda_feedback_weight(&gpu, &form, w, QC_DTYPE_F32, 50, NULL, &out, &result, &qd.err),
        QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    QD_OK(qc_cuda_feedback_weight(&gpu, &form, w, QC_DTYPE_F32, 0, NULL, &out, &result, &qd.err));
    QD_OK(qc_cuda_feedback_weight(&gpu, &form, w, QC_DTYPE_F32, 50, NULL, &out, &result, &qd.err));
    assert_true(dm_bytes() == before);
    drop(&gpu);
    assert_true(dm_bytes() < before - 96 * 96 * 4);
    qc_feedback_close(f);
    free(w);
    free_data(&d);
}

TEST(bytes_are_told)
{
    const qc_form nf4 = {.ops = &qc_form_nf4, .block_elems = 64, .nested = 1},
                  rows = {.ops = &qc_form_int8_rows, .block_elems = 0, .nested = 0},
                  channels = {.ops = &qc_form_w4a16, .block_elems = 0};
    const uint64_t all = qc_cuda_feedback_weight_bytes(8192, 8192, &nf4, 0);
    assert_true(all > UINT64_C(13) * 8192 * 8192 && all < UINT64_C(14) * 8192 * 8192);
    expect_least_rows(8192, 8192, &nf4, 0, 2);
    expect_least_rows(100000, 4097, &nf4, 0, 16384);
    expect_least_rows(5, 4097, &rows, 0, 1);
    /* a byte has the codes of two rows */
    expect_least_rows(5, 4097, &channels, 0, 2);
    assert_true(qc_cuda_feedback_weight_bytes(UINT64_MAX, 4096, &nf4, 0) == UINT64_MAX);
}

int main(void)
{
    return run_on_device();
}
