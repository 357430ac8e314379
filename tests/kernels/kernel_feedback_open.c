/* The factor of second moments on a GPU, against that of qc_feedback_open. */
#include "tests/fixtures/device_memory_counted.h"
#include "tests/fixtures/feedback_testing.h"
#include "tests/fixtures/quant_device_fixture.h"

#include "base/workers.h"
#include "kernels/cuda_feedback_internal.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

static qc_cuda_feedback_tools tools;

/* ---- the factor ---- */

static void *fetch(const void *device, uint64_t bytes)
{
    void *host = qt_alloc(bytes, 1);
    QD_OK(qc_cuda_to_host(host, device, bytes, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    return host;
}

/* Elements apart by less than `slack` of the largest of their row. */
static void near_rows(const float *got, const float *want, uint64_t rows, uint64_t n, double slack,
                      const char *what)
{
    for (uint64_t r = 0; r < rows; r++) {
        double largest = 0.0;
        for (uint64_t k = 0; k < n; k++)
            largest = fmax(largest, fabs((double)want[r * n + k]));
        for (uint64_t k = 0; k < n; k++)
            QT_CHECK(fabs((double)got[r * n + k] - (double)want[r * n + k]) <= slack * largest,
                     "%s: row %" PRIu64 ", column %" PRIu64 " is %g, not %g", what, r, k,
                     (double)got[r * n + k], (double)want[r * n + k]);
    }
}

static qc_status open_on_device(qc_cuda_feedback **out, const data *d, int cross, double damping,
                                qc_feedback_info *info)
{
    const uint64_t bytes = d->n * d->n * 8;
    const qc_feedback_options options = {damping, 0};
    qd_buffer h = qd_new_from(d->mh, bytes, 0), c = qd_new_from(d->mc, bytes, 0);
    qc_status st =
        qc_cuda_feedback_open(out, &tools, d->n, h.p, cross ? c.p : NULL, &options, info, &qd.err);
    free(qd_take(&h, "H"));
    free(qd_take(&c, "C"));
    return st;
}

static void compare(const data *d, int cross, double damping)
{
    const uint64_t n = d->n;
    const qc_feedback_options options = {damping, 0};
    qc_feedback_info want_info, info;
    qc_feedback *want = NULL;
    qc_cuda_feedback *got = NULL;
    char what[100];
    data mine = *d;
    (void)snprintf(what, sizeof what, "n %" PRIu64 "%s, damping %g", n, cross ? ", cross" : "",
                   damping);
    fresh_moments(&mine);
    QT_CHECK(open_on_device(&got, &mine, cross, damping, &info) == QC_OK, "%s: %s", what,
             qd.err.msg);
    QT_CHECK(qc_feedback_open(&want, blas, 1, n, mine.mh, cross ? mine.mc : NULL, &options,
                              &want_info, &qd.err) == QC_OK,
             "%s: %s", what, qd.err.msg);
    QT_CHECK(info.damping == want_info.damping && info.dead == want_info.dead &&
                 info.times_raised == want_info.times_raised,
             "%s: damping %g, raised %u times, %" PRIu64 " dead", what, info.damping,
             info.times_raised, info.dead);
    uint32_t *order = fetch(got->order, n * 4);
    for (uint64_t k = 0; k < n; k++)
        QT_CHECK(order[k] == want->order[k], "%s: place %" PRIu64, what, k);
    float *hu = fetch(got->hu, n * n * 4), *dd = fetch(got->d, n * 4);
    float *inverse = fetch(got->inverse, n * 4);
    near_rows(hu, want->hu, n, n, 2e-5, what);
    near_rows(dd, want->d, 1, n, 1e-6, what);
    near_rows(inverse, want->inverse, 1, n, 1e-6, what);
    for (uint64_t k = 0; k < n; k++)
        QT_CHECK((inverse[k] == 0.0f) == (want->inverse[k] == 0.0f), "%s: dead %" PRIu64, what, k);
    if (cross) {
        float *m = fetch(got->m, n * n * 4);
        near_rows(m, want->m, n, n, 1e-5, what);
        free(m);
    } else {
        QT_CHECK(!got->m, "%s: a target without C", what);
    }
    free(order);
    free(hu);
    free(dd);
    free(inverse);
    qc_cuda_feedback_close(got);
    qc_feedback_close(want);
}

TEST(factor_is_the_cpus)
{
    static const struct {
        uint64_t n, tokens;
        int dead;
    } cases[] = {{1, 3, 0}, {31, 90, 0}, {64, 150, 1}, {129, 300, 1}, {300, 500, 0}};
    qt_rng rng = qt_rng_start("gpu factor");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        data d = make_data(&rng, cases[i].n, cases[i].tokens, cases[i].dead);
        compare(&d, 0, 0.1);
        compare(&d, 1, 0.1);
        free_data(&d);
    }
    /* All the same on the diagonal: places by columns. */
    data same = make_data(&rng, 70, 200, 0);
    for (uint64_t i = 0; i < 70; i++)
        for (uint64_t j = 0; j < 70; j++)
            same.h[i * 70 + j] = i == j ? 4000.0 : same.h[i * 70 + j] / 500.0;
    compare(&same, 1, 1.0);
    free_data(&same);
    /* All dead. */
    data none = make_data(&rng, 40, 10, 0);
    memset(none.h, 0, 40 * 40 * 8);
    memset(none.c, 0, 40 * 40 * 8);
    compare(&none, 1, 0.1);
    free_data(&none);
}

TEST(damping_is_raised)
{
    qt_rng rng = qt_rng_start("gpu damping");
    data d = make_data(&rng, 40, 100, 0);
    for (uint64_t i = 0; i < 40; i++)
        for (uint64_t j = 0; j < 40; j++)
            d.h[i * 40 + j] = i == j ? 1.0 : 0.999;
    d.h[39 * 40 + 38] = d.h[38 * 40 + 39] = 1.2; /* no moments: not positive definite */
    compare(&d, 1, 0.01);
    d.h[39 * 40 + 38] = d.h[38 * 40 + 39] = 30.0;
    fresh_moments(&d);
    qc_cuda_feedback *f = NULL;
    assert_int_equal(open_on_device(&f, &d, 0, 0.01, NULL), QC_ERR_INPUT);
    assert_null(f);
    assert_non_null(strstr(qd.err.msg, "have no factor, even with a damping of 1"));
    free_data(&d);
}

TEST(what_is_refused)
{
    const qc_feedback_options bad = {0.0, 0};
    qc_cuda_feedback *f = (void *)1;
    qt_rng rng = qt_rng_start("gpu refused");
    const uint64_t before = dm_bytes();
    data d = make_data(&rng, 130, 200, 0);
    assert_int_equal(qc_cuda_feedback_open(&f, &tools, 130, NULL, NULL, &bad, NULL, &qd.err),
                     QC_ERR_USAGE);
    assert_int_equal(qc_cuda_feedback_open(&f, &tools, 0, NULL, NULL, &bad, NULL, &qd.err),
                     QC_ERR_SHAPE);
    assert_null(f);
    fresh_moments(&d);
    d.mh[70 * 130 + 70] = (double)INFINITY;
    assert_int_equal(open_on_device(&f, &d, 1, 0.1, NULL), QC_ERR_NONFINITE);
    assert_non_null(strstr(qd.err.msg, "inputs 64 to 127 are not finite"));
    fresh_moments(&d);
    d.mc[129 * 130 + 3] = (double)NAN;
    assert_int_equal(open_on_device(&f, &d, 1, 0.1, NULL), QC_ERR_NONFINITE);
    assert_non_null(strstr(qd.err.msg, "inputs 128 to 129 are not finite"));
    fresh_moments(&d);
    d.mh[5 * 130 + 5] = -1.0;
    assert_int_equal(open_on_device(&f, &d, 0, 0.1, NULL), QC_ERR_INPUT);
    assert_non_null(strstr(qd.err.msg, "the second moment of input 5 is below zero"));
    fresh_moments(&d);
    qc_interrupt();
    assert_int_equal(open_on_device(&f, &d, 0, 0.1, NULL), QC_ERR_INTERRUPTED);
    qc_interrupt_clear();
    assert_null(f);
    qc_cuda_feedback_close(NULL);
    /* Nothing of all that is left on the device; what is kept is what is said. */
    assert_true(dm_bytes() == before);
    fresh_moments(&d);
    QD_OK(open_on_device(&f, &d, 1, 0.1, NULL));
    assert_true(dm_bytes() > before + 2 * 130 * 130 * 4);
    assert_true(dm_bytes() - before <= qc_cuda_feedback_kept_bytes(130, 1));
    assert_true(qc_cuda_feedback_open_bytes(130, 1) >
                qc_cuda_feedback_kept_bytes(130, 1) + 130 * 130 * 8);
    assert_true(qc_cuda_feedback_open_bytes(UINT64_MAX, 1) == UINT64_MAX);
    qc_cuda_feedback_close(f);
    assert_true(dm_bytes() == before);
    free_data(&d);
}

#ifdef QC_CUDA_SHIM
/* A grid of one block or two goes round: what it shares is written again. */
TEST(grids_go_round)
{
    for (unsigned grid = 1; grid < 3; grid++) {
        qc_shim_set_grid(grid);
        factor_is_the_cpus(state);
    }
    qc_shim_set_grid(0);
}
#endif

int main(void)
{
    qc_error err;
    if (qc_blas_open(&blas, &err) != QC_OK) {
        print_message("skipped: %s\n", err.msg);
        return 77;
    }
    qd_start();
    tools.stream = qd.stream;
    if (qc_cublas_open(&tools.blas, qd.device.runtime_version, &err) != QC_OK ||
        qc_cusolver_open(&tools.solver, qd.device.runtime_version, &err) != QC_OK) {
        print_message("skipped: %s\n", err.msg);
        return 77;
    }
    const int failed = test_run_all(NULL);
    qc_cusolver_close(tools.solver);
    qc_cublas_close(tools.blas);
    qd_end();
    return failed != 0;
}
