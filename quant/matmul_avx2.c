/* The AVX2 tile: 16 lanes of a sum are two registers.
 *
 * 2 rows of W by 2 of x are 4 sums in 8 registers; each step of 16 k takes 4 loads of W, 4 of x
 * (widened on the way) and 8 fused products. Tails are copied behind zeros, and a lane without a
 * product is put back as it was. */
#include "quant/matmul_parts.h"

#include "quant/quant_avx2_common.h"

#include <string.h>

#define BLOCK 2u

typedef struct {
    __m256 low, high;
} lanes;

QC_INLINE uint64_t bytes_of(qc_dtype dtype)
{
    return dtype == QC_DTYPE_F32 ? 4 : 2;
}

QC_INLINE __m256 half_of_bf16(const unsigned char *x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(qc_load_half(x)), 16));
}

QC_INLINE lanes load(const unsigned char *x, qc_dtype dtype)
{
    if (dtype == QC_DTYPE_F32)
        return (lanes){_mm256_castsi256_ps(qc_load(x)), _mm256_castsi256_ps(qc_load(x + 32))};
    if (dtype == QC_DTYPE_F16)
        return (lanes){_mm256_cvtph_ps(qc_load_half(x)), _mm256_cvtph_ps(qc_load_half(x + 16))};
    return (lanes){half_of_bf16(x), half_of_bf16(x + 16)};
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

QC_INLINE void block(const float *w, uint64_t stride, unsigned rows, const unsigned char *x,
                     qc_dtype dtype, uint64_t x_bytes, unsigned m, uint64_t k, float *sums)
{
    const uint64_t each = bytes_of(dtype);
    lanes acc[BLOCK][BLOCK];
    for (unsigned r = 0; r < rows; r++)
        for (unsigned i = 0; i < m; i++)
            acc[r][i] = (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()};
    uint64_t c = 0;
    for (; c + 16 <= k; c += 16) {
        lanes v[BLOCK];
        for (unsigned r = 0; r < rows; r++)
            v[r] =
                (lanes){_mm256_load_ps(w + r * stride + c), _mm256_load_ps(w + r * stride + c + 8)};
        for (unsigned i = 0; i < m; i++) {
            lanes xv = load(x + i * x_bytes + c * each, dtype);
            for (unsigned r = 0; r < rows; r++) {
                acc[r][i].low = _mm256_fmadd_ps(v[r].low, xv.low, acc[r][i].low);
                acc[r][i].high = _mm256_fmadd_ps(v[r].high, xv.high, acc[r][i].high);
            }
        }
    }
    if (c < k) {
        int left = (int)(k - c);
        __m256 low = lanes_below(left), high = lanes_below(left - 8);
        for (unsigned i = 0; i < m; i++) {
            unsigned char tail[64] = {0};
            memcpy(tail, x + i * x_bytes + c * each, (size_t)((k - c) * each));
            lanes xv = load(tail, dtype);
            for (unsigned r = 0; r < rows; r++) {
                float values[16] = {0.0f};
                memcpy(values, w + r * stride + c, (size_t)(k - c) * sizeof *values);
                __m256 a = _mm256_fmadd_ps(_mm256_loadu_ps(values), xv.low, acc[r][i].low);
                __m256 b = _mm256_fmadd_ps(_mm256_loadu_ps(values + 8), xv.high, acc[r][i].high);
                acc[r][i].low = _mm256_blendv_ps(acc[r][i].low, a, low);
                acc[r][i].high = _mm256_blendv_ps(acc[r][i].high, b, high);
            }
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
    uint64_t x_bytes = ldx * bytes_of(dtype);
    unsigned i = 0;
    for (; i + BLOCK <= m; i += BLOCK)
        block(w, stride, rows, x + i * x_bytes, dtype, x_bytes, BLOCK, k, sums + i);
    if (i < m)
        block(w, stride, rows, x + i * x_bytes, dtype, x_bytes, 1, k, sums + i);
}

QC_INLINE void by_rows(const float *w, uint64_t stride, unsigned rows, const void *x,
                       qc_dtype dtype, uint64_t ldx, unsigned m, uint64_t k, float *sums)
{
    unsigned r = 0;
    for (; r + BLOCK <= rows; r += BLOCK)
        sweep(w + r * stride, stride, BLOCK, x, dtype, ldx, m, k, sums + r * QC_MATMUL_GROUP);
    if (r < rows)
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
    qc_matmul_quantized(tile, &qc_quant_ops_avx2, w, first, count, io, scratch);
}

static void dense(const void *w, qc_dtype w_dtype, uint64_t k, uint64_t first, uint64_t count,
                  const qc_matmul_cpu_io *io, void *scratch)
{
    qc_matmul_dense_rows(tile, &qc_quant_ops_avx2, w, w_dtype, k, first, count, io, scratch);
}

const qc_matmul_ops qc_matmul_ops_avx2 = {QC_ISA_AVX2, quantized, dense, qc_matmul_double_lanes};
