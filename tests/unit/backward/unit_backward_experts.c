/* qc_backward_route against central differences of what experts_shape.h says, in double, for every
 * way to route. The experts themselves are compared with PyTorch's (cli_families). */
#include "convert/backward/backward_experts.h"
#include "convert/forward/experts_route.h"
#include "tests/fixtures/test.h"

#include <math.h>

enum { EXPERTS = 8, CHOSEN = 3 };

/* The sum over the chosen experts of their weights times d. */
static double routed(const qc_routing *r, const double *logits, const uint32_t *chosen,
                     const float *d)
{
    double scores[EXPERTS], all = 0.0, sum = 0.0, y = 0.0;
    for (unsigned i = 0; i < EXPERTS; i++)
        all += exp(logits[i]);
    for (unsigned i = 0; i < CHOSEN && r->scores == QC_SCORES_OF_CHOSEN; i++)
        all = (i ? all : 0.0) + exp(logits[chosen[i]]);
    for (unsigned i = 0; i < EXPERTS; i++)
        scores[i] =
            r->scores == QC_SCORES_SIGMOID ? 1.0 / (1.0 + exp(-logits[i])) : exp(logits[i]) / all;
    for (unsigned i = 0; i < CHOSEN; i++)
        sum += scores[chosen[i]];
    for (unsigned i = 0; i < CHOSEN; i++)
        y += (double)r->scale * scores[chosen[i]] * (double)d[i] /
             (r->normalized ? sum + (double)r->guard : 1.0);
    return y;
}

static void check(const qc_routing *r, const float *logits, const float *correction, const float *d)
{
    float room[4 * EXPERTS], weights[CHOSEN], own[CHOSEN], got[EXPERTS];
    uint32_t chosen[CHOSEN];
    double x[EXPERTS];
    assert_true(qc_route_room(r) <= sizeof room / sizeof *room);
    qc_route_token(r, qc_decoder_ops_for(QC_ISA_SCALAR), logits, correction, room, chosen, weights);
    memcpy(own, d, sizeof own);
    qc_backward_route(r, room, chosen, weights, own, got);
    for (unsigned i = 0; i < EXPERTS; i++)
        x[i] = (double)logits[i];
    for (unsigned i = 0; i < EXPERTS; i++) {
        const double step = 1e-4;
        x[i] += step;
        double slope = routed(r, x, chosen, d);
        x[i] -= 2.0 * step;
        slope = (slope - routed(r, x, chosen, d)) / (2.0 * step);
        x[i] += step;
        if (fabs(slope - (double)got[i]) > 1e-5 * (1.0 + fabs(slope)))
            fail_msg("logit %u: expected %.9g, found %.9g", i, slope, (double)got[i]);
    }
}

TEST(every_way_to_route)
{
    static const float corrections[EXPERTS] = {0.3f, 0.0f, -0.2f, 0.5f, 0.1f, 0.0f, 0.4f, -0.1f};
    uint64_t at = 1;
    for (int scores = QC_SCORES_SOFTMAX; scores <= QC_SCORES_OF_CHOSEN; scores++)
        for (unsigned way = 0; way < 8; way++)
            for (unsigned seed = 0; seed < 20; seed++) {
                const qc_routing r = {.scores = (qc_expert_scores)scores,
                                      .group_rule = QC_GROUP_BY_TWO,
                                      .experts = EXPERTS,
                                      .chosen = CHOSEN,
                                      .groups = way & 4 ? 4 : 1,
                                      .groups_chosen = way & 4 ? 2 : 1,
                                      .normalized = way & 1,
                                      .guard = way & 1 ? 0.25f : 0.0f,
                                      .scale = way & 2 ? 1.7f : 1.0f};
                float logits[EXPERTS], d[CHOSEN];
                for (unsigned i = 0; i < EXPERTS; i++)
                    logits[i] = (float)(4.0 * qc_gradient_uniform(at++) - 2.0);
                for (unsigned i = 0; i < CHOSEN; i++)
                    d[i] = (float)(2.0 * qc_gradient_uniform(at++) - 1.0);
                check(&r, logits, scores == QC_SCORES_SIGMOID ? corrections : NULL, d);
            }
}

/* Weights that are normalized do not change with a factor, so one alone has no gradient. */
TEST(one_that_is_normalized)
{
    const qc_routing r = {
        .experts = 2, .chosen = 1, .groups = 1, .groups_chosen = 1, .normalized = 1, .scale = 1.0f};
    const float scores[2] = {0.75f, 0.25f}, weight = 1.0f;
    const uint32_t chosen = 0;
    float d = 5.0f, out[2] = {1.0f, 1.0f};
    qc_backward_route(&r, scores, &chosen, &weight, &d, out);
    assert_true(out[0] == 0.0f && out[1] == 0.0f);
}
