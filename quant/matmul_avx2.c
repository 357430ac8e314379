/* The AVX2 tile. Lanes 0 to 7 go first and lanes 8 to 15 then. So 4 rows of W by 3 of x are 12 sums
 * in as many registers, and 8 lanes of k take 4 loads of W, 3 of x and 12 fused products. Both
 * halves at once would leave room for 2 rows by 2, with a load for each product: that is what loads
 * can deliver at best. A lane without a product in the last step keeps its bits. */
#include "quant/matmul_internal.h"
#include "quant/quant_avx2_internal.h"

#define BLOCK_W 4u
#define BLOCK_X 3u
#define HALF    8u /* lanes */

/* Sums of four vectors of 8 lanes, each l and l + 4, l and l + 2, 0 and 1: the end of qc_fold16. */
QC_INLINE __m128 fold4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    const __m256 ab =
        _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd =
        _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    const __m256 acbd =
        _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    const __m256 sums = _mm256_add_ps(acbd, _mm256_movehdup_ps(acbd)); /* a . c . b . d . */
    const __m128 ac = _mm256_castps256_ps128(sums), bd = _mm256_extractf128_ps(sums, 1);
    return _mm_blend_ps(ac, _mm_moveldup_ps(bd), 0xa);
}

/* Folds the sums of one row of x with `rows` of W. low: their first halves, from row to row. */
QC_INLINE void store_sums(const float *low, __m256 (*high)[BLOCK_X], unsigned b, unsigned rows,
                          float *sums)
{
    __m256 v[BLOCK_W];
    for (unsigned a = 0; a < BLOCK_W; a++)
        v[a] = a < rows
                   ? _mm256_add_ps(_mm256_load_ps(low + a * QC_MATMUL_GROUP * QC_LANES), high[a][b])
                   : _mm256_setzero_ps();
    const __m128 folded = fold4(v[0], v[1], v[2], v[3]);
    if (rows == BLOCK_W)
        _mm_storeu_ps(sums, folded);
    else
        _mm_store_ss(sums, folded);
}

/* One half of the lanes of rows r to r + rows of W (all 4, or 1) and i to i + m of x. The counts
 * are constants, so that the sums stay in registers. */
QC_INLINE void half_block(const qc_matmul_tile *t, unsigned r, unsigned rows, unsigned i,
                          unsigned m, unsigned half)
{
    const float *w = t->w + r * t->stride + half * HALF;
    const float *x = t->x + i * QC_MATMUL_STEP + half * HALF;
    float *lanes = t->lanes + (r * QC_MATMUL_GROUP + i) * QC_LANES + half * HALF;
    __m256 acc[BLOCK_W][BLOCK_X], xv[BLOCK_X];
    for (unsigned a = 0; a < rows; a++)
        for (unsigned b = 0; b < m; b++)
            acc[a][b] = t->is_first ? _mm256_setzero_ps()
                                    : _mm256_load_ps(lanes + (a * QC_MATMUL_GROUP + b) * QC_LANES);
    unsigned c = 0;
    for (; c + QC_LANES <= t->k; c += QC_LANES) {
        for (unsigned b = 0; b < m; b++)
            xv[b] = _mm256_load_ps(x + b * QC_MATMUL_STEP + c);
        for (unsigned a = 0; a < rows; a++) {
            const __m256 wv = _mm256_load_ps(w + a * t->stride + c);
            for (unsigned b = 0; b < m; b++)
                acc[a][b] = _mm256_fmadd_ps(wv, xv[b], acc[a][b]);
        }
    }
    const __m256i left = qc_lanes_below((int)(t->k - c) - (int)(half * HALF));
    for (unsigned a = 0; c < t->k && a < rows; a++) {
        const __m256 wv = _mm256_maskload_ps(w + a * t->stride + c, left);
        for (unsigned b = 0; b < m; b++) {
            const __m256 one = _mm256_maskload_ps(x + b * QC_MATMUL_STEP + c, left);
            acc[a][b] = _mm256_blendv_ps(acc[a][b], _mm256_fmadd_ps(wv, one, acc[a][b]),
                                         _mm256_castsi256_ps(left));
        }
    }
    for (unsigned b = 0; b < m; b++) {
        for (unsigned a = 0; (half == 0 || !t->is_last) && a < rows; a++)
            _mm256_store_ps(lanes + (a * QC_MATMUL_GROUP + b) * QC_LANES, acc[a][b]);
        if (half == 1 && t->is_last)
            store_sums(lanes + b * QC_LANES - HALF, acc, b, rows,
                       t->sums + (i + b) * QC_MATMUL_PANEL + r);
    }
}

QC_INLINE void block(const qc_matmul_tile *t, unsigned r, unsigned rows, unsigned i, unsigned m)
{
    half_block(t, r, rows, i, m, 0);
    half_block(t, r, rows, i, m, 1);
}

QC_INLINE void sweep(const qc_matmul_tile *t, unsigned r, unsigned rows)
{
    unsigned i = 0;
    for (; i + BLOCK_X <= t->m; i += BLOCK_X)
        block(t, r, rows, i, BLOCK_X);
    for (; i < t->m; i++)
        block(t, r, rows, i, 1);
}

static void tile(const qc_matmul_tile *t)
{
    unsigned r = 0;
    for (; r + BLOCK_W <= t->rows; r += BLOCK_W)
        sweep(t, r, BLOCK_W);
    for (; r < t->rows; r++)
        sweep(t, r, 1);
}

const qc_matmul_ops qc_matmul_ops_avx2 = {QC_ISA_AVX2, tile, 4 * BLOCK_X, &qc_quant_ops_avx2,
                                          qc_matmul_double_lanes};
/* Vectors of 64 bytes were 1.07 times as fast: decisions/0031. */
const qc_matmul_ops qc_matmul_ops_avx512 = {QC_ISA_AVX512, tile, 4 * BLOCK_X, &qc_quant_ops_avx512,
                                            qc_matmul_double_lanes};
