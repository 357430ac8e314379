/* Takes a long JSON text apart while it is read. One of its lists comes element by element, so that
 * a text of a hundred megabytes needs memory only for one element and for what is not in the list.
 *
 *   {"a": 1, "rows": [{...}, {...}], "b": 2}     list "rows"
 *   head  {"a": 1, "rows": []}
 *   element  {...}    element  {...}
 *   tail  {"b": 2}
 *
 * The list is an array or an object that is a member of the top-level object; an element of an
 * object comes as an object of one member. The text is cut by looking at brackets, commas and
 * strings alone. The parser that gets the parts (formats/json_strict.h) does all the checking: an
 * error in the whole is an error in one of its parts, except for a key that appears in two of them.
 * Not thread-safe: it has one owner. Allocates the head, one element or the tail, one at a time,
 * and never more than twice what was fed. */
#ifndef QC_FORMATS_JSON_CUT_H
#define QC_FORMATS_JSON_CUT_H

#include "base/status.h"
#include "base/strbuf.h"

/* Gets a text, which is borrowed for the call. A return other than QC_OK ends the cutting. */
typedef qc_status (*qc_json_part_fn)(void *ctx, const char *text, size_t len, qc_error *err);

typedef struct {
    const char *list;        /* key of the list */
    qc_json_part_fn head;    /* comes before the first element; a text without the list is all
                                head and comes at the end */
    qc_json_part_fn element; /* any number of times */
    qc_json_part_fn tail;    /* at the end */
    void *ctx;
} qc_json_parts; /* functions that are not wanted are NULL */

typedef struct {
    qc_json_parts parts;
    qc_strbuf text; /* text of the part that is being read */
    qc_strbuf word; /* the beginning of the last string at the top level */
    uint64_t depth;
    int in_object; /* the top level is an object; in an array there is no list */
    int in_string, escaped;
    int phase;         /* before, in or behind the list */
    int is_object;     /* the list */
    int is_mismatched; /* its brackets */
    uint64_t elements;
} qc_json_cut;

void qc_json_cut_init(qc_json_cut *c, const qc_json_parts *parts);
QC_NODISCARD qc_status qc_json_cut_feed(qc_json_cut *c, const char *bytes, size_t len,
                                        qc_error *err);
/* The text is over. */
QC_NODISCARD qc_status qc_json_cut_finish(qc_json_cut *c, qc_error *err);
void qc_json_cut_deinit(qc_json_cut *c);

#endif
