/* Writes the result of eval as JSON. */
#include "convert/eval/eval.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

/* The member's name is the field's. */
typedef enum { TEXT, COUNT, NUMBER } member_kind;
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
    MEMBER(against, TEXT, PAIR),
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
