/* Objects of JSON and the structs that hold their members. A table of rows describes both at once,
 * and serves the writer and the reader.
 *
 * A reader walks over the members in the order in which they are written, and a member that is
 * missing, out of place or not known is QC_ERR_INPUT. So an object has only one spelling.
 * Not thread-safe: a walk has one owner. */
#ifndef QC_FORMATS_JSON_ROWS_H
#define QC_FORMATS_JSON_ROWS_H

#include "base/arena.h"
#include "base/dtype.h"
#include "formats/digest.h"
#include "formats/json_strict.h"
#include "formats/json_writer.h"

typedef enum {
    QC_ROW_TEXT,   /* const char *; a reader copies it to the arena */
    QC_ROW_MAYBE,  /* the same; null for NULL */
    QC_ROW_WORD,   /* const char *; a reader finds it in `words` and copies nothing */
    QC_ROW_U64,    /* uint64_t, at most 2^53 - 1: a writer refuses more (QC_ERR_RANGE) */
    QC_ROW_U32,    /* uint32_t */
    QC_ROW_BOOL,   /* int */
    QC_ROW_DOUBLE, /* double, finite */
    QC_ROW_DIGEST, /* qc_digest */
    QC_ROW_DTYPE,  /* qc_dtype */
    /* Only for writers: */
    QC_ROW_PATH, /* const char *, whatever bytes it has; null for NULL */
    QC_ROW_SIZE  /* size_t */
} qc_json_row_kind;

typedef struct {
    const char *name; /* NULL ends a table */
    qc_json_row_kind kind;
    unsigned when; /* 0, or a bit: the member is there only if the caller passes the bit */
    size_t offset; /* in the struct */
    const char *const *words; /* for QC_ROW_WORD: the texts that are known, up to a NULL */
} qc_json_row;

/* A row of a member that has the name of its field, and one that has another. kind is without
 * "QC_ROW_". */
#define QC_JSON_ROW(type, field, kind, when) QC_JSON_ROW_AS(#field, type, field, kind, when)
#define QC_JSON_ROW_AS(name, type, field, kind, when)                                              \
    {                                                                                              \
        name, QC_ROW_##kind, when, offsetof(type, field), NULL                                     \
    }

/* Writes the members of the object that is begun, from the struct at `from`. */
void qc_json_put_rows(qc_json_writer *w, const qc_json_row *rows, unsigned when, const void *from);
/* Writes the member `key`, an object. */
void qc_json_put_object(qc_json_writer *w, const char *key, const qc_json_row *rows, unsigned when,
                        const void *from);
/* The same on one line. */
void qc_json_put_row(qc_json_writer *w, const char *key, const qc_json_row *rows, unsigned when,
                     const void *from);
/* Writes the member `key`: a list of `count` objects, a line each, from structs of bytes_each. */
void qc_json_put_list(qc_json_writer *w, const char *key, const qc_json_row *rows, unsigned when,
                      const void *from, size_t count, size_t bytes_each);

/* Writes a number; one that a reader might round is QC_ERR_RANGE. */
void qc_json_put_exact(qc_json_writer *w, const char *key, uint64_t v);

/* A position among the members of an object or the elements of an array. */
typedef struct {
    const qc_json_node *in;
    const qc_json_node *next;
    qc_arena *arena; /* gets the texts */
} qc_json_walk;

/* Begins a walk over n, which must be of this kind; `what` names it in the message. */
QC_NODISCARD qc_status qc_json_enter(qc_json_walk *w, qc_arena *arena, const qc_json_node *n,
                                     qc_json_kind kind, const char *what, qc_error *err);
/* Returns whether the next member has this name. */
int qc_json_is_next(const qc_json_walk *w, const char *key);
/* Takes the next member, which must have this name. */
QC_NODISCARD qc_status qc_json_take(qc_json_walk *w, const char *key, const qc_json_node **out,
                                    qc_error *err);
/* Takes the next member and begins a walk over what it holds. */
QC_NODISCARD qc_status qc_json_take_in(qc_json_walk *w, const char *key, qc_json_kind kind,
                                       qc_json_walk *inner, qc_error *err);
/* Ends the walk: no member may be left. */
QC_NODISCARD qc_status qc_json_leave(const qc_json_walk *w, qc_error *err);
/* Takes the members of a table and stores them in the struct at `to`. */
QC_NODISCARD qc_status qc_json_take_rows(qc_json_walk *w, const qc_json_row *rows, unsigned when,
                                         void *to, qc_error *err);
/* Takes the member `key`, a list of objects of a table. *out, the address of a typed pointer, gets
 * structs of bytes_each in the arena. */
QC_NODISCARD qc_status qc_json_take_list(qc_json_walk *w, const char *key, const qc_json_row *rows,
                                         unsigned when, void *out, size_t *count, size_t bytes_each,
                                         qc_error *err);
#endif
