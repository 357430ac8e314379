#include "convert/llama/token_text.h"

#include "base/alloc.h"
#include "base/text.h"
#include "convert/tokenizer/tokenizer.h"
#include "formats/file_io.h"

#include <inttypes.h>
#include <string.h>

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
        if (ids->ids[i] >= t->vocabulary)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: the %s tokenizer gives the token %" PRIu32
                    ", which is not in the model's vocabulary of %" PRIu64,
                    t->name, kind, ids->ids[i], t->vocabulary);
    return QC_OK;
}

static qc_status encode(const qc_token_text *t, const qc_tokenizer *tokenizer,
                        const qc_strbuf *text, qc_eval_ids *ids, qc_error *err)
{
    size_t count = 0;
    void *v = NULL;
    QC_TRY(qc_malloc(&v, sizeof *ids->lengths, err));
    ids->lengths = v;
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
        st = qc_eval_ids_parse(&ids, text->data ? text->data : "", text->len, t->vocabulary,
                               t->max_tokens, err);
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
