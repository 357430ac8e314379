/* H = R R^T with R upper, and systems with it: blocked, in double, by products of OpenBLAS.
 * Cholesky's algorithm from the last column to the first; tiles are dealt to threads. */
#include "quant/error_feedback_internal.h"

#include "quant/piecework.h"

#include <string.h>

#define TILE QC_FACTOR_TILE

static uint64_t width(const qc_factor *f, uint64_t tile)
{
    const uint64_t left = f->n - tile * TILE;
    return qc_min_u64(left, TILE);
}

static double *diagonal(const qc_factor *f, uint64_t tile)
{
    return f->diagonal + tile * TILE * TILE;
}

static double *above(const qc_factor *f, uint64_t row, uint64_t col)
{
    return f->h + row * TILE * f->n + col * TILE;
}

double qc_factor_at(const qc_factor *f, uint64_t j, uint64_t k)
{
    if (j / TILE == k / TILE)
        return diagonal(f, k / TILE)[j % TILE * TILE + k % TILE];
    return f->h[j * f->n + k];
}

typedef struct {
    qc_factor *f;
    uint64_t step; /* tile on the diagonal */
    double dead;   /* stands for a zero on the diagonal */
} stage;

/* Returns the element of H for the columns at two places. */
static double moment(const qc_factor *f, uint64_t i, uint64_t j)
{
    const uint64_t a = f->order[i], b = f->order[j];
    return a > b ? f->h[a * f->n + b] : f->h[b * f->n + a];
}

/* Copies a row of tiles to above the diagonal, in order, from below it. */
static qc_status mirror(void *ctx, unsigned thread, uint64_t row, qc_error *err)
{
    const stage *s = ctx;
    const qc_factor *f = s->f;
    const uint64_t rows = width(f, row), n = f->n;
    double *to = diagonal(f, row);
    (void)thread;
    (void)err;
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j <= i; j++) {
            const double x = moment(f, row * TILE + i, row * TILE + j);
            to[i * TILE + j] = to[j * TILE + i] = i == j && x == 0.0 ? s->dead : x;
        }
    for (uint64_t col = row + 1; col < f->tiles; col++)
        for (uint64_t i = 0; i < rows; i++)
            for (uint64_t j = 0; j < width(f, col); j++)
                above(f, row, col)[i * n + j] = moment(f, row * TILE + i, col * TILE + j);
    return QC_OK;
}

/* Factors a tile on the diagonal. LAPACK begins with the first column, so it gets rows and columns
 * in reverse. */
static int factor_tile(const qc_factor *f, uint64_t tile, double *reversed)
{
    const uint64_t size = width(f, tile);
    const int count = (int)size, ld = (int)TILE;
    double *r = diagonal(f, tile);
    int info = 0;
    for (uint64_t i = 0; i < size; i++)
        for (uint64_t j = 0; j < size; j++)
            reversed[i * TILE + j] = r[(size - 1 - i) * TILE + size - 1 - j];
    f->b->f.dpotrf("U", &count, reversed, &ld, &info, 1); /* column-major: L in rows */
    if (info != 0)
        return 0;
    for (uint64_t i = 0; i < size; i++)
        for (uint64_t j = 0; j < size; j++)
            r[i * TILE + j] = j < i ? 0.0 : reversed[(size - 1 - i) * TILE + size - 1 - j];
    return 1;
}

/* Makes R_ik = A_ik R_kk^-T. */
static qc_status divide(void *ctx, unsigned thread, uint64_t row, qc_error *err)
{
    const stage *s = ctx;
    const qc_factor *f = s->f;
    (void)thread;
    (void)err;
    f->b->f.dtrsm(QC_BLAS_ROWS, QC_BLAS_RIGHT, QC_BLAS_UPPER, QC_BLAS_TRANS, QC_BLAS_NON_UNIT,
                  (int)TILE, (int)width(f, s->step), 1.0, diagonal(f, s->step), (int)TILE,
                  above(f, row, s->step), (int)f->n);
    return QC_OK;
}

/* Makes A_ij -= R_ik R_jk^T, i <= j < k. */
static qc_status subtract(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const stage *s = ctx;
    const qc_factor *f = s->f;
    uint64_t col = 0;
    (void)thread;
    (void)err;
    for (; piece > col; col++)
        piece -= col + 1;
    const uint64_t row = piece;
    double *to = row == col ? diagonal(f, row) : above(f, row, col);
    f->b->f.dgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, (int)TILE, (int)TILE,
                  (int)width(f, s->step), -1.0, above(f, row, s->step), (int)f->n,
                  above(f, col, s->step), (int)f->n, 1.0, to, row == col ? (int)TILE : (int)f->n);
    return QC_OK;
}

qc_status qc_factor_make(qc_factor *f, double dead, int *exists, qc_error *err)
{
    stage s = {.f = f, .dead = dead};
    *exists = 0;
    QC_TRY(qc_piecework(f->threads, f->tiles, mirror, &s, err));
    for (uint64_t k = f->tiles; k-- > 0;) {
        /* one tile more than there are on the diagonal: room to reverse */
        if (!factor_tile(f, k, diagonal(f, f->tiles)))
            return QC_OK;
        s.step = k;
        QC_TRY(qc_piecework(f->threads, k, divide, &s, err));
        QC_TRY(qc_piecework(f->threads, k * (k + 1) / 2, subtract, &s, err));
    }
    *exists = 1;
    return QC_OK;
}

typedef struct {
    const qc_factor *f;
    double *x;
} systems;

/* Solves for TILE columns of x. */
static qc_status solve_strip(void *ctx, unsigned thread, uint64_t strip, qc_error *err)
{
    const systems *s = ctx;
    const qc_factor *f = s->f;
    const uint64_t n = f->n;
    const int ld = (int)n, cols = (int)width(f, strip);
    double *x = s->x + strip * TILE;
    (void)thread;
    (void)err;
    for (uint64_t k = f->tiles; k-- > 0;) {
        const uint64_t behind = (k + 1) * TILE;
        double *part = x + k * TILE * n;
        if (behind < n)
            f->b->f.dgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, (int)TILE, cols,
                          (int)(n - behind), -1.0, above(f, k, k + 1), ld, x + behind * n, ld, 1.0,
                          part, ld);
        f->b->f.dtrsm(QC_BLAS_ROWS, QC_BLAS_LEFT, QC_BLAS_UPPER, QC_BLAS_PLAIN, QC_BLAS_NON_UNIT,
                      (int)width(f, k), cols, 1.0, diagonal(f, k), (int)TILE, part, ld);
    }
    for (uint64_t k = 0; k < f->tiles; k++) {
        double *part = x + k * TILE * n;
        if (k > 0)
            f->b->f.dgemm(QC_BLAS_ROWS, QC_BLAS_TRANS, QC_BLAS_PLAIN, (int)width(f, k), cols,
                          (int)(k * TILE), -1.0, above(f, 0, k), ld, x, ld, 1.0, part, ld);
        f->b->f.dtrsm(QC_BLAS_ROWS, QC_BLAS_LEFT, QC_BLAS_UPPER, QC_BLAS_TRANS, QC_BLAS_NON_UNIT,
                      (int)width(f, k), cols, 1.0, diagonal(f, k), (int)TILE, part, ld);
    }
    return QC_OK;
}

qc_status qc_factor_solve(const qc_factor *f, double *x, qc_error *err)
{
    systems s = {f, x};
    return qc_piecework(f->threads, f->tiles, solve_strip, &s, err);
}
