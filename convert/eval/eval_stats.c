#include "convert/eval/eval_stats.h"

#include "base/alloc.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- one token ------------------------------------------------------------------------------ */

/* Returns the index of the largest value, the first one among equals. A NaN anywhere is noticed
 * later, in the sum of exponentials. */
static uint64_t largest(const float *x, uint64_t n)
{
    uint64_t at = 0;
    for (uint64_t i = 1; i < n; i++)
        if (x[i] > x[at])
            at = i;
    return at;
}

qc_status qc_eval_token_of(qc_eval_token *out, const float *q, const float *p, uint64_t n,
                           uint32_t target, qc_error *err)
{
    uint64_t q_first = largest(q, n), p_first = p ? largest(p, n) : 0;
    double q_top = (double)q[q_first], q_sum = 0.0;
    memset(out, 0, sizeof *out);
    if (!p) {
        double least = 0.0;
        for (uint64_t i = 0; i < n; i++) {
            double b = (double)q[i] - q_top;
            q_sum += exp(b);
            least = b < least ? b : least;
        }
        /* -infinity would leave no trace in the sum, and a product that overflowed gives it. */
        if (!isfinite(least))
            QC_FAIL(err, QC_ERR_NONFINITE, "the logits of a token are not finite");
    } else {
        double p_top = (double)p[p_first], p_sum = 0.0, apart = 0.0;
        /* With a = p - p_top and b = q - q_top, A and B the sums of their exponentials:
         * KL = sum e^a / A ((a - ln A) - (b - ln B)) = (sum e^a (a - b)) / A - ln A + ln B */
        for (uint64_t i = 0; i < n; i++) {
            double a = (double)p[i] - p_top, b = (double)q[i] - q_top, e = exp(a);
            q_sum += exp(b);
            p_sum += e;
            apart += e * (a - b);
        }
        double kl = apart / p_sum - log(p_sum) + log(q_sum);
        if (!isfinite(kl))
            QC_FAIL(err, QC_ERR_NONFINITE, "the logits of a token are not finite");
        out->base_nll = log(p_sum) - ((double)p[target] - p_top);
        out->kl = kl > 0.0 ? kl : 0.0; /* it is below zero only by rounding */
        out->same_first = p_first == q_first;
    }
    out->nll = log(q_sum) - ((double)q[target] - q_top);
    if (!isfinite(out->nll) || !isfinite(out->base_nll))
        QC_FAIL(err, QC_ERR_NONFINITE, "the logits of a token are not finite");
    if (p)
        out->probability_change = exp(-out->nll) - exp(-out->base_nll);
    return QC_OK;
}

/* ---- all of them ---------------------------------------------------------------------------- */

qc_status qc_eval_stats_init(qc_eval_stats *s, int compared, uint64_t room, qc_error *err)
{
    memset(s, 0, sizeof *s);
    s->compared = compared;
    s->room = room;
    if (!compared)
        return QC_OK;
    QC_TRY(qc_realloc_array(&s->kls, room, sizeof *s->kls, err));
    return QC_OK;
}

void qc_eval_stats_deinit(qc_eval_stats *s)
{
    qc_free(s->kls);
    memset(s, 0, sizeof *s);
}

/* Adds x and returns its distance from the old mean. */
static double update(qc_eval_moments *m, double x, double count)
{
    double away = x - m->mean;
    m->mean += away / count;
    m->squares += away * (x - m->mean);
    return away;
}

void qc_eval_stats_add(qc_eval_stats *s, const qc_eval_token *t)
{
    if (s->count >= s->room)
        return;
    double count = (double)(s->count + 1);
    (void)update(&s->nll, t->nll, count);
    if (s->compared) {
        double away = update(&s->log_ratio, t->nll - t->base_nll, count);
        (void)update(&s->base_nll, t->base_nll, count);
        s->co_moment += away * (t->base_nll - s->base_nll.mean);
        (void)update(&s->kl, t->kl, count);
        s->kl_max = t->kl > s->kl_max ? t->kl : s->kl_max;
        s->change_squares += t->probability_change * t->probability_change;
        s->same_first += t->same_first != 0;
        s->kls[s->count] = (float)t->kl;
    }
    s->count++;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

void qc_eval_sort(float *x, uint64_t n)
{
    qsort(x, (size_t)n, sizeof *x, by_value);
}

double qc_eval_quantile(const float *sorted, uint64_t n, double q)
{
    double place = q * (double)(n - 1), low = floor(place);
    uint64_t i = (uint64_t)low;
    double here = (double)sorted[i];
    return i + 1 < n ? here + (place - low) * ((double)sorted[i + 1] - here) : here;
}

/* Returns the standard error of a mean. */
static double error_of(double squares, double n)
{
    return n > 1.0 ? sqrt(squares / (n - 1.0) / n) : (double)NAN;
}

void qc_eval_stats_finish(qc_eval_stats *s, qc_eval_result *out)
{
    double n = (double)s->count;
    out->predicted = s->count;
    out->compared = s->compared;
    out->perplexity = exp(s->nll.mean);
    out->perplexity_error = out->perplexity * error_of(s->nll.squares, n);
    if (!s->compared || s->count == 0)
        return;
    double base = exp(s->base_nll.mean);
    out->base_perplexity = base;
    out->base_perplexity_error = base * error_of(s->base_nll.squares, n);
    out->log_ratio = s->log_ratio.mean;
    out->log_ratio_error = error_of(s->log_ratio.squares, n);
    out->difference = base * expm1(s->log_ratio.mean);
    /* perplexity - base has the differential Q dx - P dy in the means x and y of the two, which is
     * Q d(x - y) + (Q - P) dy: nothing large cancels. */
    double q = out->perplexity, apart = out->difference;
    double squares = q * q * s->log_ratio.squares + apart * apart * s->base_nll.squares +
                     2.0 * q * apart * s->co_moment;
    out->difference_error = error_of(squares > 0.0 ? squares : 0.0, n);
    out->kl_mean = s->kl.mean;
    out->kl_error = error_of(s->kl.squares, n);
    out->kl_max = s->kl_max;
    qc_eval_sort(s->kls, s->count);
    out->kl_median = qc_eval_quantile(s->kls, s->count, 0.5);
    out->kl_99 = qc_eval_quantile(s->kls, s->count, 0.99);
    double same = (double)s->same_first / n;
    out->top1 = same;
    out->top1_error = n > 1.0 ? sqrt(same * (1.0 - same) / (n - 1.0)) : (double)NAN;
    out->probability_rms = sqrt(s->change_squares / n);
}
