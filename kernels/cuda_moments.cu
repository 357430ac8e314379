/* The contracts are in cuda_feedback_internal.h. All of it is bound by memory: a square of doubles
 * is read once and written once, or written as floats. What goes from rows to columns passes
 * through shared memory, 32 x 32 elements a thread block, so that both sides are read and written
 * 32 in a row. Only the factor's matrix is gathered element by element: each takes a sector of 32
 * bytes, so the triangle has 16 n^2 bytes of traffic, a hundredth of what its factor takes. */
#include "kernels/cuda_feedback_internal.h"

#include "kernels/cuda_launch.cuh"

namespace
{

constexpr unsigned threads_per_block = 256;
constexpr unsigned tile = 32;
constexpr unsigned tile_rows = threads_per_block / tile; /* rows of threads */

struct tile_shared {
    double v[tile][tile + 1];
};

/* Infinity and NaN are odd: they do not give 0 when subtracted from themselves. */
QC_DEVICE int is_odd(double v)
{
    return !(v - v == 0.0);
}

__global__ void __launch_bounds__(threads_per_block)
    find_odd(const double *h, uint64_t n, int lower, uint32_t *odd)
{
    for (uint64_t row = blockIdx.x; row < n; row += gridDim.x) {
        const uint64_t end = lower ? row + 1 : n;
        int found = 0;
        for (uint64_t i = threadIdx.x; i < end; i += threads_per_block)
            found |= is_odd(h[row * n + i]);
        found = __syncthreads_or(found);
        if (threadIdx.x == 0)
            odd[row] = found ? 1u : 0u;
    }
}

__global__ void __launch_bounds__(threads_per_block)
    diagonal(const double *h, uint64_t n, double *out)
{
    for (uint64_t i = (uint64_t)blockIdx.x * threads_per_block + threadIdx.x; i < n;
         i += (uint64_t)gridDim.x * threads_per_block)
        out[i] = h[i * n + i];
}

QC_DEVICE uint64_t back_of(const qc_cuda_factor_input &in, uint64_t place)
{
    return in.order[in.n - 1 - place];
}

__global__ void __launch_bounds__(threads_per_block)
    gather_factor(qc_cuda_factor_input in, const double *h, double *a)
{
    for (uint64_t i = blockIdx.y; i < in.n; i += gridDim.y) {
        const uint64_t row = back_of(in, i);
        for (uint64_t j = i + (uint64_t)blockIdx.x * threads_per_block + threadIdx.x; j < in.n;
             j += (uint64_t)gridDim.x * threads_per_block) {
            const uint64_t col = back_of(in, j);
            double v = 0.0;
            if (i == j)
                v = in.damped[row];
            else if (!in.dead[row] && !in.dead[col])
                v = row > col ? h[row * in.n + col] : h[col * in.n + row];
            a[i * in.n + j] = v;
        }
    }
}

/* Fills the tile at block (x, y) of a square of tiles. Above the diagonal it is H, transposed, and
 * below it U. */
__global__ void __launch_bounds__(threads_per_block)
    fill_feedback(qc_cuda_factor_input in, const double *h, const double *a, float *hu)
{
    QC_SHARED(tile_shared, shared);
    const unsigned lane = threadIdx.x % tile;
    const uint64_t n = in.n, j0 = (uint64_t)blockIdx.x * tile, j = j0 + lane;
    for (uint64_t k0 = (uint64_t)blockIdx.y * tile; k0 < n; k0 += (uint64_t)gridDim.y * tile) {
        for (unsigned r = threadIdx.x / tile; r < tile; r += tile_rows)
            if (j0 + r < n && k0 + lane <= j0 + r)
                shared.v[r][lane] = h[(j0 + r) * n + k0 + lane];
        __syncthreads();
        for (unsigned r = threadIdx.x / tile; r < tile; r += tile_rows) {
            const uint64_t k = k0 + r;
            if (k >= n || j >= n)
                continue;
            double v = 0.0;
            if (j < k)
                v = a[(n - 1 - k) * n + n - 1 - j] / a[(n - 1 - k) * n + n - 1 - k];
            else if (j == k)
                v = in.dead[k] ? 0.0 : in.damped[k] * in.scale;
            else if (!in.dead[j] && !in.dead[k])
                v = shared.v[lane][r] * in.scale;
            hu[k * n + j] = (float)v;
        }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(threads_per_block)
    fill_columns(qc_cuda_factor_input in, const double *a, float *d, float *inverse)
{
    const uint64_t n = in.n;
    for (uint64_t k = (uint64_t)blockIdx.x * threads_per_block + threadIdx.x; k < n;
         k += (uint64_t)gridDim.x * threads_per_block) {
        const double r = a[(n - 1 - k) * n + n - 1 - k];
        const float own = (float)(in.damped[k] * in.scale);
        d[in.order[k]] = (float)(r * r * in.scale);
        inverse[k] = in.dead[k] || !(own > 0x1p-100f) ? 0.0f : __frcp_rn(own);
    }
}

__global__ void __launch_bounds__(threads_per_block)
    gather_target(qc_cuda_factor_input in, const double *c, double *x)
{
    QC_SHARED(tile_shared, shared);
    const unsigned lane = threadIdx.x % tile;
    const uint64_t n = in.n, i0 = (uint64_t)blockIdx.x * tile, i = i0 + lane;
    for (uint64_t r0 = (uint64_t)blockIdx.y * tile; r0 < n; r0 += (uint64_t)gridDim.y * tile) {
        for (unsigned k = threadIdx.x / tile; k < tile; k += tile_rows) {
            const uint64_t r = r0 + lane;
            if (i0 + k >= n || r >= n)
                continue;
            const uint64_t row = back_of(in, i0 + k);
            const double v = in.dead[row] ? 0.0 : c[row * n + r];
            shared.v[k][lane] = r == row ? v + in.added[row] : v;
        }
        __syncthreads();
        for (unsigned k = threadIdx.x / tile; k < tile; k += tile_rows)
            if (r0 + k < n && i < n)
                x[(r0 + k) * n + i] = shared.v[lane][k];
        __syncthreads();
    }
}

__global__ void __launch_bounds__(threads_per_block)
    narrow_target(qc_cuda_factor_input in, const double *x, float *m)
{
    QC_SHARED(tile_shared, shared);
    const unsigned lane = threadIdx.x % tile;
    const uint64_t n = in.n, r0 = (uint64_t)blockIdx.x * tile, r = r0 + lane;
    for (uint64_t i0 = (uint64_t)blockIdx.y * tile; i0 < n; i0 += (uint64_t)gridDim.y * tile) {
        for (unsigned k = threadIdx.x / tile; k < tile; k += tile_rows)
            if (r0 + k < n && i0 + lane < n)
                shared.v[k][lane] = x[(r0 + k) * n + i0 + lane];
        __syncthreads();
        for (unsigned k = threadIdx.x / tile; k < tile; k += tile_rows)
            if (i0 + k < n && r < n)
                m[back_of(in, i0 + k) * n + r] = (float)shared.v[lane][k];
        __syncthreads();
    }
}

dim3 tiles_of(uint64_t n)
{
    return dim3((unsigned)((n + tile - 1) / tile), qc_cuda_grid_y((n + tile - 1) / tile));
}

/* Returns a grid with threads for so many columns in x, and rows in y. */
dim3 grid_of(uint64_t cols, uint64_t rows)
{
    return dim3(qc_cuda_grid_x(cols, threads_per_block), qc_cuda_grid_y(rows));
}

const dim3 threads(threads_per_block);

} // namespace

qc_status qc_cuda_find_odd(const double *h, uint64_t n, int lower, uint32_t *odd, qc_cuda_stream s,
                           qc_error *err)
{
    return qc_cuda_start("moments_find_odd", find_odd, dim3(qc_cuda_grid_x(n, 1)), threads, 0, s,
                         err, h, n, lower, odd);
}

qc_status qc_cuda_diagonal(const double *h, uint64_t n, double *out, qc_cuda_stream s,
                           qc_error *err)
{
    return qc_cuda_start("moments_diagonal", diagonal, grid_of(n, 1), threads, 0, s, err, h, n,
                         out);
}

qc_status qc_cuda_gather_factor(const qc_cuda_factor_input *in, const double *h, double *a,
                                qc_cuda_stream s, qc_error *err)
{
    return qc_cuda_start("moments_gather_factor", gather_factor, grid_of(in->n, in->n), threads, 0,
                         s, err, *in, h, a);
}

qc_status qc_cuda_fill_feedback(const qc_cuda_factor_input *in, const double *h, const double *a,
                                float *hu, float *d, float *inverse, qc_cuda_stream s,
                                qc_error *err)
{
    QC_TRY(qc_cuda_start("moments_fill", fill_feedback, tiles_of(in->n), threads,
                         sizeof(tile_shared), s, err, *in, h, a, hu));
    return qc_cuda_start("moments_fill_columns", fill_columns, grid_of(in->n, 1), threads, 0, s,
                         err, *in, a, d, inverse);
}

qc_status qc_cuda_gather_target(const qc_cuda_factor_input *in, const double *c, double *x,
                                qc_cuda_stream s, qc_error *err)
{
    return qc_cuda_start("moments_gather_target", gather_target, tiles_of(in->n), threads,
                         sizeof(tile_shared), s, err, *in, c, x);
}

qc_status qc_cuda_narrow_target(const qc_cuda_factor_input *in, const double *x, float *m,
                                qc_cuda_stream s, qc_error *err)
{
    return qc_cuda_start("moments_narrow", narrow_target, tiles_of(in->n), threads,
                         sizeof(tile_shared), s, err, *in, x, m);
}
