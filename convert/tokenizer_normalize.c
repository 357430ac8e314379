/* Normalizers: Unicode's forms by utf8proc, a prefix, and replacements. */
#include "base/alloc.h"
#include "base/workers.h"
#include "convert/tokenizer_parts.h"

#include <string.h>
#include <utf8proc.h>

static int is_ascii(qc_span s)
{
    for (size_t i = 0; i < s.len; i++)
        if ((unsigned char)s.text[i] >= 0x80)
            return 0;
    return 1;
}

static qc_status unicode_form(int form, qc_span s, qc_strbuf *out, qc_error *err)
{
    const utf8proc_uint8_t *text = (const utf8proc_uint8_t *)s.text;
    utf8proc_ssize_t len = (utf8proc_ssize_t)s.len;
    utf8proc_option_t options = (utf8proc_option_t)form;
    void *v = NULL;
    utf8proc_ssize_t n = utf8proc_decompose(text, len, NULL, 0, options);
    if (n < 0)
        QC_FAIL(err, QC_ERR_INPUT, "the text cannot be normalized: %s", utf8proc_errmsg(n));
    /* One more, for the NUL that utf8proc_reencode adds. */
    QC_TRY(qc_realloc_array(&v, (size_t)n + 1, sizeof(utf8proc_int32_t), err));
    utf8proc_int32_t *codes = v;
    n = utf8proc_decompose(text, len, codes, n, options);
    if (n >= 0)
        n = utf8proc_reencode(codes, n, options);
    qc_status st = n < 0 ? qc_error_set(err, QC_ERR_INPUT, __FILE__, __LINE__,
                                        "the text cannot be normalized: %s", utf8proc_errmsg(n))
                         : qc_strbuf_add(out, v, (size_t)n, err);
    qc_free(v);
    return st;
}

static qc_status replace(const qc_norm *n, qc_matcher *m, qc_span s, qc_strbuf *out, qc_error *err)
{
    size_t done = 0, content = strlen(n->content);
    for (size_t from = 0; from <= s.len;) {
        int found = 0;
        size_t begin = 0, end = 0;
        if (qc_interrupted())
            QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
        QC_TRY(qc_pattern_find(n->pattern, m, s, from, &found, &begin, &end, err));
        if (!found)
            break;
        if (end == begin)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "the tokenizer's normalizer replaces matches of nothing");
        QC_TRY(qc_strbuf_add(out, s.text + done, begin - done, err));
        QC_TRY(qc_strbuf_add(out, n->content, content, err));
        done = from = end;
    }
    return qc_strbuf_add(out, s.text + done, s.len - done, err);
}

qc_status qc_normalize(const qc_norm *norms, size_t count, qc_matcher *m, qc_norm_room *room,
                       qc_span s, qc_span *out, qc_error *err)
{
    for (size_t i = 0; i < count && s.len > 0; i++) {
        const qc_norm *n = &norms[i];
        if (n->kind == QC_NORM_UNICODE && is_ascii(s))
            continue; /* the same in every form */
        room->turn ^= 1;
        qc_strbuf *to = &room->text[room->turn];
        to->len = 0;
        switch (n->kind) {
        case QC_NORM_UNICODE:
            QC_TRY(unicode_form(n->form, s, to, err));
            break;
        case QC_NORM_PREPEND:
            QC_TRY(qc_strbuf_adds(to, n->content, err));
            QC_TRY(qc_strbuf_add(to, s.text, s.len, err));
            break;
        case QC_NORM_REPLACE:
            QC_TRY(replace(n, m, s, to, err));
            break;
        }
        s = (qc_span){to->data ? to->data : "", to->len};
    }
    *out = s;
    return QC_OK;
}
