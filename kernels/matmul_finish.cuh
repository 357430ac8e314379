/* The last steps from a float sum to y, which all matmul kernels share. */
#ifndef QC_KERNELS_MATMUL_FINISH_CUH
#define QC_KERNELS_MATMUL_FINISH_CUH

#include "base/dtype.h"
#include "kernels/ptx.cuh"

/* v * 2^exponent, |exponent| <= 378: exact, or the right infinity. A result below the normal floats
 * may be rounded more than once. */
QC_DEVICE float qc_scale_pow2(float v, int exponent)
{
    if (exponent == 0)
        return v;
    int third = exponent / 3;
    float f = __uint_as_float((uint32_t)(third + 127) << 23);
    float g = __uint_as_float((uint32_t)(exponent - 2 * third + 127) << 23);
    return __fmul_rn(__fmul_rn(__fmul_rn(v, f), f), g);
}

/* An element of a F16 or BF16 array. */
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

/* y[row, column] = sum * 2^-exponent + bias[column], rounded once to y's dtype (the sum with the
 * bias is a float addition). */
QC_DEVICE void qc_finish(void *y, qc_dtype y_dtype, uint64_t ldy, uint64_t row, uint64_t column,
                         const void *bias, float sum, int exponent)
{
    float v = qc_scale_pow2(sum, -exponent);
    if (bias)
        v = __fadd_rn(v, qc_load_16(bias, column, y_dtype));
    qc_store_16(y, row * ldy + column, y_dtype, v);
}

#endif
