/* Writes JSON deterministically: members in the order given, two-space indentation as Python's
 * json.dump(indent=2), non-ASCII text as UTF-8, doubles in the shortest form that reads back.
 * Not thread-safe: it has one owner. Misuse (a key outside an object) is a programmer error. */
#ifndef QC_FORMATS_JSON_WRITER_H
#define QC_FORMATS_JSON_WRITER_H

#include "base/status.h"
#include "base/strbuf.h"

typedef struct {
    qc_strbuf *out; /* borrowed */
    unsigned depth;
    int first; /* nothing is written yet at this level */
    int after_key;
    uint64_t compact_from; /* levels at or below this depth are written on one line */
    qc_status st;          /* the first failure; later calls do nothing */
    qc_error *err;
} qc_json_writer;

void qc_json_write_init(qc_json_writer *w, qc_strbuf *out, qc_error *err);
void qc_json_write_begin_object(qc_json_writer *w);
void qc_json_write_end_object(qc_json_writer *w);
void qc_json_write_begin_array(qc_json_writer *w);
void qc_json_write_end_array(qc_json_writer *w);
/* Puts the next container and all inside it on one line (", " and ": " as separators). */
void qc_json_write_compact_next(qc_json_writer *w);
void qc_json_write_key(qc_json_writer *w, const char *key);
/* s must be UTF-8, else the writer fails; NULL writes null. Control characters are escaped, even
 * those that JSON would allow (qc_text_is_control). */
void qc_json_write_string(qc_json_writer *w, const char *s);
/* A path may hold any bytes: those that are not UTF-8 become U+FFFD. Use it for results, not for
 * files that are read again. */
void qc_json_write_path(qc_json_writer *w, const char *s);
void qc_json_write_u64(qc_json_writer *w, uint64_t v);
void qc_json_write_double(qc_json_writer *w,
                          double v); /* always with a '.' or 'e', or as Python's repr */
void qc_json_write_bool(qc_json_writer *w, int v);
void qc_json_write_null(qc_json_writer *w);
void qc_json_write_raw(qc_json_writer *w, const char *json); /* verbatim value */
/* Writes null if v is not a finite number. */
void qc_json_write_number(qc_json_writer *w, double v);
/* Returns the first error, or QC_OK. */
QC_NODISCARD qc_status qc_json_write_finish(qc_json_writer *w);
/* Begins a text that is one object, and ends it with a line feed. The end returns the first
 * error. */
void qc_json_write_begin_text(qc_json_writer *w, qc_strbuf *out, qc_error *err);
QC_NODISCARD qc_status qc_json_write_end_text(qc_json_writer *w);

/* ---- Members of an object: key and value in one call. ---- */

static inline void qc_json_member_u64(qc_json_writer *w, const char *key, uint64_t v)
{
    qc_json_write_key(w, key);
    qc_json_write_u64(w, v);
}

static inline void qc_json_member_double(qc_json_writer *w, const char *key, double v)
{
    qc_json_write_key(w, key);
    qc_json_write_double(w, v);
}

/* Begins a list or an object under a key. qc_json_write_end_array or qc_json_write_end_object ends
 * it. */
static inline void qc_json_member_begin_array(qc_json_writer *w, const char *key)
{
    qc_json_write_key(w, key);
    qc_json_write_begin_array(w);
}

static inline void qc_json_member_begin_object(qc_json_writer *w, const char *key)
{
    qc_json_write_key(w, key);
    qc_json_write_begin_object(w);
}

/* Begins an object if it is known; else it writes null and returns 0. */
static inline int qc_json_member_begin_object_if(qc_json_writer *w, const char *key, int known)
{
    qc_json_write_key(w, key);
    if (known)
        qc_json_write_begin_object(w);
    else
        qc_json_write_null(w);
    return known;
}

/* Begins an object on one line, in a list or under a key that was written. */
static inline void qc_json_member_begin_row(qc_json_writer *w)
{
    qc_json_write_compact_next(w);
    qc_json_write_begin_object(w);
}

/* Writes null if the value is not known. */
static inline void qc_json_member_u64_if(qc_json_writer *w, const char *key, int known, uint64_t v)
{
    qc_json_write_key(w, key);
    if (known)
        qc_json_write_u64(w, v);
    else
        qc_json_write_null(w);
}

/* Writes null if v is not a finite number. */
static inline void qc_json_member_number(qc_json_writer *w, const char *key, double v)
{
    qc_json_write_key(w, key);
    qc_json_write_number(w, v);
}

/* Writes a list on one line, such as a shape or a place in it. */
static inline void qc_json_member_u64s(qc_json_writer *w, const char *key, const uint64_t *v,
                                       unsigned count)
{
    qc_json_write_key(w, key);
    qc_json_write_compact_next(w);
    qc_json_write_begin_array(w);
    for (unsigned i = 0; i < count; i++)
        qc_json_write_u64(w, v[i]);
    qc_json_write_end_array(w);
}

/* Writes null for NULL. */
static inline void qc_json_member_string(qc_json_writer *w, const char *key, const char *v)
{
    qc_json_write_key(w, key);
    qc_json_write_string(w, v);
}

/* Writes a list of texts, a line each. */
static inline void qc_json_member_strings(qc_json_writer *w, const char *key, const char *const *v,
                                          size_t count)
{
    qc_json_member_begin_array(w, key);
    for (size_t i = 0; i < count; i++)
        qc_json_write_string(w, v[i]);
    qc_json_write_end_array(w);
}

/* Replaces bytes that are not UTF-8, and writes null for NULL. */
static inline void qc_json_member_path(qc_json_writer *w, const char *key, const char *v)
{
    qc_json_write_key(w, key);
    qc_json_write_path(w, v);
}

static inline void qc_json_member_bool(qc_json_writer *w, const char *key, int v)
{
    qc_json_write_key(w, key);
    qc_json_write_bool(w, v);
}

/* Writes a finite double as Python's repr() does: the shortest digits that read back, an exponent
 * below 1e-4 and from 1e16 on, ".0" for whole numbers. Returns the length; buf is
 * NUL-terminated. */
#define QC_PY_REPR_BYTES 32
size_t qc_py_repr_double(double v, char buf[QC_PY_REPR_BYTES]);

#endif
