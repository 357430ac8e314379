/* Writes the result of eval as JSON, and reads it again. */
#include "convert/eval/eval.h"
#include "formats/file_io.h"
#include "formats/json_strict.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#define FILE_MAX (1u << 20)

/* One table serves both ways: the member's name is the field's. */
typedef enum { TEXT, MAYBE_TEXT, COUNT, NUMBER } member_kind;
/* It is null where there is no original (PAIR), where the model is an encoder (WORDS), or where it
 * is none (STATES). */
typedef enum { ALL, PAIR, WORDS, WORDS_PAIR, STATES } member_of;
typedef struct {
    const char *name;
    member_kind kind;
    member_of of;
    size_t offset;
} member;

#define MEMBER(field, kind, of)                                                                    \
    {                                                                                              \
#field, kind, of, offsetof(qc_eval_result, field)                                          \
    }
static const member MEMBERS[] = {
    MEMBER(path, TEXT, ALL),
    MEMBER(against, MAYBE_TEXT, PAIR),
    MEMBER(text, TEXT, ALL),
    MEMBER(model_type, TEXT, ALL),
    MEMBER(tokenizer, TEXT, ALL),
    MEMBER(device, TEXT, ALL),
    MEMBER(tokens, COUNT, ALL),
    MEMBER(windows, COUNT, ALL),
    MEMBER(context, COUNT, ALL),
    MEMBER(predicted, COUNT, ALL),
    MEMBER(perplexity, NUMBER, WORDS),
    MEMBER(perplexity_error, NUMBER, WORDS),
    MEMBER(base_perplexity, NUMBER, WORDS_PAIR),
    MEMBER(base_perplexity_error, NUMBER, WORDS_PAIR),
    MEMBER(difference, NUMBER, WORDS_PAIR),
    MEMBER(difference_error, NUMBER, WORDS_PAIR),
    MEMBER(log_ratio, NUMBER, WORDS_PAIR),
    MEMBER(log_ratio_error, NUMBER, WORDS_PAIR),
    MEMBER(kl_mean, NUMBER, WORDS_PAIR),
    MEMBER(kl_error, NUMBER, WORDS_PAIR),
    MEMBER(kl_median, NUMBER, WORDS_PAIR),
    MEMBER(kl_99, NUMBER, WORDS_PAIR),
    MEMBER(kl_max, NUMBER, WORDS_PAIR),
    MEMBER(top1, NUMBER, WORDS_PAIR),
    MEMBER(top1_error, NUMBER, WORDS_PAIR),
    MEMBER(probability_rms, NUMBER, WORDS_PAIR),
    MEMBER(distance_mean, NUMBER, STATES),
    MEMBER(distance_99, NUMBER, STATES),
    MEMBER(distance_max, NUMBER, STATES),
    MEMBER(cosine_mean, NUMBER, STATES),
    MEMBER(cosine_99, NUMBER, STATES),
    MEMBER(cosine_max, NUMBER, STATES),
    MEMBER(seconds, NUMBER, ALL),
};
#define MEMBER_COUNT (sizeof MEMBERS / sizeof *MEMBERS)

static int is_null(const qc_eval_result *r, member_of of)
{
    return ((of == PAIR || of == WORDS_PAIR) && !r->compared) ||
           ((of == WORDS || of == WORDS_PAIR) && r->encoder) || (of == STATES && !r->encoder);
}

qc_status qc_eval_json(const qc_eval_result *r, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_json_write_begin_text(&w, out, err);
    qc_json_member_string(&w, "command", "eval");
    for (size_t i = 0; i < MEMBER_COUNT; i++) {
        const member *m = &MEMBERS[i];
        const char *at = (const char *)r + m->offset;
        const char *text = NULL;
        uint64_t count = 0;
        double number = 0.0;
        if (is_null(r, m->of)) {
            qc_json_member_string(&w, m->name, NULL);
        } else if (m->kind == COUNT) {
            memcpy(&count, at, sizeof count);
            qc_json_member_u64(&w, m->name, count);
        } else if (m->kind == NUMBER) {
            memcpy(&number, at, sizeof number);
            qc_json_member_number(&w, m->name, number);
        } else {
            memcpy(&text, at, sizeof text);
            qc_json_member_path(&w, m->name, text);
        }
    }
    return qc_json_write_end_text(&w);
}

static qc_status read_member(qc_eval_result *out, qc_arena *arena, const member *m,
                             const qc_json_node *n, qc_error *err)
{
    char *at = (char *)out + m->offset;
    int null = n && qc_json_kind_of(n) == QC_JSON_NULL;
    if (m->of == STATES)
        return QC_OK;
    if (is_null(out, m->of) && m->kind != MAYBE_TEXT) {
        if (!null)
            QC_FAIL(err, QC_ERR_INPUT, "%s: expected null, because 'against' is null", m->name);
        return QC_OK;
    }
    if (m->kind == COUNT) {
        uint64_t count = 0;
        QC_TRY(qc_json_as_u64(n, m->name, &count, err));
        memcpy(at, &count, sizeof count);
    } else if (m->kind == NUMBER) {
        double number = (double)NAN;
        if (!null)
            QC_TRY(qc_json_as_double(n, m->name, &number, err));
        memcpy(at, &number, sizeof number);
    } else if (m->kind == TEXT || !null) {
        const char *text = NULL, *copy = NULL;
        QC_TRY(qc_json_as_string(n, m->name, &text, err));
        QC_TRY(qc_arena_strndup(arena, &copy, text, strlen(text), err));
        memcpy(at, &copy, sizeof copy);
        if (m->kind == MAYBE_TEXT)
            out->compared = 1;
    }
    return QC_OK;
}

static qc_status read_document(qc_eval_result *out, qc_arena *arena, const qc_json_node *root,
                               qc_error *err)
{
    const char *command = qc_json_string_or(qc_json_get(root, "command"), NULL);
    if (!command || strcmp(command, "eval") != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "expected what 'qconv eval --json' writes, but 'command' is not 'eval'");
    const qc_json_node *distance = qc_json_get(root, "distance_mean");
    if (distance && qc_json_kind_of(distance) != QC_JSON_NULL)
        QC_FAIL(err, QC_ERR_INPUT,
                "it has the distances of an encoder, and only what eval says of a language model "
                "can be read");
    for (size_t i = 0; i < MEMBER_COUNT; i++)
        QC_TRY(read_member(out, arena, &MEMBERS[i], qc_json_get(root, MEMBERS[i].name), err));
    if (out->predicted == 0 || !(out->perplexity >= 1.0) ||
        (out->compared && !(out->base_perplexity >= 1.0 && out->kl_mean >= 0.0)))
        QC_FAIL(err, QC_ERR_INPUT,
                "the numbers cannot come from 'qconv eval': expected a perplexity of at least 1, a "
                "KL divergence of at least 0, and at least 1 token");
    return QC_OK;
}

qc_status qc_eval_read(qc_eval_result *out, qc_arena *arena, const char *path, qc_error *err)
{
    qc_json *doc = NULL;
    memset(out, 0, sizeof *out);
    QC_TRY(qc_json_read_file(&doc, path, "", FILE_MAX, err));
    qc_status st = read_document(out, arena, qc_json_root(doc), err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", path);
    qc_json_destroy(doc);
    return st;
}
