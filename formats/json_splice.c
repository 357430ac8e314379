/* Edits one top-level member of a JSON text without touching another byte.
 *
 * The text is parsed again, so that everything below may trust it: strings end, brackets match.
 * qc_json decides which member is meant (escaped keys included); where the member lies in the text
 * is found by counting members. */
#include "formats/json_strict.h"

#include <string.h>

#define NO_MEMBER SIZE_MAX

/* Offsets into the text; [key, value_end) is one member. */
typedef struct {
    size_t key;
    size_t key_end; /* behind the closing quote */
    size_t value;
    size_t value_end;
} member;

/* What has to be known about the top-level object. */
typedef struct {
    size_t open;  /* of '{' */
    size_t close; /* of '}' */
    size_t count;
    member first;
    member second;
    member before; /* the member before the wanted one, or the last */
    member wanted;
    member after;
} object_map;

static size_t skip_space(const char *t, size_t i)
{
    while (t[i] == ' ' || t[i] == '\n' || t[i] == '\r' || t[i] == '\t')
        i++;
    return i;
}

/* i is at the opening quote; returns the offset behind the closing one. */
static size_t skip_string(const char *t, size_t i)
{
    for (i++; t[i] != '"'; i++) {
        if (t[i] == '\\')
            i++;
    }
    return i + 1;
}

static size_t skip_value(const char *t, size_t i)
{
    unsigned depth = 0;
    for (;;) {
        char c = t[i];
        if (c == '"') {
            i = skip_string(t, i);
        } else {
            depth += c == '{' || c == '[';
            depth -= c == '}' || c == ']';
            i++;
        }
        /* A number or word ends where one of these characters follows it. */
        if (depth == 0 && (c == '"' || c == '}' || c == ']' || strchr(",}] \n\r\t", t[i])))
            return i;
    }
}

/* wanted: its position among the members, or NO_MEMBER. */
static void map_object(object_map *m, const char *t, size_t wanted)
{
    memset(m, 0, sizeof *m);
    m->open = skip_space(t, 0);
    size_t i = skip_space(t, m->open + 1);
    while (t[i] == '"') {
        member x = {.key = i};
        x.key_end = skip_string(t, i);
        x.value = skip_space(t, skip_space(t, x.key_end) + 1);
        x.value_end = skip_value(t, x.value);
        if (m->count == 0)
            m->first = x;
        if (m->count == 1)
            m->second = x;
        if (m->count < wanted)
            m->before = x;
        else if (m->count == wanted)
            m->wanted = x;
        else if (m->count == wanted + 1)
            m->after = x;
        m->count++;
        i = skip_space(t, x.value_end);
        if (t[i] == ',')
            i = skip_space(t, i + 1);
    }
    m->close = i;
}

void qc_json_put(qc_strbuf *out, const char *s, size_t len)
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

qc_status qc_json_quote(qc_strbuf *out, const char *s, size_t len, qc_error *err)
{
    qc_json_put(out, s, len);
    return qc_strbuf_status(out, err);
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
static void append_member(qc_strbuf *out, const char *t, size_t len, const object_map *m,
                          const char *key, const char *value_json)
{
    size_t end = m->count > 0 ? m->before.value_end : m->close;
    size_t indent = m->open + 1, indent_len = m->first.key - indent;
    if (m->count == 0) {
        qc_strbuf_put(out, t, m->open + 1);
        qc_strbuf_puts(out, "\n  ");
        qc_json_put(out, key, strlen(key));
        qc_strbuf_putf(out, ": %s\n", value_json);
    } else {
        qc_strbuf_put(out, t, end);
        qc_strbuf_puts(out, ",");
        if (indent_len != 0)
            qc_strbuf_put(out, t + indent, indent_len);
        else if (m->count > 1 ? t[m->second.key - 1] == ' ' : t[m->first.value - 1] == ' ')
            qc_strbuf_puts(out, " ");
        qc_json_put(out, key, strlen(key));
        qc_strbuf_put(out, t + m->first.key_end, m->first.value - m->first.key_end);
        qc_strbuf_puts(out, value_json);
    }
    qc_strbuf_put(out, t + end, len - end);
}

static void remove_member(qc_strbuf *out, const char *t, size_t len, const object_map *m,
                          size_t wanted)
{
    size_t from = m->before.value_end; /* removes the comma before it as well */
    size_t to = m->wanted.value_end;
    if (m->count == 1) {
        from = m->open + 1;
        to = m->close;
    } else if (wanted == 0) {
        from = m->wanted.key;
        to = m->after.key;
    }
    qc_strbuf_put(out, t, from);
    qc_strbuf_put(out, t + to, len - to);
}

/* Maps the object in `text`. *wanted: the position of the member called key, or NO_MEMBER. */
static qc_status locate(object_map *m, size_t *wanted, const char *text, size_t len,
                        const char *key, qc_error *err)
{
    qc_json *doc = NULL;
    size_t position = 0;
    *wanted = NO_MEMBER;
    QC_TRY(qc_json_parse(&doc, text, len, QC_JSON_PYTHON, err));
    qc_json_kind kind = qc_json_kind_of(qc_json_root(doc));
    if (kind == QC_JSON_OBJECT) {
        for (const qc_json_node *n = qc_json_first(qc_json_root(doc)); n; n = qc_json_next(n)) {
            if (strcmp(qc_json_key(n), key) == 0)
                *wanted = position;
            position++;
        }
        map_object(m, text, *wanted);
    }
    qc_json_destroy(doc);
    if (kind != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "JSON text is of kind %s, an object was expected",
                qc_json_kind_name(kind));
    return QC_OK;
}

qc_status qc_json_member_text(const char *text, size_t len, const char *key, const char **value,
                              size_t *value_len, qc_error *err)
{
    object_map m;
    size_t wanted = NO_MEMBER;
    *value = NULL;
    *value_len = 0;
    QC_TRY(locate(&m, &wanted, text, len, key, err));
    if (wanted != NO_MEMBER) {
        *value = text + m.wanted.value;
        *value_len = m.wanted.value_end - m.wanted.value;
    }
    return QC_OK;
}

qc_status qc_json_splice(qc_strbuf *out, const char *text, size_t len, const char *key,
                         const char *value_json, qc_error *err)
{
    object_map m;
    size_t wanted = NO_MEMBER;
    QC_TRY(locate(&m, &wanted, text, len, key, err));
    if (wanted == NO_MEMBER && value_json) {
        append_member(out, text, len, &m, key, value_json);
    } else if (wanted == NO_MEMBER) {
        qc_strbuf_put(out, text, len);
    } else if (!value_json) {
        remove_member(out, text, len, &m, wanted);
    } else {
        qc_strbuf_put(out, text, m.wanted.value);
        qc_strbuf_puts(out, value_json);
        qc_strbuf_put(out, text + m.wanted.value_end, len - m.wanted.value_end);
    }
    return qc_strbuf_status(out, err);
}
