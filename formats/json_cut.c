#include "formats/json_cut.h"
#include "base/checked.h"

#include <string.h>

enum { BEFORE, INSIDE, BEHIND };

void qc_json_cut_init(qc_json_cut *c, const qc_json_parts *parts)
{
    memset(c, 0, sizeof *c);
    c->parts = *parts;
    qc_strbuf_init(&c->text, SIZE_MAX / 2);
    qc_strbuf_init(&c->word, SIZE_MAX / 2);
}

void qc_json_cut_deinit(qc_json_cut *c)
{
    qc_strbuf_deinit(&c->text);
    qc_strbuf_deinit(&c->word);
}

static qc_status give(qc_json_cut *c, qc_json_part_fn fn, qc_error *err)
{
    qc_status st =
        fn ? fn(c->parts.ctx, c->text.data ? c->text.data : "", c->text.len, err) : QC_OK;
    c->text.len = 0;
    return st;
}

/* Index of the first byte from `at` on that is not white space. */
static size_t skip_space(const qc_strbuf *text, size_t at)
{
    while (at < text->len && (text->data[at] == ' ' || text->data[at] == '\n' ||
                              text->data[at] == '\r' || text->data[at] == '\t'))
        at++;
    return at;
}

static int is_blank(const qc_json_cut *c)
{
    return skip_space(&c->text, c->is_object ? 1 : 0) == c->text.len;
}

/* Handles a comma of the list or its end; the character is not in the text. */
static qc_status end_element(qc_json_cut *c, int last, qc_error *err)
{
    if (!(last && c->elements == 0 && is_blank(c))) {
        if (c->is_object && is_blank(c)) /* else it would be taken for an object without members */
            QC_FAIL(err, QC_ERR_INPUT, "JSON: expected a key in quotes in list '%s'",
                    c->parts.list);
        if (c->is_object)
            QC_TRY(qc_strbuf_adds(&c->text, "}", err));
        QC_TRY(give(c, c->parts.element, err));
        c->elements++;
    }
    c->text.len = 0;
    if (last)
        c->phase = BEHIND;
    return !last && c->is_object ? qc_strbuf_adds(&c->text, "{", err) : QC_OK;
}

static qc_status add_run(qc_json_cut *c, const char *from, const char *to, qc_error *err)
{
    if (to == from)
        return QC_OK;
    size_t n = (size_t)(to - from);
    if (c->depth == 1 && c->in_string && c->phase == BEFORE) {
        /* One byte more than the key to compare with is enough to tell that the word differs. */
        size_t room = strlen(c->parts.list) + 1 - c->word.len;
        QC_TRY(qc_strbuf_add(&c->word, from, qc_min_size(n, room), err));
    }
    return qc_strbuf_add(&c->text, from, n, err);
}

/* Handles a byte outside strings that may end something. *eaten: the byte belongs to no part. */
static qc_status take_mark(qc_json_cut *c, char b, int *eaten, qc_error *err)
{
    *eaten = 0;
    if (b == '{' || b == '[') {
        int is_list = c->phase == BEFORE && c->depth == 1 && c->in_object && c->word.len > 0 &&
                      strcmp(c->word.data, c->parts.list) == 0;
        if (c->depth++ == 0)
            c->in_object = b == '{';
        if (is_list) {
            *eaten = 1;
            c->is_object = b == '{';
            QC_TRY(qc_strbuf_adds(&c->text, c->is_object ? "{}}" : "[]}", err));
            QC_TRY(give(c, c->parts.head, err));
            c->phase = INSIDE;
            return c->is_object ? qc_strbuf_adds(&c->text, "{", err) : QC_OK;
        }
    } else if (b == '}' || b == ']') {
        c->depth -= c->depth > 0;
        if (c->phase == INSIDE && c->depth == 1) {
            *eaten = 1;
            c->is_mismatched = (b == '}') != c->is_object;
            return end_element(c, 1, err);
        }
    } else if (c->phase == INSIDE && c->depth == 2) { /* a comma */
        *eaten = 1;
        return end_element(c, 0, err);
    }
    return QC_OK;
}

qc_status qc_json_cut_feed(qc_json_cut *c, const char *bytes, size_t len, qc_error *err)
{
    const char *end = bytes + len, *run = bytes;
    for (const char *p = bytes; p < end; p++) {
        int eaten = 0;
        if (c->escaped) {
            c->escaped = 0;
        } else if (c->in_string && *p == '\\') {
            c->escaped = 1;
        } else if (*p == '"') {
            QC_TRY(add_run(c, run, p, err)); /* with in_string as it was before the quote */
            if (!c->in_string)
                c->word.len = 0;
            c->in_string = !c->in_string;
            QC_TRY(qc_strbuf_add(&c->text, p, 1, err));
            run = p + 1;
        } else if (!c->in_string && strchr("{}[],", *p) && *p) {
            QC_TRY(add_run(c, run, p, err));
            run = p;
            QC_TRY(take_mark(c, *p, &eaten, err));
            run += eaten;
        }
    }
    return add_run(c, run, end, err);
}

qc_status qc_json_cut_finish(qc_json_cut *c, qc_error *err)
{
    if (c->phase == BEFORE)
        return give(c, c->parts.head, err);
    if (c->phase == INSIDE)
        QC_FAIL(err, QC_ERR_INPUT, "JSON: the text ends in list '%s'", c->parts.list);
    if (c->is_mismatched)
        QC_FAIL(err, QC_ERR_INPUT, "JSON: list '%s' ends with the wrong bracket", c->parts.list);
    /* Behind the list come a comma and members, or the end of the object. */
    char *tail = c->text.data;
    size_t i = skip_space(&c->text, 0), next = skip_space(&c->text, i + 1);
    if (i == c->text.len || (tail[i] != ',' && tail[i] != '}'))
        QC_FAIL(err, QC_ERR_INPUT, "JSON: expected ',' or '}' behind list '%s'", c->parts.list);
    if (tail[i] == '}' && next < c->text.len)
        QC_FAIL(err, QC_ERR_INPUT, "JSON: expected the end of the text");
    if (tail[i] == ',' && next < c->text.len && tail[next] == '}')
        QC_FAIL(err, QC_ERR_INPUT, "JSON: expected a key in quotes behind list '%s'",
                c->parts.list);
    if (!c->parts.tail)
        return QC_OK;
    if (tail[i] == '}')
        return c->parts.tail(c->parts.ctx, "{}", 2, err);
    tail[i] = '{';
    return c->parts.tail(c->parts.ctx, tail + i, c->text.len - i, err);
}
