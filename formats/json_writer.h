/* Writes JSON deterministically: members in the order given, two-space indentation as Python's
 * json.dump(indent=2), non-ASCII text as UTF-8, doubles in the shortest form that reads back.
 *
 * Each function writes one value under `key`. In a list, and where the value is the whole text, key
 * is NULL. Not thread-safe: it has one owner. Misuse (a key outside an object) is a programmer
 * error. */
#ifndef QC_FORMATS_JSON_WRITER_H
#define QC_FORMATS_JSON_WRITER_H

#include "base/status.h"
#include "base/strbuf.h"

#define QC_JSON_WRITER_DEPTH 64u

typedef struct {
    qc_strbuf *out; /* borrowed */
    unsigned depth;
    unsigned indent;                   /* further levels, which lines are indented by; 0 at first */
    int first;                         /* nothing is written yet at this level */
    unsigned compact_from;             /* levels at or below this depth are on one line; 0: none */
    char closes[QC_JSON_WRITER_DEPTH]; /* the bracket that ends each open level */
    qc_status st;                      /* the first failure; later calls do nothing */
    qc_error *err;
} qc_json_writer;

void qc_json_write_init(qc_json_writer *w, qc_strbuf *out, qc_error *err);
/* Returns the first error, or QC_OK. */
QC_NODISCARD qc_status qc_json_write_finish(qc_json_writer *w);
/* Begins a text that is one object, and ends it with a line feed. The end returns the first
 * error. */
void qc_json_begin_text(qc_json_writer *w, qc_strbuf *out, qc_error *err);
QC_NODISCARD qc_status qc_json_end_text(qc_json_writer *w);

/* ---- Objects and lists. qc_json_end ends what was begun last. ---- */

void qc_json_begin_object(qc_json_writer *w, const char *key);
void qc_json_begin_list(qc_json_writer *w, const char *key);
/* The same with all that is inside on one line (", " and ": " as separators). */
void qc_json_begin_row(qc_json_writer *w, const char *key);
void qc_json_begin_line(qc_json_writer *w, const char *key);
/* Begin an object or a row if it is known; else they write null and return 0. */
int qc_json_begin_object_if(qc_json_writer *w, const char *key, int known);
int qc_json_begin_row_if(qc_json_writer *w, const char *key, int known);
void qc_json_end(qc_json_writer *w);

/* ---- Values ---- */

/* s must be UTF-8, else the writer fails; NULL writes null. Control characters are escaped, even
 * those that JSON would allow (qc_text_is_control). */
void qc_json_put_text(qc_json_writer *w, const char *key, const char *s);
/* A path may hold any bytes: those that are not UTF-8 become U+FFFD. Use it for results, not for
 * files that are read again. */
void qc_json_put_path(qc_json_writer *w, const char *key, const char *s);
void qc_json_put_u64(qc_json_writer *w, const char *key, uint64_t v);
/* Writes null if the value is not known. */
void qc_json_put_u64_if(qc_json_writer *w, const char *key, int known, uint64_t v);
/* Writes a finite number, always with a '.' or 'e', or as Python's repr. */
void qc_json_put_double(qc_json_writer *w, const char *key, double v);
/* The same; null if v is not finite. */
void qc_json_put_number(qc_json_writer *w, const char *key, double v);
void qc_json_put_bool(qc_json_writer *w, const char *key, int v);
void qc_json_put_null(qc_json_writer *w, const char *key);
/* Writes a list on one line, such as a shape or a place in it. */
void qc_json_put_u64s(qc_json_writer *w, const char *key, const uint64_t *v, unsigned count);
/* Writes a list of texts, a line each. */
void qc_json_put_texts(qc_json_writer *w, const char *key, const char *const *v, size_t count);

/* Writes the escape of a character, without a NUL: \", \\ and the letters that JSON has, else
 * \u00xx, or two of them. Returns its length. */
#define QC_JSON_ESCAPE_BYTES 24
size_t qc_json_escape(char out[QC_JSON_ESCAPE_BYTES], uint32_t c);

/* Writes a finite double as Python's repr() does: the shortest digits that read back, an exponent
 * below 1e-4 and from 1e16 on, ".0" for whole numbers. Returns the length; buf is
 * NUL-terminated. */
#define QC_PY_REPR_BYTES 32
size_t qc_py_repr_double(double v, char buf[QC_PY_REPR_BYTES]);

#endif
