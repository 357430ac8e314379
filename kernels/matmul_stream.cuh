/* The pieces of the streaming matmul (matmul_stream.cu, which has the picture): ranges and segments
 * of the list of tiles, entries and their loads, and the products of an entry. */
#ifndef QC_KERNELS_MATMUL_STREAM_CUH
#define QC_KERNELS_MATMUL_STREAM_CUH

#include "kernels/matmul_codes.cuh"
#include "kernels/matmul_run.cuh"

#define WARPS   16u
#define THREADS (32u * WARPS)
#define M_TILE  8u
#define ENTRY_K 64u

namespace
{

/* What weights are, and how they lie: as in the file, packed (matmul_packed.h), or packed with the
 * codes of their scales. nvcc 13 wants a name for every value that a kernel is made for. */
constexpr unsigned PACKED = 4, PACKED_SCALES = PACKED | 8;
enum kind : unsigned {
    NF4,
    INT8_ROWS,
    INT8_BLOCKS,
    NF4_PACKED = PACKED,
    INT8_ROWS_PACKED,
    INT8_BLOCKS_PACKED,
    NF4_PACKED_SCALES = PACKED_SCALES,
    INT8_BLOCKS_PACKED_SCALES = PACKED_SCALES | INT8_BLOCKS
};

template <kind of> struct shape {
    static constexpr bool nf4 = of % PACKED == NF4;
    static constexpr bool by_row = of % PACKED == INT8_ROWS;
    static constexpr bool packed = of & PACKED;
    static constexpr bool packed_scales = (of & PACKED_SCALES) == PACKED_SCALES;
    static constexpr int a_tiles = nf4 ? 4 : 2;
    static constexpr int words = nf4 ? 2 : 4; /* a lane's words of a row's codes */
    static constexpr unsigned lane_bytes = words * 4u;
    static constexpr unsigned step = packed ? QC_PACKED_BLOCK_BYTES(nf4 ? 4u : 8u)
                                            : 4u * lane_bytes; /* from an entry to the next */
    static constexpr unsigned n_tile = 16u * a_tiles;
    static constexpr unsigned sums = n_tile * M_TILE; /* of a tile */
};

/* Holds what the scales of a part are decoded with, besides its map. */
struct alignas(16) decoding {
    float offset;
    qc_run_power power;
    int exponent;
};

/* Says where a warp is, and what it loads next. It lies in shared memory because it is seldom
 * needed. Lane 0 writes it. */
struct position {
    uint32_t at, tile;    /* segment of the block of threads */
    uint32_t which;       /* the part that `how` and the map belong to */
    uint32_t next, ahead; /* the segment after the one being loaded, and its tile */
};

/* For NF4, qc_codes_wide lies behind this, either at once or (fixed) at the next multiple of 64
 * KB on. */
template <kind of> struct shared_of {
    qc_run_small small;
    decoding how; /* the present part's */
    uint32_t last;
    uint32_t ready; /* whether the workspace was made ready */
    position positions[WARPS];
    alignas(128) float sum[WARPS][shape<of>::sums];
};

/* Says where a lane looks codes up. */
struct lookup {
    const qc_codes_wide *table;
    uint32_t lane_address; /* the table's, plus 4 * lane */
    unsigned lane;
};

struct part {
    qc_run_source w;
    uint32_t first_tile;  /* counted over all parts' tiles */
    uint32_t block_first; /* of the whole weight, the block of 64 k that is the first here */
    qc_matmul_output out;
};

struct args {
    part parts[QC_MATMUL_GROUP_MOST];
    uint32_t count;
    uint32_t m;
    uint32_t k_blocks;   /* how many blocks of 64 k a row has */
    uint32_t row_blocks; /* blocks of 64 k from row to row of the whole weight */
    uint32_t row_bytes8; /* bytes of 8 rows of codes */
    uint32_t tiles;      /* tiles * k_blocks * n_tile < 2^32 */
    uint32_t grain;      /* ranges start at multiples of this many blocks of 64 k */
    int scales_by_four;
    int complete; /* weights may be loaded before the launch in front of this one has ended */
    const uint16_t *x;
    uint64_t ldx;
    const int *x_exponent;
    /* These are used where ranges share tiles: */
    uint32_t *counters; /* [0] QC_MATMUL_READY, then one per block of threads */
    float *partials;    /* [blocks][2][sums]: the tile in which a range begins, and another one */
    uint32_t *fault;    /* of the qc_matmul_call */
};

/* Block b of `blocks` has the grains [b * grains / blocks, (b + 1) * grains / blocks). */
QC_DEVICE uint32_t range_begin(const args &a, uint32_t b)
{
    return (uint32_t)((uint64_t)b * (a.tiles * a.k_blocks / a.grain) / gridDim.x) * a.grain;
}

/* Returns the block of threads that has this block of 64 k. */
QC_DEVICE uint32_t range_of(const args &a, uint32_t at)
{
    uint32_t grains = a.tiles * a.k_blocks / a.grain;
    return (uint32_t)(((uint64_t)(at / a.grain + 1) * gridDim.x - 1) / grains);
}

/* ---- where a warp is ------------------------------------------------------------------------- */

/* The part of a tile that this block of threads has, and what of that this warp has. */
struct segment {
    uint32_t end;          /* end for the block of threads, in blocks of 64 k of all tiles */
    uint32_t first, count; /* the warp's first block of 64 k in the row, and how many it has */
    uint32_t which;        /* part */
    uint32_t row;          /* the tile's first row in the part; it may belong to the tile before */
    uint32_t own;          /* rows from here on are this tile's */
};

/* Finds the segment of the tile in which `begin` lies. */
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
    s.row =
        !shape<of>::packed && rows - s.own < shape<of>::n_tile ? rows - shape<of>::n_tile : s.own;
    return s;
}

/* ---- an entry -------------------------------------------------------------------------------- */

template <kind of> struct entry {
    uint32_t q[2 * shape<of>::a_tiles][shape<of>::words];
    uint32_t x[8];
    float scale[2];   /* absmax, or the nested one, of rows 16 r' + g' and 8 more */
    uint32_t code[2]; /* if nested: the 8-bit code at bit `at`, 0 to 24 */
    uint32_t at;      /* PACKED_SCALES: what __byte_perm takes to bring out that code */
};

/* Loads four times 512 bytes of a warp: 16 rows each of NF4, 8 of int8. */
template <kind of> QC_DEVICE void load_packed(entry<of> &e, const unsigned char *at)
{
    constexpr int words = shape<of>::words;
#pragma unroll
    for (int i = 0; i < 16; i += 4) { /* words of e.q */
        uint4 v = qc_ld_stream_16(at + i * 128);
        uint32_t *low = e.q[i / words], *high = e.q[(i + 2) / words] + (i + 2) % words;
        low[0] = v.x;
        low[1] = v.y;
        high[0] = v.z;
        high[1] = v.w;
    }
}

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

/* Loads 16 columns of a row. The registers of a lane whose row does not exist stay zero. */
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

/* Says what a warp loads next, which is two entries ahead of what it computes. The pointers are the
 * lane's. */
struct cursor {
    const unsigned char *codes; /* row g of the tile; packed: its first unit; at the entry */
    const uint16_t *x;          /* row g of x, at the entry */
    uint32_t block;             /* row 16 r' + g', in blocks of 64 k from the weight's first */
    uint32_t block8;            /* packed: the same of row 16 r' + g' + 8 */
    const uint8_t *scale_codes; /* packed: both rows', of the four blocks that come next; `block` is
                                   the first of these, and 1 more in place of `fresh` */
    uint32_t at, end;           /* blocks of 64 k in the row; none are left when at == end */
    uint32_t which;
    bool fresh; /* this segment's scales were not loaded yet */
    float scale[2];
    uint32_t code[2]; /* of the last group of four */
};

/* Loads the scales of a packed weight: of four blocks, where the entry is the first of them or of
 * its segment; or of one, where the codes of scales lie as in the file. Plain ones are found where
 * nested ones are. */
template <kind of> QC_DEVICE void load_packed_scales(cursor &c, const args &a)
{
    constexpr uint32_t blocks = shape<of>::packed_scales ? QC_PACKED_SCALES : 1;
    const bool fresh = c.block % blocks != 0;
    if (!fresh && c.at % blocks != 0)
        return;
    const qc_run_source &w = a.parts[c.which].w;
    uint32_t at[2] = {c.block, c.block8};
    if constexpr (shape<of>::packed_scales) {
        uint2 v = *reinterpret_cast<const uint2 *>(c.scale_codes);
        c.code[0] = v.x;
        c.code[1] = v.y;
        c.scale_codes += QC_PACKED_SCALE_BYTES;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!shape<of>::packed_scales)
            at[i] >>= w.block_shift - 6;
        c.scale[i] = w.nested_absmax[at[i] >> w.nested_shift];
        if (!shape<of>::packed_scales && !w.absmax)
            c.code[i] = w.absmax_codes[at[i]];
    }
    c.block = (c.block | (blocks - 1)) + 1; /* not fresh any more */
    c.block8 += blocks;
}

/* Loads the scales of an entry. The bytes of four blocks are one load, made at the first of the
 * four. */
template <kind of> QC_DEVICE void load_scales(entry<of> &e, cursor &c, const args &a)
{
    if (shape<of>::by_row)
        return;
    e.at = !shape<of>::packed && a.scales_by_four ? (c.at & 3u) * 8 : 0;
    if (shape<of>::packed_scales)
        e.at = 0x4440u | (c.at & 3u);
    if constexpr (shape<of>::packed) {
        load_packed_scales<of>(c, a);
    } else if (c.fresh || e.at == 0) {
#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
            uint32_t at = (c.block + i * 8 * a.row_blocks) >> (a.parts[c.which].w.block_shift - 6);
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

/* Finds where a segment of a packed weight lies. Rows that do not exist take the last one's scales:
 * they are not stored. */
template <kind of>
QC_DEVICE void seek_packed(cursor &c, const segment &s, const args &a, unsigned lane)
{
    const part &from = a.parts[s.which];
    const uint32_t in_band = s.row % QC_PACKED_ROWS, band = s.row - in_band;
    const uint32_t last = (uint32_t)from.w.rows - 1;
    const uint32_t row = s.row + lane / 8 % shape<of>::a_tiles * 16 + lane % 8;
    const uint32_t first = shape<of>::packed_scales ? s.first & ~3u : s.first;
    c.codes = from.w.codes + (uint64_t)(band / 8) * a.row_bytes8 +
              (uint64_t)s.first * shape<of>::step + in_band * (shape<of>::step / QC_PACKED_ROWS) +
              lane * 16;
    c.block = min(row, last) * a.row_blocks + from.block_first + first + shape<of>::packed_scales;
    c.block8 = min(row + 8, last) * a.row_blocks + from.block_first + first;
    if (shape<of>::packed_scales)
        c.scale_codes = from.w.absmax_codes + (uint64_t)band * a.row_blocks + first * 64ull +
                        in_band * QC_PACKED_SCALES +
                        lane % (8 * shape<of>::a_tiles) * (2 * QC_PACKED_SCALES);
}

/* Moves to the warp's first entry at or after p.next. */
template <kind of>
QC_DEVICE void seek(cursor &c, position &p, const args &a, uint32_t range_end, unsigned warp,
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
    if constexpr (!shape<of>::packed)
        c.codes = a.parts[s.which].w.codes + (uint64_t)(s.row + g) * (a.row_bytes8 / 8) +
                  (s.first * 4 + t) * shape<of>::lane_bytes;
    c.x = a.x + g * a.ldx + s.first * ENTRY_K + t * 16;
    if constexpr (shape<of>::packed)
        seek_packed<of>(c, s, a, lane);
    else
        c.block = (s.row + lane / 8 % shape<of>::a_tiles * 16 + lane % 8) * a.row_blocks +
                  a.parts[s.which].block_first + s.first;
    c.at = s.first;
    c.end = s.first + s.count;
    c.which = s.which;
    c.fresh = true;
}

/* Loads the entry at c, if there is one, and goes on to the next. Without with_x it does not load
 * x. */
template <kind of, bool with_x = true>
QC_DEVICE void load(entry<of> &e, cursor &c, position &p, const args &a, uint32_t range_end,
                    unsigned warp, unsigned lane)
{
    if (c.at == c.end)
        return;
    if constexpr (shape<of>::packed)
        load_packed<of>(e, c.codes);
    else
        load_codes<of>(e, c.codes, a);
    if (with_x)
        load_x<of>(e, c.x, lane / 4 < a.m);
    load_scales<of>(e, c, a);
    c.codes += shape<of>::step;
    c.x += ENTRY_K;
    if (!shape<of>::packed)
        c.block++;
    if (++c.at == c.end)
        seek<of>(c, p, a, range_end, warp, lane);
}

/* Asks L2 for the codes that the loads of the first two entries do not bring along: the next 128
 * bytes of each row. (Those loads bring 128 bytes of each row where these are aligned.) Of a packed
 * weight these are the warp's entries up to the same one, 16 lines of 128 bytes each. */
template <kind of> QC_DEVICE void prefetch(const cursor &c, const args &a, unsigned lane)
{
    if constexpr (shape<of>::packed) {
#pragma unroll
        for (unsigned i = lane / 16; i < (shape<of>::nf4 ? 6u : 2u); i += 2)
            if (c.end - c.at > i)
                qc_prefetch_l2(c.codes - lane * 16 + i * shape<of>::step + lane % 16 * 128);
        return;
    }
    constexpr unsigned skipped = shape<of>::nf4 ? 2 : 0;
    if (c.end - c.at <= skipped)
        return;
    unsigned t = lane % 4; /* rows g + 8 t, and g + 8 (t + 4) */
    const unsigned char *row =
        c.codes + skipped * 4 * shape<of>::lane_bytes - t * shape<of>::lane_bytes;
#pragma unroll
    for (unsigned i = 0; i < 2 * shape<of>::a_tiles; i += 4)
        qc_prefetch_l2(row + (i + t) * (uint64_t)a.row_bytes8);
}

/* ---- products -------------------------------------------------------------------------------- */

template <kind of> QC_DEVICE void zero_sums(float (&sum)[shape<of>::a_tiles][4])
{
#pragma unroll
    for (int r = 0; r < shape<of>::a_tiles; r++)
        sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = 0.0f;
}

/* Makes the weights' operand of product j, for rows 16 r .. 16 r + 15. */
template <kind of, bool fixed>
QC_DEVICE void fragment(uint32_t f[4], const entry<of> &e, const lookup &l, int r, int j)
{
    if constexpr (shape<of>::nf4) {
#pragma unroll
        for (int i = 0; i < 4; i++) { /* row 8 * (i % 2), pair i / 2 */
            uint32_t q = e.q[2 * r + i % 2][j / 2];
            f[i] = fixed ? qc_codes_look_fixed(l.lane_address, q, j % 2 * 2 + i / 2)
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

/* Converts 16 columns of a row of x from bfloat16 to float16, in place. They are multiplied by the
 * power of two that brings the largest of the row's 64 columns to [2^14, 2^15), and the inverse of
 * that power is returned. Where one column is not finite the others may become 0, which does not
 * show beside it. */
QC_DEVICE float x_to_halves(uint32_t (&x)[8])
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        most = qc_bf16x2_largest(most, x[i]);
    uint32_t top = max(most & 0xffffu, most >> 16);
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
    uint32_t exponent = max(top >> 7, 15u); /* keeps both powers normal */
    float by = __uint_as_float((268u - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = qc_half2_of_floats(__fmul_rn(__uint_as_float(x[i] << 16), by),
                                  __fmul_rn(__uint_as_float(x[i] & 0xffff0000u), by));
    return __uint_as_float((exponent - 14u) << 23);
}

template <kind of, bool fixed, bool bf16>
QC_DEVICE void multiply(float (&sum)[shape<of>::a_tiles][4], entry<of> &e, const shared_of<of> &sh,
                        const lookup &l, bool nested)
{
    constexpr bool by_row = shape<of>::by_row;
    float by[2] = {1.0f, 1.0f}, back[2] = {1.0f, 1.0f};
    if (!by_row) {
        decoding how = sh.how;
#pragma unroll
        for (int i = 0; i < 2; i++) { /* the same as qc_run_scale */
            float a = e.scale[i];
            if (shape<of>::packed_scales)
                a = __fadd_rn(__fmul_rn(sh.small.map[__byte_perm(e.code[i], 0, e.at)], a),
                              how.offset);
            else if (nested)
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
            fragment<of, fixed>(f, e, l, r, j);
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

} // namespace

#endif
