/* The pieces of matmul_ring.cu, which has the picture: what a warp has of a tile, how it brings
 * entries into its ring, x in shared memory, the products of an entry, and a piece's end. */
#ifndef QC_KERNELS_MATMUL_RING_CUH
#define QC_KERNELS_MATMUL_RING_CUH

#include "kernels/matmul_codes.cuh"

#define ROWS        16u /* of W in a tile */
#define WARPS_MOST  16u
#define WARPS_LEAST 8u
#define SLOTS_MOST  32u   /* places for sums of tiles: 1 + WARPS_MOST, up to a power of two */
#define CODE_BYTES  2048u /* of an entry */
#define COPY_BYTES  128u  /* of scales, of a warp */
#define X_GROUP     256u  /* columns of a row of x that have a power of two in common */
#define X_GAP       4u /* units of 8 elements behind a row of x, so that rows lie in other banks */

namespace
{

/* What weights are, and of NF4 which table is used: qc_codes_wide, or the narrow one on devices
 * with little shared memory. */
enum kind : unsigned { NF4, NF4_NARROW, INT8_ROWS, INT8_BLOCKS };

struct alignas(128) no_table {
};
template <kind> struct table_of {
    typedef no_table type;
};
template <> struct table_of<NF4> {
    typedef qc_codes_wide type;
};
template <> struct table_of<NF4_NARROW> {
    typedef qc_codes_narrow type;
};

template <kind of_, unsigned granule_, int passes_> struct shape {
    static constexpr kind of = of_;
    static constexpr unsigned granule = granule_; /* codes that have one scale */
    static constexpr int passes = passes_;
    static constexpr bool nf4 = of == NF4 || of == NF4_NARROW, by_row = of == INT8_ROWS;
    static constexpr unsigned run = nf4 ? 32 : 16; /* k of 16 bytes */
    static constexpr unsigned window = 4 * run, entry = 2 * window;
    static constexpr unsigned blocks = by_row ? 1 : window / granule;    /* of a window */
    static constexpr unsigned scales = by_row ? 0 : 2 * blocks;          /* of a row of an entry */
    static constexpr unsigned copies = scales == 8 ? 4 : scales ? 2 : 0; /* at most, of scales */
    static constexpr unsigned stages = of == NF4_NARROW ? 2 : 3;
    static constexpr unsigned stage_bytes = CODE_BYTES + copies * COPY_BYTES;
    static constexpr unsigned units = run / 8;               /* of 8 elements of x, for 16 bytes */
    static constexpr unsigned columns = blocks == 1 ? 2 : 1; /* rows of x of a lane and pass */
    /* Several passes over blocks of 32 need more registers than 16 warps leave them. */
    static constexpr unsigned warps = blocks == 4 && passes > 1 ? 12 : WARPS_MOST;

    /* Shared memory in front of what has no fixed size. */
    struct room {
        typename table_of<of>::type table;
        qc_run_small small;            /* its map is not used */
        uint32_t counted[SLOTS_MOST];  /* pieces whose sums are there */
        uint32_t finished[SLOTS_MOST]; /* tiles that had the slot */
    };
    typedef float sums[passes][2 * columns]; /* of rows g, then of rows g + 8 */
};

struct part {
    qc_run_source w;
    qc_matmul_output out;
    float *partials;
    uint32_t first_tile;        /* counted over all parts' tiles */
    uint32_t scale_first;       /* granule of the whole weight that is the first here */
    const uint8_t *scale_codes; /* at a multiple of 4, the codes `skipped` bytes behind */
    uint32_t skipped;
};

struct args {
    part parts[QC_MATMUL_GROUP_MOST];
    uint32_t count, m, k, tiles;
    uint32_t row_bytes, row_scales; /* from row to row of the whole weight, bytes and granules */
    uint32_t entries, all_entries;  /* of a split, of K */
    uint32_t scale_shift, nested_shift; /* granules, and scales, that have one in common */
    qc_matmul_ring ring;
    int plain, together, bf16, complete;
    const uint16_t *x;
    uint64_t ldx;
    const int *x_exponent;
};

/* Says which piece of which of the block's tiles. */
struct place {
    uint32_t turn, piece;
};

QC_DEVICE place first_place(const args &a, unsigned warp)
{
    return {warp / a.ring.pieces, warp % a.ring.pieces};
}

QC_DEVICE void next_place(place &p, const args &a)
{
    p.piece += blockDim.x / 32;
    while (p.piece >= a.ring.pieces) {
        p.piece -= a.ring.pieces;
        p.turn++;
    }
}

/* Says where a piece lies: its weight, first row, and entries of the split. */
struct segment {
    uint32_t which, row, first, count;
};

/* Returns false behind the block's last tile. */
QC_DEVICE bool find(segment &s, const place &p, const args &a)
{
    const uint32_t tile = blockIdx.x + p.turn * gridDim.x;
    if (tile >= a.tiles)
        return false;
    s.which = 0;
#pragma unroll 1
    for (uint32_t i = 1; i < a.count; i++)
        if (tile >= a.parts[i].first_tile)
            s.which = i;
    s.row = (tile - a.parts[s.which].first_tile) * ROWS;
    const uint32_t here = min(a.entries, a.all_entries - blockIdx.y * a.entries);
    s.first = p.piece * a.ring.each;
    s.count = s.first < here ? min(a.ring.each, here - s.first) : 0;
    return true;
}

/* A row that exists: those behind the last take its codes and are not written. */
QC_DEVICE uint32_t row_of(const args &a, const segment &s, unsigned i)
{
    return min(s.row + i, (uint32_t)a.parts[s.which].w.rows - 1);
}

/* The first granule of an entry of the split in row i of the tile. */
template <typename S>
QC_DEVICE uint32_t granule_at(const args &a, const segment &s, unsigned i, uint32_t entry)
{
    return a.parts[s.which].scale_first + row_of(a, s, i) * a.row_scales +
           (blockIdx.y * a.entries + entry) * S::scales;
}

/* ---- into the ring --------------------------------------------------------------------------- */

/* What a lane copies next. */
struct cursor {
    const unsigned char *codes; /* of row g */
    uint32_t high;              /* bytes from there to row g + 8 */
    uint32_t k, left;           /* of the entry; entries of the piece */
    uint32_t scale;             /* first granule of row lane % 16 */
    const uint8_t *small;       /* codes of scales, or where lanes bring those nested ones */
    uint32_t which;
    place next;
};

template <typename S> QC_DEVICE void seek(cursor &c, const args &a, unsigned lane)
{
    segment s;
    c.left = 0;
    do {
        if (!find(s, c.next, a))
            return;
        next_place(c.next, a);
    } while (s.count == 0);
    const part &w = a.parts[s.which];
    const uint32_t entry = blockIdx.y * a.entries + s.first, row = row_of(a, s, lane / 4);
    c.codes = w.w.codes + (uint64_t)row * a.row_bytes + entry * 128ull + lane % 4 * 16;
    c.high = (row_of(a, s, lane / 4 + 8) - row) * a.row_bytes;
    c.k = entry * S::entry;
    c.left = s.count;
    c.which = s.which;
    if (S::by_row)
        return;
    c.scale = granule_at<S>(a, s, lane % ROWS, s.first);
    c.small = lane < ROWS ? w.scale_codes : reinterpret_cast<const uint8_t *>(w.w.nested_absmax);
}

/* Copies the scales of an entry. Where codes lie together, a row's are whole words and have one
 * nested scale. Else two words (three of eight codes) hold a row's, wherever they begin. */
template <typename S>
QC_DEVICE void bring_scales(const cursor &c, const args &a, unsigned char *to, unsigned lane)
{
    const bool low = lane < ROWS;
    if (a.together) {
        qc_cp_async_4(to, c.small + (low ? c.scale : (c.scale >> a.nested_shift) * 4), 4);
        if (S::scales == 8)
            qc_cp_async_4(to + COPY_BYTES, c.small + c.scale + 4, low ? 4 : 0);
        return;
    }
    const part &w = a.parts[c.which];
    const uint32_t there = (a.k - c.k + S::granule - 1) / S::granule;
    const uint32_t last = c.scale + min(there, S::scales) - 1;
#pragma unroll
    for (unsigned i = 0; i < S::copies; i++, to += COPY_BYTES) {
        const uint32_t plain = c.scale + 2 * i + (low ? 0 : 1);
        const uint32_t word = (((c.scale >> a.scale_shift) + w.skipped) & ~3u) + 4 * i;
        const uint32_t nested = (i ? last : c.scale) >> a.scale_shift >> a.nested_shift;
        if (a.plain)
            qc_cp_async_4(to, w.w.absmax + (plain >> a.scale_shift), plain <= last ? 4 : 0);
        else if (low)
            qc_cp_async_4(to, w.scale_codes + word,
                          word <= (last >> a.scale_shift) + w.skipped ? 4 : 0);
        else
            qc_cp_async_4(to, w.w.nested_absmax + nested, i < 2 ? 4 : 0);
    }
}

/* Starts the copies of the entry at c, if there is one, and goes on to the next. */
template <typename S>
QC_DEVICE void bring(cursor &c, const args &a, unsigned char *stage, unsigned lane)
{
    if (c.left) {
#pragma unroll
        for (unsigned i = 0; i < 4; i++) { /* window i % 2 of row g + 8 (i / 2) */
            const bool there = c.k + i % 2 * S::window + lane % 4 * S::run < a.k;
            qc_cp_async_stream_16(stage + lane * 16 + i * 512,
                                  c.codes + (i / 2) * c.high + i % 2 * 64, there ? 16 : 0);
        }
        if constexpr (!S::by_row)
            bring_scales<S>(c, a, stage + CODE_BYTES + lane * 4, lane);
        c.codes += 128;
        c.k += S::entry;
        c.scale += S::scales;
        if (--c.left == 0)
            seek<S>(c, a, lane);
    }
    qc_cp_async_commit();
}

/* ---- x --------------------------------------------------------------------------------------- */

/* Multiplies 8 bfloat16 by the power of two that brings the largest of a warp's 256 to
 * [2^14, 2^15), as float16, and returns the inverse of that power. Where one is not finite the
 * others may become 0, which does not show beside it. */
QC_DEVICE float to_halves(uint4 &v)
{
    uint32_t most = qc_bf16x2_largest(qc_bf16x2_largest(0, v.x), v.y);
    most = qc_bf16x2_largest(qc_bf16x2_largest(most, v.z), v.w);
    uint32_t top = max(most & 0xffffu, most >> 16);
#pragma unroll
    for (int i = 1; i < 32; i *= 2)
        top = max(top, __shfl_xor_sync(0xffffffffu, top, i));
    const uint32_t exponent = max(top >> 7, 15u); /* keeps both powers normal */
    const float by = __uint_as_float((268u - exponent) << 23);
    uint32_t *words[4] = {&v.x, &v.y, &v.z, &v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        *words[i] = qc_half2_of_floats(__fmul_rn(__uint_as_float(*words[i] << 16), by),
                                       __fmul_rn(__uint_as_float(*words[i] & 0xffff0000u), by));
    return __uint_as_float((exponent - 14u) << 23);
}

/* Puts the split's columns of x into shared memory, as the lanes read them: for 16 bytes of codes
 * unit i of lanes t = 0 .. 3 side by side. Zeros stand behind K. */
template <typename S> QC_DEVICE void fill_x(uint4 *xs, float *powers, const args &a)
{
    const uint32_t units = a.ring.x_units - X_GAP, first = blockIdx.y * a.entries * S::entry;
    for (uint32_t row = 0; row < a.m; row++, xs += a.ring.x_units, powers += units / 32)
        for (uint32_t u = threadIdx.x; u < units; u += blockDim.x) { /* whole warps */
            const uint32_t k = first + u * 8, in_window = u % (4 * S::units);
            uint4 v = {0, 0, 0, 0};
            if (k < a.k)
                v = *reinterpret_cast<const uint4 *>(a.x + row * a.ldx + k);
            if (a.bf16) {
                const float power = to_halves(v);
                if (u % 32 == 0)
                    powers[u / 32] = power;
            }
            xs[u - in_window + in_window % S::units * 4 + in_window / S::units] = v;
        }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Says where a lane finds the scale of a granule of row g among an entry's: the scale or the nested
 * one, and its code. Those of row g + 8 are 32 bytes behind. */
struct scale_place {
    uint32_t granule, word, code;
};

QC_DEVICE scale_place place_of(const args &a, uint32_t granule, unsigned g)
{
    const uint32_t word = a.plain ? granule / 2 * COPY_BYTES + granule % 2 * 64 : 64;
    return {granule, word + g * 4, granule / 4 * COPY_BYTES + granule % 4 + g * 4};
}

/* The same for nested scales that do not lie together, of a row whose first granule is `first`. */
QC_DEVICE scale_place place_anywhere(const args &a, const scale_place &p, uint32_t first,
                                     uint32_t skipped, unsigned g)
{
    const uint32_t begin = first >> a.scale_shift, here = (first + p.granule) >> a.scale_shift;
    const uint32_t at = here + skipped - ((begin + skipped) & ~3u);
    const bool other = begin >> a.nested_shift != here >> a.nested_shift;
    return {p.granule, (other ? COPY_BYTES : 0) + 64 + g * 4, at / 4 * COPY_BYTES + at % 4 + g * 4};
}

/* What the scales of a piece's weight are decoded with, and the granules of rows g and g + 8. */
struct decoding {
    const unsigned char *map; /* the lane's copy */
    float offset;
    uint32_t skipped, first[2];
};

/* A map has 32 copies in the gaps of the wide table, shared by the weights of a launch. */
template <typename S>
QC_DEVICE unsigned char *map_of(typename S::room &room, const args &a, unsigned which,
                                unsigned lane)
{
    const unsigned copy = S::of == NF4 ? (lane & ((32u >> a.ring.maps_log) - 1)) : 0;
    return reinterpret_cast<unsigned char *>(&room) + a.ring.map_at +
           ((copy << a.ring.maps_log) + which) * 4;
}

template <typename S> QC_DEVICE uint32_t map_row(const args &a, uint32_t code)
{
    return S::of == NF4 ? code * (uint32_t)sizeof(qc_codes_wide::pair[0])
                        : code << (a.ring.maps_log + 2);
}

/* Decodes a scale, the same as qc_run_scale. `raw` are the row's. A plain one needs no code. */
template <typename S>
QC_DEVICE float scale_at(const unsigned char *raw, const scale_place &p, const decoding &d,
                         const args &a)
{
    const float word = *reinterpret_cast<const float *>(raw + p.word);
    const float v = *reinterpret_cast<const float *>(d.map + map_row<S>(a, raw[p.code]));
    const float nested = __fadd_rn(__fmul_rn(v, word), d.offset);
    return a.plain ? word : nested;
}

/* Makes the operands of the products of word i of both rows' 16 bytes: two of NF4, one of int8. */
template <typename S>
QC_DEVICE void fragments(uint32_t (&f)[2][4], const typename S::room &room, uint32_t low,
                         uint32_t high, unsigned lane)
{
    if constexpr (S::nf4) {
#pragma unroll
        for (int b = 0; b < 4; b++) {
            f[b / 2][b % 2 * 2] = qc_codes_look(room.table, lane, low, b);
            f[b / 2][b % 2 * 2 + 1] = qc_codes_look(room.table, lane, high, b);
        }
    } else {
        uint32_t two[2];
        qc_codes_int8(two, low);
        f[0][0] = two[0];
        f[0][2] = two[1];
        qc_codes_int8(two, high);
        f[0][1] = two[0];
        f[0][3] = two[1];
    }
}

/* Where a lane finds what it multiplies with. */
template <typename S> struct operand {
    const uint4 *x[S::passes]; /* its row's, at the split's begin */
    bool there[S::passes];
    const float *powers[S::passes][2]; /* of the rows of its sums, where x was bfloat16 */
    uint4 b[2][S::passes];             /* zeros where the lane has no row */
};

template <typename S>
QC_DEVICE void operand_begin(operand<S> &x, const args &a, const uint4 *xs, const float *powers,
                             unsigned g, unsigned t)
{
#pragma unroll
    for (unsigned p = 0; p < S::passes; p++) {
        const unsigned column = p * 8 + g, groups = (a.ring.x_units - X_GAP) / 32;
        x.there[p] = column / S::blocks < a.m && column % S::blocks == t * S::blocks / 4;
        x.x[p] = xs + column / S::blocks * a.ring.x_units + t;
        x.b[0][p] = x.b[1][p] = uint4{0, 0, 0, 0};
#pragma unroll
        for (unsigned j = 0; j < 2; j++)
            x.powers[p][j] = powers + min((p * 8 + 2 * t + j) / S::blocks, a.m - 1) * groups;
    }
}

/* Multiplies entry e of the split. `q`: windows 0 and 1 of row g, then of row g + 8. */
template <typename S>
QC_DEVICE void multiply(float (&d)[2][S::passes][4], const uint4 (&q)[4],
                        const typename S::room &room, operand<S> &x, const args &a, uint32_t e,
                        unsigned lane)
{
    const uint32_t unit = e * (S::entry / 8);
#pragma unroll
    for (int p = 0; p < S::passes; p++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            d[0][p][i] = d[1][p][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const uint32_t low[4] = {q[w].x, q[w].y, q[w].z, q[w].w};
            const uint32_t high[4] = {q[2 + w].x, q[2 + w].y, q[2 + w].z, q[2 + w].w};
            const bool begins = S::nf4 || i % 2 == 0; /* a unit of x */
            uint32_t f[2][4];
            fragments<S>(f, room, low[i], high[i], lane);
#pragma unroll
            for (int p = 0; p < S::passes; p++) {
                uint4 &b = x.b[w][p];
                if (x.there[p] && begins)
                    b = x.x[p][unit + w * 4 * S::units + (S::nf4 ? i : i / 2) * 4];
                const uint32_t b0[2] = {begins ? b.x : b.z, begins ? b.y : b.w}, b1[2] = {b.z, b.w};
                qc_mma_m16n8k16(d[w][p], f[0], b0);
                if constexpr (S::nf4)
                    qc_mma_m16n8k16(d[w][p], f[1], b1);
            }
        }
    if (a.bf16) /* d has them multiplied with a power of two */
#pragma unroll
        for (int p = 0; p < S::passes; p++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float &v = d[i / 4][p][i % 4];
                v = __fmul_rn(v, x.powers[p][i % 2][e * S::entry / X_GROUP]);
            }
}

/* Adds an entry's products, times the scales of their blocks. */
template <typename S>
QC_DEVICE void add_scaled(typename S::sums &sum, const float (&d)[2][S::passes][4],
                          const float (&by)[2][2], unsigned t)
{
#pragma unroll
    for (int w = 0; w < 2; w++)
#pragma unroll
        for (unsigned i = 0; i < 4; i++) { /* row 8 (i / 2) of both, column i % 2 of two */
            const unsigned block = w * S::blocks + (2 * t + i % 2) % S::blocks;
            float scale = 1.0f;
            if (!S::by_row)
                scale = __shfl_sync(0xffffffffu, by[S::blocks == 4 ? w : 0][i / 2],
                                    (int)(block % 4), 4);
#pragma unroll
            for (int p = 0; p < S::passes; p++) {
                float &to = sum[p][i / 2 * S::columns + (S::blocks == 1 ? i % 2 : 0)];
                to = __fmaf_rn(d[w][p][i], scale, to);
            }
        }
}

/* ---- a piece's end --------------------------------------------------------------------------- */

/* Puts a warp's sums into their place, and where they are the last of the tile, finishes it. */
template <typename S>
QC_DEVICE void hand_in(typename S::room &room, float *sums, const args &a, const place &p,
                       const segment &s, const typename S::sums &sum, unsigned lane)
{
    const unsigned slot = p.turn & ((1u << a.ring.slots_log) - 1), t = lane % 4;
    const uint32_t each = ROWS * a.m; /* sums of a piece */
    sums += slot * a.ring.pieces * each;
    float *own = sums + p.piece * each + lane / 4;
    if (lane == 0)
        qc_shared_wait(&room.finished[slot], p.turn >> a.ring.slots_log);
    __syncwarp();
#pragma unroll
    for (unsigned pass = 0; pass < S::passes; pass++)
#pragma unroll
        for (unsigned j = 0; j < S::columns; j++) {
            float v[2] = {sum[pass][j], sum[pass][S::columns + j]};
            if (S::blocks == 4)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    v[i] = __fadd_rn(v[i], __shfl_xor_sync(0xffffffffu, v[i], 1));
            const unsigned m = (pass * 8 + 2 * t + j) / S::blocks;
            if (m < a.m && (S::blocks < 4 || t % 2 == 0)) {
                own[m * ROWS] = v[0];
                own[m * ROWS + 8] = v[1];
            }
        }
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0)
        before = qc_shared_add(&room.counted[slot], 1);
    if (__shfl_sync(0xffffffffu, before, 0) != a.ring.pieces - 1)
        return;
    __syncwarp();
    const part &w = a.parts[s.which];
    for (unsigned i = lane; i < each; i += 32) {
        const uint32_t m = i / ROWS, row = s.row + i % ROWS;
        float v = sums[i];
        for (uint32_t piece = 1; piece < a.ring.pieces; piece++)
            v = __fadd_rn(v, sums[piece * each + i]);
        if (row >= w.w.rows)
            continue;
        if (S::by_row)
            v = __fmul_rn(v, w.w.absmax[row]);
        v = __fmul_rn(v, S::nf4 ? qc_codes_factor(w.w) : QC_INT8_STEP);
        if (gridDim.y > 1)
            w.partials[((uint64_t)blockIdx.y * a.m + m) * w.w.rows + row] = v;
        else
            qc_finish(w.out, m, row, v, a.x_exponent ? a.x_exponent[m] : 0);
    }
    __syncwarp();
    if (lane == 0) {
        room.counted[slot] = 0;
        qc_shared_set(&room.finished[slot], (p.turn >> a.ring.slots_log) + 1);
    }
}

} // namespace

#endif
