/* With --hessians, the second moments were captured elsewhere. There is no text and no forward
 * pass. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/calibrate/hessians.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A weight, and the number of its moments in the file. */
typedef struct {
    uint32_t number, job;
} pair;

typedef struct {
    qc_calibrator *k;
    qc_hessians *h;
    pair *pairs; /* weights to be made; those with the same number are together */
    uint32_t count;
    uint64_t tokens; /* the most tokens that any moments are of */
} work;

static int compare_pairs(const void *a, const void *b)
{
    const pair *x = a, *y = b;
    if (x->number != y->number)
        return x->number < y->number ? -1 : 1;
    return x->job < y->job ? -1 : x->job > y->job;
}

/* Sorts the weights into those to be made, those without moments, and those whose moments are of
 * too few tokens. */
static qc_status sort_weights(work *w, qc_error *err)
{
    const qc_plan *plan = w->k->plan;
    uint32_t *none = NULL, *few = NULL, none_count = 0, few_count = 0;
    QC_TRY(qc_arena_alloc(&w->k->arena, &w->pairs, plan->job_count, sizeof *w->pairs, err));
    QC_TRY(qc_arena_alloc(&w->k->arena, &none, plan->job_count, sizeof *none, err));
    QC_TRY(qc_arena_alloc(&w->k->arena, &few, plan->job_count, sizeof *few, err));
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        uint64_t n = 0, tokens = 0;
        uint32_t number = qc_calibrated_takes(plan, i)
                              ? qc_hessians_find(w->h, j->name, &n, &tokens)
                              : UINT32_MAX;
        if (!qc_scheme_is_quantized(j->scheme))
            continue;
        if (number == UINT32_MAX) {
            none[none_count++] = i;
            continue;
        }
        if (n != j->cols)
            QC_FAIL(err, QC_ERR_SHAPE,
                    "%s: expected second moments of %" PRIu64 " inputs for '%s', found %" PRIu64,
                    w->k->o->calibrate.hessians, j->cols, j->name, n);
        if (qc_calibrate_few(n, tokens)) {
            few[few_count++] = i;
            continue;
        }
        w->tokens = tokens > w->tokens ? tokens : w->tokens;
        if (qc_calibrate_needs(w->k, i))
            w->pairs[w->count++] = (pair){number, i};
    }
    if (w->count > 0)
        qsort(w->pairs, w->count, sizeof *w->pairs, compare_pairs);
    qc_calibrate_tell_left(w->k, none, none_count, "as --hessians has no second moments for them");
    qc_calibrate_tell_left(
        w->k, few, few_count,
        "as the second moments are of fewer tokens than a quarter of the inputs");
    w->k->r->left = none_count + few_count;
    w->k->r->tokens = w->tokens;
    return QC_OK;
}

static uint64_t cols_of(const work *w, uint32_t i)
{
    return w->k->plan->jobs[w->pairs[i].job].cols;
}

static void look_ahead(const work *w, qc_calibrate_outlook *a)
{
    const qc_calibrator *k = w->k;
    *a =
        (qc_calibrate_outlook){.weights = w->count, .disk = qc_calibrated_bytes(k->plan, k->store)};
    for (uint32_t i = 0; i < w->count; i++) {
        const qc_job *j = &k->plan->jobs[w->pairs[i].job];
        uint64_t n = j->cols;
        if (i == 0 || w->pairs[i].number != w->pairs[i - 1].number) {
            a->operations += qc_feedback_open_flops(n, 0);
            a->seconds += qc_calibrate_factor_seconds(k, n, 0);
        }
        const qc_form form = qc_job_form(j);
        a->operations += qc_feedback_weight_flops(j->rows, n, 0, &k->feedback, 0);
        a->seconds += qc_calibrate_weight_seconds(k, w->pairs[i].job, 0);
        qc_calibrate_room room = k->engine->ops->room_weight(k->engine, j->rows, n, 0, &form, 0);
        /* The weight is held as it is read and as it becomes, and the moments as they are read. */
        uint64_t memory = qc_sat_mul(qc_sat_mul(j->rows, n), sizeof(float) + 2);
        memory = qc_sat_add(memory, room.device ? qc_calibrate_square_bytes(n) : 0);
        memory = qc_sat_add(memory, room.host);
        a->memory = memory > a->memory ? memory : a->memory;
        a->device_memory = room.device > a->device_memory ? room.device : a->device_memory;
    }
}

static qc_status calibrate_one(const work *w, uint32_t job, qc_error *err)
{
    const qc_calibrator *k = w->k;
    const qc_job *j = &k->plan->jobs[job];
    const qc_forward_linear linear = {.tensor = j->source,
                                      .bias = UINT32_MAX,
                                      .stored = j->entry->stored,
                                      .coded = j->entry->coded,
                                      .rows = j->rows,
                                      .cols = j->cols,
                                      .turned = j->entry->transpose,
                                      .memory_bytes = qc_sat_mul(j->elems, sizeof(float))};
    qc_calibrated_arrays arrays = {0};
    qc_forward_matrix m = {0};
    qc_status st = qc_forward_matrix_read(&m, &k->source, &linear, err);
    if (st == QC_OK)
        st = qc_calibrate_weight(k, job, &m, NULL, &arrays, err);
    qc_calibrated_free(&arrays);
    qc_forward_matrix_deinit(&m);
    qc_calibrate_progress(k, qc_calibrate_weight_seconds(k, job, 0));
    return st;
}

/* Weights [first, end) share their moments. */
static qc_status calibrate_number(const work *w, uint32_t first, uint32_t end, qc_error *err)
{
    const qc_calibrator *k = w->k;
    uint64_t n = cols_of(w, first);
    const char *name = k->plan->jobs[w->pairs[first].job].name;
    uint64_t tokens = 0;
    double *h = NULL;
    (void)qc_hessians_find(w->h, name, &n, &tokens);
    QC_TRY(qc_calibrate_square(&h, n, err));
    qc_status st = qc_hessians_read(w->h, w->pairs[first].number, h, err);
    if (st != QC_OK) {
        qc_free(h);
        return st;
    }
    st = k->engine->ops->take(k->engine, n, h, err);
    if (st == QC_OK)
        st = qc_calibrate_factor(k, n, 0, tokens, name, err);
    for (uint32_t i = first; st == QC_OK && i < end; i++) {
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = calibrate_one(w, w->pairs[i].job, err);
    }
    k->engine->ops->drop(k->engine);
    return st;
}

static qc_status run(work *w, qc_error *err)
{
    qc_calibrator *k = w->k;
    qc_calibrate_outlook ahead;
    QC_TRY(qc_hessians_open(&w->h, k->o->calibrate.hessians, err));
    QC_TRY(sort_weights(w, err));
    QC_TRY(qc_calibrate_measure(k, NULL, err));
    look_ahead(w, &ahead);
    qc_calibrate_tell(k, &ahead, "the second moments given");
    QC_TRY(qc_calibrate_check_room(k, &ahead, err));
    if (!k->store || w->count == 0)
        return QC_OK;
    QC_TRY(qc_progress_create(&k->progress, k->plan->call, "calibrating",
                              (uint64_t)(ahead.seconds * 1e6) + 1, err));
    qc_progress_hide_amounts(k->progress);
    for (uint32_t first = 0, end = 0; first < w->count; first = end) {
        while (end < w->count && w->pairs[end].number == w->pairs[first].number)
            end++;
        QC_TRY(calibrate_number(w, first, end, err));
    }
    return QC_OK;
}

qc_status qc_calibrate_from_hessians(qc_calibrator *k, qc_error *err)
{
    work w = {.k = k};
    qc_status st = run(&w, err);
    qc_hessians_close(w.h);
    return st;
}
