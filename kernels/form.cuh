/* What the codes of a form stand for, and which code is nearest to a value: the one place that says
 * so for searching, calibrating and dequantizing. `kind` is mostly a constant after inlining. (What
 * products decode with is in matmul_run.cuh and matmul_codes.cuh; a path may refuse a form.) */
#ifndef QC_KERNELS_FORM_CUH
#define QC_KERNELS_FORM_CUH

#include "kernels/cuda_scale_search_internal.cuh"
#include "quant/quant_form.h"

struct qc_form_product {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return __fmul_rn(a, b);
    }
};

/* What a reader makes of a code; `number` is the code's value (NF4) or the code itself. Product is
 * for whoever wants other NaNs than the GPU's. */
template <typename Product = qc_form_product>
QC_DEVICE float qc_form_value(qc_form_kind kind, float number, float scale)
{
    if (kind == QC_FORM_NF4)
        return Product::of(number, scale);
    if (kind == QC_FORM_INT8_ROWS)
        return Product::of(Product::of(number, scale), QC_CUDA_INT8_STEP);
    return Product::of(__fmul_rn(number, QC_CUDA_INT8_STEP), scale);
}

/* The number of a code. All lanes of the warp take part, here and below. */
QC_DEVICE float qc_form_number(qc_form_kind kind, const qc_nf4_tables &tables, int code)
{
    if (kind == QC_FORM_NF4)
        return __shfl_sync(QC_ALL_LANES, tables.code, code & 15);
    return (float)code;
}

/* The value of a code at a scale of 1. */
QC_DEVICE float qc_form_unit(qc_form_kind kind, float number)
{
    return kind == QC_FORM_NF4 ? number : __fmul_rn(number, QC_CUDA_INT8_STEP);
}

/* What takes a value to its code's place, as qc_feedback_inverse. */
QC_DEVICE float qc_form_inverse(qc_form_kind kind, float scale)
{
    if (!(fabsf(scale) >= 0x1p-118f))
        return 0.0f;
    float inverse = __frcp_rn(scale);
    return kind == QC_FORM_NF4 ? inverse : __fmul_rn(inverse, 127.0f);
}

/* The code nearest to y, which is a value times the inverse of its scale. */
QC_DEVICE int qc_form_code(qc_form_kind kind, const qc_nf4_tables &tables, float y)
{
    if (kind == QC_FORM_NF4)
        return (int)(qc_nf4_search(tables, qc_nf4_clamped(y)) & 15u);
    float q = fmaxf(fminf(y, 127.0f), -127.0f);
    return (int)__fadd_rn(__fadd_rn(q, QC_CUDA_ROUND), -QC_CUDA_ROUND);
}

/* The number of that code. */
QC_DEVICE float qc_form_nearest(qc_form_kind kind, const qc_nf4_tables &tables, float y)
{
    if (kind == QC_FORM_NF4)
        return qc_form_number(kind, tables, qc_form_code(kind, tables, y));
    float q = fmaxf(fminf(y, 127.0f), -127.0f);
    return __fadd_rn(__fadd_rn(q, QC_CUDA_ROUND), -QC_CUDA_ROUND);
}

#endif
