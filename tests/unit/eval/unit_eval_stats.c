/* What eval computes of logits, against the same written down naively in long double. */
#include "base/random.h"
#include "convert/eval/eval_stats.h"
#include "tests/fixtures/test.h"

#include <math.h>

#define WORDS  37u
#define TOKENS 501u

static void near(double got, long double want, double tolerance)
{
    double distance = fabs((double)((long double)got - want));
    if (!(distance <= tolerance * fmax(fabs((double)want), 1e-9)))
        fail_msg("%.17g is not %.17Lg", got, want);
}

/* Softmax as the textbook has it. */
static void softmax(const float *x, unsigned n, long double *p)
{
    long double sum = 0;
    for (unsigned i = 0; i < n; i++)
        sum += p[i] = expl((long double)x[i]);
    for (unsigned i = 0; i < n; i++)
        p[i] /= sum;
}

static void logits(uint64_t *seed, float *p, float *q, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        p[i] = (float)(8.0 * qc_random_uniform(seed));
        q[i] = p[i] + (float)(0.5 * qc_random_uniform(seed));
    }
}

TEST(one_token)
{
    uint64_t seed = 5;
    for (unsigned round = 0; round < 200; round++) {
        float p[WORDS], q[WORDS];
        long double pp[WORDS], qq[WORDS], kl = 0;
        uint32_t target = round % WORDS;
        qc_eval_token t, alone;
        logits(&seed, p, q, WORDS);
        softmax(p, WORDS, pp);
        softmax(q, WORDS, qq);
        for (unsigned i = 0; i < WORDS; i++)
            kl += pp[i] * (logl(pp[i]) - logl(qq[i]));
        assert_int_equal(qc_eval_token_of(&t, q, p, WORDS, target, NULL), QC_OK);
        near(t.nll, -logl(qq[target]), 1e-13);
        near(t.base_nll, -logl(pp[target]), 1e-13);
        near(t.kl, kl, 1e-11);
        near(t.probability_change, qq[target] - pp[target], 1e-9);
        assert_int_equal(qc_eval_token_of(&alone, q, NULL, WORDS, target, NULL), QC_OK);
        assert_true(alone.nll == t.nll && alone.kl == 0.0 && alone.base_nll == 0.0);
    }
}

/* Logits that exp() alone would not survive, and a shift that changes nothing. */
TEST(far_logits)
{
    const float p[] = {1000.0f, 999.0f, -3000.0f, 998.5f};
    const float q[] = {-2000.0f, -2001.0f, -6000.0f, -2001.5f};
    qc_eval_token t;
    assert_int_equal(qc_eval_token_of(&t, q, p, 4, 2, NULL), QC_OK);
    assert_true(t.kl < 1e-12 && t.kl >= 0.0);
    near(t.nll, 4000.0L + logl(1 + expl(-1) + expl(-1.5L)), 1e-14);
    assert_true(t.nll == t.base_nll && t.probability_change == 0.0 && t.same_first == 1);
    /* Q says what P thinks impossible and the other way round: large, but a number. */
    const float a[] = {700.0f, 0.0f}, b[] = {0.0f, 700.0f};
    assert_int_equal(qc_eval_token_of(&t, a, b, 2, 0, NULL), QC_OK);
    near(t.kl, 700.0L, 1e-14);
    assert_int_equal(t.same_first, 0);
    near(t.probability_change, 1.0L, 1e-14);
}

TEST(itself)
{
    uint64_t seed = 9;
    for (unsigned round = 0; round < 50; round++) {
        float p[WORDS], q[WORDS];
        qc_eval_token t;
        logits(&seed, p, q, WORDS);
        assert_int_equal(qc_eval_token_of(&t, p, p, WORDS, 3, NULL), QC_OK);
        assert_true(t.kl == 0.0 && t.nll == t.base_nll && t.same_first && !t.probability_change);
    }
}

/* Of equal logits the lowest id is first, in both. */
TEST(ties)
{
    const float p[] = {0.0f, 2.0f, 2.0f}, q[] = {0.0f, 1.0f, 2.0f}, r[] = {0.0f, 3.0f, 3.0f};
    qc_eval_token t;
    assert_int_equal(qc_eval_token_of(&t, q, p, 3, 0, NULL), QC_OK);
    assert_int_equal(t.same_first, 0);
    assert_int_equal(qc_eval_token_of(&t, r, p, 3, 0, NULL), QC_OK);
    assert_int_equal(t.same_first, 1);
}

TEST(no_numbers)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (unsigned i = 0; i < 3; i++)
        for (unsigned at = 0; at < 3; at++) {
            float good[] = {1.0f, 2.0f, 3.0f}, x[] = {1.0f, 2.0f, 3.0f};
            qc_eval_token t;
            qc_error err = {0};
            x[at] = bad[i];
            assert_int_equal(qc_eval_token_of(&t, x, NULL, 3, 1, &err), QC_ERR_NONFINITE);
            assert_int_equal(qc_eval_token_of(&t, x, good, 3, 1, &err), QC_ERR_NONFINITE);
            assert_int_equal(qc_eval_token_of(&t, good, x, 3, 1, &err), QC_ERR_NONFINITE);
            assert_string_equal(err.msg, "the logits of a token are not finite");
        }
}

static int rising(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct {
    long double mean, error;
} mean_error;

static mean_error of(const long double *x)
{
    mean_error m = {0, 0};
    for (unsigned i = 0; i < TOKENS; i++)
        m.mean += x[i] / TOKENS;
    for (unsigned i = 0; i < TOKENS; i++)
        m.error += (x[i] - m.mean) * (x[i] - m.mean);
    m.error = sqrtl(m.error / (TOKENS - 1) / TOKENS);
    return m;
}

TEST(many_tokens)
{
    static qc_eval_token t[TOKENS];
    static long double nll[TOKENS], base[TOKENS], ratio[TOKENS], kl[TOKENS], both[TOKENS];
    static double sorted[TOKENS];
    uint64_t seed = 3, same = 0;
    long double changes = 0;
    SCOPED(qc_eval_stats) s;
    qc_eval_result r = {0};
    assert_int_equal(qc_eval_stats_init(&s, 1, TOKENS, NULL), QC_OK);
    for (unsigned i = 0; i < TOKENS; i++) {
        t[i] = (qc_eval_token){.base_nll = 3.0 - log(qc_random_uniform(&seed)),
                               .kl = pow(qc_random_uniform(&seed), 4.0),
                               .probability_change = qc_random_uniform(&seed) - 0.4,
                               .same_first = qc_random_uniform(&seed) < 0.9};
        t[i].nll = t[i].base_nll + 0.2 * qc_random_uniform(&seed);
        qc_eval_stats_add(&s, &t[i]);
        nll[i] = t[i].nll;
        base[i] = t[i].base_nll;
        ratio[i] = nll[i] - base[i];
        kl[i] = t[i].kl;
        sorted[i] = (double)(float)t[i].kl;
        same += (uint64_t)t[i].same_first;
        changes += (long double)t[i].probability_change * t[i].probability_change;
    }
    qc_eval_stats_add(&s, &t[0]); /* beyond the room: nothing */
    qc_eval_stats_finish(&s, &r);
    qsort(sorted, TOKENS, sizeof *sorted, rising);
    long double q = expl(of(nll).mean), p = expl(of(base).mean), share = (long double)same / TOKENS;
    for (unsigned i = 0; i < TOKENS; i++)
        both[i] = q * nll[i] - p * base[i];
    assert_true(r.predicted == TOKENS && r.compared == 1);
    near(r.perplexity, q, 1e-13);
    near(r.perplexity_error, q * of(nll).error, 1e-12);
    near(r.base_perplexity, p, 1e-13);
    near(r.base_perplexity_error, p * of(base).error, 1e-12);
    near(r.difference, q - p, 1e-11);
    near(r.difference_error, of(both).error, 1e-10);
    near(r.log_ratio, of(ratio).mean, 1e-12);
    near(r.log_ratio_error, of(ratio).error, 1e-12);
    near(r.kl_mean, of(kl).mean, 1e-13);
    near(r.kl_error, of(kl).error, 1e-12);
    near(r.kl_median, sorted[TOKENS / 2], 1e-15);
    near(r.kl_99, sorted[495], 1e-15); /* 0.99 * 500 */
    near(r.top1, share, 1e-15);
    near(r.top1_error, sqrtl(share * (1 - share) / (TOKENS - 1)), 1e-13);
    near(r.probability_rms, sqrtl(changes / TOKENS), 1e-13);
    double most = 0;
    for (unsigned i = 0; i < TOKENS; i++)
        most = fmax(most, t[i].kl);
    assert_true(r.kl_max == most);
}

/* A mean far from zero costs no digits. */
TEST(far_mean)
{
    SCOPED(qc_eval_stats) s;
    qc_eval_result r = {0};
    assert_int_equal(qc_eval_stats_init(&s, 0, 1000, NULL), QC_OK);
    for (unsigned i = 0; i < 1000; i++)
        qc_eval_stats_add(&s, &(qc_eval_token){.nll = 500.0 + (i % 2 ? 1e-6 : -1e-6)});
    qc_eval_stats_finish(&s, &r);
    near(r.perplexity_error / r.perplexity, 1e-6L / sqrtl(999.0L), 1e-4);
    assert_true(r.compared == 0 && r.kl_mean == 0.0 && r.base_perplexity == 0.0);
}

TEST(one_alone)
{
    SCOPED(qc_eval_stats) s;
    qc_eval_result r = {0};
    assert_int_equal(qc_eval_stats_init(&s, 1, 1, NULL), QC_OK);
    qc_eval_stats_add(&s, &(qc_eval_token){.nll = 1.0, .base_nll = 0.5, .kl = 0.25});
    qc_eval_stats_finish(&s, &r);
    assert_true(isnan(r.perplexity_error) && isnan(r.base_perplexity_error));
    assert_true(isnan(r.difference_error) && isnan(r.log_ratio_error));
    assert_true(isnan(r.kl_error) && isnan(r.top1_error));
    assert_true(r.kl_mean == 0.25 && r.kl_median == 0.25 && r.kl_99 == 0.25 && r.kl_max == 0.25);
}

TEST(quantiles)
{
    const float x[] = {1.0f, 2.0f, 4.0f, 8.0f, 16.0f};
    assert_true(qc_eval_quantile(x, 5, 0.0) == 1.0 && qc_eval_quantile(x, 5, 1.0) == 16.0);
    assert_true(qc_eval_quantile(x, 5, 0.5) == 4.0 && qc_eval_quantile(x, 4, 0.5) == 3.0);
    near(qc_eval_quantile(x, 5, 0.99), 15.68L, 1e-14);
    assert_true(qc_eval_quantile(x, 1, 0.99) == 1.0);
}
