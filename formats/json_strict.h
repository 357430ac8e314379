/* JSON, read strictly. The whole text is checked while its tree is built: RFC 8259 grammar, UTF-8,
 * one value and nothing after it but white space, no byte order mark, no control characters, no
 * lone surrogates, no "\u0000", nesting at most 64, no duplicate keys in any object after
 * unescaping, finite numbers. Error messages carry the byte offset.
 *
 * Ownership: a qc_json owns its tree; nodes and strings are borrowed from it. Thread-safe: many
 * threads may read one document. */
#ifndef QC_FORMATS_JSON_STRICT_H
#define QC_FORMATS_JSON_STRICT_H

#include "base/status.h"
#include "base/strbuf.h"

typedef struct qc_json qc_json;
typedef struct qc_json_node qc_json_node;

typedef enum {
    QC_JSON_NULL,
    QC_JSON_BOOL,
    QC_JSON_NUMBER,
    QC_JSON_STRING,
    QC_JSON_ARRAY,
    QC_JSON_OBJECT
} qc_json_kind;

/* QC_JSON_INTEGERS: every number in the text must be an integer of at most 2^53 - 1 in magnitude,
 * written as digits with an optional minus. */
#define QC_JSON_INTEGERS 1u
/* QC_JSON_PYTHON: NaN, Infinity and -Infinity are numbers, as Python's json module writes and reads
 * them (config.json of Mamba-2 models has "time_step_limit": [0.0, Infinity]). They have the kind
 * QC_JSON_NUMBER, but no qc_json_as_ function returns them. */
#define QC_JSON_PYTHON 2u

/* text need not be NUL-terminated. */
QC_NODISCARD qc_status qc_json_parse(qc_json **out, const char *text, size_t len, unsigned flags,
                                     qc_error *err);
/* Parses a file of at most max_bytes. Messages about its text begin with `before` and the path. */
QC_NODISCARD qc_status qc_json_read_file(qc_json **out, const char *path, const char *before,
                                         size_t max_bytes, qc_error *err);
void qc_json_destroy(qc_json *doc); /* doc may be NULL */
const qc_json_node *qc_json_root(const qc_json *doc);

qc_json_kind qc_json_kind_of(const qc_json_node *n);
const char *qc_json_kind_name(qc_json_kind k);
/* Give the children of an object or array in document order, and NULL at the end. */
const qc_json_node *qc_json_first(const qc_json_node *n);
const qc_json_node *qc_json_next(const qc_json_node *n);
/* Returns how many children it has. */
size_t qc_json_count(const qc_json_node *n);
/* Returns the key of a member of an object, which is never NULL. */
const char *qc_json_key(const qc_json_node *n);
/* Finds a member by its exact name, in linear time. Returns NULL if it is missing, or if n is NULL
 * or not an object. */
const qc_json_node *qc_json_get(const qc_json_node *n, const char *key);

/* Says where a value lies in the text that was parsed: [value, end). key is the opening quote of
 * its key if it is a member of an object. */
typedef struct {
    size_t key, value, end;
} qc_json_range;
qc_json_range qc_json_place(const qc_json_node *n);

/* These give a value of one type; `what` names it in the message. A missing value (n == NULL) is
 * QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_json_as_string(const qc_json_node *n, const char *what, const char **out,
                                         qc_error *err);
/* Gives a non-negative integer of at most 2^53 - 1, which is written without a fraction. */
QC_NODISCARD qc_status qc_json_as_u64(const qc_json_node *n, const char *what, uint64_t *out,
                                      qc_error *err);
QC_NODISCARD qc_status qc_json_as_double(const qc_json_node *n, const char *what, double *out,
                                         qc_error *err);
QC_NODISCARD qc_status qc_json_as_bool(const qc_json_node *n, const char *what, int *out,
                                       qc_error *err);
/* Checks the kind of a value: "WHAT is of kind array; expected an object". */
QC_NODISCARD qc_status qc_json_expect(const qc_json_node *n, qc_json_kind kind, const char *what,
                                      qc_error *err);
/* For optional members: returns dflt when the member is missing or of another kind. */
const char *qc_json_string_or(const qc_json_node *n, const char *dflt);
int qc_json_bool_or(const qc_json_node *n, int dflt);

/* Sets the member `key` of the JSON object in `text` (of that object's member `in`, unless that is
 * NULL) to value_json, which is taken verbatim. The member is replaced in place if present and
 * otherwise added last; with value_json NULL it is removed. Everything else stays byte for byte, so
 * numbers keep their spelling. An added member is indented like the first one. text must be what
 * qc_json_parse takes (with QC_JSON_PYTHON), and stays as it was after an error. */
QC_NODISCARD qc_status qc_json_splice(qc_strbuf *text, const char *in, const char *key,
                                      const char *value_json, qc_error *err);

/* Appends the len bytes at s as a JSON string, escaped as serde_json does it: \" \\ \b \f \n \r \t,
 * other control characters as \u00xx in lower case, everything else unchanged. */
void qc_json_quote(qc_strbuf *out, const char *s, size_t len);
/* Returns how many bytes it appends. */
size_t qc_json_quoted_bytes(const char *s, size_t len);

#endif
