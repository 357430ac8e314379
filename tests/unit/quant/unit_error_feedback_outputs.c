/* Calibrated quantization where outputs do not count alike, against tr(G E H E^T) in double. */
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/feedback_outputs_testing.h"
#include "tests/fixtures/sanitized.h"

#include "base/workers.h"

static made solve(problem *p, qc_form form, unsigned threads, unsigned sweeps)
{
    qc_feedback *f =
        open_with(&p->d, p->cross, threads, (qc_feedback_options){TEST_DAMPING, sweeps}, NULL);
    made m = quantize_for(f, form, p->w, p->rows, p->d.n, &p->g);
    qc_feedback_close(f);
    for (uint64_t i = 0; i < p->rows * p->d.n; i++)
        p->e[i] = p->t[i] - (double)m.q[i];
    return m;
}

/* What is stated is what the definition gives, and no sweep makes it larger. */
TEST(error_is_as_defined_and_never_rises)
{
    static const uint64_t widths[] = {256, 150, 40, 560}, blocks[] = {40, 300, 1, 130};
    qt_rng rng = qt_rng_start("two-sided error");
    for (unsigned i = 0; i < ALL; i += TEST_SANITIZED ? 3 : 1) {
        const uint64_t rows = 1 + qt_below(&rng, i % 4 == 1 ? 260 : 50), n = widths[i % 4];
        problem p = make_problem(&rng, rows, n, blocks[i / 4 % 4], i % 2);
        const qc_form form = form_number(i, n);
        double last = (double)INFINITY;
        for (unsigned sweeps = 0; sweeps < 5; sweeps += 1 + sweeps) {
            made m = solve(&p, form, 2, sweeps);
            double *y = both(&p.d, &p.g, p.e, rows);
            const double error = dot(p.e, y, rows * n) / p.of_t;
            const double one = reference_error(&p.d, p.t, m.q, rows);
            QT_CHECK(fabs(m.result.calibrated_two_sided / error - 1.0) < 2e-3,
                     "form %u: error %g, not %g", i, m.result.calibrated_two_sided, error);
            QT_CHECK(fabs(m.result.target_two_sided / p.of_t - 1.0) < 2e-3, "form %u: %g, not %g",
                     i, m.result.target_two_sided, p.of_t);
            QT_CHECK(fabs(m.result.calibrated / one - 1.0) < 2e-3, "form %u: error %g, not %g", i,
                     m.result.calibrated, one);
            QT_CHECK(error <= last * (1.0 + 1e-5), "form %u: %g after %u sweeps, %g before", i,
                     error, sweeps, last);
            QT_CHECK(p.cross || error < m.result.rounded_two_sided, "form %u: %g of %g", i, error,
                     m.result.rounded_two_sided);
            last = error;
            free(y);
            free_made(&m);
        }
        free_problem(&p);
    }
}

/* At the end no code is left that would lower the error. */
TEST(sweeps_end_where_no_code_helps)
{
    qt_rng rng = qt_rng_start("last sweep");
    for (unsigned i = 0; i < FORMS; i += TEST_SANITIZED ? 3 : 1) {
        const uint64_t n = i % 2 ? 192 : 100, rows = 90, block = i % 3 ? 50 : 90;
        problem p = make_problem(&rng, rows, n, block, 0);
        made m = solve(&p, forms[i], 2, 300);
        double *y = both(&p.d, &p.g, p.e, rows);
        for (uint64_t r = 0; r < rows; r++)
            for (uint64_t k = 0; k < n; k++) {
                const double own = outputs_at(&p.g, rows, r, r) * damped(&p.d, k, k);
                const double v = (double)m.q[r * n + k] + y[r * n + k] / own;
                const double beyond = beyond_nearest(forms[i].ops->kind, v, (double)m.q[r * n + k],
                                                     (double)m.absmax[scale_of(&m, r, k)]);
                QT_CHECK(beyond < 2e-3, "form %u, row %" PRIu64 ", column %" PRIu64 ": by %g", i, r,
                         k, beyond);
            }
        free(y);
        free_made(&m);
        free_problem(&p);
    }
}

/* Where no output has a gradient, all count alike, and so they do with G = I; the codes are those
 * of the one-sided sweeps, which leave scales alone where blocks go on into the next row. */
TEST(alike_outputs_are_one_sided)
{
    qt_rng rng = qt_rng_start("alike");
    for (unsigned i = 0; i < FORMS; i += TEST_SANITIZED ? 3 : 1) {
        const uint64_t n = 150, rows = 70, block = 48;
        if (forms[i].block_elems == 0)
            continue;
        problem p = make_problem(&rng, rows, n, block, i % 2);
        made alike = quantize(&p.d, p.cross, 2, 3, forms[i], p.w, rows);
        for (unsigned zero = 0; zero < 2; zero++) {
            for (uint64_t k = 0; k < 2 * block * block; k++)
                p.moments[k] = k % block == k / block % block && !zero ? 3e-9f : 0.0f;
            made m = solve(&p, forms[i], 2, 3);
            uint64_t other = 0; /* rows in which a sum was rounded to the other side of a tie */
            for (uint64_t r = 0; r < rows; r++)
                other += memcmp(m.q + r * n, alike.q + r * n, n * sizeof *m.q) != 0;
            QT_CHECK(other <= rows / 8, "form %u: %" PRIu64 " rows differ", i, other);
            QT_CHECK(fabs(m.result.calibrated / alike.result.calibrated - 1.0) < 0.05,
                     "form %u: %g, not %g", i, m.result.calibrated, alike.result.calibrated);
            const double two = zero ? 0.0 : m.result.calibrated;
            QT_CHECK(fabs(m.result.calibrated_two_sided - two) <= 1e-5 * two, "%g, not %g",
                     m.result.calibrated_two_sided, two);
            free_made(&m);
        }
        free_made(&alike);
        free_problem(&p);
    }
}

/* Blocks of G are weights of their own. */
TEST(blocks_are_apart)
{
    qt_rng rng = qt_rng_start("apart");
    const uint64_t n = 128, rows = 300, block = QC_FEEDBACK_ROWS;
    for (unsigned i = 0; i < FORMS; i++) {
        if (forms[i].nested || forms[i].block_elems > n)
            continue;
        problem p = make_problem(&rng, rows, n, block, 1);
        made all = solve(&p, forms[i], 2, 3);
        qc_feedback *f = open_with(&p.d, 1, 2, (qc_feedback_options){TEST_DAMPING, 3}, NULL);
        for (uint64_t first = 0; first < rows; first += block) {
            const uint64_t count = rows - first < block ? rows - first : block;
            const qc_feedback_outputs g = {p.moments + first * block, block, p.g.damping};
            made m = quantize_for(f, forms[i], p.w + first * n, count, n, &g);
            assert_memory_equal(m.q, all.q + first * n, count * n * sizeof *m.q);
            free_made(&m);
        }
        qc_feedback_close(f);
        free_made(&all);
        free_problem(&p);
    }
}

TEST(threads_make_no_difference)
{
    static const unsigned threads[] = {2, 5};
    qt_rng rng = qt_rng_start("threads");
    for (unsigned i = 0; i < ALL; i += TEST_SANITIZED ? 3 : 1) {
        const uint64_t n = 72, rows = 300;
        problem p = make_problem(&rng, rows, n, 1 + qt_below(&rng, 310), i % 2);
        const qc_form form = form_number(i, n);
        made one = solve(&p, form, 1, 2);
        for (unsigned t = 0; t < 2; t++) {
            made m = solve(&p, form, threads[t], 2);
            assert_memory_equal(m.codes, one.codes, (size_t)qc_form_code_bytes(&form, rows * n));
            assert_memory_equal(m.absmax, one.absmax, m.blocks * 4);
            assert_memory_equal(&m.result, &one.result, sizeof m.result);
            free_made(&m);
        }
        free_made(&one);
        free_problem(&p);
    }
}

static void refuses(problem *p, const qc_feedback *f, made *m, qc_status want, const char *text)
{
    qc_feedback_out out = {.codes = m->codes,
                           .absmax = m->absmax,
                           .absmax_codes = m->absmax_codes,
                           .nested_absmax = m->nested_absmax};
    qc_error err;
    assert_int_equal(qc_feedback_weight(f, &forms[1], p->w, p->rows, &p->g, &out, &m->result, &err),
                     want);
    QT_CHECK(strstr(err.msg, text) != NULL, "%s", err.msg);
}

TEST(bad_moments_and_interrupts)
{
    qt_rng rng = qt_rng_start("bad moments");
    problem p = make_problem(&rng, 40, 64, 16, 0);
    const float was = p.moments[20 * 16 + 3];
    made m = solve(&p, forms[1], 1, 1);
    qc_feedback *f = open_with(&p.d, 0, 2, (qc_feedback_options){TEST_DAMPING, 2}, NULL);
    p.moments[20 * 16 + 3] = INFINITY;
    refuses(&p, f, &m, QC_ERR_NONFINITE, "output 20 are not finite");
    p.moments[20 * 16 + 3] = was;
    p.moments[21 * 16 + 5] = -1.0f;
    refuses(&p, f, &m, QC_ERR_INPUT, "output 21 is below zero");
    p.moments[21 * 16 + 5] = 1e-8f;
    p.g.damping = -0.1;
    refuses(&p, f, &m, QC_ERR_USAGE, "damping of outputs");
    p.g = (qc_feedback_outputs){p.moments, 0, 0.1};
    refuses(&p, f, &m, QC_ERR_SHAPE, "blocks of 0 outputs");
    p.g.block = 16;
    qc_interrupt();
    refuses(&p, f, &m, QC_ERR_INTERRUPTED, "");
    qc_interrupt_clear();
    qc_feedback_close(f);
    free_made(&m);
    free_problem(&p);
}

/* Any allocation may fail. */
TEST(no_memory)
{
    qt_rng rng = qt_rng_start("no memory");
    problem p = make_problem(&rng, 20, 64, 8, 1);
    qc_feedback *f = open_with(&p.d, 1, 1, (qc_feedback_options){TEST_DAMPING, 2}, NULL);
    made m = quantize_for(f, forms[1], p.w, 20, 64, &p.g);
    qc_feedback_out out = {.codes = m.codes,
                           .absmax = m.absmax,
                           .absmax_codes = m.absmax_codes,
                           .nested_absmax = m.nested_absmax};
    EACH_ALLOCATION_FAILS (fault, 0) {
        fault.st = qc_feedback_weight(f, &forms[1], p.w, 20, &p.g, &out, &m.result, NULL);
        assert_true(fault.st != QC_OK || fault.at > 7);
    }
    qc_feedback_close(f);
    free_made(&m);
    free_problem(&p);
}

int main(void)
{
    qc_error err;
    if (qc_blas_open(&blas, &err) != QC_OK) {
        print_message("skipped: %s\n", err.msg);
        return 77;
    }
    return test_run_all(NULL) != 0;
}
