/* The scalar reference, which every other table must equal bit for bit.
 *
 * A block is widened to floats on the stack, looked over once for its largest magnitude (which also
 * finds NaN and infinity, whose bit patterns are the largest), and coded. Loops are kept plain so
 * that the compiler may vectorize them; nothing here depends on whether it does.
 *
 * Orders of summation and the rule for tiny blocks are in quant_internal.h. */
#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <math.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "sources are read in place");

static uint16_t load_u16(const void *base, uint64_t i)
{
    uint16_t v;
    memcpy(&v, (const unsigned char *)base + i * sizeof v, sizeof v);
    return v;
}

static double load_f64(const void *base, uint64_t i)
{
    double v;
    memcpy(&v, (const unsigned char *)base + i * sizeof v, sizeof v);
    return v;
}

/* Gives elements [first, first + n) of src as floats. */
static void widen(const void *src, qc_dtype dtype, uint64_t first, uint32_t n, float *out)
{
    if (dtype == QC_DTYPE_F32) {
        memcpy(out, (const unsigned char *)src + first * sizeof *out, n * sizeof *out);
    } else if (dtype == QC_DTYPE_BF16) {
        for (uint32_t i = 0; i < n; i++)
            out[i] = qc_f32_from_bf16(load_u16(src, first + i));
    } else if (dtype == QC_DTYPE_F16) {
        for (uint32_t i = 0; i < n; i++)
            out[i] = qc_f32_from_f16(load_u16(src, first + i));
    } else {
        for (uint32_t i = 0; i < n; i++)
            out[i] = (float)load_f64(src, first + i);
    }
}

/* Writes x as dst[first ...]; *first_overflow is set, unless it is already, where a finite value
 * turns infinite. */
static void narrow(const float *x, uint32_t n, void *dst, qc_dtype dtype, uint64_t first,
                   uint64_t *first_overflow)
{
    if (dtype == QC_DTYPE_F32) {
        memcpy((unsigned char *)dst + first * sizeof *x, x, n * sizeof *x);
        return;
    }
    int to_f16 = dtype == QC_DTYPE_F16;
    unsigned infinity = to_f16 ? QC_F16_INF : QC_BF16_INF;
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h = to_f16 ? qc_f16_from_f32(x[i]) : qc_bf16_from_f32(x[i]);
        memcpy((unsigned char *)dst + (first + i) * sizeof h, &h, sizeof h);
        if ((h & 0x7fffu) == infinity && !isinf(x[i]) && *first_overflow == UINT64_MAX)
            *first_overflow = first + i;
    }
}

static int source_is_finite(const void *src, qc_dtype dtype, uint64_t i)
{
    if (dtype == QC_DTYPE_F64)
        return isfinite(load_f64(src, i));
    float x;
    widen(src, dtype, i, 1, &x);
    return isfinite(x);
}

static void report_bad(const void *src, qc_dtype dtype, uint64_t index, qc_piece_sums *sums)
{
    sums->bad = source_is_finite(src, dtype, index) ? QC_BAD_RANGE : QC_BAD_NONFINITE;
    sums->bad_index = index;
}

/* round half to even for |x| < 2^22: the ulp of 1.5 * 2^23 is 1 */
static float round_even(float x)
{
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

typedef struct {
    float x[QC_BLOCK_MAX]; /* widened; times QC_TINY_SCALE in a tiny block */
    uint32_t n;
    float absmax; /* as stored */
    float inv;    /* 1 / (absmax of x); 0 in a block of zeros */
} block;

/* Returns inv for n floats, which are scaled first where the rule for tiny blocks asks for it. */
static float inverse_absmax(float *x, uint32_t n, float absmax)
{
    if (absmax == 0.0f)
        return 0.0f;
    if (absmax >= QC_TINY_ABSMAX)
        return 1.0f / absmax;
    for (uint32_t i = 0; i < n; i++)
        x[i] *= QC_TINY_SCALE;
    return 1.0f / (absmax * QC_TINY_SCALE);
}

/* Reads a block; returns 1, or 0 after reporting an element that has no code. */
static int block_load(block *b, const void *src, qc_dtype dtype, uint64_t first, uint32_t n,
                      qc_piece_sums *sums)
{
    uint32_t largest = 0;
    widen(src, dtype, first, n, b->x);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t magnitude = qc_f32_bits(b->x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= QC_F32_INF) {
        uint32_t i = 0;
        while (isfinite(b->x[i]))
            i++;
        report_bad(src, dtype, first + i, sums);
        return 0;
    }
    b->n = n;
    b->absmax = qc_f32_of_bits(largest);
    b->inv = inverse_absmax(b->x, n, b->absmax);
    return 1;
}

/* Adds the block's sums; c[i] is the value of the code of element i. */
static void block_add_error(const block *b, const float *c, qc_block_error *out,
                            qc_piece_sums *sums)
{
    float rr[QC_LANES] = {0}, rc[QC_LANES] = {0}, cc[QC_LANES] = {0};
    float peak = 0.0f;
    for (uint32_t i = 0; i < b->n; i++) {
        unsigned lane = i / 2 % QC_LANES;
        float y = b->x[i] * b->inv;
        float r = y - c[i];
        rr[lane] = fmaf(r, r, rr[lane]);
        rc[lane] = fmaf(r, c[i], rc[lane]);
        cc[lane] = fmaf(c[i], c[i], cc[lane]);
        peak = fabsf(r) > peak ? fabsf(r) : peak;
    }
    float rr_sum = qc_fold16(rr), rc_sum = qc_fold16(rc), cc_sum = qc_fold16(cc);
    double a2 = (double)b->absmax * (double)b->absmax;
    sums->sum_ee += (double)rr_sum * a2;
    sums->sum_xx += ((double)rr_sum + 2 * (double)rc_sum + (double)cc_sum) * a2;
    out->rc = qc_bf16_from_f32(rc_sum);
    out->cc = qc_bf16_from_f32(cc_sum);
    out->peak = qc_bf16_above(peak);
}

/* ---- NF4 ------------------------------------------------------------------------------------- */

static unsigned nf4_code(float y)
{
    unsigned code = 0;
    for (unsigned t = 0; t < 15; t++)
        code += y > qc_nf4_threshold[t];
    return code;
}

static void nf4_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                         uint8_t *codes, float *absmax, qc_block_error *block_errors,
                         qc_piece_sums *sums)
{
    block b;
    uint8_t q[QC_BLOCK_MAX + 1];
    float c[QC_BLOCK_MAX];
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        if (!block_load(&b, src, dtype, first, qc_min_u32(n - first, block_elems), sums))
            return;
        absmax[k] = b.absmax;
        for (uint32_t i = 0; i < b.n; i++)
            q[i] = (uint8_t)nf4_code(b.x[i] * b.inv);
        q[b.n] = QC_NF4_ZERO; /* the other half of an odd tensor's last byte */
        for (uint32_t i = 0; i < b.n; i += 2)
            codes[(first + i) / 2] = (uint8_t)(q[i] << 4 | q[i + 1]);
        if (!block_errors)
            continue;
        for (uint32_t i = 0; i < b.n; i++)
            c[i] = qc_nf4_code[q[i]];
        block_add_error(&b, c, &block_errors[k], sums);
    }
}

static void nf4_dequantize(const uint8_t *codes, const float *absmax, const float *code_map,
                           uint64_t n, uint32_t block_elems, void *dst, qc_dtype dst_dtype,
                           uint64_t *first_overflow)
{
    float x[QC_BLOCK_MAX];
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        uint32_t count = qc_min_u32(n - first, block_elems);
        for (uint32_t i = 0; i < count; i++) {
            unsigned byte = codes[(first + i) / 2];
            x[i] = code_map[i % 2 ? byte & 15u : byte >> 4] * absmax[k];
        }
        narrow(x, count, dst, dst_dtype, first, first_overflow);
    }
}

/* ---- double quantization --------------------------------------------------------------------- */

uint8_t qc_dynamic_search(float x)
{
    /* A descent through a balanced tree over entries 0 .. 254, then one look at the neighbour. It
     * always ends on an even entry, so ties go up from odd entries and down from even ones. */
    const float *map = qc_dynamic_map;
    unsigned lower = 0, pivot = 127, upper = 255;
    for (unsigned step = 64; step > 0; step /= 2) {
        if (x > map[pivot]) {
            lower = pivot;
            pivot += step;
        } else {
            upper = pivot;
            pivot -= step;
        }
    }
    if (x > map[pivot])
        return (uint8_t)(x > (map[upper] + map[pivot]) * 0.5f ? upper : pivot);
    return (uint8_t)(x < (map[lower] + map[pivot]) * 0.5f ? lower : pivot);
}

static void nested_quantize(const float *absmax, uint64_t n, float offset, uint8_t *codes,
                            float *nested_absmax)
{
    float d[QC_NESTED_BLOCK];
    for (uint64_t first = 0; first < n; first += QC_NESTED_BLOCK) {
        uint32_t count = qc_min_u32(n - first, QC_NESTED_BLOCK);
        float largest = 0.0f;
        for (uint32_t i = 0; i < count; i++) {
            d[i] = absmax[first + i] - offset;
            largest = fabsf(d[i]) > largest ? fabsf(d[i]) : largest;
        }
        nested_absmax[first / QC_NESTED_BLOCK] = largest;
        float inv = inverse_absmax(d, count, largest);
        for (uint32_t i = 0; i < count; i++)
            codes[first + i] = qc_dynamic_search(d[i] * inv);
    }
}

static void nested_dequantize(const uint8_t *codes, const float *nested_absmax, const float *map,
                              uint64_t n, uint32_t nested_block, float offset, float *absmax)
{
    for (uint64_t first = 0, k = 0; first < n; first += nested_block, k++) {
        uint32_t count = qc_min_u32(n - first, nested_block);
        for (uint32_t i = 0; i < count; i++)
            absmax[first + i] = map[codes[first + i]] * nested_absmax[k] + offset;
    }
}

/* ---- int8, row-wise -------------------------------------------------------------------------- */

/* A row is walked in runs of at most this many columns, the distance between flushes of the
 * sums. */
typedef struct {
    float x[QC_ROW_FLUSH]; /* widened source */
    float h[QC_ROW_FLUSH]; /* after float16 */
    uint32_t n;
} row_run;

static void run_load(row_run *run, const void *src, qc_dtype dtype, uint64_t first, uint32_t n)
{
    run->n = n;
    widen(src, dtype, first, n, run->x);
    for (uint32_t i = 0; i < n; i++)
        run->h[i] = qc_f32_from_f16(qc_f16_from_f32(run->x[i]));
}

/* Finds the absmax, after float16, of the row that starts at `first`; returns 1, or 0 after
 * reporting. */
static int row_absmax(row_run *run, const void *src, qc_dtype dtype, uint64_t first, uint64_t cols,
                      float *out, qc_piece_sums *sums)
{
    uint32_t largest = 0;
    for (uint64_t col = 0; col < cols; col += QC_ROW_FLUSH) {
        run_load(run, src, dtype, first + col, qc_min_u32(cols - col, QC_ROW_FLUSH));
        for (uint32_t i = 0; i < run->n; i++) {
            uint32_t magnitude = qc_f32_bits(run->h[i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= QC_F32_INF) {
            uint32_t i = 0;
            while (isfinite(run->h[i]))
                i++;
            report_bad(src, dtype, first + col + i, sums);
            return 0;
        }
    }
    *out = qc_f32_of_bits(largest);
    return 1;
}

static void run_add_error(const row_run *run, const int8_t *codes, float scb, uint64_t first,
                          qc_piece_sums *sums)
{
    float ee[QC_LANES] = {0}, xx[QC_LANES] = {0};
    for (uint32_t i = 0; i < run->n; i++) {
        float x = run->x[i];
        float e = x - ((float)codes[i] * scb) * QC_INT8_STEP;
        ee[i % QC_LANES] = fmaf(e, e, ee[i % QC_LANES]);
        xx[i % QC_LANES] = fmaf(x, x, xx[i % QC_LANES]);
        if ((double)fabsf(e) > sums->max_err) {
            sums->max_err = (double)fabsf(e);
            sums->max_index = first + i;
        }
    }
    sums->sum_ee += (double)qc_fold16(ee);
    sums->sum_xx += (double)qc_fold16(xx);
}

static void int8_rows_quantize(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                               int8_t *codes, float *scb, qc_piece_sums *sums)
{
    row_run run;
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t row = 0; row < rows; row++) {
        if (!row_absmax(&run, src, dtype, row * cols, cols, &scb[row], sums))
            return;
        /* |h * scale| <= 127 * (1 + 2^-24)^3 < 127.5: three roundings cannot reach 128. float16 has
         * no absmax so small that scale overflows. */
        float scale = scb[row] == 0.0f ? 0.0f : (1.0f / scb[row]) * 127.0f;
        for (uint64_t col = 0; col < cols; col += QC_ROW_FLUSH) {
            uint64_t first = row * cols + col;
            run_load(&run, src, dtype, first, qc_min_u32(cols - col, QC_ROW_FLUSH));
            for (uint32_t i = 0; i < run.n; i++)
                codes[first + i] = (int8_t)round_even(run.h[i] * scale);
            run_add_error(&run, codes + first, scb[row], first, sums);
        }
    }
}

static void int8_rows_dequantize(const int8_t *codes, const float *scb, uint64_t rows,
                                 uint64_t cols, void *dst, qc_dtype dst_dtype,
                                 uint64_t *first_overflow)
{
    float x[QC_ROW_FLUSH];
    *first_overflow = UINT64_MAX;
    for (uint64_t row = 0; row < rows; row++) {
        for (uint64_t col = 0; col < cols; col += QC_ROW_FLUSH) {
            uint64_t first = row * cols + col;
            uint32_t count = qc_min_u32(cols - col, QC_ROW_FLUSH);
            for (uint32_t i = 0; i < count; i++)
                x[i] = ((float)codes[first + i] * scb[row]) * QC_INT8_STEP;
            narrow(x, count, dst, dst_dtype, first, first_overflow);
        }
    }
}

/* ---- int8, block-wise ------------------------------------------------------------------------ */

static void int8_blocks_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                                 int8_t *codes, float *absmax, qc_block_error *block_errors,
                                 qc_piece_sums *sums)
{
    block b;
    float c[QC_BLOCK_MAX];
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        if (!block_load(&b, src, dtype, first, qc_min_u32(n - first, block_elems), sums))
            return;
        absmax[k] = b.absmax;
        float scale = b.inv * 127.0f;
        for (uint32_t i = 0; i < b.n; i++) {
            float q = round_even(b.x[i] * scale);
            q = q > 127.0f ? 127.0f : q;
            q = q < -127.0f ? -127.0f : q;
            codes[first + i] = (int8_t)q;
            c[i] = q * QC_INT8_STEP;
        }
        if (block_errors)
            block_add_error(&b, c, &block_errors[k], sums);
    }
}

static void int8_blocks_dequantize(const int8_t *codes, const float *absmax, uint64_t n,
                                   uint32_t block_elems, void *dst, qc_dtype dst_dtype,
                                   uint64_t *first_overflow)
{
    float x[QC_BLOCK_MAX];
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        uint32_t count = qc_min_u32(n - first, block_elems);
        for (uint32_t i = 0; i < count; i++)
            x[i] = ((float)codes[first + i] * QC_INT8_STEP) * absmax[k];
        narrow(x, count, dst, dst_dtype, first, first_overflow);
    }
}

/* ---- integers as compressed-tensors has them ------------------------------------------------- */

float qc_int_round_scale(qc_dtype scale_dtype, float scale)
{
    const int f16 = scale_dtype == QC_DTYPE_F16;
    const float least = qc_int_scale_least(scale_dtype), most = qc_int_scale_most(scale_dtype);
    float rounded = f16                            ? qc_f32_from_f16(qc_f16_from_f32(scale))
                    : scale_dtype == QC_DTYPE_BF16 ? qc_f32_from_bf16(qc_bf16_from_f32(scale))
                                                   : scale;
    if (fabsf(rounded) < least)
        rounded = copysignf(least, scale);
    return fabsf(rounded) > most ? copysignf(most, scale) : rounded;
}

float qc_int_scale(const qc_int_codes *how, float absmax)
{
    return qc_int_round_scale(how->scale_dtype, absmax / (how->bits == 4 ? 7.5f : 127.0f));
}

static int load_code(const qc_int_codes *how, const unsigned char *codes, uint64_t i)
{
    if (how->bits == 4)
        return (int)((unsigned)codes[i / 2] >> (i % 2 * 4) & 15u) - (int)how->bias;
    return how->bias ? (int)codes[i] - (int)how->bias : (int)(int8_t)codes[i];
}

static void store_code(const qc_int_codes *how, unsigned char *codes, uint64_t i, int code)
{
    unsigned stored = (unsigned)(code + (int)how->bias);
    if (how->bits == 8)
        codes[i] = (unsigned char)stored;
    else if (i % 2)
        codes[i / 2] = (unsigned char)(codes[i / 2] | (stored & 15u) << 4);
    else
        codes[i / 2] = (unsigned char)(stored & 15u);
}

/* Finds the absmax of the group that starts at `first`; returns 1, or 0 after reporting. */
static int group_absmax(float *x, const void *src, qc_dtype dtype, uint64_t first, uint64_t group,
                        float *out, qc_piece_sums *sums)
{
    uint32_t largest = 0;
    for (uint64_t at = 0; at < group; at += QC_ROW_FLUSH) {
        uint32_t n = qc_min_u32(group - at, QC_ROW_FLUSH);
        widen(src, dtype, first + at, n, x);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t magnitude = qc_f32_bits(x[i]) & 0x7fffffffu;
            if (magnitude >= QC_F32_INF) {
                report_bad(src, dtype, first + at + i, sums);
                return 0;
            }
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    *out = qc_f32_of_bits(largest);
    return 1;
}

/* y: the elements times 1 / scale; q: their codes. */
static void group_add_error(const float *x, const float *y, const float *q, float scale, uint32_t n,
                            uint64_t first, qc_piece_sums *sums)
{
    const float inv = 1.0f / scale;
    float rr[QC_LANES] = {0}, yy[QC_LANES] = {0};
    for (uint32_t i = 0; i < n; i++) {
        float e = x[i] - q[i] * scale, r = e * inv;
        rr[i % QC_LANES] = fmaf(r, r, rr[i % QC_LANES]);
        yy[i % QC_LANES] = fmaf(y[i], y[i], yy[i % QC_LANES]);
        if ((double)fabsf(e) > sums->max_err) {
            sums->max_err = (double)fabsf(e);
            sums->max_index = first + i;
        }
    }
    double s2 = (double)scale * (double)scale;
    sums->sum_ee += (double)qc_fold16(rr) * s2;
    sums->sum_xx += (double)qc_fold16(yy) * s2;
}

void qc_int_quantize_scalar(const qc_int_codes *how, const void *src, qc_dtype dtype, uint64_t n,
                            uint64_t group, void *codes, float *scales, qc_piece_sums *sums)
{
    const float low = (float)qc_int_lowest(how), high = (float)qc_int_highest(how);
    float x[QC_ROW_FLUSH], y[QC_ROW_FLUSH], q[QC_ROW_FLUSH], absmax;
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t begin = 0; begin < n; begin += group) {
        if (!group_absmax(x, src, dtype, begin, group, &absmax, sums))
            return;
        const float scale = qc_int_scale(how, absmax), inv = 1.0f / scale;
        scales[begin / group] = scale;
        for (uint64_t at = 0; at < group; at += QC_ROW_FLUSH) {
            uint64_t first = begin + at;
            uint32_t run = qc_min_u32(group - at, QC_ROW_FLUSH);
            widen(src, dtype, first, run, x);
            for (uint32_t i = 0; i < run; i++) {
                y[i] = x[i] * inv;
                q[i] = round_even(y[i] > high ? high : y[i] < low ? low : y[i]);
                store_code(how, codes, first + i, (int)q[i]);
            }
            group_add_error(x, y, q, scale, run, first, sums);
        }
    }
}

void qc_int_dequantize_scalar(const qc_int_codes *how, const void *codes, const float *scales,
                              uint64_t n, uint64_t group, void *dst, qc_dtype dst_dtype,
                              uint64_t *first_overflow)
{
    float x[QC_ROW_FLUSH];
    *first_overflow = UINT64_MAX;
    for (uint64_t begin = 0; begin < n; begin += group) {
        for (uint64_t at = 0; at < group; at += QC_ROW_FLUSH) {
            uint32_t run = qc_min_u32(group - at, QC_ROW_FLUSH);
            for (uint32_t i = 0; i < run; i++)
                x[i] = (float)load_code(how, codes, begin + at + i) * scales[begin / group];
            narrow(x, run, dst, dst_dtype, begin + at, first_overflow);
        }
    }
}

/* ---- casts ----------------------------------------------------------------------------------- */

/* Casts F64 to a smaller type: each element is rounded once and does not pass through float. */
static void cast_from_f64(const void *src, uint64_t n, void *dst, qc_dtype dst_dtype,
                          uint64_t *first_overflow)
{
    for (uint64_t i = 0; i < n; i++) {
        double x = load_f64(src, i);
        int became_infinite;
        if (dst_dtype == QC_DTYPE_F32) {
            float f = (float)x;
            memcpy((unsigned char *)dst + i * sizeof f, &f, sizeof f);
            became_infinite = isinf(f);
        } else {
            int to_f16 = dst_dtype == QC_DTYPE_F16;
            uint16_t h = to_f16 ? qc_f16_from_f64(x) : qc_bf16_from_f64(x);
            memcpy((unsigned char *)dst + i * sizeof h, &h, sizeof h);
            became_infinite = (h & 0x7fffu) == (to_f16 ? QC_F16_INF : QC_BF16_INF);
        }
        if (became_infinite && !isinf(x) && *first_overflow == UINT64_MAX)
            *first_overflow = i;
    }
}

static void cast(const void *src, qc_dtype src_dtype, uint64_t n, void *dst, qc_dtype dst_dtype,
                 uint64_t *first_overflow)
{
    float x[QC_BLOCK_MAX];
    *first_overflow = UINT64_MAX;
    if (src_dtype == dst_dtype) {
        if (n > 0)
            memcpy(dst, src, n * (qc_dtype_bits(src_dtype) / 8));
        return;
    }
    if (src_dtype == QC_DTYPE_F64) {
        cast_from_f64(src, n, dst, dst_dtype, first_overflow);
        return;
    }
    for (uint64_t first = 0; first < n; first += QC_BLOCK_MAX) {
        uint32_t count = qc_min_u32(n - first, QC_BLOCK_MAX);
        widen(src, src_dtype, first, count, x);
        if (dst_dtype != QC_DTYPE_F64) {
            narrow(x, count, dst, dst_dtype, first, first_overflow);
            continue;
        }
        for (uint32_t i = 0; i < count; i++) {
            double d = (double)x[i];
            memcpy((unsigned char *)dst + (first + i) * sizeof d, &d, sizeof d);
        }
    }
}

const qc_quant_ops qc_quant_ops_scalar = {
    .isa = QC_ISA_SCALAR,
    .nf4_quantize = nf4_quantize,
    .nf4_dequantize = nf4_dequantize,
    .nested_quantize = nested_quantize,
    .nested_dequantize = nested_dequantize,
    .int8_rows_quantize = int8_rows_quantize,
    .int8_rows_dequantize = int8_rows_dequantize,
    .int8_blocks_quantize = int8_blocks_quantize,
    .int8_blocks_dequantize = int8_blocks_dequantize,
    .int_quantize = qc_int_quantize_scalar,
    .int_dequantize = qc_int_dequantize_scalar,
    .cast = cast,
};
