/* y = x W^T for up to 8 rows of x (sm_80 and newer): weights are streamed past shared memory into
 * matrix fragments.
 *
 * A block of 16 warps makes a tile [8, n_tile] of y, n_tile 64 (int8: 32); every warp has all rows
 * of the tile and its own part of K, in entries of 64 k (one block of scales):
 *
 *          K of the block's segment, in blocks of 64
 *      |-- warp 0 --|-- warp 1 --|   ...   |-- warp 15 -|
 *      |e0 |e1 |e2 ||
 *
 *      an entry, lane 4 g + t of the warp            (mma.m16n8k16; r = 0 .. a_tiles - 1)
 *        row 16 r + g      |t = 0: 16 codes|t = 1|t = 2|t = 3|    8 bytes of NF4 a lane, 32 a row,
 *        row 16 r + 8 + g  |               |     |     |     |    16 and 64 of int8
 *      product j of 4: elements 4 j .. 4 j + 3 of every lane's 16
 *        a[0], a[2]  row 16 r + g      a[1], a[3]  row 16 r + 8 + g       b[0], b[1]  row g of x
 *
 * Which k stands where in a fragment is free as long as both operands agree: a lane's own 16 codes
 * are its part of four products, and 32 contiguous bytes of x the other operand. The four products
 * of an entry are summed in the tensor core and leave it as float; the scale of the row's block is
 * multiplied there (matmul_codes.cuh), one multiply-add per 8 weights and lane.
 *
 * BF16 x is made float16 in the registers, each row's 64 columns by a power of two of their own,
 * which is taken back where the scale is multiplied: exact for elements of at least 2^-31 of the
 * largest of the 64.
 *
 * Nothing in the main loop is shared between warps, and there is no barrier in it: codes, scales
 * and x go from memory to registers, two entries ahead (64 KB under way per multiprocessor), x from
 * L1 or L2. Scales: lane 8 r + g loads those of rows 16 r + g and 16 r + 8 + g, as bytes of four
 * blocks at once where K % 256 == 0, decodes them once for the warp, and shuffles bring them to the
 * lanes whose sums they belong to.
 *
 * Work is cut into equal ranges of blocks of 64 k, tile after tile, one range per block of threads,
 * one block per multiprocessor (persistent). Where a range ends within a tile, the parts of the
 * tile meet in the workspace: each block puts its sums there and counts; the last one to come adds
 * all, in the order of ranges, not of arrival. Within a block the 16 warps' sums meet in shared
 * memory once per tile, added in order. So sums have one order, fixed by the plan.
 *
 * Several weights that share x are one list of tiles.
 *
 * Where it applies: K % 64 == 0, aligned codes, blocks of 64 or more, at least n_tile rows in each
 * weight; the last tile of a weight reaches back into rows of the one before, and does not write
 * them. Cost and bound: docs/kernels.md. */
#include "base/checked.h"
#include "kernels/matmul_codes.cuh"
#include "kernels/matmul_finish.cuh"

#define WARPS   16u
#define THREADS (32u * WARPS)
#define M_TILE  8u
#define ENTRY_K 64u

namespace
{

enum kind { NF4, INT8_ROWS, INT8_BLOCKS };

template <kind of> struct shape {
    static constexpr bool nf4 = of == NF4;
    static constexpr int a_tiles = nf4 ? 4 : 2;
    static constexpr int words = nf4 ? 2 : 4; /* of a row's codes in a lane */
    static constexpr unsigned lane_bytes = words * 4u;
    static constexpr unsigned n_tile = 16u * a_tiles;
    static constexpr unsigned sums = n_tile * M_TILE; /* of a tile */
};

/* What the scales of a part are decoded with, beside its map. */
struct alignas(16) decoding {
    float offset;
    qc_run_power power;
    int exponent;
};

/* Where a warp is, and what it loads next; in shared memory, since it is seldom asked for. Written
 * by lane 0. */
struct place {
    uint32_t at, tile;    /* segment, of the block of threads */
    uint32_t which;       /* part whose scales `how` and the map belong to */
    uint32_t next, ahead; /* segment behind the one that is being loaded, and its tile */
};

/* Behind it, for NF4, qc_codes_wide: at once, or (apart) from the next multiple of 64 KB on. */
template <kind of> struct shared_of {
    qc_run_small small;
    decoding how; /* the present part's */
    uint32_t last;
    place places[WARPS];
    alignas(128) float sum[WARPS][shape<of>::sums];
};

/* Where a lane looks codes up. */
struct lookup {
    const qc_codes_wide *table;
    uint32_t lane_address; /* table's, plus 4 * lane */
    unsigned lane;
};

struct part {
    qc_run_source w;
    uint32_t first_tile; /* of all parts' tiles */
    void *y;
    uint64_t ldy;
    const void *bias;
};

struct args {
    part parts[QC_MATMUL_GROUP_MOST];
    uint32_t count;
    uint32_t m;
    uint32_t k_blocks;   /* of 64 k in a row */
    uint32_t row_bytes8; /* of codes, 8 rows */
    uint32_t tiles;      /* tiles * k_blocks * n_tile < 2^32 */
    uint32_t grain;      /* ranges start at multiples of this many blocks of 64 k */
    int scales_by_four;
    const uint16_t *x;
    uint64_t ldx;
    const int *x_exponent;
    qc_dtype y_dtype;
    /* Where tiles are shared by ranges: */
    uint32_t *counters; /* [0] QC_MATMUL_READY, then one per block of threads */
    float *partials;    /* [blocks][2][sums]: the tile in which a range begins, and a further one */
};

/* Ranges: block b of `blocks` has grains [b * grains / blocks, (b + 1) * grains / blocks). */
QC_DEVICE uint32_t range_begin(const args &a, uint32_t b)
{
    return (uint32_t)((uint64_t)b * (a.tiles * a.k_blocks / a.grain) / gridDim.x) * a.grain;
}

/* The block that has this block of 64 k. */
QC_DEVICE uint32_t range_of(const args &a, uint32_t at)
{
    uint32_t grains = a.tiles * a.k_blocks / a.grain;
    return (uint32_t)(((uint64_t)(at / a.grain + 1) * gridDim.x - 1) / grains);
}

/* ---- where a warp is ------------------------------------------------------------------------- */

/* A tile's part that this block of threads has, and of that what this warp has. */
struct segment {
    uint32_t end;          /* of the block of threads, in blocks of 64 k of all tiles */
    uint32_t first, count; /* of the warp: block of 64 k in the row, and how many */
    uint32_t which;        /* part */
    uint32_t row;          /* first row of the tile within the part: also rows of the tile before */
    uint32_t own;          /* rows from here on are this tile's */
};

/* begin: in this tile. */
template <kind of>
QC_DEVICE segment segment_at(const args &a, uint32_t tile, uint32_t begin, uint32_t range_end,
                             unsigned warp)
{
    segment s;
    uint32_t tile_begin = tile * a.k_blocks, tile_end = tile_begin + a.k_blocks;
    s.end = range_end < tile_end ? range_end : tile_end;
    uint32_t blocks = s.end - begin;
    uint32_t low = blocks / WARPS * warp + blocks % WARPS * warp / WARPS;
    s.first = begin - tile_begin + low;
    s.count = blocks / WARPS * (warp + 1) + blocks % WARPS * (warp + 1) / WARPS - low;
    s.which = 0;
    for (uint32_t i = 1; i < a.count; i++)
        if (tile >= a.parts[i].first_tile)
            s.which = i;
    uint32_t rows = (uint32_t)a.parts[s.which].w.rows;
    s.own = (tile - a.parts[s.which].first_tile) * shape<of>::n_tile;
    s.row = rows - s.own < shape<of>::n_tile ? rows - shape<of>::n_tile : s.own;
    return s;
}

/* ---- an entry -------------------------------------------------------------------------------- */

template <kind of> struct entry {
    uint32_t q[2 * shape<of>::a_tiles][shape<of>::words];
    uint32_t x[8];
    float scale[2];   /* absmax, or the nested one, of rows 16 r' + g' and 8 more */
    uint32_t code[2]; /* then: the 8-bit code at bit `at`, 0 to 24 */
    uint32_t at;
};

template <kind of> QC_DEVICE void load_codes(entry<of> &e, const unsigned char *row, const args &a)
{
#pragma unroll
    for (int i = 0; i < 2 * shape<of>::a_tiles; i++, row += a.row_bytes8) {
        if constexpr (shape<of>::nf4) {
            uint2 v = qc_ld_stream_8(row);
            e.q[i][0] = v.x;
            e.q[i][1] = v.y;
        } else {
            uint4 v = qc_ld_stream_16_ahead(row);
            e.q[i][0] = v.x;
            e.q[i][1] = v.y;
            e.q[i][2] = v.z;
            e.q[i][3] = v.w;
        }
    }
}

/* 16 columns of a row. The registers of a lane whose row is not there stay zero. */
template <kind of> QC_DEVICE void load_x(entry<of> &e, const uint16_t *p, bool there)
{
    if (!there)
        return;
    uint4 low = *reinterpret_cast<const uint4 *>(p);
    uint4 high = *reinterpret_cast<const uint4 *>(p + 8);
    e.x[0] = low.x;
    e.x[1] = low.y;
    e.x[2] = low.z;
    e.x[3] = low.w;
    e.x[4] = high.x;
    e.x[5] = high.y;
    e.x[6] = high.z;
    e.x[7] = high.w;
}

/* What a warp loads next: it is two entries ahead of what it computes. Pointers are the lane's. */
struct cursor {
    const unsigned char *codes; /* of row g of the tile, at the entry */
    const uint16_t *x;          /* row g of x, likewise */
    uint32_t block;             /* of row 16 r' + g': blocks of 64 k from the weight's first */
    uint32_t at, end;           /* blocks of 64 k in the row; at end: there are no more */
    uint32_t which;
    bool fresh; /* no scales of this segment yet */
    float scale[2];
    uint32_t code[2]; /* of the last group of four */
};

/* The scales of an entry. Bytes of four blocks are one load, at the first of the four. */
template <kind of> QC_DEVICE void load_scales(entry<of> &e, cursor &c, const args &a)
{
    if (of == INT8_ROWS)
        return;
    e.at = a.scales_by_four ? (c.at & 3u) * 8 : 0;
    if (c.fresh || e.at == 0) {
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            uint32_t at = (c.block + i * 8 * a.k_blocks) >> (a.parts[c.which].w.block_shift - 6);
            if (a.parts[c.which].w.absmax) {
                c.scale[i] = a.parts[c.which].w.absmax[at];
            } else {
                const uint8_t *p = a.parts[c.which].w.absmax_codes + at;
                c.scale[i] =
                    a.parts[c.which].w.nested_absmax[at >> a.parts[c.which].w.nested_shift];
                if (a.scales_by_four)
                    c.code[i] = *reinterpret_cast<const uint32_t *>(p - (at & 3u));
                else
                    c.code[i] = *p;
            }
        }
        c.fresh = false;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        e.scale[i] = c.scale[i];
        e.code[i] = c.code[i];
    }
}

/* To the first entry of the warp at or behind p.next. */
template <kind of>
QC_DEVICE void seek(cursor &c, place &p, const args &a, uint32_t range_end, unsigned warp,
                    unsigned lane)
{
    segment s;
    uint32_t next = p.next, tile = p.ahead;
    c.at = c.end = 0;
    do {
        if (next == range_end)
            return;
        s = segment_at<of>(a, tile++, next, range_end, warp);
        next = s.end;
    } while (s.count == 0);
    __syncwarp();
    if (lane == 0) {
        p.next = next;
        p.ahead = tile;
    }
    __syncwarp();
    unsigned g = lane / 4, t = lane % 4;
    c.codes = a.parts[s.which].w.codes + (uint64_t)(s.row + g) * (a.row_bytes8 / 8) +
              (s.first * 4 + t) * shape<of>::lane_bytes;
    c.x = a.x + g * a.ldx + s.first * ENTRY_K + t * 16;
    c.block = (s.row + lane / 8 % shape<of>::a_tiles * 16 + lane % 8) * a.k_blocks + s.first;
    c.at = s.first;
    c.end = s.first + s.count;
    c.which = s.which;
    c.fresh = true;
}

/* Loads the entry at c, if there is one, and goes on to the next. */
template <kind of>
QC_DEVICE void load(entry<of> &e, cursor &c, place &p, const args &a, uint32_t range_end,
                    unsigned warp, unsigned lane)
{
    if (c.at == c.end)
        return;
    load_codes<of>(e, c.codes, a);
    load_x<of>(e, c.x, lane / 4 < a.m);
    load_scales<of>(e, c, a);
    c.codes += 4 * shape<of>::lane_bytes;
    c.x += ENTRY_K;
    c.block++;
    if (++c.at == c.end)
        seek<of>(c, p, a, range_end, warp, lane);
}

/* ---- products -------------------------------------------------------------------------------- */

template <kind of> QC_DEVICE void zero_sums(float (&sum)[shape<of>::a_tiles][4])
{
#pragma unroll
    for (int r = 0; r < shape<of>::a_tiles; r++)
        sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = 0.0f;
}

/* Product j of rows 16 r .. 16 r + 15 as the weights' operand. */
template <kind of, bool apart>
QC_DEVICE void fragment(uint32_t f[4], const entry<of> &e, const lookup &l, int r, int j)
{
    if constexpr (shape<of>::nf4) {
#pragma unroll
        for (int i = 0; i < 4; i++) { /* row 8 * (i % 2), pair i / 2 */
            uint32_t q = e.q[2 * r + i % 2][j / 2];
            f[i] = apart ? qc_codes_look_apart(l.lane_address, q, j % 2 * 2 + i / 2)
                         : qc_codes_look(*l.table, l.lane, q, j % 2 * 2 + i / 2);
        }
    } else {
        (void)l;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t two[2];
            qc_codes_int8(two, e.q[2 * r + i][j]);
            f[i] = two[0];
            f[i + 2] = two[1];
        }
    }
}

/* 16 columns of a row of x from bfloat16 to float16, in place: times the power of two that brings
 * the largest of the row's 64 columns to [2^14, 2^15). Returns its inverse. Where one of them is
 * not finite the others may become 0: what they are worth does not show beside it. */
QC_DEVICE float x_to_halves(uint32_t (&x)[8])
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        most = qc_bf16x2_largest(most, x[i]);
    uint32_t top = max(most & 0xffffu, most >> 16);
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
    uint32_t exponent = max(top >> 7, 15u); /* so that both powers are normal */
    float by = __uint_as_float((268u - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = qc_half2_of_floats(__fmul_rn(__uint_as_float(x[i] << 16), by),
                                  __fmul_rn(__uint_as_float(x[i] & 0xffff0000u), by));
    return __uint_as_float((exponent - 14u) << 23);
}

template <kind of, bool apart, bool bf16>
QC_DEVICE void multiply(float (&sum)[shape<of>::a_tiles][4], entry<of> &e, const shared_of<of> &sh,
                        const lookup &l, bool nested)
{
    constexpr bool by_row = of == INT8_ROWS;
    float by[2] = {1.0f, 1.0f}, back[2] = {1.0f, 1.0f};
    if (!by_row) {
        decoding how = sh.how;
#pragma unroll
        for (int i = 0; i < 2; i++) { /* as qc_run_scale */
            float a = e.scale[i];
            if (nested)
                a = __fadd_rn(__fmul_rn(sh.small.map[e.code[i] >> e.at & 0xffu], a), how.offset);
            by[i] = __fmul_rn(__fmul_rn(a, how.power.a), how.power.b);
        }
    }
    if (bf16) { /* rows 2 t and 2 t + 1 of x are those of the lane's sums */
        float inverse = x_to_halves(e.x);
        back[0] = __shfl_sync(0xffffffffu, inverse, (int)(l.lane % 4 * 8));
        back[1] = __shfl_sync(0xffffffffu, inverse, (int)(l.lane % 4 * 8 + 4));
    }
#pragma unroll
    for (int r = 0; r < shape<of>::a_tiles; r++) {
        float block[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float(&to)[4] = by_row && !bf16 ? sum[r] : block;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t f[4];
            fragment<of, apart>(f, e, l, r, j);
            qc_mma_m16n8k16(to, f, e.x + 2 * j);
        }
        if (by_row && !bf16)
            continue;
        float scale[2] = {1.0f, 1.0f};
        if (!by_row) {
            scale[0] = __shfl_sync(0xffffffffu, by[0], r * 8 + (int)l.lane / 4);
            scale[1] = __shfl_sync(0xffffffffu, by[1], r * 8 + (int)l.lane / 4);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) /* row 8 * (i / 2) of the 16, column i % 2 of the two */
            sum[r][i] = __fmaf_rn(block[i],
                                  by_row ? back[i % 2]
                                  : bf16 ? __fmul_rn(scale[i / 2], back[i % 2])
                                         : scale[i / 2],
                                  sum[r][i]);
    }
}

/* ---- a tile's end ---------------------------------------------------------------------------- */

/* Where block b of threads puts its part of a tile. */
QC_DEVICE float *partial_of(const args &a, uint32_t b, uint32_t tile, unsigned sums)
{
    unsigned further = tile != range_begin(a, b) / a.k_blocks;
    return a.partials + (2 * b + further) * sums;
}

/* The sums of a tile that several ranges share: each puts its part into the workspace; true for
 * the last to come, with the whole in *total. All threads. */
template <kind of>
QC_DEVICE bool meet(float *total, uint32_t *shared_last, const args &a, uint32_t tile,
                    unsigned thread)
{
    constexpr unsigned sums = shape<of>::sums;
    uint32_t first = range_of(a, tile * a.k_blocks);
    uint32_t last = range_of(a, (tile + 1) * a.k_blocks - 1);
    if (thread < sums)
        partial_of(a, blockIdx.x, tile, sums)[thread] = *total;
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        uint32_t *counter = a.counters + 1 + first;
        *shared_last = atomicAdd(counter, 1u) == last - first;
        if (*shared_last)
            *counter = 0; /* for the next launch */
    }
    __syncthreads();
    if (!*shared_last)
        return false;
    __threadfence();
    if (thread < sums) {
        float v = __ldcg(partial_of(a, first, tile, sums) + thread);
        for (uint32_t b = first + 1; b <= last; b++)
            v = __fadd_rn(v, __ldcg(partial_of(a, b, tile, sums) + thread));
        *total = v;
    }
    return true;
}

/* Sums of the warps become those of the segment at `begin`, and those of a whole tile y. All
 * threads. Returns the segment's end. */
template <kind of>
QC_DEVICE uint32_t finish(shared_of<of> &sh, const args &a, uint32_t tile, uint32_t begin,
                          uint32_t range_end, const float (&sum)[shape<of>::a_tiles][4],
                          unsigned warp, unsigned lane)
{
    constexpr unsigned sums = shape<of>::sums;
    unsigned thread = 32 * warp + lane;
    segment s = segment_at<of>(a, tile, begin, range_end, warp);
#pragma unroll
    for (int r = 0; r < shape<of>::a_tiles; r++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sh.sum[warp][(r * 4 + i) * 32 + (int)lane] = sum[r][i];
    __syncthreads();
    float total = 0.0f;
    if (thread < sums) {
        total = sh.sum[0][thread];
#pragma unroll 5
        for (unsigned i = 1; i < WARPS; i++)
            total = __fadd_rn(total, sh.sum[i][thread]);
    }
    bool whole = s.end - begin == a.k_blocks;
    if (!whole)
        whole = meet<of>(&total, &sh.last, a, tile, thread);
    unsigned i = thread / 32, m = lane % 4 * 2 + i % 2;
    uint32_t row = s.row + i / 4 * 16 + i / 2 % 2 * 8 + lane / 4;
    if (whole && thread < sums && m < a.m && row >= s.own) {
        float v = total;
        if (of == NF4) {
            v = __fmul_rn(v, qc_codes_factor(a.parts[s.which].w));
        } else {
            if (of == INT8_ROWS)
                v = __fmul_rn(v,
                              __fmul_rn(__fmul_rn(a.parts[s.which].w.absmax[row], sh.how.power.a),
                                        sh.how.power.b));
            v = __fmul_rn(v, QC_INT8_STEP);
        }
        qc_finish(a.parts[s.which].y, a.y_dtype, a.parts[s.which].ldy, m, row,
                  a.parts[s.which].bias, v, sh.how.exponent + (a.x_exponent ? a.x_exponent[m] : 0));
    }
    return s.end;
}

/* Makes ready for the segment at `at`, behind a barrier that ended the last one; the warp's number
 * of entries. */
template <kind of>
QC_DEVICE uint32_t begin(place &p, uint32_t at, uint32_t tile, shared_of<of> &sh, const args &a,
                         uint32_t range_end, float (&sum)[shape<of>::a_tiles][4], unsigned warp,
                         unsigned lane)
{
    segment s = segment_at<of>(a, tile, at, range_end, warp);
    bool other = p.which != s.which;
    __syncwarp();
    if (lane == 0) {
        p.at = at;
        p.tile = tile;
        p.which = s.which;
    }
    __syncwarp();
    zero_sums<of>(sum);
    if (other) {
        qc_run_fill_map(sh.small, a.parts[s.which].w, 32 * warp + lane, THREADS);
        if (warp == 0 && lane == 0) {
            sh.how.offset = a.parts[s.which].w.nested_offset;
            sh.how.exponent = a.parts[s.which].w.exponent ? *a.parts[s.which].w.exponent : 0;
            sh.how.power = qc_run_power_of(sh.how.exponent);
        }
        __syncthreads();
    }
    return s.count;
}

template <kind of, bool apart, bool bf16>
static __global__ void __launch_bounds__(THREADS, 1) matmul_stream(const args a)
{
    QC_SHARED(shared_of<of>, sh);
    unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned char *behind = reinterpret_cast<unsigned char *>(&sh + 1);
    if (apart)
        behind += (0u - qc_shared_address(behind)) & (QC_CODES_APART - 1);
    if (apart && qc_shared_address(behind) != QC_CODES_APART)
        __trap(); /* more than 30 KB in front of the block's own: the table would be beyond it */
    qc_codes_wide *table = reinterpret_cast<qc_codes_wide *>(behind);
    lookup l = {table, shape<of>::nf4 ? qc_shared_address(table) + 4 * lane : 0, lane};
    bool from_memory = a.parts[0].w.code_map != nullptr;

    qc_grid_release();
    if (shape<of>::nf4 && !from_memory) { /* constants: nothing to wait for */
        qc_run_fill_codes(sh.small, a.parts[0].w, thread);
        __syncthreads();
        qc_codes_fill(*table, sh.small, a.parts[0].w, thread, THREADS);
    }
    qc_grid_wait();

    uint32_t at = range_begin(a, blockIdx.x), end = range_begin(a, blockIdx.x + 1);
    place &p = sh.places[warp];
    if (lane == 0) {
        p.next = at;
        p.ahead = at / a.k_blocks;
        p.which = UINT32_MAX;
    }
    __syncwarp();
    bool nested = !a.parts[0].w.absmax;
    cursor c;
    entry<of> even, odd;
#pragma unroll
    for (int i = 0; i < 8; i++)
        even.x[i] = odd.x[i] = 0;
    seek<of>(c, p, a, end, warp, lane);
    load<of>(even, c, p, a, end, warp, lane);
    load<of>(odd, c, p, a, end, warp, lane);
    if (shape<of>::nf4 && from_memory) {
        qc_run_fill_codes(sh.small, a.parts[0].w, thread);
        __syncthreads();
        qc_codes_fill(*table, sh.small, a.parts[0].w, thread, THREADS);
    }
    if (a.counters && thread == 0 && *a.counters != QC_MATMUL_READY)
        __trap(); /* the workspace was not made ready: sums would never meet */

    float sum[shape<of>::a_tiles][4];
    uint32_t left = begin<of>(p, at, at / a.k_blocks, sh, a, end, sum, warp, lane);
    for (unsigned turn = 0;; turn ^= 1) {
        while (left == 0) {
            uint32_t tile = p.tile, from = finish<of>(sh, a, tile, p.at, end, sum, warp, lane);
            if (from == end)
                return;
            __syncthreads();
            left = begin<of>(p, from, tile + 1, sh, a, end, sum, warp, lane);
        }
        left--;
        if (turn == 0) {
            multiply<of, apart, bf16>(sum, even, sh, l, nested);
            load<of>(even, c, p, a, end, warp, lane);
        } else {
            multiply<of, apart, bf16>(sum, odd, sh, l, nested);
            load<of>(odd, c, p, a, end, warp, lane);
        }
    }
}

template <kind of, bool apart, bool bf16>
qc_status start_dtype(const args &a, const qc_matmul_plan *p, qc_cuda_stream s, qc_error *err)
{
    auto kernel = matmul_stream<of, apart, bf16>;
    QC_TRY(qc_cuda_allow_shared(kernel, p->shared_bytes, "matmul_stream", err));
    return qc_cuda_launch_overlapping(kernel, dim3(p->blocks), dim3(THREADS), p->shared_bytes, s,
                                      p->overlaps, "matmul_stream", err, a);
}

template <kind of, bool apart>
qc_status start(const args &a, qc_dtype x_dtype, const qc_matmul_plan *p, qc_cuda_stream s,
                qc_error *err)
{
    return x_dtype == QC_DTYPE_BF16 ? start_dtype<of, apart, true>(a, p, s, err)
                                    : start_dtype<of, apart, false>(a, p, s, err);
}

/* Of NF4, by the shared memory that a block can have. */
#define SHARED_APART (2 * QC_CODES_APART)
#define SHARED_NEAR  ((uint32_t)(sizeof(shared_of<NF4>) + sizeof(qc_codes_wide)))
static_assert(sizeof(shared_of<NF4>) + 8192 < QC_CODES_APART, "all else lies below the table");

uint32_t tile_of(qc_weights_kind k)
{
    return k == QC_WEIGHTS_NF4 ? shape<NF4>::n_tile : shape<INT8_ROWS>::n_tile;
}

uint32_t shared_bytes_of(qc_weights_kind k, const qc_cuda_device *d)
{
    if (k != QC_WEIGHTS_NF4)
        return (uint32_t)sizeof(shared_of<INT8_ROWS>);
    return d->shared_block_bytes >= SHARED_APART ? SHARED_APART : SHARED_NEAR;
}

/* Ranges start at multiples of this many blocks of 64 k: one for each warp, where rows allow it. */
uint32_t grain_of(uint64_t k_blocks)
{
    return k_blocks % WARPS == 0 ? WARPS : 1;
}

} // namespace

extern "C" int qc_stream_takes(const qc_cuda_device *d, const qc_matmul_shape *s,
                               const qc_matmul_plan *p)
{
    uint32_t n_tile = tile_of(s->kind);
    if (d->sm < 80 || s->m > M_TILE || p->run != QC_RUN_ALIGNED || s->k % ENTRY_K != 0 ||
        s->k >= 1u << 28 || d->shared_block_bytes < shared_bytes_of(s->kind, d))
        return 0;
    if (s->kind != QC_WEIGHTS_INT8_ROWS && s->block_elems < ENTRY_K)
        return 0;
    if (qc_sat_mul(qc_matmul_tiles(s, n_tile) * n_tile, s->k / ENTRY_K) > UINT32_MAX)
        return 0;
    for (uint32_t i = 0; i < s->parts; i++)
        if (s->part_n[i] < n_tile)
            return 0;
    return s->n >= n_tile;
}

/* Whole tiles a block of threads, or ranges that end anywhere: what takes less, in grains of the
 * fullest block. A meeting of ranges (sums through L2, and a wait for the last) is put at one grain
 * of 16 blocks: 65,536 weights, 1.1 us of an H200's bandwidth. Not measured. */
extern "C" void qc_stream_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                    int may_share, qc_matmul_plan *p)
{
    uint64_t k_blocks = s->k / ENTRY_K, grain = grain_of(k_blocks);
    uint64_t slots = d->multiprocessors ? d->multiprocessors : 1;
    if (p->blocks)
        slots = p->blocks;
    if (slots > QC_MATMUL_COUNTERS)
        slots = QC_MATMUL_COUNTERS;
    p->variant = QC_MATMUL_STREAM;
    p->m_tile = M_TILE;
    p->n_tile = tile_of(s->kind);
    p->threads = THREADS;
    p->shared_bytes = shared_bytes_of(s->kind, d);
    /* From CUDA 12.3 on such launches can be captured into graphs. */
    p->overlaps = d->sm >= 90 && d->driver_version >= 12030 && d->runtime_version >= 12030;
    p->copies_x = s->x_alignment < 16;
    p->splits = 1;
    p->split_k = p->k_padded;
    uint64_t tiles = qc_matmul_tiles(s, p->n_tile);
    uint64_t grains = tiles * (k_blocks / grain);
    uint64_t each = (tiles + slots - 1) / slots;
    uint64_t shared = (grains + slots - 1) / slots + WARPS / grain;
    p->blocks = (uint32_t)((tiles + each - 1) / each);
    p->meets = may_share && shared < each * (k_blocks / grain);
    if (p->meets)
        p->blocks = (uint32_t)(grains < slots ? grains : slots);
    p->partial_floats = p->meets ? (uint64_t)p->blocks * 2 * p->n_tile * M_TILE : 0;
}

extern "C" qc_status qc_stream_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                      qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    qc_weights_kind k = c->weights.w.kind;
    args a = {};
    a.count = count;
    a.m = (uint32_t)c->m;
    a.k_blocks = (uint32_t)(c->k / ENTRY_K);
    a.row_bytes8 = a.k_blocks * (k == QC_WEIGHTS_NF4 ? 256u : 512u);
    a.scales_by_four = a.k_blocks % 4 == 0;
    for (uint32_t i = 0; i < count; i++) {
        const qc_weights *w = &c[i].weights.w;
        part *to = &a.parts[i];
        to->w = qc_run_source_of(&c[i].weights);
        to->first_tile = a.tiles;
        to->y = c[i].y;
        to->ldy = c[i].ldy;
        to->bias = c[i].bias;
        a.tiles += (uint32_t)((c[i].n + p->n_tile - 1) / p->n_tile);
        if (w->block_elems != ENTRY_K || w->absmax || w->nested_block < 4 ||
            reinterpret_cast<uintptr_t>(w->absmax_codes) % 4)
            a.scales_by_four = 0;
    }
    /* Whole tiles only: then a range's bounds are tiles'. */
    a.grain = p->meets ? grain_of(a.k_blocks) : a.k_blocks;
    a.x = static_cast<const uint16_t *>(c->x);
    a.ldx = c->ldx;
    a.x_exponent = c->x_exponent;
    a.y_dtype = c->y_dtype;
    a.counters = p->meets ? c->counters : nullptr;
    a.partials = c->partials;
    if (k == QC_WEIGHTS_INT8_ROWS)
        return start<INT8_ROWS, false>(a, c->x_dtype, p, s, err);
    if (k == QC_WEIGHTS_INT8_BLOCKS)
        return start<INT8_BLOCKS, false>(a, c->x_dtype, p, s, err);
    return p->shared_bytes == SHARED_APART ? start<NF4, true>(a, c->x_dtype, p, s, err)
                                           : start<NF4, false>(a, c->x_dtype, p, s, err);
}
