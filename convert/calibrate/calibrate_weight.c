/* What both ways of calibrating share: which weights are to be made, how fast the machine is,
 * whether the work fits, what the user is told, and the way of a weight from second moments to the
 * store. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "quant/matmul_ops.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* A warning names at most so many weights. */
#define NAMES_MOST 3u

/* Returns how many costs of a weight are wanted. */
static unsigned costs_wanted(const qc_calibrator *k, uint32_t job)
{
    unsigned wanted = 0;
    for (unsigned c = 0; c < QC_CANDIDATES; c++)
        wanted += isinf(k->costs[job][c]) != 0;
    return wanted;
}

int qc_calibrate_few(uint64_t n, uint64_t tokens)
{
    return tokens < qc_ceil_div_u64(n, QC_CALIBRATE_FEW_TOKENS);
}

int qc_calibrate_needs(const qc_calibrator *k, uint32_t job)
{
    return job != QC_NO_JOB && qc_calibrated_takes(k->plan, job) &&
           !(k->costs && costs_wanted(k, job) == 0) &&
           !(k->store && qc_calibrated_has(k->store, job));
}

void qc_calibrate_tell_left(const qc_calibrator *k, const uint32_t *jobs, uint32_t count,
                            const char *why)
{
    char names[512] = "";
    size_t used = 0;
    if (count == 0 || k->costs) /* calibrating itself will say so */
        return;
    for (uint32_t i = 0; i < count && i < NAMES_MOST; i++) {
        char name[QC_CALIBRATED_NAME_BYTES];
        int n = snprintf(names + used, sizeof names - used, "%s'%.120s'", i ? ", " : "",
                         qc_calibrated_name(name, k->plan, jobs[i]));
        used += n > 0 ? (size_t)n : 0;
    }
    qc_console_warn(k->plan->call,
                    "%" PRIu32 " weight%s %s quantized without calibration, %s: %s%s", count,
                    qc_plural(count), qc_are(count), why, names, count > NAMES_MOST ? ", ..." : "");
}

qc_status qc_calibrate_check_room(const qc_calibrator *k, const qc_calibrate_outlook *a,
                                  qc_error *err)
{
    char need[QC_SIZE_TEXT_BYTES], have[QC_SIZE_TEXT_BYTES];
    if (!k->devices || a->weights == 0 || a->device_memory <= k->devices->gpus[0].memory_bytes)
        return QC_OK;
    QC_FAIL(err, QC_ERR_NOMEM,
            "calibrating takes %s of GPU memory, but cuda:%d (%s) has %s; --device cpu calibrates "
            "without a GPU",
            qc_text_bytes(need, a->device_memory), k->devices->gpus[0].index,
            k->devices->gpus[0].name, qc_text_bytes(have, k->devices->gpus[0].memory_bytes));
}

/* ---- sizes and times ---- */

static double factor_seconds(const qc_calibrator *k, uint64_t n, int cross)
{
    return qc_feedback_open_flops(n, cross) * k->speed.dual * k->speed.factor_slower;
}

static double weight_flops(const qc_calibrator *k, uint32_t job, int cross, uint64_t block)
{
    const qc_job weight = qc_calibrated_weight(k->plan, job), *j = &weight;
    const unsigned times = k->costs ? costs_wanted(k, job) : 1;
    return times * qc_feedback_weight_flops(j->rows, j->form.cols, cross, &k->feedback,
                                            qc_min_u64(block, j->rows));
}

double qc_calibrate_weight_seconds(const qc_calibrator *k, uint32_t job, int cross, uint64_t block)
{
    const qc_job j = qc_calibrated_weight(k->plan, job);
    const uint64_t unit = qc_min_u64(block, j.rows);
    const double each = k->speed.coupled + (double)unit * k->speed.coupled_pair;
    return weight_flops(k, job, cross, block) * k->speed.single * k->speed.weight_slower +
           (double)k->feedback.sweeps * (double)j.form.cols * (double)unit * each;
}

void qc_calibrate_progress(const qc_calibrator *k, double seconds)
{
    qc_progress_add(k->progress, (uint64_t)(seconds * 1e6 + 0.5));
}

void qc_calibrate_one_ahead(const qc_calibrator *k, const qc_calibrate_one *one, int factor,
                            qc_calibrate_outlook *a)
{
    const qc_job j = qc_calibrated_weight(k->plan, one->number);
    const uint64_t n = j.form.cols;
    if (factor) {
        a->operations += qc_feedback_open_flops(n, one->cross);
        a->seconds += factor_seconds(k, n, one->cross);
    }
    a->operations += weight_flops(k, one->number, one->cross, one->block);
    a->seconds += qc_calibrate_weight_seconds(k, one->number, one->cross, one->block);
    const qc_calibrate_room room =
        k->engine->ops->room_weight(k->engine, j.rows, n, one->cross, &j.form, one->block);
    /* The weight is held as it is read and as it becomes, and the moments as they are read. */
    uint64_t memory = qc_sat_mul(qc_sat_mul(j.rows, n), sizeof(float) + 2);
    const uint64_t squares = qc_sat_mul(qc_calibrate_square_bytes(n), one->cross ? 2 : 1);
    memory = qc_sat_add(memory, room.device ? squares : 0);
    memory = qc_sat_add(memory, one->outputs_bytes);
    memory = qc_sat_add(memory, room.host);
    a->memory = qc_max_u64(a->memory, memory);
    a->device_memory = qc_max_u64(a->device_memory, room.device);
}

/* ---- making ---- */

qc_status qc_calibrate_factor(const qc_calibrator *k, uint64_t n, int cross, uint64_t tokens,
                              const char *name, qc_error *err)
{
    qc_feedback_options options = k->feedback;
    qc_feedback_info info;
    if (options.damping == 0.0)
        options.damping = qc_feedback_damping(n, tokens);
    qc_status st = k->engine->ops->factor(k->engine, &options, &info, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "inputs of '%s'", name);
        return st;
    }
    if (info.times_raised > 0)
        qc_console_warn(k->plan->call,
                        "inputs of '%s': their second moments have no factor with damping %g, so "
                        "it was raised to %g",
                        name, options.damping, info.damping);
    if (info.dead > 0)
        qc_console_detail(k->plan->call, 1,
                          "inputs of '%s': %" PRIu64 " of %" PRIu64
                          " are zero in every token, so their weights are rounded to nearest",
                          name, info.dead, n);
    qc_calibrate_progress(k, factor_seconds(k, n, cross));
    return QC_OK;
}

/* Finds the wanted costs of a weight with the engine's factor. Without g they stay wanted. */
static qc_status find_costs(const qc_calibrator *k, uint32_t job, const float *w,
                            const qc_feedback_outputs *g, qc_error *err)
{
    qc_status st = QC_OK;
    for (unsigned c = 0; st == QC_OK && g && c < QC_CANDIDATES; c++) {
        qc_job j = k->plan->jobs[job];
        qc_calibrated_arrays arrays = {0}; /* nobody reads them */
        qc_feedback_result result = {0};
        if (!isinf(k->costs[job][c]))
            continue;
        qc_job_set_form(&j, k->forms[job][c].scheme, k->forms[job][c].block_elems,
                        k->o->recipe.double_quant);
        st = qc_calibrated_alloc_job(&arrays, &j, 0, err);
        qc_feedback_out out = qc_calibrate_out(k, job, &arrays);
        if (st == QC_OK)
            st = k->engine->ops->weight(k->engine, &j.form, w, j.rows, g, &out, &result, err);
        qc_calibrated_free(&arrays);
        k->costs[job][c] =
            result.calibrated_two_sided * result.target_two_sided / (2 * (double)k->r->tokens);
    }
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s'", k->plan->jobs[job].name);
    return st;
}

qc_status qc_calibrate_weight(qc_calibrator *k, uint32_t number, const qc_feedback_outputs *g,
                              qc_error *err)
{
    const qc_job j = qc_calibrated_weight(k->plan, number);
    qc_calibrated_arrays arrays = {0};
    qc_feedback_result result = {0};
    char name[QC_CALIBRATED_NAME_BYTES];
    float *w = NULL;
    (void)qc_calibrated_name(name, k->plan, number);
    qc_status st = qc_calibrated_original(&w, &k->reader, k->plan, number, err);
    if (st == QC_OK)
        st = k->costs ? find_costs(k, number, w, g, err)
                      : qc_calibrated_alloc(&arrays, k->plan, number, err);
    if (st == QC_OK && !k->costs) {
        qc_feedback_out out = qc_calibrate_out(k, number, &arrays);
        st = k->engine->ops->weight(k->engine, &j.form, w, j.rows, g, &out, &result, err);
        arrays.nested_offset = out.nested_offset;
        if (st == QC_OK)
            st = qc_calibrated_put(k->store, number, &arrays, &result, err);
        if (st != QC_OK)
            qc_error_prefix(err, "tensor '%s'", name);
    }
    qc_calibrated_free(&arrays);
    qc_free(w);
    if (st != QC_OK || k->costs)
        return st;
    k->r->weights++;
    qc_console_detail(k->plan->call, 2,
                      "%s: relative error of its outputs %.3g rounded, %.3g calibrated", name,
                      result.rounded, result.calibrated);
    return QC_OK;
}
