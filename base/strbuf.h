/* A growing text buffer with a hard limit; it is always NUL-terminated once anything was added.
 * Not thread-safe: it has one owner. */
#ifndef QC_BASE_STRBUF_H
#define QC_BASE_STRBUF_H

#include "base/status.h"

typedef struct {
    char *data; /* owned; NULL while empty */
    size_t len; /* without the NUL */
    size_t cap;
    size_t max;       /* adding fails beyond this many bytes */
    qc_status failed; /* the first failure of a put; later puts do nothing */
    size_t wanted;    /* how many bytes were asked for when it failed */
} qc_strbuf;

void qc_strbuf_init(qc_strbuf *b, size_t max_bytes);
/* b may be NULL. */
void qc_strbuf_deinit(qc_strbuf *b);

/* Append without a check after each call: ask qc_strbuf_status once before you use the text. */
void qc_strbuf_put(qc_strbuf *b, const void *bytes, size_t len);
void qc_strbuf_puts(qc_strbuf *b, const char *s);
void qc_strbuf_putf(qc_strbuf *b, const char *fmt, ...) QC_PRINTF(2, 3);
/* The same for a line with names from a file or a command line, which may hold anything: what is
 * added is made printable (qc_text_printable), but for a line feed at its end. */
void qc_strbuf_show(qc_strbuf *b, const char *fmt, ...) QC_PRINTF(2, 3);
/* QC_OK, or the error of the first put that failed. */
QC_NODISCARD qc_status qc_strbuf_status(const qc_strbuf *b, qc_error *err);

/* Append and return the status at once; where it fails, the buffer is as it was before. */
QC_NODISCARD qc_status qc_strbuf_add(qc_strbuf *b, const void *bytes, size_t len, qc_error *err);
QC_NODISCARD qc_status qc_strbuf_adds(qc_strbuf *b, const char *s, qc_error *err);
QC_NODISCARD qc_status qc_strbuf_addf(qc_strbuf *b, qc_error *err, const char *fmt, ...)
    QC_PRINTF(3, 4);

#endif
