/* A text as windows of token ids. eval measures with it, and convert --calibrate runs it through a
 * model. */
#ifndef QC_CONVERT_TOKEN_TEXT_H
#define QC_CONVERT_TOKEN_TEXT_H

#include "base/arena.h"
#include "base/strbuf.h"
#include "convert/llama/eval_windows.h"
#include "formats/checkpoint.h"

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
