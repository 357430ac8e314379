/* What is made ready for the tensor-core kernels: x as padded float16 rows, the power of two that
 * brings weights into float16's range, and rows of codes on 16-byte addresses.
 *
 * x. BF16 has float's range and 8 bits of mantissa, float16 11 bits but only 2^-24 .. 65504. Each
 * row of x is multiplied by the power of two that brings its largest finite element to [2^14,
 * 2^15): an element of at least 2^-31 of that is then at least 2^-17, and its last bit at least
 * 2^-24: exact. What is smaller is rounded to a multiple of 2^-24, an error of at most 2^-39 of the
 * row's largest. One float16 kernel so serves both dtypes, and GPUs without bfloat16 have it too.
 * The products' sums are multiplied by 2^-exponent at the end. NaN and infinity pass.
 *   grid    a row a block; two passes over it (the second from L2); 2 bytes read and written per
 *           element: bound by memory, and small beside the weights
 *   launch  may begin while the kernel in front runs, which reads the x before this one or makes
 *           this one
 *
 * Weights. float16 holds values of [2^-14, 65504] with 11 bits. Where the largest scale is within
 * [2^-8, 2^15), a weight of 2^-6 of the largest is still a normal float16, and nothing is done, so
 * that weights are the very float16 that dequantizing gives. Else they are multiplied by the power
 * of two that brings the largest scale to [2^14, 2^15). (Of integers, what counts is the scale
 * times the largest code.)
 *   grid    as many blocks as there are scales for, at most 1024; integer atomicMax on the bits of
 *           non-negative floats, which does not depend on the order */
#include "kernels/matmul_experts_internal.h"
#include "kernels/matmul_run.cuh"

#define THREADS     256u
#define WARPS       (THREADS / 32u)
#define SCAN_BLOCKS 1024u

namespace
{

struct input_shared {
    uint32_t warp_peak[WARPS];
};

/* Finds the bits of the largest finite magnitude, for every thread. */
QC_DEVICE uint32_t row_peak(const uint16_t *x, uint64_t k, input_shared &shared)
{
    uint32_t peak = 0;
    for (uint64_t i = threadIdx.x; i < k; i += THREADS) {
        uint32_t magnitude = x[i] & 0x7fffu;
        if (magnitude < 0x7f80u && magnitude > peak)
            peak = magnitude;
    }
    for (int step = 16; step; step /= 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, peak, step);
        peak = other > peak ? other : peak;
    }
    __syncthreads(); /* the previous row's peaks were read */
    if (threadIdx.x % 32 == 0)
        shared.warp_peak[threadIdx.x / 32] = peak;
    __syncthreads();
    for (uint32_t i = 0; i < WARPS; i++)
        peak = shared.warp_peak[i] > peak ? shared.warp_peak[i] : peak;
    return peak;
}

/* Returns e with 2^14 <= v * 2^e < 2^15 for a positive finite float v, and 0 for 0. */
QC_DEVICE int exponent_for(float v)
{
    uint32_t bits = __float_as_uint(v);
    if (bits == 0)
        return 0;
    if (bits < 0x00800000u) /* subnormal: 2^(p - 149) with p its highest bit */
        return 14 - ((31 - __clz((int)bits)) - 149);
    return 14 - ((int)(bits >> 23) - 127);
}

struct input_args {
    const uint16_t *x;
    uint64_t ldx, m, k, k_padded;
    uint16_t *out;
    int *exponents;
};

template <bool bf16> __global__ void __launch_bounds__(THREADS) matmul_input(const input_args a)
{
    QC_SHARED(input_shared, shared);
    qc_grid_release();
    qc_grid_wait();
    for (uint64_t row = blockIdx.x; row < a.m; row += gridDim.x) {
        const uint16_t *from = a.x + row * a.ldx;
        uint32_t *to = reinterpret_cast<uint32_t *>(a.out + row * a.k_padded);
        int exponent = 0;
        if (bf16) {
            exponent = exponent_for(qc_float_of_bf16((uint16_t)row_peak(from, a.k, shared)));
            if (threadIdx.x == 0)
                a.exponents[row] = exponent;
        }
        for (uint64_t i = 2 * threadIdx.x; i < a.k_padded; i += 2 * THREADS) {
            uint32_t lo = i < a.k ? from[i] : 0, hi = i + 1 < a.k ? from[i + 1] : 0;
            if (bf16)
                to[i / 2] =
                    qc_half2_of_floats(qc_scale_pow2(qc_float_of_bf16((uint16_t)lo), exponent),
                                       qc_scale_pow2(qc_float_of_bf16((uint16_t)hi), exponent));
            else
                to[i / 2] = lo | hi << 16;
        }
    }
}

struct image_args {
    const uint16_t *x;
    uint64_t ldx, m, rows, m_tile, k;
    uint16_t *out;
    int *exponents;
};

/* A thread makes 16 bytes of the image at a time, of four times two elements. */
template <bool bf16> __global__ void __launch_bounds__(THREADS) matmul_image(const image_args a)
{
    QC_SHARED(input_shared, shared);
    qc_grid_release();
    qc_grid_wait();
    for (uint64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        bool there = row < a.m;
        const uint16_t *from = a.x + (there ? row * a.ldx : 0);
        uint64_t tile = row / a.m_tile * (a.k / 8 * a.m_tile) + row % a.m_tile;
        uint4 *to = reinterpret_cast<uint4 *>(a.out) + tile;
        int exponent = 0;
        if (bf16 && there) {
            exponent = exponent_for(qc_float_of_bf16((uint16_t)row_peak(from, a.k, shared)));
            if (threadIdx.x == 0)
                a.exponents[row] = exponent;
        }
        for (uint64_t i = threadIdx.x; i < a.k / 8; i += THREADS) {
            uint32_t v[4] = {0, 0, 0, 0};
            const uint16_t *first = from + i / 8 * 64 + i % 8 * 2;
#pragma unroll
            for (int t = 0; t < 4 && there; t++) {
                uint32_t lo = first[t * 16], hi = first[t * 16 + 1];
                v[t] = bf16 ? qc_half2_of_floats(
                                  qc_scale_pow2(qc_float_of_bf16((uint16_t)lo), exponent),
                                  qc_scale_pow2(qc_float_of_bf16((uint16_t)hi), exponent))
                            : lo | hi << 16;
            }
            to[i * a.m_tile] = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* Of an array of scales, the largest magnitude of those from `first` on in steps. W: qc_weights or
 * qc_run_source. */
template <typename W>
QC_DEVICE float scale_peak(const W &w, uint64_t scales, uint64_t first, uint64_t step,
                           uint32_t nested_shift, float offset)
{
    float peak = 0.0f;
    for (uint64_t i = first; i < scales; i += step) {
        float scale = w.absmax ? w.absmax[i]
                               : __fadd_rn(__fmul_rn(w.nested_map[w.absmax_codes[i]],
                                                     w.nested_absmax[i >> nested_shift]),
                                           offset);
        peak = fmaxf(peak, fabsf(scale));
    }
    for (int lanes = 16; lanes; lanes /= 2)
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, lanes));
    return peak;
}

/* prepared[3] holds the peak's bits until matmul_exponent has read them. */
__global__ void __launch_bounds__(THREADS)
    matmul_scale_scan(const qc_weights w, uint64_t scales, uint32_t nested_shift, int *prepared)
{
    float peak = scale_peak(w, scales, (uint64_t)blockIdx.x * THREADS + threadIdx.x,
                            (uint64_t)gridDim.x * THREADS, nested_shift, w.form.offset);
    if (threadIdx.x % 32 == 0)
        atomicMax(prepared + 3, (int)__float_as_uint(peak));
}

/* Returns the exponent for a peak of scales. reach is qc_form_reach, for codes without a map. */
QC_DEVICE int exponent_of(float peak, const float *code_map, float reach)
{
    float largest_code = code_map ? 0.0f : reach;
    for (int i = 0; code_map && i < 16; i++)
        largest_code = fmaxf(largest_code, fabsf(code_map[i]));
    peak = __fmul_rn(peak, largest_code);
    int exponent = 0;
    if (!(peak >= 0x1p-8f && peak < 0x1p15f))
        exponent = exponent_for(peak);
    return exponent > 126 ? 126 : exponent; /* 2^-exponent is a normal float */
}

__global__ void matmul_exponent(const float *code_map, float reach, int *prepared)
{
    int exponent = exponent_of(__uint_as_float((uint32_t)prepared[3]), code_map, reach);
    prepared[0] = exponent;
    prepared[1] = (int)((uint32_t)(127 - exponent) << 23);
    prepared[2] = 0;
    prepared[3] = (int)__float_as_uint(1.0f);
}

/* The same for experts, of which each has a block of threads. */
__global__ void __launch_bounds__(THREADS)
    matmul_experts_exponent(const qc_run_source *table, uint64_t scales, float reach,
                            int *exponents)
{
    QC_SHARED(input_shared, shared);
    const qc_run_source w = table[blockIdx.x];
    float peak = scale_peak(w, scales, threadIdx.x, THREADS, w.nested_shift, w.nested_offset);
    if (threadIdx.x % 32 == 0)
        shared.warp_peak[threadIdx.x / 32] = __float_as_uint(peak);
    __syncthreads();
    if (threadIdx.x)
        return;
    for (uint32_t i = 1; i < WARPS; i++)
        peak = fmaxf(peak, __uint_as_float(shared.warp_peak[i]));
    exponents[blockIdx.x] = exponent_of(peak, w.code_map, reach);
}

/* Each thread writes four bytes of a repacked row. This happens once per weight, so working on
 * bytes and nibbles is fast enough. */
__global__ void __launch_bounds__(THREADS)
    matmul_repack(const qc_weights w, unsigned bits, uint64_t row_words, uint32_t *out)
{
    uint64_t word = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (word >= row_words)
        return;
    const uint8_t *codes = static_cast<const uint8_t *>(w.codes);
    for (uint64_t row = blockIdx.y; row < w.rows; row += gridDim.y) {
        uint32_t value = 0;
        if (bits == 4) {
            for (uint32_t i = 0; i < 8; i++) {
                uint64_t k = word * 8 + i, f = row * w.form.cols + k;
                uint32_t code = k < w.form.cols ? codes[f / 2] >> (f % 2 ? 0 : 4) & 15u : 0;
                value |= code << (i / 2 * 8 + (i % 2 ? 0 : 4)); /* the even one on top */
            }
        } else {
            for (uint32_t i = 0; i < 4; i++) {
                uint64_t k = word * 4 + i;
                value |= (k < w.form.cols ? (uint32_t)codes[row * w.form.cols + k] : 0) << (8 * i);
            }
        }
        out[row * row_words + word] = value;
    }
}

} /* namespace */

qc_status qc_matmul_input_launch(const qc_matmul_call *c, uint16_t *out, int *exponents,
                                 qc_cuda_stream s, qc_error *err)
{
    dim3 grid(qc_cuda_grid_x(c->m, 1));
    const input_args a = {
        static_cast<const uint16_t *>(c->x), c->ldx, c->m, c->k, c->plan.k_padded, out, exponents};
    return qc_cuda_launch_overlapping(
        c->x_dtype == QC_DTYPE_BF16 ? matmul_input<true> : matmul_input<false>, grid, dim3(THREADS),
        sizeof(input_shared), s, c->plan.overlaps, "matmul_input", err, a);
}

qc_status qc_matmul_image_launch(const qc_matmul_call *c, uint16_t *out, int *exponents,
                                 qc_cuda_stream s, qc_error *err)
{
    uint64_t tile = c->plan.image_rows, rows = (c->m + tile - 1) / tile * tile;
    dim3 grid(qc_cuda_grid_x(rows, 1));
    const image_args a = {
        static_cast<const uint16_t *>(c->x), c->ldx, c->m, rows, tile, c->k, out, exponents};
    return qc_cuda_launch_overlapping(
        c->x_dtype == QC_DTYPE_BF16 ? matmul_image<true> : matmul_image<false>, grid, dim3(THREADS),
        sizeof(input_shared), s, c->plan.overlaps, "matmul_image", err, a);
}

qc_status qc_matmul_exponent_launch(const qc_weights *w, int *prepared, qc_cuda_stream s,
                                    qc_error *err)
{
    uint64_t scales = qc_form_scales(&w->form, w->rows * w->form.cols);
    QC_TRY(qc_cuda_fill(prepared, 0, 4 * sizeof *prepared, s, err));
    uint64_t blocks = (scales + THREADS - 1) / THREADS;
    if (blocks)
        QC_TRY(qc_cuda_start("matmul_scale_scan", matmul_scale_scan,
                             dim3((unsigned)(blocks < SCAN_BLOCKS ? blocks : SCAN_BLOCKS)),
                             dim3(THREADS), 0, s, err, *w, scales, qc_log2_of(w->nested_block),
                             prepared));
    const float *map = qc_form_is_table(w->form.ops) ? w->form.code_map : nullptr;
    return qc_cuda_start("matmul_exponent", matmul_exponent, dim3(1), dim3(1), 0, s, err, map,
                         qc_form_reach(w->form.ops), prepared);
}

extern "C" qc_status qc_experts_exponent_launch(const void *table, const qc_weights *w,
                                                uint32_t count, int *exponents, qc_cuda_stream s,
                                                qc_error *err)
{
    return qc_cuda_start(
        "matmul_experts_exponent", matmul_experts_exponent, dim3(count), dim3(THREADS),
        sizeof(input_shared), s, err, static_cast<const qc_run_source *>(table),
        qc_form_scales(&w->form, w->rows * w->form.cols), qc_form_reach(w->form.ops), exponents);
}

qc_status qc_matmul_repack_launch(const qc_weights *w, uint64_t row_bytes, void *out,
                                  qc_cuda_stream s, qc_error *err)
{
    uint64_t words = row_bytes / 4, blocks = (words + THREADS - 1) / THREADS;
    if (blocks > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "rows of codes are too long for one launch");
    return qc_cuda_start("matmul_repack", matmul_repack,
                         dim3((unsigned)blocks, qc_cuda_grid_y(w->rows)), dim3(THREADS), 0, s, err,
                         *w, w->form.ops->bits, words, static_cast<uint32_t *>(out));
}
