#include "formats/json_writer.h"

#include "base/text.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define INDENT      2u
#define REPLACEMENT 0xfffdu

void qc_json_write_init(qc_json_writer *w, qc_strbuf *out, qc_error *err)
{
    memset(w, 0, sizeof *w);
    w->out = out;
    w->first = 1;
    w->err = err;
}

static void put(qc_json_writer *w, const void *bytes, size_t len)
{
    if (w->st == QC_OK)
        w->st = qc_strbuf_add(w->out, bytes, len, w->err);
}

static int is_compact(const qc_json_writer *w)
{
    return w->compact_from != 0 && w->depth >= w->compact_from;
}

static void new_line(qc_json_writer *w)
{
    static const char spaces[] = "                                ";
    put(w, "\n", 1);
    for (size_t left = (size_t)(w->depth + w->indent) * INDENT; left > 0;) {
        size_t n = left < sizeof spaces - 1 ? left : sizeof spaces - 1;
        put(w, spaces, n);
        left -= n;
    }
}

size_t qc_json_escape(char out[QC_JSON_ESCAPE_BYTES], uint32_t c)
{
    static const char named[] = "\"\"\\\\\bb\ff\nn\rr\tt"; /* byte, letter */
    for (size_t i = 0; i + 1 < sizeof named; i += 2) {
        if ((uint32_t)named[i] == c) {
            out[0] = '\\';
            out[1] = named[i + 1];
            return 2;
        }
    }
    if (c > 0xffff) /* a pair of surrogates */
        return (size_t)snprintf(out, QC_JSON_ESCAPE_BYTES, "\\u%04x\\u%04x",
                                0xd7c0u + (unsigned)(c >> 10), 0xdc00u + (unsigned)(c & 0x3ff));
    return (size_t)snprintf(out, QC_JSON_ESCAPE_BYTES, "\\u%04x", (unsigned)c & 0xffff);
}

/* Escapes as Python does with ensure_ascii=False, and also what a terminal would act on. */
static void put_string(qc_json_writer *w, const char *s, int replace)
{
    char escape[QC_JSON_ESCAPE_BYTES];
    const char *p = s;
    const char *run = p; /* bytes that need no escape */
    put(w, "\"", 1);
    while (*p && w->st == QC_OK) {
        uint32_t c = 0;
        size_t n = qc_text_char(p, &c);
        if (n == 0 && !replace) {
            w->st = QC_ERROR(w->err, QC_ERR_INPUT, "a text is not UTF-8: '%.100s'", s);
            return;
        }
        if (n == 0 || c == '"' || c == '\\' || qc_text_is_control(c)) {
            put(w, run, (size_t)(p - run));
            put(w, escape, qc_json_escape(escape, n ? c : REPLACEMENT));
            run = p + (n ? n : 1);
        }
        p += n ? n : 1;
    }
    put(w, run, (size_t)(p - run));
    put(w, "\"", 1);
}

/* Writes what separates the next value from the one before, and its key. */
static void before_value(qc_json_writer *w, const char *key)
{
    assert(!key || (w->depth > 0 && w->closes[w->depth - 1] == '}'));
    if (w->depth > 0) {
        if (!w->first)
            put(w, is_compact(w) ? ", " : ",", is_compact(w) ? 2 : 1);
        if (!is_compact(w))
            new_line(w);
        w->first = 0;
    }
    if (key) {
        put_string(w, key, 0);
        put(w, ": ", 2);
    }
}

static void begin(qc_json_writer *w, const char *key, const char *brackets, int compact)
{
    assert(w->depth < QC_JSON_WRITER_DEPTH);
    before_value(w, key);
    if (compact && w->compact_from == 0)
        w->compact_from = w->depth + 1;
    put(w, brackets, 1);
    w->closes[w->depth++] = brackets[1];
    w->first = 1;
}

void qc_json_begin_object(qc_json_writer *w, const char *key)
{
    begin(w, key, "{}", 0);
}

void qc_json_begin_list(qc_json_writer *w, const char *key)
{
    begin(w, key, "[]", 0);
}

void qc_json_begin_row(qc_json_writer *w, const char *key)
{
    begin(w, key, "{}", 1);
}

void qc_json_begin_line(qc_json_writer *w, const char *key)
{
    begin(w, key, "[]", 1);
}

static int begin_if(qc_json_writer *w, const char *key, int compact, int known)
{
    if (known)
        begin(w, key, "{}", compact);
    else
        qc_json_put_null(w, key);
    return known;
}

int qc_json_begin_object_if(qc_json_writer *w, const char *key, int known)
{
    return begin_if(w, key, 0, known);
}

int qc_json_begin_row_if(qc_json_writer *w, const char *key, int known)
{
    return begin_if(w, key, 1, known);
}

void qc_json_end(qc_json_writer *w)
{
    assert(w->depth > 0);
    int compact = is_compact(w);
    if (w->depth == w->compact_from)
        w->compact_from = 0;
    w->depth--;
    if (!w->first && !compact)
        new_line(w);
    put(w, &w->closes[w->depth], 1);
    w->first = 0;
}

/* Writes a value that is spelled already. */
static void put_word(qc_json_writer *w, const char *key, const char *word)
{
    before_value(w, key);
    put(w, word, strlen(word));
}

void qc_json_put_null(qc_json_writer *w, const char *key)
{
    put_word(w, key, "null");
}

void qc_json_put_bool(qc_json_writer *w, const char *key, int v)
{
    put_word(w, key, v ? "true" : "false");
}

static void put_text(qc_json_writer *w, const char *key, const char *s, int replace)
{
    if (!s) {
        qc_json_put_null(w, key);
        return;
    }
    before_value(w, key);
    put_string(w, s, replace);
}

void qc_json_put_text(qc_json_writer *w, const char *key, const char *s)
{
    put_text(w, key, s, 0);
}

void qc_json_put_path(qc_json_writer *w, const char *key, const char *s)
{
    put_text(w, key, s, 1);
}

void qc_json_put_u64(qc_json_writer *w, const char *key, uint64_t v)
{
    char text[24];
    (void)snprintf(text, sizeof text, "%" PRIu64, v);
    put_word(w, key, text);
}

void qc_json_put_u64_if(qc_json_writer *w, const char *key, int known, uint64_t v)
{
    if (known)
        qc_json_put_u64(w, key, v);
    else
        qc_json_put_null(w, key);
}

void qc_json_put_double(qc_json_writer *w, const char *key, double v)
{
    char text[QC_PY_REPR_BYTES];
    if (!isfinite(v)) {
        if (w->st == QC_OK)
            w->st = QC_ERROR(w->err, QC_ERR_RANGE, "JSON cannot express the number %g", v);
        return;
    }
    (void)qc_py_repr_double(v, text);
    put_word(w, key, text);
}

void qc_json_put_number(qc_json_writer *w, const char *key, double v)
{
    if (isfinite(v))
        qc_json_put_double(w, key, v);
    else
        qc_json_put_null(w, key);
}

void qc_json_put_u64s(qc_json_writer *w, const char *key, const uint64_t *v, unsigned count)
{
    qc_json_begin_line(w, key);
    for (unsigned i = 0; i < count; i++)
        qc_json_put_u64(w, NULL, v[i]);
    qc_json_end(w);
}

void qc_json_put_texts(qc_json_writer *w, const char *key, const char *const *v, size_t count)
{
    qc_json_begin_list(w, key);
    for (size_t i = 0; i < count; i++)
        qc_json_put_text(w, NULL, v[i]);
    qc_json_end(w);
}

qc_status qc_json_write_finish(qc_json_writer *w)
{
    assert(w->st != QC_OK || w->depth == 0);
    return w->st;
}

void qc_json_begin_text(qc_json_writer *w, qc_strbuf *out, qc_error *err)
{
    qc_json_write_init(w, out, err);
    qc_json_begin_object(w, NULL);
}

qc_status qc_json_end_text(qc_json_writer *w)
{
    qc_json_end(w);
    QC_TRY(qc_json_write_finish(w));
    return qc_strbuf_adds(w->out, "\n", w->err);
}
