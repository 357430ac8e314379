/* Turns logits into the numbers that eval prints, one predicted token at a time. docs/eval.md has
 * the formulas.
 *
 * Everything is summed in double, in the order of the tokens (means with Welford's updates, so that
 * a mean far from zero costs no digits). All that is kept for each token is its KL divergence, as a
 * float, for the quantiles; without an original, nothing is kept. One owner, no threads;
 * qc_eval_token_of may run on any thread. */
#ifndef QC_CONVERT_EVAL_STATS_H
#define QC_CONVERT_EVAL_STATS_H

#include "convert/eval/eval.h"

/* The numbers of one predicted token. Without an original only nll is set. */
typedef struct {
    double nll, base_nll;      /* -ln of the probability of the token that came, in nats */
    double kl;                 /* D(original || output), >= 0 */
    double probability_change; /* of the token that came: the output's minus the original's */
    /* The output and the original have the same most probable token; among equals the lowest id
     * counts. */
    int same_first;
} qc_eval_token;

/* q is the logits of the output [n]; p is those of the original [n], or NULL; target < n.
 * QC_ERR_NONFINITE if the logits have no distribution (NaN or infinite). */
QC_NODISCARD qc_status qc_eval_token_of(qc_eval_token *out, const float *q, const float *p,
                                        uint64_t n, uint32_t target, qc_error *err);

typedef struct {
    double mean, squares; /* squares: sum of squared distances from the mean */
} qc_eval_moments;

typedef struct {
    int compared;
    uint64_t count, room;
    qc_eval_moments nll, base_nll, log_ratio, kl; /* log_ratio: nll - base_nll */
    double co_moment;                             /* of log_ratio and base_nll */
    double change_squares, kl_max;
    uint64_t same_first;
    float *kls; /* [room], owned */
} qc_eval_stats;

/* room is how many predicted tokens there will be at most. */
QC_NODISCARD qc_status qc_eval_stats_init(qc_eval_stats *s, int compared, uint64_t room,
                                          qc_error *err);
void qc_eval_stats_deinit(qc_eval_stats *s);
/* Adds a token. Call it at most `room` times. */
void qc_eval_stats_add(qc_eval_stats *s, const qc_eval_token *t);
/* Sets predicted and everything from perplexity to probability_rms of *out. It sorts what s keeps,
 * so s takes no more tokens afterwards. */
void qc_eval_stats_finish(qc_eval_stats *s, qc_eval_result *out);

void qc_eval_sort(float *x, uint64_t n); /* from the least on */
/* Returns the q-quantile of n > 0 sorted numbers, which is the value at position q * (n - 1),
 * linear between neighbours. */
double qc_eval_quantile(const float *sorted, uint64_t n, double q);

#endif
