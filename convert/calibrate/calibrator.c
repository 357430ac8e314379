/* What both ways of calibrating share: which weights are to be made, how fast the machine is,
 * whether the work fits, and what the user is told. */
#include "convert/calibrate/calibrate_engine.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <stdio.h>

/* A warning names at most this many weights. */
#define NAMES_MOST 3u

int qc_calibrate_needs(const qc_calibrator *k, uint32_t job)
{
    return job != QC_NO_JOB && qc_calibrated_takes(k->plan, job) &&
           !(k->store && qc_calibrated_has(k->store, job));
}

void qc_calibrate_tell(const qc_calibrator *k, const qc_calibrate_outlook *a, const char *inputs)
{
    char time[QC_SIZE_TEXT_BYTES], memory[QC_SIZE_TEXT_BYTES], disk[QC_SIZE_TEXT_BYTES];
    char bytes[QC_SIZE_TEXT_BYTES], device[256] = "";
    uint64_t kept = k->store ? qc_calibrated_count(k->store) : 0;
    if (k->plan->call->quiet)
        return;
    if (a->weights == 0)
        return;
    if (k->devices)
        (void)snprintf(device, sizeof device, ", %s of %s's",
                       qc_text_bytes(bytes, a->device_memory), k->devices->gpus[0].name);
    qc_console_detail(
        k->plan->call, 0,
        "calibrating %" PRIu32 " weights%s with %s: about %s here (%.2g operations), up to %s of "
        "memory%s, %s of disk",
        a->weights, kept ? " that are left" : "", inputs, qc_text_seconds(time, a->seconds),
        a->operations, qc_text_bytes(memory, a->memory), device, qc_text_bytes(disk, a->disk));
}

void qc_calibrate_tell_left(const qc_calibrator *k, const uint32_t *jobs, uint32_t count,
                            const char *why)
{
    char names[512] = "";
    size_t used = 0;
    if (count == 0)
        return;
    for (uint32_t i = 0; i < count && i < NAMES_MOST; i++) {
        int n = snprintf(names + used, sizeof names - used, "%s'%.120s'", i ? ", " : "",
                         k->plan->jobs[jobs[i]].name);
        used += n > 0 ? (size_t)n : 0;
    }
    qc_console_warn(k->plan->call, "%" PRIu32 " weight%s quantized without calibration, %s: %s%s",
                    count, count == 1 ? " is" : "s are", why, names,
                    count > NAMES_MOST ? ", ..." : "");
}

qc_status qc_calibrate_measure(qc_calibrator *k, const qc_llama_shape *shape, qc_error *err)
{
    qc_calibrate_speed s;
    QC_TRY(k->engine->ops->measure(k->engine, shape, &s, err));
    k->moment_seconds = s.single;
    k->factor_seconds = s.dual * s.factor_slower;
    k->weight_seconds = s.single * s.weight_slower;
    k->forward_seconds = s.forward;
    return QC_OK;
}

qc_status qc_calibrate_check_room(const qc_calibrator *k, const qc_calibrate_outlook *a,
                                  qc_error *err)
{
    char need[QC_SIZE_TEXT_BYTES], have[QC_SIZE_TEXT_BYTES];
    if (!k->devices || a->weights == 0 || a->device_memory <= k->devices->gpus[0].memory_bytes)
        return QC_OK;
    QC_FAIL(err, QC_ERR_NOMEM,
            "calibrating takes %s of GPU memory, and cuda:%d (%s) has %s; --device cpu does "
            "without",
            qc_text_bytes(need, a->device_memory), k->devices->gpus[0].index,
            k->devices->gpus[0].name, qc_text_bytes(have, k->devices->gpus[0].memory_bytes));
}
