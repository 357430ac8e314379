/* The scale search against arithmetic in double: codes and scales decode to the error that the sums
 * state, scales are those that double quantization holds, the error is near that of trying every
 * scale, small cases are exact, and what has no code is reported. On the best table there is and on
 * the scalar one. */
#include "tests/fixtures/quant_testing.h"

#include "quant/scale_search.h"

static const qc_quant_ops *quant;
static const qc_search_ops *ops;

typedef struct {
    qc_form form;
    const float *x;
    float *back; /* as a reader sees them */
    uint64_t n, blocks, groups;
    uint8_t *codes, *absmax_codes;
    float *absmax, *nested_absmax;
    qc_piece_sums sums;
} searched;

/* bits: 1 NF4, else int8; 2 double quantization; 4 refit. */
static qc_form form_of(unsigned bits, uint32_t block)
{
    return (qc_form){
        .ops = bits & 1 ? &qc_form_nf4 : &qc_form_int8_blocks,
        .block_elems = block,
        .nested = bits >> 1 & 1,
        .offset = (bits & 3u) == 2 ? 0.0478515625f : 0.0f, /* int8: about the mean of absmax */
    };
}

static searched search(unsigned bits, uint32_t block, const float *x, uint64_t n)
{
    const qc_form form = form_of(bits, block);
    searched r = {.form = form, .x = x, .n = n};
    r.blocks = (n + form.block_elems - 1) / form.block_elems;
    r.groups = (r.blocks + QC_NESTED_BLOCK - 1) / QC_NESTED_BLOCK;
    r.codes = qt_alloc(n, 1);
    r.absmax = qt_alloc(r.blocks, 4);
    r.absmax_codes = qt_alloc(r.blocks, 1);
    r.nested_absmax = qt_alloc(r.groups, 4);
    r.back = qt_alloc(n, 4);
    void *scratch = aligned_alloc(64, qc_search_scratch_bytes());
    QT_CHECK(scratch != NULL, "out of memory");
    qc_search_out out = {r.codes, r.absmax, r.absmax_codes, r.nested_absmax};
    ops->blocks(&form, bits & 4 ? QC_SEARCH_REFIT : QC_SEARCH_ONCE, x, QC_DTYPE_F32, n, &out,
                scratch, &r.sums);
    free(scratch);
    uint64_t overflow;
    form.ops->dequantize(quant, &form, r.codes, r.absmax, n, r.back, QC_DTYPE_F32, &overflow);
    return r;
}

static void searched_free(searched *r)
{
    free(r->codes);
    free(r->absmax);
    free(r->absmax_codes);
    free(r->nested_absmax);
    free(r->back);
}

static double squared_error(const float *x, const float *back, uint64_t n)
{
    double sum = 0.0;
    for (uint64_t i = 0; i < n; i++)
        sum += ((double)x[i] - (double)back[i]) * ((double)x[i] - (double)back[i]);
    return sum;
}

/* Of bitsandbytes' choice: the largest value, then double quantization about the mean. */
static double absmax_error(const qc_form *form, const float *x, uint64_t n)
{
    const uint64_t blocks = (n + form->block_elems - 1) / form->block_elems;
    uint8_t *codes = qt_alloc(n, 1), *absmax_codes = qt_alloc(blocks, 1);
    float *absmax = qt_alloc(blocks, 4), *nested = qt_alloc(blocks, 4), *back = qt_alloc(n, 4);
    qc_piece_sums sums;
    uint64_t overflow;
    form->ops->quantize(quant, form, x, QC_DTYPE_F32, n, &(qc_form_out){codes, absmax, NULL},
                        &sums);
    if (form->nested) {
        float offset = qc_nested_offset(absmax, blocks);
        quant->nested_quantize(absmax, blocks, offset, absmax_codes, nested);
        quant->nested_dequantize(absmax_codes, nested, qc_dynamic_map, blocks, QC_NESTED_BLOCK,
                                 offset, absmax);
    }
    form->ops->dequantize(quant, form, codes, absmax, n, back, QC_DTYPE_F32, &overflow);
    double error = squared_error(x, back, n);
    free(codes);
    free(absmax_codes);
    free(absmax);
    free(nested);
    free(back);
    return error;
}

static double nearest_error(const qc_form *form, float x, float s)
{
    double best = (double)x * (double)x;
    if (form->ops != &qc_form_nf4) {
        double step = (double)s / 127.0, q = rint((double)x / step);
        q = q > 127.0 ? 127.0 : q < -127.0 ? -127.0 : q;
        return ((double)x - q * step) * ((double)x - q * step);
    }
    for (unsigned code = 0; code < 16; code++) {
        double r = (double)x - (double)qc_nf4_code[code] * (double)s;
        best = r * r < best ? r * r : best;
    }
    return best;
}

/* Every scale that the search's own nested absmax offers, for each block. */
static double exhaustive_error(const searched *r)
{
    double sum = 0.0;
    for (uint64_t b = 0; b < r->blocks; b++) {
        const uint64_t first = b * r->form.block_elems;
        const uint64_t end =
            first + r->form.block_elems < r->n ? first + r->form.block_elems : r->n;
        double best = (double)INFINITY;
        for (unsigned code = 0; code < 256; code++) {
            float s = qc_dynamic_map[code] * r->nested_absmax[b / QC_NESTED_BLOCK];
            s = s + r->form.offset;
            double error = 0.0;
            for (uint64_t i = first; i < end && s != 0.0f; i++)
                error += nearest_error(&r->form, r->x[i], s);
            best = s != 0.0f && error < best ? error : best;
        }
        sum += best;
    }
    return sum;
}

static float *normal(qt_rng *rng, uint64_t n, float unit)
{
    float *x = qt_alloc(n, sizeof *x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = qt_randn(rng) * unit;
    return x;
}

static void check_sums(const searched *r)
{
    double xx = 0.0, largest = 0.0;
    uint64_t where = 0;
    for (uint64_t i = 0; i < r->n; i++) {
        double e = (double)fabsf(r->x[i] - r->back[i]);
        xx += (double)r->x[i] * (double)r->x[i];
        if (e > largest) {
            largest = e;
            where = i;
        }
    }
    double ee = squared_error(r->x, r->back, r->n);
    QT_CHECK(fabs(r->sums.sum_xx - xx) <= 1e-6 * xx, "sum_xx %g, is %g", r->sums.sum_xx, xx);
    QT_CHECK(fabs(r->sums.sum_ee - ee) <= 1e-6 * ee + 1e-13 * xx, "sum_ee %g, is %g",
             r->sums.sum_ee, ee);
    QT_CHECK(r->sums.max_err == largest && r->sums.max_index == where,
             "max_err %a at %" PRIu64 ", is %a at %" PRIu64, r->sums.max_err, r->sums.max_index,
             largest, where);
}

/* ---- tests ----------------------------------------------------------------------------------- */

TEST(decodes_to_what_sums_say)
{
    qt_rng rng = qt_rng_start("decodes_to_what_sums_say");
    for (unsigned bits = 0; bits < 8; bits++)
        for (uint32_t block = 32; block <= 4096; block *= bits & 4 ? 8 : 2) {
            const uint64_t n = 300 * 32 + block * 3 + 11;
            float *x = normal(&rng, n, 0.02f);
            searched r = search(bits, block, x, n);
            check_sums(&r);
            if (r.form.nested) {
                float *absmax = qt_alloc(r.blocks, 4);
                quant->nested_dequantize(r.absmax_codes, r.nested_absmax, qc_dynamic_map, r.blocks,
                                         QC_NESTED_BLOCK, r.form.offset, absmax);
                assert_memory_equal(absmax, r.absmax, r.blocks * 4);
                free(absmax);
            }
            searched_free(&r);
            free(x);
        }
}

/* Shares of the squared error that bitsandbytes leaves, on normal weights; the least that a search
 * has to do. Measured: docs/theory/scale_search.md. */
TEST(better_than_absmax)
{
    static const struct {
        unsigned bits;
        uint32_t block;
        double most; /* of absmax_error */
    } cases[] = {
        {3, 64, 0.82},   {3, 32, 0.76}, {1, 64, 0.82},  {7, 64, 0.815}, {3, 256, 0.875},
        {3, 4096, 0.83}, {2, 64, 0.82}, {6, 64, 0.805}, {0, 64, 0.89},
    };
    qt_rng rng = {1};
    const uint64_t n = 1 << 17;
    float *x = normal(&rng, n, 0.02f);
    for (unsigned k = 0; k < sizeof cases / sizeof *cases; k++) {
        searched r = search(cases[k].bits, cases[k].block, x, n);
        double ratio = squared_error(x, r.back, n) / absmax_error(&r.form, x, n);
        print_message("form %u block %u: %.4f of the error of absmax\n", cases[k].bits,
                      cases[k].block, ratio);
        QT_CHECK(ratio <= cases[k].most, "form %u block %u: %g of the error of absmax, expected %g",
                 cases[k].bits, cases[k].block, ratio, cases[k].most);
        searched_free(&r);
    }
    free(x);
}

TEST(near_the_exhaustive_choice)
{
    static const struct {
        unsigned bits;
        double most; /* of exhaustive_error */
    } cases[] = {{3, 1.004}, {7, 1.0012}, {2, 1.03}, {6, 1.015}};
    qt_rng rng = {2};
    const uint64_t n = 64 * QC_NESTED_BLOCK;
    float *x = normal(&rng, n, 0.02f);
    for (unsigned k = 0; k < sizeof cases / sizeof *cases; k++) {
        searched r = search(cases[k].bits, 64, x, n);
        double ratio = squared_error(x, r.back, n) / exhaustive_error(&r);
        print_message("form %u: %.5f of the least error\n", cases[k].bits, ratio);
        QT_CHECK(ratio >= 1 - 1e-6 && ratio <= cases[k].most,
                 "form %u: %g of the least error, expected at most %g", cases[k].bits, ratio,
                 cases[k].most);
        searched_free(&r);
    }
    free(x);
}

/* Values of NF4 itself, upright and mirrored, come back exactly; so do the levels of int8. */
TEST(exact_cases)
{
    float x[128];
    for (unsigned i = 0; i < 128; i++)
        x[i] = qc_nf4_code[i % 16] * (i < 64 ? 3.0f : -3.0f);
    searched r = search(1, 64, x, 128);
    assert_true(r.absmax[0] > 0.0f && r.absmax[1] < 0.0f);
    QT_CHECK(r.sums.sum_ee < 1e-3 * r.sums.sum_xx, "%g of %g", r.sums.sum_ee, r.sums.sum_xx);
    for (unsigned i = 0; i < 128; i++)
        assert_int_equal(qt_nibble(r.codes, i), i % 16);
    searched_free(&r);
    for (unsigned i = 0; i < 128; i++)
        x[i] = (float)((int)i - 63) * 2.0f + (i < 64 ? -1.0f : 1.0f); /* up to 127 and 129 */
    x[127] = 127.0f;
    r = search(0, 128, x, 128);
    assert_true(r.absmax[0] == 127.0f && r.sums.sum_ee < 1e-12 * r.sums.sum_xx);
    for (unsigned i = 0; i < 128; i++)
        assert_int_equal((int8_t)r.codes[i], (int)x[i]);
    searched_free(&r);
}

/* The negated tensor has the same codes under negated scales, but where two candidates of the
 * screen were equal: it takes the upright one of both. */
TEST(sign_is_symmetric)
{
    qt_rng rng = qt_rng_start("sign_is_symmetric");
    const uint64_t n = 64 * 200;
    float *x = normal(&rng, n, 0.02f), *y = qt_alloc(n, 4);
    unsigned negative = 0, same = 0;
    for (uint64_t i = 0; i < n; i++)
        y[i] = -x[i];
    searched a = search(1, 64, x, n), b = search(1, 64, y, n);
    for (uint64_t k = 0; k < a.blocks; k++) {
        negative += a.absmax[k] < 0.0f;
        if (a.absmax[k] == -b.absmax[k]) {
            assert_memory_equal(a.codes + 32 * k, b.codes + 32 * k, 32);
            same++;
        }
    }
    assert_in_range(negative, 40, 160);
    assert_in_range(same, 190, 200);
    searched_free(&a);
    searched_free(&b);
    free(x);
    free(y);
}

TEST(zeros_and_edges)
{
    float x[64 * 5 + 1] = {0};
    for (unsigned i = 0; i < 64; i++) {
        x[64 + i] = 0x1p-149f * (float)(i % 9);
        x[128 + i] = i % 3 ? FLT_MAX : -FLT_MAX;
        x[192 + i] = i == 9 ? -5.0f : 0.0f;
    }
    x[320] = 2.0f; /* a block of one, an odd one */
    for (unsigned bits = 0; bits < 8; bits++) {
        searched r = search(bits, 64, x, 321);
        assert_int_equal(r.sums.bad, QC_BAD_NONE);
        for (unsigned i = 0; i < (r.form.ops == &qc_form_nf4 ? 32u : 64u); i++)
            assert_int_equal(r.codes[i], r.form.ops == &qc_form_nf4 ? 0x77 : 0);
        for (unsigned i = 0; i < 321; i++)
            QT_CHECK(isfinite(r.back[i]), "form %u: element %u is %g", bits, i, (double)r.back[i]);
        if (r.form.ops == &qc_form_nf4) {
            assert_int_equal(r.codes[160] & 15, 7);
        }
        if (!r.form.nested) {
            assert_true(r.absmax[0] == 0.0f);
            QT_CHECK(fabsf(r.back[201] + 5.0f) < 0.1f, "form %u: %g", bits, (double)r.back[201]);
        }
        assert_true(r.sums.max_err <= (double)FLT_MAX * 0.02);
        searched_free(&r);
    }
    searched none = search(3, 64, x, 0);
    assert_true(none.sums.bad == QC_BAD_NONE && none.sums.sum_xx == 0.0);
    searched_free(&none);
}

TEST(bad_elements)
{
    qt_rng rng = qt_rng_start("bad_elements");
    const uint64_t n = 64 * 300, at = qt_below(&rng, n - 70);
    float *x = normal(&rng, n, 1.0f);
    x[at] = NAN;
    x[at + 69] = INFINITY;
    for (unsigned bits = 0; bits < 4; bits++) {
        searched r = search(bits, 64, x, n);
        assert_int_equal(r.sums.bad, QC_BAD_NONFINITE);
        assert_int_equal(r.sums.bad_index, at);
        searched_free(&r);
    }
    double wide[64] = {[33] = 1e300};
    int8_t codes[64];
    float scale;
    uint8_t absmax_code;
    qc_piece_sums sums;
    qc_form form = form_of(3, 64);
    void *scratch = aligned_alloc(64, qc_search_scratch_bytes());
    qc_search_out out = {codes, &scale, &absmax_code, &scale};
    ops->blocks(&form, QC_SEARCH_ONCE, wide, QC_DTYPE_F64, 64, &out, scratch, &sums);
    assert_true(sums.bad == QC_BAD_RANGE && sums.bad_index == 33);
    wide[33] = 70000.0; /* beyond float16 */
    const qc_form by_rows = {.ops = &qc_form_int8_rows, .cols = 32};
    ops->blocks(&by_rows, QC_SEARCH_ONCE, wide, QC_DTYPE_F64, 64, &out, scratch, &sums);
    assert_true(sums.bad == QC_BAD_RANGE && sums.bad_index == 33);
    free(scratch);
    free(x);
}

TEST(rows_are_better)
{
    qt_rng rng = {3};
    const uint64_t rows = 32, cols = 1500, n = rows * cols;
    float *x = normal(&rng, n, 0.02f), scb[2][32];
    for (uint64_t i = 0; i < cols; i++)
        x[5 * cols + i] = 0.0f;
    int8_t *codes = qt_alloc(n, 1);
    float *back = qt_alloc(n, 4);
    qc_piece_sums before, after;
    uint64_t overflow;
    void *scratch = aligned_alloc(64, qc_search_scratch_bytes());
    quant->int8_rows_quantize(x, QC_DTYPE_F32, rows, cols, codes, scb[0], &before);
    const qc_form by_rows = {.ops = &qc_form_int8_rows, .cols = cols};
    const qc_search_out out = {.codes = codes, .absmax = scb[1]};
    ops->blocks(&by_rows, QC_SEARCH_ONCE, x, QC_DTYPE_F32, n, &out, scratch, &after);
    quant->int8_rows_dequantize(codes, scb[1], rows, cols, back, QC_DTYPE_F32, &overflow);
    double ee = squared_error(x, back, n);
    QT_CHECK(fabs(after.sum_ee - ee) <= 1e-6 * ee, "sum_ee %g, is %g", after.sum_ee, ee);
    QT_CHECK(after.sum_ee < 0.985 * before.sum_ee, "%g of the error of absmax",
             after.sum_ee / before.sum_ee);
    assert_true(scb[1][5] == 0.0f && codes[5 * cols + 7] == 0);
    assert_true((double)fabsf(x[after.max_index] - back[after.max_index]) == after.max_err);
    free(scratch);
    free(codes);
    free(back);
    free(x);
}

/* The error of the best of many scales for these n elements, with codes from lowest to highest. */
static double best_error(const qc_form *form, const float *x, uint64_t n)
{
    const double low = form->ops->lowest, high = form->ops->highest;
    double best = INFINITY, absmax = 0.0;
    for (uint64_t i = 0; i < n; i++)
        absmax = fmax(absmax, fabs((double)x[i]));
    for (int f = -140; f <= 140; f++) {
        const double s = absmax * f / 100.0 / -low;
        double sum = 0.0;
        for (uint64_t i = 0; f != 0 && i < n; i++) {
            const double e = (double)x[i] - fmin(fmax(rint((double)x[i] / s), low), high) * s;
            sum += e * e;
        }
        best = f != 0 && sum < best ? sum : best;
    }
    return best;
}

/* Searches n elements as integers: sums, the grid of scales, codes, and how good they are. */
static void check_integers(const qc_form *form, const float *x, uint64_t n)
{
    const uint64_t group = form->block_elems ? form->block_elems : form->cols;
    uint8_t *codes[2] = {qt_alloc(n, 1), qt_alloc(n, 1)};
    float *scales[2] = {qt_alloc(n / group, 4), qt_alloc(n / group, 4)}, *back = qt_alloc(n, 4);
    void *scratch = aligned_alloc(64, qc_search_scratch_bytes());
    const qc_search_out out = {.codes = codes[0], .absmax = scales[0]};
    qc_piece_sums sums, plain;
    uint64_t overflow;
    double best = 0.0, largest = 0.0;
    QT_CHECK(scratch != NULL, "out of memory");
    ops->blocks(form, QC_SEARCH_ONCE, x, QC_DTYPE_F32, n, &out, scratch, &sums);
    form->ops->dequantize(quant, form, codes[0], scales[0], n, back, QC_DTYPE_F32, &overflow);
    form->ops->quantize(quant, form, x, QC_DTYPE_F32, n,
                        &(qc_form_out){.codes = codes[1], .absmax = scales[1]}, &plain);
    const double error = squared_error(x, back, n);
    QT_CHECK(fabs(sums.sum_ee - error) <= 1e-5 * error, "%s: sum_ee %g, %g", form->ops->name,
             sums.sum_ee, error);
    QT_CHECK(fabs(sums.sum_xx - plain.sum_xx) <= 1e-5 * plain.sum_xx, "sum_xx %g", sums.sum_xx);
    for (uint64_t g = 0; g < n / group; g++) {
        const float s = scales[0][g];
        assert_true(qc_int_round_scale(form->scale_dtype, s) == s);
        assert_true(s > 0.0f || form->ops->signed_scales);
        for (uint64_t i = g * group; i < (g + 1) * group; i++) {
            const int q = (int)qc_form_unit(form->ops, qc_form_code_at(form->ops, codes[0], i));
            const double e = fabs((double)x[i] - (double)back[i]);
            const int end = q == form->ops->lowest || q == form->ops->highest;
            QT_CHECK(e <= 0.50001 * fabs((double)s) || (end && x[i] / s * (float)q > 0.0f),
                     "%s: code %d of %a, scale %a", form->ops->name, q, (double)x[i], (double)s);
            largest = fmax(largest, (double)fabsf(x[i] - back[i]));
        }
        if (form->ops->bits == 4)
            best += best_error(form, x + g * group, group);
    }
    assert_true(sums.max_err == largest &&
                fabsf(x[sums.max_index] - back[sums.max_index]) == (float)largest);
    QT_CHECK(error <= plain.sum_ee, "%s: %g, absmax %g", form->ops->name, error, plain.sum_ee);
    if (form->ops->bits == 4)
        QT_CHECK(error <= 0.85 * plain.sum_ee && error <= (form->block_elems ? 1.01 : 1.05) * best,
                 "group %" PRIu64 ": %g, absmax %g, best %g", group, error, plain.sum_ee, best);
    for (unsigned k = 0; k < 2; k++) {
        free(codes[k]);
        free(scales[k]);
    }
    free(back);
    free(scratch);
}

TEST(integers_are_better)
{
    static const qc_form_ops *const forms[] = {&qc_form_w4a16, &qc_form_w8a16, &qc_form_w8a8};
    static const qc_dtype scale_types[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    static const uint32_t groups[] = {32, 64, 128, 256, 1024, 0};
    const uint64_t n = 16384;
    qt_rng rng = qt_rng_start("integers_are_better");
    float *x = qt_alloc(n, sizeof *x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = qt_randn(&rng) * 0.02f;
    for (unsigned k = 0; k < 54; k++)
        check_integers(&(qc_form){.ops = forms[k % 3],
                                  .block_elems = groups[k / 9],
                                  .cols = 2048,
                                  .scale_dtype = scale_types[k / 3 % 3]},
                       x, n);
    free(x);
}

/* Groups of zeros, and magnitudes at the ends of float. */
TEST(integers_at_the_edges)
{
    static const float values[] = {0.0f,  -0.0f, 0x1p-149f, 0x1p-120f,
                                   1e-7f, 3.0f,  60000.0f,  FLT_MAX};
    static const qc_dtype scale_types[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    for (unsigned k = 0; k < 48; k++) {
        const qc_form form = {.ops = k % 2 ? &qc_form_w4a16 : &qc_form_w8a16,
                              .block_elems = 32,
                              .cols = 64,
                              .scale_dtype = scale_types[k / 16]};
        float x[64] = {0.0f}, scales[2], back[64];
        uint8_t codes[64];
        void *scratch = aligned_alloc(64, qc_search_scratch_bytes());
        const qc_search_out out = {.codes = codes, .absmax = scales};
        qc_piece_sums sums;
        uint64_t overflow;
        x[33] = values[k / 2 % 8];
        QT_CHECK(scratch != NULL, "out of memory");
        ops->blocks(&form, QC_SEARCH_ONCE, x, QC_DTYPE_F32, 64, &out, scratch, &sums);
        form.ops->dequantize(quant, &form, codes, scales, 64, back, QC_DTYPE_F32, &overflow);
        assert_true(scales[0] == qc_int_round_scale(form.scale_dtype, 0.0f));
        assert_true(scales[1] != 0.0f && isfinite(scales[1]));
        assert_true(qc_int_round_scale(form.scale_dtype, scales[1]) == scales[1]);
        assert_int_equal(qc_form_code_at(form.ops, codes, 0), form.ops->zero);
        assert_true(sums.bad == QC_BAD_NONE && overflow == UINT64_MAX);
        for (unsigned i = 0; i < 64; i++)
            assert_true(i == 33 || back[i] == 0.0f);
        /* one value alone has a code of its own, where a scale for it exists */
        if (x[33] >= 0x1p-119f && x[33] <= 0x1p18f && form.scale_dtype != QC_DTYPE_F16)
            assert_true(fabsf(back[33] - x[33]) <= x[33] * 0.07f);
        free(scratch);
    }
}

TEST(sample_is_spread)
{
    static const uint64_t groups[] = {0, 1, 63, 64, 65, 1000, UINT64_MAX};
    for (unsigned k = 0; k < 7; k++) {
        const uint64_t count = qc_search_sample_count(groups[k]);
        assert_int_equal(count, groups[k] < 64 ? groups[k] : 64);
        for (uint64_t i = 0; i < count; i++) {
            uint64_t g = qc_search_sample_group(groups[k], i);
            assert_true(g < groups[k]);
            assert_true(i == 0 ? g == 0 : g > qc_search_sample_group(groups[k], i - 1));
        }
        if (count)
            assert_true(groups[k] - qc_search_sample_group(groups[k], count - 1) <=
                        groups[k] / count + 1);
    }
}

int main(void)
{
    int failed = 0;
    for (int isa = QC_ISA_AVX512; isa >= QC_ISA_SCALAR; isa -= QC_ISA_AVX512) {
        qc_isa use = (qc_isa)isa;
        while (!qc_isa_available(use))
            use = (qc_isa)(use - 1);
        quant = qc_quant_ops_for(use);
        ops = qc_search_ops_for(use);
        print_message("on %s\n", qc_isa_name(ops->isa));
        failed += test_run_all(NULL);
    }
    return failed != 0;
}
