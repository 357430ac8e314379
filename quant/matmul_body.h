/* The body of matmul_avx2.c and matmul_avx512.c. It defines the table QC_MATMUL_TABLE of the
 * instruction set QC_MATMUL_ISA, whose other operations are QC_MATMUL_QUANT_OPS. It has no include
 * guard, because each of them includes it once.
 *
 * QC_MATMUL_BLOCK rows of W by as many of x are summed in registers. A lane without a product in
 * the last step keeps its bits. */
#include "quant/matmul_internal.h"
#include "quant/quant_wide.h"

#define BLOCK QC_MATMUL_BLOCK

/* Rows r to r + rows of W and i to i + m of x. The counts are constants, so that the sums stay in
 * registers. */
QC_INLINE void block(const qc_matmul_tile *t, unsigned r, unsigned rows, unsigned i, unsigned m)
{
    const float *w = t->w + r * t->stride, *x = t->x + i * QC_MATMUL_STEP;
    float *between = t->lanes + (r * QC_MATMUL_GROUP + i) * QC_LANES;
    qc_wide acc[BLOCK][BLOCK];
    for (unsigned a = 0; a < rows; a++)
        for (unsigned b = 0; b < m; b++)
            acc[a][b] = t->first ? qc_wide_all(0.0f)
                                 : qc_wide_load(between + (a * QC_MATMUL_GROUP + b) * QC_LANES);
    unsigned c = 0;
    for (; c + 16 <= t->k; c += 16) {
        qc_wide v[BLOCK];
        for (unsigned a = 0; a < rows; a++)
            v[a] = qc_wide_load(w + a * t->stride + c);
        for (unsigned b = 0; b < m; b++) {
            qc_wide xv = qc_wide_load(x + b * QC_MATMUL_STEP + c);
            for (unsigned a = 0; a < rows; a++)
                acc[a][b] = qc_wide_fma(v[a], xv, acc[a][b]);
        }
    }
    const unsigned left = t->k - c;
    for (unsigned b = 0; left > 0 && b < m; b++) {
        qc_wide xv = qc_wide_load_below(x + b * QC_MATMUL_STEP + c, left);
        for (unsigned a = 0; a < rows; a++) {
            qc_wide wv = qc_wide_load_below(w + a * t->stride + c, left);
            acc[a][b] = qc_wide_fma_below(wv, xv, acc[a][b], left);
        }
    }
    for (unsigned a = 0; a < rows; a++)
        for (unsigned b = 0; b < m; b++) {
            if (t->last)
                t->sums[(i + b) * QC_MATMUL_PANEL + r + a] = qc_wide_fold(acc[a][b]);
            else
                qc_wide_store(between + (a * QC_MATMUL_GROUP + b) * QC_LANES, acc[a][b]);
        }
}

QC_INLINE void sweep(const qc_matmul_tile *t, unsigned r, unsigned rows)
{
    unsigned i = 0;
    for (; i + BLOCK <= t->m; i += BLOCK)
        block(t, r, rows, i, BLOCK);
    for (; i < t->m; i++)
        block(t, r, rows, i, 1);
}

static void tile(const qc_matmul_tile *t)
{
    unsigned r = 0;
    for (; r + BLOCK <= t->rows; r += BLOCK)
        sweep(t, r, BLOCK);
    for (; r < t->rows; r++)
        sweep(t, r, 1);
}

const qc_matmul_ops QC_MATMUL_TABLE = {QC_MATMUL_ISA, tile, &QC_MATMUL_QUANT_OPS,
                                       qc_matmul_double_lanes};
