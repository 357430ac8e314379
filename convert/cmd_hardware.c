#include "convert/commands.h"
#include "convert/console.h"
#include "convert/hardware_print.h"
#include "convert/memory_watch.h"

#define MAX_TEXT_BYTES (1u << 22)

static qc_status print(const qc_hardware *h, const qc_options *o, qc_arena *arena, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, MAX_TEXT_BYTES);
    qc_status st =
        o->json ? qc_hardware_json(h, arena, &out, err) : qc_hardware_text(h, arena, &out, err);
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    return st;
}

qc_status qc_cmd_hardware(const qc_options *o, qc_error *err)
{
    qc_hardware h;
    if (o->hardware.as)
        QC_TRY(qc_hardware_assume(&h, o->arena, o->hardware.as, err));
    else
        QC_TRY(qc_hardware_read(&h, o->arena, err));
    if (h.warning)
        qc_console_warn(o, "%s", h.warning);
    if (o->hardware.watch)
        return qc_memory_watch(&h, o, err);
    return print(&h, o, o->arena, err);
}
