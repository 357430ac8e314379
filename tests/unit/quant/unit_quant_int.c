/* W2A16 to W8A16 and W8A8 against a plain reading of the definition, which takes codes from their
 * words bit by bit. */
#include "quant/quant_form.h"
#include "tests/fixtures/quant_testing.h"

#define OPS (qc_quant_ops_for(QC_ISA_SCALAR))

static const qc_form_ops *const forms[] = {&qc_form_w2a16, &qc_form_w3a16, &qc_form_w4a16,
                                           &qc_form_w5a16, &qc_form_w6a16, &qc_form_w7a16,
                                           &qc_form_w8a16, &qc_form_w8a8};
#define FORMS (sizeof forms / sizeof *forms)
static const qc_dtype scale_types[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};

/* Has a form words at whose beginning each row begins? */
static int has_words(const qc_form *form)
{
    return form->ops->bits % 4 != 0;
}

/* Returns the place of code i among all bits. */
static uint64_t bit_of(const qc_form *form, uint64_t i)
{
    const uint64_t bits = form->ops->bits, cols = form->cols ? form->cols : 1;
    if (!has_words(form))
        return i * bits;
    return i / cols * ((cols * bits + 31) / 32 * 32) + i % cols * bits;
}

static int code_at(const qc_form *form, const uint8_t *codes, uint64_t i)
{
    unsigned code = 0;
    for (unsigned b = 0; b < form->ops->bits; b++) {
        const uint64_t bit = bit_of(form, i) + b;
        code |= (codes[bit / 8] >> bit % 8 & 1u) << b;
    }
    return form->ops->kind == QC_FORM_W8A8 ? (int)(int8_t)code
                                           : (int)code - (1 << (form->ops->bits - 1));
}

/* The bits behind the codes of each row are 0. */
static void check_gaps(const qc_form *form, const uint8_t *codes, uint64_t n)
{
    for (uint64_t i = form->cols; has_words(form) && i && i <= n; i += form->cols)
        for (uint64_t bit = bit_of(form, i - 1) + form->ops->bits; bit < bit_of(form, i); bit++)
            assert_int_equal(codes[bit / 8] >> bit % 8 & 1, 0);
}

static float nearest_scale(qc_dtype dtype, float quotient)
{
    if (dtype == QC_DTYPE_F16)
        return fminf(fmaxf(qc_f32_from_f16(qc_f16_from_f32(quotient)), 0x1p-24f), 65504.0f);
    if (dtype == QC_DTYPE_BF16)
        quotient = qc_f32_from_bf16(qc_bf16_from_f32(quotient));
    return fminf(fmaxf(quotient, 0x1p-126f), 0x1.fep120f);
}

/* Codes, scales, errors and decoded values of n elements in groups. */
static void check(const qc_form *form, const void *src, qc_dtype dtype, uint64_t n)
{
    const uint64_t group = form->block_elems ? form->block_elems : form->cols;
    const int half = 1 << (form->ops->bits - 1);
    const int lowest = half == 128 ? -127 : -half, highest = half - 1;
    const uint64_t bytes = n > 0 ? (bit_of(form, n) + 7) / 8 : 0;
    uint8_t *codes = qt_alloc(bytes + 1, 1);
    float *scales = qt_alloc(n / group, sizeof *scales), *back = qt_alloc(n, sizeof *back);
    const qc_form_out out = {.codes = codes, .absmax = scales};
    qc_piece_sums sums;
    double ee = 0.0, xx = 0.0, max_err = 0.0;
    uint64_t max_index = 0, overflow = 0;
    memset(codes, 0xff, bytes);
    codes[bytes] = 0xa5;
    assert_int_equal(qc_form_code_bytes(form, n), bytes);
    assert_int_equal(qc_form_code_elems(form, bytes), n);
    form->ops->quantize(OPS, form, src, dtype, n, &out, &sums);
    assert_int_equal(sums.bad, QC_BAD_NONE);
    assert_int_equal(codes[bytes], 0xa5);
    check_gaps(form, codes, n);
    form->ops->dequantize(OPS, form, codes, scales, n, back, QC_DTYPE_F32, &overflow);
    assert_true(overflow == UINT64_MAX);
    for (uint64_t g = 0; g < n / group; g++) {
        float absmax = 0.0f;
        for (uint64_t i = g * group; i < (g + 1) * group; i++)
            absmax = fmaxf(absmax, fabsf((float)qt_get(src, dtype, i)));
        float scale =
            nearest_scale(form->scale_dtype, absmax / (half == 128 ? 127.0f : (float)half - 0.5f));
        QT_CHECK(scales[g] == scale, "group %" PRIu64 ": scale %a, expected %a", g,
                 (double)scales[g], (double)scale);
        float inverse = 1.0f / scale;
        for (uint64_t i = g * group; i < (g + 1) * group; i++) {
            float x = (float)qt_get(src, dtype, i), scaled = x * inverse;
            long want = lrint(fmin(fmax((double)scaled, lowest), highest)); /* half to even */
            int code = code_at(form, codes, i);
            QT_CHECK(code == want, "%s of %s, element %" PRIu64 " = %a: %d, expected %ld",
                     form->ops->name, qc_dtype_name(dtype), i, (double)x, code, want);
            int stored = code + (form->ops->kind == QC_FORM_W8A8 ? 0 : 1 << (form->ops->bits - 1));
            QT_CHECK(back[i] == (float)code * scale &&
                         qc_form_value(form->ops, stored, scale) == back[i] &&
                         qc_form_unit(form->ops, stored) == (float)code,
                     "element %" PRIu64 " is read as %a", i, (double)back[i]);
            float e = x - back[i];
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
    QT_CHECK(fabs(sums.sum_ee - ee) <= 1e-5 * ee + 1e-38 * (double)n,
             "%s %s group %" PRIu64 " n %" PRIu64 " scale %a: sum_ee %.9g, %.9g", form->ops->name,
             qc_dtype_name(form->scale_dtype), group, n, (double)scales[0], sums.sum_ee, ee);
    QT_CHECK(fabs(sums.sum_xx - xx) <= 1e-5 * xx + 1e-38 * (double)n, "sum_xx %g, %g", sums.sum_xx,
             xx);
    free(codes);
    free(scales);
    free(back);
}

TEST(test_random)
{
    static const uint32_t groups[] = {32, 64, 128, 4096, 0};
    static const uint64_t widths[] = {8, 1024, 1032, 5000}, odd_widths[] = {1, 37, 1101, 4999};
    qt_rng rng = qt_rng_start("integers");
    double *memory = qt_alloc(3 * 5000 + 2, sizeof *memory);
    for (unsigned round = 0; round < 5 * FORMS * 3 * 4; round++) {
        const uint32_t block = groups[round % 5];
        qc_form form = {.ops = forms[round / 5 % FORMS],
                        .block_elems = block,
                        .cols = block ? block : widths[round % 4],
                        .scale_dtype = scale_types[round / 5 / FORMS % 3]};
        if (!block && has_words(&form) && qt_below(&rng, 2))
            form.cols = odd_widths[round % 4];
        uint64_t n =
            (block ? block : form.cols) * (1 + qt_below(&rng, block > 128 || !block ? 3 : 70));
        qc_dtype dtype = qt_float_types[round % 4];
        unsigned char *src = (unsigned char *)memory + qt_below(&rng, 8);
        double scale = pow(10.0, 8.0 * qt_uniform(&rng) - 5.0);
        for (uint64_t i = 0; i < n; i++)
            qt_put(src, dtype, i, fmod((double)qt_randn(&rng) * scale, 65000.0));
        check(&form, src, dtype, n);
    }
    free(memory);
}

/* Groups of zeros, of the smallest numbers and of the largest ones. */
TEST(test_ends)
{
    static const double values[] = {0.0, 0x1p-149, 0x1p-130, 0x1p-24, 65504.0, 0x1.fffffep127};
    float src[32];
    for (unsigned f = 0; f < FORMS; f++) {
        for (unsigned v = 0; v < 6; v++) {
            const qc_form form = {
                .ops = forms[f], .block_elems = 32, .cols = 32, .scale_dtype = QC_DTYPE_F32};
            for (unsigned i = 0; i < 32; i++)
                src[i] = (float)values[v] * (i % 3 == 0 ? 1.0f : i % 3 == 1 ? -1.0f : 0.0f);
            check(&form, src, QC_DTYPE_F32, 32);
        }
    }
    assert_true(qc_int_round_scale(QC_DTYPE_F16, 1e30f) == 65504.0f);
    assert_true(qc_int_round_scale(QC_DTYPE_F16, -1e-30f) == -0x1p-24f);
    assert_true(qc_int_round_scale(QC_DTYPE_BF16, 0x1.fffffep127f) == 0x1.fep120f);
    assert_true(qc_int_round_scale(QC_DTYPE_BF16, -0.0f) == -0x1p-126f);
}

TEST(test_bad_element_and_overflow)
{
    float src[128] = {[70] = INFINITY, [90] = NAN};
    uint8_t codes[64];
    float scales[2] = {60000.0f, 1.0f};
    const qc_form form = {.ops = &qc_form_w4a16, .block_elems = 64, .scale_dtype = QC_DTYPE_BF16};
    const qc_form_out out = {.codes = codes, .absmax = scales};
    uint16_t half[128];
    uint64_t overflow;
    qc_piece_sums sums;
    form.ops->quantize(OPS, &form, src, QC_DTYPE_F32, 128, &out, &sums);
    assert_int_equal(sums.bad, QC_BAD_NONFINITE);
    assert_int_equal(sums.bad_index, 70);
    memset(codes, 0x88, sizeof codes);
    codes[3] = 0xf8; /* element 7 is 7 */
    scales[0] = 60000.0f;
    form.ops->dequantize(OPS, &form, codes, scales, 128, half, QC_DTYPE_F16, &overflow);
    assert_int_equal(overflow, 7);
}
