/* Calibrated quantization against its definition in double: factor and target, scales,
 * every code of the feedback, sweeps that only lower the error and end where no step helps. */
#include "tests/fixtures/feedback_testing.h"
#include "tests/fixtures/sanitized.h"

TEST(factor_is_as_defined)
{
    qt_rng rng = qt_rng_start("factor");
    static const uint64_t sizes[] = {1, 40, 256, 300, 520};
    for (unsigned s = 0; s < 5; s++) {
        data d = make_data(&rng, sizes[s], sizes[s] + 30, s % 2 == 1);
        const uint64_t n = d.n;
        uint64_t *order = qt_alloc(n, 8);
        double *u = qt_alloc(n * n, 8), *diag = qt_alloc(n, 8), mean;
        qc_feedback_info info;
        reference_order(&d, order);
        reference_factor(&d, order, u, diag, &mean);
        qc_feedback *f = open_with(&d, 0, 2, (qc_feedback_options){TEST_DAMPING, 0}, &info);
        const double scale = (double)f->d[order[0]] / diag[0];
        assert_int_equal(info.times_raised, 0);
        assert_true(info.damping == TEST_DAMPING);
        assert_int_equal(info.dead, s % 2 == 1 ? (n + 3) / 7 : 0);
        for (uint64_t k = 0; k < n; k++) {
            QT_CHECK(fabs((double)f->d[order[k]] / scale / diag[k] - 1.0) < 1e-5,
                     "D of column %" PRIu64, k);
            for (uint64_t j = 0; j < n; j++) {
                const double want = j < k ? u[j * n + k] : damped(&d, k, j) * scale;
                const double got = (double)f->hu[k * n + j];
                QT_CHECK(fabs(got - want) <= 1e-5 * (fabs(want) + 0.1), "%g, not %g", got, want);
            }
        }
        qc_feedback_close(f);
        free(u);
        free(diag);
        free(order);
        free_data(&d);
    }
}

/* Each code is the nearest to what its definition makes of the columns before it; sums are those of
 * the definition; calibrated beats rounded. */
TEST(codes_are_the_nearest)
{
    qt_rng rng = qt_rng_start("codes");
    for (unsigned i = 0; i < 4 * FORMS; i += TEST_SANITIZED ? 11 : 1) {
        static const uint64_t sizes[] = {256, 440, 300, 40};
        const uint64_t n = sizes[i % 4], rows = i % 4 == 3 ? 301 : i % 4 == 1 ? 131 : 37;
        const int cross = i / 4 % 2;
        data d = make_data(&rng, n, 2 * n, i % 3 == 0);
        uint64_t *order = qt_alloc(n, 8);
        double *u = qt_alloc(n * n, 8), *diag = qt_alloc(n, 8), mean;
        float *w = make_weight(&rng, rows, n);
        const qc_form form = forms[i / 4];
        reference_order(&d, order);
        reference_factor(&d, order, u, diag, &mean);
        double *t = reference_target(&d, order, u, diag, mean, w, rows, cross);
        made m = quantize(&d, cross, 2, 0, form, w, rows);
        for (uint64_t r = 0; r < rows; r++)
            for (uint64_t k = 0; k < n; k++) {
                const uint64_t column = order[k], at = r * n + column;
                double v = t[at];
                for (uint64_t j = 0; j < k; j++)
                    v += (t[r * n + order[j]] - (double)m.q[r * n + order[j]]) * u[j * n + k];
                const double beyond = beyond_nearest(form.ops->kind, v, (double)m.q[at],
                                                     (double)m.absmax[scale_of(&m, r, column)]);
                QT_CHECK(beyond < 2e-4, "form %u, row %" PRIu64 ", column %" PRIu64 ": by %g",
                         i / 4, r, k, beyond);
            }
        const double error = reference_error(&d, t, m.q, rows);
        QT_CHECK(fabs(m.result.calibrated / error - 1.0) < 1e-3, "error %g, not %g",
                 m.result.calibrated, error);
        free_made(&m);
        m = quantize(&d, cross, 2, 4, form, w, rows);
        const double swept = reference_error(&d, t, m.q, rows);
        QT_CHECK(fabs(m.result.calibrated / swept - 1.0) < 1e-3, "error %g, not %g",
                 m.result.calibrated, swept);
        QT_CHECK(swept < error, "form %u, n %" PRIu64 ": sweeps made %g of %g", i / 4, n, swept,
                 error);
        QT_CHECK(cross || m.result.calibrated < 0.7 * m.result.rounded,
                 "form %u, n %" PRIu64 ": %g of %g", i / 4, n, m.result.calibrated,
                 m.result.rounded);
        free_made(&m);
        free(t);
        free(w);
        free(u);
        free(diag);
        free(order);
        free_data(&d);
    }
}

/* A last sweep that changes nothing: no code and no scale is left that would lower the error. */
TEST(sweeps_end_where_no_step_helps)
{
    qt_rng rng = qt_rng_start("sweeps");
    for (unsigned i = 0; i < FORMS; i += TEST_SANITIZED ? 3 : 1) {
        const uint64_t n = 256, rows = 40;
        const qc_form form = forms[i];
        const int aligned = form.block_elems <= n;
        data d = make_data(&rng, n, 2 * n, 0);
        float *w = make_weight(&rng, rows, n);
        made m = quantize(&d, 0, 1, 200, form, w, rows);
        double *g = qt_alloc(n, 8);
        const uint64_t width = form.block_elems && aligned ? form.block_elems : n;
        for (uint64_t r = 0; r < rows; r++) {
            const float *q = m.q + r * n, *t = w + r * n;
            for (uint64_t k = 0; k < n; k++) {
                g[k] = 0.0;
                for (uint64_t j = 0; j < n; j++)
                    g[k] += ((double)t[j] - (double)q[j]) * damped(&d, j, k);
                const double s = (double)m.absmax[scale_of(&m, r, k)];
                const double v = (double)q[k] + g[k] / damped(&d, k, k);
                const double beyond = beyond_nearest(form.ops->kind, v, (double)q[k], s);
                QT_CHECK(beyond < 2e-3, "form %u, row %" PRIu64 ", column %" PRIu64 ": by %g", i, r,
                         k, beyond);
            }
            for (uint64_t b = 0; aligned && b < n; b += width) {
                const double s = (double)m.absmax[scale_of(&m, r, b)];
                const uint64_t of = scale_of(&m, r, b) / QC_NESTED_BLOCK;
                const double group = form.nested ? (double)m.nested_absmax[of] : 0.0;
                double qg = 0.0, qq = 0.0;
                for (uint64_t k = b; k < b + width; k++) {
                    qg += (double)q[k] * g[k];
                    for (uint64_t j = b; j < b + width; j++)
                        qq += (double)q[k] * damped(&d, k, j) * (double)q[j];
                }
                const double more = qq > 0.0 ? qg / qq * s : 0.0; /* what s lacks */
                double nearest = form.nested ? (double)INFINITY : 0.0;
                for (unsigned c = 0; form.nested && c < 256; c++)
                    nearest = fmin(nearest, fabs((double)qc_dynamic_map[c] * group +
                                                 (double)m.offset - s - more));
                QT_CHECK(fabs(more) < nearest + 2e-3 * fabs(s),
                         "form %u, row %" PRIu64 ", block at %" PRIu64 ": scale %g by %g", i, r, b,
                         s, more);
            }
        }
        free(g);
        free_made(&m);
        free(w);
        free_data(&d);
    }
}

/* The more sweeps, the less error; the first ones always change something. */
TEST(error_never_rises)
{
    qt_rng rng = qt_rng_start("sweep by sweep");
    for (unsigned i = 0; i < FORMS; i += TEST_SANITIZED ? 3 : 1) {
        data d = make_data(&rng, 320, 700, 1);
        float *w = make_weight(&rng, 64, 320);
        double last = INFINITY;
        for (unsigned sweeps = 0; sweeps < 6; sweeps++) {
            made m = quantize(&d, 1, 2, sweeps, forms[i], w, 64);
            QT_CHECK(m.result.calibrated <= last * (1.0 + 1e-6),
                     "form %u: %g after %u sweeps, %g before", i, m.result.calibrated, sweeps,
                     last);
            QT_CHECK(sweeps != 1 || m.result.calibrated < last, "form %u: no sweep", i);
            last = m.result.calibrated;
            free_made(&m);
        }
        free(w);
        free_data(&d);
    }
}

/* sum over the block of diag[column] * squared distance from the nearest value for a scale of s */
static double weighed(const made *m, const double *diag, uint64_t first, uint64_t end, double s,
                      double enough)
{
    double sum = 0.0;
    for (uint64_t e = first; e < end && sum < enough; e++) {
        const double w = (double)m->w[e];
        const double off = beyond_nearest(m->form.ops->kind, w, w, s) * s;
        sum += diag[e % m->n] * off * off;
    }
    return sum;
}

/* Weighed by D, no other scale is much better. */
TEST(scales_are_near_the_best)
{
    qt_rng rng = qt_rng_start("scales");
    for (unsigned i = 0; i < FORMS; i += TEST_SANITIZED ? 3 : 1) {
        const uint64_t n = 320, rows = 26;
        const qc_form form = forms[i];
        const uint64_t block = form.block_elems ? form.block_elems : n;
        data d = make_data(&rng, n, 640, 0);
        float *w = make_weight(&rng, rows, n);
        uint64_t *order = qt_alloc(n, 8);
        double *weights = qt_alloc(n, 8), *u = qt_alloc(n * n, 8), *diag = qt_alloc(n, 8), mean,
               ours = 0.0, bests = 0.0;
        reference_order(&d, order);
        reference_factor(&d, order, u, diag, &mean);
        for (uint64_t k = 0; k < n; k++)
            weights[order[k]] = diag[k];
        made m = quantize(&d, 0, 2, 0, form, w, rows);
        for (uint64_t b = 0; b < m.blocks; b++) {
            const uint64_t first = b * block;
            const uint64_t end = first + block < rows * n ? first + block : rows * n;
            double largest = 0.0, best = INFINITY;
            for (uint64_t e = first; e < end; e++)
                largest = fmax(largest, fabs((double)w[e]));
            for (int step = form.ops->kind == QC_FORM_NF4 ? -150 : 40; step <= 150;
                 step += TEST_SANITIZED ? 10 : 1)
                if (step < -30 || step > 30)
                    best =
                        fmin(best, weighed(&m, weights, first, end, largest * step / 100.0, best));
            ours += weighed(&m, weights, first, end, (double)m.absmax[b], INFINITY);
            bests += best;
        }
        QT_CHECK(ours < bests * (form.ops->kind != QC_FORM_NF4 ? 1.2 : 1.1), "form %u: %g, best %g",
                 i, ours, bests);
        free_made(&m);
        free(u);
        free(diag);
        free(weights);
        free(order);
        free(w);
        free_data(&d);
    }
}

/* Without data: as the search of scale_search.h leaves it, more or less. */
TEST(rounded_is_the_search)
{
    qt_rng rng = qt_rng_start("rounded");
    for (unsigned i = 0; i < FORMS; i += TEST_SANITIZED ? 3 : 1) {
        const uint64_t n = 256, rows = 200;
        const qc_form form = forms[i];
        if (form.ops->kind != QC_FORM_NF4)
            continue;
        data d = make_data(&rng, n, 800, 0);
        float *w = make_weight(&rng, rows, n);
        made m = quantize(&d, 0, 2, 0, form, w, rows);
        const double rounded = m.result.rounded;
        double *t = qt_alloc(rows * n, 8);
        for (uint64_t e = 0; e < rows * n; e++)
            t[e] = (double)w[e];
        const qc_search_out out = {m.codes, m.absmax, m.absmax_codes, m.nested_absmax};
        void *scratch = aligned_alloc(64, qc_search_scratch_bytes());
        qc_piece_sums sums;
        uint64_t overflow;
        QT_CHECK(scratch != NULL, "out of memory");
        qc_search_ops_for(QC_ISA_SCALAR)
            ->blocks(&form, QC_SEARCH_REFIT, w, QC_DTYPE_F32, rows * n, &out, scratch, &sums);
        qc_quant_ops_for(QC_ISA_SCALAR)
            ->nf4_dequantize(m.codes, m.absmax, qc_nf4_code, rows * n, form.block_elems, m.q,
                             QC_DTYPE_F32, &overflow);
        const double want = reference_error(&d, t, m.q, rows);
        QT_CHECK(rounded > 0.75 * want && rounded < 1.3 * want, "form %u: %g, not %g", i, rounded,
                 want);
        free(scratch);
        free(t);
        free_made(&m);
        free(w);
        free_data(&d);
    }
}

int main(void)
{
    qc_error err;
    if (qc_blas_open(&blas, &err) != QC_OK) {
        print_message("skipped: %s\n", err.msg);
        return 77;
    }
    print_message("%s\n", qc_blas_name(blas));
    return test_run_all(NULL) != 0;
}
