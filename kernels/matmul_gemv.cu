/* y = x W^T for up to 8 rows of x at a time. Weights are streamed once and multiplied in float.
 *
 * What a block of 8 warps does, over its slice of K:
 *
 *            K, in tiles of 1024 = 32 lanes x a run of 32
 *        lane 0        lane 1                lane 31
 *      |--- run ---|--- run ---|-- ... --|--- run ---|--- next tile ...      row 0 of warp 0
 *      |-----------|-----------|---------|-----------|                       row 1 of warp 0
 *        ...                                                                 rows of warp 1 .. 7
 *
 *   grid     x: 8 * rows rows of W (2 or 4 a warp), y: slices of K, z: 8 rows of x each (4 for NF4
 *            where shared memory has no room for 8: sm_75)
 *   weights  a lane loads its run of every row one tile ahead, past L1, and decodes it in
 *            registers (matmul_run.cuh). A run is 16 bytes of NF4 or 32 of int8, so a warp loads
 *            512 or 1024 in a row
 *   x        the tile's 1024 columns of all rows of x lie in shared memory, 16 bits as they are,
 *            for two tiles in turn. Every load of 4 of them serves all rows of W of the warp.
 *            Lane l's eight fours of a run are at 8-byte units l, 32 + l, 64 + l, ..., so no two
 *            lanes of a load want the same bank. x is zero behind K, so codes there do not matter
 *   sums     are float, one per (row of W, row of x) and lane. A butterfly adds the lanes at the
 *            end, and matmul_reduce.cu adds the slices of K, always in the same order
 *
 * Every product is of exact values: a weight that meets a single 1 in x comes out as the float that
 * dequantizing gives, rounded once. With few rows of x the code is multiplied by x, and the sum
 * over a run by the scale. That is one float product per 32 weights, and still a single rounding
 * where there is one weight. With more rows, or where a run has two scales, the weight is made
 * first. The sum over a run of code * x may overflow where x is beyond 2^113 (BF16 only).
 *
 * What limits it, per weight: one shared-memory load of 4 bytes for NF4 (32 weights per clock and
 * multiprocessor), 2 * M / rows bytes of x, and the float pipe (64 / M weights per clock, or
 * 128 / M from sm_86 on). */
#include "kernels/matmul_experts_tile.cuh"
#include "kernels/matmul_run.cuh"

#include <type_traits>

#define WARPS        8u
#define THREADS      (32u * WARPS)
#define TILE_K       1024u
#define TILE_UNITS   (TILE_K / 4u) /* of x in shared memory: 8 bytes, 4 columns */
#define GEMV_M       8u
#define SPLIT_MOST   32u
#define M_CHUNK_MOST 65535u
/* This many blocks share a multiprocessor. There are three where registers and shared memory (96 KB
 * before sm_80) allow it, so that more loads are on their way. (sm_86, 89 and 120 have 100 KB, of
 * which the tables of NF4 leave room for two all the same.) */
#define BLOCKS_RESIDENT(aligned, m) (QC_ARCH >= 80 && (aligned) && (m) == 1 ? 3 : 2)
/* A warp has as many rows of W as the registers hold together with m sums for each. */
#define ROWS_OF_WARP(nf4, m) ((nf4) && (m) <= 4 ? 4u : 2u)

namespace
{

template <bool nf4> using gemv_table = std::conditional_t<nf4, qc_run_pairs, qc_run_plain>;

template <bool nf4, int m> struct gemv_shared {
    gemv_table<nf4> table;
    uint2 x[2][m][TILE_UNITS];
};

struct gemv_args {
    qc_run_source w;
    const uint16_t *x;
    uint64_t ldx;
    uint64_t m; /* how many rows of x there are from x on */
    uint64_t k, split_k;
    int x_aligned;
    /* One of these two is used: */
    float *partials; /* [splits][m_total][n], at the first row */
    uint64_t m_total;
    qc_matmul_output out;
};

/* Returns elements [k, k + 8) of a row of x; they are zero from k_end on. */
QC_DEVICE uint4 x_unit(const uint16_t *row, uint64_t k, uint64_t k_end, int aligned)
{
    if (aligned && k + 8 <= k_end)
        return *reinterpret_cast<const uint4 *>(row + k);
    uint32_t e[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        e[i] = k + i < k_end ? row[k + i] : 0u;
    uint4 v;
    v.x = e[0] | e[1] << 16;
    v.y = e[2] | e[3] << 16;
    v.z = e[4] | e[5] << 16;
    v.w = e[6] | e[7] << 16;
    return v;
}

/* row_of(m) is where row m of the block's x begins. */
template <int M, typename RowOf>
QC_DEVICE void stage_x(uint2 (&to)[M][TILE_UNITS], const gemv_args &a, RowOf row_of, unsigned rows,
                       uint64_t tile_k, uint64_t k_end)
{
    for (unsigned i = threadIdx.x; i < M * TILE_UNITS / 2; i += THREADS) {
        unsigned m = i / (TILE_UNITS / 2), unit = i % (TILE_UNITS / 2);
        uint4 v = {0, 0, 0, 0};
        if (m < rows)
            v = x_unit(row_of(m), tile_k + 8 * unit, k_end, a.x_aligned);
        uint2 first = {v.x, v.y}, second = {v.z, v.w};
        to[m][unit % 4 * 64 + unit / 4] = first;
        to[m][unit % 4 * 64 + 32 + unit / 4] = second;
    }
}

template <bool bf16> QC_DEVICE float x_low(uint32_t two)
{
    return bf16 ? __uint_as_float(two << 16) : qc_float_of_half((uint16_t)two);
}

template <bool bf16> QC_DEVICE float x_high(uint32_t two)
{
    return bf16 ? __uint_as_float(two & 0xffff0000u) : qc_float_of_half((uint16_t)(two >> 16));
}

/* Returns elements 2 * j and 2 * j + 1 of a run without their scale: the code's value, or the int8
 * itself. (qc_run_pair with scales of 1 would multiply by them, because nvcc keeps __fmul_rn.) */
template <bool nf4>
QC_DEVICE qc_run_two unscaled(const qc_run<nf4> &run, const gemv_table<nf4> &table,
                              unsigned lane_bytes, int j)
{
    if constexpr (nf4) {
        return qc_run_look(table, lane_bytes, run.q[j / 4], j % 4);
    } else {
        uint32_t two = (run.q[j / 2] ^ 0x80808080u) >> j % 2 * 16;
        qc_run_two v; /* a byte in the mantissa of 2^23; the exclusive or added 128 */
        v.even = __fadd_rn(__uint_as_float((two & 0xffu) | 0x4b000000u), -8388736.0f);
        v.odd = __fadd_rn(__uint_as_float((two >> 8 & 0xffu) | 0x4b000000u), -8388736.0f);
        return v;
    }
}

/* Multiplies a run of each of R rows of W by 32 columns of M rows of x. */
template <bool nf4, bool aligned, int M, bool bf16, int R>
QC_DEVICE void multiply(float (&sum)[R][M], const qc_run<nf4> (&run)[R], const gemv_args &a,
                        const gemv_shared<nf4, M> &shared, unsigned lane_bytes,
                        const uint2 (&x)[M][TILE_UNITS], unsigned lane)
{
    constexpr bool after = aligned && M <= 4; /* the scale is multiplied into the run's sum */
    const qc_run_power one = {1.0f, 1.0f};
    qc_run_scales scales[R];
    float part[R][M];
#pragma unroll
    for (int r = 0; r < R; r++) {
        scales[r] = qc_run_scales_of<nf4, aligned>(run[r], a.w, shared.table.small, one);
#pragma unroll
        for (int m = 0; m < M; m++)
            part[r][m] = after ? 0.0f : sum[r][m];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint2 four[M];
#pragma unroll
        for (int m = 0; m < M; m++)
            four[m] = x[m][j * 32 + lane];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float low[M], high[M];
#pragma unroll
            for (int m = 0; m < M; m++) {
                low[m] = x_low<bf16>(i ? four[m].y : four[m].x);
                high[m] = x_high<bf16>(i ? four[m].y : four[m].x);
            }
#pragma unroll
            for (int r = 0; r < R; r++) {
                qc_run_two v = after ? unscaled<nf4>(run[r], shared.table, lane_bytes, 2 * j + i)
                                     : qc_run_pair<nf4, aligned>(run[r], scales[r], shared.table,
                                                                 lane_bytes, 2 * j + i);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    part[r][m] = __fmaf_rn(v.even, low[m], part[r][m]);
                    part[r][m] = __fmaf_rn(v.odd, high[m], part[r][m]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (!after) {
                sum[r][m] = part[r][m];
            } else {
                float p = nf4 ? part[r][m] : __fmul_rn(part[r][m], scales[r].first);
                sum[r][m] = __fmaf_rn(p, scales[r].by[0], sum[r][m]);
            }
        }
    }
}

template <bool nf4, bool aligned, int R>
QC_DEVICE void load_runs(qc_run<nf4> (&run)[R], const qc_run_source &w, uint64_t n, uint64_t k,
                         uint64_t k_end)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (n + r < w.rows && k < k_end)
            qc_run_load<nf4, aligned>(run[r], w, n + r, w.first + (n + r) * w.ld, k);
        else
            qc_run_zero(run[r]);
    }
}

/* What a block multiplies: rows of W from n0 on, k of its slice, so many rows of x. */
struct gemv_part {
    uint64_t n0, k_begin, k_end;
    unsigned rows;
};

/* put(m, n, sum) gets each sum once. */
template <bool nf4, bool aligned, int M, bool bf16, typename RowOf, typename Put>
QC_DEVICE void multiply_rows(const gemv_args &a, const gemv_part &p, RowOf row_of, Put put,
                             gemv_shared<nf4, M> &shared)
{
    constexpr int R = (int)ROWS_OF_WARP(nf4, M);
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t n = p.n0 + (uint64_t)warp * R;

    qc_run<nf4> run[R];
    float sum[R][M];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int m = 0; m < M; m++)
            sum[r][m] = 0.0f;
    uint64_t lane_k = QC_RUN_ELEMS * lane;
    load_runs<nf4, aligned>(run, a.w, n, p.k_begin + lane_k, p.k_end);
    qc_run_fill(shared.table, a.w, threadIdx.x, THREADS);
    stage_x<M>(shared.x[0], a, row_of, p.rows, p.k_begin, p.k_end);
    __syncthreads();
    unsigned lane_bytes = qc_run_lane(shared.table, lane), buffer = 0;
    for (uint64_t k = p.k_begin; k < p.k_end; k += TILE_K, buffer ^= 1) {
        qc_run<nf4> next[R];
        load_runs<nf4, aligned>(next, a.w, n, k + TILE_K + lane_k, p.k_end);
        if (k + TILE_K < p.k_end)
            stage_x<M>(shared.x[buffer ^ 1], a, row_of, p.rows, k + TILE_K, p.k_end);
        multiply<nf4, aligned, M, bf16>(sum, run, a, shared, lane_bytes, shared.x[buffer], lane);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < R; r++)
            run[r] = next[r];
    }
    /* Lane r * M + m finishes the sum of row r of W and m of x: one end for all of them. */
    float mine = 0.0f;
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            float total = sum[r][m];
#pragma unroll
            for (int step = 16; step; step /= 2)
                total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, step));
            mine = lane == (unsigned)(r * M + m) ? total : mine;
        }
    }
    static_assert(R * M <= 32, "each sum has a lane");
    unsigned m = lane % M;
    n += lane / M;
    if (lane < (unsigned)(R * M) && m < p.rows && n < a.w.rows)
        put(m, n, mine);
}

template <bool nf4, bool aligned, int M, bool bf16>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT(aligned, M))
    matmul_gemv(const gemv_args a)
{
    typedef gemv_shared<nf4, M> shared_type;
    QC_SHARED(shared_type, shared);
    uint64_t first_m = (uint64_t)blockIdx.z * M;
    gemv_part p;
    p.n0 = (uint64_t)blockIdx.x * WARPS * ROWS_OF_WARP(nf4, M);
    p.rows = a.m - first_m < (uint64_t)M ? (unsigned)(a.m - first_m) : (unsigned)M;
    p.k_begin = (uint64_t)blockIdx.y * a.split_k;
    p.k_end = a.k - p.k_begin < a.split_k ? a.k : p.k_begin + a.split_k;
    const uint16_t *x = a.x + first_m * a.ldx;
    multiply_rows<nf4, aligned, M, bf16>(
        a, p, [&](unsigned m) { return x + m * a.ldx; },
        [&](unsigned m, uint64_t n, float total) {
            if (a.partials)
                a.partials[(blockIdx.y * a.m_total + first_m + m) * a.w.rows + n] = total;
            else
                qc_finish(a.out, first_m + m, n, total, 0);
        },
        shared);
}

/* Thread 0 calls this, which has found the tile's row. */
QC_DEVICE void qc_experts_more(qc_experts_tile<gemv_args, 1> &t, const qc_experts_call &c)
{
    t.a.x = c.x + t.x_row[0] * c.ldx;
    t.a.x_aligned = c.x_aligned;
}

/* The same for experts (matmul_experts_tile.cuh), a row of x at a time. */
template <bool nf4, bool aligned, bool bf16>
__global__ void __launch_bounds__(THREADS, BLOCKS_RESIDENT(aligned, 1))
    matmul_gemv_experts(const qc_experts_call c)
{
    typedef qc_experts_shared<gemv_args, 1, gemv_shared<nf4, 1>> shared_type;
    QC_SHARED(shared_type, sh);
    const gemv_args &a = sh.tile.a;
    if (!qc_experts_begin(sh.tile, c, threadIdx.x))
        return;
    gemv_part p;
    p.n0 = (uint64_t)(blockIdx.x / c.slots) * WARPS * ROWS_OF_WARP(nf4, 1);
    p.rows = 1;
    p.k_begin = 0;
    p.k_end = a.k;
    multiply_rows<nf4, aligned, 1, bf16>(
        a, p, [&](unsigned) { return a.x; },
        [&](unsigned, uint64_t n, float total) { qc_experts_put(c, sh.tile, 0, n, total, 0); },
        sh.rest);
}

template <bool nf4, bool aligned, int M>
qc_status start(const gemv_args &a, qc_dtype x_dtype, dim3 grid, qc_cuda_stream s, qc_error *err)
{
    constexpr size_t shared_bytes = sizeof(gemv_shared<nf4, M>);
    auto kernel = x_dtype == QC_DTYPE_BF16 ? matmul_gemv<nf4, aligned, M, true>
                                           : matmul_gemv<nf4, aligned, M, false>;
    /* These are the numbers of BLOCKS_RESIDENT. Before sm_80 shared memory has no room for
     * three. */
    QC_TRY(
        qc_cuda_keep_resident(kernel, shared_bytes, aligned && M == 1 ? 3 : 2, "matmul_gemv", err));
    return qc_cuda_start("matmul_gemv", kernel, grid, dim3(THREADS), shared_bytes, s, err, a);
}

/* Starts the kernel for m rows of x per block, 1 to 8. Where weights are not aligned, it takes the
 * next power of two, with rows of zeros. */
template <bool nf4>
qc_status start_rows(const gemv_args &a, unsigned m, bool aligned, qc_dtype x_dtype, dim3 grid,
                     qc_cuda_stream s, qc_error *err)
{
    static constexpr decltype(&start<nf4, true, 1>) starts[2][GEMV_M] = {
        {start<nf4, false, 1>, start<nf4, false, 2>, start<nf4, false, 4>, start<nf4, false, 4>,
         start<nf4, false, 8>, start<nf4, false, 8>, start<nf4, false, 8>, start<nf4, false, 8>},
        {start<nf4, true, 1>, start<nf4, true, 2>, start<nf4, true, 3>, start<nf4, true, 4>,
         start<nf4, true, 5>, start<nf4, true, 6>, start<nf4, true, 7>, start<nf4, true, 8>}};
    return starts[aligned][m - 1](a, x_dtype, grid, s, err);
}

/* Starts the kernel for rows [first, first + count) of x, where count is at most the plan's m_tile
 * or a multiple of it. */
qc_status start_range(const qc_matmul_call *c, uint64_t first, uint64_t count, qc_cuda_stream s,
                      qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    bool nf4 = c->weights.w.form.ops->kind == QC_FORM_NF4;
    unsigned m = count < p->m_tile ? (unsigned)count : p->m_tile;
    unsigned n_tile = WARPS * ROWS_OF_WARP(nf4, m);
    uint64_t tiles = (c->n + n_tile - 1) / n_tile;
    if (tiles > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "a weight has too many rows for one launch");
    gemv_args a = {};
    a.w = qc_run_source_of(&c->weights);
    a.x = static_cast<const uint16_t *>(c->x) + first * c->ldx;
    a.ldx = c->ldx;
    a.m = count;
    a.k = c->k;
    a.split_k = p->split_k;
    a.x_aligned = reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && c->ldx % 8 == 0;
    a.partials = p->splits > 1 ? c->partials + first * c->n : nullptr;
    a.m_total = c->m;
    a.out = qc_matmul_output_at(&c->out, first, 0);
    dim3 grid((unsigned)tiles, p->splits, (unsigned)((count + m - 1) / m));
    bool aligned = p->aligned;
    return nf4 ? start_rows<true>(a, m, aligned, c->x_dtype, grid, s, err)
               : start_rows<false>(a, m, aligned, c->x_dtype, grid, s, err);
}

template <bool nf4, bool aligned, bool bf16>
qc_status start_experts(const qc_experts_call *c, qc_cuda_stream s, qc_error *err)
{
    typedef qc_experts_shared<gemv_args, 1, gemv_shared<nf4, 1>> shared_type;
    return qc_experts_start(matmul_gemv_experts<nf4, aligned, bf16>, c,
                            WARPS * ROWS_OF_WARP(nf4, 1), sizeof(shared_type), aligned ? 3 : 2,
                            "matmul_gemv_experts", s, err);
}

} /* namespace */

extern "C" qc_status qc_gemv_experts_launch(const qc_experts_call *c, qc_cuda_stream s,
                                            qc_error *err)
{
    static constexpr decltype(&start_experts<true, true, true>) starts[2][2][2] = {
        {{start_experts<false, false, false>, start_experts<false, false, true>},
         {start_experts<false, true, false>, start_experts<false, true, true>}},
        {{start_experts<true, false, false>, start_experts<true, false, true>},
         {start_experts<true, true, false>, start_experts<true, true, true>}}};
    return starts[c->nf4][c->aligned][c->x_dtype == QC_DTYPE_BF16](c, s, err);
}

/* Returns the shared memory of the kernel for m rows of x. Unaligned weights take that of the next
 * power of two. */
static uint32_t shared_bytes_for(bool nf4, bool aligned, uint32_t m)
{
    uint32_t rows = aligned || m <= 2 ? m : m <= 4 ? 4 : GEMV_M;
    return (uint32_t)(nf4 ? sizeof(qc_run_pairs) : sizeof(qc_run_plain)) +
           2u * rows * TILE_K * (uint32_t)sizeof(uint16_t);
}

/* Splits K only where there are fewer than two blocks per multiprocessor. The slices are whole
 * tiles. */
void qc_gemv_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p)
{
    bool nf4 = s->kind == QC_FORM_NF4;
    bool aligned = p->aligned;
    p->m_tile = s->m < GEMV_M ? (uint32_t)s->m : GEMV_M;
    if (shared_bytes_for(nf4, aligned, p->m_tile) > d->shared_block_bytes)
        p->m_tile = GEMV_M / 2;
    p->n_tile = WARPS * ROWS_OF_WARP(nf4, p->m_tile);
    p->threads = THREADS;
    p->shared_bytes = shared_bytes_for(nf4, aligned, p->m_tile);
    uint64_t tiles = (s->k + TILE_K - 1) / TILE_K;
    uint64_t chunks = (s->m + p->m_tile - 1) / p->m_tile,
             columns = (s->n + p->n_tile - 1) / p->n_tile;
    uint64_t wanted = 2u * (uint64_t)d->multiprocessors;
    uint64_t splits = chunks >= wanted || columns >= wanted ? 1 : wanted / (columns * chunks);
    splits = splits < 1 ? 1 : splits > SPLIT_MOST ? SPLIT_MOST : splits;
    splits = splits < tiles ? splits : tiles;
    uint64_t split_tiles = (tiles + splits - 1) / splits;
    p->split_k = split_tiles * TILE_K;
    p->splits = (uint32_t)((tiles + split_tiles - 1) / split_tiles);
}

qc_status qc_gemv_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t m = c[i].m, tile = c[i].plan.m_tile, whole = m / tile * tile;
        for (uint64_t first = 0; first < whole; first += M_CHUNK_MOST * tile)
            QC_TRY(
                start_range(c + i, first, qc_min_u64(whole - first, M_CHUNK_MOST * tile), s, err));
        if (whole < m)
            QC_TRY(start_range(c + i, whole, m - whole, s, err));
    }
    return QC_OK;
}
