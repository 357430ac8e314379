/* A text as windows of token ids, and files of ids.
 *
 * A text is one sequence; a file of ids has one a line. Each sequence is cut by itself into windows
 * of `context` tokens that do not overlap, the last one shorter. What the tokenizer puts in front
 * of a text (a leading <s>) stands in front of every window and counts towards its context. A
 * window predicts its tokens but those and but its first; one that predicts nothing is left out. */
#ifndef QC_CONVERT_EVAL_WINDOWS_H
#define QC_CONVERT_EVAL_WINDOWS_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* Sequences of ids, one after the other; owned. */
typedef struct {
    uint32_t *ids;
    uint64_t *lengths; /* [count], none of them 0 */
    uint64_t count, tokens;
} qc_eval_ids;

/* What a file of ids says: digits, spaces or tabs between and around, a new line (perhaps behind a
 * carriage return) after each sequence; empty lines are nothing. At most max_tokens (0: all) are
 * read. QC_ERR_INPUT with line and column (from 1, in bytes) for anything else and for an id that
 * is not below `vocabulary`. Messages do not name the file. */
QC_NODISCARD qc_status qc_eval_ids_parse(qc_eval_ids *out, const char *text, size_t len,
                                         uint64_t vocabulary, uint64_t max_tokens, qc_error *err);
void qc_eval_ids_deinit(qc_eval_ids *ids);

typedef struct {
    uint32_t *ids;     /* of all windows; owned, as the next */
    uint64_t *lengths; /* [count], what is in front included */
    uint64_t count, tokens;
    uint64_t first;     /* the first place of a window that is predicted: 1, or more */
    uint64_t longest;   /* length */
    uint64_t predicted; /* tokens, over all windows */
} qc_eval_windows;

/* front [front_count]: what stands in front of each window. QC_ERR_USAGE if the context has no room
 * for it and a token; QC_ERR_INPUT if nothing is predicted. */
QC_NODISCARD qc_status qc_eval_windows_cut(qc_eval_windows *out, const qc_eval_ids *ids,
                                           const uint32_t *front, uint64_t front_count,
                                           uint64_t context, qc_error *err);
void qc_eval_windows_deinit(qc_eval_windows *w);

#endif
