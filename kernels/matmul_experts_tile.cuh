/* What the kernels for experts (kernels/matmul_experts.h) share. Each is the kernel of an ordinary
 * product, whose block of threads first finds its expert and its tile of rows.
 *
 *   grid   x: slots times tiles of rows of W, slots fastest, so that blocks which read the same
 *          weights run side by side. Slot s has tile s of the experts' tiles of m_tile rows, all
 *          experts in a row; no tile has rows of two. Slots without a tile end at once
 *   find   a thread counts the tiles of count / 256 experts, and a sum over all threads says in
 *          whose experts the slot is. Every block reads and checks all offsets
 *
 * The expert's entry of the table goes to shared memory, from where the main loop reads it: there
 * are no registers for it. */
#ifndef QC_KERNELS_MATMUL_EXPERTS_TILE_CUH
#define QC_KERNELS_MATMUL_EXPERTS_TILE_CUH

#include "kernels/matmul_experts_internal.h"
#include "kernels/matmul_mma.cuh"

#define QC_EXPERTS_THREADS 256u

/* Args: the arguments of the ordinary kernel. */
template <typename Args, int m_tile_> struct qc_experts_tile {
    static constexpr unsigned m_tile = m_tile_;
    Args a;
    uint32_t expert, first, rows; /* rows of y from `first` on; rows 0: there is no such tile */
    uint32_t warp_tiles[QC_EXPERTS_THREADS / 32];
    uint32_t x_row[m_tile_]; /* the row of x of each; beyond the last, any that there is */
};

template <typename Args, int m_tile, typename Rest> struct qc_experts_shared {
    qc_experts_tile<Args, m_tile> tile;
    alignas(128) Rest rest;
};

template <int m_tile, typename Rest>
struct qc_mma_memory<qc_experts_call, m_tile, Rest> : qc_experts_shared<qc_mma_args, m_tile, Rest> {
};

QC_DEVICE void qc_experts_report(const qc_experts_call &c, unsigned thread)
{
    if (thread == 0 && c.fault)
        *c.fault = QC_MATMUL_FAULT_EXPERTS;
}

/* Finds the tile of a slot. Returns 0 in all threads where offsets are wrong. */
template <typename Tile>
QC_DEVICE bool qc_experts_find(Tile &t, const qc_experts_call &c, uint32_t slot, unsigned thread)
{
    uint32_t each = (c.count + QC_EXPERTS_THREADS - 1) / QC_EXPERTS_THREADS;
    uint32_t begin = thread * each, tiles = 0;
    uint32_t end = begin + each < c.count ? begin + each : c.count;
    bool wrong = false;
    for (uint32_t e = begin; e < end; e++) {
        uint32_t from = c.offsets[e], to = c.offsets[e + 1];
        wrong = wrong || to < from || to > c.max_rows;
        tiles += (to - from + Tile::m_tile - 1) / Tile::m_tile;
    }
    uint32_t before = tiles;
    for (unsigned step = 1; step < 32; step *= 2) {
        uint32_t lower = __shfl_up_sync(0xffffffffu, before, step);
        before += thread % 32 >= step ? lower : 0;
    }
    if (thread % 32 == 31)
        t.warp_tiles[thread / 32] = before;
    if (thread == 0)
        t.rows = 0;
    if (__syncthreads_or(wrong))
        return false;
    before -= tiles;
    for (unsigned w = 0; w < thread / 32; w++)
        before += t.warp_tiles[w];
    if (slot - before < tiles) { /* never where slot is less */
        uint32_t left = slot - before, e = begin, from, to;
        for (;; e++) {
            from = c.offsets[e];
            to = c.offsets[e + 1];
            uint32_t own = (to - from + Tile::m_tile - 1) / Tile::m_tile;
            if (left < own)
                break;
            left -= own;
        }
        t.expert = e;
        t.first = from + left * Tile::m_tile;
        t.rows = to - t.first < Tile::m_tile ? to - t.first : Tile::m_tile;
    }
    __syncthreads();
    return true;
}

/* All threads of the block call this. Returns, in all of them, whether the block has something to
 * do; t is then complete. */
template <typename Tile>
QC_DEVICE bool qc_experts_begin(Tile &t, const qc_experts_call &c, unsigned thread)
{
    bool wrong = false;
    if (!qc_experts_find(t, c, blockIdx.x % c.slots, thread)) {
        qc_experts_report(c, thread);
        return false;
    }
    if (t.rows == 0)
        return false;
    if (thread < Tile::m_tile) {
        uint32_t row = t.first + (thread < t.rows ? thread : 0);
        uint32_t from = c.x_rows ? c.x_rows[row] : row;
        wrong = from >= c.x_count;
        t.x_row[thread] = from;
    }
    const uint32_t *entry =
        reinterpret_cast<const uint32_t *>(static_cast<const qc_run_source *>(c.table) + t.expert);
    for (unsigned i = thread; i < sizeof(qc_run_source) / 4; i += QC_EXPERTS_THREADS)
        reinterpret_cast<uint32_t *>(&t.a.w)[i] = entry[i];
    if (thread == 0) {
        t.a.x = c.x;
        t.a.ldx = c.ldx;
        t.a.m = t.rows;
        t.a.k = c.k;
        qc_experts_more(t, c);
    }
    if (__syncthreads_or(wrong)) {
        qc_experts_report(c, thread);
        return false;
    }
    return true;
}

/* y of row m of the tile = (sum * 2^-exponent + bias) * its weight, rounded once. `exponent`: the
 * weight's. */
template <typename Tile>
QC_DEVICE void qc_experts_put(const qc_experts_call &c, const Tile &t, unsigned m, uint64_t column,
                              float sum, int exponent)
{
    uint64_t row = (uint64_t)t.first + m;
    if (c.x_exponent)
        exponent += c.x_exponent[t.x_row[m]];
    float v = qc_scale_pow2(sum, -exponent);
    if (c.bias)
        v = __fadd_rn(v, qc_load_16(c.bias, t.expert * c.n + column, c.y_dtype));
    if (c.row_weights)
        v = __fmul_rn(v, c.row_weights[row]);
    qc_store_16(c.y, row * c.ldy + column, c.y_dtype, v);
}

/* ---- tensor cores ---------------------------------------------------------------------------- */

template <int m_tile>
QC_DEVICE void qc_experts_more(qc_experts_tile<qc_mma_args, m_tile> &t, const qc_experts_call &c)
{
    t.a.n = c.n;
}

template <typename Memory>
QC_DEVICE bool qc_mma_begin(Memory &all, const qc_experts_call &c, unsigned thread)
{
    return qc_experts_begin(all.tile, c, thread);
}

template <typename Memory>
QC_DEVICE const qc_mma_args &qc_mma_args_in(const Memory &all, const qc_experts_call &)
{
    return all.tile.a;
}

/* The tile's rows count from 0: qc_experts_x knows where they lie. */
template <typename Memory>
QC_DEVICE qc_mma_part qc_mma_part_in(const Memory &, const qc_experts_call &c, unsigned,
                                     unsigned n_tile)
{
    qc_mma_part p;
    p.m0 = 0;
    p.n0 = (uint64_t)(blockIdx.x / c.slots) * n_tile;
    p.k_begin = 0;
    p.k_end = c.k;
    return p;
}

/* As qc_mma_x, for rows of x that lie anywhere. What it takes of a lies in shared memory. */
struct qc_experts_x {
    const qc_mma_args *a;
    const uint32_t *row; /* of the thread's unit 0; unit i is i * step behind */
    unsigned step, column, there;
};

QC_DEVICE const uint16_t *qc_mma_unit(const qc_experts_x &x, uint64_t k, int i)
{
    return x.a->x + k + x.column + x.row[i * x.step] * x.a->ldx;
}

template <typename Memory>
QC_DEVICE qc_experts_x qc_mma_x_in(const Memory &all, const qc_experts_call &, const qc_mma_part &,
                                   unsigned row_units, unsigned thread)
{
    unsigned row = thread / row_units, step = QC_MMA_THREADS / row_units, rows = all.tile.rows;
    return {&all.tile.a, all.tile.x_row + row, step, 8 * (thread % row_units),
            row < rows ? (rows - row + step - 1) / step : 0};
}

template <typename Memory>
QC_DEVICE void qc_mma_x_anew(qc_experts_x &x, const Memory &all, const qc_experts_call &c,
                             const qc_mma_part &p, unsigned row_units, unsigned thread)
{
    x = qc_mma_x_in(all, c, p, row_units, thread);
}

template <int m_tile, int n_tile, typename Memory>
QC_DEVICE void qc_mma_finish_in(const Memory &all, const qc_experts_call &c, const qc_mma_part &p,
                                const float *sums, unsigned thread)
{
    int exponent = *all.tile.a.w.exponent;
    for (unsigned i = thread; i < all.tile.rows * n_tile; i += QC_MMA_THREADS) {
        unsigned m = i / n_tile, n = i % n_tile;
        if (p.n0 + n < c.n)
            qc_experts_put(c, all.tile, m, p.n0 + n, sums[qc_mma_sum_at(m, n, n_tile)], exponent);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename Kernel>
static inline qc_status qc_experts_start(Kernel *kernel, const qc_experts_call *c, unsigned n_tile,
                                         size_t shared_bytes, unsigned resident, const char *what,
                                         qc_cuda_stream s, qc_error *err)
{
    uint64_t tiles = (c->n + n_tile - 1) / n_tile;
    if (c->n > UINT32_MAX || tiles > INT32_MAX / c->slots)
        QC_FAIL(err, QC_ERR_USAGE, "y of the experts is too large for one launch");
    QC_TRY(qc_cuda_keep_resident(kernel, shared_bytes, resident, what, err));
    return qc_cuda_start(what, kernel, dim3((unsigned)tiles * c->slots), dim3(QC_EXPERTS_THREADS),
                         shared_bytes, s, err, *c);
}

#endif
