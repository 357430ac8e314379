/* What a conversion tells of its progress adds up to the bytes of the source, scales and state
 * included, for every form, number of threads and kind of output. */
#include "tests/fixtures/pipeline_fixture.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_world.h"

static int setup(void **state)
{
    *state = world_in(test_folder);
    return 0;
}

/* Finite in every dtype here, and none too large for float16. */
static void fill(qc_strbuf *text, const qc_st_tensor *t)
{
    qc_error err = {0};
    for (uint64_t i = t->begin; i < t->end; i++)
        test_must(qc_strbuf_add(text, "\x31", 1, &err), &err);
}

/* An odd number of weights, an FP8 one with partial blocks, MXFP4 experts, something plain. */
static void write_model(const char *dir)
{
    static const test_tensor rows[] = {
        {"model.layers.0.mlp.experts.up_blocks", QC_DTYPE_U8, 4, {2, 8, 4, 16}},
        {"model.layers.0.mlp.experts.up_scales", QC_DTYPE_U8, 3, {2, 8, 4}},
        {"model.layers.0.self_attn.k_proj.weight", QC_DTYPE_F8_E4M3, 2, {130, 257}},
        {"model.layers.0.self_attn.k_proj.weight_scale_inv", QC_DTYPE_F32, 2, {2, 3}},
        {"model.layers.0.self_attn.q_proj.weight", QC_DTYPE_BF16, 2, {3, 65}},
        {"model.norm.weight", QC_DTYPE_F32, 1, {7}},
    };
    test_write_filled(dir, rows, sizeof rows / sizeof *rows, "{\"model_type\": \"llama\"}", fill);
}

static void add(void *ctx, uint64_t bytes)
{
    atomic_fetch_add((atomic_uint_fast64_t *)ctx, bytes);
}

/* words: of the options, up to MODEL and OUT. */
static void run(const char *words, const char *model, const char *out)
{
    atomic_uint_fast64_t done = 0;
    SCOPED(test_conversion) c;
    qc_error err = {0};
    test_conversion_begin(&c, "qconv -q %s %s %s", words, model, out);
    c.pipeline.progress = add;
    c.pipeline.progress_ctx = &done;
    test_must(qc_pipeline_run(&c.pipeline, &err), &err);
    if (c.plan.source_bytes != c.model->tensor_bytes || done != c.plan.source_bytes)
        fail_msg("%s: %llu bytes in the source, %llu planned, %llu told", words,
                 (unsigned long long)c.model->tensor_bytes, (unsigned long long)c.plan.source_bytes,
                 (unsigned long long)done);
}

static void convert(const char *words, const char *model, const char *out)
{
    qc_error err = {0};
    test_must(test_run_line(test_command, &err, "qconv -q --force %s %s %s", words, model, out),
              &err);
}

TEST(progress_adds_up)
{
    const world *w = *state;
    static const char *const forms[] = {"--to nf4 --requantize", "--to int8 --requantize",
                                        "--to int8 --block-size 32 --requantize", "--to nf4"};
    write_model(w->model);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        char words[128];
        for (unsigned threads = 1; threads < 4; threads += 2) {
            (void)snprintf(words, sizeof words, "%s --threads %u", forms[i], threads);
            run(words, w->model, w->out);
            (void)snprintf(words, sizeof words, "%s --compress none --threads %u", forms[i],
                           threads);
            run(words, w->model, w->out);
        }
        convert(forms[i], w->model, w->other);
        run("--to bf16 --threads 2", w->other, w->out);
        run("--to keep --threads 2", w->other, w->out);
        run("--to bf16 --threads 2 --keep *q_proj*", w->other, w->out);
    }
    run("--to bf16 --threads 2", w->model, w->out);
    run("--to bf16 --threads 2 --keep *k_proj*", w->model, w->out);
}

TEST_GROUP(setup, NULL)
