/* Normalizers: Unicode's forms (by utf8proc), a prefix, replacements, and BERT's. */
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

/* The blocks of ideographs that BERT has, with a beginning (0x2b920) that the package has so. */
static int stands_apart(utf8proc_int32_t c)
{
    static const utf8proc_int32_t blocks[][2] = {
        {0x3400, 0x4dbf},   {0x4e00, 0x9fff},   {0xf900, 0xfaff},   {0x20000, 0x2a6df},
        {0x2a700, 0x2b81f}, {0x2b920, 0x2ceaf}, {0x2f800, 0x2fa1f},
    };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        if (c >= blocks[i][0] && c <= blocks[i][1])
            return 1;
    return 0;
}

static int is_control(utf8proc_int32_t c)
{
    const utf8proc_category_t k = utf8proc_category(c);
    return c == 0xfffd || k == UTF8PROC_CATEGORY_CC || k == UTF8PROC_CATEGORY_CF ||
           k == UTF8PROC_CATEGORY_CO;
}

static qc_status put(qc_strbuf *out, utf8proc_int32_t c, qc_error *err)
{
    utf8proc_uint8_t text[4];
    return qc_strbuf_add(out, text, (size_t)utf8proc_encode_char(c, text), err);
}

#define DOTTED_I  0x130 /* the one character that is two in lower case */
#define DOT_ABOVE 0x307

static qc_status character(int does, utf8proc_int32_t c, qc_strbuf *out, qc_error *err)
{
    if (does & QC_CHARS_CLEAN && c != '\t' && c != '\n' && c != '\r' && is_control(c))
        return QC_OK;
    if (does & QC_CHARS_CLEAN && qc_is_white_space((uint32_t)c))
        c = ' ';
    if (does & QC_CHARS_STRIP && utf8proc_category(c) == UTF8PROC_CATEGORY_MN)
        return QC_OK;
    if (does & QC_CHARS_LOWER && c == DOTTED_I) {
        QC_TRY(put(out, 'i', err));
        return put(out, DOT_ABOVE, err);
    }
    if (does & QC_CHARS_LOWER)
        c = utf8proc_tolower(c);
    const int apart = does & QC_CHARS_APART && stands_apart(c);
    if (apart)
        QC_TRY(put(out, ' ', err));
    QC_TRY(put(out, c, err));
    return apart ? put(out, ' ', err) : QC_OK;
}

static qc_status characters(int does, qc_span s, qc_strbuf *out, qc_error *err)
{
    for (size_t at = 0; at < s.len;) {
        utf8proc_int32_t c = 0;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)s.text + at,
                                              (utf8proc_ssize_t)(s.len - at), &c);
        QC_TRY(character(does, c, out, err));
        at += n > 0 ? (size_t)n : 1;
    }
    return QC_OK;
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
        case QC_NORM_CHARACTERS: /* a character of three bytes becomes five */
            QC_TRY(qc_token_budget_make(budget, i, 2 * s.len, err));
            QC_TRY(characters(n->form, s, to, err));
            break;
        }
        s = (qc_span){to->data ? to->data : "", to->len};
    }
    *out = s;
    return QC_OK;
}
