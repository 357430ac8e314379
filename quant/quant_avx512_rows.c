/* Row-wise int8 with AVX-512.
 *
 * Two passes over a row: the largest magnitude (rounding to float16 is monotone, so only the
 * maximum is rounded), then codes and error sums, 16 columns a vector. A bfloat16 is its own
 * float16 from 2^-17 on, and in a row whose absmax is 2^-8 or more a smaller one has code 0 either
 * way, so such rows skip the conversion, as float16 sources do.
 *
 * Per vector: widen 2, product, add, narrow 2, value 1, two products, e, two fma, range: 12, that
 * is 6 cycles for 32 bytes of bfloat16, besides 1.5 for the first pass. The largest error is only
 * kept as a number; its column is looked for when a run of 1024 beats what came before.
 */
#include "quant/quant_avx512.h"
#include "quant/quant_avx512_internal.h"
#include "quant/quant_half.h"

#include <string.h>

#define MAGIC 0x1.8p23f /* added to |x| < 2^22: the lowest bits are x rounded to an integer */

/* 16 elements from i on, of which `count` exist; zeros for the others */
QC_INLINE __m512 load_part(const void *src, qc_dtype dtype, uint64_t i, unsigned count)
{
    if (count == 16)
        return qc_load16(src, dtype, i);
    unsigned char part[128] = {0};
    const uint64_t element = qc_element_bytes(dtype);
    memcpy(part, (const unsigned char *)src + i * element, count * element);
    return qc_load16(part, dtype, 0);
}

QC_INLINE unsigned lanes_at(uint64_t col, uint64_t cols)
{
    return cols - col < 16 ? (unsigned)(cols - col) : 16;
}

QC_INLINE uint32_t largest_magnitude(const void *src, qc_dtype dtype, uint64_t first, uint64_t cols)
{
    __m512i most = _mm512_setzero_si512(), other = most;
    uint64_t col = 0;
    for (; col + 32 <= cols; col += 32) {
        const uint64_t ahead = (first + col) * qc_element_bytes(dtype) + 8192;
        __m512 a = qc_load16(src, dtype, first + col), b = qc_load16(src, dtype, first + col + 16);
        _mm_prefetch((const unsigned char *)src + ahead, _MM_HINT_T1);
        if (dtype == QC_DTYPE_F32 || dtype == QC_DTYPE_F64)
            _mm_prefetch((const unsigned char *)src + ahead + 64, _MM_HINT_T1);
        most = _mm512_max_epu32(most, qc_magnitude_f32(a));
        other = _mm512_max_epu32(other, qc_magnitude_f32(b));
    }
    for (; col < cols; col += 16) {
        __m512 a = load_part(src, dtype, first + col, lanes_at(col, cols));
        most = _mm512_max_epu32(most, qc_magnitude_f32(a));
    }
    return _mm512_reduce_max_epu32(_mm512_max_epu32(most, other));
}

QC_INLINE __m512 through_f16(__m512 x)
{
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static float fold(__m512 lanes)
{
    float s[QC_LANES];
    _mm512_storeu_ps(s, lanes);
    return qc_fold16(s);
}

typedef struct {
    const void *src;
    int8_t *codes;
    qc_piece_sums *sums;
    float scb, scale;
} row_context;

/* The lowest column of the run whose error is `most`. */
static uint64_t find_error(const row_context *r, qc_dtype dtype, uint64_t first, float most)
{
    const __m512 scb = _mm512_set1_ps(r->scb), step = _mm512_set1_ps(QC_INT8_STEP);
    for (uint64_t i = first;; i += 16) {
        unsigned count = lanes_at(i, first + QC_ROW_FLUSH);
        __m512 x = load_part(r->src, dtype, i, count);
        __m512 q = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(r->codes + i))));
        __m512 e = _mm512_sub_ps(x, _mm512_mul_ps(_mm512_mul_ps(q, scb), step));
        __mmask16 hit = _mm512_cmp_ps_mask(_mm512_abs_ps(e), _mm512_set1_ps(most), _CMP_EQ_OQ);
        if (hit)
            return i + (unsigned)__builtin_ctz(hit);
    }
}

/* As find_error, element by element, where a vector could reach past the end. */
static uint64_t find_error_in_tail(const row_context *r, qc_dtype dtype, uint64_t first,
                                   uint64_t end, float most)
{
    uint64_t i = first;
    for (; i + 1 < end; i++) {
        float x = _mm512_cvtss_f32(load_part(r->src, dtype, i, 1));
        float e = x - ((float)r->codes[i] * r->scb) * QC_INT8_STEP;
        if ((e < 0 ? -e : e) == most)
            break;
    }
    return i;
}

/* Columns [first, end) of the flattened tensor, at most QC_ROW_FLUSH of one row. */
QC_INLINE void run(const row_context *r, qc_dtype dtype, int convert, uint64_t first, uint64_t end)
{
    const __m512 scb = _mm512_set1_ps(r->scb), step = _mm512_set1_ps(QC_INT8_STEP);
    const __m512 scale = _mm512_set1_ps(r->scale), magic = _mm512_set1_ps(MAGIC);
    __m512 ee = _mm512_setzero_ps(), xx = ee, most = ee;
    for (uint64_t i = first; i < end; i += 16) {
        unsigned count = lanes_at(i, end);
        __m512 x = load_part(r->src, dtype, i, count);
        __m512 h = convert ? through_f16(x) : x;
        __m512 q = _mm512_add_ps(_mm512_mul_ps(h, scale), magic);
        __m128i codes = _mm512_cvtepi32_epi8(_mm512_castps_si512(q));
        if (count == 16)
            _mm_storeu_si128((__m128i *)(void *)(r->codes + i), codes);
        else
            _mm_mask_storeu_epi8(r->codes + i, (__mmask16)((1u << count) - 1), codes);
        __m512 value = _mm512_mul_ps(_mm512_sub_ps(q, magic), scb);
        __m512 e = _mm512_sub_ps(x, _mm512_mul_ps(value, step));
        ee = _mm512_fmadd_ps(e, e, ee);
        xx = _mm512_fmadd_ps(x, x, xx);
        most = _mm512_range_ps(most, e, 0x0b); /* larger magnitude, sign cleared */
    }
    r->sums->sum_ee += (double)fold(ee);
    r->sums->sum_xx += (double)fold(xx);
    float largest = _mm512_reduce_max_ps(most);
    if ((double)largest > r->sums->max_err) {
        r->sums->max_err = (double)largest;
        r->sums->max_index = end - first == QC_ROW_FLUSH
                                 ? find_error(r, dtype, first, largest)
                                 : find_error_in_tail(r, dtype, first, end, largest);
    }
}

QC_INLINE void runs(const row_context *r, qc_dtype dtype, int convert, uint64_t first,
                    uint64_t cols)
{
    for (uint64_t col = 0; col < cols; col += QC_ROW_FLUSH) {
        uint64_t width = cols - col < QC_ROW_FLUSH ? cols - col : QC_ROW_FLUSH;
        run(r, dtype, convert, first + col, first + col + width);
    }
}

QC_INLINE void quantize_rows(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                             int8_t *codes, float *scb, qc_piece_sums *sums)
{
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t row = 0; row < rows; row++) {
        const uint64_t first = row * cols;
        uint16_t half = qc_f16_from_f32(qc_f32_of_bits(largest_magnitude(src, dtype, first, cols)));
        if (half >= QC_F16_INF) {
            qc_piece_sums one;
            const uint64_t element = qc_element_bytes(dtype);
            qc_quant_ops_scalar.int8_rows_quantize((const unsigned char *)src + first * element,
                                                   dtype, 1, cols, codes + first, scb + row, &one);
            sums->bad = one.bad;
            sums->bad_index = first + one.bad_index;
            return;
        }
        float absmax = qc_f32_from_f16(half);
        scb[row] = absmax;
        row_context r = {src, codes, sums, absmax,
                         absmax == 0.0f ? 0.0f : (1.0f / absmax) * 127.0f};
        if (dtype == QC_DTYPE_F16 || (dtype == QC_DTYPE_BF16 && absmax >= 0x1p-8f))
            runs(&r, dtype, 0, first, cols);
        else
            runs(&r, dtype, 1, first, cols);
    }
}

void qc_avx512_int8_rows_quantize(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                                  int8_t *codes, float *scb, qc_piece_sums *sums)
{
    if (dtype == QC_DTYPE_BF16)
        quantize_rows(src, QC_DTYPE_BF16, rows, cols, codes, scb, sums);
    else if (dtype == QC_DTYPE_F16)
        quantize_rows(src, QC_DTYPE_F16, rows, cols, codes, scb, sums);
    else if (dtype == QC_DTYPE_F32)
        quantize_rows(src, QC_DTYPE_F32, rows, cols, codes, scb, sums);
    else
        quantize_rows(src, QC_DTYPE_F64, rows, cols, codes, scb, sums);
}
