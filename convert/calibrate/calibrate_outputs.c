#include "convert/calibrate/calibrate_outputs.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/term/console.h"

#include <inttypes.h>
#include <string.h>

static int wants(const void *ctx, uint64_t layer, uint64_t which)
{
    const qc_calibrate_outputs *o = ctx;
    const qc_forward_layer *l = &o->task.tensors->layers[layer];
    const uint64_t i = which - QC_LAYER_ALL_MATRICES;
    return qc_calibrate_needs(o->k, which < QC_LAYER_ALL_MATRICES
                                        ? qc_calibrate_job_of(o->job_of, &l->linear[which])
                                        : qc_calibrate_expert_job(o->job_of, l->experts,
                                                                  i / QC_EXPERT_MATRICES,
                                                                  (int)(i % QC_EXPERT_MATRICES)));
}

static void did(void *ctx, double operations)
{
    const qc_calibrate_outputs *o = ctx;
    qc_calibrate_progress(o->k, operations * o->k->moment_seconds);
}

/* Copies the windows, and keeps as many as go backwards. */
static qc_status take_windows(qc_calibrate_outputs *o, qc_calibrator *k, const qc_eval_windows *w,
                              qc_error *err)
{
    o->windows = *w;
    QC_TRY(qc_arena_alloc(&k->arena, &o->windows.ids, w->tokens, sizeof *w->ids, err));
    QC_TRY(qc_arena_alloc(&k->arena, &o->windows.lengths, w->count, sizeof *w->lengths, err));
    QC_TRY(qc_arena_alloc(&k->arena, &o->windows.sequences, w->count, sizeof *w->sequences, err));
    memcpy(o->windows.ids, w->ids, (size_t)w->tokens * sizeof *w->ids);
    memcpy(o->windows.lengths, w->lengths, (size_t)w->count * sizeof *w->lengths);
    memcpy(o->windows.sequences, w->sequences, (size_t)w->count * sizeof *w->sequences);
    qc_eval_windows_spread(&o->windows, QC_CALIBRATE_OUTPUT_TOKENS);
    o->batch = (qc_forward_batch){o->windows.ids, o->windows.lengths, o->windows.count,
                                  o->windows.tokens, o->windows.sequences};
    return QC_OK;
}

qc_status qc_calibrate_outputs_choose(qc_calibrate_outputs *out, qc_calibrator *k,
                                      const qc_forward_tensors *t, const uint32_t *job_of,
                                      const qc_eval_windows *windows, qc_error *err)
{
    const unsigned sided = k->o->calibrate.sided;
    const char *why = qc_backward_not_made(&t->shape);
    *out = (qc_calibrate_outputs){.k = k, .job_of = job_of};
    if (sided == 1 || (sided == 0 && why))
        return QC_OK;
    if (why)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "--sided two weighs errors by gradients of the model's answer, which qconv does "
                "not make here: %s; --sided one does without, and qconv.capture of the Python "
                "package makes moments for --hessians",
                why);
    QC_TRY(take_windows(out, k, windows, err));
    out->task = (qc_backward_task){.source = &k->source,
                                   .tensors = t,
                                   .batch = &out->batch,
                                   .tools = {.threads = k->threads, .isa = k->isa},
                                   .blas = k->blas,
                                   .block = QC_CALIBRATE_OUTPUT_BLOCK,
                                   .folder = qc_calibrate_folder(k),
                                   .memory = qc_calibrate_states_memory(),
                                   .wants = wants,
                                   .did = did,
                                   .ctx = out};
    k->feedback.sweeps = k->costs ? 0 : QC_FEEDBACK_SWEEPS_TWO_SIDED;
    k->r->sided = 2;
    return QC_OK;
}

uint64_t qc_calibrate_outputs_block(const qc_calibrate_outputs *o, uint64_t rows)
{
    return qc_min_u64(o->task.block, rows);
}

void qc_calibrate_outputs_ahead(const qc_calibrate_outputs *o, qc_calibrate_outlook *a)
{
    if (o->task.block == 0)
        return;
    const qc_backward_outlook own = qc_backward_ahead(&o->task);
    a->operations += own.operations;
    a->seconds += own.operations * o->k->moment_seconds;
    a->disk = qc_sat_add(a->disk, own.disk);
    a->memory = qc_max_u64(qc_sat_add(a->memory, own.kept), own.memory);
}

qc_status qc_calibrate_outputs_make(qc_calibrate_outputs *o, qc_error *err)
{
    if (o->task.block == 0)
        return QC_OK;
    qc_console_detail(o->k->plan->call, 1, "%" PRIu64 " tokens pass backwards", o->batch.tokens);
    return qc_backward_run(&o->made, &o->task, err);
}

const qc_feedback_outputs *qc_calibrate_outputs_of(qc_calibrate_outputs *o, uint64_t layer,
                                                   uint64_t which, uint32_t job,
                                                   qc_feedback_outputs *room)
{
    if (!o->made)
        return NULL;
    const uint64_t rows = qc_backward_linear(o->task.tensors, layer, which)->rows;
    const uint64_t block = qc_calibrate_outputs_block(o, rows);
    const uint64_t tokens = qc_backward_tokens(o->made, layer, which);
    *room = (qc_feedback_outputs){.g = qc_backward_moments(o->made, layer, which),
                                  .block = block,
                                  .damping = qc_feedback_outputs_damping(block, tokens)};
    if (room->g && !qc_calibrate_few(block, tokens))
        return room;
    if (o->few++ == 0)
        o->first_few = job;
    return NULL;
}

void qc_calibrate_outputs_tell_few(const qc_calibrate_outputs *o)
{
    char name[QC_CALIBRATED_NAME_BYTES];
    if (o->few == 0)
        return;
    qc_console_warn(o->k->plan->call,
                    "the outputs of %" PRIu32
                    " weight%s count alike, as fewer tokens passed backwards through %s than a "
                    "quarter of the outputs: '%s'%s",
                    o->few, qc_plural(o->few), o->few > 1 ? "them" : "it",
                    qc_calibrated_name(name, o->k->plan, o->first_few), o->few > 1 ? ", ..." : "");
}

void qc_calibrate_outputs_close(qc_calibrate_outputs *o)
{
    qc_backward_close(o->made);
    o->made = NULL;
}
