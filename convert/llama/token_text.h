/* A text as windows of token ids: what eval measures with and convert --calibrate runs through a
 * model. */
#ifndef QC_CONVERT_TOKEN_TEXT_H
#define QC_CONVERT_TOKEN_TEXT_H

#include "base/arena.h"
#include "base/strbuf.h"
#include "convert/llama/eval_windows.h"
#include "formats/checkpoint.h"

#define QC_TOKEN_TEXT_MAX     ((size_t)4 << 30)
#define QC_TOKEN_TEXT_CONTEXT 2048u /* of a window, where none is given and the model has it */

typedef struct {
    qc_arena *arena;
    const char *name;      /* of the text, in messages; of ids where it ends in .ids */
    const char *tokenizer; /* --tokenizer, or NULL: the first of the models' own */
    const qc_checkpoint *models[2];
    unsigned model_count;
    const char *model; /* in messages: who has no tokenizer.json */
    uint64_t vocabulary, context;
    uint64_t max_tokens; /* of the beginning; 0: all */
} qc_token_text;

/* Cuts the text. *tokens: its own; *tokenizer: kind, a literal, or "ids". */
QC_NODISCARD qc_status qc_token_text_windows(qc_eval_windows *out, const qc_token_text *t,
                                             const qc_strbuf *text, uint64_t *tokens,
                                             const char **tokenizer, qc_error *err);

/* Leaves windows of at most max_tokens together, but at least one, evenly spread over all. */
void qc_eval_windows_spread(qc_eval_windows *w, uint64_t max_tokens);

#endif
