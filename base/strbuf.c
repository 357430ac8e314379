#include "base/strbuf.h"

#include "base/alloc.h"
#include "base/checked.h"

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

static qc_status reserve(qc_strbuf *b, size_t more, qc_error *err)
{
    size_t want = 0;
    if (qc_add_size(b->len, more, &want) || want > b->max || qc_add_size(want, 1, &want))
        QC_FAIL(err, QC_ERR_NOMEM, "text of more than %zu bytes", b->max);
    if (want <= b->cap)
        return QC_OK;
    size_t cap = b->cap ? b->cap : 256;
    while (cap < want && cap <= SIZE_MAX / 2)
        cap *= 2;
    if (cap < want)
        cap = want;
    void *p = b->data;
    QC_TRY(qc_realloc_array(&p, cap, 1, err));
    b->data = p;
    b->cap = cap;
    return QC_OK;
}

qc_status qc_strbuf_add(qc_strbuf *b, const void *bytes, size_t len, qc_error *err)
{
    QC_TRY(reserve(b, len, err));
    if (len)
        memcpy(b->data + b->len, bytes, len);
    b->len += len;
    b->data[b->len] = '\0';
    return QC_OK;
}

qc_status qc_strbuf_adds(qc_strbuf *b, const char *s, qc_error *err)
{
    return qc_strbuf_add(b, s, strlen(s), err);
}

qc_status qc_strbuf_addf(qc_strbuf *b, qc_error *err, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "text could not be formatted");
    QC_TRY(reserve(b, (size_t)n, err));
    va_start(ap, fmt);
    (void)vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)n;
    return QC_OK;
}
