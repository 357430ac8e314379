#include "convert/forward/token_text.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/tokenizer/tokenizer.h"
#include "formats/file_io.h"

#include <inttypes.h>
#include <string.h>

/* ---- files of ids --------------------------------------------------------------------------- */

static int is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Counts how many numbers and lines there are at most, which is what the arrays need. */
static void count_most(const char *text, size_t len, uint64_t max_tokens, uint64_t *numbers,
                       uint64_t *lines)
{
    *numbers = 0;
    *lines = 1;
    for (size_t i = 0; i < len && (max_tokens == 0 || *numbers < max_tokens); i++) {
        *numbers += is_digit(text[i]) && (i == 0 || !is_digit(text[i - 1]));
        *lines += text[i] == '\n';
    }
}

typedef struct {
    const char *text;
    size_t len, at, line_start;
    uint64_t line;
} scanner;

#define FAIL_AT(s, err, ...)                                                                       \
    do {                                                                                           \
        (void)qc_error_set((err), QC_ERR_INPUT, __FILE__, __LINE__, __VA_ARGS__);                  \
        qc_error_prefix((err), "line %" PRIu64 ", column %zu", (s)->line,                          \
                        (s)->at - (s)->line_start + 1);                                            \
        return QC_ERR_INPUT;                                                                       \
    } while (0)

static qc_status unexpected(const scanner *s, qc_error *err)
{
    unsigned char c = (unsigned char)s->text[s->at];
    if (c > ' ' && c < 0x7f)
        FAIL_AT(s, err, "expected a decimal token id, found '%c'", c);
    FAIL_AT(s, err, "expected a decimal token id, found the byte 0x%02x", c);
}

static qc_status number(scanner *s, uint64_t vocabulary, uint32_t *out, qc_error *err)
{
    uint64_t id = 0;
    size_t end = s->at;
    for (; end < s->len && is_digit(s->text[end]); end++)
        id = id > UINT32_MAX ? id : id * 10 + (uint64_t)(s->text[end] - '0');
    if (s->text[s->at] == '0' && end - s->at > 1)
        FAIL_AT(s, err, "a token id has no leading zeros");
    if (id >= vocabulary || id > UINT32_MAX) {
        int digits = end - s->at < 24 ? (int)(end - s->at) : 24;
        FAIL_AT(s, err, "token id %.*s%s is not in the vocabulary of %" PRIu64, digits,
                s->text + s->at, digits == 24 ? "..." : "", vocabulary);
    }
    s->at = end;
    /* In "12,13" and "1.5", what follows the digits is not a space. */
    if (end < s->len && s->text[end] != ' ' && s->text[end] != '\t' && s->text[end] != '\n' &&
        s->text[end] != '\r')
        return unexpected(s, err);
    *out = (uint32_t)id;
    return QC_OK;
}

static void end_line(qc_eval_ids *out, uint64_t *begin)
{
    if (out->tokens > *begin)
        out->lengths[out->count++] = out->tokens - *begin;
    *begin = out->tokens;
}

static qc_status scan(qc_eval_ids *out, scanner *s, uint64_t vocabulary, uint64_t most,
                      qc_error *err)
{
    uint64_t begin = 0;
    while (s->at < s->len && out->tokens < most) {
        char c = s->text[s->at];
        if (is_digit(c)) {
            QC_TRY(qc_check_interrupted(err));
            QC_TRY(number(s, vocabulary, &out->ids[out->tokens], err));
            out->tokens++;
            continue;
        }
        if (c == '\n') {
            end_line(out, &begin);
            s->line++;
            s->line_start = s->at + 1;
        } else if (c == '\r') {
            if (s->at + 1 < s->len && s->text[s->at + 1] != '\n')
                return unexpected(s, err);
        } else if (c != ' ' && c != '\t') {
            return unexpected(s, err);
        }
        s->at++;
    }
    end_line(out, &begin);
    return QC_OK;
}

qc_status qc_eval_ids_parse(qc_eval_ids *out, const char *text, size_t len, uint64_t vocabulary,
                            uint64_t max_tokens, qc_error *err)
{
    uint64_t numbers = 0, lines = 0;
    scanner s = {.text = text, .len = len, .line = 1};
    memset(out, 0, sizeof *out);
    count_most(text, len, max_tokens, &numbers, &lines);
    QC_TRY(qc_realloc_array(&out->ids, numbers + 1, sizeof *out->ids, err));
    qc_status st = qc_realloc_array(&out->lengths, lines, sizeof *out->lengths, err);
    if (st == QC_OK)
        st = scan(out, &s, vocabulary, max_tokens ? max_tokens : UINT64_MAX, err);
    if (st != QC_OK)
        qc_eval_ids_deinit(out);
    return st;
}

void qc_eval_ids_deinit(qc_eval_ids *ids)
{
    qc_free(ids->ids);
    qc_free(ids->lengths);
    memset(ids, 0, sizeof *ids);
}

/* ---- windows -------------------------------------------------------------------------------- */

/* How many windows that predict something a sequence of n tokens gives. Each takes `room` tokens.
 * Without tokens in front, a window does not predict its first token. */
static uint64_t windows_of(uint64_t n, uint64_t room, uint64_t front_count)
{
    uint64_t rest = n % room;
    return n / room + (rest > (front_count ? 0 : 1));
}

static qc_status allocate(qc_eval_windows *out, uint64_t windows, uint64_t tokens, qc_error *err)
{
    size_t n = 0;
    if (qc_u64_to_size(tokens, &n))
        QC_FAIL(err, QC_ERR_NOMEM, "%" PRIu64 " tokens do not fit memory", tokens);
    QC_TRY(qc_realloc_array(&out->ids, n, sizeof *out->ids, err));
    QC_TRY(qc_realloc_array(&out->lengths, (size_t)windows, sizeof *out->lengths, err));
    QC_TRY(qc_realloc_array(&out->sequences, (size_t)windows, sizeof *out->sequences, err));
    return QC_OK;
}

static void cut_sequence(qc_eval_windows *out, const qc_eval_ids *all, uint64_t sequence,
                         uint64_t begin, const uint32_t *front, uint64_t front_count, uint64_t room)
{
    const uint32_t *ids = all->ids + begin;
    const uint64_t n = all->lengths[sequence];
    for (uint64_t w = windows_of(n, room, front_count), at = 0; w > 0; w--, at += room) {
        uint64_t take = n - at < room ? n - at : room;
        if (front_count)
            memcpy(out->ids + out->tokens, front, (size_t)front_count * sizeof *front);
        memcpy(out->ids + out->tokens + front_count, ids + at, (size_t)take * sizeof *ids);
        uint64_t length = front_count + take;
        out->sequences[out->count] = sequence;
        out->lengths[out->count++] = length;
        out->tokens += length;
        out->longest = length > out->longest ? length : out->longest;
        out->predicted += length - out->first;
    }
}

qc_status qc_eval_windows_cut(qc_eval_windows *out, const qc_eval_ids *ids, const uint32_t *front,
                              uint64_t front_count, uint64_t context, qc_error *err)
{
    uint64_t windows = 0, tokens = 0;
    memset(out, 0, sizeof *out);
    out->first = front_count ? front_count : 1;
    if (context <= out->first)
        QC_FAIL(err, QC_ERR_USAGE,
                "--context %" PRIu64 " predicts nothing; expected at least %" PRIu64
                ", the tokens that begin each window and one more",
                context, out->first + 1);
    uint64_t room = context - front_count;
    for (uint64_t i = 0; i < ids->count; i++)
        windows += windows_of(ids->lengths[i], room, front_count);
    if (windows == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%" PRIu64 " token%s in %" PRIu64
                " sequence%s are too few to predict one; expected a sequence of at least %d",
                ids->tokens, qc_plural(ids->tokens), ids->count, qc_plural(ids->count),
                front_count ? 1 : 2);
    if (qc_mul_u64(windows, front_count, &tokens) || qc_add_u64(tokens, ids->tokens, &tokens))
        tokens = UINT64_MAX;
    qc_status st = allocate(out, windows, tokens, err);
    if (st != QC_OK) {
        qc_eval_windows_deinit(out);
        return st;
    }
    for (uint64_t i = 0, at = 0; i < ids->count; at += ids->lengths[i++])
        cut_sequence(out, ids, i, at, front, front_count, room);
    return QC_OK;
}

void qc_eval_windows_deinit(qc_eval_windows *w)
{
    qc_free(w->ids);
    qc_free(w->lengths);
    qc_free(w->sequences);
    memset(w, 0, sizeof *w);
}

/* ---- texts ---- */

/* Finds the tokenizer.json of --tokenizer or of a model. NULL if there is none. */
static qc_status find_tokenizer(const qc_token_text *t, const char **path, qc_error *err)
{
    *path = t->tokenizer;
    for (unsigned i = 0; !*path && i < t->model_count; i++) {
        const qc_checkpoint *c = t->models[i];
        const char *file = NULL;
        qc_path_kind kind = QC_PATH_MISSING;
        if (!c->is_dir)
            continue;
        QC_TRY(qc_path_join(t->arena, &file, c->path, "tokenizer.json", err));
        QC_TRY(qc_path_stat(file, &kind, NULL, err));
        if (kind == QC_PATH_FILE)
            *path = file;
    }
    return QC_OK;
}

static qc_status open_tokenizer(const qc_token_text *t, qc_tokenizer **out, qc_error *err)
{
    const char *path = NULL;
    QC_TRY(find_tokenizer(t, &path, err));
    if (path)
        return qc_tokenizer_open(out, path, err);
    if (t->vocabulary == 256)
        return qc_tokenizer_open_bytes(out, err);
    QC_FAIL(err, QC_ERR_INPUT,
            "%s has no tokenizer.json; expected one there or with --tokenizer, or a text of token "
            "ids (FILE.ids)",
            t->model);
}

static qc_status check_ids(const qc_token_text *t, const qc_eval_ids *ids, const char *kind,
                           qc_error *err)
{
    for (uint64_t i = 0; i < ids->tokens; i++)
        if (ids->ids[i] >= t->ids)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: the %s tokenizer gives the token %" PRIu32
                    ", which is not in the model's vocabulary of %" PRIu64,
                    t->name, kind, ids->ids[i], t->ids);
    return QC_OK;
}

static qc_status encode(const qc_token_text *t, const qc_tokenizer *tokenizer,
                        const qc_strbuf *text, qc_eval_ids *ids, qc_error *err)
{
    size_t count = 0;
    QC_TRY(qc_malloc(&ids->lengths, sizeof *ids->lengths, err));
    qc_status st = qc_tokenizer_encode(tokenizer, text->data ? text->data : "", text->len, 0,
                                       &ids->ids, &count, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "%s", t->name);
        return st;
    }
    ids->tokens = count;
    if (t->max_tokens && t->max_tokens < ids->tokens)
        ids->tokens = t->max_tokens;
    ids->lengths[0] = ids->tokens;
    ids->count = ids->tokens > 0;
    return check_ids(t, ids, qc_tokenizer_kind(tokenizer), err);
}

static qc_status cut(qc_eval_windows *out, const qc_token_text *t, const qc_eval_ids *ids,
                     const uint32_t *front, size_t count, qc_error *err)
{
    qc_status st = qc_eval_windows_cut(out, ids, front, count, t->context, err);
    if (st == QC_ERR_INPUT)
        qc_error_prefix(err, "%s", t->name);
    return st;
}

static qc_status cut_text(qc_eval_windows *out, const qc_token_text *t, const qc_strbuf *text,
                          qc_eval_ids *ids, const char **kind, qc_error *err)
{
    qc_tokenizer *tokenizer = NULL;
    const uint32_t *front = NULL;
    size_t count = 0;
    qc_status st = open_tokenizer(t, &tokenizer, err);
    if (st == QC_OK)
        st = encode(t, tokenizer, text, ids, err);
    if (st == QC_OK) {
        qc_tokenizer_front(tokenizer, &front, &count);
        st = cut(out, t, ids, front, count, err);
        *kind = qc_tokenizer_kind(tokenizer);
    }
    qc_tokenizer_close(tokenizer);
    return st;
}

qc_status qc_token_text_windows(qc_eval_windows *out, const qc_token_text *t, const qc_strbuf *text,
                                uint64_t *tokens, const char **tokenizer, qc_error *err)
{
    qc_eval_ids ids = {0};
    qc_status st = QC_OK;
    if (qc_ends_with(t->name, ".ids")) {
        *tokenizer = "ids";
        st = qc_eval_ids_parse(&ids, text->data ? text->data : "", text->len, t->ids, t->max_tokens,
                               err);
        if (st == QC_OK)
            st = cut(out, t, &ids, NULL, 0, err);
        else
            qc_error_prefix(err, "%s", t->name);
    } else {
        st = cut_text(out, t, text, &ids, tokenizer, err);
    }
    *tokens = ids.tokens;
    qc_eval_ids_deinit(&ids);
    return st;
}

void qc_eval_windows_spread(qc_eval_windows *w, uint64_t max_tokens)
{
    uint64_t all = w->count, keep = max_tokens / w->longest, tokens = 0, at = 0, next = 0;
    if (w->tokens <= max_tokens)
        return;
    keep = keep < 1 ? 1 : keep > all ? all : keep;
    w->longest = w->predicted = w->count = 0;
    for (uint64_t i = 0; i < all; i++) {
        uint64_t length = w->lengths[i];
        /* Window k of those that are kept is the one that holds the middle of its share of the
         * text. */
        if (next < keep && i == (uint64_t)(((double)next + 0.5) * (double)all / (double)keep)) {
            memmove(w->ids + tokens, w->ids + at, (size_t)length * sizeof *w->ids);
            w->sequences[w->count] = w->sequences[i];
            w->lengths[w->count++] = length;
            tokens += length;
            w->longest = length > w->longest ? length : w->longest;
            w->predicted += length - w->first;
            next++;
        }
        at += length;
    }
    w->tokens = tokens;
}
