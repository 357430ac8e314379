/* Load k of thread t of T is unit k T + t of 16 bytes, so a warp reads 512 bytes in a row. `ahead`
 * loads of a thread are on their way all the time: each place is loaded anew when it has been used.
 * Loads and warps are those that gave the most on an H200 (bench/bench_ceilings.c). */
#include "kernels/cuda_memory_rate.h"
#include "kernels/ptx.cuh"

namespace
{
constexpr unsigned THREADS = 128;
constexpr unsigned READ_BLOCKS = QC_CUDA_READ_SUMS / THREADS, READ_AHEAD = 8;
constexpr unsigned COPY_BLOCKS = 4, COPY_AHEAD = 4;

QC_DEVICE uint4 load_unit(const uint4 *from, uint64_t unit, uint64_t units)
{
    return unit < units ? qc_ld_stream_16(from + unit) : make_uint4(0, 0, 0, 0);
}

/* Where there is no `to`, it reads only, and leaves sums. */
template <unsigned ahead, unsigned blocks>
__global__ void __launch_bounds__(THREADS, blocks)
    move_units(const uint4 *from, uint4 *to, uint64_t units, uint32_t *sums)
{
    const unsigned thread = blockIdx.x * THREADS + threadIdx.x;
    const uint64_t step = (uint64_t)gridDim.x * THREADS;
    uint4 v[ahead];
    uint32_t sum = 0;
#pragma unroll
    for (unsigned j = 0; j < ahead; j++)
        v[j] = load_unit(from, thread + j * step, units);
#pragma unroll 1
    for (uint64_t first = thread; first < units; first += ahead * step) {
#pragma unroll
        for (unsigned j = 0; j < ahead; j++) {
            const uint64_t unit = first + j * step;
            if (!to)
                sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
            else if (unit < units)
                to[unit] = v[j];
            v[j] = load_unit(from, unit + ahead * step, units);
        }
    }
    if (sums)
        sums[thread] = sum;
}

template <unsigned ahead, unsigned blocks>
qc_status start(const char *what, const qc_cuda_device *device, const void *from, void *to,
                uint64_t bytes, uint32_t *sums, qc_cuda_stream s, qc_error *err)
{
    if (bytes % 16 || ((uintptr_t)from | (uintptr_t)to) % 16)
        return qc_error_set(err, QC_ERR_USAGE, __FILE__, __LINE__,
                            "%s: bytes and addresses are multiples of 16", what);
    return qc_cuda_start(what, move_units<ahead, blocks>, dim3(device->multiprocessors * blocks),
                         dim3(THREADS), 0, s, err, static_cast<const uint4 *>(from),
                         static_cast<uint4 *>(to), bytes / 16, sums);
}
} // namespace

extern "C" qc_status qc_cuda_rate_read(const qc_cuda_device *device, const void *from,
                                       uint64_t bytes, uint32_t *sums, qc_cuda_stream s,
                                       qc_error *err)
{
    return start<READ_AHEAD, READ_BLOCKS>("rate_read", device, from, nullptr, bytes, sums, s, err);
}

extern "C" qc_status qc_cuda_rate_copy(const qc_cuda_device *device, void *to, const void *from,
                                       uint64_t bytes, qc_cuda_stream s, qc_error *err)
{
    return start<COPY_AHEAD, COPY_BLOCKS>("rate_copy", device, from, to, bytes, nullptr, s, err);
}
