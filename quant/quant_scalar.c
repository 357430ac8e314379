/* The scalar reference, which every other table must equal bit for bit.
 *
 * A block is widened to floats on the stack, looked over once for its largest magnitude (which also
 * finds NaN and infinity, whose bit patterns are the largest), and coded. Loops are kept plain so
 * that the compiler may vectorize them; nothing here depends on whether it does.
 *
 * Orders of summation and the rule for tiny blocks are in quant_internal.h. */
#include "quant/quant_half.h"
#include "quant/quant_internal.h"
#include "quant/quant_pack.h"

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

int qc_find_absmax(const float *x, uint32_t n, const void *src, qc_dtype dtype, uint64_t first,
                   float *absmax, qc_piece_sums *sums)
{
    uint32_t largest = 0, bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t magnitude = qc_f32_bits(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    *absmax = qc_f32_of_bits(largest);
    if (largest < QC_F32_INF)
        return 1;
    while (isfinite(x[bad]))
        bad++;
    sums->bad_index = first + bad;
    double wide = 0.0;
    float narrow = 0.0f;
    widen(src, dtype, sums->bad_index, 1, &narrow);
    wide = dtype == QC_DTYPE_F64 ? load_f64(src, sums->bad_index) : (double)narrow;
    sums->bad = isfinite(wide) ? QC_BAD_RANGE : QC_BAD_NONFINITE;
    return 0;
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
    widen(src, dtype, first, n, b->x);
    if (!qc_find_absmax(b->x, n, src, dtype, first, &b->absmax, sums))
        return 0;
    b->n = n;
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
            q[i] = (uint8_t)qc_nf4_code_of(b.x[i] * b.inv);
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
            float q = qc_round_even(b.x[i] * scale);
            q = q > 127.0f ? 127.0f : q;
            q = q < -127.0f ? -127.0f : q;
            codes[first + i] = (int8_t)q;
            c[i] = q * QC_INT8_STEP;
        }
        if (block_errors)
            block_add_error(&b, c, &block_errors[k], sums);
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
    return qc_int_round_scale(how->scale_dtype, absmax / qc_int_divisor(how));
}

/* ---- integers, rows of int8, and decoding blocks of int8 ------------------------------------- */

/* Each caller has code of its own, in which what it passes is constant. */
#define ALWAYS static inline __attribute__((always_inline))

static const qc_int_codes int8_codes = {.bits = 8};

/* A run of a row or group, at most as long as the distance between flushes of the sums. */
typedef struct {
    float x[QC_ROW_FLUSH]; /* widened source */
    float h[QC_ROW_FLUSH]; /* after float16 */
    float q[QC_ROW_FLUSH]; /* numbers of the codes */
    uint32_t n;
} run;

/* Reads a run, and returns the numbers that codes are made of: those of rows of int8 pass through
 * float16. */
ALWAYS const float *run_load(run *r, int through_f16, const void *src, qc_dtype dtype,
                             uint64_t first, uint32_t n)
{
    r->n = n;
    widen(src, dtype, first, n, r->x);
    for (uint32_t i = 0; through_f16 && i < n; i++)
        r->h[i] = qc_f32_from_f16(qc_f16_from_f32(r->x[i]));
    return through_f16 ? r->h : r->x;
}

ALWAYS void run_store_codes(const run *r, const qc_int_codes *how, unsigned char *codes)
{
    unsigned char stored[QC_ROW_FLUSH], *to = how->bits == 8 ? codes : stored;
    for (uint32_t i = 0; i < r->n; i++)
        to[i] = (unsigned char)((int)r->q[i] + (int)how->bias);
    if (how->bits != 8)
        qc_codes_pack(how->bits, stored, r->n, codes);
}

/* Adds the run's sums. unit: what errors and elements are multiplied by before they are squared;
 * sums are multiplied by `square`. */
ALWAYS void run_add_error(const run *r, float scale, float step, float unit, double square,
                          uint64_t first, qc_piece_sums *sums)
{
    float ee[QC_LANES] = {0}, xx[QC_LANES] = {0};
    for (uint32_t i = 0; i < r->n; i++) {
        float e = r->x[i] - (r->q[i] * scale) * step, y = r->x[i] * unit;
        ee[i % QC_LANES] = fmaf(e * unit, e * unit, ee[i % QC_LANES]);
        xx[i % QC_LANES] = fmaf(y, y, xx[i % QC_LANES]);
        if ((double)fabsf(e) > sums->max_err) {
            sums->max_err = (double)fabsf(e);
            sums->max_index = first + i;
        }
    }
    sums->sum_ee += (double)qc_fold16(ee) * square;
    sums->sum_xx += (double)qc_fold16(xx) * square;
}

/* Quantizes `count` groups of elements; rows: they are rows of int8. */
ALWAYS void quantize_groups(const qc_int_codes *how, int rows, const void *src, qc_dtype dtype,
                            uint64_t count, uint64_t group, void *codes, float *scales,
                            qc_piece_sums *sums)
{
    const float low = (float)qc_int_lowest(how), high = (float)qc_int_highest(how);
    const uint64_t stride = qc_int_stride(how, group), code_bytes = qc_code_bytes(how->bits, group);
    run r;
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t k = 0; k < count; k++) {
        const uint64_t begin = k * group, end = begin + group;
        float absmax = 0.0f, most;
        for (uint64_t at = begin; at < end; at += QC_ROW_FLUSH) {
            const float *seen =
                run_load(&r, rows, src, dtype, at, qc_min_u32(end - at, QC_ROW_FLUSH));
            if (!qc_find_absmax(seen, r.n, src, dtype, at, &most, sums))
                return;
            absmax = most > absmax ? most : absmax;
        }
        const float scale = rows ? absmax : qc_int_scale(how, absmax);
        const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        const float factor = rows ? inverse * 127.0f : inverse;
        unsigned char *to = (unsigned char *)codes + k * stride;
        scales[k] = scale;
        if (stride > code_bytes)
            memset(to + code_bytes, 0, (size_t)(stride - code_bytes));
        for (uint64_t at = begin; at < end; at += QC_ROW_FLUSH) {
            const float *seen =
                run_load(&r, rows, src, dtype, at, qc_min_u32(end - at, QC_ROW_FLUSH));
            for (uint32_t i = 0; i < r.n; i++) {
                const float y = seen[i] * factor;
                /* Of rows |y| <= 127 * (1 + 2^-24)^3 < 127.5: three roundings cannot reach 128.
                 * float16 has no absmax so small that the factor overflows. */
                r.q[i] = qc_round_even(rows ? y : y > high ? high : y < low ? low : y);
            }
            run_store_codes(&r, how, to + qc_code_bytes(how->bits, at - begin));
            run_add_error(&r, scale, rows ? QC_INT8_STEP : 1.0f, rows ? 1.0f : inverse,
                          rows ? 1.0 : (double)scale * (double)scale, at, sums);
        }
    }
}

static void int8_rows_quantize(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                               int8_t *codes, float *scb, qc_piece_sums *sums)
{
    quantize_groups(&int8_codes, 1, src, dtype, rows, cols, codes, scb, sums);
}

void qc_int_quantize_scalar(const qc_int_codes *how, const void *src, qc_dtype dtype, uint64_t n,
                            uint64_t group, void *codes, float *scales, qc_piece_sums *sums)
{
    quantize_groups(how, 0, src, dtype, group ? n / group : 0, group, codes, scales, sums);
}

/* Makes ((number * before) * scale) * after of n codes, of which `each` share a scale. */
ALWAYS void dequantize_groups(const qc_int_codes *how, const unsigned char *codes, float before,
                              const float *scales, float after, uint64_t n, uint64_t each,
                              void *dst, qc_dtype dst_dtype, uint64_t *first_overflow)
{
    const uint64_t stride = qc_int_stride(how, each);
    float x[QC_ROW_FLUSH];
    unsigned char parted[QC_ROW_FLUSH];
    *first_overflow = UINT64_MAX;
    for (uint64_t begin = 0; begin < n; begin += each, scales++, codes += stride) {
        const uint64_t end = begin + qc_min_u64(n - begin, each);
        for (uint64_t at = begin; at < end; at += QC_ROW_FLUSH) {
            const uint32_t count = qc_min_u32(end - at, QC_ROW_FLUSH);
            const unsigned char *from = codes + qc_code_bytes(how->bits, at - begin);
            if (how->bits != 8) {
                qc_codes_unpack(how->bits, from, count, parted);
                from = parted;
            }
            for (uint32_t i = 0; i < count; i++) {
                const int number = how->bias ? from[i] - (int)how->bias : (int)(int8_t)from[i];
                x[i] = (((float)number * before) * *scales) * after;
            }
            narrow(x, count, dst, dst_dtype, at, first_overflow);
        }
    }
}

static void int8_rows_dequantize(const int8_t *codes, const float *scb, uint64_t rows,
                                 uint64_t cols, void *dst, qc_dtype dst_dtype,
                                 uint64_t *first_overflow)
{
    dequantize_groups(&int8_codes, (const void *)codes, 1.0f, scb, QC_INT8_STEP, rows * cols, cols,
                      dst, dst_dtype, first_overflow);
}

static void int8_blocks_dequantize(const int8_t *codes, const float *absmax, uint64_t n,
                                   uint32_t block_elems, void *dst, qc_dtype dst_dtype,
                                   uint64_t *first_overflow)
{
    dequantize_groups(&int8_codes, (const void *)codes, QC_INT8_STEP, absmax, 1.0f, n, block_elems,
                      dst, dst_dtype, first_overflow);
}

void qc_int_dequantize_scalar(const qc_int_codes *how, const void *codes, const float *scales,
                              uint64_t n, uint64_t group, void *dst, qc_dtype dst_dtype,
                              uint64_t *first_overflow)
{
    dequantize_groups(how, codes, 1.0f, scales, 1.0f, n, group, dst, dst_dtype, first_overflow);
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
