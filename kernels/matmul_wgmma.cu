/* y = x W^T with the products of a warpgroup (wgmma, sm_90a), for any number of rows of x. Weights
 * are decoded into registers, as the operand A of 64 rows of W; x comes from shared memory as the
 * operand B.
 *
 * A block makes tiles of m_tile rows of x (16, 32, 64, 128, 256) by n_tile rows of W. It has 2 or 4
 * warpgroups that multiply 64 rows of W each, and one that brings what they need into a ring of
 * stages of 64 or 128 k, each with a barrier of full and one of empty:
 *
 *   x      by one bulk copy. It lies in the workspace as the image of what shared memory gets
 *          (matmul_input.cu).
 *   codes  by cp.async, 16 bytes a thread.
 *
 * The table of NF4 (qc_codes_wide) lies at the address 64 KB, so that one PRMT makes a whole
 * address. While the tensor cores multiply 64 of k, a warp decodes the next 64 into other
 * registers. The order of k within 64 is that of matmul_tiles.cu (lane t has 16 codes in a row);
 * the image of x has it too.
 *
 * Up to 32 rows of x a block's scale is multiplied into the float sums, as in matmul_tiles.cu. With
 * more rows that costs more than to scale the weights: w = fma(v, high, v * low), where high + low
 * is the scale in two float16. v * low is so small that its rounding does not count, and the sum is
 * rounded once. So a weight is what float16 can hold of the product of its scale and its code
 * value, as when it is dequantized. Row-wise int8 has exact products and gets its scale at the very
 * end. Integers are 1/128 of the codes, since scales of 1/127 would leave float16's normal numbers.
 *
 * The work is shared out as in matmul_tiles.cu; matmul_reduce.cu adds the parts. */
#include "kernels/matmul_wgmma.cuh"

#include <string.h>

namespace
{

/* ---- weights --------------------------------------------------------------------------------- */

/* Turns four int8 into two registers of a fragment, as 1/128 of them: 0x48 above a byte of value u
 * (the code plus 128) is the float16 8 + u / 128. */
QC_DEVICE void int8_128ths(uint32_t out[2], uint32_t q)
{
    q ^= 0x80808080u;
    out[0] = qc_half2_sub(__byte_perm(q, 0x48484848u, 0x4140u), 0x48804880u);
    out[1] = qc_half2_sub(__byte_perm(q, 0x48484848u, 0x4342u), 0x48804880u);
}

/* Where a lane's codes of row g of its warp lie in a stage, those of block 0. */
template <typename S> QC_DEVICE uint32_t codes_of(uint32_t warp, uint32_t lane)
{
    uint32_t g = lane / 4, t = lane % 4;
    return (warp * 16 + g) * S::row_units * 16 + swizzle<S>(g) * 16 + t * (S::nf4 ? 8 : 16);
}

/* Loads a lane's 16 codes of rows g and g + 8 of its warp, of block b of a stage. */
template <typename S>
QC_DEVICE void codes_load(uint32_t (&q)[2][S::words], const unsigned char *stage, uint32_t mine,
                          uint32_t b)
{
    mine ^= b * (S::nf4 ? 32 : 64);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned char *p = stage + mine + i * 8 * S::row_units * 16;
        if constexpr (S::nf4) {
            uint2 v = *reinterpret_cast<const uint2 *>(p);
            q[i][0] = v.x;
            q[i][1] = v.y;
        } else {
            uint4 v = *reinterpret_cast<const uint4 *>(p);
            q[i][0] = v.x;
            q[i][1] = v.y;
            q[i][2] = v.z;
            q[i][3] = v.w;
        }
    }
}

/* Makes the A operands of the four products of 64 k. `scale`: of rows g and g + 8, in two halves
 * each. */
template <typename S>
QC_DEVICE void decode(uint32_t (&f)[4][4], const uint32_t (&q)[2][S::words], uint32_t look,
                      uint2 scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t high = __byte_perm(i ? scale.y : scale.x, 0, 0x1010);
        uint32_t low = __byte_perm(i ? scale.y : scale.x, 0, 0x3232);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t two[2];
            if constexpr (S::nf4) {
                two[0] = qc_codes_look_fixed(look, q[i][j / 2], j % 2 * 2);
                two[1] = qc_codes_look_fixed(look, q[i][j / 2], j % 2 * 2 + 1);
            } else {
                int8_128ths(two, q[i][j]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
                f[j][2 * h + i] = S::scaled && !S::scales_sums
                                      ? qc_half2_fma(two[h], high, qc_half2_mul(two[h], low))
                                      : two[h];
        }
    }
}

/* ---- the end of a tile ----------------------------------------------------------------------- */

/* Writes an element of y, or of the partial sums `plane` and zeros to the planes up to `planes`. */
QC_DEVICE void put(const args &a, const part &p, uint64_t m, uint64_t n, float v, int w_exponent,
                   uint32_t plane, uint32_t planes)
{
    if (m >= a.m || n >= p.n)
        return;
    if (a.splits > 1) {
        float *to = p.partials + m * p.n + n;
        to[plane * a.m * p.n] = v;
#pragma unroll 1
        for (uint32_t z = plane + 1; z < planes; z++)
            to[z * a.m * p.n] = 0.0f;
    } else {
        qc_finish(p.out, m, n, v, w_exponent + (a.x_exponent ? a.x_exponent[m] : 0));
    }
}

/* Writes the tile's part of y, or its partial sums. Where the tile has fewer parts than there is
 * room for, its last part writes zeros to the others. */
template <typename S>
QC_DEVICE void finish(const args &a, const tile_range &now, float (&sum)[S::m_tile / 2],
                      uint32_t row, uint32_t lane)
{
    const part &p = a.part[now.at];
    int w_exponent = p.w.exponent ? *p.w.exponent : 0;
    uint32_t tile = (now.end - 1) / a.tile_steps;
    uint32_t plane = blockIdx.x - tile * a.tile_steps / a.worker_steps;
    uint32_t planes = now.end % a.tile_steps == 0 ? a.splits : 0;
    uint64_t n0 = now.n0 + row;
    float by[2] = {1.0f, 1.0f};
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (!S::scaled && n0 + half * 8 < p.n)
            by[half] = __fmul_rn(p.w.absmax[n0 + half * 8], factor_of<S>(p.w));
    /* A few sums at a time, in one loop: unrolled code for all would be so much that fetching it
     * takes as long as the products. The next sums move down behind them, of `some` each time and
     * of all once these are done, since moving all each time would be long as well. */
    constexpr int some = S::m_tile >= 128 ? 16 : S::m_tile == 64 ? 8 : 4;
    constexpr int few = S::m_tile >= 64 ? 4 : 2;
    uint64_t m0 = (uint64_t)now.m_index * S::m_tile + lane % 4 * 2;
#pragma unroll 1
    for (int done = 0; done < S::m_tile / 2; done += some, m0 += some * 2) {
#pragma unroll 1
        for (int e = 0; e < some; e += few) {
#pragma unroll
            for (int i = 0; i < few; i++) {
                int half = (e + i) / 2 % 2;
                put(a, p, m0 + (e + i) / 4 * 8 + i % 2, n0 + half * 8,
                    S::scaled ? sum[i] : __fmul_rn(sum[i], half ? by[1] : by[0]), w_exponent, plane,
                    planes);
            }
#pragma unroll
            for (int i = 0; i + few < some; i++)
                sum[i] = sum[i + few];
        }
#pragma unroll
        for (int i = 0; i + some < S::m_tile / 2; i++)
            sum[i] = sum[i + some];
    }
}

/* Fills the table of code pairs. All threads call it; the barrier behind it is the caller's. */
template <typename S>
QC_DEVICE void fill_table(qc_codes_wide &table, typename S::shared &sh, const qc_run_source &w,
                          uint32_t thread)
{
    qc_run_fill_codes(sh.small, w, thread);
    __syncthreads();
    qc_codes_fill(table, sh.small, w, thread, S::threads);
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Starts the four products of a block with the image of x at the address x_at. Where scales come
 * behind the products, these begin at zero in `product`. */
template <typename S>
QC_DEVICE void start_products(float (&sum)[S::m_tile / 2],
                              float (&product)[S::scales_sums ? S::m_tile / 2 : 1],
                              const uint32_t (&f)[4][4], uint32_t x_at)
{
    uint64_t x = qc_wgmma_b(x_at, S::m_tile * 16);
    qc_wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
        if constexpr (S::scales_sums)
            qc_wgmma(product, f[j], x + j * 2 * S::m_tile, j > 0);
        else
            qc_wgmma(sum, f[j], x + j * 2 * S::m_tile, 1);
    qc_wgmma_commit();
}

/* Adds the products of a block times the scales of rows g and g + 8. */
template <int count>
QC_DEVICE void add_scaled(float (&sum)[count], const float (&product)[count], uint2 scale)
{
#pragma unroll
    for (int e = 0; e < count; e++)
        sum[e] = __fmaf_rn(product[e], __uint_as_float(e & 2 ? scale.y : scale.x), sum[e]);
}

/* Every block of threads has a range (args_of), so every thread waits for the launch before. */
template <typename S>
QC_DEVICE void multiply_tiles(const args &a, typename S::shared &sh, uint32_t warp, uint32_t lane)
{
    uint32_t g = lane / 4;
    /* Kept, and not calculated again and again. */
    uint32_t look = qc_anew(TABLE + lane * 4), mine = qc_anew(codes_of<S>(warp, lane));
    const unsigned char *codes = shared_at(sh, S::codes_at);
    ring_position<S::stages> from = {0, 0}, done = {0, 0};
    bool waited = !a.complete;
    tile_range p;
    for (uint32_t unit = blockIdx.x * a.worker_steps; range_at(p, a, unit, S::n_tile);
         unit = p.end) {
        float sum[S::m_tile / 2], product[S::scales_sums ? S::m_tile / 2 : 1];
#pragma unroll
        for (int i = 0; i < S::m_tile / 2; i++)
            sum[i] = 0.0f;
        uint32_t f[2][4][4];
        uint2 scale[2];
        int left = (int)(p.block_end - p.block);
        const part &w = a.part[p.at];
        scale_reader reader;
        float factor = 1.0f;
        uint32_t taken = 0; /* of two blocks: those that are decoded next */
        if (S::scaled) {
            factor = factor_of<S>(w.w);
            scale_begin(reader, a, w, p.n0 + warp * 16 + g + lane % 2 * 8, p.block + lane % 4 / 2);
        }
        auto take = [&]() {
            if (!S::scaled)
                return;
            float v = scale_take(reader, a, w, factor);
            taken = S::scales_sums ? __float_as_uint(v) : two_halves(v);
        };
        /* Decodes a block into f[i]; b is its number in the stage. */
        auto prepare = [&](int i, int b) {
            if (b == 0)
                qc_mbarrier_wait(&sh.full[from.stage], from.parity);
            uint32_t q[2][S::words];
            codes_load<S>(q, codes + from.stage * S::codes_stage, mine, b);
            if (S::scaled) {
                scale[i].x = __shfl_sync(0xffffffffu, taken, i * 2, 4);
                scale[i].y = __shfl_sync(0xffffffffu, taken, i * 2 + 1, 4);
            }
            decode<S>(f[i], q, look, scale[i]);
            if (b == S::blocks - 1)
                ring_next(from);
#pragma unroll
            for (int j = 0; j < 4; j++)
                qc_wgmma_operand(f[i][j]);
        };
        auto start = [&](int i, int b) {
            start_products<S>(sum, product, f[i],
                              S::x_at + done.stage * S::x_stage + b * S::x_bytes);
        };
        auto await = [&](int i, int b, bool last) {
            qc_wgmma_wait<0>();
            if (b == S::blocks - 1 || last) {
                if (lane == 0)
                    qc_mbarrier_arrive(&sh.empty[done.stage]);
                ring_next(done);
            }
            if constexpr (S::scales_sums)
                add_scaled(sum, product, scale[i]);
        };
        take();
        prepare(0, 0);
        for (int i = 0; i < left; i += 2) {
            start(0, 0);
            if (i + 1 < left)
                prepare(1, S::blocks - 1);
            take();
            await(0, 0, i + 1 == left);
            if (i + 1 == left)
                break;
            start(1, S::blocks - 1);
            if (i + 2 < left)
                prepare(0, 0);
            await(1, S::blocks - 1, true);
        }
        if (S::blocks == 2 && left % 2)
            ring_next(from); /* the stage had one block */
        if (!waited)
            qc_grid_wait(); /* before anything is written */
        waited = true;
        finish<S>(a, p, sum, warp * 16 + g, lane);
    }
}

template <int m_tile, kind what>
static __global__ void __launch_bounds__(shape<m_tile, what>::threads, 1) matmul_wgmma(const args a)
{
    using S = shape<m_tile, what>;
    QC_SHARED(typename S::shared, sh);
    uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    qc_grid_release();
    if (!a.complete) /* codes, scales and the exponent may still be written */
        qc_grid_wait();
    if (qc_shared_address(&sh) > DRIVER_BYTES) { /* else the rings would reach beyond the end */
        qc_grid_wait();
        if (thread == 0 && a.fault)
            *a.fault = QC_MATMUL_FAULT_SHARED;
        return;
    }
    if (thread == 0) {
        for (int i = 0; i < S::stages; i++) {
            /* Each thread's copies, and the announcement of bulk copies. */
            qc_mbarrier_init(&sh.full[i], BRINGERS + 1);
            qc_mbarrier_init(&sh.empty[i], S::warps);
        }
        qc_mbarrier_ready();
    }
    if constexpr (S::nf4)
        fill_table<S>(*reinterpret_cast<qc_codes_wide *>(shared_at(sh, TABLE)), sh, a.part[0].w,
                      thread);
    __syncthreads();
    if (warp >= S::warps) {
        qc_registers_fewer<S::bring_registers>();
        bring<S>(a, sh, thread - S::warps * 32);
    } else {
        qc_registers_more<S::registers>();
        multiply_tiles<S>(a, sh, warp, lane);
    }
}

/* ---- which tiles ----------------------------------------------------------------------------- */

uint32_t m_tile_of(uint64_t m)
{
    return m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : 256;
}

uint32_t n_tile_of(uint32_t m_tile)
{
    return m_tile <= 64 ? 256 : 128;
}

kind kind_of(qc_form_kind k)
{
    return k == QC_FORM_NF4 ? NF4 : k == QC_FORM_INT8_ROWS ? INT8_ROWS : INT8_BLOCKS;
}

args args_of(const qc_matmul_call *c, uint32_t count)
{
    args a;
    memset(&a, 0, sizeof a);
    qc_share_of(&a, c, count, 4);
    a.k_blocks = (uint32_t)(c->k / BLOCK);
    a.complete = 1;
    for (uint32_t i = 0; i < count; i++)
        a.complete = a.complete && c[i].weights.complete == QC_MATMUL_WEIGHTS_COMPLETE;
    return a;
}

template <int m_tile, kind what>
qc_status launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    auto kernel = matmul_wgmma<m_tile, what>;
    const qc_matmul_plan *p = &c->plan;
    QC_TRY(qc_cuda_allow_shared(kernel, p->shared_bytes, "matmul_wgmma", err));
    args a = args_of(c, count);
    dim3 grid((unsigned)qc_ceil_div_u64(a.units, a.worker_steps)), block(p->threads);
    return qc_cuda_launch_overlapping(kernel, grid, block, p->shared_bytes, s, p->overlaps,
                                      "matmul_wgmma", err, a);
}

/* The weights of a launch are alike: qc_matmul_run_group. */
template <kind what>
qc_status launch_kind(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    switch (c->plan.m_tile) {
    case 16:
        return launch<16, what>(c, count, s, err);
    case 32:
        return launch<32, what>(c, count, s, err);
    case 64:
        return launch<64, what>(c, count, s, err);
    case 128:
        return launch<128, what>(c, count, s, err);
    default:
        return launch<256, what>(c, count, s, err);
    }
}

template <int m_tile> uint32_t shared_bytes_of(kind what)
{
    return what == NF4         ? shape<m_tile, NF4>::shared_bytes
           : what == INT8_ROWS ? shape<m_tile, INT8_ROWS>::shared_bytes
                               : shape<m_tile, INT8_BLOCKS>::shared_bytes;
}

} // namespace

extern "C" int qc_wgmma_takes(const qc_cuda_device *d, const qc_matmul_shape *s,
                              const qc_matmul_plan *p)
{
    if (d->sm != 90 || d->shared_block_bytes < LARGEST || !p->aligned || !qc_matmul_by_64(s) ||
        !s->m || !s->n)
        return 0;
    if (s->kind != QC_FORM_INT8_ROWS && s->block_elems < BLOCK)
        return 0;
    if (qc_form_ops_of(s->kind)->integer)
        return 0;
    if (s->m > INT32_MAX || s->n > INT32_MAX || s->k > INT32_MAX / 2)
        return 0;
    uint32_t m_tile = m_tile_of(s->m);
    uint64_t tiles = qc_matmul_tiles(s, n_tile_of(m_tile)) * qc_ceil_div_u64(s->m, m_tile);
    uint64_t steps = qc_ceil_div_u64(s->k, STEP);
    return tiles < INT32_MAX && tiles <= INT32_MAX / (2 * steps);
}

extern "C" void qc_wgmma_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                   qc_matmul_plan *p)
{
    kind what = kind_of(s->kind);
    p->m_tile = m_tile_of(s->m);
    p->n_tile = n_tile_of(p->m_tile);
    p->threads = p->n_tile * 2 + BRINGERS;
    p->shared_bytes = p->m_tile == 16    ? shared_bytes_of<16>(what)
                      : p->m_tile == 32  ? shared_bytes_of<32>(what)
                      : p->m_tile == 64  ? shared_bytes_of<64>(what)
                      : p->m_tile == 128 ? shared_bytes_of<128>(what)
                                         : shared_bytes_of<256>(what);
    p->copies_x = 1;
    p->image_rows = p->m_tile;
    /* Clocks of a step: weights are decoded at some 24 a clock, 2,048 products are one. */
    double weights = (double)p->n_tile * STEP, decoding = weights / 24.0;
    double tensor = weights * p->m_tile / 2048.0;
    qc_tiles_share_out(d, s, decoding > tensor ? decoding : tensor, p);
}

extern "C" qc_status qc_wgmma_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                     qc_error *err)
{
    switch (kind_of(c->weights.w.form.ops->kind)) {
    case NF4:
        return launch_kind<NF4>(c, count, s, err);
    case INT8_BLOCKS:
        return launch_kind<INT8_BLOCKS>(c, count, s, err);
    default:
        return launch_kind<INT8_ROWS>(c, count, s, err);
    }
}
