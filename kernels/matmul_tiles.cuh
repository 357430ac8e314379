/* The parts of matmul_tiles.cu: what lies in shared memory, and how threads read scales, codes and
 * x. The picture is in that file. */
#ifndef QC_KERNELS_MATMUL_TILES_CUH
#define QC_KERNELS_MATMUL_TILES_CUH

#include "kernels/matmul_codes.cuh"
#include "kernels/matmul_mma.cuh"
#include "kernels/matmul_run.cuh"
#include "kernels/matmul_share.cuh"

#include <type_traits>

#define THREADS 256
#define K_STEP  128
/* The wide table lies at this address of shared memory, which is a multiple of its size. The first
 * KB belongs to the driver. */
#define WIDE_AT      (128u << 10)
#define DRIVER_BYTES 1024u
#define WIDE_SHARED  (WIDE_AT + (uint32_t)sizeof(qc_codes_wide))
#define BLOCK        64u /* codes of a row that have one scale */

namespace
{

enum kind { KIND_NF4, KIND_INT8_BLOCKS, KIND_INT8_ROWS };

using tiles_part = qc_share_part;

struct tiles_args : qc_share {
    uint64_t ldx;
    uint32_t k, ldw; /* of W: elements from row to row of the whole weight */
};

struct no_table {
};

/* What a block does at a time: some k of a tile. This lies in shared memory because there are no
 * registers to keep it over the loop. */
typedef struct {
    uint64_t m0, n0;
    uint32_t end;           /* the unit after it */
    uint32_t plane, planes; /* this tile's parts before it; if it is the last, room for parts */
    uint32_t part;          /* which weight */
    float factor;           /* what scales are multiplied by besides */
} tile_task;

/* What fits into a block's shared memory: the table of NF4, and how many rows of W and stages. */
enum memory { NARROW, WIDE, SMALL };

template <int m_tile_, kind kind_, memory memory_> struct shape {
    static constexpr bool wide = memory_ == WIDE, small = memory_ == SMALL;
    static constexpr bool nf4 = kind_ == KIND_NF4, scaled = kind_ != KIND_INT8_ROWS;
    static constexpr int m_tile = m_tile_, m_parts = m_tile / 8;
    static constexpr int stages = small || m_tile == 128 || (!nf4 && m_tile > 16) ? 3
                                  : !nf4 || m_tile == 64                          ? 4
                                  : m_tile == 32                                  ? 5
                                                                                  : 6;
    /* Whether a warp has x of a step in registers, for one A tile after the other. Else it decodes
     * all of its A tiles first, and x comes 8 rows at a time: with 128 rows, and on GPUs from
     * sm_120 on with 64 scaled ones, for which the first way spills there. */
    static constexpr bool keeps_x = m_tile < 64 || (m_tile == 64 && (!scaled || QC_ARCH < 120));
    static constexpr int warps_n = 4;
    static constexpr int a_tiles = m_tile == 128            ? 2
                                   : scaled && m_tile == 64 ? 3
                                   : small                  ? (nf4 ? 5 : 4) - m_tile / 16
                                                            : 4;
    static constexpr int warp_rows = 16 * a_tiles, n_tile = warps_n * warp_rows;
    static constexpr int x_units = m_tile * K_STEP / 8;
    static constexpr int row_units = nf4 ? 4 : 8; /* in a row of codes */
    static constexpr int words = nf4 ? 2 : 4;     /* in a lane's 16 codes */
    /* Threads copy 16 bytes each of so many rows at a time. */
    static constexpr int copy_rows = THREADS / row_units;
    static constexpr int copies = n_tile / copy_rows;
    static_assert(stages >= 3, "a step ahead is read");

    struct stage {
        uint4 x[x_units];
        uint4 codes[n_tile * row_units];
    };
    struct alignas(128) shared {
        std::conditional_t<nf4 && !wide, qc_codes_narrow, no_table> narrow;
        qc_run_small small;
        tile_task task;
        alignas(16) float scale[2][2][n_tile]; /* [step % 2][64 of the step][row, in the order of
                                                  fragments] */
        alignas(128) stage ring[stages];
    };
    static_assert(!wide || sizeof(shared) + DRIVER_BYTES <= WIDE_AT, "the table lies behind it");
    static_assert(sizeof(stage) * stages >= sizeof(float) * m_tile * n_tile,
                  "the tile's sums lie where the ring was");
};

/* ---- scales ---------------------------------------------------------------------------------- */

/* A thread decodes the scales of one row of the tile, two per step, and has loaded those of the
 * next step before. With `together` it loads the codes of four steps at once, two loads ahead. */
struct scale_reader {
    uint32_t first; /* the row's first 64 codes, counted from the tensor's first; or NO_ROW */
    uint2 now;      /* codes of these four steps with `together`, else of two times 64 */
    uint2 next;     /* with `together`: codes of the next four steps, where registers allow it */
    float value[2]; /* their factors, or the scales; with `together`: of `now` and of `next` */
};

#define NO_ROW UINT32_MAX

QC_DEVICE void scale_load_eight(uint2 &codes, float &value, const scale_reader &r,
                                const qc_run_source &w, uint32_t k, uint32_t group)
{
    if (r.first == NO_ROW || group * 8 * BLOCK >= k)
        return;
    uint32_t at = r.first + group * 8;
    codes = *reinterpret_cast<const uint2 *>(w.absmax_codes + at);
    value = w.nested_absmax[at >> w.nested_shift];
}

QC_DEVICE void scale_load(scale_reader &r, const qc_run_source &w, uint32_t k, uint32_t step)
{
#pragma unroll
    for (unsigned i = 0; i < 2; i++) {
        if (r.first == NO_ROW || (step * 2 + i) * BLOCK >= k)
            continue;
        uint32_t block = (r.first + step * 2 + i) >> (w.block_shift - 6);
        if (!w.absmax)
            (i ? r.now.y : r.now.x) = w.absmax_codes[block];
        r.value[i] = w.absmax ? w.absmax[block] : w.nested_absmax[block >> w.nested_shift];
    }
}

template <typename S>
QC_DEVICE void scale_begin(scale_reader &r, const tiles_args &a, const tiles_part &p, uint64_t row,
                           uint32_t step)
{
    const uint32_t k = a.k;
    r.first = row < p.n ? (uint32_t)(row * (a.ldw / BLOCK)) + p.block_first : NO_ROW;
    r.now.x = r.now.y = r.next.x = r.next.y = 0;
    r.value[0] = r.value[1] = 0.0f;
    if (p.together) {
        scale_load_eight(r.now, r.value[0], r, p.w, k, step / 4);
        scale_load_eight(r.next, r.value[1], r, p.w, k, step / 4 + 1);
    } else {
        scale_load(r, p.w, k, step);
    }
}

/* Returns the product of the weight's exponent (matmul.h) and of what code values stand for. One
 * float holds it all, since the exponent is at least -113 and at most 126. */
template <typename S> QC_DEVICE float factor_of(const qc_run_source &w)
{
    qc_run_power power = qc_run_power_of(w.exponent ? *w.exponent : 0);
    float f = __fmul_rn(power.a, power.b);
    return !S::scaled ? f : __fmul_rn(f, S::nf4 ? qc_codes_factor(w) : QC_INT8_STEP);
}

QC_DEVICE float scale_nested(float value, uint32_t code, const qc_run_source &w,
                             const qc_run_small &small, float factor)
{
    return __fmul_rn(__fadd_rn(__fmul_rn(small.map[code], value), w.nested_offset), factor);
}

/* Gives the scales of `step` and loads those of the next step. A row or a block that does not exist
 * has some finite scale: its codes are zero, or x is. */
template <typename S>
QC_DEVICE void scale_take(float out[2], scale_reader &r, const tiles_part &p,
                          const qc_run_small &small, float factor, uint32_t k, uint32_t step)
{
    if (p.together) {
        uint32_t two = (step & 2u ? r.now.y : r.now.x) >> (step & 1u) * 16;
        out[0] = scale_nested(r.value[0], two & 255u, p.w, small, factor);
        out[1] = scale_nested(r.value[0], two >> 8 & 255u, p.w, small, factor);
        if (step % 4 == 3) {
            r.now = r.next;
            r.value[0] = r.value[1];
            scale_load_eight(r.next, r.value[1], r, p.w, k, step / 4 + 2);
        }
        return;
    }
    if (p.w.absmax) {
        out[0] = __fmul_rn(r.value[0], factor);
        out[1] = __fmul_rn(r.value[1], factor);
    } else {
        out[0] = scale_nested(r.value[0], r.now.x, p.w, small, factor);
        out[1] = scale_nested(r.value[1], r.now.y, p.w, small, factor);
    }
    scale_load(r, p.w, k, step + 1);
}

/* Returns where a row's scale lies. Rows g and g + 8 of an A tile lie side by side. */
QC_DEVICE unsigned scale_at(unsigned row)
{
    return (row & ~15u) | (row & 7u) << 1 | (row >> 3 & 1u);
}

/* Decodes the scales of a step for the warps to read. */
template <typename S>
QC_DEVICE void scales_put(typename S::shared &sh, scale_reader &reader, const tiles_part &p,
                          float factor, uint32_t k, uint32_t step, unsigned thread)
{
    if (!S::scaled || thread >= S::n_tile)
        return;
    float two[2];
    scale_take<S>(two, reader, p, sh.small, factor, k, step);
    sh.scale[step & 1u][0][scale_at(thread)] = two[0];
    sh.scale[step & 1u][1][scale_at(thread)] = two[1];
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* A lane's 16 codes of rows g and g + 8 of an A tile. */
template <typename S> struct tile_codes {
    uint32_t q[2][S::words];
};

template <typename S>
QC_DEVICE void codes_load(tile_codes<S> &c, const uint4 *codes, unsigned at, int tile)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 *row = codes + (tile * 16 + i * 8) * S::row_units;
        if constexpr (S::nf4) {
            uint2 v = reinterpret_cast<const uint2 *>(row)[at];
            c.q[i][0] = v.x;
            c.q[i][1] = v.y;
        } else {
            uint4 v = row[at];
            c.q[i][0] = v.x;
            c.q[i][1] = v.y;
            c.q[i][2] = v.z;
            c.q[i][3] = v.w;
        }
    }
}

/* Looks up the two codes of byte b of q. `look` is the lane or, for the wide table, the address of
 * the lane's column. */
template <typename S>
QC_DEVICE uint32_t codes_look(const typename S::shared &sh, unsigned look, uint32_t q, int b)
{
    if constexpr (S::wide)
        return qc_codes_look_fixed(look, q, b);
    else
        return qc_codes_look(sh.narrow, look, q, b);
}

/* Makes the A operands of the four products. */
template <typename S>
QC_DEVICE void codes_decode(uint32_t a[4][4], const tile_codes<S> &c, const typename S::shared &sh,
                            unsigned look)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (S::nf4) {
                a[j][i] = codes_look<S>(sh, look, c.q[i][j / 2], j % 2 * 2);
                a[j][2 + i] = codes_look<S>(sh, look, c.q[i][j / 2], j % 2 * 2 + 1);
            } else {
                uint32_t two[2];
                qc_codes_int8(two, c.q[i][j]);
                a[j][i] = two[0];
                a[j][2 + i] = two[1];
            }
        }
}

/* Loads the B operands of the four products for 8 rows of x. `at` is where the swizzle puts the
 * lane's first unit; the second unit is its neighbour. */
QC_DEVICE void x_load(uint32_t b[4][2], const uint4 *x, unsigned at, int part)
{
    uint4 v = x[at + part * 128], w = x[(at ^ 1u) + part * 128];
    b[0][0] = v.x;
    b[0][1] = v.y;
    b[1][0] = v.z;
    b[1][1] = v.w;
    b[2][0] = w.x;
    b[2][1] = w.y;
    b[3][0] = w.z;
    b[3][1] = w.w;
}

/* Returns the scales of rows g and g + 8 of an A tile. */
template <typename S> QC_DEVICE float2 scales_of(const float *scales, int tile)
{
    if constexpr (S::scaled)
        return *reinterpret_cast<const float2 *>(scales + tile * 16);
    (void)scales, (void)tile;
    return make_float2(1.0f, 1.0f);
}

template <typename S>
QC_DEVICE void multiply(float sum[4], const uint32_t a[4][4], const uint32_t b[4][2], float2 by)
{
    if constexpr (S::scaled) {
        float d[4];
        qc_mma_m16n8k16_first(d, a[0], b[0]);
#pragma unroll
        for (int j = 1; j < 4; j++)
            qc_mma_m16n8k16(d, a[j], b[j]);
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[e] = __fmaf_rn(d[e], e < 2 ? by.x : by.y, sum[e]);
    } else {
        (void)by;
#pragma unroll
        for (int j = 0; j < 4; j++)
            qc_mma_m16n8k16(sum, a[j], b[j]);
    }
}

} // namespace

#endif
