/* Float partial sums [splits][m][n] to y: the splits are added in order, so that results do not
 * depend on which block was first; then exponents, bias and the one rounding.
 *
 *   grid    x: 256 columns of y a block, one a thread; y: rows
 *   bytes   4 * splits read and 2 written per element of y: bound by memory
 *   launch  may begin while the kernel that makes the partial sums runs */
#include "kernels/matmul_kernels.h"
#include "kernels/matmul_run.cuh"

#define THREADS 256u

namespace
{

__global__ void __launch_bounds__(THREADS) matmul_reduce(const qc_matmul_call c)
{
    uint64_t column = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t splits = c.plan.splits;
    qc_grid_release();
    qc_grid_wait();
    if (column >= c.n)
        return;
    int w_exponent = c.weights.exponent ? *c.weights.exponent : 0;
    for (uint64_t row = blockIdx.y; row < c.m; row += gridDim.y) {
        const float *p = c.partials + row * c.n + column;
        float sum = splits ? *p : 0.0f;
        for (uint32_t i = 1; i < splits; i++)
            sum = __fadd_rn(sum, p[(uint64_t)i * c.m * c.n]);
        int exponent = w_exponent + (c.x_exponent ? c.x_exponent[row] : 0);
        qc_finish(c.out, row, column, sum, exponent);
    }
}

} /* namespace */

/* All of kernels/ is compiled for the same architectures, so any kernel answers for the others.
 * This is the smallest of those that wait for the launch before theirs, which is what is asked
 * about.
 *
 * ptxVersion, not binaryVersion: where the driver compiles compute_80's PTX for a GPU of sm_90, the
 * binary's version is 90, but __CUDA_ARCH__ was 800 when the PTX was made, so that it has no
 * griddepcontrol.wait. A launch that overlaps the one before it would then be a data race. */
qc_status qc_cuda_compiled_for(uint32_t *code, qc_error *err)
{
    struct cudaFuncAttributes a;
    QC_TRY(qc_cuda_check(cudaFuncGetAttributes(&a, reinterpret_cast<const void *>(matmul_reduce)),
                         "asking what the kernels were compiled for", err));
    *code = (uint32_t)a.ptxVersion;
    return QC_OK;
}

qc_status qc_matmul_reduce_launch(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err)
{
    uint64_t blocks = (c->n + THREADS - 1) / THREADS;
    if (blocks > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "y has too many columns for one launch");
    dim3 grid((unsigned)blocks, qc_cuda_grid_y(c->m));
    return qc_cuda_launch_overlapping(matmul_reduce, grid, dim3(THREADS), 0, s, c->plan.overlaps,
                                      "matmul_reduce", err, *c);
}
