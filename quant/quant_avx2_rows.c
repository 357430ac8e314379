/* Row-wise int8 with AVX2.
 *
 * Two passes over a row: the largest magnitude (rounding to float16 is monotone, so only the
 * maximum is rounded), then codes and error sums, 16 columns as two vectors: lanes 0-7 and 8-15 of
 * the sums. A bfloat16 is its own float16 from 2^-17 on, and in a row whose absmax is 2^-8 or more
 * a smaller one has code 0 either way, so such rows skip the conversion, as float16 sources do.
 *
 * Per vector of 8: widen 2, product, to integer, 2 to narrow, back 1, two products, e, two fma,
 * and, max: 13, that is 35 cycles for 64 columns, besides 11 for the first pass. The largest error
 * is only kept as a number; its column is looked for when a run of 1024 beats what came before.
 */
#include "quant/quant_avx2.h"
#include "quant/quant_avx2_internal.h"
#include "quant/quant_half.h"

#include <string.h>

/* 16 consecutive elements. */
typedef struct {
    __m256 low, high;
} run16;

/* 16 elements from i on, of which `count` exist; zeros for the others */
QC_INLINE run16 load_part(const void *src, qc_dtype dtype, uint64_t i, unsigned count)
{
    if (count == 16)
        return (run16){qc_load8(src, dtype, i), qc_load8(src, dtype, i + 8)};
    unsigned char part[128] = {0};
    const uint64_t element = qc_dtype_bits(dtype) / 8;
    memcpy(part, (const unsigned char *)src + i * element, count * element);
    return (run16){qc_load8(part, dtype, 0), qc_load8(part, dtype, 8)};
}

QC_INLINE unsigned lanes_at(uint64_t col, uint64_t cols)
{
    return cols - col < 16 ? (unsigned)(cols - col) : 16;
}

static uint32_t largest_lane(__m256i v)
{
    uint32_t lanes[8], most = 0;
    qc_store(lanes, v);
    for (unsigned l = 0; l < 8; l++)
        most = lanes[l] > most ? lanes[l] : most;
    return most;
}

QC_INLINE uint32_t largest_magnitude(const void *src, qc_dtype dtype, uint64_t first, uint64_t cols)
{
    const uint64_t element = qc_dtype_bits(dtype) / 8;
    __m256i low = _mm256_setzero_si256(), high = low;
    for (uint64_t col = 0; col < cols; col += 16) {
        qc_prefetch((const unsigned char *)src + (first + col) * element);
        run16 x = load_part(src, dtype, first + col, lanes_at(col, cols));
        low = _mm256_max_epu32(low, qc_magnitude_f32(x.low));
        high = _mm256_max_epu32(high, qc_magnitude_f32(x.high));
    }
    return largest_lane(_mm256_max_epu32(low, high));
}

QC_INLINE __m256 through_f16(__m256 x)
{
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static float fold(__m256 low, __m256 high)
{
    float s[QC_LANES];
    _mm256_storeu_ps(s, low);
    _mm256_storeu_ps(s + 8, high);
    return qc_fold16(s);
}

typedef struct {
    const void *src;
    int8_t *codes;
    qc_piece_sums *sums;
    float scb, scale;
} row_context;

/* The lowest column in [first, end) whose error is `most`. */
static uint64_t find_error(const row_context *r, qc_dtype dtype, uint64_t first, uint64_t end,
                           float most)
{
    const __m256 scb = _mm256_set1_ps(r->scb), step = _mm256_set1_ps(QC_INT8_STEP);
    uint64_t i = first;
    for (; i + 8 <= end; i += 8) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(r->codes + i));
        __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        __m256 x = qc_load8(r->src, dtype, i);
        __m256 e = _mm256_sub_ps(x, _mm256_mul_ps(_mm256_mul_ps(q, scb), step));
        __m256 size = _mm256_castsi256_ps(qc_magnitude_f32(e));
        int hit = _mm256_movemask_ps(_mm256_cmp_ps(size, _mm256_set1_ps(most), _CMP_EQ_OQ));
        if (hit)
            return i + (unsigned)__builtin_ctz((unsigned)hit);
    }
    for (; i + 1 < end; i++) {
        float x = _mm256_cvtss_f32(load_part(r->src, dtype, i, 1).low);
        float e = x - ((float)r->codes[i] * r->scb) * QC_INT8_STEP;
        if ((e < 0 ? -e : e) == most)
            break;
    }
    return i;
}

typedef struct {
    __m256 ee, xx, most; /* most: the largest error so far */
} half_sums;

/* Adds 8 elements whose codes are q. */
QC_INLINE void add_errors(half_sums *t, __m256 x, __m256i q, __m256 scb)
{
    __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(q), scb);
    __m256 e = _mm256_sub_ps(x, _mm256_mul_ps(value, _mm256_set1_ps(QC_INT8_STEP)));
    t->ee = _mm256_fmadd_ps(e, e, t->ee);
    t->xx = _mm256_fmadd_ps(x, x, t->xx);
    t->most = _mm256_max_ps(t->most, _mm256_castsi256_ps(qc_magnitude_f32(e)));
}

QC_INLINE __m128i narrow_codes(__m256i low, __m256i high)
{
    __m256i words = _mm256_packs_epi32(low, high); /* 0-3, 8-11; 4-7, 12-15 */
    __m256i bytes = _mm256_packs_epi16(words, words);
    return _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}

/* Columns [first, end) of the flattened tensor, at most QC_ROW_FLUSH of one row. */
QC_INLINE void run(const row_context *r, qc_dtype dtype, int convert, uint64_t first, uint64_t end)
{
    const __m256 scb = _mm256_set1_ps(r->scb), scale = _mm256_set1_ps(r->scale);
    const __m256 zero = _mm256_setzero_ps();
    half_sums low = {zero, zero, zero}, high = low;
    for (uint64_t i = first; i < end; i += 16) {
        unsigned count = lanes_at(i, end);
        run16 x = load_part(r->src, dtype, i, count), h = x;
        if (convert)
            h = (run16){through_f16(x.low), through_f16(x.high)};
        __m256i q_low = _mm256_cvtps_epi32(_mm256_mul_ps(h.low, scale));
        __m256i q_high = _mm256_cvtps_epi32(_mm256_mul_ps(h.high, scale));
        __m128i codes = narrow_codes(q_low, q_high);
        if (count == 16) {
            qc_store_half(r->codes + i, codes);
        } else {
            int8_t part[16];
            qc_store_half(part, codes);
            memcpy(r->codes + i, part, count);
        }
        add_errors(&low, x.low, q_low, scb);
        add_errors(&high, x.high, q_high, scb);
    }
    r->sums->sum_ee += (double)fold(low.ee, high.ee);
    r->sums->sum_xx += (double)fold(low.xx, high.xx);
    uint32_t most = largest_lane(_mm256_castps_si256(_mm256_max_ps(low.most, high.most)));
    float largest = qc_f32_of_bits(most);
    if ((double)largest > r->sums->max_err) {
        r->sums->max_err = (double)largest;
        r->sums->max_index = find_error(r, dtype, first, end, largest);
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
            const uint64_t element = qc_dtype_bits(dtype) / 8;
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

void qc_avx2_int8_rows_quantize(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
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
