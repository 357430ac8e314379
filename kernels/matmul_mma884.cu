/* y = x W^T with mma.m8n8k4 (sm_70 and sm_75).
 *
 * One instruction is four products of 8 x 8 x 4, one per quad pair of the warp. Weights are the
 * 8-column operand B of each, straight from registers; x is the 8-row operand A, from shared
 * memory. So M is padded to 8 only, and a weight goes from memory to a tensor core without passing
 * through shared memory.
 *
 * Tile of a block: m_tile rows of x (8, 16, 32, 64) by n_tile rows of W, k_step of k at a time. 8
 * warps = warps_n x warps_k: a warp has 64 of each k_step and b_tiles times 16 rows of W. b_tiles
 * is 2 for NF4 and 1 for int8, so that a lane reads 32 bytes per step either way; 1 at m_tile 64,
 * where two would take more registers than there are.
 *
 *      m_tile  warps n x k  n_tile NF4 / int8  k_step  x, two buffers  shared NF4 / int8
 *         8       2 x 4         64 / 32          256        8 KB        11.1 /  9.1 KB
 *        16       2 x 4         64 / 32          256       16 KB        19.1 / 17.1 KB
 *        32       4 x 2        128 / 64          128       16 KB        19.1 / 17.1 KB
 *        64       4 x 2         64 / 64          128       32 KB        35.1 / 33.1 KB
 *
 * Thread to data. With q = lane % 16 / 4 the quad pair and i = lane % 4 + (lane >= 16 ? 4 : 0):
 * quad pairs 0 and 1 have columns (rows of W) 0 .. 7 of the tile's 16, pairs 2 and 3 have 8 .. 15;
 * pairs 0 and 2 take the first 32 of the warp's 64 k, pairs 1 and 3 the second. A lane owns row
 * 8 (q / 2) + i and of it the run (matmul_run.cuh) of its half, q % 2: lanes l and l ^ 4 read the
 * two halves of a 32-byte sector in one instruction. (Four different sets of 8 rows would use half
 * of every sector that a load touches; four different k would need four times the x.)
 * Product j of 8 takes elements 4 j .. 4 j + 3 of every lane's run as b, and the same elements of x
 * row i as a: an aligned 16 bytes of x are the a of two products. At the end the two halves are
 * added by one shuffle (l ^ 4), then the warps' sums in shared memory.
 *
 * x: there is no cp.async on sm_70. The units (16 bytes) of the next step are loaded to registers
 * before this step is computed and stored to the other buffer behind it: one barrier per step. Unit
 * u of a row lies at u ^ (row & 3): the 8 lanes that a 128-bit load serves at once (four rows, two
 * halves) touch all 32 banks. The weights of the next step are loaded before this one is computed.
 *
 * Beyond K, M and the split's end x is zero, weights some finite number; beyond N lanes repeat the
 * last row and what they make is not written.
 *
 * Newer devices run this too, but not on tensor cores: the compiler makes m8n8k4 from other
 * instructions there. That is for testing.
 *
 * Cost and bound: docs/kernels.md. */
#include "kernels/matmul_mma.cuh"

#include <type_traits>

namespace
{

template <int m_tile_, bool nf4> struct shape {
    static constexpr int m_tile = m_tile_;
    static constexpr int warps_k = m_tile <= 16 ? 4 : 2;
    static constexpr int warps_n = QC_MMA_WARPS / warps_k;
    static constexpr int b_tiles = nf4 && m_tile <= 32 ? 2 : 1;
    static constexpr int n_tile = warps_n * 16 * b_tiles;
    static constexpr int k_step = warps_k * 64;
    static constexpr int row_units = k_step / 8;
    static constexpr int buffer_units = m_tile * row_units;
    static constexpr int units = buffer_units / QC_MMA_THREADS; /* per thread */
    static constexpr int m_parts = m_tile / 8;
    static_assert(units * QC_MMA_THREADS == buffer_units, "every thread copies the same");
    using table = std::conditional_t<nf4, qc_run_singles, qc_run_plain>;

    struct shared {
        table t;
        alignas(128) uint4 x[2 * buffer_units];
    };
    static_assert(sizeof(uint4) * 2 * buffer_units >= sizeof(float) * m_tile * n_tile,
                  "the tile's sums lie where x was");
};

/* Blocks that fit on a multiprocessor by their registers. */
constexpr int blocks_of(int m_tile, bool aligned)
{
    return aligned && m_tile <= 16 ? 2 : 1;
}

template <typename S>
QC_DEVICE void load_x(uint4 held[S::units], const qc_mma_x &x, const qc_mma_part &p, uint64_t k)
{
    bool inside = k + x.column < p.k_end;
#pragma unroll
    for (int i = 0; i < S::units; i++) {
        held[i].x = held[i].y = held[i].z = held[i].w = 0;
        if (inside && (unsigned)i < x.there)
            held[i] = *reinterpret_cast<const uint4 *>(x.from + k + i * x.apart);
    }
}

/* to: where the thread's first unit lies. */
template <typename S> QC_DEVICE void store_x(uint4 *x, const uint4 held[S::units], unsigned to)
{
    static_assert(QC_MMA_THREADS / S::row_units % 4 == 0, "the swizzle of a thread's rows is one");
#pragma unroll
    for (int i = 0; i < S::units; i++)
        x[to + i * QC_MMA_THREADS] = held[i];
}

template <int m_tile, bool nf4, bool aligned>
static __global__ void __launch_bounds__(QC_MMA_THREADS, blocks_of(m_tile, aligned))
    matmul_mma884(const qc_mma_args a)
{
    using S = shape<m_tile, nf4>;
    QC_SHARED(typename S::shared, sh);
    unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned q = lane % 16 / 4, half = q % 2, line = lane % 4 + lane / 16 * 4;
    unsigned warp_k = warp % S::warps_k, warp_n = warp / S::warps_k;
    qc_mma_part p = qc_mma_part_of(a, m_tile, S::n_tile);

    uint64_t n[S::b_tiles], first[S::b_tiles];
#pragma unroll
    for (int r = 0; r < S::b_tiles; r++) {
        n[r] = p.n0 + (warp_n * S::b_tiles + r) * 16 + q / 2 * 8 + line;
        n[r] = n[r] < a.n ? n[r] : a.n - 1;
        first[r] = n[r] * a.w.cols;
    }
    qc_run<nf4> next[S::b_tiles];
    auto load_next = [&](uint64_t k) {
        k += warp_k * 64 + half * 32;
        if (k < p.k_end) {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
                qc_run_load<nf4, aligned>(next[r], a.w, n[r], first[r], k);
        } else {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
                qc_run_zero(next[r]);
        }
    };
    load_next(p.k_begin);
    uint4 held[S::units];
    qc_mma_x from = qc_mma_x_of(a, p, S::row_units, thread);
    unsigned x_row = thread / S::row_units;
    unsigned x_to = x_row * S::row_units + (thread % S::row_units ^ (x_row & 3u));
    load_x<S>(held, from, p, p.k_begin);
    qc_run_power power = qc_run_power_of(a.w.exponent ? *a.w.exponent : 0);
    qc_run_fill(sh.t, a.w, thread, QC_MMA_THREADS);
    unsigned look = qc_run_lane(sh.t, lane);

    float sum[S::b_tiles][S::m_parts][8];
#pragma unroll
    for (int r = 0; r < S::b_tiles; r++)
#pragma unroll
        for (int i = 0; i < S::m_parts; i++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                sum[r][i][e] = 0.0f;

    unsigned x_at = line * S::row_units + warp_k * 8 + half * 4;
    unsigned buffer = 0;
    for (uint64_t k = p.k_begin; k < p.k_end; k += S::k_step) {
        store_x<S>(sh.x + buffer * S::buffer_units, held, x_to);
        qc_run<nf4> run[S::b_tiles];
        qc_run_scales by[S::b_tiles];
#pragma unroll
        for (int r = 0; r < S::b_tiles; r++)
            run[r] = next[r];
        load_next(k + S::k_step);
        load_x<S>(held, from, p, k + S::k_step);
        __syncthreads(); /* this buffer is whole, and all are done with the other */
#pragma unroll
        for (int r = 0; r < S::b_tiles; r++)
            by[r] = qc_run_scales_of<nf4, aligned>(run[r], a.w, sh.t.small, power);

        const uint4 *x = sh.x + buffer * S::buffer_units + x_at;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t b[S::b_tiles][2][2];
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    b[r][i / 2][i % 2] =
                        qc_run_word<nf4, aligned>(run[r], by[r], sh.t, look, 4 * j + i);
#pragma unroll
            for (int i = 0; i < S::m_parts; i++) {
                uint4 v = x[i * 8 * S::row_units + (j ^ (line & 3u))];
                uint32_t w[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
                for (int r = 0; r < S::b_tiles; r++) {
                    qc_mma_m8n8k4(sum[r][i], w[0], b[r][0]);
                    qc_mma_m8n8k4(sum[r][i], w[1], b[r][1]);
                }
            }
        }
        buffer ^= 1;
    }

    __syncthreads();
    float *sums = reinterpret_cast<float *>(sh.x);
    for (int turn = 0; turn < S::warps_k; turn++) {
        if (warp_k == (unsigned)turn) {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
#pragma unroll
                for (int i = 0; i < S::m_parts; i++)
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        float other = __shfl_xor_sync(0xffffffffu, sum[r][i][e], 4);
                        if (half != (unsigned)(e / 4)) /* each of the two writes four */
                            continue;
                        unsigned m = i * 8 + (lane & 1u) + (e & 2) + lane / 16 * 4;
                        unsigned n = (warp_n * S::b_tiles + r) * 16 + q / 2 * 8 + (e & 4) +
                                     (lane & 2u) + (e & 1);
                        qc_mma_put(sums + qc_mma_sum_at(m, n, S::n_tile),
                                   __fadd_rn(sum[r][i][e], other), turn == 0);
                    }
        }
        __syncthreads();
    }
    qc_mma_finish<m_tile, S::n_tile>(a, p, sums, thread);
}

template <int m_tile, bool nf4>
void configure_tile(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p)
{
    using S = shape<m_tile, nf4>;
    p->m_tile = m_tile;
    p->n_tile = S::n_tile;
    p->threads = QC_MMA_THREADS;
    p->shared_bytes = (uint32_t)sizeof(typename S::shared);
    qc_mma_configure_splits(d, s, S::k_step, blocks_of(m_tile, p->run == QC_RUN_ALIGNED), p);
}

template <bool nf4>
void configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p)
{
    if (s->m <= 8)
        configure_tile<8, nf4>(d, s, p);
    else if (s->m <= 16)
        configure_tile<16, nf4>(d, s, p);
    else if (s->m <= 32)
        configure_tile<32, nf4>(d, s, p);
    else
        configure_tile<64, nf4>(d, s, p);
}

template <int m_tile> qc_status launch(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err)
{
    bool nf4 = c->weights.w.kind == QC_WEIGHTS_NF4, aligned = c->plan.run == QC_RUN_ALIGNED;
    auto kernel =
        nf4       ? aligned ? matmul_mma884<m_tile, true, true> : matmul_mma884<m_tile, true, false>
              : aligned ? matmul_mma884<m_tile, false, true>
                  : matmul_mma884<m_tile, false, false>;
    return qc_mma_launch_tiles(kernel, c, "matmul_mma884", s, err);
}

} // namespace

extern "C" void qc_mma884_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                    qc_matmul_plan *p)
{
    if (s->kind == QC_WEIGHTS_NF4)
        configure<true>(d, s, p);
    else
        configure<false>(d, s, p);
}

static qc_status launch_one(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err)
{
    switch (c->plan.m_tile) {
    case 8:
        return launch<8>(c, s, err);
    case 16:
        return launch<16>(c, s, err);
    case 32:
        return launch<32>(c, s, err);
    default:
        return launch<64>(c, s, err);
    }
}

extern "C" qc_status qc_mma884_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                      qc_error *err)
{
    for (uint32_t i = 0; i < count; i++)
        QC_TRY(launch_one(c + i, s, err));
    return QC_OK;
}
