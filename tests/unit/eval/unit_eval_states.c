/* Distances of hidden states: closed forms, the order of windows, numbers that are none. */
#include "convert/eval/eval_states.h"
#include "tests/fixtures/test.h"

#include <math.h>

#define WIDE 3u

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-7))
        fail_msg("got %.9g, expected %.9g", got, want);
}

/* One window; its distances are then the mean and the largest. */
static qc_eval_result one(const float *output, const float *original, uint64_t tokens)
{
    qc_eval_states s;
    qc_eval_result r = {0};
    qc_error err = {0};
    assert_int_equal(qc_eval_states_init(&s, 1, WIDE, &err), QC_OK);
    assert_int_equal(qc_eval_states_add(&s, output, original, tokens, &err), QC_OK);
    qc_eval_states_finish(&s, &r);
    qc_eval_states_deinit(&s);
    assert_true(r.encoder && r.compared);
    near(r.distance_mean, r.distance_max);
    near(r.cosine_99, r.cosine_max);
    return r;
}

TEST(closed_forms)
{
    static const float original[] = {3.0f, 0.0f, 0.0f, 0.0f, 4.0f, 0.0f};
    qc_eval_result r = one(original, original, 2);
    assert_true(r.distance_mean == 0.0 && r.cosine_mean == 0.0);
    /* Larger by a quarter: the direction of the embedding is the same. */
    static const float larger[] = {3.75f, 0.0f, 0.0f, 0.0f, 5.0f, 0.0f};
    r = one(larger, original, 2);
    near(r.distance_mean, 0.25);
    near(r.cosine_mean, 0.0);
    /* The embedding (1.5, 2, 0) becomes (2, -1.5, 0), at a right angle to it. */
    static const float turned[] = {4.0f, 0.0f, 0.0f, 0.0f, -3.0f, 0.0f};
    r = one(turned, original, 2);
    near(r.distance_mean, sqrt(50.0) / 5.0);
    near(r.cosine_mean, 1.0);
    /* What is lost in the rounding of a cosine is not lost here: an angle of 1e-4. */
    static const float first[] = {1.0f, 0.0f, 0.0f}, angle[] = {1.0f, 1e-4f, 0.0f};
    r = one(angle, first, 1);
    if (!(fabs(r.cosine_mean - 5e-9) < 1e-14))
        fail_msg("got %.9g", r.cosine_mean);
}

/* Window i of 200 is apart by (i * 7 % 200) / 1000, so every number comes once. */
TEST(many_windows)
{
    const float original[WIDE] = {1.0f, 2.0f, 2.0f};
    SCOPED(qc_eval_states) s;
    qc_eval_result r = {0};
    qc_error err = {0};
    assert_int_equal(qc_eval_states_init(&s, 200, WIDE, &err), QC_OK);
    for (int i = 0; i < 200; i++) {
        float output[WIDE];
        for (unsigned k = 0; k < WIDE; k++)
            output[k] = original[k] * (1.0f + (float)(i * 7 % 200) / 1000.0f);
        assert_int_equal(qc_eval_states_add(&s, output, original, 1, &err), QC_OK);
    }
    qc_eval_states_finish(&s, &r);
    near(r.distance_mean, 0.0995);
    near(r.distance_99, 0.99 * 0.199);
    near(r.distance_max, 0.199);
}

TEST(no_numbers)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (unsigned i = 0; i < 3; i++)
        for (unsigned at = 0; at < 2 * WIDE; at++) {
            const float good[] = {1.0f, 2.0f, 3.0f, 1.0f, 2.0f, 3.0f};
            float x[2 * WIDE];
            qc_eval_states s;
            qc_error err = {0};
            memcpy(x, good, sizeof x);
            x[at] = bad[i];
            assert_int_equal(qc_eval_states_init(&s, 2, WIDE, &err), QC_OK);
            assert_int_equal(qc_eval_states_add(&s, x, good, 2, &err), QC_ERR_NONFINITE);
            assert_int_equal(qc_eval_states_add(&s, good, x, 2, &err), QC_ERR_NONFINITE);
            assert_string_equal(err.msg, "the hidden states of a window are not finite, or the "
                                         "original's are 0");
            assert_int_equal(s.count, 0);
            qc_eval_states_deinit(&s);
        }
    const float zeros[WIDE] = {0.0f}, some[WIDE] = {1.0f, 0.0f, 0.0f};
    qc_eval_states s;
    qc_error err = {0};
    assert_int_equal(qc_eval_states_init(&s, 1, WIDE, &err), QC_OK);
    assert_int_equal(qc_eval_states_add(&s, some, zeros, 1, &err), QC_ERR_NONFINITE);
    qc_eval_states_deinit(&s);
}
