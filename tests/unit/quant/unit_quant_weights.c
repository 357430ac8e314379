/* quant/quant_weights.h: descriptors are checked, and values are those of dequantizing. */
#include "quant/quant_weights.h"
#include "tests/fixtures/matmul_testing.h"

#include "base/interrupt.h"

static void refused(const qc_weights *w, const mt_weights *t, const char *word)
{
    qc_error err = {0};
    assert_int_equal(qc_weights_check(w, t->codes_bytes, t->scales, t->nested_scales, &err),
                     QC_ERR_SHAPE);
    QT_CHECK(strstr(err.msg, word) != NULL, "'%s' does not say '%s'", err.msg, word);
}

TEST(test_descriptors_are_checked)
{
    qt_rng rng = qt_rng_start("check");
    for (unsigned f = 0; f < MT_FORMS; f++) {
        mt_weights t;
        qc_weights w;
        mt_make(&t, &rng, mt_forms[f].kind, 6, 99, mt_forms[f].block, mt_forms[f].nested);
        assert_int_equal(qc_weights_check(&t.w, t.codes_bytes, t.scales, t.nested_scales, NULL),
                         QC_OK);
        w = t.w;
        w.rows = 0x100000000u;
        w.form.cols = 0x100000000u;
        refused(&w, &t, "too many");
        w = t.w;
        w.form.cols = 101;
        refused(&w, &t, "bytes of codes");
        w = t.w;
        w.codes = NULL;
        refused(&w, &t, "have no codes");
        w = t.w;
        w.form.ops = NULL;
        refused(&w, &t, "form of the weights is not known");
        w = t.w;
        t.scales++;
        refused(&w, &t, "scales");
        t.scales--;
        if (mt_forms[f].kind == QC_FORM_INT8_ROWS) {
            w.absmax = NULL;
            refused(&w, &t, "have no scales for their rows");
        } else {
            for (unsigned i = 0; i < 3; i++) {
                w.form.block_elems = (const uint32_t[]){0, 48, 8192}[i];
                refused(&w, &t, "power of two");
            }
        }
        assert_int_equal(qc_weights_check(NULL, t.codes_bytes, t.scales, t.nested_scales, NULL),
                         QC_ERR_USAGE);
        if (mt_forms[f].nested) {
            w = t.w;
            w.nested_map = NULL;
            refused(&w, &t, "neither");
            w = t.w;
            w.nested_block = 100;
            refused(&w, &t, "power of two");
            w = t.w;
            t.nested_scales++;
            refused(&w, &t, "scales of scales");
        }
        mt_free(&t);
    }
}

/* Integers are decoded in whole groups, and codes of 4 bits in whole bytes. */
TEST(test_groups_of_integers_are_whole)
{
    static const struct {
        qc_form_kind kind;
        uint32_t block;
        uint64_t cols, good;
    } cases[] = {
        {QC_FORM_W4A16, 128, 96, 256}, {QC_FORM_W8A16, 64, 96, 128}, {QC_FORM_W4A16, 0, 7, 8}};
    qt_rng rng = qt_rng_start("groups");
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_weights t;
        mt_make(&t, &rng, cases[i].kind, 4, cases[i].cols, cases[i].block, 0);
        refused(&t.w, &t, "expected whole groups of");
        mt_free(&t);
        mt_make(&t, &rng, cases[i].kind, 4, cases[i].good, cases[i].block, 0);
        assert_int_equal(qc_weights_check(&t.w, t.codes_bytes, t.scales, 0, NULL), QC_OK);
        mt_free(&t);
    }
}

/* Integers beside mt_forms; their groups do not cross rows. */
static void make(mt_weights *t, qt_rng *rng, unsigned i, uint64_t rows, uint64_t cols)
{
    static const qc_form_kind ints[] = {QC_FORM_W4A16, QC_FORM_W8A16, QC_FORM_W8A8};
    const uint64_t even = cols + cols % 2;
    if (i < MT_FORMS)
        mt_make(t, rng, mt_forms[i].kind, rows, cols, mt_forms[i].block, mt_forms[i].nested);
    else if (i < MT_FORMS + 3)
        mt_make(t, rng, ints[i - MT_FORMS], rows, even, 0, 0);
    else
        mt_make(t, rng, QC_FORM_W4A16, rows, (cols + 31) / 32 * 32, 32, 0);
}
enum { FORMS = MT_FORMS + 4 };

TEST(test_values_are_those_of_dequantizing)
{
    static const qc_dtype dtypes[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    qt_rng rng = qt_rng_start("dequantize");
    for (unsigned round = 0; round < 12 * FORMS; round++) {
        mt_weights t;
        qc_error err = {0};
        /* Some of more rows than one thread takes at a time. */
        const uint64_t rows = 1 + qt_below(&rng, round % 3 ? 9 : 700);
        make(&t, &rng, round % FORMS, rows, 1 + qt_below(&rng, round % 3 ? 5000 : 300));
        const uint64_t cols = t.w.form.cols, first = qt_below(&rng, rows + 1);
        const uint64_t count = qt_below(&rng, rows - first + 1), n = count * cols;
        const qc_dtype dtype = dtypes[qt_below(&rng, 3)];
        const uint64_t bytes = n * qc_dtype_bits(dtype) / 8;
        float *values = mt_values(&t);
        unsigned char *want = qt_alloc(bytes + 1, 1), *out = qt_alloc(bytes + 2, 1);
        uint64_t overflow = 0;
        qc_quant_ops_for(QC_ISA_SCALAR)
            ->cast(values + first * cols, QC_DTYPE_F32, n, want, dtype, &overflow);
        out[bytes + 1] = 0xa5; /* and no alignment */
        if (qc_weights_dequantize(&t.w, first, count, out + 1, dtype, (unsigned)qt_below(&rng, 4),
                                  &err))
            fail_msg("%s", err.msg);
        QT_CHECK(memcmp(out + 1, want, bytes) == 0, "round %u: rows %llu to %llu of [%llu, %llu]",
                 round, (unsigned long long)first, (unsigned long long)(first + count),
                 (unsigned long long)rows, (unsigned long long)cols);
        QT_CHECK(out[bytes + 1] == 0xa5, "round %u writes behind the end", round);
        free(values);
        free(want);
        free(out);
        mt_free(&t);
    }
}

static void wrong(const qc_weights *w, uint64_t first, uint64_t rows, void *out, qc_dtype dtype,
                  const char *word)
{
    qc_error err = {0};
    assert_int_equal(qc_weights_dequantize(w, first, rows, out, dtype, 1, &err), QC_ERR_USAGE);
    QT_CHECK(strstr(err.msg, word) != NULL, "'%s' does not say '%s'", err.msg, word);
}

TEST(test_wrong_calls_are_answered)
{
    qt_rng rng = qt_rng_start("wrong");
    mt_weights t;
    float out[3 * 64];
    mt_make(&t, &rng, QC_FORM_NF4, 3, 64, 64, 0);
    qc_weights w = t.w;
    w.form.ops = NULL;
    wrong(NULL, 0, 1, out, QC_DTYPE_F32, "is NULL");
    wrong(&w, 0, 1, out, QC_DTYPE_F32, "form.ops is NULL");
    wrong(&t.w, 0, 3, NULL, QC_DTYPE_F32, "out is NULL");
    wrong(&t.w, 0, 3, out, QC_DTYPE_F64, "not F64");
    wrong(&t.w, 0, 3, out, (qc_dtype)1000, "unknown dtype");
    wrong(&t.w, 0, 4, out, QC_DTYPE_F32, "rows 0 to 4 are not in a weight of 3 rows");
    wrong(&t.w, 4, 0, out, QC_DTYPE_F32, "rows 4 to 4");
    wrong(&t.w, 1, UINT64_MAX, out, QC_DTYPE_F32, "not in a weight");
    assert_int_equal(qc_weights_dequantize(&t.w, 0, 3, out, QC_DTYPE_F32, 1025, NULL),
                     QC_ERR_USAGE);
    assert_int_equal(qc_weights_dequantize(&t.w, 3, 0, NULL, QC_DTYPE_F32, 0, NULL), QC_OK);
    qc_interrupt();
    assert_int_equal(qc_weights_dequantize(&t.w, 0, 3, out, QC_DTYPE_F32, 2, NULL),
                     QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    assert_int_equal(qc_weights_dequantize(&t.w, 0, 3, out, QC_DTYPE_F32, 2, NULL), QC_OK);
    assert_null(qc_form_ops_of((qc_form_kind)77));
    mt_free(&t);
}
