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
typedef struct {
    const char *name;
    member_kind kind;
    int of_pair; /* null if there is no original */
    size_t offset;
} member;

#define MEMBER(field, kind, of_pair)                                                               \
    {                                                                                              \
#field, kind, of_pair, offsetof(qc_eval_result, field)                                     \
    }
static const member MEMBERS[] = {
    MEMBER(path, TEXT, 0),
    MEMBER(against, MAYBE_TEXT, 1),
    MEMBER(text, TEXT, 0),
    MEMBER(model_type, TEXT, 0),
    MEMBER(tokenizer, TEXT, 0),
    MEMBER(device, TEXT, 0),
    MEMBER(tokens, COUNT, 0),
    MEMBER(windows, COUNT, 0),
    MEMBER(context, COUNT, 0),
    MEMBER(predicted, COUNT, 0),
    MEMBER(perplexity, NUMBER, 0),
    MEMBER(perplexity_error, NUMBER, 0),
    MEMBER(base_perplexity, NUMBER, 1),
    MEMBER(base_perplexity_error, NUMBER, 1),
    MEMBER(difference, NUMBER, 1),
    MEMBER(difference_error, NUMBER, 1),
    MEMBER(log_ratio, NUMBER, 1),
    MEMBER(log_ratio_error, NUMBER, 1),
    MEMBER(kl_mean, NUMBER, 1),
    MEMBER(kl_error, NUMBER, 1),
    MEMBER(kl_median, NUMBER, 1),
    MEMBER(kl_99, NUMBER, 1),
    MEMBER(kl_max, NUMBER, 1),
    MEMBER(top1, NUMBER, 1),
    MEMBER(top1_error, NUMBER, 1),
    MEMBER(probability_rms, NUMBER, 1),
    MEMBER(seconds, NUMBER, 0),
};
#define MEMBER_COUNT (sizeof MEMBERS / sizeof *MEMBERS)

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
        if (m->of_pair && !r->compared) {
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
    if (m->of_pair && !out->compared && m->kind != MAYBE_TEXT) {
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
