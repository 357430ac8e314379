/* A text as windows of token ids, and files of ids.
 *
 * A text is one sequence; a file of ids has one sequence per line. Each sequence is cut by itself
 * into windows of `context` tokens. They do not overlap, and the last one may be shorter. The
 * tokens that the tokenizer puts in front of a text (a leading <s>) stand in front of every window
 * and count towards its context.
 *
 * A window predicts every token except those in front; if there are none in front, it does not
 * predict its first token either. A window that predicts nothing is left out. */
#ifndef QC_CONVERT_EVAL_WINDOWS_H
#define QC_CONVERT_EVAL_WINDOWS_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* Sequences of ids, one after the other. The struct owns them. */
typedef struct {
    uint32_t *ids;
    uint64_t *lengths; /* [count]; none is 0 */
    uint64_t count, tokens;
} qc_eval_ids;

/* Reads a file of ids: digits with spaces or tabs between and around them, and a newline (possibly
 * behind a carriage return) after each sequence. Empty lines do not count. It reads at most
 * max_tokens ids (0: all). QC_ERR_INPUT, with line and column (from 1, in bytes), for anything else
 * and for an id that is not below `vocabulary`. Messages do not name the file. */
QC_NODISCARD qc_status qc_eval_ids_parse(qc_eval_ids *out, const char *text, size_t len,
                                         uint64_t vocabulary, uint64_t max_tokens, qc_error *err);
void qc_eval_ids_deinit(qc_eval_ids *ids);

typedef struct {
    uint32_t *ids;     /* ids of all windows; owned, as are the lengths */
    uint64_t *lengths; /* [count], including the tokens in front */
    uint64_t count, tokens;
    uint64_t first;     /* the first position of a window that is predicted: 1 or more */
    uint64_t longest;   /* length */
    uint64_t predicted; /* predicted tokens of all windows */
} qc_eval_windows;

/* front [front_count] are the tokens in front of each window. QC_ERR_USAGE if the context has no
 * room for them and one more token; QC_ERR_INPUT if nothing is predicted. */
QC_NODISCARD qc_status qc_eval_windows_cut(qc_eval_windows *out, const qc_eval_ids *ids,
                                           const uint32_t *front, uint64_t front_count,
                                           uint64_t context, qc_error *err);
void qc_eval_windows_deinit(qc_eval_windows *w);

#endif
