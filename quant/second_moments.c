/* Tiles of H and C, dealt to threads. A tile of X^T X over QC_MOMENT_TOKENS tokens is one product
 * of OpenBLAS. */
#include "quant/second_moments.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "quant/blas_internal.h"
#include "quant/piecework.h"

#include <inttypes.h>

/* Returns the size of a tile, which depends on n alone: there are enough tiles for some threads,
 * and each is large enough for a fast product. */
static uint64_t tile_of(uint64_t n)
{
    return n <= 256 ? 64 : n <= 1024 ? 128 : n <= 2048 ? 256 : 512;
}

typedef struct {
    const qc_blas *b;
    double *h, *c;
    const float *x, *z;
    uint64_t n, ldx, ldz, tokens;
    uint64_t tile, across, triangle; /* tiles in a row; of H */
    float *scratch;                  /* a tile per thread */
} moments;

/* Makes sums[i][j] += part[i][j]; of a tile on the diagonal, only what lies on or below the
 * diagonal counts. */
static void add_tile(double *sums, uint64_t ld, const float *part, uint64_t rows, uint64_t cols,
                     int diagonal)
{
    for (uint64_t i = 0; i < rows; i++) {
        const uint64_t count = diagonal ? i + 1 : cols;
        for (uint64_t j = 0; j < count; j++)
            sums[i * ld + j] += (double)part[i * cols + j];
    }
}

static qc_status one_tile(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const moments *m = ctx;
    const int cross = piece >= m->triangle;
    uint64_t row, col;
    (void)err;
    if (cross) {
        row = (piece - m->triangle) / m->across;
        col = (piece - m->triangle) % m->across;
    } else {
        for (row = 0; piece > row; row++)
            piece -= row + 1;
        col = piece;
    }
    const uint64_t i = row * m->tile, j = col * m->tile;
    const uint64_t rows = qc_min_u64(m->n - i, m->tile);
    const uint64_t cols = qc_min_u64(m->n - j, m->tile);
    const float *right = cross ? m->z : m->x;
    const uint64_t ld = cross ? m->ldz : m->ldx;
    float *part = m->scratch + thread * m->tile * m->tile;
    double *sums = (cross ? m->c : m->h) + i * m->n + j;
    for (uint64_t t = 0; t < m->tokens; t += QC_MOMENT_TOKENS) {
        const uint64_t left = m->tokens - t;
        const uint64_t count = qc_min_u64(left, QC_MOMENT_TOKENS);
        m->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_TRANS, QC_BLAS_PLAIN, (int)rows, (int)cols, (int)count,
                      1.0f, m->x + t * m->ldx + i, (int)m->ldx, right + t * ld + j, (int)ld, 0.0f,
                      part, (int)cols);
        add_tile(sums, m->n, part, rows, cols, !cross && row == col);
    }
    return QC_OK;
}

qc_status qc_moments_add(const qc_blas *b, unsigned threads, double *h, double *c, uint64_t n,
                         const float *x, uint64_t ldx, const float *z, uint64_t ldz,
                         uint64_t tokens, qc_error *err)
{
    if (n == 0 || tokens == 0)
        return QC_OK;
    if (n > QC_BLAS_MOST || ldx > QC_BLAS_MOST || (c && ldz > QC_BLAS_MOST))
        QC_FAIL(err, QC_ERR_SHAPE,
                "second moments: expected at most %u inputs, in rows at most as far apart, found "
                "%" PRIu64 " in rows %" PRIu64 " apart",
                QC_BLAS_MOST, n, ldx > ldz ? ldx : ldz);
    const uint64_t tile = tile_of(n), across = qc_ceil_div_u64(n, tile);
    const uint64_t triangle = across * (across + 1) / 2;
    moments m = {b, h, c, x, z, n, ldx, ldz, tokens, tile, across, triangle, NULL};
    void *scratch = NULL;
    QC_TRY(qc_malloc_aligned(&scratch, 64, threads * tile * tile * sizeof(float), err));
    m.scratch = scratch;
    qc_status st = qc_piecework(threads, triangle + (c ? across * across : 0), one_tile, &m, err);
    qc_free(scratch);
    return st;
}
