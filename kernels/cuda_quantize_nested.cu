/* Double quantization: turns the absmax of blocks into 8-bit codes of the dynamic map, and back.
 *
 * nested_quantize: a warp owns a group of 256, and lane l has elements l, l + 32, .... So loads and
 * stores are coalesced, and the group stays in registers between its absmax and its codes. The code
 * is the number of thresholds strictly below the scaled value (quant_internal.h). A binary search
 * of 8 steps in shared memory finds it (1 KB a thread block).
 * nested_dequantize: a thread has an element at a time, eight in turn. The map is in shared memory.
 *
 * Bytes of global memory per element: 4 + 1 + 1/64. Per weight that is 1/64 of it (block 64), so
 * nobody ever waits for either kernel. */
#include "kernels/cuda_quantize.h"

#include "kernels/cuda_internal.h"
#include "kernels/cuda_quantize_internal.cuh"

namespace
{

constexpr unsigned threads_per_block = 256;
constexpr unsigned group = 256;
constexpr unsigned per_lane = group / 32;

struct nested_shared {
    float table[256];
};

__global__ void __launch_bounds__(threads_per_block)
    quantize_nested(const float *absmax, uint64_t n, float offset, uint8_t *codes,
                    float *nested_absmax)
{
    static constexpr float thresholds[256] = {QC_DYNAMIC_THRESHOLD_VALUES};
    QC_SHARED(nested_shared, shared);
    shared.table[threadIdx.x] = thresholds[threadIdx.x];
    __syncthreads();
    unsigned lane = threadIdx.x % 32;
    uint64_t warp = (uint64_t)blockIdx.x * (threads_per_block / 32) + threadIdx.x / 32;
    uint64_t warps = (uint64_t)gridDim.x * (threads_per_block / 32);

    for (uint64_t first = warp * group; first < n; first += warps * group) {
        float d[per_lane], largest = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < per_lane; i++) {
            uint64_t at = first + i * 32 + lane;
            d[i] = at < n ? __fadd_rn(absmax[at], -offset) : 0.0f;
            largest = fmaxf(largest, fabsf(d[i]));
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(QC_ALL_LANES, largest, mask));
        bool up;
        float inv = qc_inverse_absmax(largest, &up);
        float factor = up ? QC_CUDA_TINY_SCALE : 1.0f;
#pragma unroll
        for (unsigned i = 0; i < per_lane; i++) {
            uint64_t at = first + i * 32 + lane;
            float x = __fmul_rn(__fmul_rn(d[i], factor), inv);
            unsigned code = 0;
#pragma unroll
            for (unsigned step = 128; step > 0; step /= 2)
                code += x > shared.table[code + step - 1] ? step : 0;
            if (at < n)
                codes[at] = (uint8_t)code;
        }
        if (lane == 0)
            nested_absmax[first / group] = largest;
    }
}

__global__ void __launch_bounds__(threads_per_block)
    dequantize_nested(const uint8_t *codes, const float *nested_absmax, const float *map,
                      uint64_t n, unsigned block_shift, float offset, float *absmax)
{
    static constexpr float dynamic_map[256] = {QC_DYNAMIC_MAP_VALUES};
    QC_SHARED(nested_shared, shared);
    shared.table[threadIdx.x] = map ? map[threadIdx.x] : dynamic_map[threadIdx.x];
    __syncthreads();
    uint64_t step = (uint64_t)gridDim.x * threads_per_block;
    for (uint64_t i = (uint64_t)blockIdx.x * threads_per_block + threadIdx.x; i < n; i += step)
        absmax[i] =
            __fadd_rn(__fmul_rn(shared.table[codes[i]], nested_absmax[i >> block_shift]), offset);
}

dim3 grid_of(uint64_t n)
{
    return dim3(qc_cuda_grid_x(n, threads_per_block * per_lane));
}

} // namespace

extern "C" qc_status qc_cuda_nested_quantize(const float *absmax, uint64_t n, float offset,
                                             uint8_t *codes, float *nested_absmax, qc_cuda_stream s,
                                             qc_error *err)
{
    if (n == 0)
        return QC_OK;
    return qc_cuda_start("nested_quantize", quantize_nested, grid_of(n), dim3(threads_per_block),
                         sizeof(nested_shared), s, err, absmax, n, offset, codes, nested_absmax);
}

extern "C" qc_status qc_cuda_nested_dequantize(const uint8_t *codes, const float *nested_absmax,
                                               const float *map, uint64_t n, uint32_t nested_block,
                                               float offset, float *absmax, qc_cuda_stream s,
                                               qc_error *err)
{
    if (nested_block == 0 || (nested_block & (nested_block - 1)) != 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "nested_dequantize: nested block size: expected a power of two, found %u",
                nested_block);
    if (n == 0)
        return QC_OK;
    unsigned shift = 0;
    while (1u << shift < nested_block)
        shift++;
    return qc_cuda_start("nested_dequantize", dequantize_nested, grid_of(n),
                         dim3(threads_per_block), sizeof(nested_shared), s, err, codes,
                         nested_absmax, map, n, shift, offset, absmax);
}
