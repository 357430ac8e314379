/* What the two searches share: elements, residues, scales of integers, and sums over the sixteen
 * threads of a team. */
#ifndef QC_KERNELS_CUDA_SCALE_SEARCH_INTERNAL_CUH
#define QC_KERNELS_CUDA_SCALE_SEARCH_INTERNAL_CUH

#include "kernels/cuda_quantize.h"
#include "kernels/cuda_quantize_internal.cuh"

/* dtype is F32, F16 or BF16, and the same in all threads. */
QC_DEVICE float qc_search_element(const void *src, qc_dtype dtype, uint64_t i)
{
    if (dtype == QC_DTYPE_F32)
        return qc_source<QC_DTYPE_F32>::one(src, i);
    if (dtype == QC_DTYPE_F16)
        return qc_source<QC_DTYPE_F16>::one(src, i);
    return qc_source<QC_DTYPE_BF16>::one(src, i);
}

/* Rounds y half to even. */
QC_DEVICE float qc_round_even(float y)
{
    return __fadd_rn(__fadd_rn(y, QC_CUDA_ROUND), -QC_CUDA_ROUND);
}

/* Does the same and clamps to +-127. */
QC_DEVICE float qc_int8_nearest(float y)
{
    return fminf(fmaxf(qc_round_even(y), -127.0f), 127.0f);
}

/* What integers are made of, and how their scales are; the host fills it. The names are those of
 * qc_form_ops. */
struct qc_integers {
    float lowest, highest, step;
    int zero;
    unsigned bits;
    bool words;
    qc_dtype scale_dtype;
    float reach; /* qc_form_reach */
};

static inline qc_integers qc_integers_of(const qc_form *form)
{
    const qc_form_ops *ops = form->ops;
    qc_integers s = {(float)ops->lowest, (float)ops->highest, ops->step,
                     ops->zero,          ops->bits,           ops->words != 0,
                     form->scale_dtype,  qc_form_reach(ops)};
    return s;
}

/* Returns the number of the code nearest to y, where codes are evenly spaced. */
QC_DEVICE float qc_nearest_number(const qc_integers &how, float y)
{
    return fminf(fmaxf(qc_round_even(y), how.lowest), how.highest);
}

/* Writes the code of number q to element at + l of a block or run of n elements, whose codes begin
 * at `to`. Lane l of a team has that element; the lanes of a warp call it together, and `at` is a
 * multiple of 16.
 *
 * 16 codes fill 2 * bits bytes, and lane l writes byte l. Four codes meet in every fourth lane. A
 * byte begins within four of them, and ends within these or the next four. Bits behind the last
 * code are 0, up to the end of its word where rows begin with words. */
QC_DEVICE void qc_put_codes(const qc_integers &how, unsigned char *to, uint32_t n, uint32_t at,
                            unsigned l, float q)
{
    const uint32_t bits = how.bits, wide = 4 * bits;
    uint32_t code = at + l < n ? (uint32_t)((int)q + how.zero) : 0;
    if (bits == 8) {
        if (at + l < n)
            to[at + l] = (unsigned char)code;
        return;
    }
    code |= __shfl_down_sync(QC_ALL_LANES, code, 1, 16) << bits;
    code |= __shfl_down_sync(QC_ALL_LANES, code, 2, 16) << 2 * bits;
    const uint32_t begin = l < 2 * bits ? 8 * l : 0;
    const uint32_t four = (begin >= wide) + (begin >= 2 * wide) + (begin >= 3 * wide);
    const uint32_t inside = begin - four * wide;
    uint32_t value = __shfl_sync(QC_ALL_LANES, code, (int)(4 * four), 16) >> inside;
    const uint32_t next = __shfl_sync(QC_ALL_LANES, code, (int)(4 * four + 4) % 16, 16);
    value = four < 3 ? value | next << (wide - inside) : value;
    const uint32_t byte = at / 8 * bits + l;
    const uint32_t end = how.words ? (n * bits + 31) / 32 * 4 : (n * bits + 7) / 8;
    if (l < 2 * bits && byte < end)
        to[byte] = (unsigned char)value;
    else if (at < n && at + 16 >= n && byte < end)
        to[byte] = 0;
}

/* Rounds as qc_int_round_scale does, for s >= 0. */
QC_DEVICE float qc_round_scale(qc_dtype dtype, float s)
{
    bool f16 = dtype == QC_DTYPE_F16, bf16 = dtype == QC_DTYPE_BF16;
    if (f16)
        s = qc_float_of_half(qc_half_of_float(s));
    if (bf16)
        s = qc_float_of_bf16(qc_bf16_of_float(s));
    return fminf(fmaxf(s, f16 ? 0x1p-24f : 0x1p-126f), f16 ? 65504.0f : 0x1.fep120f);
}

/* Returns an integer's scale for a factor of absmax, which has the scale's sign. */
QC_DEVICE float qc_integer_scale(const qc_integers &how, float absmax, float factor)
{
    float s = __fdiv_rn(__fmul_rn(absmax, fabsf(factor)), how.reach);
    return copysignf(qc_round_scale(how.scale_dtype, s), factor);
}

/* Does what qc_int_scale does. */
QC_DEVICE float qc_integer_scale_of(const qc_integers &how, float absmax)
{
    float middle = __fmul_rn(__fadd_rn(how.highest, -how.lowest), 0.5f);
    return qc_round_scale(how.scale_dtype, __fdiv_rn(absmax, middle));
}

/* Lane l of a warp keeps code value l % 16, the one above it, and the threshold between them. */
struct qc_nf4_values {
    qc_nf4_tables tables;
    float next;
};

QC_DEVICE qc_nf4_values qc_nf4_values_of_lane(unsigned lane)
{
    static constexpr float codes[17] = {QC_NF4_CODE_VALUES, 1.0f};
    qc_nf4_values v = {qc_nf4_tables_of_lane(lane), codes[lane % 16 + 1]};
    return v;
}

/* The outermost thresholds lie within +-1, so clamping changes no code. */
QC_DEVICE float qc_nf4_clamped(float y)
{
    return fminf(fmaxf(y, -1.0f), 1.0f);
}

/* Takes any finite y. All lanes of the warp take part, here and in qc_nf4_residue. */
QC_DEVICE uint32_t qc_nf4_code_of(const qc_nf4_values &v, float y)
{
    return qc_nf4_search(v.tables, qc_nf4_clamped(y)) & 15u;
}

/* Returns +-(y less the nearest code value). The guess is that of qc_nf4_search: the code or one
 * below it. If y is so near a threshold that another value than the code's is the nearest, then
 * that threshold is the guess's own. */
QC_DEVICE float qc_nf4_residue(const qc_nf4_values &v, float y)
{
    float c = qc_nf4_clamped(y);
    float slope = __fmaf_rn(c, -c, 2.84375f);
    uint32_t guess = __float_as_uint(__fmaf_rn(c, slope, 0x1.8p21f + 1.75f));
    float below = __fadd_rn(y, -__shfl_sync(QC_ALL_LANES, v.tables.code, (int)guess));
    float above = __fadd_rn(y, -__shfl_sync(QC_ALL_LANES, v.next, (int)guess));
    return fminf(fabsf(below), fabsf(above));
}

#endif
