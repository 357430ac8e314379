/* Writes the result of eval for people. */
#include "base/text.h"
#include "convert/eval/eval.h"
#include "convert/term/table.h"

#include <inttypes.h>
#include <math.h>

/* Writes five digits, also for small numbers. NaN is "-". */
static void number(qc_table *t, double v, const char *sign, const char *unit)
{
    if (isfinite(v))
        qc_table_putf(t, "%s%.5g%s", sign, v, unit);
    else
        qc_table_put(t, NULL);
}

/* If error is NULL, the value has none. */
static void row(qc_table *t, const char *what, double value, const double *error, const char *unit)
{
    qc_table_put(t, what);
    number(t, value, "", unit);
    if (error)
        number(t, *error, "+- ", unit);
    qc_table_end_row(t);
}

static void pair_rows(qc_table *w, const qc_eval_result *r)
{
    double same = 100.0 * r->top1, same_error = 100.0 * r->top1_error;
    double more = 100.0 * expm1(r->log_ratio);
    double more_error = 100.0 * exp(r->log_ratio) * r->log_ratio_error;
    row(w, "perplexity of MODEL", r->base_perplexity, &r->base_perplexity_error, "");
    row(w, "difference", r->difference, &r->difference_error, "");
    row(w, "difference, relative", more, &more_error, "%");
    row(w, "KL divergence, mean", r->kl_mean, &r->kl_error, "");
    row(w, "KL divergence, median", r->kl_median, NULL, "");
    row(w, "KL divergence, 99%", r->kl_99, NULL, "");
    row(w, "KL divergence, largest", r->kl_max, NULL, "");
    row(w, "same most probable token", same, &same_error, "%");
    row(w, "change of probability, rms", 100.0 * r->probability_rms, NULL, "%");
}

static void state_rows(qc_table *w, const qc_eval_result *r)
{
    row(w, "distance of hidden states, mean", r->distance_mean, NULL, "");
    row(w, "distance of hidden states, 99%", r->distance_99, NULL, "");
    row(w, "distance of hidden states, largest", r->distance_max, NULL, "");
    row(w, "distance of embeddings, mean", r->cosine_mean, NULL, "");
    row(w, "distance of embeddings, 99%", r->cosine_99, NULL, "");
    row(w, "distance of embeddings, largest", r->cosine_max, NULL, "");
}

qc_status qc_eval_text(const qc_eval_result *r, qc_strbuf *out, qc_error *err)
{
    qc_arena arena;
    qc_table t;
    qc_arena_init(&arena);
    qc_table_begin(&t, &arena, "|>|");
    if (r->encoder)
        state_rows(&t, r);
    else
        row(&t, r->compared ? "perplexity of OUT" : "perplexity", r->perplexity,
            &r->perplexity_error, "");
    if (r->compared && !r->encoder)
        pair_rows(&t, r);
    qc_strbuf_putf(out, "%s (%s)%s%s over %s\n", r->path, r->model_type,
                   r->compared ? " against " : "", r->compared ? r->against : "", r->text);
    qc_strbuf_putf(out, "  %" PRIu64 " tokens (%s), %" PRIu64 " window%s of at most %" PRIu64,
                   r->tokens, r->tokenizer, r->windows, qc_plural(r->windows), r->context);
    if (!r->encoder)
        qc_strbuf_putf(out, ", %" PRIu64 " predicted", r->predicted);
    qc_strbuf_putf(out, "; %s, %.1f s\n", r->device, r->seconds);
    qc_table_print(&t, 2, out);
    qc_arena_deinit(&arena);
    return qc_strbuf_status(out, err);
}
