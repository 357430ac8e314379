/* Dense rows of a weight that is repacked, for cuBLAS: what cuda_dequantize.cu makes of the file's
 * layout.
 *
 *   grid    x: a block has 128 runs of 32 codes of a row, one a thread; y: rows
 *   bytes   a thread reads 16 (NF4) or 32 (int8) in one or two loads and writes 64; that is 2.5 (3)
 *           bytes per weight, so the kernel is bound by memory */
#include "kernels/matmul_run.cuh"

#include <type_traits>

#define THREADS 128u

namespace
{

template <bool nf4> using dense_table = std::conditional_t<nf4, qc_run_singles, qc_run_plain>;

template <bool bf16> QC_DEVICE uint32_t rounded(qc_run_two v)
{
    return bf16 ? (uint32_t)qc_bf16_of_float(v.even) | (uint32_t)qc_bf16_of_float(v.odd) << 16
                : qc_half2_of_floats(v.even, v.odd);
}

/* ld_units counts units of 16 bytes from row to row. */
template <bool nf4, bool bf16>
__global__ void __launch_bounds__(THREADS)
    matmul_dense_rows(const qc_run_source w, uint64_t first_row, uint64_t rows, uint4 *dst,
                      uint64_t ld_units, const int *exponent)
{
    QC_SHARED(dense_table<nf4>, shared);
    qc_run_fill(shared, w, threadIdx.x, THREADS);
    __syncthreads();
    uint64_t run_index = (uint64_t)blockIdx.x * THREADS + threadIdx.x, k = run_index * QC_RUN_ELEMS;
    if (4 * run_index >= ld_units)
        return;
    unsigned lane = qc_run_lane(shared, threadIdx.x % 32);
    qc_run_power power = qc_run_power_of(exponent ? *exponent : 0);
    for (uint64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        uint64_t n = first_row + row;
        uint32_t words[16];
        if (k < w.cols) {
            qc_run<nf4> run;
            qc_run_load<nf4, false>(run, w, n, w.first + n * w.ld, k);
            qc_run_scales scales = qc_run_scales_of<nf4, false>(run, w, shared.small, power);
#pragma unroll
            for (int j = 0; j < 16; j++) {
                qc_run_two v = qc_run_pair<nf4, false>(run, scales, shared, lane, j);
                words[j] = rounded<bf16>(v) & ((2 * j < run.count ? 0xffffu : 0u) |
                                               (2 * j + 1 < run.count ? 0xffff0000u : 0u));
            }
        } else {
#pragma unroll
            for (int j = 0; j < 16; j++)
                words[j] = 0;
        }
        uint4 *to = dst + row * ld_units + 4 * run_index;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 v = {words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]};
            to[j] = v;
        }
    }
}

template <bool nf4, bool bf16>
qc_status launch(const qc_matmul_weights *w, uint64_t first_row, uint64_t rows, void *dst,
                 uint64_t ld, const int *exponent, qc_cuda_stream s, qc_error *err)
{
    const uint64_t blocks = qc_ceil_div_u64(ld, THREADS * QC_RUN_ELEMS);
    if (blocks > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "rows of a weight are too long for one launch");
    return qc_cuda_start("matmul_dense_rows", matmul_dense_rows<nf4, bf16>,
                         dim3((unsigned)blocks, qc_cuda_grid_y(rows)), dim3(THREADS),
                         sizeof(dense_table<nf4>), s, err, qc_run_source_of(w), first_row, rows,
                         static_cast<uint4 *>(dst), ld / 8, exponent);
}

} /* namespace */

qc_status qc_matmul_dense_rows_launch(const qc_matmul_weights *w, uint64_t first_row, uint64_t rows,
                                      void *dst, qc_dtype dst_dtype, uint64_t ld,
                                      const int *exponent, qc_cuda_stream s, qc_error *err)
{
    const bool nf4 = w->w.form.ops->kind == QC_FORM_NF4, bf16 = dst_dtype == QC_DTYPE_BF16;
    auto how = nf4    ? bf16 ? launch<true, true> : launch<true, false>
                  : bf16 ? launch<false, true>
                      : launch<false, false>;
    return how(w, first_row, rows, dst, ld, exponent, s, err);
}
