/* Inside of convert/tokenizer/tokenizer.h.
 *
 * A text goes through the steps of a tokenizer.json in the same order as in the `tokenizers`
 * package. First come added tokens that are found in the text as it is. Each span between them goes
 * through the normalizer by itself. Then come added tokens that are found in normalized text, and
 * then the pre-tokenizer's steps, each of which cuts what the one before left. Finally each span
 * goes through byte-pair merges, or is cut into the longest pieces of a WordPiece. Spans are handed
 * on one at a time as they are found, so no list of all spans is ever kept. */
#ifndef QC_CONVERT_TOKENIZER_INTERNAL_H
#define QC_CONVERT_TOKENIZER_INTERNAL_H

#include "base/strbuf.h"
#include "convert/tokenizer/tokenizer.h"
#include "formats/json_strict.h"

#define QC_TOKENIZER_TEXT_MAX ((size_t)1 << 36) /* of a normalized span */
#define QC_NO_TOKEN           UINT32_MAX

typedef struct {
    const char *text;
    size_t len;
} qc_span;

#define QC_MAX_STEPS 16u /* steps of a normalizer, and of a pre-tokenizer */

/* ---- tokenizer_budget.c: how much one text may ask for ---- */

typedef struct {
    size_t text_bytes;
    uint64_t bytes; /* the most bytes that one step may write */
    /* bytes made by the normalizer's steps, then by the pre-tokenizer's */
    uint64_t made[2 * QC_MAX_STEPS];
    /* of looking for patterns and tokens: the limit, and how many were taken */
    uint64_t steps, taken;
} qc_token_budget;

void qc_token_budget_init(qc_token_budget *b, size_t text_bytes);
/* Call it when a step is about to write so many bytes. QC_ERR_INPUT if they are too many. */
QC_NODISCARD qc_status qc_token_budget_make(qc_token_budget *b, unsigned stage, size_t bytes,
                                            qc_error *err);
/* Returns 0 if the budget is spent or there was a Ctrl-C; qc_token_budget_check says which. */
int qc_token_budget_spend(qc_token_budget *b, uint64_t steps);
QC_NODISCARD qc_status qc_token_budget_check(const qc_token_budget *b, qc_error *err);

/* ---- tokenizer_regex.c: patterns of Oniguruma on PCRE2 ---- */

typedef struct qc_pattern qc_pattern; /* immutable; many threads may use it */
typedef struct qc_matcher qc_matcher; /* what one thread needs to use patterns */

/* Compiles a regular expression as the `tokenizers` package reads it (Oniguruma, UTF-8). It accepts
 * only what means the same to both engines, or can be written so that it does. The rest is
 * QC_ERR_UNSUPPORTED, which names the construct. */
QC_NODISCARD qc_status qc_pattern_compile(qc_pattern **out, const char *regex, qc_error *err);
/* Makes a pattern of a string that stands for itself. */
QC_NODISCARD qc_status qc_pattern_literal(qc_pattern **out, const char *text, qc_error *err);
void qc_pattern_free(qc_pattern *p); /* accepts NULL */
/* The budget is borrowed. */
QC_NODISCARD qc_status qc_matcher_create(qc_matcher **out, qc_token_budget *budget, qc_error *err);
void qc_matcher_free(qc_matcher *m); /* accepts NULL */
qc_token_budget *qc_matcher_budget(qc_matcher *m);
/* Finds the leftmost match at or after `from`: *found is 0 or 1, and the match is [*begin, *end).
 * QC_ERR_INPUT when the budget is spent. */
QC_NODISCARD qc_status qc_pattern_find(const qc_pattern *p, qc_matcher *m, qc_span s, size_t from,
                                       int *found, size_t *begin, size_t *end, qc_error *err);

/* ---- tokenizer_split.c: pre-tokenizers ---- */

typedef enum {
    QC_SPLIT_ISOLATED,
    QC_SPLIT_REMOVED,
    QC_SPLIT_PREVIOUS, /* MergedWithPrevious */
    QC_SPLIT_NEXT,
    QC_SPLIT_CONTIGUOUS
} qc_split_behavior;

typedef enum { QC_STEP_SPLIT, QC_STEP_BYTES, QC_STEP_METASPACE } qc_step_kind;
typedef enum { QC_PREPEND_NEVER, QC_PREPEND_FIRST, QC_PREPEND_ALWAYS } qc_prepend;

typedef struct {
    qc_step_kind kind;
    qc_pattern *pattern; /* owned; NULL for BYTES and METASPACE if they do not split */
    qc_split_behavior behavior;
    int invert;
    int prefix_space;  /* BYTES */
    const char *space; /* METASPACE: what stands for ' ' */
    qc_prepend prepend;
} qc_step;

/* ---- tokenizer_normalize.c ---- */

typedef enum {
    QC_NORM_UNICODE,
    QC_NORM_PREPEND,
    QC_NORM_REPLACE,
    QC_NORM_CHARACTERS /* what BertNormalizer does with each */
} qc_norm_kind;

/* Of a character, in this order. */
enum {
    QC_CHARS_CLEAN = 1, /* control characters go, and white space becomes ' ' */
    QC_CHARS_APART = 2, /* those of Chinese get a space on both sides */
    QC_CHARS_STRIP = 4, /* marks that take no room go */
    QC_CHARS_LOWER = 8
};

typedef struct {
    qc_norm_kind kind;
    int form;            /* UNICODE: options of utf8proc; CHARACTERS: QC_CHARS_* */
    qc_pattern *pattern; /* REPLACE; owned */
    const char *content; /* PREPEND, REPLACE */
} qc_norm;

/* Two buffers that are used in turn. */
typedef struct {
    qc_strbuf text[2];
    unsigned turn;
} qc_norm_room;

/* *out lies in s or in room, and is valid until the next call with that room. */
QC_NODISCARD qc_status qc_normalize(const qc_norm *norms, size_t count, qc_matcher *m,
                                    qc_norm_room *room, qc_span s, qc_span *out, qc_error *err);

/* ---- tokenizer_bpe.c ---- */

typedef struct {
    const char *text;
    uint32_t len, id;
} qc_vocab_entry;

typedef struct {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: the entry is empty */
    uint32_t rank, id;
} qc_merge_entry;

#define QC_CHAR_IDS 0x180u /* code points whose ids are in a table: ASCII and GPT-2's bytes */

typedef struct {
    qc_vocab_entry *vocab; /* hash table in the arena; an entry is empty if its text is NULL */
    size_t vocab_slots;
    qc_merge_entry *merges; /* hash table in the arena */
    size_t merge_slots;
    size_t vocab_count;
    uint32_t char_ids[QC_CHAR_IDS];
    uint32_t byte_ids[256]; /* ids of <0x00> to <0xFF> */
    const char *unk_token;  /* NULL: none */
    uint32_t unk_id;        /* QC_NO_TOKEN: unk_token is not in the vocabulary */
    int fuse_unk, byte_fallback, ignore_merges;
} qc_bpe;

/* Makes a table for `count` tokens. */
QC_NODISCARD qc_status qc_bpe_vocab_init(qc_bpe *b, qc_arena *arena, size_t count, qc_error *err);
/* Adds a token, whose text is borrowed. QC_ERR_INPUT if a file was made so that its tokens share a
 * hash. */
QC_NODISCARD qc_status qc_bpe_vocab_add(qc_bpe *b, const char *text, size_t len, uint32_t id,
                                        qc_error *err);
/* QC_NO_TOKEN if it is not there. */
uint32_t qc_bpe_find(const qc_bpe *b, const char *text, size_t len);
QC_NODISCARD qc_status qc_bpe_merges_init(qc_bpe *b, qc_arena *arena, size_t count, qc_error *err);
/* Adds a merge. It replaces a pair that is there already. QC_ERR_INPUT as above. */
QC_NODISCARD qc_status qc_bpe_merge_add(qc_bpe *b, uint32_t left, uint32_t right, uint32_t rank,
                                        uint32_t id, qc_error *err);
/* Fills the tables of single characters and bytes, once the vocabulary is whole. */
void qc_bpe_finish(qc_bpe *b);

/* The ids, which grow, and what merging needs. */
typedef struct qc_bpe_symbol qc_bpe_symbol;
typedef struct qc_bpe_candidate qc_bpe_candidate;
typedef struct {
    uint32_t *ids;
    size_t count, room;
    qc_bpe_symbol *symbols;
    size_t symbol_room;
    qc_bpe_candidate *heap;
    size_t heap_count, heap_room;
} qc_bpe_room;

void qc_bpe_room_deinit(qc_bpe_room *r); /* does not free ids: whoever takes them does */
QC_NODISCARD qc_status qc_bpe_push(qc_bpe_room *r, uint32_t id, qc_error *err);
/* Appends the tokens of one span. */
QC_NODISCARD qc_status qc_bpe_encode(const qc_bpe *b, qc_bpe_room *r, qc_span s, qc_error *err);

/* ---- tokenizer_wordpiece.c ---- */

/* Its vocabulary is the table of qc_bpe. */
typedef struct {
    const char *prefix; /* of pieces that do not begin a word; NULL: the model is no WordPiece */
    uint64_t most;      /* a word of more characters is unknown */
    uint32_t unk_id;
    size_t longest; /* the most bytes of a token */
} qc_wordpiece;

/* Appends the tokens of one word. */
typedef struct qc_encoder qc_encoder;
QC_NODISCARD qc_status qc_wordpiece_encode(qc_encoder *e, qc_span s, qc_error *err);

/* ---- tokenizer_added.c ---- */

typedef struct {
    qc_span content;
    uint32_t id;
    int special, normalized, single_word, lstrip, rstrip;
} qc_added;

typedef struct {
    qc_span pattern; /* arena */
    const qc_added *token;
} qc_added_pattern;

/* They are sorted by their bytes, so that patterns which begin alike are neighbours. */
typedef struct {
    qc_added_pattern *patterns; /* arena */
    size_t count;
    size_t first[257]; /* patterns that begin with byte b are [first[b], first[b + 1]) */
} qc_added_set;

/* Sorts the patterns. Before, they are in the order in which the first of equals counts. */
void qc_added_set_sort(qc_added_set *set);

/* If token is NULL, s is text between tokens. */
typedef qc_status (*qc_added_fn)(qc_encoder *e, qc_span s, const qc_added *token, qc_error *err);
/* Cuts s at the tokens of the set, and hands on what it finds, in order. word is a pattern that
 * matches one word character, for tokens that have to be whole words. */
QC_NODISCARD qc_status qc_added_split(const qc_added_set *set, const qc_pattern *word,
                                      qc_encoder *e, qc_span s, qc_added_fn fn, qc_error *err);

/* ---- the whole ---- */

struct qc_tokenizer {
    qc_arena arena;
    int bytes; /* ids are bytes, and nothing below is used */
    const char *kind;
    qc_bpe bpe;
    qc_wordpiece wordpiece;
    qc_added *added;
    size_t added_count;
    qc_added_set raw, normalized;
    qc_norm norms[QC_MAX_STEPS];
    size_t norm_count;
    qc_step steps[QC_MAX_STEPS];
    size_t step_count;
    qc_pattern *word;
    uint32_t *front, *back; /* arena */
    size_t front_count, back_count;
    uint32_t vocabulary;
};

/* What one call of encode works with. */
struct qc_encoder {
    const qc_tokenizer *t;
    qc_token_budget budget;
    qc_matcher *matcher;
    qc_norm_room room;
    /* texts of steps that rewrite what they get, and the last one of the model */
    qc_strbuf step_text[QC_MAX_STEPS + 1];
    qc_bpe_room bpe;
    int began; /* some of the text was handed on before */
};

/* Runs the steps from `step` on over s, and then the merges. first is set if the text begins with
 * s. */
QC_NODISCARD qc_status qc_step_run(qc_encoder *e, size_t step, qc_span s, int first, qc_error *err);

/* tokenizer_read.c: fills *t, whose arena is ready, from a parsed tokenizer.json. */
QC_NODISCARD qc_status qc_tokenizer_read(qc_tokenizer *t, const qc_json_node *root, qc_error *err);

/* Is it White_Space in Unicode? */
int qc_is_white_space(uint32_t c);

#endif
