/* Edits one top-level member of a JSON text without touching another byte. The text is parsed
 * again, and the tree says where members lie. */
#include "formats/json_strict.h"

#include <string.h>

void qc_json_quote(qc_strbuf *out, const char *s, size_t len)
{
    static const char from[] = "\"\\\b\f\n\r\t";
    static const char to[] = "\"\\bfnrt";
    size_t run = 0; /* bytes before i that are not written yet */
    qc_strbuf_puts(out, "\"");
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') {
            run++;
            continue;
        }
        qc_strbuf_put(out, s + i - run, run);
        run = 0;
        const char *hit = c ? strchr(from, c) : NULL;
        if (hit)
            qc_strbuf_putf(out, "\\%c", to[hit - from]);
        else
            qc_strbuf_putf(out, "\\u%04x", c);
    }
    qc_strbuf_put(out, s + len - run, run);
    qc_strbuf_puts(out, "\"");
}

size_t qc_json_quoted_bytes(const char *s, size_t len)
{
    size_t n = len + 2;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        n += c && strchr("\"\\\b\f\n\r\t", c) ? 1 : 5;
    }
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

static qc_status parse_object(qc_json **doc, const char *text, size_t len, qc_error *err)
{
    QC_TRY(qc_json_parse(doc, text, len, QC_JSON_PYTHON, err));
    qc_status st = qc_json_expect(qc_json_root(*doc), QC_JSON_OBJECT, "JSON text", err);
    if (st != QC_OK)
        qc_json_destroy(*doc);
    return st;
}

qc_status qc_json_member_text(const char *text, size_t len, const char *key, const char **value,
                              size_t *value_len, qc_error *err)
{
    qc_json *doc = NULL;
    *value = NULL;
    *value_len = 0;
    QC_TRY(parse_object(&doc, text, len, err));
    const qc_json_node *n = qc_json_get(qc_json_root(doc), key);
    if (n) {
        *value = text + qc_json_place(n).value;
        *value_len = qc_json_place(n).end - qc_json_place(n).value;
    }
    qc_json_destroy(doc);
    return QC_OK;
}

qc_status qc_json_splice(qc_strbuf *out, const char *text, size_t len, const char *key,
                         const char *value_json, qc_error *err)
{
    qc_json *doc = NULL;
    QC_TRY(parse_object(&doc, text, len, err));
    const qc_json_node *root = qc_json_root(doc), *n = qc_json_get(root, key);
    if (n && value_json) {
        qc_strbuf_put(out, text, qc_json_place(n).value);
        qc_strbuf_puts(out, value_json);
        qc_strbuf_put(out, text + qc_json_place(n).end, len - qc_json_place(n).end);
    } else if (n) {
        remove_member(out, text, len, root, n);
    } else if (value_json) {
        append_member(out, text, len, root, key, value_json);
    } else {
        qc_strbuf_put(out, text, len);
    }
    qc_json_destroy(doc);
    return qc_strbuf_status(out, err);
}
