/* The reference on the GPU: y in double, one thread per element of y, sums in k order. Products of
 * the exact float weight and the exact x are exact in double (24 + 11 bits); each addition rounds
 * once.
 *
 *   grid    x: a block has 128 columns of y (rows of W); y: rows of x
 *   bytes   weights are read once per row of x, through the caches; it is slow and plain on
 *           purpose, and shares no decoding with the kernels that are compared with it */
#include "kernels/matmul_kernels.h"
#include "kernels/matmul_run.cuh"
#include "quant/quant_values.h"

#define THREADS 128u

namespace
{

/* Holds what is needed of qc_form_ops, which lie in host memory. */
struct code_form {
    bool table, packed, by_rows, step_last;
    uint32_t bits;
    uint64_t row_bytes;
    int zero;
    float step;
};

struct reference_shared {
    float codes[16];
};

QC_DEVICE void fill_codes(const qc_weights &w, reference_shared &shared)
{
    const float values[16] = {QC_NF4_CODE_VALUES};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            shared.codes[i] = w.form.code_map ? w.form.code_map[i] : values[i];
    }
    __syncthreads();
}

QC_DEVICE float weight_at(const qc_weights &w, const code_form &form, const float *codes,
                          uint64_t row, uint64_t f)
{
    uint64_t b = form.by_rows ? row : f / w.form.block_elems;
    float absmax = w.absmax ? w.absmax[b]
                            : __fadd_rn(__fmul_rn(w.nested_map[w.absmax_codes[b]],
                                                  w.nested_absmax[b / w.nested_block]),
                                        w.form.offset);
    const uint8_t *from = static_cast<const uint8_t *>(w.codes);
    if (form.table)
        return __fmul_rn(codes[f % 2 ? from[f / 2] & 15 : from[f / 2] >> 4], absmax);
    float code;
    if (form.packed) { /* the code lies in one byte or two */
        uint64_t bit = (f - row * w.form.cols) * form.bits;
        from += row * form.row_bytes + bit / 8;
        uint32_t two = from[0] | (uint32_t)from[(bit % 8 + form.bits - 1) / 8] << 8;
        code = (float)((int)(two >> bit % 8 & ((1u << form.bits) - 1)) - form.zero);
    } else {
        code = (float)(int8_t)from[f];
    }
    return form.step_last ? __fmul_rn(__fmul_rn(code, absmax), form.step)
                          : __fmul_rn(__fmul_rn(code, form.step), absmax);
}

QC_DEVICE float dense_at(const void *dense, qc_dtype dtype, uint64_t f)
{
    return dtype == QC_DTYPE_F32 ? static_cast<const float *>(dense)[f]
                                 : qc_load_16(dense, f, dtype);
}

/* Without the 1, ptxas spills a register on sm_120 to have more thread blocks resident. */
template <bool quantized>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_reference(const qc_weights w, const code_form form, const qc_matmul_exact e)
{
    QC_SHARED(reference_shared, shared);
    if (quantized)
        fill_codes(w, shared);
    uint64_t column = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (column >= e.n)
        return;
    for (uint64_t row = blockIdx.y; row < e.m; row += gridDim.y) {
        double sum = 0.0;
        for (uint64_t i = 0; i < e.k; i++) {
            uint64_t f = column * e.k + i;
            float weight = quantized ? weight_at(w, form, shared.codes, column, f)
                                     : dense_at(e.dense, e.dense_dtype, f);
            double x = (double)qc_load_16(e.x, row * e.k + i, e.x_dtype);
            sum = __dadd_rn(sum, __dmul_rn((double)weight, x));
        }
        e.y[row * e.n + column] = sum;
    }
}

} /* namespace */

qc_status qc_matmul_reference_launch(const qc_matmul_exact *e, qc_cuda_stream s, qc_error *err)
{
    uint64_t blocks = (e->n + THREADS - 1) / THREADS;
    if (blocks > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "y has too many columns for one launch");
    const dim3 grid((unsigned)blocks, qc_cuda_grid_y(e->m));
    if (!e->w)
        return qc_cuda_start("matmul_reference", matmul_reference<false>, grid, dim3(THREADS),
                             sizeof(reference_shared), s, err, qc_weights{}, code_form{}, *e);
    const qc_form_ops *ops = e->w->form.ops;
    const code_form form = {qc_form_is_table(ops) != 0,
                            ops->low_first != 0,
                            qc_form_by_rows(&e->w->form) != 0,
                            ops->step_last != 0,
                            ops->bits,
                            qc_form_row_bytes(&e->w->form),
                            ops->zero,
                            ops->step};
    return qc_cuda_start("matmul_reference", matmul_reference<true>, grid, dim3(THREADS),
                         sizeof(reference_shared), s, err, *e->w, form, *e);
}
