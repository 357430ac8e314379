/* Pre-tokenizers are steps that cut a span, and may rewrite it first. */
#include "convert/tokenizer/tokenizer_internal.h"

#include <string.h>
#include <utf8proc.h>

/* ---- cutting -------------------------------------------------------------------------------- */

/* Spans come in order, matched or not, and go on to the next step as the behaviour says. */
typedef struct {
    qc_encoder *e;
    size_t next_step;
    const char *text;
    qc_split_behavior behavior;
    int first;            /* the text begins with this span */
    int held, held_match; /* a span that may grow */
    size_t begin, end;    /* the place of that span */
} cutter;

static qc_status hand_on(cutter *c, size_t begin, size_t end, qc_error *err)
{
    if (begin == end)
        return QC_OK;
    return qc_step_run(c->e, c->next_step, (qc_span){c->text + begin, end - begin},
                       c->first && begin == 0, err);
}

static qc_status release(cutter *c, qc_error *err)
{
    int held = c->held;
    c->held = 0;
    return held ? hand_on(c, c->begin, c->end, err) : QC_OK;
}

static qc_status span(cutter *c, size_t begin, size_t end, int match, qc_error *err)
{
    int grows = 0;
    switch (c->behavior) {
    case QC_SPLIT_ISOLATED:
        return hand_on(c, begin, end, err);
    case QC_SPLIT_REMOVED:
        return match ? QC_OK : hand_on(c, begin, end, err);
    case QC_SPLIT_PREVIOUS:
        grows = c->held && match && !c->held_match;
        break;
    case QC_SPLIT_NEXT:
        grows = c->held && c->held_match && !match;
        break;
    case QC_SPLIT_CONTIGUOUS:
        grows = c->held && match == c->held_match;
        break;
    }
    if (!grows) {
        QC_TRY(release(c, err));
        c->begin = begin;
    }
    c->held = 1;
    c->held_match = match;
    c->end = end;
    return QC_OK;
}

static qc_status split(const qc_step *s, cutter *c, qc_span piece, qc_error *err)
{
    size_t done = 0, from = 0;
    int matched = 0; /* there was a match before, and it ended at `done` */
    while (from <= piece.len) {
        int found = 0;
        size_t begin = 0, end = 0;
        QC_TRY(qc_pattern_find(s->pattern, c->e->matcher, piece, from, &found, &begin, &end, err));
        if (!found)
            break;
        if (begin == end && matched && begin == done) {
            /* The match is empty and directly follows the last one, so we go on by one
             * character. */
            do
                from++;
            while (from < piece.len && ((unsigned char)piece.text[from] & 0xc0) == 0x80);
            continue;
        }
        if (begin > done)
            QC_TRY(span(c, done, begin, s->invert, err));
        QC_TRY(span(c, begin, end, !s->invert, err));
        matched = 1;
        done = from = end;
    }
    if (done < piece.len)
        QC_TRY(span(c, done, piece.len, s->invert, err));
    return release(c, err);
}

/* ---- rewriting ------------------------------------------------------------------------------ */

/* The character that GPT-2 uses for a byte. Printable characters of Latin-1 stand for themselves,
 * and the other bytes get characters from U+0100 on, in order. */
static uint32_t byte_character(unsigned char b)
{
    if ((b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae)
        return b;
    if (b <= 0x20)
        return 0x100u + b;
    return b == 0xad ? 0x143u : 0x121u + (b - 0x7fu);
}

static qc_status to_characters(qc_strbuf *out, qc_span s, qc_error *err)
{
    out->len = 0;
    for (size_t i = 0; i < s.len; i++) {
        uint8_t text[4];
        uint32_t c = byte_character((unsigned char)s.text[i]);
        size_t len = (size_t)utf8proc_encode_char((utf8proc_int32_t)c, text);
        QC_TRY(qc_strbuf_add(out, text, len, err));
    }
    return QC_OK;
}

static int starts_with(qc_span s, const char *head)
{
    size_t n = strlen(head);
    return s.len >= n && memcmp(s.text, head, n) == 0;
}

/* Makes room for the text that a step rewrites. */
static qc_status make(qc_encoder *e, size_t step, size_t bytes, qc_error *err)
{
    return qc_token_budget_make(&e->budget, QC_MAX_STEPS + (unsigned)step, bytes, err);
}

/* ByteLevel first cuts the text and then writes each span in GPT-2's characters. So it is two steps
 * here, and this is the second. */
static qc_status bytes_step(qc_encoder *e, size_t step, qc_span s, int first, qc_error *err)
{
    qc_strbuf *out = &e->step_text[step];
    QC_TRY(make(e, step, s.len * 2, err)); /* a byte becomes a character of at most two bytes */
    QC_TRY(to_characters(out, s, err));
    return qc_step_run(e, step + 1, (qc_span){out->data, out->len}, first, err);
}

static qc_status metaspace_step(qc_encoder *e, size_t step, qc_span *s, int first, qc_error *err)
{
    const qc_step *p = &e->t->steps[step];
    qc_strbuf *out = &e->step_text[step];
    size_t space_bytes = strlen(p->space);
    int at_front = starts_with(*s, " ") || starts_with(*s, p->space);
    out->len = 0;
    QC_TRY(make(e, step, s->len, err));
    if (!at_front &&
        (p->prepend == QC_PREPEND_ALWAYS || (p->prepend == QC_PREPEND_FIRST && first))) {
        QC_TRY(make(e, step, space_bytes, err));
        QC_TRY(qc_strbuf_add(out, p->space, space_bytes, err));
    }
    for (size_t at = 0; at < s->len;) {
        const char *space = memchr(s->text + at, ' ', s->len - at);
        size_t n = space ? (size_t)(space - s->text) - at : s->len - at;
        QC_TRY(qc_strbuf_add(out, s->text + at, n, err));
        at += n;
        if (space) {
            QC_TRY(make(e, step, space_bytes, err));
            QC_TRY(qc_strbuf_add(out, p->space, space_bytes, err));
            at++;
        }
    }
    *s = (qc_span){out->data, out->len};
    return QC_OK;
}

qc_status qc_step_run(qc_encoder *e, size_t step, qc_span s, int first, qc_error *err)
{
    if (step == e->t->step_count)
        return e->t->wordpiece.prefix ? qc_wordpiece_encode(e, s, err)
                                      : qc_bpe_encode(&e->t->bpe, &e->bpe, s, err);
    const qc_step *p = &e->t->steps[step];
    if (p->kind == QC_STEP_BYTES)
        return bytes_step(e, step, s, first, err);
    if (p->kind == QC_STEP_METASPACE) {
        QC_TRY(metaspace_step(e, step, &s, first, err));
    } else if (p->prefix_space && !starts_with(s, " ")) {
        qc_strbuf *out = &e->step_text[step];
        out->len = 0;
        QC_TRY(make(e, step, s.len + 1, err));
        QC_TRY(qc_strbuf_adds(out, " ", err));
        QC_TRY(qc_strbuf_add(out, s.text, s.len, err));
        s = (qc_span){out->data, out->len};
    }
    if (!p->pattern)
        return qc_step_run(e, step + 1, s, first, err);
    cutter c = {
        .e = e, .next_step = step + 1, .text = s.text, .behavior = p->behavior, .first = first};
    return split(p, &c, s, err);
}
