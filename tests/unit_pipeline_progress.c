/* What a conversion tells of its progress adds up to the bytes of the source, scales and state
 * included, for every form, number of threads and kind of output. */
#include "base/cpu.h"
#include "convert/commands.h"
#include "convert/pipeline.h"
#include "test_model.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

typedef struct {
    char root[64];
    char model[96], quantized[96], out[96];
} world;

static int setup(void **state)
{
    static world w;
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.model, sizeof w.model, "%s/model", w.root);
    (void)snprintf(w.quantized, sizeof w.quantized, "%s/quantized", w.root);
    (void)snprintf(w.out, sizeof w.out, "%s/out", w.root);
    *state = &w;
    return 0;
}

static int teardown(void **state)
{
    world *w = *state;
    test_remove(w->root);
    return 0;
}

/* An odd number of weights, an FP8 one with partial blocks, MXFP4 experts, something plain. */
static void write_model(const char *dir)
{
    static const qc_st_tensor rows[] = {
        {.name = "model.layers.0.mlp.experts.up_blocks",
         .dtype = QC_DTYPE_U8,
         .ndim = 4,
         .dims = {2, 8, 4, 16}},
        {.name = "model.layers.0.mlp.experts.up_scales",
         .dtype = QC_DTYPE_U8,
         .ndim = 3,
         .dims = {2, 8, 4}},
        {.name = "model.layers.0.self_attn.k_proj.weight",
         .dtype = QC_DTYPE_F8_E4M3,
         .ndim = 2,
         .dims = {130, 257}},
        {.name = "model.layers.0.self_attn.k_proj.weight_scale_inv",
         .dtype = QC_DTYPE_F32,
         .ndim = 2,
         .dims = {2, 3}},
        {.name = "model.layers.0.self_attn.q_proj.weight",
         .dtype = QC_DTYPE_BF16,
         .ndim = 2,
         .dims = {3, 65}},
        {.name = "model.norm.weight", .dtype = QC_DTYPE_F32, .ndim = 1, .dims = {7}},
    };
    enum { COUNT = sizeof rows / sizeof *rows };
    static const char config[] = "{\"model_type\": \"llama\"}";
    qc_error err = {0};
    qc_arena a;
    qc_st_tensor t[COUNT];
    qc_strbuf text;
    const char *path = NULL;
    uint64_t at = 0;
    qc_arena_init(&a);
    memcpy(t, rows, sizeof rows);
    for (int i = 0; i < COUNT; i++) {
        uint64_t bytes = 0;
        test_must(qc_shape_bytes(t[i].dims, t[i].ndim, t[i].dtype, &bytes, &err), &err);
        t[i].begin = at;
        t[i].end = at += bytes;
    }
    qc_strbuf_init(&text, 1u << 24);
    test_must(qc_dir_make(dir, &err), &err);
    test_must(qc_st_header_build(&text, t, COUNT, NULL, 0, &err), &err);
    for (uint64_t i = 0; i < at; i++)
        test_must(qc_strbuf_add(&text, "\x31", 1, &err), &err); /* finite in every dtype here */
    test_must(qc_path_join(&a, &path, dir, "model.safetensors", &err), &err);
    test_must(qc_file_put(path, text.data, text.len, &err), &err);
    test_must(qc_path_join(&a, &path, dir, "config.json", &err), &err);
    test_must(qc_file_put(path, config, sizeof config - 1, &err), &err);
    qc_strbuf_deinit(&text);
    qc_arena_deinit(&a);
}

static void add(void *ctx, uint64_t bytes)
{
    atomic_fetch_add((atomic_uint_fast64_t *)ctx, bytes);
}

/* words: of the options, up to MODEL and OUT. */
static void run(const char *words, const char *model, const char *out)
{
    char line[512], *argv[32] = {NULL}, *rest = NULL;
    int argc = 0;
    atomic_uint_fast64_t done = 0;
    qc_arena a;
    qc_options o;
    qc_checkpoint *m = NULL;
    qc_recipe recipe;
    qc_plan plan;
    qc_pipeline p;
    qc_output_dir d = QC_OUTPUT_DIR_NONE;
    qc_error err = {0};
    qc_isa isa;
    (void)snprintf(line, sizeof line, "qconv -q %s %s %s", words, model, out);
    for (char *w = strtok_r(line, " ", &rest); w; w = strtok_r(NULL, " ", &rest))
        argv[argc++] = w;
    qc_arena_init(&a);
    test_must(qc_options_parse(&o, &a, argc, argv, &err), &err);
    test_must(qc_checkpoint_open(&m, o.model, &err), &err);
    test_must(qc_recipe_make(&recipe, &a, m, &o, &err), &err);
    test_must(qc_plan_make(&plan, &a, m, &recipe, &o, &err), &err);
    test_must(qc_isa_select(&isa, &err), &err);
    test_must(qc_output_dir_begin(&d, &a, o.out, o.model, o.force, &err), &err);
    test_must(qc_pipeline_init(&p, &plan, &d, isa, o.threads, &err), &err);
    p.progress = add;
    p.progress_ctx = &done;
    test_must(qc_pipeline_run(&p, &err), &err);
    if (plan.source_bytes != m->tensor_bytes || done != plan.source_bytes)
        fail_msg("%s: %llu bytes in the source, %llu planned, %llu told", words,
                 (unsigned long long)m->tensor_bytes, (unsigned long long)plan.source_bytes,
                 (unsigned long long)done);
    qc_pipeline_deinit(&p);
    qc_output_dir_abort(&d);
    qc_checkpoint_close(m);
    qc_arena_deinit(&a);
}

static void convert(const char *words, const char *model, const char *out)
{
    char line[512], *argv[32] = {NULL}, *rest = NULL;
    int argc = 0;
    qc_arena a;
    qc_options o;
    qc_error err = {0};
    (void)snprintf(line, sizeof line, "qconv -q --force %s %s %s", words, model, out);
    for (char *w = strtok_r(line, " ", &rest); w; w = strtok_r(NULL, " ", &rest))
        argv[argc++] = w;
    qc_arena_init(&a);
    test_must(qc_options_parse(&o, &a, argc, argv, &err), &err);
    test_must(qc_cmd_convert(&o, &err), &err);
    qc_arena_deinit(&a);
}

static void progress_adds_up(void **state)
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
        convert(forms[i], w->model, w->quantized);
        run("--to bf16 --threads 2", w->quantized, w->out);
        run("--to keep --threads 2", w->quantized, w->out);
        run("--to bf16 --threads 2 --keep *q_proj*", w->quantized, w->out);
    }
    run("--to bf16 --threads 2", w->model, w->out);
    run("--to bf16 --threads 2 --keep *k_proj*", w->model, w->out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(progress_adds_up),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
