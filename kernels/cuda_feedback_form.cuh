/* What the codes of a form stand for, and which one is nearest to a value, as calibrating computes
 * it: the names are those of quant/quant_form.h. `table` is f.table; kernels that are compiled for
 * it have it as a constant. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_FORM_CUH
#define QC_KERNELS_CUDA_FEEDBACK_FORM_CUH

#include "kernels/cuda_feedback_internal.h"
#include "kernels/cuda_scale_search_internal.cuh"

/* Returns the number of a code: its value in NF4, otherwise the code itself, which is kept without
 * `zero` on the device. All lanes of the warp take part, here and below. */
QC_DEVICE float qc_form_number(bool table, const qc_nf4_tables &tables, int code)
{
    if (table)
        return __shfl_sync(QC_ALL_LANES, tables.code, code & 15);
    return (float)code;
}

/* Returns the number nearest to y, which is a value times the inverse of its scale, among evenly
 * spaced codes. */
QC_DEVICE float qc_form_even(const qc_cuda_form &f, float y)
{
    return qc_round_even(fmaxf(fminf(y, f.highest), f.lowest));
}

QC_DEVICE int qc_form_code(bool table, const qc_cuda_form &f, const qc_nf4_tables &tables, float y)
{
    if (table)
        return (int)(qc_nf4_search(tables, qc_nf4_clamped(y)) & 15u);
    return (int)qc_form_even(f, y);
}

/* Returns the number of that code. */
QC_DEVICE float qc_form_nearest(bool table, const qc_cuda_form &f, const qc_nf4_tables &tables,
                                float y)
{
    if (table)
        return qc_form_number(table, tables, qc_form_code(table, f, tables, y));
    return qc_form_even(f, y);
}

/* Returns the value of a number at a scale of 1. */
QC_DEVICE float qc_form_unit(const qc_cuda_form &f, float number)
{
    return __fmul_rn(number, f.step);
}

/* Returns what a reader makes of a number. */
QC_DEVICE float qc_form_made(bool table, const qc_cuda_form &f, float number, float scale)
{
    if (table)
        return __fmul_rn(number, scale);
    if (f.step_last)
        return __fmul_rn(__fmul_rn(number, scale), f.step);
    return __fmul_rn(__fmul_rn(number, f.step), scale);
}

/* Adds eight products, in order and not fused; u is read 16 bytes at a time. */
QC_DEVICE float qc_form_feed(float v, const float (&fed)[8], const float *u)
{
    const float4 low = reinterpret_cast<const float4 *>(u)[0];
    const float4 high = reinterpret_cast<const float4 *>(u)[1];
    v = __fadd_rn(v, __fmul_rn(fed[0], low.x));
    v = __fadd_rn(v, __fmul_rn(fed[1], low.y));
    v = __fadd_rn(v, __fmul_rn(fed[2], low.z));
    v = __fadd_rn(v, __fmul_rn(fed[3], low.w));
    v = __fadd_rn(v, __fmul_rn(fed[4], high.x));
    v = __fadd_rn(v, __fmul_rn(fed[5], high.y));
    v = __fadd_rn(v, __fmul_rn(fed[6], high.z));
    return __fadd_rn(v, __fmul_rn(fed[7], high.w));
}

/* Does what qc_feedback_inverse does. */
QC_DEVICE float qc_form_inverse(const qc_cuda_form &f, float scale)
{
    if (!(fabsf(scale) >= 0x1p-118f))
        return 0.0f;
    return __fmul_rn(__frcp_rn(scale), f.span);
}

/* Does what qc_form_round_scale does, but not for NaN. */
QC_DEVICE float qc_form_scale(const qc_cuda_form &f, float s)
{
    return f.integer ? copysignf(qc_round_scale(f.scale_dtype, fabsf(s)), s) : s;
}

#endif
