/* What eval writes it reads, and people can read it too. */
#include "convert/eval/eval.h"
#include "formats/file_io.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <math.h>

static qc_eval_result example(int compared)
{
    qc_eval_result r = {.path = "out",
                        .text = "a \"b\".txt",
                        .model_type = "llama",
                        .tokenizer = "bytes",
                        .device = "cpu",
                        .tokens = 206888,
                        .windows = 809,
                        .context = 256,
                        .predicted = 206079,
                        .perplexity = 3.00125,
                        .perplexity_error = 0.0071,
                        .seconds = 1.5};
    if (!compared)
        return r;
    r.compared = 1;
    r.against = "model";
    r.base_perplexity = 2.9754;
    r.base_perplexity_error = 0.007;
    r.difference = 0.0258;
    r.difference_error = 6.1e-4;
    r.log_ratio = 0.00864;
    r.log_ratio_error = 2.04e-4;
    r.kl_mean = 0.01;
    r.kl_error = 1e-4;
    r.kl_median = 4e-3;
    r.kl_99 = 0.08;
    r.kl_max = 1.25;
    r.top1 = 0.9712;
    r.top1_error = 3.7e-4;
    r.probability_rms = 0.0193;
    return r;
}

static void put(const char *path, const char *text)
{
    qc_error err = {0};
    test_must(qc_file_put(path, text, strlen(text), &err), &err);
}

TEST(round_trip)
{
    const char *root = *state;
    char path[128];
    (void)snprintf(path, sizeof path, "%s/r.json", root);
    for (int compared = 0; compared < 2; compared++) {
        qc_eval_result r = example(compared), back;
        qc_error err = {0};
        SCOPED(qc_arena) arena = {0};
        SCOPED(qc_strbuf) first = {.max = 1 << 16};
        SCOPED(qc_strbuf) second = {.max = 1 << 16};
        r.perplexity_error = compared ? (double)NAN : r.perplexity_error;
        test_must(qc_eval_json(&r, &first, &err), &err);
        put(path, first.data);
        test_must(qc_eval_read(&back, &arena, path, &err), &err);
        assert_string_equal(back.text, r.text);
        assert_string_equal(back.device, "cpu");
        assert_int_equal(back.compared, compared);
        assert_true(back.perplexity == r.perplexity && back.windows == 809);
        assert_true(compared ? isnan(back.perplexity_error) && back.kl_max == 1.25
                             : back.kl_max == 0.0 && back.against == NULL);
        test_must(qc_eval_json(&back, &second, &err), &err);
        assert_string_equal(first.data, second.data);
    }
}

/* The text of a good file with one part replaced. */
static void refuses(const char *root, const char *part, const char *by, const char *want)
{
    char path[128], text[4096], message[512];
    qc_eval_result r = example(1), back;
    qc_error err = {0};
    SCOPED(qc_arena) arena = {0};
    SCOPED(qc_strbuf) good = {.max = 1 << 16};
    test_must(qc_eval_json(&r, &good, &err), &err);
    const char *at = strstr(good.data, part);
    assert_non_null(at);
    (void)snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good.data), good.data, by,
                   at + strlen(part));
    (void)snprintf(path, sizeof path, "%s/bad.json", root);
    put(path, text);
    assert_int_equal(qc_eval_read(&back, &arena, path, &err), QC_ERR_INPUT);
    (void)snprintf(message, sizeof message, "%s: %s", path, want);
    assert_string_equal(err.msg, message);
}

TEST(bad_files)
{
    const char *numbers = "the numbers cannot come from 'qconv eval': expected a perplexity of at "
                          "least 1, a KL divergence of at least 0, and at least 1 token";
    const char *no_eval = "expected what 'qconv eval --json' writes, but 'command' is not 'eval'";
    refuses(*state, "\"eval\"", "\"bench\"", no_eval);
    refuses(*state, "\"command\"", "\"commando\"", no_eval);
    refuses(*state, "\"predicted\": 206079", "\"predicted\": 0", numbers);
    refuses(*state, "\"perplexity\": 3.00125", "\"perplexity\": null", numbers);
    refuses(*state, "\"kl_mean\": 0.01", "\"kl_mean\": -0.01", numbers);
    refuses(*state, "\"base_perplexity\": 2.9754", "\"base_perplexity\": null", numbers);
    refuses(*state, "\"against\": \"model\"", "\"against\": null",
            "base_perplexity: expected null, because 'against' is null");
}

TEST(text)
{
    qc_eval_result r = example(1);
    qc_strbuf out;
    qc_strbuf_init(&out, 1 << 16);
    assert_int_equal(qc_eval_text(&r, &out, NULL), QC_OK);
    assert_string_equal(
        out.data,
        "out (llama) against model over a \"b\".txt\n"
        "  206888 tokens (bytes), 809 windows of at most 256, 206079 predicted; cpu, 1.5 s\n"
        "\n"
        "  perplexity of OUT             3.0013  +- 0.0071\n"
        "  perplexity of MODEL           2.9754  +- 0.007\n"
        "  difference                    0.0258  +- 0.00061\n"
        "  difference, relative        0.86774%  +- 0.020577%\n"
        "  KL divergence, mean             0.01  +- 0.0001\n"
        "  KL divergence, median          0.004\n"
        "  KL divergence, 99%              0.08\n"
        "  KL divergence, largest          1.25\n"
        "  same most probable token      97.12%  +- 0.037%\n"
        "  change of probability, rms     1.93%\n");
    qc_strbuf_deinit(&out);
    r = example(0);
    r.perplexity_error = (double)NAN;
    qc_strbuf_init(&out, 1 << 16);
    assert_int_equal(qc_eval_text(&r, &out, NULL), QC_OK);
    assert_string_equal(
        out.data,
        "out (llama) over a \"b\".txt\n"
        "  206888 tokens (bytes), 809 windows of at most 256, 206079 predicted; cpu, 1.5 s\n"
        "\n"
        "  perplexity  3.0013  -\n");
    qc_strbuf_deinit(&out);
}

static int setup(void **state)
{
    static char root[64];
    test_folder(root, sizeof root);
    *state = root;
    return 0;
}

TEST_GROUP(setup, NULL)
