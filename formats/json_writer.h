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

void qc_jw_init(qc_json_writer *w, qc_strbuf *out, qc_error *err);
void qc_jw_begin_object(qc_json_writer *w);
void qc_jw_end_object(qc_json_writer *w);
void qc_jw_begin_array(qc_json_writer *w);
void qc_jw_end_array(qc_json_writer *w);
/* Puts the next container and all inside it on one line (", " and ": " as separators). */
void qc_jw_compact_next(qc_json_writer *w);
void qc_jw_key(qc_json_writer *w, const char *key);
/* s must be UTF-8, else the writer fails; NULL writes null. Control characters are escaped, even
 * those that JSON would allow (qc_text_is_control). */
void qc_jw_string(qc_json_writer *w, const char *s);
/* A path may hold any bytes: those that are not UTF-8 become U+FFFD. Use it for results, not for
 * files that are read again. */
void qc_jw_path(qc_json_writer *w, const char *s);
void qc_jw_u64(qc_json_writer *w, uint64_t v);
void qc_jw_double(qc_json_writer *w, double v); /* always with a '.' or 'e', or as Python's repr */
void qc_jw_bool(qc_json_writer *w, int v);
void qc_jw_null(qc_json_writer *w);
void qc_jw_raw(qc_json_writer *w, const char *json); /* verbatim value */
/* Returns the first error, or QC_OK. */
QC_NODISCARD qc_status qc_jw_finish(qc_json_writer *w);

/* Python's repr() of a finite double: the shortest digits that read back, an exponent below 1e-4
 * and from 1e16 on, ".0" for whole numbers. Returns the length; buf is NUL-terminated. */
#define QC_PY_REPR_BYTES 32
size_t qc_py_repr_double(double v, char buf[QC_PY_REPR_BYTES]);

#endif
