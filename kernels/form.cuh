/* What the codes of a form stand for, as dequantizing computes it; `kind` is a constant after
 * inlining. (Calibrating has cuda_feedback_form.cuh; what products decode with is in matmul_run.cuh
 * and matmul_codes.cuh. A path may refuse a form.) */
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

#endif
