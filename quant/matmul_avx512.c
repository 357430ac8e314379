/* The AVX-512 tile: 16 lanes of a sum are one register.
 *
 * 4 rows of W by 4 of x are 16 sums; each step of 16 k takes 4 loads of W, 4 of x (widened on the
 * way) and 16 fused products. Tails go through masks: a lane without a product keeps its bits. */
#include "quant/matmul_parts.h"

#include "quant/quant_avx512_common.h"

#define BLOCK 4u

/* n (1 to 16) elements at x, the rest zero. */
QC_INLINE __m512 load(const unsigned char *x, qc_dtype dtype, __mmask16 mask)
{
    if (dtype == QC_DTYPE_F32)
        return _mm512_maskz_loadu_ps(mask, x);
    __m256i half = _mm256_maskz_loadu_epi16(mask, x);
    if (dtype == QC_DTYPE_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

QC_INLINE float fold(__m512 v)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

QC_INLINE void block(const float *w, uint64_t stride, unsigned rows, const unsigned char *x,
                     qc_dtype dtype, uint64_t x_bytes, unsigned m, uint64_t k, float *sums)
{
    const uint64_t each = qc_element_bytes(dtype);
    __m512 acc[BLOCK][BLOCK];
    for (unsigned r = 0; r < rows; r++)
        for (unsigned i = 0; i < m; i++)
            acc[r][i] = _mm512_setzero_ps();
    uint64_t c = 0;
    for (; c + 16 <= k; c += 16) {
        __m512 v[BLOCK];
        for (unsigned r = 0; r < rows; r++)
            v[r] = _mm512_load_ps(w + r * stride + c);
        for (unsigned i = 0; i < m; i++) {
            __m512 xv = load(x + i * x_bytes + c * each, dtype, 0xffff);
            for (unsigned r = 0; r < rows; r++)
                acc[r][i] = _mm512_fmadd_ps(v[r], xv, acc[r][i]);
        }
    }
    if (c < k) {
        __mmask16 mask = (__mmask16)((1u << (k - c)) - 1);
        for (unsigned i = 0; i < m; i++) {
            __m512 xv = load(x + i * x_bytes + c * each, dtype, mask);
            for (unsigned r = 0; r < rows; r++)
                acc[r][i] = _mm512_mask3_fmadd_ps(_mm512_maskz_load_ps(mask, w + r * stride + c),
                                                  xv, acc[r][i], mask);
        }
    }
    for (unsigned r = 0; r < rows; r++)
        for (unsigned i = 0; i < m; i++)
            sums[r * QC_MATMUL_GROUP + i] = fold(acc[r][i]);
}

/* The counts as constants, so that the sums stay in registers. */
QC_INLINE void sweep(const float *w, uint64_t stride, unsigned rows, const unsigned char *x,
                     qc_dtype dtype, uint64_t ldx, unsigned m, uint64_t k, float *sums)
{
    uint64_t x_bytes = ldx * qc_element_bytes(dtype);
    unsigned i = 0;
    for (; i + BLOCK <= m; i += BLOCK)
        block(w, stride, rows, x + i * x_bytes, dtype, x_bytes, BLOCK, k, sums + i);
    for (; i < m; i++)
        block(w, stride, rows, x + i * x_bytes, dtype, x_bytes, 1, k, sums + i);
}

QC_INLINE void by_rows(const float *w, uint64_t stride, unsigned rows, const void *x,
                       qc_dtype dtype, uint64_t ldx, unsigned m, uint64_t k, float *sums)
{
    if (rows == BLOCK) {
        sweep(w, stride, BLOCK, x, dtype, ldx, m, k, sums);
        return;
    }
    for (unsigned r = 0; r < rows; r++)
        sweep(w + r * stride, stride, 1, x, dtype, ldx, m, k, sums + r * QC_MATMUL_GROUP);
}

static void tile(const float *w, uint64_t stride, unsigned rows, const void *x, qc_dtype x_dtype,
                 uint64_t ldx, unsigned m, uint64_t k, float *sums)
{
    if (x_dtype == QC_DTYPE_F32)
        by_rows(w, stride, rows, x, QC_DTYPE_F32, ldx, m, k, sums);
    else if (x_dtype == QC_DTYPE_F16)
        by_rows(w, stride, rows, x, QC_DTYPE_F16, ldx, m, k, sums);
    else
        by_rows(w, stride, rows, x, QC_DTYPE_BF16, ldx, m, k, sums);
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
