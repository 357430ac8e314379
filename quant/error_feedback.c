/* What weights of the same inputs share: moments, their factor, the target's matrix. */
#include "quant/error_feedback_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "quant/piecework.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS  64u /* how many rows a thread looks at, or copies, at a time */
#define STRIP 16u /* how many columns of these rows it moves at a time */

typedef struct {
    qc_feedback *f;
    qc_factor *factor;
    double *h, *c;
    double *row_is; /* [pieces] 0 where something is not finite */
    double *own;    /* [n] H's diagonal, before it is damped */
    double damping;
    double h_mean;  /* mean of H's diagonal */
    double *strips; /* [threads][n, STRIP] */
} opening;

static uint64_t pieces(const qc_feedback *f)
{
    return qc_ceil_div_u64(f->n, ROWS);
}

static uint64_t end_of(const qc_feedback *f, uint64_t piece)
{
    return piece * ROWS + ROWS < f->n ? piece * ROWS + ROWS : f->n;
}

/* Checks that moments are finite. Rows and columns of dead inputs become zero; only odd inputs have
 * anything else there. */
static qc_status look(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const opening *o = ctx;
    const uint64_t n = o->f->n;
    double sum = 0.0; /* 0 * anything finite */
    (void)thread;
    (void)err;
    for (uint64_t i = piece * ROWS; i < end_of(o->f, piece); i++) {
        double *h = o->h + i * n, *c = o->c ? o->c + i * n : NULL;
        for (uint64_t j = 0; j <= i; j++)
            sum += 0.0 * h[j];
        for (uint64_t j = 0; c && j < n; j++)
            sum += 0.0 * c[j];
    }
    o->row_is[piece] = sum;
    return QC_OK;
}

static qc_status bury(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const opening *o = ctx;
    const uint64_t n = o->f->n;
    (void)thread;
    (void)err;
    for (uint64_t i = piece * ROWS; i < end_of(o->f, piece); i++) {
        const int dead = o->f->inverse[i] == 0.0f;
        for (uint64_t j = 0; j < i; j++)
            if (dead || o->f->inverse[j] == 0.0f)
                o->h[i * n + j] = 0.0;
        if (dead && o->c)
            memset(o->c + i * n, 0, n * sizeof *o->c);
    }
    return QC_OK;
}

/* Makes hu and D from the factor. */
static qc_status fill(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const opening *o = ctx;
    const uint64_t n = o->f->n, first = piece * ROWS, end = end_of(o->f, piece);
    (void)thread;
    (void)err;
    for (uint64_t k = first; k < end; k++) {
        const double r = qc_factor_at(o->factor, k, k);
        o->f->d[o->f->order[k]] = (float)(r * r * o->f->scale);
        for (uint64_t j = k; j < n; j++)
            o->f->hu[k * n + j] = (float)(o->h[j * n + k] * o->f->scale);
    }
    for (uint64_t j = 0; j < end; j++)
        for (uint64_t k = j + 1 > first ? j + 1 : first; k < end; k++)
            o->f->hu[k * n + j] =
                (float)(qc_factor_at(o->factor, j, k) / qc_factor_at(o->factor, k, k));
    return QC_OK;
}

/* Puts the rows of STRIP columns of c into the order of the factor. */
static qc_status arrange(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const opening *o = ctx;
    const uint64_t n = o->f->n, first = piece * STRIP, left = n - first;
    const uint64_t cols = qc_min_u64(left, STRIP);
    double *strip = o->strips + thread * n * STRIP;
    (void)err;
    for (uint64_t i = 0; i < n; i++)
        memcpy(strip + i * STRIP, o->c + o->f->order[i] * n + first, cols * sizeof *strip);
    for (uint64_t i = 0; i < n; i++)
        memcpy(o->c + i * n + first, strip + i * STRIP, cols * sizeof *strip);
    return QC_OK;
}

static qc_status narrow(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const opening *o = ctx;
    const uint64_t n = o->f->n;
    (void)thread;
    (void)err;
    for (uint64_t i = piece * ROWS; i < end_of(o->f, piece); i++)
        for (uint64_t j = 0; j < n; j++)
            o->f->m[o->f->order[i] * n + j] = (float)o->c[i * n + j];
    return QC_OK;
}

qc_status qc_feedback_odd(uint64_t first, uint64_t end, qc_error *err)
{
    QC_FAIL(err, QC_ERR_NONFINITE,
            "the second moments of inputs %" PRIu64 " to %" PRIu64 " are not finite", first,
            end - 1);
}

typedef struct {
    double moment;
    uint64_t column;
} place;

static int falling(const void *pa, const void *pb)
{
    const place *a = pa, *b = pb;
    if (a->moment != b->moment)
        return a->moment < b->moment ? 1 : -1;
    return (a->column > b->column) - (a->column < b->column);
}

qc_status qc_feedback_look_at_diagonal(const double *own, uint64_t n, uint64_t *order, double *mean,
                                       uint64_t *dead, qc_error *err)
{
    double sum = 0.0;
    *dead = 0;
    for (uint64_t k = 0; k < n; k++) {
        if (own[k] < 0.0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "the second moment of input %" PRIu64
                    " is below zero (%g), which no sum of squares can be",
                    k, own[k]);
        *dead += own[k] == 0.0;
        sum += own[k];
    }
    *mean = *dead == n ? 1.0 : sum / (double)(n - *dead);
    if (!isfinite(*mean))
        QC_FAIL(err, QC_ERR_RANGE, "the second moments of the inputs are too large to be added");
    /* Large inputs come first, so that all others can make up for the cost of rounding them. */
    place *places = NULL;
    QC_TRY(qc_calloc((void **)&places, n, sizeof *places, err));
    for (uint64_t k = 0; k < n; k++)
        places[k] = (place){own[k], k};
    qsort(places, n, sizeof *places, falling);
    for (uint64_t k = 0; k < n; k++)
        order[k] = places[k].column;
    qc_free(places);
    return QC_OK;
}

qc_status qc_feedback_raise(double *damping, qc_feedback_info *info, qc_error *err)
{
    if (*damping >= 1.0)
        QC_FAIL(err, QC_ERR_INPUT,
                "the second moments have no factor, even with a damping of %g, so they are not "
                "those of any inputs",
                *damping);
    *damping = *damping * 10.0 < 1.0 ? *damping * 10.0 : 1.0;
    info->times_raised++;
    return QC_OK;
}

double qc_feedback_scale(double mean)
{
    return ldexp(1.0, -ilogb(mean));
}

qc_status qc_feedback_check(uint64_t n, const qc_feedback_options *options, qc_error *err)
{
    if (n == 0 || n > QC_BLAS_MOST / QC_FEEDBACK_ROWS)
        QC_FAIL(err, QC_ERR_SHAPE, "second moments of %" PRIu64 " inputs: expected 1 to %u inputs",
                n, QC_BLAS_MOST / QC_FEEDBACK_ROWS);
    if (!(options->damping > 0.0) || !isfinite(options->damping))
        QC_FAIL(err, QC_ERR_USAGE, "damping: expected a finite number above 0, found %g",
                options->damping);
    return QC_OK;
}

static double anchor(const opening *o, uint64_t k)
{
    return qc_feedback_anchor(o->own[k], o->h_mean);
}

/* Tries the damping that was asked for, then ten times as much each time, and at last the most
 * there is. */
static qc_status factor(opening *o, qc_feedback_info *info, qc_error *err)
{
    const uint64_t n = o->f->n;
    double damping = o->f->options.damping;
    int exists = 0;
    for (;;) {
        for (uint64_t k = 0; k < n; k++)
            o->h[k * n + k] = o->own[k] + (o->own[k] > 0.0 ? damping * anchor(o, k) : 0.0);
        QC_TRY(qc_factor_make(o->factor, o->h_mean, &exists, err));
        if (exists)
            break;
        QC_TRY(qc_feedback_raise(&damping, info, err));
    }
    info->damping = o->damping = damping;
    return QC_OK;
}

static qc_status open_target(opening *o, qc_error *err)
{
    qc_feedback *f = o->f;
    QC_TRY(qc_malloc_aligned((void **)&f->m, 64, f->n * f->n * sizeof(float), err));
    for (uint64_t k = 0; k < f->n; k++) /* a dead column's target is its weights */
        o->c[k * f->n + k] += f->inverse[k] == 0.0f ? o->h_mean : o->damping * anchor(o, k);
    QC_TRY(qc_malloc_aligned((void **)&o->strips, 64, f->n * STRIP * f->threads * sizeof *o->strips,
                             err));
    qc_status st = qc_piecework(f->threads, qc_ceil_div_u64(f->n, STRIP), arrange, o, err);
    qc_free(o->strips);
    QC_TRY(st);
    QC_TRY(qc_factor_solve(o->factor, o->c, err));
    return qc_piecework(f->threads, pieces(f), narrow, o, err);
}

static qc_status open_with(opening *o, qc_feedback_info *info, qc_error *err)
{
    qc_feedback *f = o->f;
    const uint64_t n = f->n;
    QC_TRY(qc_piecework(f->threads, pieces(f), look, o, err));
    for (uint64_t i = 0; i < pieces(f); i++)
        if (o->row_is[i] != 0.0 || isnan(o->row_is[i]))
            return qc_feedback_odd(i * ROWS, end_of(f, i), err);
    for (uint64_t k = 0; k < n; k++) { /* inverse says for now which columns are dead */
        o->own[k] = o->h[k * n + k];
        f->inverse[k] = o->own[k] == 0.0 ? 0.0f : 1.0f;
    }
    QC_TRY(qc_feedback_look_at_diagonal(o->own, n, f->order, &o->h_mean, &info->dead, err));
    QC_TRY(qc_piecework(f->threads, pieces(f), bury, o, err));
    QC_TRY(factor(o, info, err));
    f->scale = qc_feedback_scale(o->h_mean);
    QC_TRY(qc_piecework(f->threads, pieces(f), fill, o, err));
    for (uint64_t k = 0; k < n; k++)
        if (f->inverse[k] != 0.0f) {
            const float x = f->hu[k * n + k];
            f->inverse[k] = x > 0x1p-100f ? 1.0f / x : 0.0f;
        }
    return o->c ? open_target(o, err) : QC_OK;
}

qc_status qc_feedback_open(qc_feedback **out, const qc_blas *b, unsigned threads, uint64_t n,
                           double *h, double *c, const qc_feedback_options *options,
                           qc_feedback_info *info, qc_error *err)
{
    qc_feedback *f = NULL;
    qc_feedback_info local = {0};
    qc_factor made = {
        .b = b, .threads = threads, .n = n, .tiles = qc_ceil_div_u64(n, QC_FACTOR_TILE), .h = h};
    opening o = {.factor = &made, .h = h, .c = c};
    void *row_is = NULL, *diagonal = NULL, *own = NULL;
    qc_status st;
    *out = NULL;
    QC_TRY(qc_feedback_check(n, options, err));
    QC_TRY(qc_calloc((void **)&f, 1, sizeof *f, err));
    *f = (qc_feedback){.b = b, .threads = threads, .n = n, .options = *options};
    o.f = f;
    QC_TRY_GOTO(st, done, qc_isa_select(&f->isa, err));
    f->lanes = qc_feedback_lanes_for(f->isa);
    QC_TRY_GOTO(st, done, qc_malloc_aligned((void **)&f->hu, 64, n * n * sizeof(float), err));
    QC_TRY_GOTO(st, done, qc_calloc((void **)&f->order, n, sizeof *f->order, err));
    made.order = f->order;
    QC_TRY_GOTO(st, done, qc_malloc_aligned((void **)&f->d, 64, n * sizeof(float), err));
    QC_TRY_GOTO(st, done, qc_malloc_aligned((void **)&f->inverse, 64, n * sizeof(float), err));
    QC_TRY_GOTO(st, done, qc_calloc(&row_is, pieces(f), sizeof(double), err));
    QC_TRY_GOTO(st, done,
                qc_malloc_aligned(
                    &diagonal, 64,
                    (made.tiles + 1) * QC_FACTOR_TILE * QC_FACTOR_TILE * sizeof(double), err));
    QC_TRY_GOTO(st, done, qc_calloc(&own, (size_t)n, sizeof(double), err));
    o.row_is = row_is;
    o.own = own;
    made.diagonal = diagonal;
    QC_TRY_GOTO(st, done, open_with(&o, &local, err));
done:
    qc_free(own);
    qc_free(diagonal);
    qc_free(row_is);
    if (st != QC_OK) {
        qc_feedback_close(f);
        return st;
    }
    if (info)
        *info = local;
    *out = f;
    return QC_OK;
}

void qc_feedback_close(qc_feedback *f)
{
    if (!f)
        return;
    qc_free(f->order);
    qc_free(f->hu);
    qc_free(f->d);
    qc_free(f->inverse);
    qc_free(f->m);
    qc_free(f);
}

double qc_feedback_damping(uint64_t n, uint64_t tokens)
{
    const double damping = 0.1 + 4.0 * (double)n / (double)(tokens ? tokens : 1);
    return damping < 2.0 ? damping : 2.0;
}

double qc_feedback_outputs_damping(uint64_t block, uint64_t tokens)
{
    return 0.1 + 4.0 * (double)block / (double)qc_max_u64(tokens, 1);
}

uint64_t qc_feedback_open_bytes(uint64_t n, int cross)
{
    const uint64_t square = qc_sat_mul(qc_sat_mul(n, n), sizeof(float));
    const uint64_t tiles = qc_sat_add(qc_ceil_div_u64(n, QC_FACTOR_TILE), 1);
    uint64_t bytes = qc_sat_mul(tiles, QC_FACTOR_TILE * QC_FACTOR_TILE * sizeof(double));
    bytes = qc_sat_add(bytes, qc_sat_mul(square, cross ? 2 : 1));
    return qc_sat_add(bytes, qc_sat_add(qc_sat_mul(n, 48), 4096));
}

double qc_feedback_open_flops(uint64_t n, int cross)
{
    const double cube = (double)n * (double)n * (double)n;
    return cube / 3.0 + (cross ? 2.0 * cube : 0.0);
}
