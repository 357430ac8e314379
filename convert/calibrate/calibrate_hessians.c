/* With --hessians FILE, the second moments were captured elsewhere. There is no text and no forward
 * pass. */
#include "base/text.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/calibrate/calibrate_moments.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static qc_status tell_outputs(const qc_moments *m, qc_error *err)
{
    enum { EITHER = QC_MOMENTS_ALIKE | QC_MOMENTS_FEW_OUTPUTS };
    const qc_calibrator *k = m->k;
    const qc_plan *plan = k->plan;
    char name[QC_CALIBRATED_NAME_BYTES];
    uint32_t *without = NULL, *few = NULL;
    QC_TRY(qc_arena_array(&m->k->arena, &without, qc_calibrated_numbers(plan), err));
    QC_TRY(qc_arena_array(&m->k->arena, &few, qc_calibrated_numbers(plan), err));
    const uint32_t alike = qc_moments_list(m, EITHER, QC_MOMENTS_ALIKE, without);
    const uint32_t fewer = qc_moments_list(m, EITHER, QC_MOMENTS_FEW_OUTPUTS, few);
    const uint32_t missing = alike + fewer;
    if (k->o->calibrate.sided == 2 && missing > 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: --sided two needs second moments of the outputs of every weight, but they "
                "are %s for %" PRIu32 " weight%s, '%s' among them; --sided one does without",
                m->path,
                fewer == missing ? "of fewer tokens than a quarter of the outputs" : "missing",
                missing, qc_plural(missing),
                qc_calibrated_name(name, plan, alike > 0 ? without[0] : few[0]));
    if (fewer > 0 && !k->costs)
        qc_console_warn(plan->call,
                        "the outputs of %" PRIu32
                        " weight%s count alike, as their second moments are of fewer tokens than "
                        "a quarter of them: '%s'%s",
                        fewer, qc_plural(fewer), qc_calibrated_name(name, plan, few[0]),
                        fewer > 1 ? ", ..." : "");
    return QC_OK;
}

/* Tells the user what lies ahead. */
static void tell(const qc_calibrator *k, const qc_calibrate_outlook *a)
{
    char time[QC_SIZE_TEXT_BYTES], memory[QC_SIZE_TEXT_BYTES], disk[QC_SIZE_TEXT_BYTES];
    char bytes[QC_SIZE_TEXT_BYTES], device[256] = "";
    uint64_t kept = k->store ? qc_calibrated_count(k->store) : 0;
    if (k->plan->call->quiet || a->weights == 0)
        return;
    if (k->devices)
        (void)snprintf(device, sizeof device, ", %s of %s's",
                       qc_text_bytes(bytes, a->device_memory), k->devices->gpus[0].name);
    qc_console_detail(k->plan->call, 0,
                      "%s %" PRIu32 "%s weight%s with the second moments given: this takes about "
                      "%s here (%.2g operations), up to %s of memory%s, and %s of disk",
                      k->costs ? "weighing the schemes of" : "calibrating", a->weights,
                      kept ? " remaining" : "", qc_plural(a->weights),
                      qc_text_seconds(time, a->seconds), a->operations,
                      qc_text_bytes(memory, a->memory), device, qc_text_bytes(disk, a->disk));
}

static qc_status run(qc_moments *m, qc_error *err)
{
    qc_calibrator *k = m->k;
    const int two = k->o->calibrate.sided != 1;
    qc_calibrate_outlook ahead;
    QC_TRY(qc_moments_begin(m, k, err));
    QC_TRY(qc_moments_open(m, k->o->calibrate.hessians, two, err));
    for (uint32_t i = 0; two && i < qc_calibrated_numbers(k->plan); i++)
        if (m->known[i] & QC_MOMENTS_BOTH) /* also of what is made already */
            k->r->sided = 2;
    if (k->r->sided == 2)
        k->feedback.sweeps = QC_FEEDBACK_SWEEPS_TWO_SIDED;
    QC_TRY(tell_outputs(m, err));
    QC_TRY(qc_moments_tell_left(m, "as --hessians has no second moments for them", err));
    k->r->tokens = m->tokens;
    if (k->costs)
        k->feedback.sweeps = 0;
    QC_TRY(k->engine->ops->measure(k->engine, &k->speed, err));
    qc_moments_ahead(m, &ahead);
    tell(k, &ahead);
    QC_TRY(qc_calibrate_check_room(k, &ahead, err));
    if ((!k->store && !k->costs) || ahead.weights == 0)
        return QC_OK;
    QC_TRY(qc_progress_create(&k->progress, k->plan->call, k->costs ? "weighing" : "calibrating",
                              (uint64_t)(ahead.seconds * 1e6) + 1, err));
    qc_progress_hide_amounts(k->progress);
    return qc_moments_run(m, err);
}

qc_status qc_calibrate_from_hessians(qc_calibrator *k, qc_error *err)
{
    qc_moments m = {.k = k};
    qc_status st = run(&m, err);
    qc_moments_close(&m);
    return st;
}
