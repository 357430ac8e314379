#include "convert/device/device_choice.h"

#include "base/text.h"

#include <stdlib.h>
#include <string.h>

static qc_status use_cpu(qc_devices *out, const char *why)
{
    out->gpu_count = 0;
    out->text = "cpu";
    out->why = why;
    return QC_OK;
}

/* Refuses the index of a GPU that CUDA does not show. */
static qc_status refuse_index(const qc_gpu_work *work, const qc_device_wish *w, unsigned index,
                              unsigned count, qc_arena *arena, qc_error *err)
{
    const char *there = "";
    qc_cuda_device d;
    for (unsigned i = 0; i < count; i++) {
        qc_error why = {0};
        const char *name = work->device_open(&d, (int)i, &why) == QC_OK ? d.name : why.msg;
        QC_TRY(
            qc_arena_printf(arena, &there, err, "%s%scuda:%u (%s)", there, i ? ", " : "", i, name));
    }
    QC_FAIL(err, QC_ERR_DEVICE, "%s%s: there is no cuda:%u; there %s %s", w->from, w->text, index,
            qc_are(count), there);
}

/* Opens the GPUs that are wished for. It leaves out those that cannot work and were not named. */
static qc_status open_gpus(qc_devices *out, const qc_device_wish *w, unsigned count,
                           qc_arena *arena, qc_error *err)
{
    for (unsigned i = count; i < QC_MAX_GPUS; i++)
        if (w->gpus >> i & 1)
            return refuse_index(out->work, w, i, count, arena, err);
    for (unsigned i = 0; i < count && i < QC_MAX_GPUS; i++) {
        qc_error why = {0};
        if (w->gpus != 0 && !(w->gpus >> i & 1))
            continue;
        qc_status st = out->work->device_open(&out->gpus[out->gpu_count], (int)i, &why);
        if (st == QC_OK) {
            out->gpu_count++;
            continue;
        }
        if (w->gpus != 0)
            QC_FAIL(err, st, "%s%s: %s", w->from, w->text, why.msg);
        if (!out->why)
            QC_TRY(qc_arena_strndup(arena, &out->why, why.msg, strlen(why.msg), err));
    }
    if (out->gpu_count == 0 && out->wished)
        QC_FAIL(err, QC_ERR_DEVICE, "%s%s: %s", w->from, w->text, out->why);
    return QC_OK;
}

qc_status qc_devices_choose(qc_devices *out, qc_device_options from, uint64_t source_bytes,
                            qc_arena *arena, qc_error *err)
{
    const qc_gpu_work *work = from.work;
    qc_device_wish w;
    char why[256] = "";
    int count = 0;
    memset(out, 0, sizeof *out);
    QC_TRY(qc_device_wish_read(&w, from.wish, err));
    if (w.cpu) {
        const char *said = NULL;
        QC_TRY(qc_arena_printf(arena, &said, err, "%s%s", w.from, w.text));
        return use_cpu(out, said);
    }
    out->wished = w.cuda;
    out->work = work;
    if (!work) {
        if (out->wished)
            QC_FAIL(err, QC_ERR_DEVICE,
                    "%s%s: this build of qconv has no GPU kernels (docs/building.md)", w.from,
                    w.text);
        return use_cpu(out, "this build has no GPU kernels");
    }
    if (!out->wished && source_bytes < QC_GPU_WORTH_BYTES)
        return use_cpu(out, "too little to quantize for a GPU to be worth its start");
    /* GPUs are counted as the driver and 'qconv hardware' count them, unless the user says how. */
    if (setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 0) != 0)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory");
    work->device_count(&count, why, sizeof why);
    if (count <= 0) {
        if (out->wished)
            QC_FAIL(err, QC_ERR_DEVICE, "%s%s: there is no GPU: %s", w.from, w.text, why);
        const char *said = NULL;
        QC_TRY(qc_arena_strndup(arena, &said, why, strlen(why), err));
        return use_cpu(out, said);
    }
    QC_TRY(open_gpus(out, &w, (unsigned)count, arena, err));
    if (out->gpu_count == 0)
        return use_cpu(out, out->why);
    out->why = NULL;
    out->text = "";
    for (unsigned i = 0; i < out->gpu_count; i++)
        QC_TRY(qc_arena_printf(arena, &out->text, err, "%s%scuda:%d (%s)", out->text, i ? ", " : "",
                               out->gpus[i].index, out->gpus[i].name));
    return QC_OK;
}
