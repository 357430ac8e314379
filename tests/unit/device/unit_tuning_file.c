/* Tables of tuned choices as files: what is written is read again, what is wrong is refused in
 * words; when a choice is better, and for which rows of x. */
#include "convert/device/bench.h"
#include "convert/device/tuning_file.h"
#include "formats/file_io.h"
#include "tests/fixtures/fixture_files.h"
#include "tests/fixtures/quant_testing.h"

#include <math.h>

typedef struct {
    fx_dir dir;
    char path[FX_PATH_BYTES];
    qc_arena arena;
} place;

static int set_up(void **state)
{
    place *p = calloc(1, sizeof *p);
    fx_make_dir(&p->dir);
    fx_join(p->path, p->dir.path, "tuning.json");
    qc_arena_init(&p->arena);
    *state = p;
    return 0;
}

static int tear_down(void **state)
{
    place *p = *state;
    (void)unlink(p->path);
    (void)rmdir(p->dir.path);
    qc_arena_deinit(&p->arena);
    free(p);
    return 0;
}

static void put(const place *p, const char *text)
{
    qc_error err = {0};
    assert_int_equal(qc_file_put(p->path, text, strlen(text), &err), QC_OK);
}

/* ---- there and back ---- */

static const qc_matmul_path paths[] = {QC_MATMUL_GEMV, QC_MATMUL_MMA_884, QC_MATMUL_MMA_16816,
                                       QC_MATMUL_DEQUANT_GEMM, QC_MATMUL_WGMMA};
static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};

TEST_WITH(there_and_back, set_up, tear_down)
{
    place *p = *state;
    qt_rng rng = qt_rng_start("there_and_back");
    for (unsigned turn = 0; turn < 50; turn++) {
        uint32_t count = (uint32_t)(qt_next(&rng) % 20);
        qc_matmul_tuned rows[20];
        qc_tuning_times times[20];
        memset(rows, 0, sizeof rows);
        for (uint32_t i = 0; i < count; i++) {
            qc_matmul_tuned *r = &rows[i];
            r->sm = 90;
            r->multiprocessors = 132;
            r->kind = kinds[qt_next(&rng) % 3];
            r->n = qt_next(&rng) >> (11 + qt_next(&rng) % 53);
            r->k = qt_next(&rng) >> (11 + qt_next(&rng) % 53);
            r->m_least = 1 + (qt_next(&rng) >> (12 + qt_next(&rng) % 52));
            r->m_most = r->m_least + (qt_next(&rng) >> (12 + qt_next(&rng) % 52));
            r->choice.path = paths[qt_next(&rng) % 5];
            if (r->choice.path == QC_MATMUL_MMA_16816)
                r->choice.variant = (uint32_t)(qt_next(&rng) % QC_MATMUL_VARIANT_COUNT);
            r->choice.blocks = (uint32_t)(qt_next(&rng) % (QC_MATMUL_BLOCKS_MOST + 1));
            times[i] = (qc_tuning_times){1.5, i % 3 ? 0.25 : (double)NAN};
        }
        const qc_tuning t = {.gpu = "Made \"Up\" \\ 1",
                             .sm = 90,
                             .multiprocessors = 132,
                             .driver_version = 13000,
                             .runtime_version = 12090,
                             .program = "qconv 1.2.3",
                             .date = "2026-01-31T12:00:00Z",
                             .rows = rows,
                             .count = count,
                             .times = turn % 2 ? times : NULL};
        qc_tuning again;
        qc_error err = {0};
        SCOPED(qc_strbuf) text = {.max = 1u << 20};
        SCOPED(qc_strbuf) second = {.max = 1u << 20};
        assert_int_equal(qc_tuning_text(&t, &text, &err), QC_OK);
        put(p, text.data);
        assert_int_equal(qc_tuning_read(&again, &p->arena, p->path, &err), QC_OK);
        assert_string_equal(again.gpu, t.gpu);
        assert_string_equal(again.program, t.program);
        assert_string_equal(again.date, t.date);
        assert_string_equal(again.path, p->path);
        assert_int_equal(again.sm, 90);
        assert_int_equal(again.multiprocessors, 132);
        assert_int_equal(again.driver_version, 13000);
        assert_int_equal(again.runtime_version, 12090);
        assert_int_equal(again.count, count);
        for (uint32_t i = 0; i < count; i++) {
            const qc_matmul_tuned *a = &rows[i], *b = &again.rows[i];
            assert_true(
                a->sm == b->sm && a->multiprocessors == b->multiprocessors && a->kind == b->kind &&
                a->n == b->n && a->k == b->k && a->m_least == b->m_least &&
                a->m_most == b->m_most && a->choice.path == b->choice.path &&
                a->choice.variant == b->choice.variant && a->choice.blocks == b->choice.blocks);
        }
        /* And written again it is the same text. */
        again.times = t.times;
        assert_int_equal(qc_tuning_text(&again, &second, &err), QC_OK);
        assert_string_equal(text.data, second.data);
    }
}

/* ---- what is refused ---- */

#define HEAD                                                                                       \
    "{\"qconv_tuning\": 1, \"program\": \"qconv 1\", \"date\": \"\", \"gpu\": \"G\", \"sm\": 90, " \
    "\"multiprocessors\": 132, \"driver_version\": 0, \"runtime_version\": 0"
#define ROWS(row) HEAD ", \"rows\": [{" GOOD "}, {" row "}]}"
#define GOOD                                                                                       \
    "\"kind\": \"nf4\", \"n\": 64, \"k\": 128, \"m_least\": 1, \"m_most\": 8, \"path\": "          \
    "\"mma-16816\""
#define SHAPE "\"kind\": \"int8\", \"n\": 64, \"k\": 128, "

TEST_WITH(refused, set_up, tear_down)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"", "JSON byte 0"},
        {"[]", "expected a table of version 1"},
        {"{\"qconv_tuning\": 2}", "expected a table of version 1"},
        {"{\"qconv_tuning\": \"1\"}", "expected a table of version 1"},
        {"{\"qconv_tuning\": 1}", "program is missing; expected a string"},
        {HEAD "}", "rows is missing; expected an array"},
        {HEAD ", \"rows\": {}}", "rows is of kind object; expected an array"},
        {HEAD ", \"rows\": [1]}", "rows[0]: kind is missing"},
        {ROWS(""), "rows[1]: kind is missing"},
        {ROWS("\"kind\": 4"), "rows[1]: kind is of kind number; expected a string"},
        {ROWS("\"kind\": \"fp4\""),
         "rows[1]: kind is 'fp4'; expected one of nf4, int8, int8-blocks"},
        {ROWS("\"kind\": \"nf4\", \"n\": 1.5"), "rows[1]: n is 1.5; expected an integer"},
        {ROWS("\"kind\": \"nf4\", \"n\": -1"), "rows[1]: n is -1; expected an integer"},
        {ROWS("\"kind\": \"nf4\", \"n\": 1"), "rows[1]: k is missing"},
        {ROWS(SHAPE "\"m_least\": 0"), "m_least is 0; expected a number from 1 to"},
        {ROWS(SHAPE "\"m_least\": 5, \"m_most\": 4"), "m_most is 4; expected a number from 5 to"},
        {ROWS(SHAPE "\"m_least\": 1, \"m_most\": true"), "m_most is of kind"},
        {ROWS(SHAPE "\"m_least\": 1, \"m_most\": 4, \"path\": \"auto\""),
         "path is 'auto'; expected one of gemv, mma-884, mma-16816, wgmma, dequant-gemm"},
        {ROWS(SHAPE "\"m_least\": 1, \"m_most\": 4, \"path\": \"gemv\", \"variant\": \"tiles\""),
         "expected a variant for the path mma-16816 only, found one for gemv"},
        {ROWS(SHAPE "\"m_least\": 1, \"m_most\": 4, \"path\": \"wgmma\", \"variant\": \"tiles\""),
         "expected a variant for the path mma-16816 only, found one for wgmma"},
        {ROWS(GOOD ", \"variant\": \"fast\""),
         "variant is 'fast'; expected one of general, stream, tiles"},
        {ROWS(GOOD ", \"variant\": null"), "variant is of kind null"},
        {ROWS(GOOD ", \"blocks\": \"4\""), "blocks is of kind string"},
        {ROWS(GOOD ", \"blocks\": 0"), "blocks is 0; expected a number from 1 to 65535"},
        {ROWS(GOOD ", \"blocks\": 65536"), "blocks is 65536; expected a number from 1 to 65535"},
        {"{\"qconv_tuning\": 1, \"program\": \"\", \"date\": \"\", \"gpu\": 1}",
         "gpu is of kind number; expected a string"},
        {"{\"qconv_tuning\": 1, \"program\": \"\", \"date\": \"\", \"gpu\": \"\", \"sm\": "
         "4294967386}",
         "sm is 4294967386; expected a number from 1 to"},
    };
    place *p = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_tuning t;
        qc_error err = {0};
        put(p, cases[i].text);
        QT_CHECK(qc_tuning_read(&t, &p->arena, p->path, &err) == QC_ERR_INPUT &&
                     strstr(err.msg, cases[i].words) && strstr(err.msg, p->path) == err.msg,
                 "case %zu says '%s'", i, err.msg);
    }
    qc_tuning t;
    qc_error err = {0};
    (void)unlink(p->path);
    assert_int_equal(qc_tuning_read(&t, &p->arena, p->path, &err), QC_ERR_IO);
    /* What it does not know, and rows that overlap. */
    put(p, HEAD ", \"more\": [], \"rows\": [{" GOOD ", \"x\": {}}, {" GOOD ", \"us\": \"\"}]}");
    assert_int_equal(qc_tuning_read(&t, &p->arena, p->path, &err), QC_OK);
    assert_int_equal(t.count, 2);
    assert_int_equal(t.rows[1].choice.path, QC_MATMUL_MMA_16816);
    assert_int_equal(t.rows[1].choice.variant, 0);
}

TEST_WITH(too_many, set_up, tear_down)
{
    place *p = *state;
    qc_strbuf text;
    qc_tuning t;
    for (uint32_t more = 0; more < 2; more++) {
        qc_error err = {0};
        qc_strbuf_init(&text, 8u << 20);
        assert_int_equal(qc_strbuf_adds(&text, HEAD ", \"rows\": [", &err), QC_OK);
        for (uint32_t i = 0; i < QC_MATMUL_TUNED_MOST + more; i++)
            assert_int_equal(qc_strbuf_adds(&text, i ? ", {" GOOD "}" : "{" GOOD "}", &err), QC_OK);
        assert_int_equal(qc_strbuf_adds(&text, "]}", &err), QC_OK);
        put(p, text.data);
        assert_int_equal(qc_tuning_read(&t, &p->arena, p->path, &err), more ? QC_ERR_INPUT : QC_OK);
        assert_true(!more || strstr(err.msg, "expected at most 4096 rows, found 4097"));
        qc_strbuf_deinit(&text);
    }
}

TEST(suits)
{
    qc_tuning t = {.gpu = "G 1", .sm = 90, .multiprocessors = 132};
    qc_cuda_device d = {.name = "G 1", .sm = 90, .multiprocessors = 132};
    assert_true(qc_tuning_suits(&t, &d));
    t.sm = 89;
    assert_false(qc_tuning_suits(&t, &d));
    t.sm = 90;
    t.multiprocessors = 114;
    assert_false(qc_tuning_suits(&t, &d));
    t.multiprocessors = 132;
    t.gpu = "G 2"; /* memory of another speed */
    assert_false(qc_tuning_suits(&t, &d));
}

/* ---- what --tune decides ---- */

TEST(better)
{
    static const struct {
        qc_bench_spread ratio;
        int better;
    } cases[] = {{{1.2, 1.1, 1.3, 30}, 1},
                 {{1.2, 0.99, 1.3, 30}, 0}, /* more than a tenth of the rounds says otherwise */
                 {{1.2, 1.0, 1.3, 30}, 0},
                 {{1.005, 1.004, 1.006, 30}, 0}, /* not worth a row */
                 {{1.01, 1.001, 1.02, 5}, 1},
                 {{1.2, 1.1, 1.3, 4}, 0}, /* too few rounds */
                 {{0.5, 0.4, 0.6, 30}, 0},
                 {{0, 0, 0, 0}, 0},
                 {{NAN, NAN, NAN, 30}, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(qc_bench_is_better(cases[i].ratio), cases[i].better);
}

TEST(ranges)
{
    static const uint64_t m[] = {1, 2, 4, 16, 24, 4096};
    static const uint64_t expected[][2] = {{1, 1}, {2, 2}, {3, 4}, {9, 16}, {17, 24}, {2049, 4096}};
    const qc_bench_request q = {.m = m, .m_count = 6};
    for (size_t i = 0; i < 6; i++) {
        uint64_t least = 0, most = 0;
        qc_bench_tuned_range(&q, m[i], &least, &most);
        assert_int_equal(least, expected[i][0]);
        assert_int_equal(most, expected[i][1]);
    }
}

TEST(plan_texts)
{
    char text[QC_BENCH_PLAN_BYTES];
    assert_string_equal(qc_bench_plan_text(text, &(qc_bench_plan){"gemv", NULL, 1, 0}), "gemv");
    assert_string_equal(qc_bench_plan_text(text, &(qc_bench_plan){"mma-16816", "tiles", 4, 0}),
                        "mma-16816 tiles, K in 4");
    assert_string_equal(qc_bench_plan_text(text, &(qc_bench_plan){"mma-16816", "stream", 1, 264}),
                        "mma-16816 stream, 264 blocks");
    assert_string_equal(
        qc_bench_plan_text(text, &(qc_bench_plan){"dequant-gemm", "general", UINT32_MAX, 0}),
        "dequant-gemm general, K in 4294967295");
}

/* What was better is in the table, and nothing else. */
TEST_WITH(saved, set_up, tear_down)
{
    place *p = *state;
    static const uint64_t m[] = {1, 8};
    static const qc_bench_shape shapes[] = {
        {.model = "given", .layer = "64x128", .n = 64, .k = 128, .count = 0},
        {.model = "given", .layer = "8x8", .n = 8, .k = 8, .count = 0}};
    const qc_bench_request q = {
        .shapes = shapes, .shape_count = 2, .m = m, .m_count = 2, .tune = 1};
    qc_bench_tuned tuned[] = {
        {.shape = 0, .scheme = QC_BENCH_NF4, .m = 1, .choice = {QC_MATMUL_GEMV, 0, 4}},
        {.shape = 1,
         .scheme = QC_BENCH_INT8,
         .m = 8,
         .choice = {QC_MATMUL_GEMV, 0, 2},
         .better = 1},
        {.shape = 0,
         .scheme = QC_BENCH_INT8_BLOCK,
         .m = 1,
         .choice = {QC_MATMUL_MMA_16816, QC_MATMUL_TILES, 0},
         .better = 1}};
    qc_bench_result r = {.device = {.name = "G", .sm = 90, .multiprocessors = 132},
                         .tuned = tuned,
                         .tuned_count = 3};
    qc_error err = {0};
    qc_tuning t;
    SCOPED(qc_strbuf) text = {.max = 1u << 20};
    assert_int_equal(qc_bench_tuning_file(&q, &r, &p->arena, &text, &err), QC_OK);
    put(p, text.data);
    assert_int_equal(qc_tuning_read(&t, &p->arena, p->path, &err), QC_OK);
    assert_int_equal(t.count, 2);
    assert_int_equal(strlen(t.date), 20);
    const qc_matmul_tuned *a = &t.rows[0], *b = &t.rows[1];
    assert_true(a->kind == QC_FORM_INT8_ROWS && a->n == 8 && a->k == 8 && a->m_least == 5 &&
                a->m_most == 8 && a->choice.path == QC_MATMUL_GEMV && a->choice.blocks == 2);
    assert_true(b->kind == QC_FORM_INT8_BLOCKS && b->n == 64 && b->k == 128 && b->m_least == 1 &&
                b->m_most == 1 && b->choice.path == QC_MATMUL_MMA_16816 &&
                b->choice.variant == QC_MATMUL_TILES && b->choice.blocks == 0);
    assert_true(a->sm == 90 && a->multiprocessors == 132);
}
