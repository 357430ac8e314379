#include "convert/forward/experts_route.h"

#include <math.h>

uint64_t qc_route_room(const qc_routing *r)
{
    return 2 * r->experts + r->groups;
}

static float largest_of(const float *x, uint64_t n)
{
    float most = x[0];
    for (uint64_t i = 1; i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

static void softmax(const qc_decoder_ops *ops, const float *x, uint64_t n, float *out)
{
    float most = largest_of(x, n), sum = 0.0f;
    for (uint64_t i = 0; i < n; i++)
        out[i] = x[i] - most;
    ops->exponential(out, n, out);
    for (uint64_t i = 0; i < n; i++)
        sum += out[i];
    for (uint64_t i = 0; i < n; i++)
        out[i] /= sum;
}

static void sigmoid(const qc_decoder_ops *ops, const float *x, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = -x[i];
    ops->exponential(out, n, out);
    for (uint64_t i = 0; i < n; i++)
        out[i] = 1.0f / (1.0f + out[i]);
}

/* Returns the place of the largest element, and makes it -infinity, so that the next call finds the
 * next. */
static uint64_t take_largest(float *x, uint64_t n)
{
    uint64_t at = 0;
    for (uint64_t i = 1; i < n; i++)
        if (x[i] > x[at])
            at = i;
    x[at] = -INFINITY;
    return at;
}

static float group_score(const qc_routing *r, const float *x, uint64_t n)
{
    float best = -INFINITY, second = -INFINITY;
    for (uint64_t i = 0; i < n; i++) {
        if (x[i] > best) {
            second = best;
            best = x[i];
        } else if (x[i] > second) {
            second = x[i];
        }
    }
    return r->group_rule == QC_GROUP_BY_BEST ? best : best + second;
}

/* Makes the experts of all groups but the best ones -infinity. */
static void limit_groups(const qc_routing *r, float *choice, float *groups)
{
    uint64_t each = r->experts / r->groups;
    if (r->groups_chosen == r->groups)
        return;
    for (uint64_t g = 0; g < r->groups; g++)
        groups[g] = group_score(r, choice + g * each, each);
    for (uint64_t i = 0; i < r->groups_chosen; i++)
        (void)take_largest(groups, r->groups);
    for (uint64_t g = 0; g < r->groups; g++)
        if (groups[g] != -INFINITY)
            for (uint64_t i = 0; i < each; i++)
                choice[g * each + i] = -INFINITY;
}

void qc_route_token(const qc_routing *r, const qc_decoder_ops *ops, const float *logits,
                    const float *correction, float *room, uint32_t *chosen, float *weights)
{
    float *scores = room, *choice = room + r->experts, sum = 0.0f;
    uint64_t n = r->experts;
    if (r->scores == QC_SCORES_SOFTMAX)
        softmax(ops, logits, n, scores);
    else if (r->scores == QC_SCORES_SIGMOID)
        sigmoid(ops, logits, n, scores);
    else
        for (uint64_t i = 0; i < n; i++)
            scores[i] = logits[i];
    for (uint64_t i = 0; i < n; i++)
        choice[i] = correction ? scores[i] + correction[i] : scores[i];
    limit_groups(r, choice, room + 2 * n);
    for (uint64_t i = 0; i < r->chosen; i++) {
        uint64_t e = take_largest(choice, n);
        chosen[i] = (uint32_t)e;
        weights[i] = scores[e];
    }
    if (r->scores == QC_SCORES_OF_CHOSEN)
        softmax(ops, weights, r->chosen, weights);
    for (uint64_t i = 0; i < r->chosen; i++)
        sum += weights[i];
    for (uint64_t i = 0; i < r->chosen; i++) {
        if (r->normalized)
            weights[i] /= sum + r->guard;
        weights[i] *= r->scale;
    }
}
