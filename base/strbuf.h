/* Growing text buffer with a hard limit; always NUL-terminated once anything was added.
 * Not thread-safe: one owner. */
#ifndef QC_BASE_STRBUF_H
#define QC_BASE_STRBUF_H

#include "base/status.h"

typedef struct {
    char *data; /* owned; NULL while empty */
    size_t len; /* without the NUL */
    size_t cap;
    size_t max; /* qc_strbuf_add fails beyond this many bytes */
} qc_strbuf;

void qc_strbuf_init(qc_strbuf *b, size_t max_bytes);
/* NULL is fine. */
void qc_strbuf_deinit(qc_strbuf *b);
QC_NODISCARD qc_status qc_strbuf_add(qc_strbuf *b, const void *bytes, size_t len, qc_error *err);
QC_NODISCARD qc_status qc_strbuf_adds(qc_strbuf *b, const char *s, qc_error *err);
QC_NODISCARD qc_status qc_strbuf_addf(qc_strbuf *b, qc_error *err, const char *fmt, ...)
    QC_PRINTF(3, 4);

#endif
