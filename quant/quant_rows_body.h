/* Row-wise int8: what quant_avx2.c and quant_avx512.c have in common; defines
 * int8_rows_quantize. It has no include guard, because each of them includes it once.
 *
 * There are two passes over a row: one for the largest magnitude (rounding to float16 is monotone,
 * so only the maximum is rounded), then one for codes and error sums, sixteen columns at a time. A
 * bfloat16 is its own float16 from 2^-17 on, and in a row whose absmax is 2^-8 or more a smaller
 * one has code 0 either way. So such rows skip the conversion, as float16 sources do. The largest
 * error is only kept as a number; its column is looked for when a run of 1024 exceeds all runs
 * before. */
#include "quant/quant_half.h"
#include "quant/quant_wide.h"

#include <string.h>

/* Up to 16 elements from i on; zeros behind the first `count`, which are all that exist. */
QC_INLINE qc_wide load_part(const void *src, qc_dtype dtype, uint64_t i, unsigned count)
{
    if (count == 16)
        return qc_wide_read(src, dtype, i);
    unsigned char part[128] = {0};
    const uint64_t element = qc_element_bytes(dtype);
    memcpy(part, (const unsigned char *)src + i * element, count * element);
    return qc_wide_read(part, dtype, 0);
}

QC_INLINE unsigned lanes_at(uint64_t col, uint64_t cols)
{
    return qc_min_u32(cols - col, 16);
}

QC_INLINE uint32_t largest_magnitude(const void *src, qc_dtype dtype, uint64_t first, uint64_t cols)
{
    const uint64_t element = qc_element_bytes(dtype);
    qc_wide_int most = qc_wide_int_all(0);
    uint64_t col = 0;
    for (; col + 16 <= cols; col += 16) {
        qc_prefetch((const unsigned char *)src + (first + col) * element);
        most = qc_wide_larger_bits(most, qc_wide_read(src, dtype, first + col));
    }
    if (col < cols)
        most = qc_wide_larger_bits(most, load_part(src, dtype, first + col, lanes_at(col, cols)));
    return qc_wide_largest_bits(most);
}

typedef struct {
    const void *src;
    int8_t *codes;
    qc_piece_sums *sums;
    float scb, scale;
} row_context;

/* Returns the lowest column in [first, end) whose error is `most`. */
static uint64_t find_error(const row_context *r, qc_dtype dtype, uint64_t first, uint64_t end,
                           float most)
{
    const qc_wide scb = qc_wide_all(r->scb), step = qc_wide_all(QC_INT8_STEP);
    uint64_t i = first;
    for (; i + 16 <= end; i += 16) {
        qc_wide value = qc_wide_mul(qc_wide_mul(qc_wide_of_int8(r->codes + i), scb), step);
        qc_wide e = qc_wide_sub(qc_wide_read(r->src, dtype, i), value);
        uint32_t hit = qc_wide_equal(qc_wide_magnitude(e), qc_wide_all(most));
        if (hit)
            return i + (unsigned)__builtin_ctz(hit);
    }
    for (; i + 1 < end; i++) {
        float x[16];
        qc_wide_store(x, load_part(r->src, dtype, i, 1));
        float e = x[0] - ((float)r->codes[i] * r->scb) * QC_INT8_STEP;
        if ((e < 0 ? -e : e) == most)
            break;
    }
    return i;
}

/* Columns [first, end) of the flattened tensor, at most QC_ROW_FLUSH of one row. */
QC_INLINE void run(const row_context *r, qc_dtype dtype, int convert, uint64_t first, uint64_t end)
{
    const qc_wide scb = qc_wide_all(r->scb), step = qc_wide_all(QC_INT8_STEP);
    const qc_wide scale = qc_wide_all(r->scale);
    qc_wide ee = qc_wide_all(0.0f), xx = ee, most = ee;
    for (uint64_t i = first; i < end; i += 16) {
        unsigned count = lanes_at(i, end);
        qc_wide x = load_part(r->src, dtype, i, count);
        qc_wide h = convert ? qc_wide_through_f16(x) : x;
        qc_wide_int q = qc_wide_round(qc_wide_mul(h, scale));
        if (count == 16) {
            qc_wide_store_int8(r->codes + i, q);
        } else {
            int8_t part[16];
            qc_wide_store_int8(part, q);
            memcpy(r->codes + i, part, count);
        }
        qc_wide value = qc_wide_mul(qc_wide_of_int(q), scb);
        qc_wide e = qc_wide_sub(x, qc_wide_mul(value, step));
        ee = qc_wide_fma(e, e, ee);
        xx = qc_wide_fma(x, x, xx);
        most = qc_wide_larger(most, e);
    }
    r->sums->sum_ee += (double)qc_wide_fold(ee);
    r->sums->sum_xx += (double)qc_wide_fold(xx);
    float largest = qc_wide_largest(most);
    if ((double)largest > r->sums->max_err) {
        r->sums->max_err = (double)largest;
        r->sums->max_index = find_error(r, dtype, first, end, largest);
    }
}

QC_INLINE void runs(const row_context *r, qc_dtype dtype, int convert, uint64_t first,
                    uint64_t cols)
{
    for (uint64_t col = 0; col < cols; col += QC_ROW_FLUSH) {
        uint64_t width = qc_min_u64(cols - col, QC_ROW_FLUSH);
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

static void int8_rows_quantize(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
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
