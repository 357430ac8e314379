/* y = x W^T with mma.m16n8k16 (sm_80 and newer).
 *
 * The weights are the 16-row operand A and come straight from registers; x is the 8-column operand
 * B and comes from shared memory. So M is padded to 8 only, and a weight goes from memory to a
 * tensor core without passing through shared memory.
 *
 * A block makes a tile of m_tile rows of x (8, 16, 32, 64) by n_tile rows of W, and takes k_step of
 * k at a time. Its 8 warps are warps_n x warps_k: a warp has 128 of each k_step and a_tiles times
 * 16 rows of W. a_tiles is 2 for NF4 and 1 for int8, so that a lane reads 64 bytes per step either
 * way.
 *
 *      m_tile  warps n x k  n_tile NF4 / int8  k_step  stages  x ring   NF4 table  shared, KB
 *         8       2 x 4         64 / 32          512      3     24 KB    32 KB     57.1 / 25.1
 *        16       2 x 4         64 / 32          512      3     48 KB    32 KB     81.1 / 49.1
 *        32       4 x 2        128 / 64          256      3     48 KB    32 KB     81.1 / 49.1
 *        64       4 x 2        128 / 64          256      2     64 KB     2 KB     67.1 / 65.1
 *
 * Which thread has which data: let g = lane / 4 and t = lane % 4. In each A tile the lane owns rows
 * g and g + 8, and in each of these rows the run (matmul_run.cuh) 32 t .. 32 t + 31 of the warp's
 * 128 k. So a quad reads 64 contiguous bytes of a row of NF4, or 128 of int8. Any k may stand at
 * any place of a fragment as long as A and B agree. Product j of 8 takes elements 4 j .. 4 j + 3 of
 * every lane's run:
 *
 *      a[0]  row g, elements 4 j, 4 j + 1       a[2]        row g, elements 4 j + 2, 4 j + 3
 *      a[1]  row g + 8, as a[0]                 a[3]        row g + 8, as a[2]
 *                                               b[0], b[1]  row g of x, the same elements
 *
 * So 16 aligned bytes of x are the B of two products. One 128-bit load from shared memory brings
 * them, and ldmatrix is not needed.
 *
 * x arrives by cp.async in a ring of stages, each of which is [m_tile][k_step / 8] units of 16
 * bytes. Unit u of a row lies at u ^ (u >> 3 & 1) ^ (row & 1) << 1. The 8 lanes that a 128-bit load
 * serves at once (two g, four t) then touch all 32 banks, and so do 8 consecutive units when they
 * are written. The weights of the next step are loaded before this one is computed, so that 64
 * bytes of each lane are on their way.
 *
 * Beyond K, M and the split's end, x is zero and the weights are some finite number. Beyond N,
 * lanes repeat the last row, and what they make is not written.
 *
 * Cost and bound: docs/kernels.md. */
#include "kernels/matmul_experts_tile.cuh"
#include "kernels/matmul_mma.cuh"

#include <type_traits>

namespace
{

template <int m_tile_, bool nf4> struct shape {
    static constexpr int m_tile = m_tile_;
    static constexpr int warps_k = m_tile <= 16 ? 4 : 2;
    static constexpr int warps_n = QC_MMA_WARPS / warps_k;
    static constexpr int a_tiles =
        nf4 ? 2 : 1; /* tiles of 16 rows per warp: 64 bytes a lane either way */
    static constexpr int runs = 2 * a_tiles;
    static constexpr int n_tile = warps_n * 16 * a_tiles;
    static constexpr int k_step = warps_k * 128;
    static constexpr int stages = m_tile <= 32 ? 3 : 2;
    static constexpr int row_units = k_step / 8;
    static constexpr int stage_units = m_tile * row_units;
    static constexpr int m_parts = m_tile / 8;
    using nf4_table = std::conditional_t<m_tile <= 32, qc_run_pairs, qc_run_singles>;
    using table = std::conditional_t<nf4, nf4_table, qc_run_plain>;

    struct shared {
        table t;
        alignas(128) uint4 x[stages * stage_units];
    };
    static_assert(sizeof(uint4) * stages * stage_units >= sizeof(float) * m_tile * n_tile,
                  "the tile's sums lie where x was");
};

/* Fills a stage with x from k on. `to` is where the thread's first unit lies in a stage. */
template <typename S, typename X>
QC_DEVICE void fill_stage(const X &x, const qc_mma_args &a, const qc_mma_part &p, uint64_t k,
                          uint4 *stage, unsigned to)
{
    static_assert(QC_MMA_THREADS / S::row_units % 2 == 0, "the swizzle of a thread's rows is one");
    bool inside = k + x.column < p.k_end;
#pragma unroll
    for (int i = 0; i < S::stage_units / QC_MMA_THREADS; i++) {
        bool there = inside && (unsigned)i < x.there;
        qc_cp_async_16(stage + to + i * QC_MMA_THREADS, there ? qc_mma_unit(x, k, i) : a.x,
                       there ? 16 : 0);
    }
}

/* Returns the number of blocks that fit on a multiprocessor by their registers. On sm_120 the
 * kernel of NF4 for 32 rows needs a few more than half of them. */
constexpr int blocks_of(int m_tile, bool aligned)
{
    return aligned && m_tile <= (QC_ARCH >= 120 ? 16 : 32) ? 2 : 1;
}

/* From sm_100 on the kernels for 32 rows of x and for 16 rows of experts, with aligned NF4, are
 * short of a few registers, so there the places of the thread's x and of its rows of W are
 * calculated again in every step. */
template <typename S, typename Call> QC_DEVICE constexpr bool short_of_registers(bool aligned)
{
    return QC_ARCH >= 100 && S::a_tiles == 2 && aligned &&
           S::m_tile == (std::is_same_v<Call, qc_mma_args> ? 32 : 16);
}

/* The warps' sums meet in shared memory. */
template <typename S>
QC_DEVICE void put_sums(float *sums, const float (&sum)[S::a_tiles][S::m_parts][4], unsigned warp_k,
                        unsigned n, unsigned t)
{
    for (int turn = 0; turn < S::warps_k; turn++) {
        if (warp_k == (unsigned)turn) {
#pragma unroll
            for (int r = 0; r < S::a_tiles; r++)
#pragma unroll
                for (int i = 0; i < S::m_parts; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        qc_mma_put(sums + qc_mma_sum_at(i * 8 + t * 2 + e % 2,
                                                        n + r * 16 + e / 2 * 8, S::n_tile),
                                   sum[r][i][e], turn == 0);
        }
        __syncthreads();
    }
}

/* Call: qc_mma_args, or qc_experts_call. */
template <int m_tile, bool nf4, bool aligned, typename Call>
static __global__ void __launch_bounds__(QC_MMA_THREADS, blocks_of(m_tile, aligned))
    matmul_mma16816(const Call c)
{
    using S = shape<m_tile, nf4>;
    using memory = qc_mma_memory<Call, m_tile, typename S::shared>;
    QC_SHARED(memory, all);
    unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned g = lane / 4, t = lane % 4, warp_k = warp % S::warps_k, warp_n = warp / S::warps_k;
    if (!qc_mma_begin(all, c, thread))
        return;
    typename S::shared &sh = all.rest;
    const qc_mma_args &a = qc_mma_args_in(all, c);
    qc_mma_part p = qc_mma_part_in(all, c, m_tile, S::n_tile);

    constexpr bool is_short = short_of_registers<S, Call>(aligned);
    uint32_t n[S::runs];
    uint64_t first[S::runs];
#pragma unroll
    for (int i = 0; i < S::runs; i++) {
        uint64_t row = p.n0 + warp_n * 8 * S::runs + i * 8 + g;
        n[i] = (uint32_t)(row < a.n ? row : a.n - 1);
        first[i] = a.w.first + n[i] * a.w.ld;
    }
    qc_run<nf4> next[S::runs];
    auto load_next = [&](uint64_t k) {
        k += warp_k * 128 + t * 32;
        if (k < p.k_end) {
#pragma unroll
            for (int i = 0; i < S::runs; i++)
                qc_run_load<nf4, aligned>(next[i], a.w, n[i],
                                          is_short ? a.w.first + qc_anew(n[i]) * a.w.ld : first[i],
                                          k);
        } else {
#pragma unroll
            for (int i = 0; i < S::runs; i++)
                qc_run_zero(next[i]);
        }
    };
    load_next(p.k_begin);
    auto from = qc_mma_x_in(all, c, p, S::row_units, thread);
    unsigned x_row = thread / S::row_units, x_unit = thread % S::row_units;
    unsigned x_to = x_row * S::row_units + (x_unit ^ (x_unit >> 3 & 1u) ^ (x_row & 1u) << 1);
#pragma unroll
    for (int i = 0; i < S::stages - 1; i++) {
        fill_stage<S>(from, a, p, p.k_begin + i * S::k_step, sh.x + i * S::stage_units, x_to);
        qc_cp_async_commit();
    }
    qc_run_power power = qc_run_power_of(a.w.exponent ? *a.w.exponent : 0);
    qc_run_fill(sh.t, a.w, thread, QC_MMA_THREADS);
    unsigned look = qc_run_lane(sh.t, lane);

    float sum[S::a_tiles][S::m_parts][4];
    qc_mma_zero(sum);

    unsigned x_at = g * S::row_units + warp_k * 16 + t * 4;
    unsigned x_swizzle = t >> 1 ^ (g & 1u) << 1;
    unsigned slot = 0, slot_ahead = S::stages - 1;
    for (uint64_t k = p.k_begin; k < p.k_end; k += S::k_step) {
        qc_run<nf4> run[S::runs];
        qc_run_scales by[S::runs];
#pragma unroll
        for (int i = 0; i < S::runs; i++)
            run[i] = next[i];
        load_next(k + S::k_step);
        if constexpr (is_short)
            qc_mma_x_anew(from, all, c, p, S::row_units, qc_anew(thread));
        qc_cp_async_wait<S::stages - 2>();
        __syncthreads(); /* this stage is complete, and all are done with the one before it */
        fill_stage<S>(from, a, p, k + (S::stages - 1) * S::k_step,
                      sh.x + slot_ahead * S::stage_units, x_to);
        qc_cp_async_commit();
#pragma unroll
        for (int i = 0; i < S::runs; i++)
            by[i] = qc_run_scales_of<nf4, aligned>(run[i], a.w, sh.t.small, power);

        const uint4 *x = sh.x + slot * S::stage_units + x_at;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t w[S::a_tiles][2][4];
#pragma unroll
            for (int r = 0; r < S::a_tiles; r++)
#pragma unroll
                for (int i = 0; i < 8; i++) /* the half of j, row g or g + 8, pair */
                    w[r][i / 4][i / 2 % 2 + i % 2 * 2] =
                        qc_run_word<nf4, aligned>(run[2 * r + i / 2 % 2], by[2 * r + i / 2 % 2],
                                                  sh.t, look, 4 * j + i / 4 * 2 + i % 2);
#pragma unroll
            for (int i = 0; i < S::m_parts; i++) {
                uint4 v = x[i * 8 * S::row_units + (j ^ x_swizzle)];
                uint32_t b[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
                for (int r = 0; r < S::a_tiles; r++) {
                    qc_mma_m16n8k16(sum[r][i], w[r][0], b[0]);
                    qc_mma_m16n8k16(sum[r][i], w[r][1], b[1]);
                }
            }
        }
        slot = slot + 1 == S::stages ? 0 : slot + 1;
        slot_ahead = slot_ahead + 1 == S::stages ? 0 : slot_ahead + 1;
    }

    /* The zeros that stand for x beyond k_end are copies like all others, and may still be on their
     * way. */
    qc_cp_async_wait<0>();
    __syncthreads();
    float *sums = reinterpret_cast<float *>(sh.x);
    put_sums<S>(sums, sum, warp_k, warp_n * S::a_tiles * 16 + g, t);
    qc_mma_finish_in<m_tile, S::n_tile>(all, c, p, sums, thread);
}

template <int m_tile, bool nf4>
void configure_tile(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p)
{
    using S = shape<m_tile, nf4>;
    p->m_tile = m_tile;
    p->n_tile = S::n_tile;
    p->threads = QC_MMA_THREADS;
    p->shared_bytes = (uint32_t)sizeof(typename S::shared);
    qc_mma_configure_splits(d, s, S::k_step, blocks_of(m_tile, p->aligned), p);
}

template <bool nf4>
void configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p)
{
    static constexpr decltype(&configure_tile<8, nf4>) tiles[] = {
        configure_tile<8, nf4>, configure_tile<16, nf4>, configure_tile<32, nf4>,
        configure_tile<64, nf4>};
    tiles[qc_mma_tile_index(s->m)](d, s, p);
}

template <int m_tile> qc_status launch(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err)
{
    bool nf4 = c->weights.w.form.ops->kind == QC_FORM_NF4, aligned = c->plan.aligned;
    auto kernel = nf4       ? aligned ? matmul_mma16816<m_tile, true, true, qc_mma_args>
                                      : matmul_mma16816<m_tile, true, false, qc_mma_args>
                        : aligned ? matmul_mma16816<m_tile, false, true, qc_mma_args>
                            : matmul_mma16816<m_tile, false, false, qc_mma_args>;
    return qc_mma_launch_tiles(kernel, c, (unsigned)blocks_of(m_tile, aligned), "matmul_mma16816",
                               s, err);
}

template <int m_tile, bool nf4, bool aligned>
qc_status launch_experts(const qc_experts_call *c, qc_cuda_stream s, qc_error *err)
{
    using S = shape<m_tile, nf4>;
    using memory = qc_mma_memory<qc_experts_call, m_tile, typename S::shared>;
    return qc_experts_start(matmul_mma16816<m_tile, nf4, aligned, qc_experts_call>, c, S::n_tile,
                            sizeof(memory), (unsigned)blocks_of(m_tile, aligned),
                            "matmul_mma16816_experts", s, err);
}

} // namespace

extern "C" qc_status qc_mma16816_experts_launch(const qc_experts_call *c, qc_cuda_stream s,
                                                qc_error *err)
{
    /* Rows that are not aligned always take the smaller tile. */
    static constexpr decltype(&launch_experts<16, true, true>) starts[2][3] = {
        {launch_experts<16, false, false>, launch_experts<16, false, true>,
         launch_experts<64, false, true>},
        {launch_experts<16, true, false>, launch_experts<16, true, true>,
         launch_experts<64, true, true>}};
    return starts[c->nf4][!c->aligned ? 0 : c->m_tile == 16 ? 1 : 2](c, s, err);
}

extern "C" void qc_mma16816_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                      qc_matmul_plan *p)
{
    p->worker_k = 0;
    if (p->variant != QC_MATMUL_GENERAL && qc_tiles_takes(d, s, p)) {
        p->variant = QC_MATMUL_TILES;
        qc_tiles_configure(d, s, p);
        return;
    }
    p->variant = QC_MATMUL_GENERAL;
    if (s->kind == QC_FORM_NF4)
        configure<true>(d, s, p);
    else
        configure<false>(d, s, p);
}

extern "C" qc_status qc_mma16816_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                        qc_error *err)
{
    if (c->plan.variant == QC_MATMUL_RING)
        return qc_ring_launch(c, count, s, err);
    if (c->plan.variant == QC_MATMUL_TILES)
        return qc_tiles_launch(c, count, s, err);
    static constexpr decltype(&launch<8>) tiles[] = {launch<8>, launch<16>, launch<32>, launch<64>};
    for (uint32_t i = 0; i < count; i++)
        QC_TRY(tiles[qc_mma_tile_index(c->plan.m_tile)](c + i, s, err));
    return QC_OK;
}
