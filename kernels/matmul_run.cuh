/* Weights in runs: how every matmul kernel reads and decodes them.
 *
 * A run is 32 consecutive codes k0 .. k0 + 31 of row n, where k0 is a multiple of 32: 16 bytes of
 * NF4, or 32 of int8. One thread loads a run into registers early (qc_run_load), so that many loads
 * are on their way, and turns it into numbers later (qc_run_pair, qc_run_word).
 * Codes never pass through shared memory.
 *
 * Loads are of 16 bytes. There are two ways to find a run; `aligned` is a template argument:
 *   aligned    K % 32 == 0 and codes are 16-byte aligned, as in the file. A block is at least 32
 *              long and starts at a multiple of 32, so the run has one scale
 *   repacked   rows were padded to row_bytes (qc_matmul_prepare). Blocks still go over the
 *              flattened tensor, so a run may cross into a second one (never a third)
 * Runs whose k0 lies at K or beyond do not exist; callers use qc_run_zero for them.
 *
 * The values are those of quant_weights.h, with each product rounded as that header says. They are
 * then multiplied by 2^exponent (qc_matmul_weights.exponent) and, where float16 is asked for,
 * rounded once. The power of two is multiplied into the scale instead, which gives the same value
 * because it is exact. The exception is a value that is subnormal as a float: it is scaled before
 * the rounding instead of after it.
 *
 * NF4 is decoded as code_map[code] * scale, rounded to float and then to float16, which gives the
 * bits that dequantizing gives. (The kernels with tables of float16 codes round differently: see
 * matmul_codes.cuh.) The table holds floats in shared memory, laid out so that no two lanes want
 * the same bank:
 *   qc_run_pairs    [256][16] (value of the high nibble, of the low) 32 KB. Lane l reads copy
 *                   l % 16: one 64-bit load gives two weights in two wavefronts
 *   qc_run_singles  [16][32] 2 KB. Lane l reads copy l: one 32-bit load, one weight
 * Both cost one shared-memory wavefront per 32 weights, which is 32 weights per clock and
 * multiprocessor. Pairs take half the loads and half the address arithmetic (a shift and a LOP3 per
 * load). Int8 needs no table: a byte goes into the mantissa of 2^23, and 2^23 + 128 is subtracted,
 * which is exact. */
#ifndef QC_KERNELS_MATMUL_RUN_CUH
#define QC_KERNELS_MATMUL_RUN_CUH

#include "base/dtype.h"
#include "kernels/matmul_kernels.h"
#include "kernels/ptx.cuh"
#include "quant/quant_internal.h"
#include "quant/quant_values.h"

#define QC_RUN_ELEMS 32u

/* The weights as kernels take them, by value: a few scalars for address arithmetic. */
typedef struct {
    const unsigned char *codes; /* of the whole weight; where repacked, of the first row's k 0 */
    uint64_t rows, cols;
    uint64_t ld, first; /* element k of row n is number first + n * ld + k of the whole weight */
    uint64_t row_bytes; /* from row to row of codes, where repacked */
    const float *absmax;
    const uint8_t *absmax_codes;
    const float *nested_absmax, *nested_map;
    float nested_offset;
    int by_row; /* INT8_ROWS: one scale per row */
    uint32_t block_shift, nested_shift;
    const float *code_map;
    const int *exponent;
} qc_run_source;

static inline qc_run_source qc_run_source_of(const qc_matmul_weights *m)
{
    const qc_weights *w = &m->w;
    qc_run_source s;
    s.codes = (const unsigned char *)w->codes;
    if (m->row_bytes)
        s.codes += m->part.row * m->row_bytes + qc_form_code_bytes(&w->form, m->part.col);
    s.rows = m->part.rows;
    s.cols = m->part.cols;
    s.ld = w->form.cols;
    s.first = m->part.row * w->form.cols + m->part.col;
    s.row_bytes = m->row_bytes;
    s.absmax = w->absmax;
    if (qc_form_by_rows(&w->form))
        s.absmax += m->part.row;
    s.absmax_codes = w->absmax_codes;
    s.nested_absmax = w->nested_absmax;
    s.nested_map = w->nested_map;
    s.nested_offset = w->form.offset;
    s.by_row = qc_form_by_rows(&w->form);
    s.block_shift = qc_log2_of(w->form.block_elems);
    s.nested_shift = qc_log2_of(w->nested_block);
    s.code_map = w->form.code_map;
    s.exponent = m->exponent;
    return s;
}

/* The same with codes from the slice's first element on. */
static inline qc_run_source qc_run_source_there(const qc_matmul_weights *m)
{
    qc_run_source s = qc_run_source_of(m);
    s.codes += qc_form_code_bytes(&m->w.form, s.first);
    return s;
}

/* ---- tables in shared memory ----------------------------------------------------------------- */

typedef struct alignas(8) {
    float even, odd; /* in k order: the high nibble is even */
} qc_run_two;

/* What every block has: the map of double-quantized scales, and the 16 values from which the larger
 * tables are made. */
typedef struct {
    float map[256];
    float codes[16];
} qc_run_small;

typedef struct alignas(128) {
    qc_run_small small;
    alignas(128) float value[16 * 32];
} qc_run_singles;

typedef struct alignas(128) {
    qc_run_small small;
    alignas(128) qc_run_two value[256 * 16];
} qc_run_pairs;

/* The tables of int8. */
typedef struct alignas(128) {
    qc_run_small small;
} qc_run_plain;

/* All threads of the block call these. The barrier is left to the caller. */
QC_DEVICE void qc_run_fill_codes(qc_run_small &t, const qc_run_source &s, unsigned thread)
{
    if (s.code_map) {
        if (thread < 16)
            t.codes[thread] = s.code_map[thread];
    } else if (thread == 0) {
        constexpr float codes[16] = {QC_NF4_CODE_VALUES};
#pragma unroll
        for (int i = 0; i < 16; i++)
            t.codes[i] = codes[i];
    }
}

QC_DEVICE void qc_run_fill_small(qc_run_small &t, const qc_run_source &s, unsigned thread,
                                 unsigned threads)
{
    if (!s.absmax)
        for (unsigned i = thread; i < 256; i += threads)
            t.map[i] = s.nested_map[i];
    qc_run_fill_codes(t, s, thread);
}

QC_DEVICE void qc_run_fill(qc_run_plain &t, const qc_run_source &s, unsigned thread,
                           unsigned threads)
{
    qc_run_fill_small(t.small, s, thread, threads);
}

QC_DEVICE void qc_run_fill(qc_run_singles &t, const qc_run_source &s, unsigned thread,
                           unsigned threads)
{
    qc_run_fill_small(t.small, s, thread, threads);
    __syncthreads();
    for (unsigned i = thread; i < 16 * 32; i += threads)
        t.value[i] = t.small.codes[i / 32];
}

QC_DEVICE void qc_run_fill(qc_run_pairs &t, const qc_run_source &s, unsigned thread,
                           unsigned threads)
{
    qc_run_fill_small(t.small, s, thread, threads);
    __syncthreads();
    for (unsigned i = thread; i < 256 * 16; i += threads) {
        t.value[i].even = t.small.codes[i / 256];
        t.value[i].odd = t.small.codes[i / 16 % 16];
    }
}

/* Returns where a lane's own copy lies within the table, in bytes. */
QC_DEVICE unsigned qc_run_lane(const qc_run_plain &, unsigned)
{
    return 0;
}

QC_DEVICE unsigned qc_run_lane(const qc_run_singles &, unsigned lane)
{
    return lane * 4;
}

QC_DEVICE unsigned qc_run_lane(const qc_run_pairs &, unsigned lane)
{
    return lane % 16 * 8;
}

/* Returns where a lane's bytes lie within the row that the bits of q from `from` on choose. `mask`
 * has those bits, beginning at bit 7, since rows of tables have 128 bytes. In unrolled loops this
 * is a shift and one LOP3. */
QC_DEVICE unsigned qc_run_row(uint32_t q, int from, uint32_t mask, unsigned lane)
{
    return qc_and_or(from < 7 ? q << (7 - from) : q >> (from - 7), mask, lane);
}

/* Returns the values of the two codes in byte b of q. `lane` is what qc_run_lane returned. */
QC_DEVICE qc_run_two qc_run_look(const qc_run_pairs &t, unsigned lane, uint32_t q, int b)
{
    const unsigned char *p = reinterpret_cast<const unsigned char *>(t.value);
    return *reinterpret_cast<const qc_run_two *>(p + qc_run_row(q, 8 * b, 0x7f80u, lane));
}

QC_DEVICE qc_run_two qc_run_look(const qc_run_singles &t, unsigned lane, uint32_t q, int b)
{
    const unsigned char *p = reinterpret_cast<const unsigned char *>(t.value);
    qc_run_two v;
    v.even = *reinterpret_cast<const float *>(p + qc_run_row(q, 8 * b + 4, 0x780u, lane));
    v.odd = *reinterpret_cast<const float *>(p + qc_run_row(q, 8 * b, 0x780u, lane));
    return v;
}

/* ---- a run in registers ---------------------------------------------------------------------- */

template <bool nf4> struct qc_run {
    uint32_t q[nf4 ? 4 : 8];
    float scale[2];   /* absmax, or the nested absmax of a double-quantized one */
    uint32_t code[2]; /* the 8-bit code, where it is double-quantized */
    int split;        /* elements from here on have the second scale; 32 if none has */
    int count;        /* elements from here on lie at k >= K and are zero; 32 if none does */
};

/* What values are multiplied with, decoded. NF4 is code * by[i], int8 is (code * first) * by[i]. */
struct qc_run_scales {
    float first, by[2];
};

/* Holds 2^e as two factors, because e may be beyond what one float holds. */
struct qc_run_power {
    float a, b;
};

QC_DEVICE qc_run_power qc_run_power_of(int e)
{
    e = e < -252 ? -252 : e > 252 ? 252 : e;
    int half = e / 2;
    qc_run_power p;
    p.a = __uint_as_float((uint32_t)(127 + half) << 23);
    p.b = __uint_as_float((uint32_t)(127 + e - half) << 23);
    return p;
}

/* A run that does not exist (k0 >= K). Its values are only sure to be finite, so they must be
 * multiplied by zero. */
template <bool nf4> QC_DEVICE void qc_run_zero(qc_run<nf4> &r)
{
#pragma unroll
    for (int i = 0; i < (nf4 ? 4 : 8); i++)
        r.q[i] = 0;
    r.scale[0] = r.scale[1] = 0.0f;
    r.code[0] = r.code[1] = 0;
    r.split = 0;
    r.count = 0;
}

template <bool nf4>
QC_DEVICE void qc_run_load_scale(qc_run<nf4> &r, int i, const qc_run_source &s, uint64_t block)
{
    /* The address is chosen first and then all threads make one load. Without a branch, the loads
     * of several runs are on their way together. */
    const float *from = s.absmax ? s.absmax : s.nested_absmax;
    r.scale[i] = from[block >> (s.absmax ? 0 : s.nested_shift)];
    if (!s.absmax)
        r.code[i] = s.absmax_codes[block];
}

template <bool nf4> QC_DEVICE void qc_run_codes(qc_run<nf4> &r, const unsigned char *p, bool both)
{
    uint4 v = qc_ld_stream_16(p);
    r.q[0] = v.x;
    r.q[1] = v.y;
    r.q[2] = v.z;
    r.q[3] = v.w;
    if constexpr (!nf4) {
        v.x = v.y = v.z = v.w = 0;
        if (both)
            v = qc_ld_stream_16(p + 16);
        r.q[4] = v.x;
        r.q[5] = v.y;
        r.q[6] = v.z;
        r.q[7] = v.w;
    }
    (void)both;
}

/* Needs n < rows, k0 < cols and k0 a multiple of 32; `first` is s.first + n * s.ld. */
template <bool nf4, bool aligned>
QC_DEVICE void qc_run_load(qc_run<nf4> &r, const qc_run_source &s, uint64_t n, uint64_t first,
                           uint64_t k0)
{
    uint64_t f = first + k0;
    r.split = r.count = (int)QC_RUN_ELEMS;
    r.code[0] = r.code[1] = 0;
    if (aligned) {
        qc_run_codes(r, s.codes + (nf4 ? f >> 1 : f), true);
        qc_run_load_scale(r, 0, s, !nf4 && s.by_row ? n : f >> s.block_shift);
        r.scale[1] = r.scale[0];
        return;
    }
    if (s.cols - k0 < QC_RUN_ELEMS)
        r.count = (int)(s.cols - k0);
    qc_run_codes(r, s.codes + n * s.row_bytes + (nf4 ? k0 >> 1 : k0), r.count > 16);
    if (!nf4 && s.by_row) {
        qc_run_load_scale(r, 0, s, n);
        r.scale[1] = r.scale[0];
        return;
    }
    uint64_t block = f >> s.block_shift;
    uint64_t left = ((block + 1) << s.block_shift) - f;
    qc_run_load_scale(r, 0, s, block);
    r.scale[1] = 0.0f;
    if (left < (uint64_t)r.count) {
        r.split = (int)left;
        qc_run_load_scale(r, 1, s, block + 1);
    }
}

QC_DEVICE float qc_run_scale(float loaded, uint32_t code, const qc_run_source &s,
                             const qc_run_small &t, qc_run_power p)
{
    float a = s.absmax ? loaded : __fadd_rn(__fmul_rn(t.map[code], loaded), s.nested_offset);
    return __fmul_rn(__fmul_rn(a, p.a), p.b);
}

template <bool nf4, bool aligned>
QC_DEVICE qc_run_scales qc_run_scales_of(const qc_run<nf4> &r, const qc_run_source &s,
                                         const qc_run_small &t, qc_run_power p)
{
    float a = qc_run_scale(r.scale[0], r.code[0], s, t, p);
    float b = a;
    if (!aligned && r.split < r.count)
        b = qc_run_scale(r.scale[1], r.code[1], s, t, p);
    qc_run_scales v;
    bool by_row = !nf4 && s.by_row;
    v.first = by_row ? a : QC_INT8_STEP;
    v.by[0] = by_row ? QC_INT8_STEP : a;
    v.by[1] = by_row ? QC_INT8_STEP : b;
    return v;
}

/* Returns elements 2 * j and 2 * j + 1, where j is a constant after unrolling and `lane` is what
 * qc_run_lane returned. At k >= K they are any finite number. */
template <bool nf4, bool aligned, typename Table>
QC_DEVICE qc_run_two qc_run_pair(const qc_run<nf4> &r, const qc_run_scales &s, const Table &t,
                                 unsigned lane, int j)
{
    float by_even = aligned || 2 * j < r.split ? s.by[0] : s.by[1];
    float by_odd = aligned || 2 * j + 1 < r.split ? s.by[0] : s.by[1];
    qc_run_two v;
    if constexpr (nf4) {
        v = qc_run_look(t, lane, r.q[j / 4], j % 4);
    } else {
        uint32_t q = r.q[j / 2] ^ 0x80808080u;
        unsigned at = j % 2 * 2; /* bytes `at` and at + 1 go below the upper three of 2^23 */
        float even = __uint_as_float(__byte_perm(q, 0x4b000000u, 0x7540u | at));
        float odd = __uint_as_float(__byte_perm(q, 0x4b000000u, 0x7540u | (at + 1)));
        v.even = __fmul_rn(__fadd_rn(even, -8388736.0f), s.first);
        v.odd = __fmul_rn(__fadd_rn(odd, -8388736.0f), s.first);
    }
    v.even = __fmul_rn(v.even, by_even);
    v.odd = __fmul_rn(v.odd, by_odd);
    return v;
}

/* Gives the same as float16, with the even element in the low half: a register of a matrix
 * fragment. */
template <bool nf4, bool aligned, typename Table>
QC_DEVICE uint32_t qc_run_word(const qc_run<nf4> &r, const qc_run_scales &s, const Table &t,
                               unsigned lane, int j)
{
    qc_run_two v = qc_run_pair<nf4, aligned>(r, s, t, lane, j);
    return qc_half2_of_floats(v.even, v.odd);
}

/* ---- the last steps from a float sum to y ---- */

/* Returns v * 2^exponent, |exponent| <= 378: exact, or the right infinity. A result below the
 * normal floats may be rounded more than once. */
QC_DEVICE float qc_scale_pow2(float v, int exponent)
{
    if (exponent == 0)
        return v;
    int third = exponent / 3;
    float f = __uint_as_float((uint32_t)(third + 127) << 23);
    float g = __uint_as_float((uint32_t)(exponent - 2 * third + 127) << 23);
    return __fmul_rn(__fmul_rn(__fmul_rn(v, f), f), g);
}

/* Returns an element of a F16 or BF16 array. */
QC_DEVICE float qc_load_16(const void *p, uint64_t index, qc_dtype dtype)
{
    uint16_t bits = static_cast<const uint16_t *>(p)[index];
    return dtype == QC_DTYPE_F16 ? qc_float_of_half(bits) : qc_float_of_bf16(bits);
}

QC_DEVICE void qc_store_16(void *p, uint64_t index, qc_dtype dtype, float v)
{
    static_cast<uint16_t *>(p)[index] =
        dtype == QC_DTYPE_F16 ? qc_half_of_float(v) : qc_bf16_of_float(v);
}

/* g / (1 + e^-t), with each operation rounded to float. */
QC_DEVICE float qc_activated(float g, qc_matmul_gate act)
{
    float t = g;
    if (act == QC_MATMUL_GELU_TANH) {
        float inner = __fmul_rn(__fmul_rn(__fmul_rn(g, g), g), 0.044715f);
        t = __fmul_rn(1.5957691216057308f, __fadd_rn(g, inner));
    }
    float v = __fdiv_rn(g, __fadd_rn(1.0f, expf(-t)));
    return v;
}

/* Makes y[row, column] of a sum: the one place where y is rounded, in the steps of qc_matmul_io. */
QC_DEVICE void qc_finish(const qc_matmul_output &o, uint64_t row, uint64_t column, float sum,
                         int exponent)
{
    float v = qc_scale_pow2(sum, -exponent);
    if (o.bias)
        v = __fadd_rn(v, qc_load_16(o.bias, column, o.dtype));
    if (o.gate)
        v = __fmul_rn(qc_activated(qc_load_16(o.gate, row * o.ldg + column, o.dtype), o.act), v);
    if (o.residual)
        v = __fadd_rn(v, qc_load_16(o.residual, row * o.ldr + column, o.dtype));
    qc_store_16(o.y, row * o.ldy + column, o.dtype, v);
}

#endif
