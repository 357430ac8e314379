#include "convert/fit/fit_report.h"
#include "formats/json_strict.h"
#include "tests/fixtures/fit_report_fixture.h"
#include "tests/fixtures/test.h"

#include <math.h>

typedef struct {
    fit_fixture f;
    qc_arena arena;
    qc_strbuf out;
} testing;

static int before(void **state)
{
    testing *t = test_calloc(1, sizeof *t);
    qc_arena_init(&t->arena);
    qc_strbuf_init(&t->out, 1000000);
    fit_fixture_make(&t->f, &t->arena);
    *state = t;
    return 0;
}

static int after(void **state)
{
    testing *t = *state;
    qc_strbuf_deinit(&t->out);
    qc_arena_deinit(&t->arena);
    test_free(t);
    return 0;
}

static void bar_is(testing *t, const qc_fit_device *d, unsigned cells, const char *want)
{
    qc_strbuf_deinit(&t->out);
    qc_strbuf_init(&t->out, 1000);
    qc_fit_bar(d, cells, QC_BARS_ASCII, &t->out);
    assert_string_equal(t->out.data, want);
}

TEST_WITH(bars, before, after)
{
    testing *t = *state;
    qc_fit_device d = {.budget_bytes = 100,
                       .weight_bytes = 50,
                       .kv_bytes = 20,
                       .workspace_bytes = 10,
                       .context_bytes = 10};
    bar_is(t, &d, 10, "[#####kkwc.]");
    d = (qc_fit_device){.budget_bytes = 100};
    bar_is(t, &d, 10, "[..........]");
    d.weight_bytes = 100;
    bar_is(t, &d, 10, "[##########]");
    d.weight_bytes = 300; /* over the budget: full, no longer */
    d.kv_bytes = 50;
    bar_is(t, &d, 10, "[##########]");
    d = (qc_fit_device){.budget_bytes = 0, .weight_bytes = 1};
    bar_is(t, &d, 10, "[##########]");
    d = (qc_fit_device){
        .budget_bytes = UINT64_MAX, .weight_bytes = UINT64_MAX, .kv_bytes = UINT64_MAX};
    bar_is(t, &d, 4, "[####]");
    /* Rounding is of the sums: every part of 0.4 cells, and still 2 cells of 5 parts. */
    d = (qc_fit_device){.budget_bytes = 100,
                        .weight_bytes = 4,
                        .kv_bytes = 4,
                        .workspace_bytes = 4,
                        .context_bytes = 4};
    bar_is(t, &d, 10, "[kc........]");
}

TEST_WITH(blocks, before, after)
{
    testing *t = *state;
    qc_fit_device d = {.budget_bytes = 4, .weight_bytes = 1, .kv_bytes = 1};
    qc_fit_bar(&d, 4, QC_BARS_BLOCKS, &t->out);
    assert_string_equal(t->out.data, "[\xe2\x96\x88\xe2\x96\x93\xc2\xb7\xc2\xb7]");
}

TEST_WITH(text, before, after)
{
    testing *t = *state;
    t->f.report.model = "a\033[1mb";
    assert_int_equal(qc_fit_report_text(&t->f.report, QC_BARS_ASCII, &t->out, NULL), QC_OK);
    assert_string_equal(
        t->out.data,
        "a?[1mb as nf4 on 40GB+20GB+cpu: does not fit 8,192 tokens with prompts read whole; "
        "with --prefill 2048 it fits 150,000\n"
        "\n"
        "  weights    39.0 GB in 70,000,000,000 parameters, 4.457 bits each\n"
        "  files      39.0 GB, uncompressed\n"
        "  nf4        35.0 GB in 560 tensors\n"
        "  keep       4.00 GB in 163 tensors\n"
        "  KV cache   10.0 GB: context 8,192, batch 1, 328 KB a token\n"
        "\n"
        "  device    budget  weights  KV cache  workspace  CUDA context      free  short by  "
        "layers\n"
        "  cuda:0   36.0 GB  18.0 GB   9.00 GB    3.00 GB        500 MB   5.50 GB               "
        "0-1\n"
        "  cuda:1   18.0 GB  20.0 GB   1.00 GB        0 B           0 B       0 B   3.00 GB      "
        "10\n"
        "  cpu     no limit  1.00 GB       0 B        0 B           0 B  no limit                 "
        "-\n"
        "\n"
        "  36.0 GB is 90% of 40.0 GB (--margin)\n"
        "  40GB is taken as 40.0 GB; cards sold with 40GB have 42.3 GB (A100-40GB): name the card "
        "in "
        "--vram\n"
        "  18.0 GB is 90% of 20.0 GB (--margin)\n"
        "  20GB is taken as 20.0 GB; cards sold with 20GB have 20.8 GB (A4500) to 20.8 GB "
        "(RTX4000-Ada): name the card in --vram\n"
        "\n"
        "  cuda:0  [########################kkkkkkkkkkkkwwwwc.......] 30.5 GB of 36.0 GB\n"
        "  cuda:1  [########################]                         21.0 GB of 18.0 GB (!)\n"
        "          # weights k KV cache w workspace c CUDA context . free\n"
        "\n"
        "  longest context at batch 1      131,072 tokens, the model's limit; prompts are read "
        "whole, "
        "as transformers does by default\n"
        "  with --prefill 2048             150,000 tokens; prompts are read 2,048 tokens at a time "
        "(vLLM's --max-num-batched-tokens)\n"
        "  largest batch at this context   none fits\n"
        "  spilled to the host: 1.00 GB cross its link for every token, which takes at least 0.04 "
        "s\n"
        "\n"
        "short by 3.00 GB on cuda:1; would fit with --context 4096, or with 3 cards\n");
}

/* A model that fits and has no cache says nothing of either. */
TEST_WITH(encoder, before, after)
{
    testing *t = *state;
    t->f.fit.fits = 1;
    t->f.report.generates = 0;
    t->f.fit.transfer_bytes_per_token = 0;
    assert_int_equal(qc_fit_report_text(&t->f.report, QC_BARS_ASCII, &t->out, NULL), QC_OK);
    assert_non_null(strstr(t->out.data, ": fits\n"));
    assert_null(strstr(t->out.data, "short by 3"));
    assert_null(strstr(t->out.data, "longest context"));
    assert_null(strstr(t->out.data, "a token"));
    assert_null(strstr(t->out.data, "spilled"));
    qc_strbuf_deinit(&t->out);
    qc_strbuf_init(&t->out, 1000000);
    assert_int_equal(qc_fit_report_json(&t->f.report, &t->out, NULL), QC_OK);
    assert_non_null(strstr(t->out.data, "\"max_context\": null"));
    assert_non_null(strstr(t->out.data, "\"short_device\": null"));
}

TEST_WITH(choice, before, after)
{
    testing *t = *state;
    qc_auto_result a = {.rows = qc_candidates_of(&(qc_recipe_options){.to = QC_TO_AUTO}),
                        .predicted = 0.5,
                        .uniform = {4.0, (double)NAN, 0.04, (double)NAN, (double)NAN, (double)NAN,
                                    (double)NAN, (double)NAN, 0.0},
                        .uniform_fits = {1, 0, 0, 0},
                        .measured = 0,
                        .count_chosen = {2, 0, 3, 0},
                        .bytes_chosen = {10, 0, 20, 0}};
    t->f.report.chosen = &a;
    assert_int_equal(qc_fit_report_text(&t->f.report, QC_BARS_ASCII, &t->out, NULL), QC_OK);
    assert_non_null(strstr(t->out.data, "  error      0.5 predicted, 12% of nf4's: nf4 4, int8 "
                                        "0.04 (does not fit), 16 bit 0 (does not fit)\n"
                                        "             It has no unit"));
    assert_non_null(strstr(t->out.data, "             There are no weights to measure"));
    qc_strbuf_deinit(&t->out);
    qc_strbuf_init(&t->out, 1000000);
    assert_int_equal(qc_fit_report_json(&t->f.report, &t->out, NULL), QC_OK);
    assert_non_null(strstr(t->out.data, "\"nf4\": {\"predicted_error\": 4.0, \"fits\": true}"));
    assert_non_null(strstr(t->out.data, "\"int8\": {\"tensors\": 3, \"bytes\": 20}"));
    assert_null(strstr(t->out.data, "nf4-32"));
}

TEST_WITH(json, before, after)
{
    testing *t = *state;
    t->f.report.model = "a\"\\b";
    assert_int_equal(qc_fit_report_json(&t->f.report, &t->out, NULL), QC_OK);
    assert_non_null(strstr(t->out.data, "\"model\": \"a\\\"\\\\b\""));
    assert_non_null(strstr(t->out.data, "\"weight_bytes\": 39000000000,\n"));
    assert_non_null(strstr(t->out.data, "\"file_bytes\": 39000123456,\n"));
    assert_non_null(strstr(t->out.data, "\"fits\": false,\n"));
    assert_non_null(strstr(t->out.data, "\"short_device\": \"cuda:1\""));
    assert_non_null(strstr(t->out.data, "\"total_bytes\": null, \"budget_bytes\": null"));
    assert_non_null(strstr(t->out.data, "\"layers\": 1, \"first_layer\": 10}"));
    assert_non_null(strstr(t->out.data, "\"layers\": 0, \"first_layer\": null}"));
    assert_non_null(
        strstr(t->out.data,
               "\"nf4\": {\"tensors\": 560, \"weights\": 68000000000, \"bytes\": 35000000000}"));
    assert_non_null(strstr(t->out.data, "\"lm_head\": \"cpu\""));
    assert_non_null(strstr(t->out.data, "\"max_batch\": 0,\n"));
}

TEST(locale)
{
    /* Not a terminal here, whatever the locale says. */
    setenv("LC_ALL", "C.UTF-8", 1);
    assert_int_equal(qc_bar_style_of_console(), QC_BARS_ASCII);
}

/* ---- sums over a plan ---- */

enum { JOBS = 7 };

TEST_WITH(schemes, before, after)
{
    testing *t = *state;
    qc_checkpoint_tensor source[JOBS] = {
        {.name = "a.weight", .dtype = QC_DTYPE_BF16, .ndim = 2, .dims = {64, 64}},
        {.name = "b.weight", .dtype = QC_DTYPE_BF16, .ndim = 2, .dims = {64, 64}},
        {.name = "norm.weight", .dtype = QC_DTYPE_F32, .ndim = 1, .dims = {64}},
        {.name = "model.rotary_emb.inv_freq", .dtype = QC_DTYPE_F32, .ndim = 1, .dims = {64}},
        {.name = "x_blocks", .dtype = QC_DTYPE_U8, .ndim = 2, .dims = {8, 16}, .bytes = 128},
        {.name = "x_scales", .dtype = QC_DTYPE_U8, .ndim = 1, .dims = {8}},
        {.name = "c.weight", .dtype = QC_DTYPE_U8, .ndim = 2, .dims = {50, 1}},
    };
    qc_stored_weight stored = {.stored_as = QC_SCHEME_NF4, .ndim = 2, .dims = {10, 10}};
    qc_recipe_entry entries[JOBS] = {
        {.role = QC_ROLE_LINEAR},
        {.role = QC_ROLE_LINEAR},
        {.role = QC_ROLE_NORM},
        {.role = QC_ROLE_OTHER},
        {.role = QC_ROLE_PACKED},
        {.role = QC_ROLE_STATE},
        {.role = QC_ROLE_PACKED, .stored = &stored},
    };
    static const uint64_t bytes[JOBS] = {2048, 2560, 256, 512, 128, 8, 50};
    qc_job jobs[JOBS];
    qc_output outputs[JOBS];
    uint64_t elems[JOBS];
    qc_checkpoint model;
    memset(jobs, 0, sizeof jobs);
    memset(outputs, 0, sizeof outputs);
    memset(&model, 0, sizeof model);
    model.tensors = source;
    model.tensor_count = JOBS;
    for (uint32_t i = 0; i < JOBS; i++) {
        jobs[i].source = i;
        jobs[i].entry = &entries[i];
        jobs[i].scheme = i < 2 ? QC_SCHEME_NF4 : QC_SCHEME_KEEP;
        outputs[i] =
            (qc_output){i & 0xffffff, i == 1 ? QC_ROLE_TENSOR_ABSMAX : QC_ROLE_TENSOR_MAIN};
        jobs[i].first_output = i;
        jobs[i].roles = (uint16_t)(1u << outputs[i].role);
        jobs[i].elems = 2 * bytes[i]; /* NF4 */
        jobs[i].form = qc_scheme_form(jobs[i].scheme, jobs[i].elems, i == 0 ? 64 : 32, 1);
        jobs[i].scales = bytes[i];
        elems[i] = bytes[i] / (qc_dtype_bits(source[i].dtype) / 8);
        jobs[i].dims = &elems[i];
        jobs[i].ndim = 1;
        jobs[i].name = source[i].name;
    }
    qc_plan plan = {
        .model = &model, .jobs = jobs, .job_count = JOBS, .outputs = outputs, .tensor_count = JOBS};
    qc_fit_report *r = &t->f.report;
    assert_int_equal(qc_fit_sum_schemes(r, &plan, NULL), QC_OK);
    assert_int_equal(r->scheme_count, 3);
    assert_string_equal(r->schemes[0].name, "nf4-32");
    assert_string_equal(r->schemes[1].name, "nf4");
    assert_string_equal(r->schemes[2].name, "keep");
    assert_true(r->schemes[0].bytes == 2560 && r->schemes[0].weights == 4096);
    assert_true(r->schemes[2].bytes == 256 + 512 + 128 + 8 + 50 && r->schemes[2].tensors == 5);
    assert_true(r->schemes[2].weights == 64 + 256 + 100);
    assert_true(r->parameters == 2 * 4096 + 64 + 256 + 100);
}
