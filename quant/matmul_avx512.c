/* The AVX-512 tile: 16 lanes of a sum are one register.
 *
 * 4 rows of W by 4 of x are 16 sums; 16 k take 4 loads of W, 4 of x and 16 fused products. Tails go
 * through masks: a lane without a product keeps its bits. */
#include "quant/matmul_internal.h"

#include "quant/quant_avx512_internal.h"

#define BLOCK 4u

QC_INLINE float fold(__m512 v)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* Rows r of W and i of x to r + rows and i + m: constants, so that the sums stay in registers. */
QC_INLINE void block(const qc_matmul_tile *t, unsigned r, unsigned rows, unsigned i, unsigned m)
{
    const float *w = t->w + r * t->stride, *x = t->x + i * QC_MATMUL_STEP;
    float *lanes = t->lanes + (r * QC_MATMUL_GROUP + i) * QC_LANES;
    __m512 acc[BLOCK][BLOCK];
    for (unsigned a = 0; a < rows; a++)
        for (unsigned b = 0; b < m; b++)
            acc[a][b] = t->first ? _mm512_setzero_ps()
                                 : _mm512_load_ps(lanes + (a * QC_MATMUL_GROUP + b) * QC_LANES);
    unsigned c = 0;
    for (; c + 16 <= t->k; c += 16) {
        __m512 v[BLOCK];
        for (unsigned a = 0; a < rows; a++)
            v[a] = _mm512_load_ps(w + a * t->stride + c);
        for (unsigned b = 0; b < m; b++) {
            __m512 xv = _mm512_load_ps(x + b * QC_MATMUL_STEP + c);
            for (unsigned a = 0; a < rows; a++)
                acc[a][b] = _mm512_fmadd_ps(v[a], xv, acc[a][b]);
        }
    }
    if (c < t->k) {
        __mmask16 mask = (__mmask16)((1u << (t->k - c)) - 1);
        for (unsigned b = 0; b < m; b++) {
            __m512 xv = _mm512_maskz_load_ps(mask, x + b * QC_MATMUL_STEP + c);
            for (unsigned a = 0; a < rows; a++)
                acc[a][b] = _mm512_mask3_fmadd_ps(_mm512_maskz_load_ps(mask, w + a * t->stride + c),
                                                  xv, acc[a][b], mask);
        }
    }
    for (unsigned a = 0; a < rows; a++)
        for (unsigned b = 0; b < m; b++) {
            if (t->last)
                t->sums[(i + b) * QC_MATMUL_PANEL + r + a] = fold(acc[a][b]);
            else
                _mm512_store_ps(lanes + (a * QC_MATMUL_GROUP + b) * QC_LANES, acc[a][b]);
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
    if (t->rows == BLOCK) {
        sweep(t, 0, BLOCK);
        return;
    }
    for (unsigned r = 0; r < t->rows; r++)
        sweep(t, r, 1);
}

static void quantized(const qc_weights *w, uint64_t first, uint64_t count,
                      const qc_matmul_cpu_io *io, void *scratch)
{
    qc_matmul_quantized(tile, &qc_quant_ops_avx512, w, first, count, io, scratch);
}

static void dense(const void *w, qc_dtype w_dtype, uint64_t k, uint64_t first, uint64_t count,
                  const qc_matmul_cpu_io *io, void *scratch)
{
    qc_matmul_dense_rows(tile, &qc_quant_ops_avx512, w, w_dtype, k, first, count, io, scratch);
}

const qc_matmul_ops qc_matmul_ops_avx512 = {QC_ISA_AVX512, quantized, dense,
                                            qc_matmul_double_lanes};
