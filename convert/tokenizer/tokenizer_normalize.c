/* Normalizers: Unicode's forms (by utf8proc), a prefix, and replacements. */
#include "base/alloc.h"
#include "base/workers.h"
#include "convert/tokenizer/tokenizer_internal.h"

#include <string.h>
#include <utf8proc.h>

static int is_ascii(qc_span s)
{
    for (size_t i = 0; i < s.len; i++)
        if ((unsigned char)s.text[i] >= 0x80)
            return 0;
    return 1;
}

/* utf8proc sorts marks by exchanging neighbours, so its time grows with the square of how many
 * follow one another. Those few characters without a class that become marks with one are marks
 * (Mn) themselves. */
static qc_status spend_on_marks(qc_token_budget *b, qc_span s, qc_error *err)
{
    uint64_t run = 0, steps = 0;
    for (size_t at = 0; at < s.len;) {
        utf8proc_int32_t c = 0;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)s.text + at,
                                              (utf8proc_ssize_t)(s.len - at), &c);
        const utf8proc_property_t *p = utf8proc_get_property(c);
        run = p->combining_class || p->category == UTF8PROC_CATEGORY_MN ? run + 1 : 0;
        steps += run; /* the sum over a run of marks is half its square */
        at += n > 0 ? (size_t)n : 1;
    }
    return qc_token_budget_spend(b, steps) ? QC_OK : qc_token_budget_check(b, err);
}

static qc_status unicode_form(qc_token_budget *b, unsigned stage, int form, qc_span s,
                              qc_strbuf *out, qc_error *err)
{
    const utf8proc_uint8_t *text = (const utf8proc_uint8_t *)s.text;
    utf8proc_ssize_t len = (utf8proc_ssize_t)s.len;
    utf8proc_option_t options = (utf8proc_option_t)form;
    QC_TRY(spend_on_marks(b, s, err));
    utf8proc_ssize_t n = utf8proc_decompose(text, len, NULL, 0, options);
    if (n < 0)
        QC_FAIL(err, QC_ERR_INPUT, "the text cannot be normalized: %s", utf8proc_errmsg(n));
    QC_TRY(qc_token_budget_make(b, stage, (size_t)n, err));
    size_t counted = (size_t)n;
    /* One more is needed for the NUL that utf8proc_reencode adds. */
    utf8proc_int32_t *codes = NULL;
    QC_TRY(qc_realloc_array(&codes, (size_t)n + 1, sizeof(utf8proc_int32_t), err));
    n = utf8proc_decompose(text, len, codes, n, options);
    if (n >= 0)
        n = utf8proc_reencode(codes, n, options);
    qc_status st =
        n < 0 ? QC_ERROR(err, QC_ERR_INPUT, "the text cannot be normalized: %s", utf8proc_errmsg(n))
              : QC_OK;
    if (st == QC_OK && (size_t)n > counted) /* some characters have more than one byte */
        st = qc_token_budget_make(b, stage, (size_t)n - counted, err);
    if (st == QC_OK)
        st = qc_strbuf_add(out, codes, (size_t)n, err);
    qc_free(codes);
    return st;
}

static qc_status replace(const qc_norm *n, unsigned stage, qc_matcher *m, qc_span s, qc_strbuf *out,
                         qc_error *err)
{
    size_t done = 0, content = strlen(n->content);
    qc_token_budget *budget = qc_matcher_budget(m);
    for (size_t from = 0; from <= s.len;) {
        int found = 0;
        size_t begin = 0, end = 0;
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_pattern_find(n->pattern, m, s, from, &found, &begin, &end, err));
        if (!found)
            break;
        if (end == begin)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "the tokenizer's normalizer replaces matches of an empty text, which is not "
                    "supported");
        QC_TRY(qc_token_budget_make(budget, stage, begin - done, err));
        QC_TRY(qc_token_budget_make(budget, stage, content, err));
        QC_TRY(qc_strbuf_add(out, s.text + done, begin - done, err));
        QC_TRY(qc_strbuf_add(out, n->content, content, err));
        done = from = end;
    }
    QC_TRY(qc_token_budget_make(budget, stage, s.len - done, err));
    return qc_strbuf_add(out, s.text + done, s.len - done, err);
}

qc_status qc_normalize(const qc_norm *norms, size_t count, qc_matcher *m, qc_norm_room *room,
                       qc_span s, qc_span *out, qc_error *err)
{
    qc_token_budget *budget = qc_matcher_budget(m);
    for (unsigned i = 0; i < count && s.len > 0; i++) {
        const qc_norm *n = &norms[i];
        if (n->kind == QC_NORM_UNICODE && is_ascii(s))
            continue; /* it is the same in every form */
        room->turn ^= 1;
        qc_strbuf *to = &room->text[room->turn];
        to->len = 0;
        switch (n->kind) {
        case QC_NORM_UNICODE:
            QC_TRY(unicode_form(budget, i, n->form, s, to, err));
            break;
        case QC_NORM_PREPEND:
            QC_TRY(qc_token_budget_make(budget, i, strlen(n->content), err));
            QC_TRY(qc_token_budget_make(budget, i, s.len, err));
            QC_TRY(qc_strbuf_adds(to, n->content, err));
            QC_TRY(qc_strbuf_add(to, s.text, s.len, err));
            break;
        case QC_NORM_REPLACE:
            QC_TRY(replace(n, i, m, s, to, err));
            break;
        }
        s = (qc_span){to->data ? to->data : "", to->len};
    }
    *out = s;
    return QC_OK;
}
