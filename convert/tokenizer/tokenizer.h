/* Text to token ids, as the model's own tokenizer.json says: what eval reads a text with.
 *
 * Byte-pair encodings of the Hugging Face form: byte-level (GPT-2, Llama 3, Qwen) and
 * SentencePiece-like with byte fallback (Llama 2, Mistral, TinyStories), with their normalizers,
 * pre-tokenizers, added tokens and post-processors; ids equal those of the `tokenizers` package.
 * What a file asks for and this does not do is refused by name (QC_ERR_UNSUPPORTED), never
 * approximated. The bundled byte model has no tokenizer.json: each byte is its id. */
#ifndef QC_CONVERT_TOKENIZER_H
#define QC_CONVERT_TOKENIZER_H

#include "base/arena.h"
#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct qc_tokenizer qc_tokenizer;

/* path: a tokenizer.json, or a directory with one. QC_ERR_INPUT for a bad file. */
QC_NODISCARD qc_status qc_tokenizer_open(qc_tokenizer **out, const char *path, qc_error *err);
/* The text of a tokenizer.json. Messages do not name a file. */
QC_NODISCARD qc_status qc_tokenizer_open_text(qc_tokenizer **out, const char *text, size_t len,
                                              qc_error *err);
/* Ids are bytes. */
QC_NODISCARD qc_status qc_tokenizer_open_bytes(qc_tokenizer **out, qc_error *err);
void qc_tokenizer_close(qc_tokenizer *t);                /* NULL is fine */
const char *qc_tokenizer_kind(const qc_tokenizer *t);    /* a literal: "bytes", "byte-level BPE" */
uint32_t qc_tokenizer_vocabulary(const qc_tokenizer *t); /* one more than the largest id */

/* What the post-processor puts in front of a text: often one <s>, often nothing. Borrowed. */
void qc_tokenizer_front(const qc_tokenizer *t, const uint32_t **ids, size_t *count);

/* The ids of a text (UTF-8, len bytes); *ids is to be freed with qc_free. specials: as
 * encode(add_special_tokens=...) of `tokenizers`: what the post-processor adds (a leading <s>).
 * QC_ERR_INPUT for bytes that are no UTF-8, with the offset (a tokenizer of bytes takes any).
 * QC_ERR_INTERRUPTED soon after Ctrl-C.
 * Thread-safe: yes, on one tokenizer. */
QC_NODISCARD qc_status qc_tokenizer_encode(const qc_tokenizer *t, const char *text, size_t len,
                                           int specials, uint32_t **ids, size_t *count,
                                           qc_error *err);

#endif
