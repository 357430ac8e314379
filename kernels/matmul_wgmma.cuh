/* The parts of matmul_wgmma.cu: what lies in shared memory, how threads read scales, and how they
 * bring x and codes. The picture is in that file. */
#ifndef QC_KERNELS_MATMUL_WGMMA_CUH
#define QC_KERNELS_MATMUL_WGMMA_CUH

#include "kernels/matmul_codes.cuh"
#include "kernels/matmul_run.cuh"
#include "kernels/matmul_share.cuh"
#include "kernels/ptx_hopper.cuh"

#include <type_traits>

#define BLOCK     QC_SHARE_BLOCK
#define STEP      QC_SHARE_STEP
#define BRINGERS  128 /* threads that bring x and codes; of packed ones, one of each warp does */
#define TABLE     (64u << 10)
#define TABLE_END (TABLE + (uint32_t)sizeof(qc_codes_wide))
#define LARGEST   232448u /* bytes of shared memory a block can have on sm_90 */
/* What lies in front of a block's own shared memory belongs to the driver. */
#define DRIVER_BYTES 1024u

namespace
{

enum kind { NF4, INT8_BLOCKS, INT8_ROWS };

/* Where codes lie, and whether those of scales are packed as well (matmul_packed.h). */
enum layout { FILE_ORDER, PACKED, PACKED_SCALES };

using part = qc_share_part;

struct args : qc_share {
    uint32_t k_blocks;
    int complete; /* weights may be read before the launch in front of this one has ended */
};

template <int m_tile_, kind what_, layout order_> struct shape {
    static constexpr kind what = what_;
    static constexpr bool nf4 = what == NF4, scaled = what != INT8_ROWS;
    static constexpr bool packed = order_ != FILE_ORDER, packs_scales = order_ == PACKED_SCALES;
    static constexpr int m_tile = m_tile_, groups = m_tile <= 64 ? 4 : 2, warps = 4 * groups;
    static constexpr int threads = 128 * groups + BRINGERS, n_tile = 64 * groups;
    /* Of a thread that multiplies, and of one that brings. The launch gives each 96, or 168 where
     * there are two groups. More than for the file's layout make packed loops shorter with up to 32
     * rows, and longer with more. */
    static constexpr bool has_more = packed && m_tile <= 32;
    static constexpr int registers = groups == 2 ? 216 : has_more ? 112 : 104;
    static constexpr int bring_registers = groups == 2 ? 72 : has_more ? 32 : 56;
    static constexpr bool scales_sums = scaled && m_tile <= 32; /* instead of weights */
    static constexpr int words = nf4 ? 2 : 4;                   /* in a lane's 16 codes */
    static constexpr int blocks = m_tile <= 128 ? 2 : 1;        /* of 64 k, in a stage */
    static constexpr int row_units = (nf4 ? 2 : 4) * blocks;    /* of 16 bytes, in a row of codes */
    static constexpr uint32_t x_bytes = m_tile * BLOCK * 2;     /* of a block */
    static constexpr uint32_t x_stage = x_bytes * blocks;
    static constexpr uint32_t codes_stage = n_tile * row_units * 16;
    static constexpr uint32_t block_bytes = QC_PACKED_BLOCK_BYTES(nf4 ? 4 : 8); /* of a band */
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
template <bool packed> struct scale_reader {
    uint32_t first; /* number of the row's first block of 64, counted from the tensor's first */
    uint32_t block, ahead;    /* of the row: the next to look up, to load */
    uint32_t code, code_next; /* of nested scales; with `together` those of four blocks */
    float value, value_next;  /* the scale, or what nested ones are multiplied by */
    float nested, by;         /* of the block to give: the map's value, and `value` */
};

/* Returns whether codes are loaded four at once. Those of packed weights that can be are packed as
 * well, and have a reader of their own. */
template <bool packed> QC_DEVICE bool by_four(const scale_reader<packed> &, const part &p)
{
    return !packed && p.together;
}

template <bool packed>
QC_DEVICE void scale_load(scale_reader<packed> &r, const args &a, const part &p)
{
    r.code = r.code_next;
    r.value = r.value_next;
    if (r.ahead >= a.k_blocks)
        return;
    uint32_t at = (r.first + r.ahead) >> (p.w.block_shift - 6);
    if (p.w.absmax) {
        r.value_next = p.w.absmax[at];
    } else {
        r.code_next = by_four(r, p) ? *reinterpret_cast<const uint32_t *>(p.w.absmax_codes + at)
                                    : p.w.absmax_codes[at];
        r.value_next = p.w.nested_absmax[at >> p.w.nested_shift];
    }
    r.ahead += by_four(r, p) ? 4 : 2;
}

/* Gives the scale of the block before this one of the lane, times `factor`, and looks this one up.
 */
template <bool packed>
QC_DEVICE float scale_take(scale_reader<packed> &r, const args &a, const part &p, float factor)
{
    float v = r.by;
    if (!p.w.absmax) {
        v = __fadd_rn(__fmul_rn(r.nested, v), p.w.nested_offset);
        r.nested =
            __ldg(p.w.nested_map + (r.code >> (by_four(r, p) ? (r.block & 3u) * 8 : 0) & 255u));
    }
    r.by = r.value;
    if (!by_four(r, p) || r.block & 2u)
        scale_load(r, a, p);
    r.block += 2;
    return __fmul_rn(v, factor);
}

/* A row that does not exist has the scales of the last one; its sums are not stored. */
template <bool packed>
QC_DEVICE void scale_begin(scale_reader<packed> &r, const args &a, const part &p, uint64_t row,
                           uint32_t block)
{
    r.first = (uint32_t)(row < p.n ? row : p.n - 1) * a.row_blocks + p.block_first;
    r.block = block;
    r.ahead = by_four(r, p) ? block & ~3u : block;
    r.code_next = 0;
    r.value_next = r.nested = r.by = 0.0f;
    scale_load(r, a, p);
    scale_load(r, a, p);
    (void)scale_take(r, a, p, 0.0f);
}

/* The same of packed scales, four blocks of a row at a time, of which two in four lanes. What is
 * loaded is needed two steps later. */
struct packed_scale_reader {
    const uint8_t *codes; /* the next four to load */
    uint32_t first, end;  /* numbers of the first of these blocks, of the one behind the last */
    uint32_t choice;      /* PRMT's, of the code of the block to give among four */
    uint32_t four, four_next;
    float value, value_next; /* what the map's values are multiplied by */
    float nested;            /* of the block to give: the map's value */
};

/* Goes on to the next four where `last` says so, without a branch around all of it. */
QC_DEVICE void scale_load(packed_scale_reader &r, const part &p, bool last)
{
    r.four = last ? r.four_next : r.four;
    r.value = last ? r.value_next : r.value;
    if (r.first >= r.end || !last)
        return;
    r.four_next = *reinterpret_cast<const uint32_t *>(r.codes);
    r.value_next = p.w.nested_absmax[r.first >> p.w.nested_shift];
    r.codes += QC_PACKED_SCALE_BYTES;
    r.first += QC_PACKED_SCALES;
}

QC_DEVICE void scale_look(packed_scale_reader &r, const part &p)
{
    r.nested = __ldg(p.w.nested_map + __byte_perm(r.four, 0, r.choice));
}

QC_DEVICE float scale_take(packed_scale_reader &r, const args &, const part &p, float factor)
{
    float v = __fadd_rn(__fmul_rn(r.nested, r.value), p.w.nested_offset);
    scale_load(r, p, r.choice & 2u);
    r.choice ^= 2u;
    scale_look(r, p);
    return __fmul_rn(v, factor);
}

QC_DEVICE void scale_begin(packed_scale_reader &r, const args &a, const part &p, uint64_t row,
                           uint32_t block)
{
    uint32_t n = (uint32_t)(row < p.n ? row : p.n - 1), fours = a.row_blocks / QC_PACKED_SCALES;
    r.codes =
        p.w.absmax_codes + QC_PACKED_ROW(n % QC_PACKED_ROWS) * QC_PACKED_SCALES +
        ((uint64_t)(n / QC_PACKED_ROWS) * fours + block / QC_PACKED_SCALES) * QC_PACKED_SCALE_BYTES;
    r.end = n * a.row_blocks + p.block_first + a.k_blocks;
    r.first = r.end - a.k_blocks + block / QC_PACKED_SCALES * QC_PACKED_SCALES;
    r.choice = 0x4440u | block % QC_PACKED_SCALES;
    r.four_next = 0;
    r.value_next = 0.0f;
    scale_load(r, p, true);
    scale_load(r, p, true);
    scale_look(r, p);
}

template <typename S>
using scale_reader_of =
    std::conditional_t<S::packs_scales, packed_scale_reader, scale_reader<S::packed>>;

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

/* The same of packed weights, by bulk copies of one thread of each of the four warps: of a band's
 * codes, and of x by the last. (One thread for all would be a scheduler's alone, which then is the
 * bound.) A band that does not exist is not brought: what lies in its place makes sums that are not
 * stored. */
template <typename S>
QC_DEVICE void bring_packed(const args &a, typename S::shared &sh, uint32_t thread)
{
    const uint32_t warp = thread / 32;
    const bool brings_x = warp == BRINGERS / 32 - 1;
    ring_position<S::stages> to = {0, 1};
    bool waited = !a.complete;
    tile_range p;
    for (uint32_t first = blockIdx.x * a.worker_steps;
         thread % 32 == 0 && range_at(p, a, first, S::n_tile); first = p.end) {
        const part &w = a.part[p.at];
        const uint64_t band = p.n0 / QC_PACKED_ROWS + warp;
        const bool brings_codes = warp < (uint32_t)S::groups && band * QC_PACKED_ROWS < w.n;
        const unsigned char *codes = w.w.codes + (band * a.row_blocks + p.block) * S::block_bytes;
        const unsigned char *x = reinterpret_cast<const unsigned char *>(a.x) +
                                 ((uint64_t)p.m_index * a.k_blocks + p.block) * S::x_bytes;
        const uint32_t block_bytes =
            (brings_codes ? S::block_bytes : 0) + (brings_x ? S::x_bytes : 0);
        for (uint32_t block = p.block; block < p.block_end; block += S::blocks) {
            const uint32_t left = p.block_end - block;
            const uint32_t blocks = left < (uint32_t)S::blocks ? left : S::blocks;
            uint64_t *full = &sh.full[to.stage];
            qc_mbarrier_wait(&sh.empty[to.stage], to.parity);
            qc_mbarrier_expect(full, blocks * block_bytes);
            if (brings_codes)
                qc_bulk_load(shared_at(sh, S::codes_at + to.stage * S::codes_stage +
                                               warp * S::blocks * S::block_bytes),
                             codes, blocks * S::block_bytes, full);
            if (brings_x) {
                if (!waited)
                    qc_grid_wait();
                waited = true;
                qc_bulk_load(shared_at(sh, S::x_at + to.stage * S::x_stage), x, blocks * S::x_bytes,
                             full);
            }
            codes += S::blocks * S::block_bytes;
            x += S::x_stage;
            ring_next(to);
        }
    }
    if (!waited)
        qc_grid_wait();
}

} // namespace

#endif
