/* The parts of matmul_wgmma.cu: what lies in shared memory, how threads read scales, and how they
 * bring x and codes. The picture is in that file. */
#ifndef QC_KERNELS_MATMUL_WGMMA_CUH
#define QC_KERNELS_MATMUL_WGMMA_CUH

#include "kernels/matmul_codes.cuh"
#include "kernels/matmul_run.cuh"
#include "kernels/matmul_share.cuh"
#include "kernels/ptx_hopper.cuh"

#define BLOCK     QC_SHARE_BLOCK
#define STEP      QC_SHARE_STEP
#define BRINGERS  128 /* threads that bring x and codes */
#define TABLE     (64u << 10)
#define TABLE_END (TABLE + (uint32_t)sizeof(qc_codes_wide))
#define LARGEST   232448u /* bytes of shared memory a block can have on sm_90 */
/* What lies in front of a block's own shared memory belongs to the driver. */
#define DRIVER_BYTES 1024u

namespace
{

enum kind { NF4, INT8_BLOCKS, INT8_ROWS };

using part = qc_share_part;

struct args : qc_share {
    uint32_t k_blocks;
    int complete; /* weights may be read before the launch in front of this one has ended */
};

template <int m_tile_, kind what_> struct shape {
    static constexpr kind what = what_;
    static constexpr bool nf4 = what == NF4, scaled = what != INT8_ROWS;
    static constexpr int m_tile = m_tile_, groups = m_tile <= 64 ? 4 : 2, warps = 4 * groups;
    static constexpr int threads = 128 * groups + BRINGERS, n_tile = 64 * groups;
    /* Of a thread that multiplies, and of one that brings. The launch gives each 96, or 168 where
     * there are two groups. */
    static constexpr int registers = groups == 2 ? 216 : 104;
    static constexpr int bring_registers = groups == 2 ? 72 : 56;
    static constexpr bool scales_sums = scaled && m_tile <= 32; /* instead of weights */
    static constexpr int words = nf4 ? 2 : 4;                   /* in a lane's 16 codes */
    static constexpr int blocks = m_tile <= 128 ? 2 : 1;        /* of 64 k, in a stage */
    static constexpr int row_units = (nf4 ? 2 : 4) * blocks;    /* of 16 bytes, in a row of codes */
    static constexpr uint32_t x_bytes = m_tile * BLOCK * 2;     /* of a block */
    static constexpr uint32_t x_stage = x_bytes * blocks;
    static constexpr uint32_t codes_stage = n_tile * row_units * 16;
    /* Of x and codes the larger one lies behind the table, the rest in front of it. */
    static constexpr bool x_back = x_stage > codes_stage;
    static constexpr uint32_t back_stage = x_back ? x_stage : codes_stage;
    static constexpr uint32_t front_stage = x_back ? codes_stage : x_stage;
    static constexpr uint32_t front = 3u << 10; /* where that begins */
    static constexpr uint32_t least(uint32_t a, uint32_t b)
    {
        return a < b ? a : b;
    }
    static constexpr int stages =
        (int)least(least((TABLE - front) / front_stage, (LARGEST - TABLE_END) / back_stage), 6);
    static constexpr uint32_t shared_bytes = TABLE_END + back_stage * stages;
    static constexpr uint32_t x_at = x_back ? TABLE_END : front;
    static constexpr uint32_t codes_at = x_back ? front : TABLE_END;
    static_assert(stages >= 3, "copies run ahead");

    struct alignas(128) shared {
        uint64_t full[stages], empty[stages];
        qc_run_small small;
    };
    static_assert(DRIVER_BYTES + sizeof(shared) <= front, "");
};

/* The pointer to an address of the block's shared memory. */
template <typename T> QC_DEVICE unsigned char *shared_at(T &sh, uint32_t address)
{
    return reinterpret_cast<unsigned char *>(&sh) + (int)(address - qc_shared_address(&sh));
}

/* ---- which tile ------------------------------------------------------------------------------ */

/* What a block does at a time: some k of a tile. */
struct tile_range {
    uint32_t at;               /* number of the part */
    uint32_t m_index;          /* of the tile of x */
    uint32_t end;              /* the unit after it */
    uint32_t step, steps;      /* of k */
    uint32_t block, block_end; /* the same in blocks of 64 */
    uint64_t n0;
};

/* Returns whether the block of threads has a range that begins at `unit`. */
QC_DEVICE bool range_at(tile_range &p, const args &a, uint32_t unit, uint32_t n_tile)
{
    uint32_t end = (blockIdx.x + 1) * a.worker_steps;
    end = end < a.units ? end : a.units;
    if (unit >= end)
        return false;
    uint32_t tile = unit / a.tile_steps, number = tile / a.m_tiles;
    p.step = unit % a.tile_steps;
    p.steps = a.tile_steps - p.step < end - unit ? a.tile_steps - p.step : end - unit;
    p.end = unit + p.steps;
    p.at = 0;
    while (p.at + 1 < a.count && number >= a.part[p.at + 1].tile_first)
        p.at++;
    p.m_index = tile % a.m_tiles;
    p.n0 = (uint64_t)(number - a.part[p.at].tile_first) * n_tile;
    p.block = p.step * (STEP / BLOCK);
    p.block_end = p.block + p.steps * (STEP / BLOCK);
    p.block_end = p.block_end < a.k_blocks ? p.block_end : a.k_blocks;
    return true;
}

/* A place in a ring and the parity of its barriers' phase. */
template <int stages> struct ring_position {
    uint32_t stage, parity;
};

template <int stages> QC_DEVICE void ring_next(ring_position<stages> &p)
{
    if (++p.stage == stages) {
        p.stage = 0;
        p.parity ^= 1;
    }
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Lane t of four reads the scales of row g + 8 (t % 2), of every second block from t / 2 on. What
 * it loads it looks at a step later: a warp would wait for it. */
struct scale_reader {
    uint32_t first; /* number of the row's first block of 64, counted from the tensor's first */
    uint32_t block, ahead;    /* of the row: the next to look up, to load */
    uint32_t code, code_next; /* of nested scales; with `together` those of four blocks */
    float value, value_next;  /* the scale, or what nested ones are multiplied by */
    float nested, by;         /* of the block to give: the map's value, and `value` */
};

QC_DEVICE void scale_load(scale_reader &r, const args &a, const part &p)
{
    r.code = r.code_next;
    r.value = r.value_next;
    if (r.ahead >= a.k_blocks)
        return;
    uint32_t at = (r.first + r.ahead) >> (p.w.block_shift - 6);
    if (p.w.absmax) {
        r.value_next = p.w.absmax[at];
    } else {
        r.code_next = p.together ? *reinterpret_cast<const uint32_t *>(p.w.absmax_codes + at)
                                 : p.w.absmax_codes[at];
        r.value_next = p.w.nested_absmax[at >> p.w.nested_shift];
    }
    r.ahead += p.together ? 4 : 2;
}

/* Gives the scale of the block before this one of the lane, times `factor`, and looks this one up.
 */
QC_DEVICE float scale_take(scale_reader &r, const args &a, const part &p, float factor)
{
    float v = r.by;
    if (!p.w.absmax) {
        v = __fadd_rn(__fmul_rn(r.nested, v), p.w.nested_offset);
        r.nested = __ldg(p.w.nested_map + (r.code >> (p.together ? (r.block & 3u) * 8 : 0) & 255u));
    }
    r.by = r.value;
    if (!p.together || r.block & 2u)
        scale_load(r, a, p);
    r.block += 2;
    return __fmul_rn(v, factor);
}

/* A row that does not exist has the scales of the last one; its sums are not stored. */
QC_DEVICE void scale_begin(scale_reader &r, const args &a, const part &p, uint64_t row,
                           uint32_t block)
{
    r.first = (uint32_t)(row < p.n ? row : p.n - 1) * a.row_blocks + p.block_first;
    r.block = block;
    r.ahead = p.together ? block & ~3u : block;
    r.code_next = 0;
    r.value_next = r.nested = r.by = 0.0f;
    scale_load(r, a, p);
    scale_load(r, a, p);
    (void)scale_take(r, a, p, 0.0f);
}

/* A scale as two float16 whose sum it is, the high one in the lower bits. */
QC_DEVICE uint32_t two_halves(float scale)
{
    uint16_t high = qc_half_of_float(scale);
    return high | (uint32_t)qc_half_of_float(__fsub_rn(scale, qc_float_of_half(high))) << 16;
}

/* Returns what the scales of a weight are multiplied by: the power of two of its exponent
 * (matmul.h), and what code values stand for. */
template <typename S> QC_DEVICE float factor_of(const qc_run_source &w)
{
    qc_run_power power = qc_run_power_of(w.exponent ? *w.exponent : 0);
    float f = __fmul_rn(power.a, power.b);
    return __fmul_rn(f, S::nf4 ? qc_codes_factor(w) : 128.0f * QC_INT8_STEP);
}

/* ---- what is brought ------------------------------------------------------------------------- */

/* Units of 16 bytes of a row of codes are swapped so that codes_load's loads touch all banks. */
template <typename S> QC_DEVICE uint32_t swizzle(uint32_t row)
{
    return S::blocks == 1 ? 0 : S::nf4 ? (row >> 1 & 1u) << 1 : (row & 1u) << 2;
}

template <typename S> QC_DEVICE void bring(const args &a, typename S::shared &sh, uint32_t thread)
{
    constexpr int copies = S::n_tile * S::row_units / BRINGERS;
    constexpr int row_step = BRINGERS / S::row_units; /* rows from one copy to the next */
    uint32_t row = thread / S::row_units, unit = thread % S::row_units;
    uint32_t column = unit * (S::nf4 ? 32 : 16); /* of k in the stage */
    unsigned char *codes =
        shared_at(sh, S::codes_at) + (row * S::row_units + (unit ^ swizzle<S>(row))) * 16;
    ring_position<S::stages> to = {0, 1};
    bool waited = !a.complete;
    tile_range p;
    for (uint32_t first = blockIdx.x * a.worker_steps; range_at(p, a, first, S::n_tile);
         first = p.end) {
        const part &w = a.part[p.at];
        const uint64_t row_bytes = (uint64_t)a.row_blocks * (S::nf4 ? BLOCK / 2 : BLOCK);
        const uint64_t step_bytes = row_step * row_bytes;
        const unsigned char *from = w.w.codes + (p.n0 + row) * row_bytes +
                                    p.block * (S::nf4 ? BLOCK / 2 : BLOCK) +
                                    (S::nf4 ? column / 2 : column);
        int there = 0; /* copies whose row exists */
        if (p.n0 + row < w.n)
            there = w.n - p.n0 - row < S::n_tile ? (int)((w.n - p.n0 - row - 1) / row_step) + 1
                                                 : copies;
        const unsigned char *x = reinterpret_cast<const unsigned char *>(a.x) +
                                 ((uint64_t)p.m_index * a.k_blocks + p.block) * S::x_bytes;
        for (uint32_t block = p.block; block < p.block_end; block += S::blocks) {
            uint32_t left = p.block_end - block;
            qc_mbarrier_wait(&sh.empty[to.stage], to.parity);
            unsigned char *at = codes + to.stage * S::codes_stage;
            const unsigned char *row_at = from;
            if (there == copies && left >= (uint32_t)S::blocks) {
#pragma unroll
                for (int i = 0; i < copies; i++, row_at += step_bytes)
                    qc_cp_async_stream_16(at + i * BRINGERS * 16, row_at, 16);
            } else {
                int full = column < left * BLOCK ? there : 0;
#pragma unroll 1
                for (int i = 0; i < copies; i++, row_at += step_bytes)
                    qc_cp_async_stream_16(at + i * BRINGERS * 16, row_at, i < full ? 16 : 0);
            }
            from += S::blocks * (S::nf4 ? BLOCK / 2 : BLOCK);
            if (thread == 0) {
                uint32_t bytes = left < (uint32_t)S::blocks ? S::x_bytes : S::x_stage;
                if (!waited)
                    qc_grid_wait();
                waited = true;
                qc_mbarrier_expect(&sh.full[to.stage], bytes);
                qc_bulk_load(shared_at(sh, S::x_at + to.stage * S::x_stage), x, bytes,
                             &sh.full[to.stage]);
                x += S::x_stage;
            }
            qc_mbarrier_arrive_copied(&sh.full[to.stage]);
            ring_next(to);
        }
    }
    if (!waited)
        qc_grid_wait();
}

} // namespace

#endif
