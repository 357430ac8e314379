#include "base/strbuf.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void qc_strbuf_init(qc_strbuf *b, size_t max_bytes)
{
    memset(b, 0, sizeof *b);
    b->max = max_bytes;
}

void qc_strbuf_deinit(qc_strbuf *b)
{
    if (!b)
        return;
    qc_free(b->data);
    qc_strbuf_init(b, b->max);
}

/* Makes room for `more` bytes and the NUL; returns 0 where that fails or a put failed before. */
static int reserve(qc_strbuf *b, size_t more)
{
    size_t want = 0, cap = b->cap ? b->cap : 256;
    void *p = b->data;
    if (b->failed != QC_OK)
        return 0;
    b->wanted = SIZE_MAX;
    b->failed = QC_ERR_NOMEM;
    if (qc_add_size(b->len, more, &b->wanted) || b->wanted > b->max ||
        qc_add_size(b->wanted, 1, &want))
        return 0;
    while (cap < want && cap <= SIZE_MAX / 2)
        cap *= 2;
    if (cap < want)
        cap = want;
    if (cap > b->cap && qc_realloc_array(&p, cap, 1, NULL) != QC_OK)
        return 0;
    b->data = p;
    b->cap = cap;
    b->failed = QC_OK;
    return 1;
}

void qc_strbuf_put(qc_strbuf *b, const void *bytes, size_t len)
{
    if (!reserve(b, len))
        return;
    if (len)
        memcpy(b->data + b->len, bytes, len);
    b->len += len;
    b->data[b->len] = '\0';
}

void qc_strbuf_puts(qc_strbuf *b, const char *s)
{
    qc_strbuf_put(b, s, strlen(s));
}

static void put_format(qc_strbuf *b, const char *fmt, va_list args)
{
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    if (n < 0 && b->failed == QC_OK)
        b->failed = QC_ERR_INTERNAL;
    if (n >= 0 && reserve(b, (size_t)n)) {
        (void)vsnprintf(b->data + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
}

void qc_strbuf_putf(qc_strbuf *b, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    put_format(b, fmt, args);
    va_end(args);
}

void qc_strbuf_show(qc_strbuf *b, const char *fmt, ...)
{
    const size_t at = b->len;
    va_list args;
    va_start(args, fmt);
    put_format(b, fmt, args);
    va_end(args);
    const int is_line = b->len > at && b->data[b->len - 1] == '\n';
    if (is_line)
        b->data[b->len - 1] = '\0';
    if (b->len > at)
        qc_text_printable(b->data + at);
    if (is_line)
        b->data[b->len - 1] = '\n';
}

qc_status qc_strbuf_status(const qc_strbuf *b, qc_error *err)
{
    if (b->failed == QC_OK)
        return QC_OK;
    if (b->failed == QC_ERR_INTERNAL)
        QC_FAIL(err, QC_ERR_INTERNAL, "a text could not be formatted");
    if (b->wanted > b->max)
        QC_FAIL(err, QC_ERR_NOMEM, "a text is longer than the %zu bytes that it may have", b->max);
    QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu bytes of text", b->wanted);
}

/* Gives what an add returns: its own failure is returned and forgotten, but that of an earlier put
 * stays. */
static qc_status report(qc_strbuf *b, qc_status before, qc_error *err)
{
    qc_status st = qc_strbuf_status(b, err);
    b->failed = before;
    return st;
}

qc_status qc_strbuf_add(qc_strbuf *b, const void *bytes, size_t len, qc_error *err)
{
    qc_status before = b->failed;
    qc_strbuf_put(b, bytes, len);
    return report(b, before, err);
}

qc_status qc_strbuf_adds(qc_strbuf *b, const char *s, qc_error *err)
{
    return qc_strbuf_add(b, s, strlen(s), err);
}

qc_status qc_strbuf_addf(qc_strbuf *b, qc_error *err, const char *fmt, ...)
{
    qc_status before = b->failed;
    va_list args;
    va_start(args, fmt);
    put_format(b, fmt, args);
    va_end(args);
    return report(b, before, err);
}
