/* qconv mount OUT DIR: shows in DIR what "qconv unpack OUT DIR" would write, and makes it as it is
 * read. */
#include "convert/cli/commands.h"
#include "convert/cli/diffusers_folder.h"
#include "convert/term/console.h"

#include <string.h>
#include <syslog.h>

/* Once the process is in the background, nobody sees its standard error. */
static void tell_fault(void *ctx, const qc_error *fault)
{
    const qc_options *o = ctx;
    if (o->mount.foreground)
        qc_console_error(fault, NULL, 0);
    else
        syslog(LOG_ERR, "%s", fault->msg);
}

/* The folder of a part is OUT and its name; its files come into a folder of that name. */
static qc_status add_output(const qc_options *o, qc_error *err)
{
    const char *prefix = "";
    if (strcmp(o->call.model, o->mount.root) != 0)
        QC_TRY(
            qc_arena_printf(o->call.arena, &prefix, err, "%s/", strrchr(o->call.model, '/') + 1));
    return qc_plain_files_add(o->mount.files, o->call.model, prefix, err);
}

static qc_status say_mounted(void *ctx, qc_error *err)
{
    const qc_options *o = ctx;
    qc_strbuf text;
    if (o->call.quiet)
        return QC_OK;
    qc_strbuf_init(&text, (size_t)1 << 20);
    qc_strbuf_putf(&text, "%s: mounted, %zu files; now in %s, until 'fusermount3 -u %s'%s\n",
                   o->call.model, qc_plain_files_count(o->mount.files), o->call.out, o->call.out,
                   o->mount.foreground ? " or Ctrl-C" : "");
    return qc_console_deliver(QC_OK, &text, NULL, err);
}

qc_status qc_cmd_mount(const qc_options *o, qc_error *err)
{
    qc_options own = *o;
    own.mount.root = o->call.model;
    QC_TRY(qc_mount_check(o->call.out, err));
    QC_TRY(qc_plain_files_create(&own.mount.files, tell_fault, &own, err));
    qc_status st = qc_is_diffusers_folder(&own, o->call.model)
                       ? qc_diffusers_each(&own, add_output, err)
                       : add_output(&own, err);
    if (st == QC_OK) {
        st = qc_mount_serve(&own.mount, o->call.out, o->call.threads, say_mounted, &own, err);
        if (st != QC_OK && !o->mount.foreground && err)
            tell_fault(&own, err); /* this may be the process in the background */
    }
    qc_plain_files_destroy(own.mount.files);
    return st;
}
