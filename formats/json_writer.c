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

static void puts_text(qc_json_writer *w, const char *s)
{
    put(w, s, strlen(s));
}

static int is_compact(const qc_json_writer *w)
{
    return w->compact_from != 0 && w->depth >= w->compact_from;
}

static void new_line(qc_json_writer *w)
{
    static const char spaces[] = "                                ";
    put(w, "\n", 1);
    for (size_t left = (size_t)w->depth * INDENT; left > 0;) {
        size_t n = left < sizeof spaces - 1 ? left : sizeof spaces - 1;
        put(w, spaces, n);
        left -= n;
    }
}

/* Writes what separates the next element from the one before. */
static void before_element(qc_json_writer *w)
{
    if (w->depth == 0)
        return;
    if (!w->first)
        put(w, is_compact(w) ? ", " : ",", is_compact(w) ? 2 : 1);
    if (!is_compact(w))
        new_line(w);
    w->first = 0;
}

static void before_value(qc_json_writer *w)
{
    if (w->after_key)
        w->after_key = 0;
    else
        before_element(w);
}

static void begin(qc_json_writer *w, const char *bracket)
{
    before_value(w);
    puts_text(w, bracket);
    w->depth++;
    w->first = 1;
}

static void end(qc_json_writer *w, const char *bracket)
{
    assert(w->depth > 0 && !w->after_key);
    int compact = is_compact(w);
    if (w->depth == w->compact_from)
        w->compact_from = 0;
    w->depth--;
    if (!w->first && !compact)
        new_line(w);
    puts_text(w, bracket);
    w->first = 0;
}

void qc_json_write_begin_object(qc_json_writer *w)
{
    begin(w, "{");
}

void qc_json_write_end_object(qc_json_writer *w)
{
    end(w, "}");
}

void qc_json_write_begin_array(qc_json_writer *w)
{
    begin(w, "[");
}

void qc_json_write_end_array(qc_json_writer *w)
{
    end(w, "]");
}

void qc_json_write_compact_next(qc_json_writer *w)
{
    if (w->compact_from == 0)
        w->compact_from = (uint64_t)w->depth + 1;
}

/* Escapes as Python does with ensure_ascii=False, and also what a terminal would act on. */
static void put_escape(qc_json_writer *w, uint32_t c)
{
    static const char named[] = "\"\"\\\\\bb\ff\nn\rr\tt"; /* byte, letter */
    char text[16] = {'\\', 0};
    for (size_t i = 0; i + 1 < sizeof named; i += 2) {
        if ((uint32_t)named[i] == c) {
            text[1] = named[i + 1];
            put(w, text, 2);
            return;
        }
    }
    if (c > 0xffff) { /* a pair of surrogates */
        (void)snprintf(text, sizeof text, "\\u%04x", 0xd7c0u + (unsigned)(c >> 10));
        put(w, text, 6);
        c = 0xdc00 + (c & 0x3ff);
    }
    (void)snprintf(text, sizeof text, "\\u%04x", (unsigned)c & 0xffff);
    put(w, text, 6);
}

static void put_string(qc_json_writer *w, const char *s, int replace)
{
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
            put_escape(w, n ? c : REPLACEMENT);
            run = p + (n ? n : 1);
        }
        p += n ? n : 1;
    }
    put(w, run, (size_t)(p - run));
    put(w, "\"", 1);
}

void qc_json_write_key(qc_json_writer *w, const char *key)
{
    assert(w->depth > 0 && !w->after_key);
    before_element(w);
    put_string(w, key, 0);
    put(w, ": ", 2);
    w->after_key = 1;
}

void qc_json_write_string(qc_json_writer *w, const char *s)
{
    if (!s) {
        qc_json_write_null(w);
        return;
    }
    before_value(w);
    put_string(w, s, 0);
}

void qc_json_write_path(qc_json_writer *w, const char *s)
{
    if (!s) {
        qc_json_write_null(w);
        return;
    }
    before_value(w);
    put_string(w, s, 1);
}

void qc_json_write_u64(qc_json_writer *w, uint64_t v)
{
    char text[24];
    int n = snprintf(text, sizeof text, "%" PRIu64, v);
    before_value(w);
    put(w, text, (size_t)n);
}

void qc_json_write_double(qc_json_writer *w, double v)
{
    char text[QC_PY_REPR_BYTES];
    if (!isfinite(v)) {
        if (w->st == QC_OK)
            w->st = QC_ERROR(w->err, QC_ERR_RANGE, "JSON cannot express the number %g", v);
        return;
    }
    before_value(w);
    put(w, text, qc_py_repr_double(v, text));
}

void qc_json_write_number(qc_json_writer *w, double v)
{
    if (isfinite(v))
        qc_json_write_double(w, v);
    else
        qc_json_write_null(w);
}

void qc_json_write_bool(qc_json_writer *w, int v)
{
    qc_json_write_raw(w, v ? "true" : "false");
}

void qc_json_write_null(qc_json_writer *w)
{
    qc_json_write_raw(w, "null");
}

void qc_json_write_raw(qc_json_writer *w, const char *json)
{
    before_value(w);
    puts_text(w, json);
}

qc_status qc_json_write_finish(qc_json_writer *w)
{
    assert(w->st != QC_OK || (w->depth == 0 && !w->after_key));
    return w->st;
}

void qc_json_write_begin_text(qc_json_writer *w, qc_strbuf *out, qc_error *err)
{
    qc_json_write_init(w, out, err);
    qc_json_write_begin_object(w);
}

qc_status qc_json_write_end_text(qc_json_writer *w)
{
    qc_json_write_end_object(w);
    QC_TRY(qc_json_write_finish(w));
    return qc_strbuf_adds(w->out, "\n", w->err);
}
