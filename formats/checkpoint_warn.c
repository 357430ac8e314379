/* Warnings about a checkpoint, and the lists of names that stand in them. */
#include "formats/checkpoint_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define WARNINGS_MAX     64u
#define NAMES_SHOWN      5u
#define NAMES_MORE_BYTES 32u /* room for " and N more" */
#define NAME_SHOWN_BYTES 160

void qc_ckpt_names_add(qc_ckpt_names *list, const char *name)
{
    size_t room = sizeof list->text - NAMES_MORE_BYTES - list->used;
    list->count++;
    if (list->shown + 1 != list->count || list->shown == NAMES_SHOWN)
        return;
    int n = snprintf(list->text + list->used, room, "%s'%.*s'", list->shown ? ", " : "",
                     NAME_SHOWN_BYTES, name);
    if (n < 0 || (size_t)n >= room) {
        list->text[list->used] = '\0';
        return;
    }
    list->used += (size_t)n;
    list->shown++;
}

const char *qc_ckpt_names_text(qc_ckpt_names *list)
{
    if (list->count > list->shown) {
        (void)snprintf(list->text + list->used, sizeof list->text - list->used, " and %zu more",
                       list->count - list->shown);
        list->shown = list->count;
    }
    return list->text;
}

qc_status qc_ckpt_warn(qc_checkpoint *c, qc_error *err, const char *fmt, ...)
{
    qc_error text; /* used for its length and because it cleans control characters */
    va_list ap;
    if (c->warning_count == WARNINGS_MAX)
        return QC_OK;
    char raw[sizeof text.msg];
    va_start(ap, fmt);
    int n = vsnprintf(raw, sizeof raw, fmt, ap);
    va_end(ap);
    if (n < 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "text could not be formatted");
    (void)qc_error_set(&text, QC_OK, __FILE__, __LINE__, "%s", raw);
    if (!c->warnings) {
        void *p = NULL;
        QC_TRY(qc_arena_alloc(&c->arena, &p, WARNINGS_MAX, sizeof *c->warnings, err));
        c->warnings = p;
    }
    QC_TRY(qc_arena_strndup(&c->arena, &c->warnings[c->warning_count], text.msg, strlen(text.msg),
                            err));
    c->warning_count++;
    return QC_OK;
}
