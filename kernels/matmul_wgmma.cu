/* y = x W^T with the products of a warpgroup (wgmma, sm_90a), for 9 rows of x and more. Weights are
 * decoded into registers, as the operand A of 64 rows of W; x comes from shared memory as the
 * operand B.
 *
 * A block makes tiles of m_tile rows of x (16, 32, 64, 128, 256) by n_tile rows of W. It has 2 or 4
 * warpgroups with 64 rows of W each, and one of which a thread brings x:
 *
 *   x      lies in the workspace as the image of what shared memory gets (matmul_input.cu): for
 *          every 64 of k one piece of m_tile * 128 bytes, which is one bulk copy. Its ring has a
 *          barrier of full and one of empty for each stage.
 *   codes  of a warp are its own: 16 rows, 128 of k at a time, copied by cp.async into a ring that
 *          no other warp looks at, so nothing but the warp itself waits.
 *   table  of NF4 (qc_codes_wide) at the address 64 KB, so that one PRMT makes a whole address.
 *
 * While the tensor cores multiply 64 of k, the warp decodes the next 64 into other registers. The
 * order of k within 64 is that of matmul_tiles.cu (lane t has 16 codes in a row); the image of x has
 * it too.
 *
 * A block's scale is multiplied into the code values: w = fma(v, high, v * low), where high + low is
 * the scale in two float16. v * low is so small that its rounding does not count, and the sum is
 * rounded once. So a weight is what float16 can hold of the product of its scale and its code value,
 * as when it is dequantized. Row-wise int8 has exact products and gets its scale at the very end.
 * Integers are 1/128 of the codes, since scales of 1/127 would leave float16's normal numbers.
 *
 * The work is shared out as in matmul_tiles.cu; matmul_reduce.cu adds the parts. */
#include "kernels/matmul_codes.cuh"
#include "kernels/matmul_run.cuh"
#include "kernels/ptx_hopper.cuh"

#include <string.h>

#define BLOCK   64u  /* of k, with one scale a row */
#define STEP    128u /* of k, that a warp copies at a time */
#define TABLE   (64u << 10)
#define BEHIND  (TABLE + (uint32_t)sizeof(qc_codes_wide))
#define LARGEST 232448u /* bytes of shared memory a block can have on sm_90 */
/* What lies in front of a block's own shared memory belongs to the driver. */
#define DRIVER_BYTES 1024u
#define NO_ROW       UINT32_MAX

namespace
{

enum kind { NF4, INT8_BLOCKS, INT8_ROWS };

typedef struct {
    qc_run_source w;
    uint64_t n, ldy;
    void *y;
    const void *bias;
    float *partials;
    uint32_t tile_first; /* counted over all weights' tiles */
    int eights;          /* the codes of scales can be loaded eight at a time */
} part;

typedef struct {
    part parts[QC_MATMUL_GROUP_MOST];
    uint32_t count;
    uint32_t units, tile_steps, worker_steps; /* steps of all tiles, of a tile, of a block */
    uint32_t m_tiles, splits;
    uint64_t m;
    uint32_t k_blocks;
    int complete;
    const uint16_t *x; /* the image */
    const int *x_exponent;
    uint32_t *fault; /* the call's */
    qc_dtype y_dtype;
} args;

template <int m_tile_, kind what_> struct shape {
    static constexpr kind what = what_;
    static constexpr bool nf4 = what == NF4, scaled = what != INT8_ROWS;
    static constexpr int m_tile = m_tile_, groups = m_tile <= 64 ? 4 : 2, warps = 4 * groups;
    static constexpr int threads = 128 * groups + 128, n_tile = 64 * groups;

    static constexpr int words = nf4 ? 2 : 4;     /* in a lane's 16 codes */
    static constexpr int row_units = nf4 ? 4 : 8; /* of 16 bytes, in a row of a step's codes */
    static constexpr uint32_t x_bytes = m_tile * BLOCK * 2;
    static constexpr uint32_t codes_bytes = 16 * row_units * 16; /* of a warp and a step */
    /* Of the two rings the larger one lies behind the table, the other one in front of it. */
    static constexpr bool x_behind = m_tile > 64;
    static constexpr uint32_t front_room = 60u << 10, back_room = LARGEST - BEHIND;
    static constexpr int fit(uint32_t room, uint32_t bytes, int most)
    {
        return (int)(room / bytes) < most ? (int)(room / bytes) : most;
    }
    static constexpr int x_stages = fit(x_behind ? back_room : front_room, x_bytes, 8);
    static constexpr int codes_stages =
        fit(x_behind ? front_room : back_room, codes_bytes *warps, 6);
    static constexpr uint32_t back_bytes =
        x_behind ? x_bytes * x_stages : codes_bytes * codes_stages * warps;
    static constexpr uint32_t shared_bytes = BEHIND + back_bytes;
    static_assert(x_stages >= 2 && codes_stages >= 3, "copies run ahead");

    struct alignas(128) shared {
        uint64_t full[x_stages], empty[x_stages];
        qc_run_small small;
    };
    static constexpr uint32_t front = (4u << 10); /* where the ring in front begins */
    static_assert(DRIVER_BYTES + sizeof(shared) <= front && front + front_room <= TABLE, "");
    static constexpr uint32_t x_at = x_behind ? BEHIND : front;
    static constexpr uint32_t codes_at = x_behind ? front : BEHIND;
};

/* The pointer to an address of the block's shared memory. */
template <typename T> QC_DEVICE unsigned char *shared_at(T &sh, uint32_t address)
{
    return reinterpret_cast<unsigned char *>(&sh) + (int)(address - qc_shared_address(&sh));
}

/* ---- which tile ------------------------------------------------------------------------------ */

/* What a block does at a time: some k of a tile. */
struct piece {
    uint32_t at;               /* number of the part */
    uint32_t m_index;          /* of the tile of x */
    uint32_t end;              /* the unit after it */
    uint32_t step, steps;      /* of k */
    uint32_t block, block_end; /* the same in blocks of 64 */
    uint64_t n0;
};

/* Returns whether the block of threads has a piece that begins at `unit`. */
QC_DEVICE bool piece_at(piece &p, const args &a, uint32_t unit, uint32_t n_tile)
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
    while (p.at + 1 < a.count && number >= a.parts[p.at + 1].tile_first)
        p.at++;
    p.m_index = tile % a.m_tiles;
    p.n0 = (uint64_t)(number - a.parts[p.at].tile_first) * n_tile;
    p.block = p.step * (STEP / BLOCK);
    p.block_end = p.block + p.steps * (STEP / BLOCK);
    p.block_end = p.block_end < a.k_blocks ? p.block_end : a.k_blocks;
    return true;
}

/* A place in a ring and the parity of its barriers' phase. */
template <int stages> struct ring_place {
    uint32_t stage, parity;
};

template <int stages> QC_DEVICE void ring_next(ring_place<stages> &p)
{
    if (++p.stage == stages) {
        p.stage = 0;
        p.parity ^= 1;
    }
}

/* ---- x --------------------------------------------------------------------------------------- */

/* One thread brings x, a block of 64 k at a time. */
template <typename S> QC_DEVICE void bring_x(const args &a, typename S::shared &sh)
{
    ring_place<S::x_stages> to = {0, 1};
    piece p;
    for (uint32_t unit = blockIdx.x * a.worker_steps; piece_at(p, a, unit, S::n_tile);
         unit = p.end) {
        const unsigned char *from = reinterpret_cast<const unsigned char *>(a.x) +
                                    ((uint64_t)p.m_index * a.k_blocks + p.block) * S::x_bytes;
        for (uint32_t b = p.block; b < p.block_end; b++, from += S::x_bytes, ring_next(to)) {
            qc_mbarrier_wait(&sh.empty[to.stage], to.parity);
            qc_mbarrier_expect(&sh.full[to.stage], S::x_bytes);
            qc_bulk_load(shared_at(sh, S::x_at + to.stage * S::x_bytes), from, S::x_bytes,
                         &sh.full[to.stage]);
        }
    }
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* Copies the codes of a warp's 16 rows. Rows that do not exist are the last one again; their sums
 * are not stored. */
template <typename S> struct copier {
    static constexpr int apart = 32 / S::row_units; /* rows that the lanes have at a time */
    static constexpr int copies = 16 / apart;
    const unsigned char *from[copies];
    uint32_t to;     /* shared address within a stage, of the first */
    uint32_t column; /* of k in the step */
};

template <typename S>
QC_DEVICE void copier_begin(copier<S> &c, const part &w, uint64_t row0, uint32_t k, uint32_t step,
                            uint32_t lane)
{
    uint32_t row = lane / S::row_units, unit = lane % S::row_units;
    c.column = unit * (S::nf4 ? 32 : 16);
#pragma unroll
    for (int i = 0; i < copier<S>::copies; i++) {
        uint64_t n = row0 + row + i * copier<S>::apart;
        uint64_t at = (n < w.n ? n : w.n - 1) * k + step * STEP + c.column;
        c.from[i] = w.w.codes + (S::nf4 ? at >> 1 : at);
    }
    /* `apart` is a multiple of what the swizzle looks at. */
    c.to = row * S::row_units + (S::nf4 ? unit ^ (row >> 1 & 1u) << 1 : unit ^ (row & 1u) << 2);
}

/* `left`: how many blocks of 64 there are from this step on, or less than 1. */
template <typename S> QC_DEVICE void copier_step(copier<S> &c, unsigned char *stage, int left)
{
    bool there = (int)(c.column / BLOCK) < left;
#pragma unroll
    for (int i = 0; i < copier<S>::copies; i++) {
        qc_cp_async_stream_16(stage + (c.to + i * 32) * 16, c.from[i], there ? 16 : 0);
        c.from[i] += S::nf4 ? STEP / 2 : STEP;
    }
}

/* Loads a lane's 16 codes of rows g and g + 8, of block b of the step. */
template <typename S>
QC_DEVICE void codes_load(uint32_t (&q)[2][S::words], const unsigned char *stage, uint32_t lane,
                          uint32_t b)
{
    uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned char *row = stage + (g + i * 8) * S::row_units * 16;
        if constexpr (S::nf4) {
            uint2 v = *reinterpret_cast<const uint2 *>(row + (b ^ (g >> 1 & 1u)) * 32 + t * 8);
            q[i][0] = v.x;
            q[i][1] = v.y;
        } else {
            uint4 v = *reinterpret_cast<const uint4 *>(row + (b ^ (g & 1u)) * 64 + t * 16);
            q[i][0] = v.x;
            q[i][1] = v.y;
            q[i][2] = v.z;
            q[i][3] = v.w;
        }
    }
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Lane t of four has, of every step, the scale of row g + 8 (t % 2) and block t / 2. It has loaded
 * the codes of what comes next before. */
struct scale_reader {
    uint32_t first; /* number of the lane's first block of 64, counted from the tensor's first */
    uint32_t left;  /* how many blocks from there on the row has */
    uint2 now, next;
    float value, value_next;
};

QC_DEVICE void scale_load_eight(uint2 &codes, float &value, const scale_reader &r,
                                const qc_run_source &w, uint32_t group)
{
    if (group * 8 >= r.left)
        return;
    uint32_t at = r.first + group * 8;
    codes = *reinterpret_cast<const uint2 *>(w.absmax_codes + at);
    value = w.nested_absmax[at >> w.nested_shift];
}

QC_DEVICE void scale_load(scale_reader &r, const qc_run_source &w, uint32_t block)
{
    if (block >= r.left)
        return;
    uint32_t at = (r.first + block) >> (w.block_shift - 6);
    if (w.absmax) {
        r.value = w.absmax[at];
    } else {
        r.now.x = w.absmax_codes[at];
        r.value = w.nested_absmax[at >> w.nested_shift];
    }
}

QC_DEVICE void scale_begin(scale_reader &r, const part &p, uint64_t row, uint32_t k_blocks,
                           uint32_t step, uint32_t odd)
{
    r.first = (uint32_t)((row < p.n ? row : p.n - 1) * k_blocks);
    r.left = k_blocks;
    r.now.x = r.now.y = r.next.x = r.next.y = 0;
    r.value = r.value_next = 0.0f;
    if (p.eights) {
        scale_load_eight(r.now, r.value, r, p.w, step / 4);
        scale_load_eight(r.next, r.value_next, r, p.w, step / 4 + 1);
    } else {
        scale_load(r, p.w, step * 2 + odd);
    }
}

/* Gives the scale of the lane's block of this step, times `factor`, and loads what comes next. */
QC_DEVICE float scale_take(scale_reader &r, const part &p, float factor, uint32_t step,
                           uint32_t odd)
{
    float v = r.value;
    if (!p.w.absmax) {
        uint32_t code =
            p.eights ? (step & 2u ? r.now.y : r.now.x) >> ((step & 1u) * 2 + odd) * 8 : r.now.x;
        v = __fadd_rn(__fmul_rn(__ldg(p.w.nested_map + (code & 255u)), v), p.w.nested_offset);
    }
    if (!p.eights) {
        scale_load(r, p.w, step * 2 + 2 + odd);
    } else if (step % 4 == 3) {
        r.now = r.next;
        r.value = r.value_next;
        scale_load_eight(r.next, r.value_next, r, p.w, step / 4 + 2);
    }
    return __fmul_rn(v, factor);
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

/* ---- weights --------------------------------------------------------------------------------- */

/* Turns four int8 into two registers of a fragment, as 1/128 of them: 0x48 above a byte of value u
 * (the code plus 128) is the float16 8 + u / 128. */
QC_DEVICE void int8_128ths(uint32_t out[2], uint32_t q)
{
    q ^= 0x80808080u;
    out[0] = qc_half2_sub(__byte_perm(q, 0x48484848u, 0x4140u), 0x48804880u);
    out[1] = qc_half2_sub(__byte_perm(q, 0x48484848u, 0x4342u), 0x48804880u);
}

template <typename S> QC_DEVICE uint32_t scaled(uint32_t v, uint32_t high, uint32_t low)
{
    return S::scaled ? qc_half2_fma(v, high, qc_half2_mul(v, low)) : v;
}

/* Makes the A operands of the four products of 64 k. `pair`: the scales of rows g and g + 8. */
template <typename S>
QC_DEVICE void decode(uint32_t (&f)[4][4], const uint32_t (&q)[2][S::words], uint32_t look,
                      const uint32_t (&pair)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t high = __byte_perm(pair[i], 0, 0x1010), low = __byte_perm(pair[i], 0, 0x3232);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t two[2];
            if constexpr (S::nf4) {
                two[0] = qc_codes_look_apart(look, q[i][j / 2], j % 2 * 2);
                two[1] = qc_codes_look_apart(look, q[i][j / 2], j % 2 * 2 + 1);
            } else {
                int8_128ths(two, q[i][j]);
            }
            f[j][i] = scaled<S>(two[0], high, low);
            f[j][2 + i] = scaled<S>(two[1], high, low);
        }
    }
}

/* Returns the scale of a row of int8 with a scale per row. */
QC_DEVICE float row_scale(const qc_run_source &w, uint64_t row)
{
    if (w.absmax)
        return w.absmax[row];
    return __fadd_rn(__fmul_rn(__ldg(w.nested_map + w.absmax_codes[row]),
                               w.nested_absmax[row >> w.nested_shift]),
                     w.nested_offset);
}

/* ---- the end of a tile ----------------------------------------------------------------------- */

/* Writes the tile's part of y, or its partial sums. Where the tile has fewer parts than there is
 * room for, its last part writes zeros to the others. */
template <typename S>
QC_DEVICE void finish(const args &a, const piece &now, const float (&sum)[S::m_tile / 2],
                      uint32_t row, uint32_t lane)
{
    const part &p = a.parts[now.at];
    int w_exponent = p.w.exponent ? *p.w.exponent : 0;
    uint32_t tile = (now.end - 1) / a.tile_steps;
    uint32_t plane = blockIdx.x - tile * a.tile_steps / a.worker_steps;
    uint32_t planes = now.end % a.tile_steps == 0 ? a.splits : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint64_t n = now.n0 + row + half * 8;
        if (n >= p.n)
            continue;
        float by = S::scaled ? 1.0f : __fmul_rn(row_scale(p.w, n), factor_of<S>(p.w));
#pragma unroll
        for (int i = 0; i < S::m_tile / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint64_t m = (uint64_t)now.m_index * S::m_tile + i * 8 + lane % 4 * 2 + e;
                if (m >= a.m)
                    continue;
                float v = sum[i * 4 + half * 2 + e];
                v = S::scaled ? v : __fmul_rn(v, by);
                if (a.splits > 1) {
                    float *to = p.partials + m * p.n + n;
                    to[plane * a.m * p.n] = v;
                    for (uint32_t z = plane + 1; z < planes; z++)
                        to[z * a.m * p.n] = 0.0f;
                } else {
                    qc_finish(p.y, a.y_dtype, p.ldy, m, n, p.bias, v,
                              w_exponent + (a.x_exponent ? a.x_exponent[m] : 0));
                }
            }
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <typename S>
QC_DEVICE void multiply_tiles(const args &a, typename S::shared &sh, uint32_t warp, uint32_t lane)
{
    uint32_t g = lane / 4, t = lane % 4, odd = t / 2;
    uint32_t look = TABLE + lane * 4;
    unsigned char *codes = shared_at(sh, S::codes_at + warp * S::codes_stages * S::codes_bytes);
    ring_place<S::x_stages> from = {0, 0};
    bool waited = false;
    piece p;
    for (uint32_t unit = blockIdx.x * a.worker_steps; piece_at(p, a, unit, S::n_tile);
         unit = p.end) {
        const part &w = a.parts[p.at];
        uint64_t row0 = p.n0 + warp * 16;
        if (!waited && !a.complete) {
            qc_grid_wait();
            waited = true;
        }
        copier<S> copy;
        copier_begin(copy, w, row0, a.k_blocks * BLOCK, p.step, lane);
        int left = (int)(p.block_end - p.block);
#pragma unroll
        for (int i = 0; i < S::codes_stages - 1; i++) {
            copier_step(copy, codes + i * S::codes_bytes, left - i * 2);
            qc_cp_async_commit();
        }
        scale_reader scales;
        float factor = 1.0f;
        if (S::scaled) {
            factor = factor_of<S>(w.w);
            scale_begin(scales, w, row0 + g + 8 * (t & 1u), a.k_blocks, p.step, odd);
        }
        if (!waited) {
            qc_grid_wait();
            waited = true;
        }
        float sum[S::m_tile / 2];
#pragma unroll
        for (int i = 0; i < S::m_tile / 2; i++)
            sum[i] = 0.0f;
        uint32_t f[2][4][4];
        uint32_t slot = S::codes_stages - 1, scale = 0, s = 0;
        const unsigned char *stage = codes;
        /* Decodes block b of a step, for b = 0 that of the next step. Behind the last block there
         * are zeros, which nobody multiplies. */
        auto prepare = [&](int b) {
            if (b == 0) {
                qc_cp_async_wait<S::codes_stages - 2>();
                __syncwarp(); /* all lanes' codes are there, and all are done with the last slot */
                copier_step(copy, codes + slot * S::codes_bytes,
                            left - (int)(s + S::codes_stages - 1) * 2);
                qc_cp_async_commit();
                slot = slot + 1 == S::codes_stages ? 0 : slot + 1;
                stage = codes + slot * S::codes_bytes;
                if (S::scaled)
                    scale = two_halves(scale_take(scales, w, factor, p.step + s, odd));
                s++;
            }
            uint32_t q[2][S::words], pair[2] = {0, 0};
            codes_load<S>(q, stage, lane, b);
            if (S::scaled) {
                pair[0] = __shfl_sync(0xffffffffu, scale, (int)(lane & ~3u) + b * 2);
                pair[1] = __shfl_sync(0xffffffffu, scale, (int)(lane & ~3u) + b * 2 + 1);
            }
            decode<S>(f[b], q, look, pair);
#pragma unroll
            for (int j = 0; j < 4; j++)
                qc_wgmma_operand(f[b][j]);
        };
        auto start = [&](int b) {
            uint64_t x = qc_wgmma_b(S::x_at + from.stage * S::x_bytes, S::m_tile * 16);
            qc_mbarrier_wait(&sh.full[from.stage], from.parity);
            qc_wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++)
                qc_wgmma(sum, f[b][j], x + j * 2 * S::m_tile, 1);
            qc_wgmma_commit();
        };
        auto await = [&]() {
            qc_wgmma_wait<0>();
            if (lane == 0)
                qc_mbarrier_arrive(&sh.empty[from.stage]);
            ring_next(from);
        };
        prepare(0);
        for (int i = 0; i < left; i += 2) {
            start(0);
            prepare(1);
            await();
            if (i + 1 == left)
                break;
            start(1);
            prepare(0);
            await();
        }
        finish<S>(a, p, sum, warp * 16 + g, lane);
        qc_cp_async_wait<0>(); /* of the zeros behind the last step */
        __syncwarp();
    }
    if (!waited)
        qc_grid_wait();
}

template <int m_tile, kind what>
static __global__ void __launch_bounds__(shape<m_tile, what>::threads, 1) matmul_wgmma(const args a)
{
    using S = shape<m_tile, what>;
    QC_SHARED(typename S::shared, sh);
    uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    qc_grid_release();
    if (qc_shared_address(&sh) > DRIVER_BYTES) { /* else the rings would reach beyond the end */
        qc_grid_wait();
        if (thread == 0 && a.fault)
            *a.fault = QC_MATMUL_FAULT_SHARED;
        return;
    }
    if (thread == 0) {
        for (int i = 0; i < S::x_stages; i++) {
            qc_mbarrier_init(&sh.full[i], 1);
            qc_mbarrier_init(&sh.empty[i], S::warps);
        }
        qc_mbarrier_ready();
    }
    if constexpr (S::nf4) {
        qc_run_fill_codes(sh.small, a.parts[0].w, thread);
        __syncthreads();
        qc_codes_fill(*reinterpret_cast<qc_codes_wide *>(shared_at(sh, TABLE)), sh.small,
                      a.parts[0].w, thread, S::threads);
    }
    __syncthreads();
    if (warp >= S::warps) {
        qc_registers_fewer<24>();
        qc_grid_wait();
        if (thread == S::warps * 32)
            bring_x<S>(a, sh);
    } else {
        qc_registers_more<S::groups == 2 ? 240 : 112>(); /* of 168 or 96 */
        multiply_tiles<S>(a, sh, warp, lane);
    }
}

/* ---- which tiles ----------------------------------------------------------------------------- */

uint64_t ceil_of(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

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
    const qc_matmul_plan *p = &c->plan;
    args a;
    memset(&a, 0, sizeof a);
    a.count = count;
    a.m = c->m;
    a.k_blocks = (uint32_t)(c->k / BLOCK);
    a.x = (const uint16_t *)c->x;
    a.x_exponent = c->x_exponent;
    a.fault = c->fault;
    a.y_dtype = c->y_dtype;
    a.splits = p->splits;
    a.complete = 1;
    a.m_tiles = (uint32_t)ceil_of(c->m, p->m_tile);
    uint64_t split_steps = ceil_of(p->splits > 1 ? p->split_k : c->k, STEP);
    a.worker_steps = (uint32_t)(p->worker_k ? p->worker_k / STEP : split_steps);
    a.tile_steps = (uint32_t)(p->worker_k ? ceil_of(c->k, STEP) : split_steps * p->splits);
    uint64_t tiles = 0;
    for (uint32_t i = 0; i < count; i++) {
        part *to = a.parts + i;
        to->w = qc_run_source_of(&c[i].weights);
        to->n = c[i].n;
        to->ldy = c[i].ldy;
        to->y = c[i].y;
        to->bias = c[i].bias;
        to->partials = p->splits > 1 ? c[i].partials : NULL;
        to->tile_first = (uint32_t)tiles;
        to->eights = !to->w.absmax && to->w.block_shift == 6 && to->w.nested_shift >= 3 &&
                     c->k % (8 * BLOCK) == 0 && (uintptr_t)to->w.absmax_codes % 8 == 0;
        a.complete = a.complete && c[i].weights.complete == QC_MATMUL_WEIGHTS_COMPLETE;
        tiles += ceil_of(c[i].n, p->n_tile);
    }
    a.units = (uint32_t)(tiles * a.m_tiles * a.tile_steps);
    return a;
}

template <int m_tile, kind what>
qc_status launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    auto kernel = matmul_wgmma<m_tile, what>;
    const qc_matmul_plan *p = &c->plan;
    QC_TRY(qc_cuda_allow_shared(kernel, p->shared_bytes, "matmul_wgmma", err));
    args a = args_of(c, count);
    dim3 grid((unsigned)ceil_of(a.units, a.worker_steps)), block(p->threads);
    return qc_cuda_launch_overlapping(kernel, grid, block, p->shared_bytes, s, p->overlaps,
                                      "matmul_wgmma", err, a);
}

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
    if (d->sm != 90 || d->shared_block_bytes < LARGEST || p->run != QC_RUN_ALIGNED ||
        s->k % BLOCK || !s->m || !s->n || !s->k)
        return 0;
    if (s->kind != QC_FORM_INT8_ROWS && s->block_elems < BLOCK)
        return 0;
    if (qc_form_ops_of(s->kind)->integer)
        return 0;
    if (s->m > INT32_MAX || s->n > INT32_MAX || s->k > INT32_MAX / 2)
        return 0;
    uint32_t m_tile = m_tile_of(s->m);
    uint64_t tiles = qc_matmul_tiles(s, n_tile_of(m_tile)) * ceil_of(s->m, m_tile);
    uint64_t steps = ceil_of(s->k, STEP);
    if (s->n > UINT32_MAX / (s->k / BLOCK)) /* blocks of 64 are counted in 32 bits */
        return 0;
    return tiles < INT32_MAX && tiles <= INT32_MAX / (2 * steps);
}

extern "C" void qc_wgmma_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                   qc_matmul_plan *p)
{
    kind what = kind_of(s->kind);
    p->m_tile = m_tile_of(s->m);
    p->n_tile = n_tile_of(p->m_tile);
    p->threads = p->n_tile * 2 + 128;
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
