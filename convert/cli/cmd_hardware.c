#include "convert/cli/commands.h"
#include "convert/device/device_choice.h"
#include "convert/hardware/hardware_print.h"
#include "convert/term/console.h"

#include <string.h>

#define MAX_TEXT_BYTES (1u << 22)

/* Asks CUDA what a large conversion would run on. If CUDA cannot start, that is a fact to show and
 * no error. */
static qc_status ask_cuda(qc_hardware *h, const qc_options *o, qc_error *err)
{
    qc_devices *d = NULL;
    qc_error why = {0};
    QC_TRY(qc_arena_alloc(o->call.arena, &d, 1, sizeof *d, err));
    h->cuda_build = o->devices.work ? o->devices.work->build() : NULL;
    if (h->assumed)
        return QC_OK;
    qc_status st = qc_devices_choose(d, (qc_device_options){o->devices.work, NULL}, UINT64_MAX,
                                     o->call.arena, &why);
    if (st == QC_ERR_NOMEM)
        return qc_error_pass(err, &why, st);
    if (st != QC_OK)
        return qc_arena_strndup(o->call.arena, &h->quantizes_why, why.msg, strlen(why.msg), err);
    h->quantizes_on = d->text;
    h->quantizes_why = d->why;
    return QC_OK;
}

qc_status qc_cmd_hardware(const qc_options *o, qc_error *err)
{
    qc_hardware h;
    qc_strbuf out;
    if (o->as)
        QC_TRY(qc_hardware_assume(&h, o->call.arena, o->as, err));
    else
        QC_TRY(qc_hardware_read(&h, o->call.arena, err));
    if (h.warning)
        qc_console_warn(&o->call, "%s", h.warning);
    QC_TRY(ask_cuda(&h, o, err));
    qc_strbuf_init(&out, MAX_TEXT_BYTES);
    qc_status st = o->call.json ? qc_hardware_json(&h, o->call.arena, &out, err)
                                : qc_hardware_text(&h, o->call.arena, &out, err);
    return qc_console_deliver(st, &out, NULL, err);
}
