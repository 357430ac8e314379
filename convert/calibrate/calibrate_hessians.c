/* With --hessians, the second moments were captured elsewhere. There is no text and no forward
 * pass. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/calibrate/hessians.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A weight, the number of its moments in the file, and those of its outputs. */
typedef struct {
    uint32_t number, job;
    uint32_t module;
    qc_hessians_outputs outputs; /* blocks 0: outputs count alike */
} pair;

typedef struct {
    qc_calibrator *k;
    qc_hessians *h;
    pair *pairs; /* weights to be made; those with the same number are together */
    uint32_t count;
    uint64_t tokens; /* the most tokens that any moments are of */
} work;

/* Weights that are set apart: their jobs. */
typedef struct {
    uint32_t *jobs, count;
} list;

static int compare_pairs(const void *a, const void *b)
{
    const pair *x = a, *y = b;
    if (x->number != y->number)
        return x->number < y->number ? -1 : 1;
    return x->job < y->job ? -1 : x->job > y->job;
}

/* A file from another model is refused, also where some of its modules have the same names. */
static qc_status check_names(const work *w, qc_error *err)
{
    const qc_plan *plan = w->k->plan;
    const uint32_t count = qc_hessians_count(w->h);
    uint32_t strangers = 0, first = 0;
    uint8_t *known = NULL;
    QC_TRY(qc_arena_alloc(&w->k->arena, &known, count, sizeof *known, err));
    for (uint32_t i = 0; i < plan->job_count; i++) {
        uint32_t module = qc_hessians_module(w->h, plan->jobs[i].name);
        if (module != UINT32_MAX)
            known[module] = 1;
    }
    for (uint32_t i = count; i-- > 0;) {
        strangers += !known[i];
        first = known[i] ? first : i;
    }
    if (strangers > 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: %" PRIu32 " of %" PRIu32
                " modules belong to no weight of this model, '%s' among them: expected moments "
                "that were captured from it",
                w->k->o->calibrate.hessians, strangers, count, qc_hessians_name(w->h, first));
    return QC_OK;
}

/* Finds the moments of a weight's outputs; without is where they are missing, few where they are
 * of too few tokens. */
static qc_status find_outputs(const work *w, pair *p, list *without, list *few, qc_error *err)
{
    const qc_job *j = &w->k->plan->jobs[p->job];
    qc_hessians_outputs *o = &p->outputs;
    if (w->k->o->calibrate.sided == 1)
        return QC_OK;
    *o = qc_hessians_outputs_of(w->h, p->module);
    if (o->blocks > 0 &&
        (o->whole ? o->block != j->rows : o->blocks != qc_ceil_div_u64(j->rows, o->block)))
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: expected second moments of %" PRIu64 " outputs for '%s', found %" PRIu64
                " block%s of %" PRIu64,
                w->k->o->calibrate.hessians, j->rows, j->name, o->blocks, qc_plural(o->blocks),
                o->block);
    if (o->blocks > 0 && !qc_calibrate_few(qc_min_u64(o->block, j->rows), o->tokens)) {
        w->k->feedback.sweeps = QC_FEEDBACK_SWEEPS_TWO_SIDED;
        w->k->r->sided = 2;
        return QC_OK;
    }
    if (o->blocks > 0)
        few->jobs[few->count++] = p->job;
    else
        without->jobs[without->count++] = p->job;
    *o = (qc_hessians_outputs){0};
    return QC_OK;
}

static qc_status tell_outputs(const work *w, const list *without, const list *few, qc_error *err)
{
    const qc_job *jobs = w->k->plan->jobs;
    const uint32_t missing = without->count + few->count;
    if (w->k->o->calibrate.sided == 2 && missing > 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: --sided two needs second moments of the outputs of every weight, but they "
                "are %s for %" PRIu32 " weight%s, '%s' among them; --sided one does without",
                w->k->o->calibrate.hessians,
                few->count == missing ? "of fewer tokens than a quarter of the outputs" : "missing",
                missing, qc_plural(missing),
                jobs[without->count > 0 ? without->jobs[0] : few->jobs[0]].name);
    if (few->count > 0 && !w->k->costs)
        qc_console_warn(w->k->plan->call,
                        "the outputs of %" PRIu32
                        " weight%s count alike, as their second moments are of fewer tokens than "
                        "a quarter of them: '%s'%s",
                        few->count, qc_plural(few->count), jobs[few->jobs[0]].name,
                        few->count > 1 ? ", ..." : "");
    return QC_OK;
}

/* Sorts the weights into those to be made, those without moments, and those whose moments are of
 * too few tokens. */
static qc_status sort_weights(work *w, qc_error *err)
{
    enum { NONE, FEW, WITHOUT, FEW_OUTPUTS, LISTS };
    const qc_plan *plan = w->k->plan;
    list lists[LISTS] = {{0}};
    QC_TRY(qc_arena_alloc(&w->k->arena, &w->pairs, plan->job_count, sizeof *w->pairs, err));
    for (int i = 0; i < LISTS; i++)
        QC_TRY(
            qc_arena_alloc(&w->k->arena, &lists[i].jobs, plan->job_count, sizeof(uint32_t), err));
    QC_TRY(check_names(w, err));
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        uint64_t n = 0, tokens = 0;
        pair p = {.number = UINT32_MAX, .job = i, .module = qc_hessians_module(w->h, j->name)};
        if (qc_calibrated_takes(plan, i))
            p.number = qc_hessians_find(w->h, j->name, &n, &tokens);
        if (!qc_scheme_is_quantized(j->scheme))
            continue;
        if (p.number == UINT32_MAX) {
            lists[NONE].jobs[lists[NONE].count++] = i;
            continue;
        }
        if (n != j->cols)
            QC_FAIL(err, QC_ERR_SHAPE,
                    "%s: expected second moments of %" PRIu64 " inputs for '%s', found %" PRIu64,
                    w->k->o->calibrate.hessians, j->cols, j->name, n);
        if (qc_calibrate_few(n, tokens)) {
            lists[FEW].jobs[lists[FEW].count++] = i;
            continue;
        }
        QC_TRY(find_outputs(w, &p, &lists[WITHOUT], &lists[FEW_OUTPUTS], err));
        w->tokens = tokens > w->tokens ? tokens : w->tokens;
        if (qc_calibrate_needs(w->k, i))
            w->pairs[w->count++] = p;
    }
    if (w->count > 0)
        qsort(w->pairs, w->count, sizeof *w->pairs, compare_pairs);
    QC_TRY(tell_outputs(w, &lists[WITHOUT], &lists[FEW_OUTPUTS], err));
    qc_calibrate_tell_left(w->k, lists[NONE].jobs, lists[NONE].count,
                           "as --hessians has no second moments for them");
    qc_calibrate_tell_left(
        w->k, lists[FEW].jobs, lists[FEW].count,
        "as the second moments are of fewer tokens than a quarter of the inputs");
    w->k->r->left = lists[NONE].count + lists[FEW].count;
    w->k->r->tokens = w->tokens;
    return QC_OK;
}

static uint64_t cols_of(const work *w, uint32_t i)
{
    return w->k->plan->jobs[w->pairs[i].job].cols;
}

static int cross_of(const work *w, uint32_t i)
{
    return qc_hessians_has_cross(w->h, w->pairs[i].number);
}

static uint64_t outputs_bytes(const qc_hessians_outputs *o)
{
    return qc_sat_mul(qc_sat_mul(o->blocks, o->block), qc_sat_mul(o->block, sizeof(float)));
}

static double weight_flops(const work *w, uint32_t i)
{
    const qc_job *j = &w->k->plan->jobs[w->pairs[i].job];
    const unsigned times = w->k->costs ? qc_calibrate_costs_wanted(w->k, w->pairs[i].job) : 1;
    return times * qc_feedback_weight_flops(j->rows, j->cols, cross_of(w, i), &w->k->feedback,
                                            w->pairs[i].outputs.block);
}

static double weight_seconds(const work *w, uint32_t i)
{
    return qc_calibrate_weight_seconds(w->k, w->pairs[i].job, cross_of(w, i),
                                       w->pairs[i].outputs.block);
}

static void look_ahead(const work *w, qc_calibrate_outlook *a)
{
    const qc_calibrator *k = w->k;
    *a = (qc_calibrate_outlook){.weights = w->count,
                                .disk = k->costs ? 0 : qc_calibrated_bytes(k->plan, k->store)};
    for (uint32_t i = 0; i < w->count; i++) {
        const qc_job *j = &k->plan->jobs[w->pairs[i].job];
        uint64_t n = j->cols;
        int cross = cross_of(w, i);
        if (i == 0 || w->pairs[i].number != w->pairs[i - 1].number) {
            a->operations += qc_feedback_open_flops(n, cross);
            a->seconds += qc_calibrate_factor_seconds(k, n, cross);
        }
        const qc_form form = qc_job_form(j);
        a->operations += weight_flops(w, i);
        a->seconds += weight_seconds(w, i);
        qc_calibrate_room room = k->engine->ops->room_weight(k->engine, j->rows, n, cross, &form,
                                                             w->pairs[i].outputs.block);
        /* The weight is held as it is read and as it becomes, and the moments as they are read. */
        uint64_t memory = qc_sat_mul(qc_sat_mul(j->rows, n), sizeof(float) + 2);
        uint64_t squares = qc_sat_mul(qc_calibrate_square_bytes(n), cross ? 2 : 1);
        memory = qc_sat_add(memory, room.device ? squares : 0);
        memory = qc_sat_add(memory, outputs_bytes(&w->pairs[i].outputs));
        memory = qc_sat_add(memory, room.host);
        a->memory = memory > a->memory ? memory : a->memory;
        a->device_memory = room.device > a->device_memory ? room.device : a->device_memory;
    }
}

/* Reads the moments of a weight's outputs, if it has any; *g is to be freed. */
static qc_status read_outputs(const work *w, const pair *p, float **g, qc_error *err)
{
    uint64_t bytes = outputs_bytes(&p->outputs);
    size_t size = 0;
    if (bytes == 0)
        return QC_OK;
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "second moments of %" PRIu64 " outputs do not fit memory",
                w->k->plan->jobs[p->job].rows);
    QC_TRY(qc_malloc_aligned(g, 64, size, err));
    return qc_hessians_read_outputs(w->h, p->module, *g, err);
}

static qc_status calibrate_one(const work *w, uint32_t i, qc_error *err)
{
    const qc_calibrator *k = w->k;
    const pair *p = &w->pairs[i];
    const qc_job *j = &k->plan->jobs[p->job];
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
    float *g = NULL;
    const double seconds = weight_seconds(w, i);
    qc_status st = read_outputs(w, p, &g, err);
    const uint64_t block = qc_min_u64(p->outputs.block, j->rows);
    const qc_feedback_outputs outputs = {.g = g,
                                         .block = p->outputs.block,
                                         .damping =
                                             qc_feedback_outputs_damping(block, p->outputs.tokens)};
    if (st == QC_OK)
        st = qc_forward_matrix_read(&m, &k->source, &linear, err);
    if (st == QC_OK)
        st = qc_calibrate_weight(k, p->job, &m, g ? &outputs : NULL, &arrays, err);
    qc_calibrated_free(&arrays);
    qc_forward_matrix_deinit(&m);
    qc_free(g);
    qc_calibrate_progress(k, seconds);
    return st;
}

/* Reads moments, and the cross moment if there is one. Both are to be freed, also after an
 * error. */
static qc_status read_moments(const work *w, uint32_t i, double **h, double **c, qc_error *err)
{
    const uint64_t n = cols_of(w, i);
    QC_TRY(qc_calibrate_square(h, n, err));
    QC_TRY(qc_hessians_read(w->h, w->pairs[i].number, *h, err));
    if (!cross_of(w, i))
        return QC_OK;
    QC_TRY(qc_calibrate_square(c, n, err));
    return qc_hessians_read_cross(w->h, w->pairs[i].number, *c, err);
}

/* Weights [first, end) share their moments. */
static qc_status calibrate_number(const work *w, uint32_t first, uint32_t end, qc_error *err)
{
    const qc_calibrator *k = w->k;
    uint64_t n = cols_of(w, first);
    const char *name = k->plan->jobs[w->pairs[first].job].name;
    uint64_t tokens = 0;
    double *h = NULL, *c = NULL;
    (void)qc_hessians_find(w->h, name, &n, &tokens);
    qc_status st = read_moments(w, first, &h, &c, err);
    if (st != QC_OK) {
        qc_free(h);
        qc_free(c);
        return st;
    }
    st = k->engine->ops->take(k->engine, n, h, c, err);
    if (st == QC_OK)
        st = qc_calibrate_factor(k, n, cross_of(w, first), tokens, name, err);
    for (uint32_t i = first; st == QC_OK && i < end; i++) {
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = calibrate_one(w, i, err);
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
    if (k->costs)
        k->feedback.sweeps = 0;
    QC_TRY(qc_calibrate_measure(k, err));
    look_ahead(w, &ahead);
    qc_calibrate_tell(k, &ahead, "the second moments given");
    QC_TRY(qc_calibrate_check_room(k, &ahead, err));
    if ((!k->store && !k->costs) || w->count == 0)
        return QC_OK;
    QC_TRY(qc_progress_create(&k->progress, k->plan->call, k->costs ? "weighing" : "calibrating",
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
