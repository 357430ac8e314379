/* What a decoder's layer computes beside its products; the contracts are in cuda_llama.h.
 *
 * rows_to_halves, swiglu_to_halves: a thread block has a row and walks it two or three times (sum
 * of squares, largest magnitude, output). All walks but the first read from L1 or L2.
 * heads: a warp has a head of a row in registers (8 elements a lane at most), and in shared memory
 * for the halves that rotary positions exchange.
 * attention: a thread block has 16 queries of one head, and a warp 4 of them. It goes over the keys
 * 32 at a time. The keys of the 32, and then their values, lie in shared memory, with a row every
 * head_dim + 1 floats:
 *
 *     scores    lane j: key j against 4 queries (broadcast), no shuffles
 *     softmax   shuffles over the 32 lanes, a running maximum and sum per query
 *     values    lane c: elements c, c + 32, ...; the weight of key j comes by shuffle from lane j
 *
 * A key tile begins at a multiple of 32 from the window's first row, so that a query's sums have
 * one order whatever tile it is in. The shared memory is (16 head_dim + 32 (head_dim + 1)) floats
 * with head_dim rounded up to 64, 128 or 256: 12 to 49 KB. Shared memory is also the bound: per key
 * and query there are 2 head_dim multiply-adds, and 5/4 head_dim loads from it for scores. The
 * products of a layer are 10 to 100 times as many at windows of some thousand tokens. */
#include "kernels/cuda_llama.h"

#include "kernels/cuda_internal.h"
#include "kernels/cuda_quantize_internal.cuh"

namespace
{

constexpr unsigned threads_per_block = 256;
constexpr unsigned warps_per_block = threads_per_block / 32;

struct row_shared {
    float sums[warps_per_block];
    uint32_t largest[warps_per_block];
};

/* Returns x * 2^e; an e beyond -252 .. 252 is taken as the nearer of these two. */
QC_DEVICE float times_power(float x, int e)
{
    e = e > 252 ? 252 : e < -252 ? -252 : e;
    int half = e >> 1;
    float a = __uint_as_float((uint32_t)(127 + half) << 23);
    float b = __uint_as_float((uint32_t)(127 + e - half) << 23);
    return __fmul_rn(__fmul_rn(x, a), b);
}

/* Returns e with largest * 2^-e in [0.5, 1), or 0 for zero, infinity and NaN. `bits` are those of
 * the magnitude. */
QC_DEVICE int exponent_of(uint32_t bits)
{
    if (bits == 0 || bits >= QC_CUDA_F32_INF)
        return 0;
    int e = (int)(bits >> 23);
    return (e > 0 ? e : 1) - 126;
}

/* Returns the sum over the thread block. All threads get it. */
QC_DEVICE float sum_of_block(float v, row_shared &shared)
{
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
        v = __fadd_rn(v, __shfl_xor_sync(QC_ALL_LANES, v, mask));
    if (threadIdx.x % 32 == 0)
        shared.sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < warps_per_block; i++)
        v = __fadd_rn(v, shared.sums[i]);
    return v;
}

QC_DEVICE uint32_t largest_of_block(uint32_t v, row_shared &shared)
{
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        uint32_t other = __shfl_xor_sync(QC_ALL_LANES, v, mask);
        v = other > v ? other : v;
    }
    if (threadIdx.x % 32 == 0)
        shared.largest[threadIdx.x / 32] = v;
    __syncthreads();
#pragma unroll
    for (unsigned i = 0; i < warps_per_block; i++)
        v = shared.largest[i] > v ? shared.largest[i] : v;
    return v;
}

/* ---- rows to halves -------------------------------------------------------------------------- */

QC_DEVICE float normed(float x, const float *gain, uint64_t i, float inverse)
{
    return gain ? __fmul_rn(__fmul_rn(x, inverse), gain[i]) : x;
}

__global__ void __launch_bounds__(threads_per_block)
    rows_to_halves(const float *x, const float *gain, float eps, qc_cuda_halves out)
{
    QC_SHARED(row_shared, shared);
    for (uint64_t row = blockIdx.x; row < out.rows; row += gridDim.x) {
        const float *from = x + row * out.cols;
        uint16_t *to = out.half + row * out.cols;
        float inverse = 1.0f;
        if (gain) {
            float sum = 0.0f;
            for (uint64_t i = threadIdx.x; i < out.cols; i += threads_per_block)
                sum = __fmaf_rn(from[i], from[i], sum);
            sum = sum_of_block(sum, shared);
            float mean = __fdiv_rn(sum, (float)out.cols);
            inverse = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
        }
        uint32_t largest = 0;
        for (uint64_t i = threadIdx.x; i < out.cols; i += threads_per_block) {
            uint32_t magnitude = qc_magnitude(normed(from[i], gain, i, inverse));
            largest = magnitude > largest ? magnitude : largest;
        }
        int e = exponent_of(largest_of_block(largest, shared));
        for (uint64_t i = threadIdx.x; i < out.cols; i += threads_per_block)
            to[i] = qc_half_of_float(times_power(normed(from[i], gain, i, inverse), -e));
        if (threadIdx.x == 0)
            out.exponent[row] = e;
        __syncthreads(); /* shared is about to be written again */
    }
}

/* ---- products -------------------------------------------------------------------------------- */

QC_DEVICE int exponent_of_row(const qc_cuda_product &p, uint64_t row)
{
    return p.exponent[row] + (p.weight ? *p.weight : 0);
}

/* e is exponent_of_row. */
QC_DEVICE float value_of(const qc_cuda_product &p, uint64_t row, uint64_t cols, uint64_t col, int e)
{
    float v = times_power(qc_float_of_half(p.half[row * cols + col]), e);
    return p.bias ? __fadd_rn(v, p.bias[col]) : v;
}

QC_DEVICE float gated(float gate, float up)
{
    float silu = __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
    return __fmul_rn(silu, up);
}

__global__ void __launch_bounds__(threads_per_block)
    swiglu_to_halves(qc_cuda_product gate, qc_cuda_product up, qc_cuda_halves out)
{
    QC_SHARED(row_shared, shared);
    for (uint64_t row = blockIdx.x; row < out.rows; row += gridDim.x) {
        int gate_e = exponent_of_row(gate, row), up_e = exponent_of_row(up, row);
        uint16_t *to = out.half + row * out.cols;
        uint32_t largest = 0;
        for (uint64_t i = threadIdx.x; i < out.cols; i += threads_per_block) {
            float v = gated(value_of(gate, row, out.cols, i, gate_e),
                            value_of(up, row, out.cols, i, up_e));
            uint32_t magnitude = qc_magnitude(v);
            largest = magnitude > largest ? magnitude : largest;
        }
        int e = exponent_of(largest_of_block(largest, shared));
        for (uint64_t i = threadIdx.x; i < out.cols; i += threads_per_block) {
            float v = gated(value_of(gate, row, out.cols, i, gate_e),
                            value_of(up, row, out.cols, i, up_e));
            to[i] = qc_half_of_float(times_power(v, -e));
        }
        if (threadIdx.x == 0)
            out.exponent[row] = e;
        __syncthreads(); /* shared is about to be written again */
    }
}

__global__ void __launch_bounds__(threads_per_block)
    product_to_floats(qc_cuda_product p, uint64_t rows, uint64_t cols, bool add, float *out)
{
    for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int e = exponent_of_row(p, row);
        for (uint64_t i = threadIdx.x; i < cols; i += threads_per_block) {
            float v = value_of(p, row, cols, i, e);
            float *to = out + row * cols + i;
            *to = add ? __fadd_rn(*to, v) : v;
        }
    }
}

/* ---- heads ----------------------------------------------------------------------------------- */

struct heads_shared {
    float v[warps_per_block][QC_CUDA_HEAD_MOST];
};

__global__ void __launch_bounds__(threads_per_block)
    finish_heads(qc_cuda_product p, qc_cuda_heads h, float *out)
{
    constexpr unsigned most = QC_CUDA_HEAD_MOST / 32;
    QC_SHARED(heads_shared, shared);
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = h.head_dim / 2;
    uint64_t count = h.rows * h.heads, cols = (uint64_t)h.heads * h.head_dim;
    uint64_t step = (uint64_t)gridDim.x * warps_per_block;
    float *kept = shared.v[warp];
    for (uint64_t at = (uint64_t)blockIdx.x * warps_per_block + warp; at < count; at += step) {
        uint64_t row = at / h.heads, first = at % h.heads * h.head_dim;
        int e = exponent_of_row(p, row);
        float v[most], sum = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < most; i++) {
            unsigned d = 32 * i + lane;
            v[i] = d < h.head_dim ? value_of(p, row, cols, first + d, e) : 0.0f;
            sum = __fmaf_rn(v[i], v[i], sum);
        }
        if (h.norm) {
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2)
                sum = __fadd_rn(sum, __shfl_xor_sync(QC_ALL_LANES, sum, mask));
            float mean = __fdiv_rn(sum, (float)h.head_dim);
            float inverse = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, h.eps)));
#pragma unroll
            for (unsigned i = 0; i < most; i++)
                if (32 * i + lane < h.head_dim)
                    v[i] = __fmul_rn(__fmul_rn(v[i], inverse), h.norm[32 * i + lane]);
        }
        if (h.cosine) {
            uint64_t turn = (uint64_t)h.position[row] * half;
#pragma unroll
            for (unsigned i = 0; i < most; i++)
                kept[32 * i + lane] = v[i];
            __syncwarp();
#pragma unroll
            for (unsigned i = 0; i < most; i++) {
                unsigned d = 32 * i + lane;
                if (d >= h.head_dim)
                    continue;
                bool upper = d >= half;
                unsigned j = upper ? d - half : d;
                float other = kept[upper ? j : d + half], sine = h.sine[turn + j];
                v[i] = __fmaf_rn(v[i], h.cosine[turn + j], __fmul_rn(other, upper ? sine : -sine));
            }
            __syncwarp(); /* kept is about to be written again */
        }
#pragma unroll
        for (unsigned i = 0; i < most; i++)
            if (32 * i + lane < h.head_dim)
                out[row * cols + first + 32 * i + lane] = v[i];
    }
}

/* ---- attention ------------------------------------------------------------------------------- */

constexpr unsigned attention_warps = 4;
constexpr unsigned attention_blocks = 4; /* per multiprocessor */
constexpr unsigned queries_per_warp = QC_CUDA_QUERY_TILE / attention_warps;
constexpr unsigned key_tile = 32;

template <unsigned per_lane> struct attention_shared {
    float q[QC_CUDA_QUERY_TILE][32 * per_lane];
    float kv[key_tile][32 * per_lane + 1];
};

/* Loads rows [first, first + 32) of k or v into shared memory, with zeros after the last row and
 * after head_dim. */
template <unsigned per_lane>
QC_DEVICE void load_keys(attention_shared<per_lane> &shared, const qc_cuda_attention &a,
                         const float *from, uint32_t kv_head, uint32_t first, uint32_t end)
{
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned j = warp; j < key_tile; j += attention_warps) {
        const float *row =
            from + ((uint64_t)(first + j) * a.kv_heads + kv_head) * (uint64_t)a.head_dim;
#pragma unroll
        for (unsigned i = 0; i < per_lane; i++) {
            unsigned d = 32 * i + lane;
            shared.kv[j][d] = first + j < end && d < a.head_dim ? row[d] : 0.0f;
        }
    }
}

template <unsigned per_lane>
__global__ void __launch_bounds__(32 * attention_warps, attention_blocks)
    attend(qc_cuda_attention a)
{
    typedef attention_shared<per_lane> shared_type;
    QC_SHARED(shared_type, shared);
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float minus_infinity = __uint_as_float(0xff800000u);
    for (uint32_t tile_at = blockIdx.x; tile_at < a.tile_count; tile_at += gridDim.x)
        for (uint32_t head = blockIdx.y; head < a.heads; head += gridDim.y) {
            qc_cuda_query_tile tile = a.tiles[tile_at];
            uint32_t kv_head = head / (a.heads / a.kv_heads), end = tile.first + tile.count;
            for (unsigned r = warp; r < QC_CUDA_QUERY_TILE; r += attention_warps) {
                const float *row =
                    a.q + ((uint64_t)(tile.first + r) * a.heads + head) * (uint64_t)a.head_dim;
#pragma unroll
                for (unsigned i = 0; i < per_lane; i++) {
                    unsigned d = 32 * i + lane;
                    shared.q[r][d] = r < tile.count && d < a.head_dim ? row[d] : 0.0f;
                }
            }
            float best[queries_per_warp], total[queries_per_warp];
            float sums[queries_per_warp][per_lane];
#pragma unroll
            for (unsigned r = 0; r < queries_per_warp; r++) {
                best[r] = minus_infinity;
                total[r] = 0.0f;
#pragma unroll
                for (unsigned i = 0; i < per_lane; i++)
                    sums[r][i] = 0.0f;
            }
            uint32_t seen = 0; /* rows of the window that no query of the tile sees */
            if (a.window != 0 && tile.first - tile.window_first >= a.window)
                seen = tile.first - tile.window_first - a.window + 1;
            for (uint32_t first = tile.window_first + seen / key_tile * key_tile; first < end;
                 first += key_tile) {
                __syncthreads(); /* the values of the last tile were read */
                load_keys<per_lane>(shared, a, a.k, kv_head, first, end);
                __syncthreads();
                float score[queries_per_warp];
#pragma unroll
                for (unsigned r = 0; r < queries_per_warp; r++)
                    score[r] = 0.0f;
#pragma unroll 8
                for (unsigned d = 0; d < 32 * per_lane; d++) {
                    float key = shared.kv[lane][d];
#pragma unroll
                    for (unsigned r = 0; r < queries_per_warp; r++)
                        score[r] =
                            __fmaf_rn(shared.q[warp * queries_per_warp + r][d], key, score[r]);
                }
                __syncthreads(); /* the keys were read */
                load_keys<per_lane>(shared, a, a.v, kv_head, first, end);
                __syncthreads();
#pragma unroll
                for (unsigned r = 0; r < queries_per_warp; r++) {
                    uint32_t query = tile.first + warp * queries_per_warp + r, key = first + lane;
                    bool sees =
                        query < end && key <= query && (a.window == 0 || query - key < a.window);
                    score[r] = sees ? __fmul_rn(score[r], a.scale) : minus_infinity;
                    float most = score[r];
#pragma unroll
                    for (int mask = 16; mask > 0; mask /= 2)
                        most = fmaxf(most, __shfl_xor_sync(QC_ALL_LANES, most, mask));
                    most = fmaxf(most, best[r]);
                    float shrink = most == best[r] ? 1.0f : expf(__fadd_rn(best[r], -most));
                    best[r] = most;
                    float share = sees ? expf(__fadd_rn(score[r], -most)) : 0.0f;
                    float sum = share;
#pragma unroll
                    for (int mask = 16; mask > 0; mask /= 2)
                        sum = __fadd_rn(sum, __shfl_xor_sync(QC_ALL_LANES, sum, mask));
                    total[r] = __fmaf_rn(total[r], shrink, sum);
                    score[r] = share;
#pragma unroll
                    for (unsigned i = 0; i < per_lane; i++)
                        sums[r][i] = __fmul_rn(sums[r][i], shrink);
                }
#pragma unroll 4
                for (unsigned j = 0; j < key_tile; j++) {
                    float share[queries_per_warp];
#pragma unroll
                    for (unsigned r = 0; r < queries_per_warp; r++)
                        share[r] = __shfl_sync(QC_ALL_LANES, score[r], (int)j);
#pragma unroll
                    for (unsigned i = 0; i < per_lane; i++) {
                        float value = shared.kv[j][32 * i + lane];
#pragma unroll
                        for (unsigned r = 0; r < queries_per_warp; r++)
                            sums[r][i] = __fmaf_rn(share[r], value, sums[r][i]);
                    }
                }
            }
#pragma unroll
            for (unsigned r = 0; r < queries_per_warp; r++) {
                uint32_t query = tile.first + warp * queries_per_warp + r;
                if (query >= end)
                    continue;
                float *to = a.out + ((uint64_t)query * a.heads + head) * (uint64_t)a.head_dim;
#pragma unroll
                for (unsigned i = 0; i < per_lane; i++)
                    if (32 * i + lane < a.head_dim)
                        to[32 * i + lane] = __fdiv_rn(sums[r][i], total[r]);
            }
            __syncthreads(); /* q is about to be written again */
        }
}

/* ---- dense weights --------------------------------------------------------------------------- */

template <qc_dtype dtype>
__global__ void __launch_bounds__(threads_per_block)
    weight_largest(const void *src, uint64_t n, uint32_t *out)
{
    QC_SHARED(row_shared, shared);
    uint64_t step = (uint64_t)gridDim.x * threads_per_block;
    uint32_t largest = 0;
    for (uint64_t i = (uint64_t)blockIdx.x * threads_per_block + threadIdx.x; i < n; i += step) {
        uint32_t magnitude = qc_magnitude(qc_source<dtype>::one(src, i));
        largest = magnitude > largest ? magnitude : largest;
    }
    largest = largest_of_block(largest, shared);
    if (threadIdx.x == 0)
        atomicMax(out, largest);
}

template <qc_dtype dtype>
__global__ void __launch_bounds__(threads_per_block)
    weight_to_halves(const void *src, uint64_t n, const uint32_t *largest, uint16_t *half,
                     int *exponent)
{
    int e = exponent_of(*largest);
    uint64_t step = (uint64_t)gridDim.x * threads_per_block;
    for (uint64_t i = (uint64_t)blockIdx.x * threads_per_block + threadIdx.x; i < n; i += step)
        half[i] = qc_half_of_float(times_power(qc_source<dtype>::one(src, i), -e));
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *exponent = e;
}

constexpr unsigned dense_tile = 32;

struct dense_shared {
    float x[dense_tile][dense_tile + 1], w[dense_tile][dense_tile + 1];
};

/* Thread (i, j) of 32 x 8 computes outputs (j + 8 r, i) of the tile. */
__global__ void __launch_bounds__(threads_per_block)
    dense_product(const uint16_t *x, const uint16_t *w, uint64_t m, uint64_t n, uint64_t k,
                  uint16_t *y)
{
    QC_SHARED(dense_shared, shared);
    unsigned i = threadIdx.x % dense_tile, j = threadIdx.x / dense_tile;
    uint64_t tiles_n = (n + dense_tile - 1) / dense_tile;
    uint64_t tiles = (m + dense_tile - 1) / dense_tile * tiles_n;
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        uint64_t row = tile / tiles_n * dense_tile, col = tile % tiles_n * dense_tile;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (uint64_t first = 0; first < k; first += dense_tile) {
#pragma unroll
            for (unsigned r = 0; r < 4; r++) {
                unsigned at = j + 8 * r;
                bool in = first + i < k;
                shared.x[at][i] =
                    in && row + at < m ? qc_float_of_half(x[(row + at) * k + first + i]) : 0.0f;
                shared.w[at][i] =
                    in && col + at < n ? qc_float_of_half(w[(col + at) * k + first + i]) : 0.0f;
            }
            __syncthreads();
#pragma unroll 8
            for (unsigned d = 0; d < dense_tile; d++) {
                float weight = shared.w[i][d];
#pragma unroll
                for (unsigned r = 0; r < 4; r++)
                    sum[r] = __fmaf_rn(shared.x[j + 8 * r][d], weight, sum[r]);
            }
            __syncthreads();
        }
#pragma unroll
        for (unsigned r = 0; r < 4; r++)
            if (row + j + 8 * r < m && col + i < n)
                y[(row + j + 8 * r) * n + col + i] = qc_half_of_float(sum[r]);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <qc_dtype dtype>
qc_status make_weight(const void *src, uint64_t n, uint16_t *half, int *exponent, uint32_t *largest,
                      qc_cuda_stream s, qc_error *err)
{
    uint64_t blocks = (n + 16 * threads_per_block - 1) / (16 * threads_per_block);
    dim3 grid(blocks == 0 ? 1 : qc_cuda_grid_x(blocks, 1));
    QC_TRY(qc_cuda_start("llama_weight", weight_largest<dtype>, grid, dim3(threads_per_block),
                         sizeof(row_shared), s, err, src, n, largest));
    return qc_cuda_start("llama_weight", weight_to_halves<dtype>, grid, dim3(threads_per_block), 0,
                         s, err, src, n, largest, half, exponent);
}

template <unsigned per_lane>
qc_status launch_attention(const qc_cuda_attention *a, qc_cuda_stream s, qc_error *err)
{
    size_t shared = sizeof(attention_shared<per_lane>);
    unsigned heads = a->heads < QC_GRID_ROWS_MOST ? a->heads : QC_GRID_ROWS_MOST;
    QC_TRY(
        qc_cuda_keep_resident(attend<per_lane>, shared, attention_blocks, "llama_attention", err));
    return qc_cuda_start("llama_attention", attend<per_lane>,
                         dim3(qc_cuda_grid_x(a->tile_count, 1), heads), dim3(32 * attention_warps),
                         shared, s, err, *a);
}

} // namespace

extern "C" qc_status qc_cuda_llama_halves(const float *x, const float *gain, float eps,
                                          const qc_cuda_halves *out, qc_cuda_stream s,
                                          qc_error *err)
{
    if (out->rows == 0)
        return QC_OK;
    return qc_cuda_start("llama_halves", rows_to_halves, dim3(qc_cuda_grid_x(out->rows, 1)),
                         dim3(threads_per_block), sizeof(row_shared), s, err, x, gain, eps, *out);
}

extern "C" qc_status qc_cuda_llama_swiglu(const qc_cuda_product *gate, const qc_cuda_product *up,
                                          const qc_cuda_halves *out, qc_cuda_stream s,
                                          qc_error *err)
{
    if (out->rows == 0)
        return QC_OK;
    return qc_cuda_start("llama_swiglu", swiglu_to_halves, dim3(qc_cuda_grid_x(out->rows, 1)),
                         dim3(threads_per_block), sizeof(row_shared), s, err, *gate, *up, *out);
}

extern "C" qc_status qc_cuda_llama_floats(const qc_cuda_product *p, uint64_t rows, uint64_t cols,
                                          int add, float *out, qc_cuda_stream s, qc_error *err)
{
    if (rows == 0)
        return QC_OK;
    return qc_cuda_start("llama_floats", product_to_floats, dim3(qc_cuda_grid_x(rows, 1)),
                         dim3(threads_per_block), 0, s, err, *p, rows, cols, add != 0, out);
}

extern "C" qc_status qc_cuda_llama_heads(const qc_cuda_product *p, const qc_cuda_heads *h,
                                         float *out, qc_cuda_stream s, qc_error *err)
{
    if (h->head_dim == 0 || h->head_dim > QC_CUDA_HEAD_MOST || h->head_dim % 2 != 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "llama_heads: heads of %u elements; expected an even number, at most %u",
                h->head_dim, QC_CUDA_HEAD_MOST);
    uint64_t count = h->rows * h->heads;
    if (count == 0)
        return QC_OK;
    return qc_cuda_start("llama_heads", finish_heads, dim3(qc_cuda_grid_x(count, warps_per_block)),
                         dim3(threads_per_block), sizeof(heads_shared), s, err, *p, *h, out);
}

extern "C" qc_status qc_cuda_llama_attention(const qc_cuda_attention *a, qc_cuda_stream s,
                                             qc_error *err)
{
    if (a->head_dim == 0 || a->head_dim > QC_CUDA_HEAD_MOST)
        QC_FAIL(err, QC_ERR_USAGE, "llama_attention: heads of %u elements; expected at most %u",
                a->head_dim, QC_CUDA_HEAD_MOST);
    if (a->kv_heads == 0 || a->heads % a->kv_heads != 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "llama_attention: %u heads; expected a multiple of the %u heads of keys", a->heads,
                a->kv_heads);
    if (a->tile_count == 0 || a->heads == 0)
        return QC_OK;
    if (a->head_dim <= 64)
        return launch_attention<2>(a, s, err);
    if (a->head_dim <= 128)
        return launch_attention<4>(a, s, err);
    return launch_attention<8>(a, s, err);
}

extern "C" qc_status qc_cuda_llama_weight(const void *src, qc_dtype dtype, uint64_t n,
                                          uint16_t *half, int *exponent, uint32_t *largest,
                                          qc_cuda_stream s, qc_error *err)
{
    QC_TRY(qc_cuda_fill(largest, 0, sizeof *largest, s, err));
    if (dtype == QC_DTYPE_F32)
        return make_weight<QC_DTYPE_F32>(src, n, half, exponent, largest, s, err);
    if (dtype == QC_DTYPE_F16)
        return make_weight<QC_DTYPE_F16>(src, n, half, exponent, largest, s, err);
    if (dtype == QC_DTYPE_BF16)
        return make_weight<QC_DTYPE_BF16>(src, n, half, exponent, largest, s, err);
    QC_FAIL(err, QC_ERR_USAGE, "llama_weight: the source is %s; expected F32, F16 or BF16",
            qc_dtype_name(dtype));
}

extern "C" qc_status qc_cuda_llama_dense(const uint16_t *x, const uint16_t *w, uint64_t m,
                                         uint64_t n, uint64_t k, uint16_t *y, qc_cuda_stream s,
                                         qc_error *err)
{
    if (m == 0 || n == 0)
        return QC_OK;
    uint64_t tiles = (m + dense_tile - 1) / dense_tile * ((n + dense_tile - 1) / dense_tile);
    return qc_cuda_start("llama_dense", dense_product, dim3(qc_cuda_grid_x(tiles, 1)),
                         dim3(threads_per_block), sizeof(dense_shared), s, err, x, w, m, n, k, y);
}
