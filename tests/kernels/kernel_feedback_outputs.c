/* Calibrated weights on a device where outputs do not count alike: against qc_feedback_weight with
 * the same factor, and against tr(G E H E^T) in double. */
#include "tests/fixtures/feedback_device_fixture.h"
#include "tests/fixtures/feedback_outputs_testing.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

/* A problem, and its factor on both sides. */
typedef struct {
    problem p;
    qc_feedback *f;
    qc_cuda_feedback gpu;
} both_sides;

static both_sides open_both(problem p, unsigned sweeps)
{
    both_sides b = {.p = p};
    b.f = open_with(&b.p.d, p.cross, 2, (qc_feedback_options){TEST_DAMPING, sweeps}, NULL);
    b.gpu = upload(b.f);
    return b;
}

static void close_both(both_sides *b)
{
    drop(&b->gpu);
    qc_feedback_close(b->f);
}

static made on_device(const both_sides *b, qc_form form, uint64_t limit)
{
    return quantize_on_device(&b->gpu, form, b->p.w, QC_DTYPE_F32, b->p.rows, &b->p.g, limit);
}

/* tr(G E H E^T) of it over that of T, as defined */
static double error_of(const problem *p, const made *m)
{
    const uint64_t elems = p->rows * p->d.n;
    for (uint64_t i = 0; i < elems; i++)
        p->e[i] = p->t[i] - (double)m->q[i];
    double *y = both(&p->d, &p->g, p->e, p->rows);
    const double error = dot(p->e, y, elems) / p->of_t;
    free(y);
    return error;
}

static uint64_t other_codes(const made *a, const made *b)
{
    uint64_t other = 0;
    for (uint64_t i = 0; i < a->rows * a->n; i++)
        other +=
            qc_form_code_at(a->form.ops, a->codes, i) != qc_form_code_at(b->form.ops, b->codes, i);
    return other;
}

static void near(double got, double want, double most, const char *what, uint64_t i)
{
    QT_CHECK(fabs(got - want) <= most * want, "case %" PRIu64 ": %s %g, not %g", i, what, got,
             want);
}

/* Products add up in another order than OpenBLAS. Where a code then falls on the other side of a
 * tie, so may others of its block of G, as they are chosen with it known; then only errors are
 * alike. In most cases no code differs. */
TEST(weights_are_the_cpus)
{
    static const uint64_t widths[] = {96, 150, 40, 576}, blocks[] = {40, 300, 1, 70, 16};
    qt_rng rng = qt_rng_start("two-sided on a device");
    uint64_t equal = 0;
    for (uint64_t i = 0; i < ALL; i++) {
        const uint64_t n = widths[i % 4], rows = 1 + qt_below(&rng, i % 4 == 1 ? 200 : 90);
        const qc_form form = form_number(i, n);
        both_sides b = open_both(make_problem(&rng, rows, n, blocks[i % 5], i % 2), 3);
        made want = quantize_for(b.f, form, b.p.w, rows, n, &b.p.g);
        made got = on_device(&b, form, 0);
        const uint64_t other = other_codes(&got, &want);
        const double most = other > 0 ? 0.1 : 1e-3;
        if (getenv("QC_TEST_SHOW"))
            print_message("%" PRIu64 ": %" PRIu64 " x %" PRIu64 ": %" PRIu64
                          " codes differ; %.7g, not %.7g\n",
                          i, rows, n, other, got.result.calibrated_two_sided,
                          want.result.calibrated_two_sided);
        near(got.result.rounded, want.result.rounded, 1e-3, "rounded", i);
        near(got.result.calibrated, want.result.calibrated, most, "calibrated", i);
        near(got.result.rounded_two_sided, want.result.rounded_two_sided, 1e-3, "rounded", i);
        near(got.result.calibrated_two_sided, want.result.calibrated_two_sided, most, "two-sided",
             i);
        equal += other == 0;
        free_made(&got);
        free_made(&want);
        close_both(&b);
        free_problem(&b.p);
    }
    QT_CHECK(equal >= ALL / 2, "codes are equal in %" PRIu64 " cases only", equal);
}

TEST(error_is_as_defined_and_never_rises)
{
    qt_rng rng = qt_rng_start("two-sided error on a device");
    for (uint64_t i = 0; i < ALL; i += 3) {
        const uint64_t n = i % 4 ? 100 : 72, rows = 30 + qt_below(&rng, 60);
        problem p = make_problem(&rng, rows, n, i % 2 ? 33 : 80, i % 4 == 0);
        double last = (double)INFINITY;
        for (unsigned sweeps = 0; sweeps < 6; sweeps += 1 + sweeps) {
            both_sides b = open_both(p, sweeps);
            made m = on_device(&b, form_number(i, n), 0);
            const double error = error_of(&p, &m);
            near(m.result.calibrated_two_sided, error, 2e-3, "two-sided", i);
            near(m.result.calibrated, reference_error(&p.d, p.t, m.q, rows), 2e-3, "error", i);
            QT_CHECK(error <= last * (1.0 + 1e-5),
                     "case %" PRIu64 ": %g after %u sweeps, %g before", i, error, sweeps, last);
            QT_CHECK(p.cross || error < m.result.rounded_two_sided, "case %" PRIu64 ": %g of %g", i,
                     error, m.result.rounded_two_sided);
            last = error;
            free_made(&m);
            close_both(&b);
        }
        free_problem(&p);
    }
}

/* With G = I, and without any gradient, outputs count alike. Where blocks go on into the next row,
 * one-sided sweeps leave scales alone too, and make the same codes. */
TEST(alike_outputs_are_one_sided)
{
    qt_rng rng = qt_rng_start("alike on a device");
    for (uint64_t i = 0; i < FORMS; i += 2) {
        const uint64_t n = 150, rows = 70, block = 48;
        if (forms[i].block_elems == 0)
            continue;
        both_sides b = open_both(make_problem(&rng, rows, n, block, i % 2), 3);
        made alike = quantize_on_device(&b.gpu, forms[i], b.p.w, QC_DTYPE_F32, rows, NULL, 0);
        assert_true(alike.result.calibrated_two_sided == 0.0);
        for (unsigned zero = 0; zero < 2; zero++) {
            for (uint64_t k = 0; k < 2 * block * block; k++)
                b.p.moments[k] = k % block == k / block % block && !zero ? 3e-9f : 0.0f;
            made m = on_device(&b, forms[i], 0);
            uint64_t other = 0; /* rows in which a sum was rounded to the other side of a tie */
            for (uint64_t r = 0; r < rows; r++)
                other += memcmp(m.q + r * n, alike.q + r * n, n * sizeof *m.q) != 0;
            QT_CHECK(other <= rows / 8, "form %" PRIu64 ": %" PRIu64 " rows differ", i, other);
            near(m.result.calibrated, alike.result.calibrated, 0.05, "error", i);
            QT_CHECK(fabs(m.result.calibrated_two_sided - (zero ? 0.0 : m.result.calibrated)) <=
                         1e-5 * m.result.calibrated,
                     "%g, not %g", m.result.calibrated_two_sided, m.result.calibrated);
            free_made(&m);
        }
        free_made(&alike);
        close_both(&b);
        free_problem(&b.p);
    }
}

static void same(const made *a, const made *b, const char *what)
{
    assert_int_equal(other_codes(a, b), 0);
    assert_memory_equal(a->absmax, b->absmax, a->blocks * 4);
    QT_CHECK(memcmp(&a->result, &b->result, sizeof a->result) == 0, "%s: %g, not %g", what,
             a->result.calibrated_two_sided, b->result.calibrated_two_sided);
}

/* Pieces begin with blocks of G, a grid of one block or two goes round, and a second run gives the
 * same. In twenty sweeps some blocks of G are done before others. */
TEST(pieces_and_grids_make_no_difference)
{
    static const uint64_t rows_of[] = {130, 50, 75, 60};
    static const uint64_t blocks[] = {32, 24, 17, 60};
    qt_rng rng = qt_rng_start("pieces of two-sided");
    for (uint64_t i = 0; i < ALL; i += 3) {
        const uint64_t n = 64, rows = rows_of[i / 3 % 4];
        const qc_form form = form_number(i, n);
        both_sides b = open_both(make_problem(&rng, rows, n, blocks[i / 3 % 4], i % 4 == 0), 20);
        made all = on_device(&b, form, 0), again = on_device(&b, form, 0);
        same(&again, &all, "again");
        free_made(&again);
        /* sums over rows are the same as well, because rows are added up in order */
        made parts = on_device(&b, form, 1);
        same(&parts, &all, "in pieces");
        free_made(&parts);
#ifdef QC_CUDA_SHIM
        for (unsigned grid = 1; grid < 3; grid++) {
            qc_shim_set_grid(grid);
            made other = on_device(&b, form, 0);
            same(&other, &all, "grid");
            free_made(&other);
        }
        qc_shim_set_grid(0);
#endif
        free_made(&all);
        close_both(&b);
        free_problem(&b.p);
    }
}

/* Both sides refuse with the same words. */
static void refuses(const both_sides *b, made *m, qc_status want, const char *text)
{
    qc_feedback_out out = {.codes = m->codes,
                           .absmax = m->absmax,
                           .absmax_codes = m->absmax_codes,
                           .nested_absmax = m->nested_absmax};
    qc_error err = {0};
    assert_int_equal(qc_cuda_feedback_weight(&b->gpu, &m->form, b->p.w, QC_DTYPE_F32, b->p.rows,
                                             &b->p.g, &out, &m->result, &qd.err),
                     want);
    assert_int_equal(
        qc_feedback_weight(b->f, &m->form, b->p.w, b->p.rows, &b->p.g, &out, &m->result, &err),
        want);
    assert_string_equal(qd.err.msg, err.msg);
    QT_CHECK(strstr(err.msg, text) != NULL, "%s", err.msg);
}

TEST(bad_moments_are_refused)
{
    qt_rng rng = qt_rng_start("bad moments on a device");
    both_sides b = open_both(make_problem(&rng, 40, 64, 16, 0), 1);
    float *g = b.p.moments;
    const float was = g[20 * 16 + 3];
    made m = on_device(&b, forms[1], 0);
    g[20 * 16 + 3] = NAN;
    refuses(&b, &m, QC_ERR_NONFINITE, "output 20 are not finite");
    g[20 * 16 + 3] = was;
    g[37 * 16 + 5] = -1.0f; /* in the last block, which is not whole */
    refuses(&b, &m, QC_ERR_INPUT, "output 37 is below zero");
    g[37 * 16 + 5] = 1e-8f;
    b.p.g.damping = NAN;
    refuses(&b, &m, QC_ERR_USAGE, "damping of outputs");
    b.p.g = (qc_feedback_outputs){g, 0, 0.1};
    refuses(&b, &m, QC_ERR_SHAPE, "blocks of 0 outputs");
    free_made(&m);
    close_both(&b);
    free_problem(&b.p);
}

TEST(bytes_are_told)
{
    const qc_form nf4 = {.ops = &qc_form_nf4, .block_elems = 64, .nested = 1};
    const uint64_t without = qc_cuda_feedback_weight_bytes(4096, 4096, &nf4, 0);
    const uint64_t with = qc_cuda_feedback_weight_bytes(4096, 4096, &nf4, 1024);
    /* G; and traces, flags and counters */
    assert_true(with > without + UINT64_C(4096) * 1024 * 4);
    assert_true(with < without + UINT64_C(4096) * 1024 * 4 + 4096 * 32);
    /* A piece is whole blocks of G, in rows that also begin a group: lcm(2, 24) and lcm(16, 24). */
    expect_least_rows(4096, 8192, &nf4, 24, 24);
    expect_least_rows(4096, 1024, &nf4, 24, 48);
    /* all rows where a block has more than those */
    expect_least_rows(100, 8192, &nf4, 1024, 100);
    assert_true(qc_cuda_feedback_weight_bytes(UINT64_MAX, 4096, &nf4, 1024) == UINT64_MAX);
}

int main(void)
{
    return run_on_device();
}
