/* What eval says to people; cli_eval has its JSON. */
#include "convert/eval/eval.h"
#include "tests/fixtures/test.h"

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
