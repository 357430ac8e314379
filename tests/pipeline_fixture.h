/* For tests of the pipeline: a conversion made ready from the words of a command line. */
#ifndef QC_TESTS_PIPELINE_FIXTURE_H
#define QC_TESTS_PIPELINE_FIXTURE_H

#include "base/cpu.h"
#include "convert/pipeline.h"
#include "test_model.h"

/* Everything up to its pipeline, which has not run. */
typedef struct {
    char line[512]; /* the options point into it */
    qc_arena arena;
    qc_options options;
    qc_checkpoint *model;
    qc_recipe recipe;
    qc_plan plan;
    qc_output_dir dir;
    qc_pipeline pipeline;
} test_conversion;

QC_PRINTF(2, 3)
static inline void test_conversion_begin(test_conversion *c, const char *fmt, ...)
{
    const qc_options *o = &c->options;
    char *argv[TEST_WORDS_MOST];
    qc_error err = {0};
    qc_isa isa;
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(c->line, sizeof c->line, fmt, args);
    va_end(args);
    if (n <= 0 || (size_t)n >= sizeof c->line)
        _exit(99);
    c->dir = QC_OUTPUT_DIR_NONE;
    qc_arena_init(&c->arena);
    n = test_words(c->line, argv);
    test_must(qc_options_parse(&c->options, &c->arena, n, argv, &err), &err);
    test_must(qc_checkpoint_open(&c->model, o->call.model, &err), &err);
    test_must(qc_recipe_make(&c->recipe, &c->arena, c->model, &o->convert.plan.recipe, &err), &err);
    test_must(
        qc_plan_make(&c->plan, &c->arena, c->model, &c->recipe, &o->call, &o->convert.plan, &err),
        &err);
    test_must(qc_isa_select(&isa, &err), &err);
    test_must(
        qc_output_dir_begin(&c->dir, &c->arena, o->call.out, o->call.model, o->convert.force, &err),
        &err);
    test_must(qc_pipeline_init(&c->pipeline, &c->plan, &c->dir, isa, o->call.threads, &err), &err);
}

/* What it wrote goes as well. */
static inline void test_conversion_end(test_conversion *c)
{
    qc_pipeline_deinit(&c->pipeline);
    qc_output_dir_abort(&c->dir);
    qc_checkpoint_close(c->model);
    qc_arena_deinit(&c->arena);
}

#endif
