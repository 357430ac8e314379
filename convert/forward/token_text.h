/* A text as windows of token ids, and files of ids. eval measures with it, and convert --calibrate
 * runs it through a model.
 *
 * A text is one sequence; a file of ids has one sequence per line. Each sequence is cut by itself
 * into windows of `context` tokens. They do not overlap, and the last one may be shorter. The
 * tokens that the tokenizer puts in front of a text (a leading <s>) stand in front of every window
 * and count towards its context.
 *
 * A window predicts every token except those in front; if there are none in front, it does not
 * predict its first token either. A window that predicts nothing is left out. */
#ifndef QC_CONVERT_FORWARD_TOKEN_TEXT_H
#define QC_CONVERT_FORWARD_TOKEN_TEXT_H

#include "base/arena.h"
#include "base/strbuf.h"
#include "formats/checkpoint.h"

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
    uint32_t *ids;       /* ids of all windows; owned, as are the other arrays */
    uint64_t *lengths;   /* [count], including the tokens in front */
    uint64_t *sequences; /* [count]: the sequence that each window is cut from, from 0 */
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

/* ---- texts ---- */

#define QC_TOKEN_TEXT_MAX ((size_t)4 << 30)
/* the context of a window if none is given and the model allows it */
#define QC_TOKEN_TEXT_CONTEXT 2048u

typedef struct {
    qc_arena *arena;
    /* the text's name, for messages; the text is one of ids if it ends in .ids */
    const char *name;
    const char *tokenizer; /* --tokenizer; NULL: the first of the models' own */
    const qc_checkpoint *models[2];
    unsigned model_count;
    const char *model; /* the model without a tokenizer.json, for messages */
    uint64_t vocabulary, context;
    uint64_t ids;        /* what ids are below: vocabulary, or more where the model sees images */
    uint64_t max_tokens; /* taken from the beginning; 0: all */
} qc_token_text;

/* Cuts the text into windows. *tokens is the number of its own tokens. *tokenizer is the
 * tokenizer's kind (a literal), or "ids". */
QC_NODISCARD qc_status qc_token_text_windows(qc_eval_windows *out, const qc_token_text *t,
                                             const qc_strbuf *text, uint64_t *tokens,
                                             const char **tokenizer, qc_error *err);

/* Keeps windows with at most max_tokens together, but at least one window, spread evenly over all
 * of them. */
void qc_eval_windows_spread(qc_eval_windows *w, uint64_t max_tokens);

#endif
