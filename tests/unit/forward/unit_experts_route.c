/* Where tokens go, against values that were worked out by hand: logits are logarithms, so that
 * scores are simple fractions. */
#include "convert/forward/experts_route.h"
#include "tests/fixtures/test.h"

#include <float.h>
#include <math.h>

#define MOST 16u

typedef struct {
    uint32_t chosen[MOST];
    float weights[MOST];
} route;

/* On every instruction set of this machine, with the same bits. */
static route of(const qc_routing *r, const float *logits, const float *correction)
{
    route first = {{0}, {0}};
    float room[3 * MOST];
    for (int isa = QC_ISA_SCALAR; isa < QC_ISA_COUNT; isa++) {
        route again = {{0}, {0}};
        if (!qc_isa_available((qc_isa)isa))
            continue;
        assert_true(qc_route_room(r) <= sizeof room / sizeof *room);
        qc_route_token(r, qc_decoder_ops_for((qc_isa)isa), logits, correction, room, again.chosen,
                       again.weights);
        if (isa == QC_ISA_SCALAR)
            first = again;
        assert_memory_equal(&first, &again, sizeof first);
    }
    return first;
}

static void expect(const route *r, unsigned n, const uint32_t *chosen, const double *weights)
{
    for (unsigned i = 0; i < n; i++) {
        assert_int_equal(r->chosen[i], chosen[i]);
        if (fabs((double)r->weights[i] - weights[i]) > 2e-7 * fabs(weights[i]))
            fail_msg("weight %u is %.9g, expected %.9g", i, (double)r->weights[i], weights[i]);
    }
}

/* Softmax gives 1/10, 4/10, 2/10, 3/10. */
TEST(softmaxes)
{
    const float logits[] = {0.0f, logf(4.0f), logf(2.0f), logf(3.0f)};
    qc_routing r = {
        .experts = 4, .chosen = 2, .groups = 1, .groups_chosen = 1, .normalized = 1, .scale = 1.0f};
    route got = of(&r, logits, NULL);
    expect(&got, 2, (uint32_t[]){1, 3}, (double[]){4.0 / 7, 3.0 / 7});
    r.normalized = 0;
    got = of(&r, logits, NULL);
    expect(&got, 2, (uint32_t[]){1, 3}, (double[]){0.4, 0.3});
    r.chosen = 4;
    r.scale = 16.0f;
    got = of(&r, logits, NULL);
    expect(&got, 4, (uint32_t[]){1, 3, 2, 0}, (double[]){6.4, 4.8, 3.2, 1.6});
}

/* gpt-oss: softmax of the chosen logits alone. */
TEST(softmax_of_chosen)
{
    const float logits[] = {0.0f, logf(4.0f), logf(2.0f), logf(3.0f)};
    const qc_routing r = {.scores = QC_SCORES_OF_CHOSEN,
                          .experts = 4,
                          .chosen = 3,
                          .groups = 1,
                          .groups_chosen = 1,
                          .scale = 1.0f};
    route got = of(&r, logits, NULL);
    expect(&got, 3, (uint32_t[]){1, 3, 2}, (double[]){4.0 / 9, 3.0 / 9, 2.0 / 9});
}

/* Sigmoid of ln(p / (1 - p)) is p. The correction decides who is chosen, but not the weights. */
TEST(sigmoids)
{
    const float logits[] = {logf(1.0f), logf(3.0f), logf(1.0f / 3.0f), logf(4.0f)};
    const float correction[] = {0.5f, -0.25f, 0.0f, 0.0f}; /* 1.0, 0.5, 0.25, 0.8 */
    qc_routing r = {.scores = QC_SCORES_SIGMOID,
                    .group_rule = QC_GROUP_BY_TWO,
                    .experts = 4,
                    .chosen = 2,
                    .groups = 1,
                    .groups_chosen = 1,
                    .guard = 1e-20f,
                    .scale = 2.5f};
    route got = of(&r, logits, correction);
    expect(&got, 2, (uint32_t[]){0, 3}, (double[]){1.25, 2.0});
    r.normalized = 1;
    got = of(&r, logits, correction);
    expect(&got, 2, (uint32_t[]){0, 3}, (double[]){2.5 * 0.5 / 1.3, 2.5 * 0.8 / 1.3});
    got = of(&r, logits, NULL);
    expect(&got, 2, (uint32_t[]){3, 1}, (double[]){2.5 * 0.8 / 1.55, 2.5 * 0.75 / 1.55});
}

/* Eight experts in four groups of two. Softmax gives 1, 9, 6, 6, 0.5, 0.5, 8, 1 of 32. By their
 * best, groups are 9, 6, 0.5, 8; by two, they are 10, 12, 1, 9. */
TEST(groups)
{
    const float shares[] = {1.0f, 9.0f, 6.0f, 6.0f, 0.5f, 0.5f, 8.0f, 1.0f};
    float logits[8];
    qc_routing r = {.group_rule = QC_GROUP_BY_BEST,
                    .experts = 8,
                    .chosen = 3,
                    .groups = 4,
                    .groups_chosen = 2,
                    .scale = 1.0f};
    for (unsigned i = 0; i < 8; i++)
        logits[i] = logf(shares[i]);
    route got = of(&r, logits, NULL);
    expect(&got, 3, (uint32_t[]){1, 6, 0}, (double[]){9.0 / 32, 8.0 / 32, 1.0 / 32});
    r.group_rule = QC_GROUP_BY_TWO;
    got = of(&r, logits, NULL);
    expect(&got, 3, (uint32_t[]){1, 2, 3}, (double[]){9.0 / 32, 6.0 / 32, 6.0 / 32});
    r.groups_chosen = 4; /* all: no limit */
    got = of(&r, logits, NULL);
    expect(&got, 3, (uint32_t[]){1, 6, 2}, (double[]){9.0 / 32, 8.0 / 32, 6.0 / 32});
    r.groups_chosen = 1;
    r.chosen = 2;
    got = of(&r, logits, NULL);
    expect(&got, 2, (uint32_t[]){2, 3}, (double[]){6.0 / 32, 6.0 / 32});
}

/* The experts of other groups are out also where all scores are negative. */
TEST(negative_choices)
{
    const float logits[] = {0.0f, 0.0f, 0.0f, 0.0f};
    const float correction[] = {-1.0f, -2.0f, -4.0f, -4.5f};
    const qc_routing r = {.scores = QC_SCORES_SIGMOID,
                          .group_rule = QC_GROUP_BY_TWO,
                          .experts = 4,
                          .chosen = 2,
                          .groups = 2,
                          .groups_chosen = 1,
                          .scale = 1.0f};
    route got = of(&r, logits, correction);
    expect(&got, 2, (uint32_t[]){0, 1}, (double[]){0.5, 0.5});
}

/* Equal scores, logits far apart, and as large as they can be. */
TEST(edges)
{
    const float equal[] = {3.0f, 3.0f, 3.0f, 3.0f}, far[] = {-FLT_MAX, 1000.0f, FLT_MAX, 0.0f};
    qc_routing r = {
        .experts = 4, .chosen = 3, .groups = 1, .groups_chosen = 1, .normalized = 1, .scale = 1.0f};
    route got = of(&r, equal, NULL);
    expect(&got, 3, (uint32_t[]){0, 1, 2}, (double[]){1.0 / 3, 1.0 / 3, 1.0 / 3});
    got = of(&r, far, NULL);
    assert_int_equal(got.chosen[0], 2);
    assert_true(got.weights[0] == 1.0f && got.weights[1] == 0.0f && got.weights[2] == 0.0f);
    r.scores = QC_SCORES_SIGMOID;
    got = of(&r, far, NULL);
    expect(&got, 3, (uint32_t[]){1, 2, 3}, (double[]){0.4, 0.4, 0.2});
    r.experts = r.chosen = 1;
    got = of(&r, far, NULL);
    assert_int_equal(got.chosen[0], 0);
}
