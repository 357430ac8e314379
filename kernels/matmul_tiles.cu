/* y = x W^T with mma.m16n8k16 (sm_80 and newer), meant for 9 rows of x and more. Codes and x both
 * pass through a ring in shared memory, and scales are applied after the products
 * (matmul_codes.cuh). It takes aligned runs with K % 64 == 0 and one scale per 64 codes of a row,
 * or per row; matmul_mma16816.cu takes the rest.
 *
 * A block makes tiles of m_tile rows of x (16, 32, 64, 128) by n_tile rows of W, and takes 128 of
 * k at a time (a step). Its 8 warps are 4 along N by 2 along K: a warp has a_tiles times 16 rows of
 * W, and 64 of each step's k. These 64 have one scale per row.
 *
 *            64 k of a warp, one row of W (32 bytes of NF4, 64 of int8)
 *       t = 0          t = 1          t = 2          t = 3
 *    |-- 16 codes --|-- 16 codes --|-- 16 codes --|-- 16 codes --|   row g of an A tile
 *    |--------------|--------------|--------------|--------------|   row g + 8
 *
 *    product j of 4: elements 4 j .. 4 j + 3 of every lane's 16 (g = lane / 4, t = lane % 4)
 *      a[0]  (row g; 4 j, 4 j + 1)    a[2]  (row g; 4 j + 2, 4 j + 3)    a[1], a[3]  row g + 8
 *      b[0], b[1]  row g of 8 rows of x, the same four elements
 *
 * The first of the four products starts from zero, and the result of the last is multiplied by the
 * rows' scales and added to the sums. That is one rounding in float, and only the code values and x
 * are in float16. Row-wise int8 has exact products and gets its scale at the very end.
 *
 * A warp has many A tiles because x is read from shared memory once for all of them:
 * m_tile / a_tiles wavefronts per 1024 weights, beside 16 for the look-ups. The registers have no
 * room for these tiles and for codes on their way too, so codes come by cp.async, 16 bytes a lane
 * and in whole sectors, and wait in shared memory. Writing and reading them takes 8 wavefronts per
 * 1024 weights of NF4.
 *
 *    m_tile  a_tiles  n_tile  stage, KB   stages      under way, KB  shared memory, bytes
 *                             NF4 / int8  NF4 / int8  NF4 / int8     NF4 / wide / int8
 *      16       4       256    20 / 36     6 / 4        80 / 72      160,896 / 196,608 / 152,704
 *      32       4       256    24 / 40     5 / 3        72 / 40      160,896 / 196,608 / 128,128
 *      64       3       192    28 / 40     4 / 3        56 / 40      151,680 / 196,608 / 127,104
 *     128       2       128    40 / 48     3 / 3        40 / 48      158,848 / 196,608 / 150,656
 *    in 99 KB (sm_86, sm_89, sm_120):                                 NF4 / int8
 *      16     4 / 3   256 / 192  20 / 28     3 / 3        20 / 28       99,456 / 90,240
 *      32     3 / 2   192 / 128  20 / 24     3 / 3        20 / 24       98,432 / 76,928
 *
 * With 64 rows of x, row-wise int8 has 4 A tiles, 256 rows of W, stages of 48 KB and 152,704 bytes.
 * It has no tile of 128 rows, where x would be read twice as often.
 *
 * A ring of n stages has n - 2 of them on their way. While a step is computed, the next stage is
 * already complete, so that its x and the codes of its first tile are in registers before the
 * barrier. With 128 rows of x the sums leave no room for x in registers: both A tiles are decoded
 * first, whose codes are there before the barrier, and then x is read 8 rows at a time.
 *
 * The table of NF4 is the narrow one, or the wide one where there are 192 KB of shared memory
 * (sm_90, sm_100). The wide one lies at a multiple of 64 KB so that one PRMT makes a whole address.
 * Otherwise the compiler would add the start of shared memory, which is no constant on sm_90, to
 * every address.
 *
 * In shared memory a row of x is 16 units of 16 bytes, with unit u of row m at u ^ (m & 1). A row
 * of codes is 4 units for NF4, with unit u of row n at u ^ (n >> 1 & 1) << 1, or 8 for int8, with
 * unit u at u ^ (n & 1) << 2. So copies and the loads of fragments touch all 32 banks once per 128
 * bytes.
 *
 * The work is the tiles of all weights in a row, with tile_steps for each. Block b has
 * worker_steps, beginning at b * worker_steps. Either that is a tile or an equal part of a tile's
 * K, or blocks go on from tile to tile so that all multiprocessors have the same amount of work (a
 * tile then has as many parts as it has blocks). matmul_reduce.cu adds the parts' sums in the order
 * of k.
 *
 * Cost and bound: docs/kernels.md. */
#include "kernels/matmul_tiles.cuh"

#include <string.h>

namespace
{

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Says what a thread copies to every stage: unit x_unit of row x_row of x and of every 16th row
 * below it, and codes in the same way. Small numbers share registers, because there are none to
 * spare. */
template <typename S> struct copier {
    const uint16_t *x;
    const unsigned char *codes;
    uint32_t to; /* unit of x in the stage, unit of codes << 16 */
    uint32_t
        what; /* column of x in k, of codes << 8; rows of x that are there << 16, of codes << 24 */
};

QC_DEVICE uint32_t rows_there(uint64_t row, uint64_t rows, unsigned step)
{
    uint64_t there = row < rows ? (rows - row + step - 1) / step : 0;
    return there < 64 ? (uint32_t)there : 64; /* more than any tile has */
}

template <typename S>
QC_DEVICE void copier_begin(copier<S> &c, const tiles_args &a, const tiles_part &p, uint64_t m0,
                            uint64_t n0, uint32_t k, unsigned thread)
{
    unsigned row = thread / 16, unit = thread % 16, column = unit * 8;
    c.to = row * 16 + (unit ^ (row & 1u));
    c.x = a.x + (m0 + row) * a.ldx + k + column;
    c.what = column | rows_there(m0 + row, a.m, 16) << 16;
    row = thread / S::row_units;
    unit = thread % S::row_units;
    column = unit * (S::nf4 ? 32 : 16);
    c.to |= (row * S::row_units + (S::nf4 ? unit ^ (row >> 1 & 1u) << 1 : unit ^ (row & 1u) << 2))
            << 16;
    uint64_t at = (n0 + row) * a.ldw + k + column;
    c.codes = p.w.codes + (S::nf4 ? at >> 1 : at);
    c.what |= column << 8 | rows_there(n0 + row, p.n, S::copy_rows) << 24;
}

/* `left` is how many elements of k there are from this stage's first on. Beyond them, and beyond M
 * and N, the stage gets zeros. */
template <typename S>
QC_DEVICE void copier_step(copier<S> &c, typename S::stage &to, const tiles_args &a, int left)
{
    int rows = (int)(c.what & 255u) < left ? (int)(c.what >> 16 & 255u) : 0;
    uint4 *at = to.x + (c.to & 0xffffu);
#pragma unroll
    for (int i = 0; i < S::x_units / THREADS; i++)
        qc_cp_async_16(at + i * THREADS, c.x + i * 16 * a.ldx, i < rows ? 16 : 0);
    rows = (int)(c.what >> 8 & 255u) < left ? (int)(c.what >> 24) : 0;
    at = to.codes + (c.to >> 16);
    uint64_t stride = (uint64_t)S::copy_rows * a.ldw >> S::nf4;
#pragma unroll
    for (int i = 0; i < S::copies; i++)
        qc_cp_async_stream_16(at + i * THREADS, c.codes + i * stride, i < rows ? 16 : 0);
    c.x += K_STEP;
    c.codes += K_STEP >> S::nf4;
    qc_cp_async_commit();
}

/* Writes a tile's part of y, or its partial sums. Where the tile has fewer parts than there is room
 * for, its last part writes zeros to the others. */
template <typename S>
QC_DEVICE void finish(const tiles_args &a, const typename S::shared &sh, const float *sums,
                      unsigned thread)
{
    constexpr unsigned rows = THREADS / S::n_tile; /* at a time */
    const tile_task &task = sh.task;
    const tiles_part &p = a.part[task.part];
    unsigned n = thread % S::n_tile;
    uint64_t column = task.n0 + n, m0 = task.m0;
    uint32_t plane = task.plane, planes = task.planes;
    if (thread >= rows * S::n_tile || column >= p.n)
        return;
    float by_row = S::scaled ? 1.0f : __fmul_rn(p.w.absmax[column], task.factor);
    int w_exponent = p.w.exponent ? *p.w.exponent : 0;
    for (unsigned m = thread / S::n_tile; m < (unsigned)S::m_tile && m0 + m < a.m; m += rows) {
        float v = sums[m * S::n_tile + (n ^ (m >> 1 & 3u) << 3)];
        uint64_t row = m0 + m;
        if (!S::scaled)
            v = __fmul_rn(__fmul_rn(v, by_row), QC_INT8_STEP);
        if (a.splits > 1) {
            float *to = p.partials + row * p.n + column;
            to[plane * a.m * p.n] = v;
            for (uint32_t i = plane + 1; i < planes; i++)
                to[i * a.m * p.n] = 0.0f;
        } else {
            qc_finish(p.out, row, column, v, w_exponent + (a.x_exponent ? a.x_exponent[row] : 0));
        }
    }
}

/* With 64 rows of x, GPUs from sm_90 on are up to five registers short for what is the same for all
 * of a block's tiles. So there it is calculated again for each tile. Elsewhere v is returned as it
 * is. */
template <typename S> QC_DEVICE unsigned again(unsigned v)
{
    return S::m_tile == 64 && QC_ARCH >= 90 ? qc_anew(v) : v;
}

/* Returns where a thread's units of x lie in a stage. */
template <typename S> QC_DEVICE unsigned x_of(unsigned thread)
{
    unsigned g = thread % 32 / 4, t = thread % 4, warp_k = thread / 32 / S::warps_n;
    return g * 16 + warp_k * 8 + t * 2 + (g & 1u);
}

/* Returns where a lane's codes of its warp's first A tile lie in a stage, in units of what it loads
 * at a time: 16 bytes, or 8 of NF4 in rows. */
template <typename S> QC_DEVICE unsigned codes_of(unsigned row, unsigned warp_k, unsigned lane)
{
    unsigned g = lane / 4, t = lane % 4;
    return S::nf4 ? row * 8 + (warp_k ^ (g >> 1 & 1u)) * 4 + t
                  : row * 8 + ((warp_k ^ (g & 1u)) * 4 + t);
}

/* Fills the tables of a weight. `table` is the address of the wide one. */
template <typename S>
QC_DEVICE void tables_fill(typename S::shared &sh, const qc_run_source &w, uint32_t table,
                           unsigned thread)
{
    qc_run_fill_small(sh.small, w, thread, THREADS);
    __syncthreads();
    if constexpr (S::nf4 && S::wide)
        qc_codes_fill(*reinterpret_cast<qc_codes_wide *>(reinterpret_cast<char *>(&sh) +
                                                         (table - qc_shared_address(&sh))),
                      sh.small, w, thread, THREADS);
    else if constexpr (S::nf4)
        qc_codes_fill(sh.narrow, sh.small, w, thread, THREADS);
}

/* Multiplies the 64 k of a step with all of a warp's A tiles side by side, and loads the codes of
 * the next step. `never` is false. But the compiler sees a branch, so it does not begin products
 * before the tiles are decoded; there are no registers for that. */
template <typename S>
QC_DEVICE void multiply_side_by_side(float (&sum)[S::a_tiles][S::m_parts][4],
                                     tile_codes<S> (&codes)[S::a_tiles],
                                     const typename S::stage &now, const typename S::stage &next,
                                     const typename S::shared &sh, const float *scales,
                                     unsigned codes_at, unsigned x_at, unsigned look, bool never)
{
    uint32_t w[S::a_tiles][4][4];
    float2 by[S::a_tiles];
#pragma unroll
    for (int r = 0; r < S::a_tiles; r++) {
        codes_decode<S>(w[r], codes[r], sh, look);
        by[r] = scales_of<S>(scales, r);
    }
#pragma unroll
    for (int r = 0; r < S::a_tiles; r++)
        codes_load(codes[r], next.codes, codes_at, r);
    if (never)
        return;
#pragma unroll
    for (int i = 0; i < S::m_parts; i++) {
        uint32_t x[4][2];
        x_load(x, now.x, x_at, i);
#pragma unroll
        for (int r = 0; r < S::a_tiles; r++)
            multiply<S>(sum[r][i], w[r], x, by[r]);
    }
}

/* The sums of the two halves of k meet in shared memory. */
template <typename S>
QC_DEVICE void sums_put(float *sums, const float (&sum)[S::a_tiles][S::m_parts][4], unsigned thread)
{
    unsigned sum_m = thread % 4 * 2, sum_n = thread / 32 % 4 * S::warp_rows + thread % 32 / 4;
#pragma unroll
    for (unsigned turn = 0; turn < 2; turn++) {
        if (thread / 128 == turn) {
#pragma unroll
            for (int r = 0; r < S::a_tiles; r++)
#pragma unroll
                for (int i = 0; i < S::m_parts; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        unsigned m = i * 8 + sum_m + e % 2;
                        unsigned n = sum_n + r * 16 + e / 2 * 8;
                        float *to = sums + m * S::n_tile + (n ^ (m >> 1 & 3u) << 3);
                        *to = turn ? __fadd_rn(*to, sum[r][i][e]) : sum[r][i][e];
                    }
        }
        __syncthreads();
    }
}

template <int m_tile, kind what, memory in>
static __global__ void __launch_bounds__(THREADS, 1) matmul_tiles(const tiles_args a)
{
    using S = shape<m_tile, what, in>;
    constexpr bool wide = S::wide;
    constexpr int stages = S::stages;
    QC_SHARED(typename S::shared, sh);
    unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    /* If more lay in front of the block's shared memory, the table would reach beyond its end. Only
     * a kernel can see where that memory begins; the host learns of it from the fault word. */
    if (wide && (qc_shared_address(&sh) & (WIDE_AT - 1)) > DRIVER_BYTES) {
        if (thread == 0 && a.fault)
            *a.fault = QC_MATMUL_FAULT_SHARED;
        return;
    }
    uint32_t table = wide ? (qc_shared_address(&sh) & ~(WIDE_AT - 1)) + WIDE_AT : 0;
    unsigned look = wide ? table + lane * 4 : lane;
    unsigned g = lane / 4, warp_n = warp % S::warps_n, warp_k = warp / S::warps_n;
    unsigned codes_at = codes_of<S>(warp_n * S::warp_rows + g, warp_k, lane);
    unsigned scales_at = warp_n * S::warp_rows + g * 2;

    uint32_t unit = blockIdx.x * a.worker_steps;
    for (;;) {
        uint32_t end = (again<S>(blockIdx.x) + 1) * a.worker_steps;
        end = end < a.units ? end : a.units;
        if (unit >= end)
            return;
        uint32_t tile = unit / a.tile_steps, step = unit % a.tile_steps;
        uint32_t steps = a.tile_steps - step < end - unit ? a.tile_steps - step : end - unit;
        uint32_t number = tile / a.m_tiles, at = 0;
        while (at + 1 < a.count && number >= a.part[at + 1].tile_first)
            at++;
        const tiles_part &p = a.part[at];
        uint64_t m0 = (uint64_t)(tile % a.m_tiles) * m_tile;
        uint64_t n0 = (uint64_t)(number - p.tile_first) * S::n_tile;
        uint32_t k = step * K_STEP;
        int k_end = (int)(a.k - k < steps * K_STEP ? a.k : k + steps * K_STEP);
        float factor = factor_of<S>(p.w);
        bool fill = unit == blockIdx.x * a.worker_steps || sh.task.part != at;
        __syncthreads(); /* all threads have read it, and the ring's last sums */
        if (thread == 0) {
            sh.task.m0 = m0;
            sh.task.n0 = n0;
            sh.task.end = unit + steps;
            sh.task.plane = blockIdx.x - tile * a.tile_steps / a.worker_steps;
            sh.task.planes = step + steps == a.tile_steps ? a.splits : 0;
            sh.task.part = at;
            sh.task.factor = factor;
        }

        copier<S> copy;
        copier_begin(copy, a, p, m0, n0, k, again<S>(thread));
#pragma unroll
        for (int i = 0; i < stages - 1; i++)
            copier_step(copy, sh.ring[i], a, k_end - (int)k - i * K_STEP);
        scale_reader reader;
        if constexpr (S::scaled)
            scale_begin<S>(reader, a, p, n0 + thread, step);
        if (fill)
            tables_fill<S>(sh, p.w, table, qc_anew(thread));
        scales_put<S>(sh, reader, p, factor, a.k, step, thread);
        qc_cp_async_wait<stages - 2>();
        __syncthreads();

        float sum[S::a_tiles][S::m_parts][4];
        qc_mma_zero(sum);
        unsigned x_at = x_of<S>(again<S>(thread));
        constexpr int held = S::keeps_x ? 1 : S::a_tiles; /* A tiles whose codes are in registers */
        tile_codes<S> codes[held];
#pragma unroll
        for (int r = 0; r < held; r++)
            codes_load(codes[r], sh.ring[0].codes, codes_at, r);
        uint32_t x[S::keeps_x ? S::m_parts : 1][4][2];
#pragma unroll
        for (int i = 0; i < (S::keeps_x ? S::m_parts : 0); i++)
            x_load(x[i], sh.ring[0].x, x_at, i);
        unsigned slot = 0;
        for (uint32_t s = step; (int)(s * K_STEP) < k_end; s++) {
            qc_cp_async_wait<stages - 3>();
            __syncthreads(); /* the next stage is complete, and all are done with the one before */
            copier_step(copy, sh.ring[slot ? slot - 1 : stages - 1], a,
                        k_end - (int)(s + stages - 1) * K_STEP);
            scales_put<S>(sh, reader, p, factor, a.k, s + 1, thread);
            unsigned slot_next = slot + 1 == stages ? 0 : slot + 1;
            const typename S::stage &now = sh.ring[slot], &next = sh.ring[slot_next];
            const float *scales = sh.scale[s & 1u][warp_k] + scales_at;
            if constexpr (S::keeps_x) {
#pragma unroll
                for (int r = 0; r < S::a_tiles; r++) {
                    uint32_t w[4][4];
                    codes_decode<S>(w, codes[0], sh, look);
                    codes_load(codes[0], r + 1 < S::a_tiles ? now.codes : next.codes, codes_at,
                               (r + 1) % S::a_tiles);
                    float2 by = scales_of<S>(scales, r);
#pragma unroll
                    for (int i = 0; i < S::m_parts; i++) {
                        /* This is never taken, as `never` above. */
                        if (S::scaled && m_tile == 64 && i % 4 == 0 && a.count == 0)
                            break;
                        multiply<S>(sum[r][i], w, x[i], by);
                        if (r + 1 == S::a_tiles)
                            x_load(x[i], next.x, x_at, i);
                    }
                }
            } else {
                multiply_side_by_side(sum, codes, now, next, sh, scales, codes_at, x_at, look,
                                      a.count == 0);
            }
            slot = slot_next;
        }

        /* The zeros beyond the last step are copies like all others, and may still be on their
         * way. */
        qc_cp_async_wait<0>();
        __syncthreads();
        float *sums = reinterpret_cast<float *>(sh.ring);
        unsigned last = qc_anew(thread);
        sums_put<S>(sums, sum, last);
        finish<S>(a, sh, sums, last);
        unit = sh.task.end;
    }
}

/* ---- variants -------------------------------------------------------------------------------- */

typedef struct {
    uint32_t m_tile, n_tile, shared_bytes;
} variant;

template <int m_tile, kind what, memory in> constexpr variant variant_of(void)
{
    using S = shape<m_tile, what, in>;
    return {m_tile, S::n_tile, S::wide ? WIDE_SHARED : (uint32_t)sizeof(typename S::shared)};
}

kind kind_of(qc_form_kind k)
{
    return k == QC_FORM_NF4 ? KIND_NF4 : k == QC_FORM_INT8_ROWS ? KIND_INT8_ROWS : KIND_INT8_BLOCKS;
}

template <kind what> variant small(uint64_t m)
{
    return m <= 16 ? variant_of<16, what, SMALL>() : variant_of<32, what, SMALL>();
}

/* ---- launches -------------------------------------------------------------------------------- */

tiles_args args_of(const qc_matmul_call *c, uint32_t count)
{
    tiles_args a;
    memset(&a, 0, sizeof a);
    qc_share_of(&a, c, count, 8);
    a.ldx = c->ldx;
    a.k = (uint32_t)c->k;
    a.ldw = (uint32_t)c->weights.w.form.cols;
    return a;
}

template <int m_tile, kind what, memory in>
qc_status launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    auto kernel = matmul_tiles<m_tile, what, in>;
    const qc_matmul_plan *p = &c->plan;
    QC_TRY(qc_cuda_allow_shared(kernel, p->shared_bytes, "matmul_tiles", err));
    tiles_args a = args_of(c, count);
    return qc_cuda_start("matmul_tiles", kernel,
                         dim3((unsigned)qc_ceil_div_u64(a.units, a.worker_steps)), dim3(p->threads),
                         p->shared_bytes, s, err, a);
}

template <kind what, memory in>
qc_status launch_large(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    switch (c->plan.m_tile) {
    case 16:
        return launch<16, what, in>(c, count, s, err);
    case 32:
        return launch<32, what, in>(c, count, s, err);
    case 64:
        return launch<64, what, in>(c, count, s, err);
    default:
        return launch < what == KIND_INT8_ROWS ? 64 : 128, what, in > (c, count, s, err);
    }
}

template <kind what>
qc_status launch_kind(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    if (what == KIND_NF4 && p->shared_bytes == WIDE_SHARED)
        return launch_large<KIND_NF4, WIDE>(c, count, s, err);
    if (p->m_tile > 32 || p->shared_bytes != small<what>(p->m_tile).shared_bytes)
        return launch_large<what, NARROW>(c, count, s, err);
    return p->m_tile == 16 ? launch<16, what, SMALL>(c, count, s, err)
                           : launch<32, what, SMALL>(c, count, s, err);
}

/* ---- which tiles, and how they are shared out ------------------------------------------------ */

/* Rows of x in a tile. 128 cost less than 64 and 64 (docs/kernels.md) where weights are scaled in
 * the loop; sm_90 has matmul_wgmma.cu for so many. */
uint32_t m_tile_of(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    bool hopper = d->sm >= 90 && d->sm < 100, half = (s->m - 1) % 128 < 64; /* of the last tile */
    if (s->m > 64 && !half && !hopper && s->kind != QC_FORM_INT8_ROWS)
        return 128;
    return s->m <= 16 ? 16 : s->m <= 32 ? 32 : 64;
}

template <kind what, memory in> variant large(uint32_t m_tile)
{
    switch (m_tile) {
    case 16:
        return variant_of<16, what, in>();
    case 32:
        return variant_of<32, what, in>();
    case 64:
        return variant_of<64, what, in>();
    default:
        return variant_of<128, what, in>();
    }
}

template <kind what> variant choose(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    uint32_t m_tile = m_tile_of(d, s);
    bool wide = what == KIND_NF4 && d->shared_block_bytes >= WIDE_SHARED;
    variant v = wide ? large<KIND_NF4, WIDE>(m_tile) : large<what, NARROW>(m_tile);
    return v.shared_bytes <= d->shared_block_bytes ? v : small<what>(s->m);
}

/* Where no variant fits, shared_bytes is 0. */
variant choose(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    kind what = kind_of(s->kind);
    variant v = what == KIND_NF4           ? choose<KIND_NF4>(d, s)
                : what == KIND_INT8_BLOCKS ? choose<KIND_INT8_BLOCKS>(d, s)
                                           : choose<KIND_INT8_ROWS>(d, s);
    return v.shared_bytes <= d->shared_block_bytes ? v : variant{0, 0, 0};
}

/* Bytes from memory per clock and multiprocessor, by data sheets: 10 on V100 and A100, 21 on H200,
 * 29 on B200, and 3 to 9 with GDDR or LPDDR (8.6 to 8.9, 11 and 12). */
double memory_rate(unsigned sm)
{
    return sm < 86 ? 10.0 : sm >= 90 && sm < 110 ? 20.0 : 5.0;
}

/* What one step, a block and the reduction cost, in rough clocks that are all calculated
 * (docs/kernels.md). Only their proportions matter. */
double step_clocks(const qc_cuda_device *d, const qc_matmul_shape *s, const qc_matmul_plan *p)
{
    double per_1024 = (s->kind == QC_FORM_NF4 ? 28.0 : 20.0) + 80.0 * p->m_tile / p->n_tile;
    double shared = per_1024 * (p->n_tile * K_STEP / 1024);
    double tensor = (double)p->n_tile * K_STEP * p->m_tile / 1024;
    double bytes = p->n_tile * K_STEP * (s->kind == QC_FORM_NF4 ? 0.516 : 1.0);
    double memory = bytes / memory_rate(d->sm);
    double most = shared > tensor ? shared : tensor;
    return most > memory ? most : memory;
}

constexpr double block_clocks = 3000.0; /* launch, table, filling the ring; the last sums */
constexpr double tile_clocks = 1500.0;  /* the same for a block's further tiles */

double reduce_clocks(const qc_matmul_shape *s, uint64_t splits)
{
    double elems = (double)s->m * (double)s->n;
    return splits > 1 ? 3500.0 + elems * (8.0 * (double)splits + 2.0) / 2500.0 : 0.0;
}

/* Returns the most blocks that share a tile, where each has worker_steps in a row. */
uint64_t parts_of(uint64_t tile_steps, uint64_t worker_steps)
{
    if (worker_steps % tile_steps == 0)
        return 1;
    if (tile_steps % worker_steps == 0)
        return tile_steps / worker_steps;
    return (tile_steps + worker_steps - 2) / worker_steps + 1;
}

uint64_t tiles_of(const qc_matmul_shape *s, uint32_t m_tile, uint32_t n_tile)
{
    return qc_matmul_tiles(s, n_tile) * qc_ceil_div_u64(s->m, m_tile);
}

/* Decides which part of the work a block has; `clocks` is what a step costs. */
void share_out(const qc_cuda_device *d, const qc_matmul_shape *s, double clocks, qc_matmul_plan *p)
{
    uint64_t steps = qc_ceil_div_u64(s->k, K_STEP), tiles = tiles_of(s, p->m_tile, p->n_tile);
    uint64_t slots = d->multiprocessors ? d->multiprocessors : 1;
    double best = 0.0;
    /* First choice: a block has a tile or an equal part of its K, of two steps at least. */
    uint64_t most = steps / 2 < slots ? steps / 2 : slots;
    for (uint64_t wanted = 1; wanted == 1 || wanted <= most; wanted++) {
        uint64_t each = qc_ceil_div_u64(steps, wanted), splits = qc_ceil_div_u64(steps, each);
        double time = (double)qc_ceil_div_u64(tiles * splits, slots) *
                          ((double)each * clocks + block_clocks) +
                      reduce_clocks(s, splits);
        if (wanted == 1 || time < best) {
            best = time;
            p->splits = (uint32_t)splits;
            p->split_k = each * K_STEP;
        }
        if (tiles * splits > 8 * slots)
            break;
    }
    /* Second choice: all multiprocessors have the same amount of work. It is not for several tiles
     * of x, because blocks whose tiles share weights should run at the same time. */
    if (s->m > p->m_tile)
        return;
    uint64_t each = qc_ceil_div_u64(tiles * steps, slots), splits = parts_of(steps, each);
    uint64_t split_k = qc_ceil_div_u64(qc_ceil_div_u64(s->k, splits), K_STEP) * K_STEP;
    double time = (double)each * clocks + block_clocks +
                  (double)qc_ceil_div_u64(each, steps) * tile_clocks + reduce_clocks(s, splits);
    if (splits > 1 && split_k * (splits - 1) < s->k && time < best) {
        p->splits = (uint32_t)splits;
        p->split_k = split_k;
        p->worker_k = each * K_STEP;
    }
}

} // namespace

extern "C" int qc_tiles_takes(const qc_cuda_device *d, const qc_matmul_shape *s,
                              const qc_matmul_plan *p)
{
    if (d->sm < 80 || !p->aligned || !qc_matmul_by_64(s) || !s->m || !s->n)
        return 0;
    if (s->kind != QC_FORM_INT8_ROWS && s->block_elems < BLOCK)
        return 0;
    variant v = choose(d, s);
    if (!v.shared_bytes)
        return 0;
    /* Steps of all tiles are counted in 31 bits, and K in 30. */
    if (s->m > INT32_MAX || s->n > INT32_MAX || s->k > INT32_MAX / 2)
        return 0;
    uint64_t tiles = tiles_of(s, v.m_tile, v.n_tile), steps = qc_ceil_div_u64(s->k, K_STEP);
    return tiles < INT32_MAX && tiles <= INT32_MAX / (2 * steps);
}

extern "C" void qc_tiles_share_out(const qc_cuda_device *d, const qc_matmul_shape *s, double clocks,
                                   qc_matmul_plan *p)
{
    share_out(d, s, clocks, p);
}

extern "C" void qc_tiles_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                   qc_matmul_plan *p)
{
    variant v = choose(d, s);
    p->m_tile = v.m_tile;
    p->n_tile = v.n_tile;
    p->threads = THREADS;
    p->shared_bytes = v.shared_bytes;
    share_out(d, s, step_clocks(d, s, p), p);
}

extern "C" qc_status qc_tiles_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                     qc_error *err)
{
    switch (kind_of(c->weights.w.form.ops->kind)) {
    case KIND_NF4:
        return launch_kind<KIND_NF4>(c, count, s, err);
    case KIND_INT8_ROWS:
        return launch_kind<KIND_INT8_ROWS>(c, count, s, err);
    default:
        return launch_kind<KIND_INT8_BLOCKS>(c, count, s, err);
    }
}
