/* The AVX-512 tile. 4 rows of W by 4 of x are 16 sums in as many registers; 16 k take 4 loads of W,
 * 4 of x and 16 fused products. A lane without a product in the last step keeps its bits. */
#include "quant/matmul_internal.h"
#include "quant/quant_wide.h"

#define BLOCK 4u

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

const qc_matmul_ops qc_matmul_ops_avx512 = {QC_ISA_AVX512, tile, QC_MATMUL_GROUP,
                                            &qc_quant_ops_avx512, qc_matmul_double_lanes};
