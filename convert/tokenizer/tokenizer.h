/* Turns text into token ids as the model's own tokenizer.json says. eval reads a text with it.
 *
 * It does byte-pair encodings of the Hugging Face form: byte-level ones (GPT-2, Llama 3, Qwen) and
 * SentencePiece-like ones with byte fallback (Llama 2, Mistral, TinyStories); and WordPiece (BERT);
 * with their normalizers, pre-tokenizers, added tokens and post-processors. The ids equal those of
 * the `tokenizers` package. Whatever a file asks for that this cannot do is refused by name
 * (QC_ERR_UNSUPPORTED) and never approximated. The bundled byte model has no tokenizer.json: each
 * byte is its id. */
#ifndef QC_CONVERT_TOKENIZER_H
#define QC_CONVERT_TOKENIZER_H

#include "base/arena.h"
#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct qc_tokenizer qc_tokenizer;

/* path is a tokenizer.json, or a directory that holds one. QC_ERR_INPUT for a bad file. */
QC_NODISCARD qc_status qc_tokenizer_open(qc_tokenizer **out, const char *path, qc_error *err);
/* Opens the text of a tokenizer.json. Messages do not name a file. */
QC_NODISCARD qc_status qc_tokenizer_open_text(qc_tokenizer **out, const char *text, size_t len,
                                              qc_error *err);
/* Opens a tokenizer whose ids are bytes. */
QC_NODISCARD qc_status qc_tokenizer_open_bytes(qc_tokenizer **out, qc_error *err);
void qc_tokenizer_close(qc_tokenizer *t);                /* accepts NULL */
const char *qc_tokenizer_kind(const qc_tokenizer *t);    /* a literal: "bytes", "byte-level BPE" */
uint32_t qc_tokenizer_vocabulary(const qc_tokenizer *t); /* the largest id plus one */

/* The ids that the post-processor puts in front of a text: often one <s>, often nothing.
 * Borrowed. */
void qc_tokenizer_front(const qc_tokenizer *t, const uint32_t **ids, size_t *count);

/* Finds the ids of a text (UTF-8, len bytes); free *ids with qc_free. specials means the same as
 * encode(add_special_tokens=...) of `tokenizers`: whether to add what the post-processor adds (a
 * leading <s>). QC_ERR_INPUT for bytes that are not UTF-8, with their offset (a tokenizer of bytes
 * takes any). QC_ERR_INTERRUPTED soon after Ctrl-C. Thread-safe: yes, on one tokenizer. */
QC_NODISCARD qc_status qc_tokenizer_encode(const qc_tokenizer *t, const char *text, size_t len,
                                           int specials, uint32_t **ids, size_t *count,
                                           qc_error *err);

#endif
