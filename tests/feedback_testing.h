/* Helpers of the tests of calibrated quantization: inputs, weights, what was made of them, and the
 * definition in double. */
#ifndef QC_TESTS_FEEDBACK_TESTING_H
#define QC_TESTS_FEEDBACK_TESTING_H

#include "quant_testing.h"

#include "quant/error_feedback_internal.h"
#include "quant/scale_search.h"
#include "quant/second_moments.h"

#define TEST_DAMPING 0.01

static const qc_blas *blas;

typedef struct {
    uint64_t n, tokens;
    float *x, *z;
    double *h, *c;   /* h: both triangles */
    double *mh, *mc; /* the same, to be given away */
} data;

/* Inputs as layers have them: a few directions of large variance, a few large columns; z near x. */
static inline data make_data(qt_rng *rng, uint64_t n, uint64_t tokens, int dead)
{
    data d = {.n = n, .tokens = tokens};
    const uint64_t rank = n / 4 + 1;
    float *mix = qt_alloc(rank * n, 4), *size = qt_alloc(n, 4);
    d.x = qt_alloc(tokens * n, 4);
    d.z = qt_alloc(tokens * n, 4);
    d.h = qt_alloc(n * n, 8);
    d.c = qt_alloc(n * n, 8);
    d.mh = qt_alloc(n * n, 8);
    d.mc = qt_alloc(n * n, 8);
    for (uint64_t i = 0; i < rank * n; i++)
        mix[i] = qt_randn(rng) / sqrtf((float)rank);
    for (uint64_t k = 0; k < n; k++)
        size[k] = dead && k % 7 == 3 ? 0.0f : qt_below(rng, 30) == 0 ? 8.0f : 1.0f;
    for (uint64_t t = 0; t < tokens; t++) {
        for (uint64_t r = 0; r < rank; r++) {
            const float a = qt_randn(rng) * 3.0f / (1.0f + 0.2f * (float)r);
            for (uint64_t k = 0; k < n; k++)
                d.x[t * n + k] += a * mix[r * n + k];
        }
        for (uint64_t k = 0; k < n; k++) {
            d.x[t * n + k] = (d.x[t * n + k] + 0.3f * qt_randn(rng)) * size[k];
            d.z[t * n + k] = d.x[t * n + k] + 0.1f * size[k] * qt_randn(rng);
        }
    }
    for (uint64_t t = 0; t < tokens; t++)
        for (uint64_t i = 0; i < n; i++)
            for (uint64_t j = 0; j < n; j++) {
                d.h[i * n + j] += (double)d.x[t * n + i] * (double)d.x[t * n + j];
                d.c[i * n + j] += (double)d.x[t * n + i] * (double)d.z[t * n + j];
            }
    free(mix);
    free(size);
    return d;
}

static inline void free_data(data *d)
{
    free(d->x);
    free(d->z);
    free(d->h);
    free(d->c);
    free(d->mh);
    free(d->mc);
}

static inline void fresh_moments(data *d)
{
    memcpy(d->mh, d->h, d->n * d->n * sizeof(double));
    memcpy(d->mc, d->c, d->n * d->n * sizeof(double));
    for (uint64_t i = 0; i < d->n; i++) /* the upper triangle is not looked at */
        for (uint64_t j = i + 1; j < d->n; j++)
            d->mh[i * d->n + j] = NAN;
}

typedef struct {
    qc_feedback_form form;
    uint64_t rows, n, blocks;
    float *w, *q;
    uint8_t *codes, *absmax_codes;
    float *absmax, *nested_absmax;
    float offset;
    qc_feedback_result result;
} made;

static inline float *make_weight(qt_rng *rng, uint64_t rows, uint64_t n)
{
    float *w = qt_alloc(rows * n, 4);
    for (uint64_t i = 0; i < rows * n; i++)
        w[i] = 0.02f * qt_randn(rng) * (qt_below(rng, 200) == 0 ? 4.0f : 1.0f);
    return w;
}

static inline int int8_code(const made *m, uint64_t i)
{
    int8_t q;
    memcpy(&q, m->codes + i, 1);
    return q;
}

static inline uint64_t scale_of(const made *m, uint64_t row, uint64_t col)
{
    return m->form.kind == QC_WEIGHTS_INT8_ROWS ? row : (row * m->n + col) / m->form.block_elems;
}

static inline void decode(made *m)
{
    for (uint64_t b = 0; m->form.nested && b < m->blocks; b++) {
        float s = qc_dynamic_map[m->absmax_codes[b]] * m->nested_absmax[b / QC_NESTED_BLOCK];
        s = s + m->offset;
        QT_CHECK(memcmp(&s, &m->absmax[b], 4) == 0, "scale %" PRIu64 " is not what is read", b);
    }
    for (uint64_t r = 0; r < m->rows; r++)
        for (uint64_t k = 0; k < m->n; k++) {
            const uint64_t i = r * m->n + k;
            const float s = m->absmax[scale_of(m, r, k)];
            if (m->form.kind == QC_WEIGHTS_NF4)
                m->q[i] = qc_nf4_code[qt_nibble(m->codes, i)] * s;
            else if (m->form.kind == QC_WEIGHTS_INT8_ROWS)
                m->q[i] = ((float)int8_code(m, i) * s) * QC_INT8_STEP;
            else
                m->q[i] = ((float)int8_code(m, i) * QC_INT8_STEP) * s;
        }
}

static inline made quantize_with(const qc_feedback *f, qc_feedback_form form, float *w,
                                 uint64_t rows, uint64_t n)
{
    made m = {.form = form, .rows = rows, .n = n, .w = w};
    qc_error err;
    m.blocks = form.block_elems ? (rows * n + form.block_elems - 1) / form.block_elems : rows;
    m.q = qt_alloc(rows * n, 4);
    m.codes = qt_alloc(rows * n, 1);
    m.absmax_codes = qt_alloc(m.blocks, 1);
    m.absmax = qt_alloc(m.blocks, 4);
    m.nested_absmax = qt_alloc(m.blocks / QC_NESTED_BLOCK + 1, 4);
    qc_feedback_out out = {m.codes, m.absmax, m.absmax_codes, m.nested_absmax, NAN};
    qc_status st = qc_feedback_weight(f, &form, w, rows, &out, &m.result, &err);
    QT_CHECK(st == QC_OK, "%s", err.msg);
    m.offset = out.nested_offset;
    if (form.kind == QC_WEIGHTS_NF4) {
        assert_true(m.offset == 0.0f);
        if (rows * n % 2)
            assert_int_equal(m.codes[rows * n / 2] & 15, 7);
    }
    decode(&m);
    return m;
}

static inline qc_feedback *open_with(data *d, int cross, unsigned threads,
                                     qc_feedback_options options, qc_feedback_info *info)
{
    qc_feedback *f;
    qc_error err;
    fresh_moments(d);
    qc_status st = qc_feedback_open(&f, blas, threads, d->n, d->mh, cross ? d->mc : NULL, &options,
                                    info, &err);
    QT_CHECK(st == QC_OK, "%s", err.msg);
    return f;
}

static inline made quantize(data *d, int cross, unsigned threads, unsigned sweeps,
                            qc_feedback_form form, float *w, uint64_t rows)
{
    qc_feedback *f =
        open_with(d, cross, threads, (qc_feedback_options){TEST_DAMPING, sweeps}, NULL);
    made m = quantize_with(f, form, w, rows, d->n);
    qc_feedback_close(f);
    return m;
}

static inline void free_made(made *m)
{
    free(m->q);
    free(m->codes);
    free(m->absmax_codes);
    free(m->absmax);
    free(m->nested_absmax);
}

/* ---- the definition in double ---- */

/* Columns by falling H_kk. */
static inline void reference_order(const data *d, uint64_t *order)
{
    for (uint64_t k = 0; k < d->n; k++) {
        uint64_t at = k;
        for (; at > 0 && d->h[order[at - 1] * d->n + order[at - 1]] < d->h[k * d->n + k]; at--)
            order[at] = order[at - 1];
        order[at] = k;
    }
}

/* What is added to H_kk */
static inline double damping_of(const data *d, uint64_t k)
{
    uint64_t live = 0;
    double sum = 0.0;
    for (uint64_t i = 0; i < d->n; i++) {
        live += d->h[i * d->n + i] != 0.0;
        sum += d->h[i * d->n + i];
    }
    const double own = d->h[k * d->n + k];
    return own == 0.0 ? 0.0 : TEST_DAMPING * (own + 0.1 * sum / (double)live);
}

/* H, damped */
static inline double damped(const data *d, uint64_t j, uint64_t k)
{
    return d->h[j * d->n + k] + (j == k ? damping_of(d, k) : 0.0);
}

/* H = (U + I) D (U + I)^T, plainly, rows and columns in order; u [n, n]. A dead column has the mean
 * of the others in D. */
static inline void reference_factor(const data *d, const uint64_t *order, double *u, double *diag,
                                    double *mean)
{
    const uint64_t n = d->n;
    uint64_t live = 0;
    double sum = 0.0;
    for (uint64_t k = 0; k < n; k++) {
        live += d->h[k * n + k] != 0.0;
        sum += d->h[k * n + k];
    }
    *mean = sum / (double)live;
    for (uint64_t k = n; k-- > 0;) {
        for (uint64_t j = 0; j <= k; j++) {
            double v = damped(d, order[j], order[k]);
            if (j == k && v == 0.0)
                v = *mean;
            for (uint64_t i = k + 1; i < n; i++)
                v -= u[j * n + i] * diag[i] * u[k * n + i];
            u[j * n + k] = v;
        }
        diag[k] = u[k * n + k];
        for (uint64_t j = 0; j < k; j++)
            u[j * n + k] /= diag[k];
        u[k * n + k] = 1.0;
    }
}

/* T = W (C + M)^T H^-1 by the factor above */
static inline double *reference_target(const data *d, const uint64_t *order, const double *u,
                                       const double *diag, double mean, const float *w,
                                       uint64_t rows, int cross)
{
    const uint64_t n = d->n;
    double *t = qt_alloc(rows * n, 8), *row = qt_alloc(n, 8);
    for (uint64_t r = 0; r < rows; r++) {
        for (uint64_t k = 0; k < n; k++) {
            const double own = d->h[order[k] * n + order[k]];
            row[k] = (double)w[r * n + order[k]];
            row[k] *= !cross ? 1.0 : own == 0.0 ? mean : damping_of(d, order[k]);
            for (uint64_t j = 0; cross && j < n; j++)
                row[k] += (double)w[r * n + j] * d->c[order[k] * n + j];
        }
        for (uint64_t k = n; cross && k-- > 0;)
            for (uint64_t j = k + 1; j < n; j++)
                row[k] -= u[k * n + j] * row[j];
        for (uint64_t k = 0; cross && k < n; k++)
            row[k] /= diag[k];
        for (uint64_t k = 0; cross && k < n; k++)
            for (uint64_t j = 0; j < k; j++)
                row[k] -= u[j * n + k] * row[j];
        for (uint64_t k = 0; k < n; k++)
            t[r * n + order[k]] = row[k];
    }
    free(row);
    return t;
}

/* sum over rows of (T - Q) H (T - Q)^T over that of T H T^T */
static inline double reference_error(const data *d, const double *t, const float *q, uint64_t rows)
{
    const uint64_t n = d->n;
    double of_e = 0.0, of_t = 0.0;
    double *e = qt_alloc(n, 8);
    for (uint64_t r = 0; r < rows; r++) {
        for (uint64_t k = 0; k < n; k++)
            e[k] = t[r * n + k] - (double)q[r * n + k];
        for (uint64_t k = 0; k < n; k++)
            for (uint64_t j = 0; j < n; j++) {
                of_e += e[k] * damped(d, k, j) * e[j];
                of_t += t[r * n + k] * damped(d, k, j) * t[r * n + j];
            }
    }
    free(e);
    return of_e / of_t;
}

/* What a value v for column k of a scale s costs beyond that of the nearest code, in units of s. */
static inline double beyond_nearest(qc_weights_kind kind, double v, double q, double s)
{
    double least = INFINITY;
    if (s == 0.0)
        return 0.0;
    for (int c = kind == QC_WEIGHTS_NF4 ? 0 : -127; c <= (kind == QC_WEIGHTS_NF4 ? 15 : 127); c++) {
        double value = kind == QC_WEIGHTS_NF4 ? (double)qc_nf4_code[c] * s : c * s / 127.0;
        least = fmin(least, fabs(v - value));
    }
    return (fabs(v - q) - least) / fabs(s);
}

static const qc_feedback_form forms[] = {
    {QC_WEIGHTS_NF4, 64, 0},         {QC_WEIGHTS_NF4, 64, 1},
    {QC_WEIGHTS_NF4, 32, 1},         {QC_WEIGHTS_NF4, 128, 1},
    {QC_WEIGHTS_INT8_ROWS, 0, 0},    {QC_WEIGHTS_INT8_BLOCKS, 64, 0},
    {QC_WEIGHTS_INT8_BLOCKS, 64, 1}, {QC_WEIGHTS_INT8_BLOCKS, 256, 1},
    {QC_WEIGHTS_NF4, 4096, 0},
};
#define FORMS (sizeof forms / sizeof *forms)

#endif
