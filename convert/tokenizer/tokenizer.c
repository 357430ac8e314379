/* Opens a tokenizer and runs a text through it. tokenizer_internal.h explains the steps. */
#include "convert/tokenizer/tokenizer.h"

#include "base/alloc.h"
#include "convert/tokenizer/tokenizer_internal.h"
#include "formats/file_io.h"

#include <inttypes.h>
#include <string.h>
#include <utf8proc.h>

#define FILE_MAX ((size_t)64 << 20) /* Llama 3's is 9 MB, Gemma's 20 MB and more */

static qc_status create(qc_tokenizer **out, qc_error *err)
{
    *out = NULL;
    QC_TRY(qc_calloc(out, 1, sizeof **out, err));
    qc_arena_init(&(*out)->arena);
    return QC_OK;
}

qc_status qc_tokenizer_open_bytes(qc_tokenizer **out, qc_error *err)
{
    QC_TRY(create(out, err));
    (*out)->bytes = 1;
    (*out)->kind = "bytes";
    (*out)->vocabulary = 256;
    return QC_OK;
}

qc_status qc_tokenizer_open_text(qc_tokenizer **out, const char *text, size_t len, qc_error *err)
{
    qc_json *doc = NULL;
    *out = NULL;
    QC_TRY(qc_json_parse(&doc, text, len, 0, err));
    qc_status st = create(out, err);
    if (st == QC_OK)
        st = qc_tokenizer_read(*out, qc_json_root(doc), err);
    qc_json_destroy(doc);
    if (st != QC_OK) {
        qc_tokenizer_close(*out);
        *out = NULL;
    }
    return st;
}

qc_status qc_tokenizer_open(qc_tokenizer **out, const char *path, qc_error *err)
{
    qc_strbuf text;
    qc_arena arena;
    qc_path_kind kind = QC_PATH_MISSING;
    *out = NULL;
    qc_strbuf_init(&text, FILE_MAX);
    qc_arena_init(&arena);
    qc_status st = qc_path_stat(path, &kind, NULL, err);
    if (st == QC_OK && kind == QC_PATH_DIR)
        st = qc_path_join(&arena, &path, path, "tokenizer.json", err);
    if (st == QC_OK)
        st = qc_file_slurp(path, &text, err);
    if (st == QC_OK) {
        st = qc_tokenizer_open_text(out, text.data ? text.data : "", text.len, err);
        if (st != QC_OK)
            qc_error_prefix(err, "%s", path);
    }
    qc_arena_deinit(&arena);
    qc_strbuf_deinit(&text);
    return st;
}

void qc_tokenizer_close(qc_tokenizer *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < t->step_count; i++)
        qc_pattern_free(t->steps[i].pattern);
    for (size_t i = 0; i < t->norm_count; i++)
        qc_pattern_free(t->norms[i].pattern);
    qc_pattern_free(t->word);
    qc_arena_deinit(&t->arena);
    qc_free(t);
}

const char *qc_tokenizer_kind(const qc_tokenizer *t)
{
    return t->kind;
}

uint32_t qc_tokenizer_vocabulary(const qc_tokenizer *t)
{
    return t->vocabulary;
}

void qc_tokenizer_front(const qc_tokenizer *t, const uint32_t **ids, size_t *count)
{
    *ids = t->front;
    *count = t->front_count;
}

/* ---- encoding ------------------------------------------------------------------------------- */

static qc_status check_utf8(const char *text, size_t len, qc_error *err)
{
    for (size_t at = 0; at < len;) {
        utf8proc_int32_t c = 0;
        if ((unsigned char)text[at] < 0x80) {
            at++;
            continue;
        }
        size_t left = len - at < 4 ? len - at : 4;
        utf8proc_ssize_t n =
            utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)left, &c);
        if (n <= 0)
            QC_FAIL(err, QC_ERR_INPUT, "the text is not UTF-8 at byte %zu; convert it to UTF-8",
                    at);
        at += (size_t)n;
    }
    return QC_OK;
}

/* Takes what the normalizer gives: a stretch of text for the pre-tokenizer, or a token. */
static qc_status normalized_part(qc_encoder *e, qc_span s, const qc_added *token, qc_error *err)
{
    int first = !e->began;
    e->began = 1;
    return token ? qc_bpe_push(&e->bpe, token->id, err) : qc_step_run(e, 0, s, first, err);
}

/* Takes text as it comes before the normalizer. */
static qc_status raw_part(qc_encoder *e, qc_span s, const qc_added *token, qc_error *err)
{
    const qc_tokenizer *t = e->t;
    if (token) {
        e->began = 1;
        return qc_bpe_push(&e->bpe, token->id, err);
    }
    QC_TRY(qc_normalize(t->norms, t->norm_count, e->matcher, &e->room, s, &s, err));
    return qc_added_split(&t->normalized, t->word, e, s, normalized_part, err);
}

static qc_status push_all(qc_encoder *e, const uint32_t *ids, size_t count, qc_error *err)
{
    for (size_t i = 0; i < count; i++)
        QC_TRY(qc_bpe_push(&e->bpe, ids[i], err));
    return QC_OK;
}

static qc_status encode(qc_encoder *e, const char *text, size_t len, int specials, qc_error *err)
{
    const qc_tokenizer *t = e->t;
    if (t->bytes) {
        for (size_t i = 0; i < len; i++)
            QC_TRY(qc_bpe_push(&e->bpe, (unsigned char)text[i], err));
        return QC_OK;
    }
    QC_TRY(check_utf8(text, len, err));
    qc_token_budget_init(&e->budget, len);
    QC_TRY(qc_matcher_create(&e->matcher, &e->budget, err));
    if (specials)
        QC_TRY(push_all(e, t->front, t->front_count, err));
    QC_TRY(qc_added_split(&t->raw, t->word, e, (qc_span){text, len}, raw_part, err));
    return specials ? push_all(e, t->back, t->back_count, err) : QC_OK;
}

qc_status qc_tokenizer_encode(const qc_tokenizer *t, const char *text, size_t len, int specials,
                              uint32_t **ids, size_t *count, qc_error *err)
{
    qc_encoder e = {.t = t};
    *ids = NULL;
    *count = 0;
    for (unsigned i = 0; i < 2; i++)
        qc_strbuf_init(&e.room.text[i], QC_TOKENIZER_TEXT_MAX);
    for (size_t i = 0; i <= QC_MAX_STEPS; i++)
        qc_strbuf_init(&e.step_text[i], QC_TOKENIZER_TEXT_MAX);
    qc_status st = encode(&e, text, len, specials, err);
    for (unsigned i = 0; i < 2; i++)
        qc_strbuf_deinit(&e.room.text[i]);
    for (size_t i = 0; i <= QC_MAX_STEPS; i++)
        qc_strbuf_deinit(&e.step_text[i]);
    qc_matcher_free(e.matcher);
    qc_bpe_room_deinit(&e.bpe);
    if (st != QC_OK) {
        qc_free(e.bpe.ids);
        return st;
    }
    *ids = e.bpe.ids;
    *count = e.bpe.count;
    return QC_OK;
}
