/* Planted faults: kernels that begin before the one in front of them has ended. Each kernel with
 * fault != 0 breaks one rule of qc_grid_wait. */
#ifndef QC_TESTS_PLANTED_OVERLAP_CUH
#define QC_TESTS_PLANTED_OVERLAP_CUH

#include "kernels/ptx.cuh"

namespace
{
enum { PO_THREADS = 64, PO_BLOCKS = 5, PO_COUNT = PO_THREADS * PO_BLOCKS };

struct po_args {
    const float *x;
    float *y;
};

struct po_shared {
    float read[PO_THREADS];
};

/* y = x + 1. fault 1: x is read before the wait; 2: y is written before it; 3: a warp ends without
 * having waited; 4: the value goes through shared memory, and is read from x before the wait. */
template <int fault> static __global__ void po_step(const po_args a)
{
    QC_SHARED(po_shared, sh);
    unsigned t = threadIdx.x, i = blockIdx.x * PO_THREADS + t;
    qc_grid_release();
    float early = fault == 1 ? a.x[i] : 0.0f;
    if (fault == 2)
        a.y[i] = 0.0f;
    if (fault == 4)
        sh.read[t] = a.x[i];
    if (fault == 3 && t >= 32) {
        if (blockIdx.x == gridDim.x)
            qc_grid_wait();
        return;
    }
    qc_grid_wait();
    if (fault != 4)
        sh.read[t] = fault == 1 ? early : a.x[i];
    __syncthreads();
    a.y[i] = sh.read[t] + 1.0f;
}
} // namespace

#endif
