/* mma.m8n8k4 with weights of any shape: they are turned into float16 weights, as dequantizing does
 * (matmul_mma884.cu has the layout). For its kernel and that of experts. */
#ifndef QC_KERNELS_MATMUL_MMA884_ANY_CUH
#define QC_KERNELS_MATMUL_MMA884_ANY_CUH

#include "kernels/matmul_mma.cuh"

#include <type_traits>

namespace
{

template <int m_tile_, bool nf4> struct any_shape {
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

template <typename S, typename X>
QC_DEVICE void any_load_x(uint4 held[S::units], const X &x, const qc_mma_part &p, uint64_t k)
{
    bool inside = k + x.column < p.k_end;
#pragma unroll
    for (int i = 0; i < S::units; i++) {
        held[i].x = held[i].y = held[i].z = held[i].w = 0;
        if (inside && (unsigned)i < x.there)
            held[i] = *reinterpret_cast<const uint4 *>(qc_mma_unit(x, k, i));
    }
}

/* `to` is where the thread's first unit lies. */
template <typename S> QC_DEVICE void any_store_x(uint4 *x, const uint4 held[S::units], unsigned to)
{
    static_assert(QC_MMA_THREADS / S::row_units % 4 == 0, "the swizzle of a thread's rows is one");
#pragma unroll
    for (int i = 0; i < S::units; i++)
        x[to + i * QC_MMA_THREADS] = held[i];
}

/* Of the eight sums of a part, lane l takes four from lane l ^ 4 and gives it the other four; they
 * are multiplied by `rest`. Then the warps' sums meet in shared memory. */
template <typename S>
QC_DEVICE void mma884_put_sums(float *sums, float (&sum)[S::b_tiles][S::m_parts][8], float rest,
                               unsigned thread)
{
    unsigned lane = thread % 32, warp = thread / 32, half = lane % 8 / 4;
    unsigned warp_k = warp % S::warps_k, warp_n = warp / S::warps_k;
#pragma unroll
    for (int r = 0; r < S::b_tiles; r++)
#pragma unroll
        for (int i = 0; i < S::m_parts; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float *v = sum[r][i];
                float other = __shfl_xor_sync(0xffffffffu, half ? v[e] : v[e + 4], 4);
                v[e] = __fmul_rn(__fadd_rn(half ? v[e + 4] : v[e], other), rest);
            }
    unsigned at_m = (lane & 1u) + lane / 16 * 4;
    unsigned at_n = warp_n * S::b_tiles * 16 + lane % 16 / 8 * 8 + half * 4 + (lane & 2u);
    for (int turn = 0; turn < S::warps_k; turn++) {
        if (warp_k == (unsigned)turn) {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
#pragma unroll
                for (int i = 0; i < S::m_parts; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        qc_mma_put(sums + qc_mma_sum_at(at_m + i * 8 + (e & 2),
                                                        at_n + r * 16 + (e & 1), S::n_tile),
                                   sum[r][i][e], turn == 0);
        }
        __syncthreads();
    }
}

/* Call: qc_mma_args, or qc_experts_call. Where one block on a multiprocessor is asked for, ptxas
 * takes more than 128 registers, with which it spills on sm_120. */
template <int m_tile, bool nf4, typename Call>
static __global__ void __launch_bounds__(QC_MMA_THREADS, QC_ARCH >= 120)
    matmul_mma884_any(const Call c)
{
    using S = any_shape<m_tile, nf4>;
    using memory = qc_mma_memory<Call, m_tile, typename S::shared>;
    QC_SHARED(memory, all);
    unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned q = lane % 16 / 4, half = q % 2, line = lane % 4 + lane / 16 * 4;
    unsigned warp_k = warp % S::warps_k, warp_n = warp / S::warps_k;
    if (!qc_mma_begin(all, c, thread))
        return;
    typename S::shared &sh = all.rest;
    const qc_mma_args &a = qc_mma_args_in(all, c);
    qc_mma_part p = qc_mma_part_in(all, c, m_tile, S::n_tile);

    /* From sm_80 on, where m8n8k4 is emulated, experts are short of registers. */
    constexpr bool is_short = QC_ARCH >= 80 && !std::is_same_v<Call, qc_mma_args>;
    uint32_t n[S::b_tiles]; /* 64 bits would take one register more than sm_70 has */
    uint64_t first[S::b_tiles];
#pragma unroll
    for (int r = 0; r < S::b_tiles; r++) {
        uint64_t row = p.n0 + (warp_n * S::b_tiles + r) * 16 + q / 2 * 8 + line;
        n[r] = (uint32_t)(row < a.n ? row : a.n - 1);
        first[r] = a.w.first + n[r] * a.w.ld;
    }
    qc_run<nf4> next[S::b_tiles];
    auto load_next = [&](uint64_t k) {
        k += warp_k * 64 + half * 32;
        if (k < p.k_end) {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
                qc_run_load<nf4, false>(next[r], a.w, n[r],
                                        is_short ? a.w.first + qc_anew(n[r]) * a.w.ld : first[r],
                                        k);
        } else {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
                qc_run_zero(next[r]);
        }
    };
    load_next(p.k_begin);
    uint4 held[S::units];
    auto from = qc_mma_x_in(all, c, p, S::row_units, thread);
    unsigned x_row = thread / S::row_units;
    unsigned x_to = x_row * S::row_units + (thread % S::row_units ^ (x_row & 3u));
    any_load_x<S>(held, from, p, p.k_begin);
    qc_run_power power = qc_run_power_of(a.w.exponent ? *a.w.exponent : 0);
    qc_run_fill(sh.t, a.w, thread, QC_MMA_THREADS);
    unsigned look = qc_run_lane(sh.t, lane);

    float sum[S::b_tiles][S::m_parts][8];
    qc_mma_zero(sum);

    unsigned x_at = line * S::row_units + warp_k * 8 + half * 4;
    unsigned buffer = 0;
    for (uint64_t k = p.k_begin; k < p.k_end; k += S::k_step) {
        any_store_x<S>(sh.x + buffer * S::buffer_units, held, x_to);
        qc_run<nf4> run[S::b_tiles];
        qc_run_scales by[S::b_tiles];
#pragma unroll
        for (int r = 0; r < S::b_tiles; r++)
            run[r] = next[r];
        load_next(k + S::k_step);
        any_load_x<S>(held, from, p, k + S::k_step);
        __syncthreads(); /* this buffer is complete, and all threads are done with the other */
#pragma unroll
        for (int r = 0; r < S::b_tiles; r++)
            by[r] = qc_run_scales_of<nf4, false>(run[r], a.w, sh.t.small, power);

        const uint4 *x = sh.x + buffer * S::buffer_units + x_at;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t b[S::b_tiles][2][2];
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    b[r][i / 2][i % 2] =
                        qc_run_word<nf4, false>(run[r], by[r], sh.t, look, 4 * j + i);
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
    mma884_put_sums<S>(sums, sum, 1.0f, qc_anew(thread));
    qc_mma_finish_in<m_tile, S::n_tile>(all, c, p, sums, thread);
}

} // namespace

#endif
