/* Writes the result of eval for people. */
#include "convert/eval/eval.h"
#include "convert/term/table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#define CELL_BYTES 64

/* Writes five digits, also for small numbers. NaN is "-". */
static qc_status number(qc_table *t, double v, const char *sign, const char *unit, qc_error *err)
{
    if (!isfinite(v))
        return qc_table_cell(t, NULL, err);
    return qc_table_cellf(t, err, "%s%.5g%s", sign, v, unit);
}

typedef struct {
    qc_table *t;
    qc_error *err;
    qc_status st;
} rows;

/* If error is NULL, the value has none. */
static void row(rows *r, const char *what, double value, const double *error, const char *unit)
{
    if (r->st == QC_OK)
        r->st = qc_table_cell(r->t, what, r->err);
    if (r->st == QC_OK)
        r->st = number(r->t, value, "", unit, r->err);
    if (r->st == QC_OK)
        r->st = error ? number(r->t, *error, "+- ", unit, r->err) : qc_table_cell(r->t, "", r->err);
}

static void pair_rows(rows *w, const qc_eval_result *r)
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

qc_status qc_eval_text(const qc_eval_result *r, qc_strbuf *out, qc_error *err)
{
    qc_arena arena;
    qc_table t;
    qc_arena_init(&arena);
    qc_table_init(&t, &arena);
    qc_table_column(&t, "", QC_ALIGN_LEFT);
    qc_table_column(&t, "", QC_ALIGN_RIGHT);
    qc_table_column(&t, "", QC_ALIGN_LEFT);
    rows w = {&t, err, QC_OK};
    row(&w, r->compared ? "perplexity of OUT" : "perplexity", r->perplexity, &r->perplexity_error,
        "");
    if (r->compared)
        pair_rows(&w, r);
    qc_status st = w.st;
    if (st == QC_OK)
        st = qc_strbuf_addf(out, err, "%s (%s)%s%s over %s\n", r->path, r->model_type,
                            r->compared ? " against " : "", r->compared ? r->against : "", r->text);
    if (st == QC_OK)
        st = qc_strbuf_addf(out, err,
                            "  %" PRIu64 " tokens (%s), %" PRIu64 " window%s of at most %" PRIu64
                            ", %" PRIu64 " predicted; %s, %.1f s\n",
                            r->tokens, r->tokenizer, r->windows, r->windows == 1 ? "" : "s",
                            r->context, r->predicted, r->device, r->seconds);
    if (st == QC_OK)
        st = qc_table_render(&t, 2, out, err);
    qc_arena_deinit(&arena);
    return st;
}
