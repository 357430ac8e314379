/* Row-wise int8 and the integers of compressed-tensors, with AVX2.
 *
 * Row-wise int8 takes two passes over a row: one for the largest magnitude (rounding to float16 is
 * monotone, so only the maximum is rounded), then one for codes and error sums, sixteen columns at
 * a time. A bfloat16 is its own float16 from 2^-17 on, and in a row whose absmax is 2^-8 or more a
 * smaller one has code 0 either way. So such rows skip the conversion, as float16 sources do.
 *
 * Integers take sixteen groups at a time: their largest magnitudes, their scales side by side, then
 * their codes and sums.
 *
 * The largest error is only kept as a number. Its index is looked for when a run of 1024 columns,
 * or sixteen groups, exceeds all before.
 *
 * Row-wise int8, per vector of 8: widen 2, product, to integer, 2 to narrow, back 1, two products,
 * e, two fma, and, max: 13, that is 35 cycles for 64 columns, besides 11 for the first pass. */
#include "quant/quant_avx2.h"
#include "quant/quant_avx2_internal.h"
#include "quant/quant_half.h"

#include <string.h>

/* ---- int8 by rows ---------------------------------------------------------------------------- */

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
            qc_wide_store_biased(r->codes + i, q, 0);
        } else {
            int8_t part[16];
            qc_wide_store_biased(part, q, 0);
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

/* ---- integers -------------------------------------------------------------------------------- */

#define INT_GROUPS 16u

/* Codes of 4 and 8 bits are stored as they are made; others as bytes, which are packed then. */
typedef struct {
    const qc_int_codes *how;
    const void *src;
    unsigned char *codes;
    uint64_t stride; /* from a group's codes to the next group's */
    qc_wide lowest, highest;
    qc_piece_sums *sums;
    qc_wide largest_error; /* over the groups at work */
} int_context;

/* Makes the scales of sixteen groups, as qc_int_scale has them. */
QC_INLINE void int_scales(const qc_int_codes *how, const float *absmax, float *scale)
{
    qc_wide s = qc_wide_div(qc_wide_load(absmax), qc_wide_all(qc_int_divisor(how)));
    if (how->scale_dtype == QC_DTYPE_F16)
        s = qc_wide_through_f16(s);
    if (how->scale_dtype == QC_DTYPE_BF16)
        s = qc_wide_through_bf16(s);
    s = qc_wide_between(s, qc_wide_all(qc_int_scale_least(how->scale_dtype)),
                        qc_wide_all(qc_int_scale_most(how->scale_dtype)));
    qc_wide_store(scale, s);
}

/* Stores up to 32 codes, of 4 bits or in bytes. q are integers, rounded. */
QC_INLINE void store_ints(int bias, int nibbles, unsigned char *to, unsigned count,
                          const qc_wide_int *q)
{
    unsigned char part[32];
    const unsigned bytes = nibbles ? (count + 1) / 2 : count;
    unsigned char *at = count == 32 || (!nibbles && count == 16) ? to : part;
    if (nibbles) {
        qc_wide_store_nibbles(at, q[0], q[1], 8, 1);
    } else {
        qc_wide_store_biased(at, q[0], bias);
        if (count > 16)
            qc_wide_store_biased(at + 16, q[1], bias);
    }
    if (at == part)
        memcpy(to, part, bytes);
}

/* What is summed over a run, and the factors of its group. */
typedef struct {
    qc_wide scale, inverse, rr, yy, most;
} int_sums;

/* Returns x less what its code stands for; *q is that code's number. */
QC_INLINE qc_wide int_error(const int_context *c, const int_sums *s, qc_wide x, qc_wide_int *q)
{
    qc_wide y = qc_wide_mul(x, s->inverse);
    *q = qc_wide_round(qc_wide_between(y, c->lowest, c->highest));
    return qc_wide_sub(x, qc_wide_mul(qc_wide_of_int(*q), s->scale));
}

/* Takes up to 32 elements from i on. */
QC_INLINE void int_step(const int_context *c, qc_dtype dtype, int nibbles, uint64_t i,
                        unsigned count, unsigned char *to, int_sums *s)
{
    qc_wide_int q[2] = {qc_wide_int_all(0), qc_wide_int_all(0)};
    for (unsigned h = 0; 16 * h < count; h++) {
        const unsigned lanes = count - 16 * h < 16 ? count - 16 * h : 16;
        qc_wide x = load_part(c->src, dtype, i + 16 * h, lanes);
        qc_wide e = int_error(c, s, x, &q[h]);
        qc_wide y = qc_wide_mul(x, s->inverse), r = qc_wide_mul(e, s->inverse);
        s->rr = qc_wide_fma(r, r, s->rr);
        s->yy = qc_wide_fma(y, y, s->yy);
        s->most = qc_wide_larger(s->most, e);
    }
    store_ints((int)c->how->bias, nibbles, to, count, q);
}

/* Makes the codes of n elements of a group from `first` on, at most QC_ROW_FLUSH, and their
 * sums. */
QC_INLINE void int_run(int_context *c, qc_dtype dtype, unsigned bits, float scale, uint64_t first,
                       unsigned n, unsigned char *codes)
{
    const qc_wide zero = qc_wide_all(0.0f);
    const double s2 = (double)scale * (double)scale;
    int_sums s = {qc_wide_all(scale), qc_wide_all(1.0f / scale), zero, zero, c->largest_error};
    unsigned i = 0;
    for (; i + 32 <= n; i += 32)
        int_step(c, dtype, bits == 4, first + i, 32, codes + (bits == 4 ? i / 2 : i), &s);
    if (i < n)
        int_step(c, dtype, bits == 4, first + i, n - i, codes + (bits == 4 ? i / 2 : i), &s);
    c->largest_error = s.most;
    c->sums->sum_ee += (double)qc_wide_fold(s.rr) * s2;
    c->sums->sum_xx += (double)qc_wide_fold(s.yy) * s2;
}

/* Returns the lowest element of the groups from `at` on whose error is `most`; there is one. */
static uint64_t find_int_error(const int_context *c, qc_dtype dtype, uint64_t group, uint64_t at,
                               const float *scale, float most)
{
    for (uint64_t g = at;; g++, scale++) {
        const int_sums s = {.scale = qc_wide_all(*scale), .inverse = qc_wide_all(1.0f / *scale)};
        for (uint64_t i = g * group, end = i + group; i < end; i += 16) {
            qc_wide_int q;
            qc_wide x = load_part(c->src, dtype, i, qc_min_u32(end - i, 16));
            qc_wide e = int_error(c, &s, x, &q);
            const uint32_t hit = qc_wide_equal(qc_wide_magnitude(e), qc_wide_all(most));
            if (hit)
                return i + (unsigned)__builtin_ctz(hit);
        }
    }
}

/* Quantizes groups [at, at + count); returns 1, or 0 after an element that has no code. bits: 4, 8,
 * or 0 for others. */
QC_INLINE int int_groups(int_context *c, qc_dtype dtype, unsigned bits, uint64_t group, uint64_t at,
                         unsigned count, float *scales)
{
    float absmax[INT_GROUPS] = {0.0f}, scale[INT_GROUPS];
    unsigned char stored[2 * QC_ROW_FLUSH];
    for (unsigned g = 0; g < count; g++) {
        const uint64_t first = (at + g) * group;
        const uint32_t largest = largest_magnitude(c->src, dtype, first, group);
        if (largest >= QC_F32_INF) {
            qc_piece_sums one;
            const unsigned char *from = (const unsigned char *)c->src;
            qc_int_quantize_scalar(c->how, from + first * qc_element_bytes(dtype), dtype, group,
                                   group, c->codes + (at + g) * c->stride, scale, &one);
            c->sums->bad = one.bad;
            c->sums->bad_index = first + one.bad_index;
            return 0;
        }
        absmax[g] = qc_f32_of_bits(largest);
    }
    int_scales(c->how, absmax, scale);
    memcpy(scales + at, scale, count * sizeof *scale);
    c->largest_error = qc_wide_all(0.0f);
    /* Groups that lie without gaps are packed together. */
    const int together = !bits && !c->how->stride && count * group <= sizeof stored;
    for (unsigned g = 0; g < count; g++) {
        unsigned char *to = c->codes + (at + g) * c->stride;
        const uint64_t used = qc_code_bytes(c->how->bits, group);
        if (c->stride > used)
            memset(to + used, 0, (size_t)(c->stride - used));
        for (uint64_t i = 0; i < group; i += QC_ROW_FLUSH) {
            const unsigned n = qc_min_u32(group - i, QC_ROW_FLUSH);
            unsigned char *codes = to + qc_code_bytes(c->how->bits, i);
            int_run(c, dtype, bits, scale[g], (at + g) * group + i, n,
                    bits       ? codes
                    : together ? stored + g * group
                               : stored);
            if (!bits && !together)
                qc_avx2_codes_pack(c->how->bits, stored, n, codes);
        }
    }
    if (together)
        qc_avx2_codes_pack(c->how->bits, stored, count * group, c->codes + at * c->stride);
    const float most = qc_wide_largest(c->largest_error);
    if ((double)most > c->sums->max_err) {
        c->sums->max_err = (double)most;
        c->sums->max_index = find_int_error(c, dtype, group, at, scale, most);
    }
    return 1;
}

QC_INLINE void int_quantize_from(const qc_int_codes *how, const void *src, qc_dtype dtype,
                                 uint64_t n, uint64_t group, void *codes, float *scales,
                                 qc_piece_sums *sums)
{
    const uint64_t groups = n / group;
    int_context c = {how,
                     src,
                     codes,
                     qc_int_stride(how, group),
                     qc_wide_all((float)qc_int_lowest(how)),
                     qc_wide_all((float)qc_int_highest(how)),
                     sums,
                     qc_wide_all(0.0f)};
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t at = 0; at < groups; at += INT_GROUPS) {
        const unsigned count = qc_min_u32(groups - at, INT_GROUPS);
        if (how->bits == 4   ? !int_groups(&c, dtype, 4, group, at, count, scales)
            : how->bits == 8 ? !int_groups(&c, dtype, 8, group, at, count, scales)
                             : !int_groups(&c, dtype, 0, group, at, count, scales))
            return;
    }
}

void qc_avx2_int_quantize(const qc_int_codes *how, const void *src, qc_dtype dtype, uint64_t n,
                          uint64_t group, void *codes, float *scales, qc_piece_sums *sums)
{
    if (dtype == QC_DTYPE_BF16)
        int_quantize_from(how, src, QC_DTYPE_BF16, n, group, codes, scales, sums);
    else if (dtype == QC_DTYPE_F16)
        int_quantize_from(how, src, QC_DTYPE_F16, n, group, codes, scales, sums);
    else if (dtype == QC_DTYPE_F32)
        int_quantize_from(how, src, QC_DTYPE_F32, n, group, codes, scales, sums);
    else
        int_quantize_from(how, src, QC_DTYPE_F64, n, group, codes, scales, sums);
}
