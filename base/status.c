#include "base/status.h"

#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int exit_code;
    const char *meaning;
} status_table[QC_STATUS_COUNT] = {
#define QC_STATUS_ROW(name, exit_code, meaning) {#name, exit_code, meaning},
    QC_STATUS_MAP(QC_STATUS_ROW)
#undef QC_STATUS_ROW
};

static int status_index(qc_status code)
{
    return (unsigned)code < QC_STATUS_COUNT ? (int)code : QC_ERR_INTERNAL;
}

const char *qc_status_name(qc_status code)
{
    return status_table[status_index(code)].name;
}

const char *qc_status_meaning(qc_status code)
{
    return status_table[status_index(code)].meaning;
}

int qc_status_exit_code(qc_status code)
{
    return status_table[status_index(code)].exit_code;
}

int qc_status_is_refusal(qc_status code)
{
    int exit_code = qc_status_exit_code(code);
    return exit_code == 2 || exit_code == 3;
}

/* Shortens s (capacity cap, NUL-terminated) to end in "...", never inside a UTF-8 sequence. */
static void end_with_dots(char *s, size_t cap)
{
    size_t end = cap - 4;
    while (end > 0 && ((unsigned char)s[end] & 0xc0) == 0x80)
        end--;
    memcpy(s + end, "...", 4);
}

qc_status qc_error_set(qc_error *err, qc_status code, const char *file, int line, const char *fmt,
                       ...)
{
    if (!err || !fmt)
        return code;
    err->code = code;
    err->file = file;
    err->line = line;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    if (n < 0)
        err->msg[0] = '\0';
    else if ((size_t)n >= sizeof err->msg)
        end_with_dots(err->msg, sizeof err->msg);
    /* Messages contain names from untrusted files, so they are kept to one line without terminal
     * escapes. */
    qc_text_printable(err->msg);
    return code;
}

qc_status qc_error_recode(qc_error *err, qc_status code)
{
    if (err)
        err->code = code;
    return code;
}

void qc_error_prefix(qc_error *err, const char *fmt, ...)
{
    if (!err || !fmt)
        return;
    char prefix[sizeof err->msg];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    if (n < 0)
        return;
    char whole[2 * sizeof err->msg + 4];
    (void)snprintf(whole, sizeof whole, "%s: %s", prefix, err->msg);
    size_t len = strlen(whole);
    if (len < sizeof err->msg) {
        memcpy(err->msg, whole, len + 1);
    } else {
        memcpy(err->msg, whole, sizeof err->msg);
        end_with_dots(err->msg, sizeof err->msg);
    }
    qc_text_printable(err->msg);
}
