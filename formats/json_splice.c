/* Edits one member of a JSON text without touching another byte. The text is parsed again, and the
 * tree says where members lie. */
#include "formats/json_strict.h"
#include "formats/json_writer.h"

#include <string.h>

static int is_plain(char c)
{
    return (unsigned char)c >= 0x20 && c != '"' && c != '\\';
}

void qc_json_quote(qc_strbuf *out, const char *s, size_t len)
{
    size_t run = 0; /* bytes before i that are not written yet */
    char escape[QC_JSON_ESCAPE_BYTES];
    qc_strbuf_puts(out, "\"");
    for (size_t i = 0; i < len; i++) {
        if (is_plain(s[i])) {
            run++;
            continue;
        }
        qc_strbuf_put(out, s + i - run, run);
        qc_strbuf_put(out, escape, qc_json_escape(escape, (unsigned char)s[i]));
        run = 0;
    }
    qc_strbuf_put(out, s + len - run, run);
    qc_strbuf_puts(out, "\"");
}

size_t qc_json_quoted_bytes(const char *s, size_t len)
{
    size_t n = len + 2;
    char escape[QC_JSON_ESCAPE_BYTES];
    for (size_t i = 0; i < len; i++)
        n += is_plain(s[i]) ? 0 : qc_json_escape(escape, (unsigned char)s[i]) - 1;
    return n;
}

/* Appends the new member at the end, laid out like the other members. */
static void append_member(qc_strbuf *out, const char *t, size_t len, const qc_json_node *root,
                          const char *key, const char *value_json)
{
    const qc_json_node *head = qc_json_first(root), *last = head;
    const size_t inside = qc_json_place(root).value + 1;
    if (!head) {
        qc_strbuf_put(out, t, inside);
        qc_strbuf_puts(out, "\n  ");
        qc_json_quote(out, key, strlen(key));
        qc_strbuf_putf(out, ": %s\n", value_json);
        qc_strbuf_put(out, t + qc_json_place(root).end - 1, len - qc_json_place(root).end + 1);
        return;
    }
    while (qc_json_next(last))
        last = qc_json_next(last);
    const qc_json_range first = qc_json_place(head);
    const size_t end = qc_json_place(last).end;
    size_t colon = first.value; /* with the white space before it */
    while (t[colon - 1] != '"')
        colon--;
    /* What stands before the second key, or else before the first value. */
    char before = t[(last != head ? qc_json_place(qc_json_next(head)).key : first.value) - 1];
    qc_strbuf_put(out, t, end);
    qc_strbuf_puts(out, ",");
    if (first.key != inside)
        qc_strbuf_put(out, t + inside, first.key - inside);
    else if (before == ' ')
        qc_strbuf_puts(out, " ");
    qc_json_quote(out, key, strlen(key));
    qc_strbuf_put(out, t + colon, first.value - colon);
    qc_strbuf_puts(out, value_json);
    qc_strbuf_put(out, t + end, len - end);
}

static void remove_member(qc_strbuf *out, const char *t, size_t len, const qc_json_node *root,
                          const qc_json_node *n)
{
    const qc_json_node *before = qc_json_first(root);
    size_t from = qc_json_place(n).key, to = qc_json_place(n).end;
    if (before == n && qc_json_next(n)) {
        to = qc_json_place(qc_json_next(n)).key;
    } else if (before == n) {
        from = qc_json_place(root).value + 1;
        to = qc_json_place(root).end - 1;
    } else { /* with the comma before it */
        while (qc_json_next(before) != n)
            before = qc_json_next(before);
        from = qc_json_place(before).end;
    }
    qc_strbuf_put(out, t, from);
    qc_strbuf_put(out, t + to, len - to);
}

qc_status qc_json_splice(qc_strbuf *text, const char *in, const char *key, const char *value_json,
                         qc_error *err)
{
    qc_json *doc = NULL;
    qc_strbuf out;
    QC_TRY(qc_json_parse(&doc, text->data, text->len, QC_JSON_PYTHON, err));
    qc_strbuf_init(&out, text->max);
    const qc_json_node *object = qc_json_root(doc);
    qc_status st = qc_json_expect(object, QC_JSON_OBJECT, "JSON text", err);
    if (st == QC_OK && in) {
        object = qc_json_get(object, in);
        st = qc_json_expect(object, QC_JSON_OBJECT, in, err);
    }
    if (st == QC_OK) {
        const qc_json_node *n = qc_json_get(object, key);
        if (n && value_json) {
            const qc_json_range place = qc_json_place(n);
            qc_strbuf_put(&out, text->data, place.value);
            qc_strbuf_puts(&out, value_json);
            qc_strbuf_put(&out, text->data + place.end, text->len - place.end);
        } else if (n) {
            remove_member(&out, text->data, text->len, object, n);
        } else if (value_json) {
            append_member(&out, text->data, text->len, object, key, value_json);
        } else {
            qc_strbuf_put(&out, text->data, text->len);
        }
        st = qc_strbuf_status(&out, err);
    }
    qc_json_destroy(doc);
    qc_strbuf_deinit(st == QC_OK ? text : &out);
    if (st == QC_OK)
        *text = out;
    return st;
}
