/* For tests of calibrated weights: a double of what calibrates, with codes and scales that are made
 * up, and known. It takes the place of convert/calibrate.h's functions. After cmocka.h. */
#ifndef QC_TESTS_CALIBRATED_FIXTURE_H
#define QC_TESTS_CALIBRATED_FIXTURE_H

#include "convert/calibrate_stage.h"
#include "fault_fixture.h"

#include <string.h>

#define TEST_STAGING ".qconv-partial"

typedef struct {
    char root[64], model[96], out[96], text[96];
} world;

/* ---- the double ---- */

static struct {
    unsigned stop_after; /* weights; then it fails */
    unsigned made, runs;
    const char *leave; /* the weight of this name is left */
    const char *digest;
    /* Other codes and scales than made up ones; NULL: those. */
    void (*change)(qc_calibrated_arrays *a, const qc_plan *plan, uint32_t job);
} calibrator;

static uint32_t draw(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* The same for the same job, always. */
static void make_up(qc_calibrated_arrays *a, const qc_plan *plan, uint32_t job)
{
    const qc_job *j = &plan->jobs[job];
    qc_error err = {0};
    uint32_t state = 77 + job;
    test_must(qc_calibrated_alloc(a, plan, job, &err), &err);
    uint8_t *codes = a->codes;
    for (uint64_t i = 0; i < a->codes_bytes; i++)
        codes[i] = (uint8_t)draw(&state);
    if (j->scheme == QC_SCHEME_NF4 && j->elems % 2)
        codes[a->codes_bytes - 1] = (uint8_t)((codes[a->codes_bytes - 1] & 0xf0u) | 7u);
    for (uint64_t i = 0; !a->groups && i < a->scales; i++)
        a->absmax[i] = (float)draw(&state) * 0x1p-24f;
    if (!a->groups)
        return;
    a->nested_offset = j->scheme == QC_SCHEME_NF4 ? 0.0f : 0.5f;
    for (uint64_t i = 0; i < a->scales; i++)
        a->absmax_codes[i] = (uint8_t)draw(&state);
    for (uint64_t i = 0; i < a->groups; i++)
        a->nested_absmax[i] = (float)draw(&state) * 0x1p-24f;
    qc_quant_ops_for(QC_ISA_SCALAR)
        ->nested_dequantize(a->absmax_codes, a->nested_absmax, qc_dynamic_map, a->scales,
                            QC_NESTED_BLOCK, a->nested_offset, a->absmax);
}

static qc_feedback_result result_of(uint32_t job)
{
    return (qc_feedback_result){0.01 + job * 0.125, 0.003 + job * 0.0625};
}

qc_status qc_calibrate_identity(const char **out, const qc_plan *plan, qc_error *err)
{
    (void)plan;
    (void)err;
    *out = calibrator.digest;
    return QC_OK;
}

qc_status qc_calibrate_choose(qc_plan *plan, qc_error *err)
{
    (void)plan;
    (void)err;
    return QC_OK;
}

qc_status qc_calibrate_run(qc_calibrate_report *out, const qc_plan *plan, qc_calibrated *store,
                           qc_error *err)
{
    calibrator.runs++;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        qc_calibrated_arrays a;
        const qc_feedback_result result = result_of(i);
        if (!qc_calibrated_takes(plan, i) || qc_calibrated_has(store, i) ||
            (calibrator.leave && strcmp(plan->jobs[i].name, calibrator.leave) == 0))
            continue;
        if (calibrator.stop_after > 0 && calibrator.made == calibrator.stop_after)
            QC_FAIL(err, QC_ERR_IO, "the calibrator stops here");
        make_up(&a, plan, i);
        if (calibrator.change)
            calibrator.change(&a, plan, i);
        qc_status st = qc_calibrated_put(store, i, &a, &result, err);
        qc_calibrated_free(&a);
        QC_TRY(st);
        calibrator.made++;
    }
    *out = (qc_calibrate_report){.text = plan->options->calibrate.text,
                                 .hessians = plan->options->calibrate.hessians,
                                 .text_digest = "0123456789abcdef0123456789abcdef",
                                 .tokenizer = "bpe",
                                 .tokens = 4096,
                                 .windows = 8,
                                 .context = 512,
                                 .damping = 0.01,
                                 .weights = calibrator.made,
                                 .left = calibrator.leave ? 1 : 0,
                                 .seconds = 1.5};
    return QC_OK;
}

static int setup(void **state)
{
    static world w;
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.model, sizeof w.model, "%s/model", w.root);
    (void)snprintf(w.out, sizeof w.out, "%s/out", w.root);
    (void)snprintf(w.text, sizeof w.text, "%s/some.txt", w.root);
    test_write_model(w.model);
    memset(&calibrator, 0, sizeof calibrator);
    calibrator.digest = "one";
    *state = &w;
    return 0;
}

static int teardown(void **state)
{
    const world *w = *state;
    for (int kind = 0; kind < QC_IO_KIND_COUNT; kind++)
        qc_io_fail_at((qc_io_kind)kind, 0, 0, 0);
    qc_alloc_fail_at(0, 0);
    test_remove(w->root);
    return 0;
}

static const char *const forms[] = {
    "--to nf4",
    "--to nf4 --block-size 32 --no-double-quant",
    "--to nf4 --block-size 4096",
    "--to int8",
    "--to int8 --block-size 64",
    "--to int8 --block-size 128 --no-double-quant",
};
enum { FORMS = sizeof forms / sizeof *forms };

#endif
