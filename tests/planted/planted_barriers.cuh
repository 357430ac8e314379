/* Planted faults: barriers. Each kernel with fault == true lacks one thing of its twin. */
#ifndef QC_TESTS_PLANTED_BARRIERS_CUH
#define QC_TESTS_PLANTED_BARRIERS_CUH

#include "kernels/ptx.cuh"

namespace
{
enum { PB_THREADS = 128, PB_TILES = 5 };

struct pb_shared {
    float tile[PB_THREADS];
};

/* Each thread adds up what a thread of another warp brought, tile by tile. fault 1: the values may
 * not be there yet; fault 2: the next tile may overwrite them before they were read. */
template <int fault> static __global__ void pb_tiles(const float *x, float *y)
{
    QC_SHARED(pb_shared, s);
    unsigned t = threadIdx.x, other = (t + 77) % PB_THREADS;
    float sum = 0;
    for (unsigned i = 0; i < PB_TILES; i++) {
        s.tile[t] = x[i * PB_THREADS + t];
        if (fault != 1)
            __syncthreads();
        sum += s.tile[other];
        if (fault != 2)
            __syncthreads();
    }
    y[t] = sum;
}

/* The usual tree, once with a step too many behind the last barrier: within a warp, without
 * __syncwarp. */
template <bool fault> static __global__ void pb_tree(const float *x, float *y)
{
    QC_SHARED(pb_shared, s);
    unsigned t = threadIdx.x;
    s.tile[t] = x[t];
    __syncthreads();
    for (unsigned half = PB_THREADS / 2; half >= 32; half /= 2) {
        if (t < half)
            s.tile[t] += s.tile[t + half];
        __syncthreads();
    }
    if (t < 32)
        for (unsigned half = 16; half; half /= 2) {
            float next = t < half ? s.tile[t + half] : 0;
            if (!fault)
                __syncwarp();
            s.tile[t] += next;
            if (!fault)
                __syncwarp();
        }
    if (t == 0)
        y[0] = s.tile[0];
}

/* A warp's rows are loaded as fragments that other lanes wrote; fault: without __syncwarp. */
struct pb_rows {
    uint32_t row[32][4];
};

template <bool fault> static __global__ void pb_fragments(const float *x, float *y)
{
    QC_SHARED(pb_rows, s);
    unsigned lane = threadIdx.x % 32, other = (lane * 7 + 3) % 32;
    for (unsigned i = 0; i < 4; i++)
        s.row[other][i] = __float_as_uint(x[4 * other + i]);
    if (!fault)
        __syncwarp();
    uint32_t r[4];
    qc_ldmatrix_x4(r, s.row[lane]);
    for (unsigned i = 0; i < 4; i++)
        y[(8 * i + lane / 4) * 4 + lane % 4] = __uint_as_float(r[i]);
}

/* A barrier that only some threads come to. */
template <bool fault> static __global__ void pb_divergent(const float *x, float *y)
{
    QC_SHARED(pb_shared, s);
    unsigned t = threadIdx.x;
    s.tile[t] = x[t];
    if (fault) {
        if (t < 100)
            __syncthreads();
        else
            __syncwarp();
    } else {
        __syncthreads();
    }
    y[t] = s.tile[PB_THREADS - 1 - t];
    __syncthreads();
}
} // namespace

#endif
