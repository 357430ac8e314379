/* The AVX2 tile: 16 lanes of a sum are two registers.
 *
 * 2 rows of W by 2 of x are 4 sums in 8 registers; 16 k take 4 loads of W, 4 of x and 8 fused
 * products. Tails are copied behind zeros, and a lane without a
 * product is put back as it was. */
#include "quant/matmul_internal.h"

#include "quant/quant_avx2_internal.h"

#include <string.h>

#define BLOCK 2u

typedef struct {
    __m256 low, high;
} lanes;

QC_INLINE lanes load(const float *at)
{
    return (lanes){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}

QC_INLINE float fold(lanes v)
{
    __m256 a = _mm256_add_ps(v.low, v.high);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* All ones in the lanes below n. */
QC_INLINE __m256 lanes_below(int n)
{
    return _mm256_castsi256_ps(
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}

/* Rows r of W and i of x to r + rows and i + m: constants, so that the sums stay in registers. */
QC_INLINE void block(const qc_matmul_tile *t, unsigned r, unsigned rows, unsigned i, unsigned m)
{
    const float *w = t->w + r * t->stride, *x = t->x + i * QC_MATMUL_STEP;
    float *between = t->lanes + (r * QC_MATMUL_GROUP + i) * QC_LANES;
    lanes acc[BLOCK][BLOCK];
    for (unsigned a = 0; a < rows; a++)
        for (unsigned b = 0; b < m; b++)
            acc[a][b] = t->first ? (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()}
                                 : load(between + (a * QC_MATMUL_GROUP + b) * QC_LANES);
    unsigned c = 0;
    for (; c + 16 <= t->k; c += 16) {
        lanes v[BLOCK];
        for (unsigned a = 0; a < rows; a++)
            v[a] = load(w + a * t->stride + c);
        for (unsigned b = 0; b < m; b++) {
            lanes xv = load(x + b * QC_MATMUL_STEP + c);
            for (unsigned a = 0; a < rows; a++) {
                acc[a][b].low = _mm256_fmadd_ps(v[a].low, xv.low, acc[a][b].low);
                acc[a][b].high = _mm256_fmadd_ps(v[a].high, xv.high, acc[a][b].high);
            }
        }
    }
    if (c < t->k) {
        int left = (int)(t->k - c);
        size_t bytes = (size_t)(t->k - c) * sizeof(float);
        __m256 low = lanes_below(left), high = lanes_below(left - 8);
        for (unsigned b = 0; b < m; b++) {
            float tail[16] = {0.0f};
            memcpy(tail, x + b * QC_MATMUL_STEP + c, bytes);
            lanes xv = load(tail);
            for (unsigned a = 0; a < rows; a++) {
                float values[16] = {0.0f};
                memcpy(values, w + a * t->stride + c, bytes);
                lanes wv = load(values);
                __m256 p = _mm256_fmadd_ps(wv.low, xv.low, acc[a][b].low);
                __m256 q = _mm256_fmadd_ps(wv.high, xv.high, acc[a][b].high);
                acc[a][b].low = _mm256_blendv_ps(acc[a][b].low, p, low);
                acc[a][b].high = _mm256_blendv_ps(acc[a][b].high, q, high);
            }
        }
    }
    for (unsigned a = 0; a < rows; a++)
        for (unsigned b = 0; b < m; b++) {
            float *to = between + (a * QC_MATMUL_GROUP + b) * QC_LANES;
            if (t->last) {
                t->sums[(i + b) * QC_MATMUL_PANEL + r + a] = fold(acc[a][b]);
                continue;
            }
            _mm256_storeu_ps(to, acc[a][b].low);
            _mm256_storeu_ps(to + 8, acc[a][b].high);
        }
}

QC_INLINE void sweep(const qc_matmul_tile *t, unsigned r, unsigned rows)
{
    unsigned i = 0;
    for (; i + BLOCK <= t->m; i += BLOCK)
        block(t, r, rows, i, BLOCK);
    if (i < t->m)
        block(t, r, rows, i, 1);
}

static void tile(const qc_matmul_tile *t)
{
    unsigned r = 0;
    for (; r + BLOCK <= t->rows; r += BLOCK)
        sweep(t, r, BLOCK);
    if (r < t->rows)
        sweep(t, r, 1);
}

static void quantized(const qc_weights *w, uint64_t first, uint64_t count,
                      const qc_matmul_cpu_io *io, void *scratch)
{
    qc_matmul_quantized(tile, &qc_quant_ops_avx2, w, first, count, io, scratch);
}

static void dense(const void *w, qc_dtype w_dtype, uint64_t k, uint64_t first, uint64_t count,
                  const qc_matmul_cpu_io *io, void *scratch)
{
    qc_matmul_dense_rows(tile, &qc_quant_ops_avx2, w, w_dtype, k, first, count, io, scratch);
}

const qc_matmul_ops qc_matmul_ops_avx2 = {QC_ISA_AVX2, quantized, dense, qc_matmul_double_lanes};
