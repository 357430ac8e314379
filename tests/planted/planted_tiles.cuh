/* Planted faults: tiles whose bounds are off by one, and alignment. */
#ifndef QC_TESTS_PLANTED_TILES_CUH
#define QC_TESTS_PLANTED_TILES_CUH

#include "kernels/ptx.cuh"

namespace
{
/* y[i] = 2 x[i]. fault 1: writes one too many; 2: misses the last; 3: reads one too many (and adds
 * it times 0, which is nothing but where it is NaN). */
template <int fault> static __global__ void pt_double(const float *x, float *y, unsigned n)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned end = fault == 1 ? n + 1 : fault == 2 ? n - 1 : n;
    if (i < end)
        y[i] = 2 * (i < n ? x[i] : 0) + (fault == 3 ? 0 * x[i + 1] : 0);
}

/* Column sums of a [rows, 32] matrix in shared memory, a tile of 8 rows at a time. fault 1: one row
 * too many, which is another array's; 2: the tile's last row is left out. */
struct pt_shared {
    float tile[8][32];
    float after[32];
};

template <int fault> static __global__ void pt_columns(const float *x, float *y, unsigned rows)
{
    QC_SHARED(pt_shared, s);
    unsigned t = threadIdx.x;
    float sum = 0;
    s.after[t] = 1;
    for (unsigned first = 0; first < rows; first += 8) {
        unsigned n = rows - first < 8 ? rows - first : 8;
        for (unsigned r = 0; r < n; r++)
            s.tile[r][t] = x[(first + r) * 32 + t];
        __syncthreads();
        unsigned end = fault == 1 ? n + 1 : fault == 2 ? n - 1 : n;
        for (unsigned r = 0; r < end; r++)
            sum += s.tile[r][31 - t];
        __syncthreads();
    }
    y[31 - t] = sum;
}

/* 16 bytes at a time from a row that starts at 4 bytes. */
template <bool fault> static __global__ void pt_vector(const float *x, float *y)
{
    unsigned t = threadIdx.x;
    const float *row = fault ? x + 1 : x;
    const float4 v = *reinterpret_cast<const float4 *>(row + 4 * t);
    y[t] = v.x + v.y + v.z + v.w;
}

template <bool fault> static __global__ void pt_stream(const float *x, float *y)
{
    unsigned t = threadIdx.x;
    uint4 v = qc_ld_stream_16((fault ? x + 1 : x) + 4 * t);
    y[t] =
        __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) + __uint_as_float(v.w);
}
} // namespace

#endif
