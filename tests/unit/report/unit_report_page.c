#include "convert/device/bench.h"
#include "convert/report/report_codes.h"
#include "convert/report/report_page.h"
#include "quant/quant_ops.h"
#include "tests/fixtures/fixture_files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- names ----------------------------------------------------------------------------------- */

static void kinds_are(const char *const *names, const char *const *want, uint32_t count)
{
    const char *kinds[8];
    qc_arena arena;
    qc_arena_init(&arena);
    assert_int_equal(qc_report_kind_names(kinds, names, count, &arena, NULL), QC_OK);
    for (uint32_t i = 0; i < count; i++)
        assert_string_equal(kinds[i], want[i]);
    qc_arena_deinit(&arena);
}

static void kind_names(void **state)
{
    (void)state;
    const char *const llama[] = {"model.layers.0.self_attn.q_proj.weight",
                                 "model.layers.12.self_attn.q_proj.weight",
                                 "model.layers.3.mlp.experts.17.up_proj.weight", "lm_head.weight"};
    const char *const llama_kinds[] = {"self_attn.q_proj", "self_attn.q_proj",
                                       "mlp.experts.*.up_proj", "lm_head"};
    kinds_are(llama, llama_kinds, 4);
    /* Two towers share less. */
    const char *const towers[] = {"model.text.layers.0.q.weight", "model.vision.blocks.1.q.weight"};
    const char *const tower_kinds[] = {"text.layers.*.q", "vision.blocks.*.q"};
    kinds_are(towers, tower_kinds, 2);
    const char *const bare[] = {"0", "1.weight", "a1.b2.weight"};
    const char *const bare_kinds[] = {"*", "*", "a1.b2"};
    kinds_are(bare, bare_kinds, 3);
    const char *const none[] = {"w.weight"};
    const char *const none_kinds[] = {"w"};
    kinds_are(none, none_kinds, 1);
}

static void layers(void **state)
{
    (void)state;
    uint32_t layer = 99;
    assert_int_equal(qc_report_layer_of("model.layers.12.mlp.experts.3.up.weight", &layer), 0);
    assert_int_equal(layer, 12);
    assert_int_equal(qc_report_layer_of("7.weight", &layer), 0);
    assert_int_equal(layer, 7);
    assert_int_equal(qc_report_layer_of("h1.x2y.weight", &layer), 1);
    assert_int_equal(qc_report_layer_of("a.99999999999999999999.b", &layer), 1);
    assert_int_equal(qc_report_layer_of("", &layer), 1);
}

static void places(void **state)
{
    (void)state;
    char out[QC_REPORT_PLACE_BYTES];
    const uint64_t dims[] = {4, 3, 5};
    assert_string_equal(qc_report_place(out, dims, 3, 4 * 15 - 1), "[3, 2, 4]");
    assert_string_equal(qc_report_place(out, dims + 1, 2, 7), "[1, 2]");
    assert_string_equal(qc_report_place(out, dims, 0, 0), "[]");
    uint64_t large[QC_MAX_DIMS];
    for (unsigned i = 0; i < QC_MAX_DIMS; i++)
        large[i] = 1;
    assert_string_equal(qc_report_place(out, large, QC_MAX_DIMS, 0), "[0, 0, 0, 0, 0, 0, 0, 0]");
}

/* ---- codes ----------------------------------------------------------------------------------- */

static void counting(void **state)
{
    (void)state;
    /* Three bytes v for v below 100 and one of any other; 7919 is prime, so all places are met. */
    unsigned char bytes[456];
    uint64_t counts[256] = {0};
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i * 7919 % sizeof bytes] = (unsigned char)(i < 300 ? i / 3 : i - 200);
    qc_report_count_bytes(bytes, sizeof bytes, counts);
    qc_report_count_bytes(bytes, 0, counts);
    for (unsigned v = 0; v < 256; v++)
        assert_int_equal(counts[v], v < 100 ? 3 : 1);
    qc_report_codes codes = {.total = 0};
    uint64_t two[256] = {[0x3f] = 2, [0xff] = 1};
    qc_report_fold_nibbles(two, &codes);
    assert_int_equal(codes.total, 6);
    assert_int_equal(codes.counts[3], 2);
    assert_int_equal(codes.counts[15], 4);
}

static void bins(void **state)
{
    (void)state;
    double shares[256] = {0}, sum = 0.0;
    for (int i = -128; i < 128; i++)
        shares[i & 255] = (double)(i + 129);
    for (unsigned b = 0; b < QC_REPORT_BINS; b++)
        sum += qc_report_bin(shares, b);
    assert_true(sum == 256.0 * 257.0 / 2.0); /* every code in one bin */
    assert_int_equal(qc_report_bin_first(0), -127);
    assert_int_equal(qc_report_bin_first(8), -7);
    assert_int_equal(qc_report_bin_first(16), 113);
    assert_true(qc_report_bin(shares, 8) == 15.0 * 129.0);
}

static void entropy(void **state)
{
    (void)state;
    qc_report_codes codes = {.total = 0};
    double expected[256] = {0};
    assert_true(qc_report_entropy(&codes) == 0.0);
    for (unsigned i = 0; i < 16; i++)
        codes.counts[i] = 5;
    codes.total = 80;
    assert_true(fabs(qc_report_entropy(&codes) - 4.0) < 1e-12);
    expected[0] = 1.0;
    assert_true(fabs(qc_report_distance(&codes, expected) - 15.0 / 16.0) < 1e-12);
    codes = (qc_report_codes){.counts = {7}, .total = 7};
    assert_true(qc_report_entropy(&codes) == 0.0);
    assert_true(qc_report_distance(&codes, expected) == 0.0);
}

static uint64_t seed = 1;

static double uniform(void)
{
    uint64_t z = seed += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 12) + 0.5) / 4503599627370496.0;
}

#define DRAWS 262144u

/* The quantizers themselves on normal values. */
static void normal_weights(void **state)
{
    (void)state;
    static float values[DRAWS];
    static unsigned char codes[DRAWS];
    static float absmax[DRAWS / 32];
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    const uint32_t blocks[] = {32, 64, 4096};
    for (size_t i = 0; i < DRAWS; i++)
        values[i] = (float)(sqrt(-2.0 * log(uniform())) * cos(6.283185307179586 * uniform()));
    for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++) {
        uint64_t counts[256] = {0};
        qc_report_codes found = {.total = 0};
        qc_piece_sums sums;
        double want[256] = {0}, sum = 0.0;
        ops->nf4_quantize(values, QC_DTYPE_F32, DRAWS, blocks[b], codes, absmax, NULL, &sums);
        qc_report_count_bytes(codes, DRAWS / 2, counts);
        qc_report_fold_nibbles(counts, &found);
        qc_report_expect(&qc_form_nf4, blocks[b], want);
        for (unsigned i = 0; i < 16; i++) {
            double share = (double)found.counts[i] / DRAWS;
            sum += want[i];
            /* Five standard deviations, and what is common to a block. */
            assert_true(fabs(share - want[i]) < 5.0 * sqrt(want[i] / DRAWS) + 0.01 * want[i]);
        }
        assert_true(fabs(sum - 1.0) < 1e-9);
        assert_true(qc_report_distance(&found, want) < 0.012); /* blocks of 64 and 32: 0.05 apart */

        memset(&found, 0, sizeof found);
        ops->int8_blocks_quantize(values, QC_DTYPE_F32, DRAWS, blocks[b], (int8_t *)codes, absmax,
                                  NULL, &sums);
        qc_report_count_bytes(codes, DRAWS, found.counts);
        found.total = DRAWS;
        qc_report_expect(&qc_form_int8_blocks, blocks[b], want);
        assert_true(qc_report_distance(&found, want) < 0.02);
        assert_true(want[128] == 0.0);
        assert_true(fabs(want[127] - want[129]) < 1e-9); /* +127 and -127 */

        const qc_form_ops *const integers[] = {&qc_form_w4a16, &qc_form_w8a16, &qc_form_w8a8};
        for (size_t f = 0; f < 3; f++) {
            const qc_form form = {
                .ops = integers[f], .block_elems = blocks[b], .scale_dtype = QC_DTYPE_F32};
            const qc_form_out out = {.codes = codes, .absmax = absmax};
            form.ops->quantize(ops, &form, values, QC_DTYPE_F32, DRAWS, &out, &sums);
            memset(&found, 0, sizeof found);
            for (size_t i = 0; i < DRAWS; i++) {
                int code = qc_form_code_at(form.ops, codes, i);
                found.counts[form.ops->bits == 4 ? code : (code - form.ops->zero) & 255]++;
            }
            found.total = DRAWS;
            qc_report_expect(form.ops, blocks[b], want);
            assert_true(qc_report_distance(&found, want) < 0.02);
        }
    }
    double alone[256];
    qc_report_expect(&qc_form_nf4, 1, alone); /* a value that is its own scale */
    assert_true(alone[0] == 0.5 && alone[15] == 0.5 && alone[7] == 0.0);
}

/* ---- drawing --------------------------------------------------------------------------------- */

static void axes(void **state)
{
    (void)state;
    double ticks[8];
    qc_report_axis a = qc_report_axis_of(0.008, 0.0115);
    assert_false(a.log);
    assert_true(a.low < 0.008 && a.high > 0.0115);
    assert_true(qc_report_axis_share(&a, a.low) == 0.0 && qc_report_axis_share(&a, a.high) == 1.0);
    unsigned n = qc_report_axis_ticks(&a, ticks, 8);
    assert_in_range(n, 2, 6);
    for (unsigned i = 0; i < n; i++)
        assert_true(ticks[i] >= a.low && ticks[i] <= a.high);
    a = qc_report_axis_of(5e-5, 0.0115);
    assert_true(a.log);
    n = qc_report_axis_ticks(&a, ticks, 8);
    assert_in_range(n, 2, 8);
    assert_true(fabs(ticks[0] - 1e-4) < 1e-12);
    assert_true(qc_report_axis_share(&a, 0.0) == 0.0);
    a = qc_report_axis_of(0.0, 0.0); /* no error anywhere */
    assert_true(a.high > a.low && !a.log);
    a = qc_report_axis_of(0.0, 0.01); /* one of them without */
    assert_true(a.low == 0.0 && a.high > 0.01 && !a.log);
    a = qc_report_axis_of(0.0085, 0.0085); /* all alike */
    assert_true(a.high > 0.0085 && a.low < 0.0085);
}

static void writing(void **state)
{
    (void)state;
    qc_strbuf out;
    qc_strbuf_init(&out, 4096);
    qc_arena arena;
    qc_arena_init(&arena);
    const qc_call call = {.arena = &arena};
    const qc_report r = {.call = &call, .page = &out};
    assert_string_equal(qc_page_safe(&r, "a<b>&\"c\"\x01"), "a&lt;b&gt;&amp;&quot;c&quot;?");
    assert_string_equal(qc_page_safe(&r, ""), "");
    qc_page_table(&r, "kind|.name in|a &#215; b");
    assert_string_equal(out.data, "<table>\n<tr><th>kind</th><th class=\"name\">in</th><th>"
                                  "a &#215; b</th></tr>\n");
    size_t before = out.len;
    for (uint32_t form = 0; form < 7; form++)
        qc_page_mark(&r, form, 1.0, 2.0, "t");
    assert_int_equal(qc_strbuf_status(&out, NULL), QC_OK);
    /* As many shapes as characters, each closed. */
    const char *at = out.data + before;
    for (unsigned i = 0; i < 7; i++) {
        at = strstr(at, "<title>t</title></");
        assert_non_null(at);
        at++;
    }
    for (uint32_t i = 0; i < 6; i++)
        for (uint32_t k = 0; k < i; k++)
            assert_string_not_equal(qc_report_mark_text(i), qc_report_mark_text(k));
    qc_strbuf_deinit(&out);
    qc_strbuf_init(&out, 8); /* too small: the first failure stays */
    assert_string_equal(qc_page_safe(&r, "much longer than that"), "");
    qc_status first = qc_strbuf_status(&out, NULL);
    assert_int_not_equal(first, QC_OK);
    QC_PAGE(&r, "x");
    assert_int_equal(qc_strbuf_status(&out, NULL), first);
    qc_strbuf_deinit(&out);
    qc_arena_deinit(&arena);
}

/* ---- results of bench ------------------------------------------------------------------------ */

/* What bench writes is read: all of it, and what was not measured. */
static void bench_file(void **state)
{
    (void)state;
    static const qc_bench_shape shapes[] = {
        {.model = "Tiny", .layer = "q, o", .n = 64, .k = 128, .count = 2}};
    static const uint64_t some_m[] = {1, 16};
    static const qc_bench_scheme schemes[] = {QC_BENCH_INT8_BLOCK};
    const qc_bench_request q = {.shapes = shapes,
                                .shape_count = 1,
                                .m = some_m,
                                .m_count = 2,
                                .schemes = schemes,
                                .scheme_count = 1};
    qc_bench_row rows[] = {{.scheme = QC_BENCH_INT8_BLOCK,
                            .m = 1,
                            .path = "gemv",
                            .us = {0.5, 0.4, 0.6, 30},
                            .dense = {1.5, 1, 2, 30},
                            .ratio = {3, 2, 4, 15}},
                           {.scheme = QC_BENCH_INT8_BLOCK, .m = 16, .path = "mma-884"}};
    const qc_bench_result b = {.device = {.name = "Made Up 1", .build = "none"},
                               .roof = {.copy_gbps = {1000, 900, 1100, 30}},
                               .rows = rows,
                               .row_count = 2};
    const qc_stored_weight stored = {
        .stored_as = QC_SCHEME_INT8_BLOCKS, .ndim = 2, .dims = {64, 128}};
    qc_report_form form = {.scheme = "int8-block"};
    qc_report_weight weight = {.stored = &stored};
    qc_arena arena;
    qc_strbuf text;
    fx_dir dir;
    char path[FX_PATH_BYTES];
    qc_error err = {0};
    fx_make_dir(&dir);
    fx_join(path, dir.path, "b.json");
    qc_arena_init(&arena);
    qc_strbuf_init(&text, 1 << 20);
    const qc_call call = {.arena = &arena};
    qc_report r = {
        .call = &call, .forms = &form, .form_count = 1, .weights = &weight, .weight_count = 1};
    assert_int_equal(qc_bench_json(&q, &b, &text, NULL), QC_OK);
    assert_int_equal(qc_file_put(path, text.data, text.len, NULL), QC_OK);
    assert_int_equal(qc_report_bench_read(&r, path, &err), QC_OK);
    assert_string_equal(r.bench->device, "Made Up 1");
    assert_true(r.bench->copy_gbps == 1000.0 && r.bench->gemm_tflops == 0.0);
    assert_int_equal(r.bench->row_count, 2);
    const qc_report_speed *row = r.bench->rows;
    assert_string_equal(row->scheme, "int8-blocks");
    assert_string_equal(row->path, "gemv");
    assert_true(row->n == 64 && row->k == 128 && row->m == 1 && row->here);
    assert_true(row->us == 0.5 && row->dense_us == 1.5 && row->ratio == 3.0 && row->of_roof > 0);
    assert_true(row[1].m == 16 && row[1].us == 0.0 && row[1].ratio == 0.0);
    assert_int_equal(r.bench->here, 2);
    form.scheme = "int8";
    assert_int_equal(qc_report_bench_read(&r, path, &err), QC_OK);
    assert_int_equal(r.bench->here, 0);
    qc_strbuf_deinit(&text);
    qc_arena_deinit(&arena);
    test_remove(dir.path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kind_names), cmocka_unit_test(layers),         cmocka_unit_test(places),
        cmocka_unit_test(counting),   cmocka_unit_test(bins),           cmocka_unit_test(entropy),
        cmocka_unit_test(axes),       cmocka_unit_test(normal_weights), cmocka_unit_test(writing),
        cmocka_unit_test(bench_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
