/* Float partial sums [splits][m][n] to y: the splits are added in order, so that results do not
 * depend on which block was first; then exponents, bias and the one rounding.
 *
 *   grid    x: 256 columns of y a block, one a thread; y: rows
 *   bytes   4 * splits read and 2 written per element of y: bound by memory
 */
#include "kernels/matmul_finish.cuh"
#include "kernels/matmul_kernels.h"

#define THREADS   256u
#define ROWS_MOST QC_GRID_ROWS_MOST

namespace
{

__global__ void __launch_bounds__(THREADS) matmul_reduce(const qc_matmul_call c, uint32_t splits)
{
    uint64_t column = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (column >= c.n)
        return;
    int w_exponent = c.weights.exponent ? *c.weights.exponent : 0;
    for (uint64_t row = blockIdx.y; row < c.m; row += gridDim.y) {
        const float *p = c.partials + row * c.n + column;
        float sum = splits ? *p : 0.0f;
        for (uint32_t i = 1; i < splits; i++)
            sum = __fadd_rn(sum, p[(uint64_t)i * c.m * c.n]);
        int exponent = w_exponent + (c.x_exponent ? c.x_exponent[row] : 0);
        qc_finish(c.y, c.y_dtype, c.ldy, row, column, c.bias, sum, exponent);
    }
}

} /* namespace */

qc_status qc_matmul_reduce_launch(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err)
{
    uint64_t blocks = (c->n + THREADS - 1) / THREADS;
    if (blocks > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "y has too many columns for one launch");
    dim3 grid((unsigned)blocks, (unsigned)(c->m < ROWS_MOST ? c->m : ROWS_MOST));
    QC_LAUNCH(matmul_reduce, grid, dim3(THREADS), 0, s, *c, c->plan.splits);
    return qc_cuda_launched("matmul_reduce", err);
}
