/* y = x W^T with mma.m8n8k4 (sm_70 and sm_75).
 *
 * One instruction makes four products of 8 x 8 x 4, one per quad pair of the warp. The weights are
 * the 8-column operand B of each product and come straight from registers; x is the 8-row operand A
 * and comes from shared memory. So M is padded to 8 only, and a weight goes from memory to a tensor
 * core without passing through shared memory.
 *
 * There are two kernels. matmul_mma884 takes aligned weights (matmul_run.cuh) and multiplies code
 * values instead of weights: it multiplies a run's sum of products by the run's scale in float
 * (matmul_codes.cuh). matmul_mma884_any takes all other weights and turns them into float16
 * weights, as dequantizing does.
 *
 * A block makes a tile of m_tile rows of x by n_tile rows of W, and takes k_step of k at a time.
 * Its 8 warps are warps_n x warps_k: a warp has 64 of each k_step and b_tiles times 16 rows of W. A
 * lane reads 32 bytes of codes per step, so b_tiles is 2 for NF4 and 1 for int8. With aligned
 * weights:
 *
 *              m_tile  warps n x k  n_tile  k_step  shared bytes
 *      NF4        8       2 x 4       64      256      40,960    table 32 KB, x 2 x 4 KB
 *                16       2 x 4       64      256      49,152            x 2 x 8 KB
 *                32       4 x 2      128      128      49,152            x 2 x 8 KB
 *                64       4 x 2      128      128      65,536            x 2 x 16 KB
 *      int8       8       2 x 4       32      256       8,320
 *                16       2 x 4       32      256      16,512
 *                32       8 x 1      128       64      16,512
 *                64       8 x 1      128       64      32,896
 *
 * (49,152 bytes fit twice on a V100's multiprocessor. NF4 with 64 rows is for sm_70 alone.)
 *
 * Which thread has which data: q = lane % 16 / 4 is the quad pair, and
 * i = lane % 4 + (lane >= 16 ? 4 : 0). Quad pairs 0 and 1 have columns (rows of W) 0 .. 7 of the
 * tile's 16, pairs 2 and 3 have 8 .. 15. Pairs 0 and 2 take the first 32 of the warp's 64 k, pairs
 * 1 and 3 take the second. A lane owns row 8 (q / 2) + i, and of that row the run of its half,
 * q % 2. So lanes l and l ^ 4 read the two halves of a 32-byte sector in one instruction. (Four
 * different sets of 8 rows would use only half of every sector that a load touches; four different
 * k would need four times the x.)
 *
 * Product j of 8 takes elements 4 j .. 4 j + 3 of every lane's run as b, and the same elements of x
 * row i as a, so 16 aligned bytes of x are the a of two products. The eight products of a run go to
 * sums of their own. These are scaled before they are added to the lane's sums, because the two
 * halves of k may lie in different blocks. A lane has the scale of its own row of W but holds sums
 * of four other rows, whose scales it gets by shuffles. At the end a shuffle (l ^ 4) adds the two
 * halves, and then the warps' sums are added in shared memory. Row-wise int8 is not scaled until
 * then.
 *
 * While a step is computed, these are on their way: the codes of the next two steps, in two sets of
 * registers; the scales of the next step; and x of the next step, which is loaded before the step
 * is computed and stored to the other buffer after it, since sm_70 has no cp.async. So a step has
 * one barrier. Unit u (16 bytes) of a row of x lies at u ^ (row & 3), so the 8 lanes that a 128-bit
 * load serves at once (four rows, two halves) touch all 32 banks.
 *
 * Beyond K and beyond the split's end, x is zero and the weights are the last ones there are.
 * Beyond M, x is zero. Beyond N, lanes repeat the last row, and what they make is not written.
 *
 * Newer devices run these kernels too, but not on tensor cores, since the compiler makes m8n8k4
 * from other instructions there. That is for testing.
 *
 * Cost and bound: docs/kernels.md. Numbers: docs/decisions/0018. */
#include "kernels/matmul_codes.cuh"
#include "kernels/matmul_mma884_any.cuh"

namespace
{

/* ---- aligned weights ------------------------------------------------------------------------- */

enum class codes { nf4, int8_blocks, int8_rows };

template <int m_tile_, codes kind_> struct shape {
    static constexpr codes kind = kind_;
    static constexpr bool nf4 = kind == codes::nf4;
    static constexpr bool scaled = kind != codes::int8_rows; /* by runs; else at the end */
    static constexpr int m_tile = m_tile_;
    static constexpr int warps_k = m_tile <= 16 ? 4 : nf4 ? 2 : 1;
    static constexpr int warps_n = QC_MMA_WARPS / warps_k;
    static constexpr int b_tiles = nf4 ? 2 : 1;
    static constexpr int n_tile = warps_n * 16 * b_tiles;
    static constexpr int k_step = warps_k * 64;
    static constexpr unsigned step = k_step / QC_RUN_ELEMS; /* in runs */
    static constexpr int row_units = k_step / 8;
    static constexpr int buffer_units = m_tile * row_units;
    static constexpr int units = buffer_units / QC_MMA_THREADS; /* per thread */
    static constexpr int m_parts = m_tile / 8;
    static constexpr int run_words = nf4 ? 4 : 8;
    /* With 64 rows of NF4 the sums take 128 registers, and a step is twice as long as with 32: so
     * codes come one step ahead instead of two, and x in four turns. CUDA 11.8 has the registers
     * for sm_70 only, and only there is it chosen. */
    static constexpr bool large = nf4 && m_tile == 64;
    static constexpr int ahead = large ? 1 : 2, turns = large ? 4 : 1;
    static constexpr int turn_units = units / turns;
    /* Blocks per multiprocessor, as limited by registers. Newer devices need more of these, to
     * emulate m8n8k4. */
    static constexpr int blocks = m_tile <= 16 && QC_ARCH < 80 ? 2 : 1;

    struct no_table {
    };
    struct shared {
        std::conditional_t<nf4, qc_codes_narrow, no_table> table;
        union {
            alignas(128) uint4 x[2 * buffer_units];
            float sums[m_tile * n_tile]; /* used at the end */
        };
    };
    static_assert(sizeof(uint4) * buffer_units >= sizeof(qc_run_small),
                  "the table is made from what lies in the second buffer");
};

/* Several products that share x, in one grid. Part i has columns first[i] .. first[i + 1] - 1 of
 * blocks, each times m_tiles. */
typedef struct {
    uint32_t first[QC_MATMUL_GROUP_MOST]; /* UINT32_MAX: there is no such part */
    qc_mma_args each[QC_MATMUL_GROUP_MOST];
} group;

/* Places go through qc_anew where the compiler would calculate them again wherever they are used,
 * which would cost more instructions than the registers it saves are worth. */

/* Holds the codes of one step, which are on their way. A lane has a run in each of its B tiles. */
template <typename S> struct stage {
    uint32_t q[S::b_tiles][S::run_words];
};

/* The scales of those codes. They are loaded a step later, because they nearly always lie in L1. */
template <typename S> struct scale_stage {
    float scale[S::b_tiles];
    uint32_t code[S::b_tiles];
};

/* Says which runs a lane reads. In the step that begins `first` runs after the split's first k, the
 * run of B tile r has number row[r] + min(first, last) in the tensor. Beyond the split's end that
 * is the last run there is, and it meets zeros of x. */
template <typename S> struct lane_runs {
    unsigned row[S::b_tiles], last;
};

template <typename S>
QC_DEVICE void runs_begin(lane_runs<S> &at, const qc_mma_args &a, const qc_mma_part &p,
                          unsigned runs, unsigned thread)
{
    unsigned lane = thread % 32, warp = thread / 32, half = lane % 8 / 4;
    unsigned own = warp % S::warps_k * 2 + half, line = lane % 4 + lane / 16 * 4;
    own = own < runs ? own : runs - 1;
    at.last = runs - 1 - own;
#pragma unroll
    for (int r = 0; r < S::b_tiles; r++) {
        uint64_t n = p.n0 + (warp / S::warps_k * S::b_tiles + r) * 16 + lane % 16 / 8 * 8 + line;
        n = n < a.n ? n : a.n - 1;
        at.row[r] = (unsigned)((a.w.first + n * a.w.ld + p.k_begin) / QC_RUN_ELEMS) + own;
        at.row[r] = qc_anew(at.row[r]);
    }
}

template <typename S>
QC_DEVICE void load_codes(stage<S> &to, const qc_run_source &w, const lane_runs<S> &at,
                          unsigned first)
{
    unsigned run = first < at.last ? first : at.last;
#pragma unroll
    for (int r = 0; r < S::b_tiles; r++) {
        const unsigned char *p = w.codes + (uint64_t)(at.row[r] + run) * (S::run_words * 4);
#pragma unroll
        for (int i = 0; i < S::run_words; i += 4) {
            uint4 v = qc_ld_stream_16(p + 4 * i);
            to.q[r][i] = v.x;
            to.q[r][i + 1] = v.y;
            to.q[r][i + 2] = v.z;
            to.q[r][i + 3] = v.w;
        }
    }
}

template <typename S>
QC_DEVICE void load_scales(scale_stage<S> &to, const qc_run_source &w, const lane_runs<S> &at,
                           unsigned first)
{
    unsigned run = first < at.last ? first : at.last;
#pragma unroll
    for (int r = 0; r < S::b_tiles; r++) {
        unsigned block = (at.row[r] + run) >> w.block_shift;
        to.scale[r] = __ldg(w.nested_absmax + (block >> w.nested_shift));
        if (!w.absmax)
            to.code[r] = __ldg(w.absmax_codes + block);
    }
}

/* x comes in units of 16 bytes. A thread loads every QC_MMA_THREADS-th unit of a step, in so many
 * turns as S says, and stores them to a buffer. */
template <typename S> struct x_copier {
    unsigned there;  /* of the thread's units, those whose row exists */
    unsigned stride; /* between them */
    unsigned from, to;
    unsigned end; /* steps that begin before it have the unit */
};

template <typename S>
QC_DEVICE void x_begin(x_copier<S> &c, const qc_mma_args &a, const qc_mma_part &p, unsigned runs,
                       unsigned thread)
{
    unsigned row = thread / S::row_units, unit = thread % S::row_units;
    static_assert(QC_MMA_THREADS / S::row_units % 4 == 0, "the swizzle of a thread's rows is one");
    c.there = qc_mma_x_of(a, p, S::row_units, thread).there;
    c.stride = QC_MMA_THREADS / S::row_units * (unsigned)(a.ldx / 8);
    c.from = (unsigned)(((p.m0 + row) * a.ldx + p.k_begin) / 8) + unit;
    c.from = qc_anew(c.from);
    c.to = row * S::row_units + (unit ^ (row & 3u));
    c.end = runs > unit / 4 ? runs - unit / 4 : 0;
    c.end = qc_anew(c.end);
}

template <typename S>
QC_DEVICE void x_load(uint4 (&held)[S::turn_units], const x_copier<S> &c, const qc_mma_args &a,
                      unsigned first, int turn)
{
    bool inside = first < c.end;
    unsigned from = c.from + first * (QC_RUN_ELEMS / 8);
#pragma unroll
    for (int i = 0; i < S::turn_units; i++) {
        int u = turn * S::turn_units + i;
        held[i].x = held[i].y = held[i].z = held[i].w = 0;
        if (inside && (unsigned)u < c.there)
            held[i] = qc_ld_stream_16(reinterpret_cast<const uint4 *>(a.x) + (from + u * c.stride));
    }
}

template <typename S>
QC_DEVICE void x_store(const uint4 (&held)[S::turn_units], const x_copier<S> &c, uint4 *buffer,
                       int turn)
{
    uint4 *to = buffer + c.to + turn * S::turn_units * QC_MMA_THREADS;
#pragma unroll
    for (int i = 0; i < S::turn_units; i++)
        to[i * QC_MMA_THREADS] = held[i];
}

/* Decodes elements 8 j .. 8 j + 7 of the run q into four registers of fragments. */
template <typename S>
QC_DEVICE void decode(uint32_t out[4], const typename S::shared &sh, const uint32_t q[], int j,
                      unsigned lane)
{
    if constexpr (S::nf4) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = qc_codes_look(sh.table, lane, q[j], i);
    } else {
        (void)sh, (void)lane;
        qc_codes_int8(out, q[2 * j]);
        qc_codes_int8(out + 2, q[2 * j + 1]);
    }
}

/* A lane has the scale of its own row of W, but its sums belong to four other rows: element e is in
 * column (e & 4) + (lane & 2) + (e & 1). */
QC_DEVICE void scales_of_columns(float of[4], float by, unsigned lane)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        of[i] = __shfl_sync(0xffffffffu, by, (int)((lane & 14u) + i % 2 + i / 2 * 16));
}

template <typename S> QC_DEVICE void add_part(float sum[8], const float part[8], const float of[4])
{
#pragma unroll
    for (int e = 0; e < 8; e++) {
        float t = part[e];
        if constexpr (S::kind == codes::int8_blocks)
            t = __fmul_rn(t, QC_INT8_STEP);
        sum[e] = S::scaled ? __fmaf_rn(t, of[e / 4 * 2 + e % 2], sum[e]) : t;
    }
}

QC_DEVICE float scale_of(const qc_run_source &w, float scale, uint32_t code)
{
    if (!w.absmax)
        scale = __fadd_rn(__fmul_rn(__ldg(w.nested_map + code), scale), w.nested_offset);
    return scale;
}

/* Turns sums of codes times x into sums of weights times x, for row-wise int8. A thread scales the
 * elements that qc_mma_finish lets it write. */
template <typename S>
QC_DEVICE void scale_rows(float *sums, const qc_mma_args &a, const qc_mma_part &p, unsigned thread)
{
    qc_run_power power = qc_run_power_of(a.w.exponent ? *a.w.exponent : 0);
    static_assert(QC_MMA_THREADS % S::n_tile == 0, "a thread has one column");
    unsigned column = thread % S::n_tile;
    uint64_t n = p.n0 + column < a.n ? p.n0 + column : a.n - 1;
    float scale = a.w.nested_absmax[n >> a.w.nested_shift];
    scale = scale_of(a.w, scale, a.w.absmax ? 0 : a.w.absmax_codes[n]);
    scale = __fmul_rn(__fmul_rn(scale, power.a), power.b);
    for (unsigned m = thread / S::n_tile; m < S::m_tile; m += QC_MMA_THREADS / S::n_tile) {
        float *sum = sums + qc_mma_sum_at(m, column, S::n_tile);
        *sum = __fmul_rn(__fmul_rn(*sum, scale), QC_INT8_STEP);
    }
}

/* Says where a block works, and for which product. */
struct group_part {
    unsigned which;
    qc_mma_part p;
};

template <typename S> QC_DEVICE group_part part_of(const group &g, unsigned block)
{
    unsigned column = block / g.each[0].m_tiles;
    group_part v;
    v.which = 0;
#pragma unroll
    for (unsigned i = 1; i < QC_MATMUL_GROUP_MOST; i++)
        v.which += column >= g.first[i];
    v.p = qc_mma_part_of(g.each[v.which], S::m_tile, S::n_tile);
    v.p.m0 = g.each[0].m_first + (uint64_t)(block % g.each[0].m_tiles) * S::m_tile;
    v.p.n0 = (uint64_t)(column - g.first[v.which]) * S::n_tile;
    return v;
}

/* Multiplies b_tiles times m_parts fragments of a step. The number of registers depends on what is
 * multiplied side by side. With up to 16 rows, all parts of x are multiplied while the tile is
 * decoded (with 16 rows, one B tile at a time). With more rows, all tiles are decoded first, and
 * the parts follow one after the other. */
template <typename S> struct side_by_side {
    static constexpr bool few = S::m_parts <= 2;
    static constexpr int parts = few ? S::m_parts : 1, tiles = S::m_parts == 2 ? 1 : S::b_tiles;
};

/* The products of some tiles and parts, from B tile r0 and part i0 on. x: of the lane. */
template <typename S, typename Beside = side_by_side<S>>
QC_DEVICE void multiply_some(float (&part)[Beside::tiles][Beside::parts][8],
                             uint32_t (&w)[S::b_tiles][16], const typename S::shared &sh,
                             const stage<S> &now, const unsigned char *x, unsigned x_at, int r0,
                             int i0, unsigned lane)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if constexpr (Beside::few) {
#pragma unroll
            for (int r = 0; r < Beside::tiles; r++)
                decode<S>(w[r0 + r] + 4 * j, sh, now.q[r0 + r], j, lane);
        }
#pragma unroll
        for (int i = 0; i < Beside::parts; i++) {
            uint4 v = *reinterpret_cast<const uint4 *>(x + (x_at ^ 16u * (unsigned)j) +
                                                       (i0 + i) * 8 * S::row_units * sizeof v);
            uint32_t l[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
            for (int r = 0; r < Beside::tiles; r++) {
                qc_mma_m8n8k4(part[r][i], l[0], w[r0 + r] + 4 * j);
                qc_mma_m8n8k4(part[r][i], l[1], w[r0 + r] + 4 * j + 2);
            }
        }
    }
}

/* The sums to which a run's products are added: zeros, or with row-wise int8 the lane's own. */
template <typename S, typename Beside = side_by_side<S>>
QC_DEVICE void part_begin(float (&part)[Beside::tiles][Beside::parts][8],
                          const float (&sum)[S::b_tiles][S::m_parts][8], int r0, int i0)
{
#pragma unroll
    for (int r = 0; r < Beside::tiles; r++)
#pragma unroll
        for (int i = 0; i < Beside::parts; i++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                part[r][i][e] = S::scaled ? 0.0f : sum[r0 + r][i0 + i][e];
}

template <typename S, typename Beside = side_by_side<S>>
QC_DEVICE void part_end(float (&sum)[S::b_tiles][S::m_parts][8],
                        const float (&part)[Beside::tiles][Beside::parts][8],
                        const float (&of)[S::b_tiles][4], int r0, int i0)
{
#pragma unroll
    for (int r = 0; r < Beside::tiles; r++)
#pragma unroll
        for (int i = 0; i < Beside::parts; i++)
            add_part<S>(sum[r0 + r][i0 + i], part[r][i], of[r0 + r]);
}

/* Fills the table from what lies in the second buffer of x. Returns what scales are multiplied by:
 * half of the weight's exponent, and what code values stand for. */
template <typename S>
QC_DEVICE float table_fill(typename S::shared &sh, const qc_run_source &w, unsigned thread)
{
    float power = qc_run_power_of(w.exponent ? *w.exponent : 0).a;
    if constexpr (S::nf4) {
        power = __fmul_rn(power, qc_codes_factor(w));
        qc_run_small &small = *reinterpret_cast<qc_run_small *>(sh.x + S::buffer_units);
        qc_run_fill_small(small, w, thread, QC_MMA_THREADS);
        __syncthreads();
        qc_codes_fill(sh.table, small, w, thread, QC_MMA_THREADS);
    }
    return power;
}

template <typename S>
static __global__ void __launch_bounds__(QC_MMA_THREADS, S::blocks) matmul_mma884(const group g)
{
#ifndef QC_CUDA_SHIM
    if (S::large && QC_ARCH >= 75) {
        __trap();
        return;
    }
#endif
    using beside = side_by_side<S>;
    QC_SHARED(typename S::shared, sh);
    unsigned thread = threadIdx.x, lane = thread % 32;
    unsigned line = lane % 4 + lane / 16 * 4, warp_k = thread / 32 % S::warps_k;
    const group_part gp = part_of<S>(g, blockIdx.x);
    const qc_mma_args &a = g.each[gp.which];
    unsigned runs = (unsigned)((gp.p.k_end - gp.p.k_begin) / QC_RUN_ELEMS);
    lane_runs<S> at;
    runs_begin(at, a, gp.p, runs, thread);
    stage<S> stages[S::ahead];
    scale_stage<S> scales = {};
#pragma unroll
    for (int i = 0; i < S::ahead; i++)
        load_codes(stages[i], a.w, at, i * S::step);
    if constexpr (S::scaled)
        load_scales(scales, a.w, at, 0);
    x_copier<S> x;
    uint4 held[S::turn_units];
    x_begin(x, a, gp.p, runs, thread);
#pragma unroll
    for (int turn = 0; turn < S::turns; turn++) {
        x_load(held, x, a, 0, turn);
        x_store(held, x, sh.x, turn);
    }
    float power = table_fill<S>(sh, a.w, thread);
    __syncthreads();

    float sum[S::b_tiles][S::m_parts][8];
    qc_mma_zero(sum);
    /* The bytes before a lane's first unit. Unit j of its run lies at x_at ^ 16 j. */
    unsigned x_at = (line * S::row_units + warp_k * 8 + lane % 8 / 4 * 4 + (line & 3u)) * 16;
    x_at = qc_anew(x_at);
    x.to = qc_anew(x.to);
    /* Multiplies the step that begins at run `first`, whose x is in a buffer. It loads the codes
     * for which `now` has room then, and x of the next step to the other buffer. ptxas needs up to
     * three registers more if this is a function, which some kernels do not have. */
    auto multiply_step = [&](stage<S> &now, unsigned first, unsigned buffer) {
        x_load(held, x, a, first + S::step, 0);
        uint4 *other = sh.x + (buffer ^ 1) * S::buffer_units;
        const unsigned char *x_bytes =
            reinterpret_cast<const unsigned char *>(sh.x + buffer * S::buffer_units);
        float by[S::b_tiles], of[S::b_tiles][4];
        if constexpr (S::scaled) {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
                by[r] = __fmul_rn(scale_of(a.w, scales.scale[r], scales.code[r]), power);
            load_scales(scales, a.w, at, first + S::step);
        }
        auto decoded = [&]() { /* the codes' registers are free */
                               if (first + S::ahead * S::step < runs)
                                   load_codes(now, a.w, at, first + S::ahead * S::step);
        };
        auto columns = [&]() {
#pragma unroll
            for (int r = 0; S::scaled && r < S::b_tiles; r++)
                scales_of_columns(of[r], by[r], lane);
        };
        uint32_t w[S::b_tiles][16];
        if constexpr (!beside::few) {
#pragma unroll
            for (int r = 0; r < S::b_tiles; r++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    decode<S>(w[r] + 4 * j, sh, now.q[r], j, lane);
            decoded();
            columns();
        }
#pragma unroll
        for (int r0 = 0; r0 < S::b_tiles; r0 += beside::tiles)
#pragma unroll
            for (int i0 = 0; i0 < S::m_parts; i0 += beside::parts) {
                if (r0 > 0)
                    __syncwarp(); /* makes the compiler read x again and keep none of it */
                float part[beside::tiles][beside::parts][8];
                part_begin<S>(part, sum, r0, i0);
                multiply_some<S>(part, w, sh, now, x_bytes, x_at, r0, i0, lane);
                if (beside::few && r0 + beside::tiles == S::b_tiles)
                    decoded();
                if (beside::few && r0 == 0)
                    columns();
                part_end<S>(sum, part, of, r0, i0);
                constexpr int turn_parts = S::m_parts / S::turns;
                int turn = (i0 + beside::parts) / turn_parts;
                if (S::turns > 1 && (i0 + beside::parts) % turn_parts == 0 && turn < S::turns) {
                    x_store(held, x, other, turn - 1);
                    x_load(held, x, a, first + S::step, turn);
                }
            }
        x_store(held, x, other, S::turns - 1);
    };
    for (unsigned first = 0;;) {
        multiply_step(stages[0], first, 0);
        first += S::step;
        if (first >= runs)
            break;
        __syncthreads(); /* the other buffer is complete, and all threads are done with this one */
        multiply_step(stages[S::ahead - 1], first, 1);
        first += S::step;
        if (first >= runs)
            break;
        __syncthreads();
    }

    __syncthreads();
    float rest = S::scaled ? qc_run_power_of(a.w.exponent ? *a.w.exponent : 0).b : 1.0f;
    mma884_put_sums<S>(sh.sums, sum, rest, thread);
    /* computed again, so that it takes no registers before */
    const group_part end = part_of<S>(g, qc_anew(blockIdx.x));
    if constexpr (!S::scaled)
        scale_rows<S>(sh.sums, g.each[end.which], end.p, thread);
    qc_mma_finish<S::m_tile, S::n_tile>(g.each[end.which], end.p, sh.sums, thread);
}

/* ---- plan and launch ------------------------------------------------------------------------- */

/* Splits K into as many parts as leave the busiest multiprocessor the least to do. Time is counted
 * in sixteenths of a block's step. A block costs one step besides its own, while the table and the
 * pipeline fill up; a second launch costs about three steps; and partial sums cost what the same
 * number of bytes of codes would. */
void configure_splits(const qc_cuda_device *d, const qc_matmul_shape *s, uint32_t n_tile,
                      uint32_t k_step, qc_matmul_plan *p)
{
    uint64_t sms = d->multiprocessors ? d->multiprocessors : 1;
    uint64_t tiles = qc_matmul_tiles(s, n_tile) * ((s->m + p->m_tile - 1) / p->m_tile);
    uint64_t steps = (s->k + k_step - 1) / k_step, best = UINT64_MAX;
    uint64_t step_bytes = (uint64_t)n_tile * k_step / (s->kind == QC_FORM_NF4 ? 2 : 1);
    p->splits = 1;
    p->split_k = (steps ? steps : 1) * k_step;
    uint64_t most = tiles < 64 * sms ? 4 * sms : 1;
    for (uint64_t splits = 1; splits <= most && splits <= (steps > 2 ? steps / 2 : 1); splits++) {
        uint64_t each = (steps + splits - 1) / splits;
        uint64_t blocks = (tiles * splits + sms - 1) / sms;
        uint64_t cost = 16 * blocks * (each + 1);
        if (splits > 1)
            cost += 48 + 16 * splits * s->m * s->n * 8 / (step_bytes * sms);
        if (cost >= best)
            continue;
        best = cost;
        p->split_k = (steps ? each : 1) * k_step;
        p->splits = steps ? (uint32_t)((steps + each - 1) / each) : 1;
    }
}

template <typename S>
void configure_tile(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p)
{
    p->m_tile = S::m_tile;
    p->n_tile = S::n_tile;
    p->threads = QC_MMA_THREADS;
    p->shared_bytes = (uint32_t)sizeof(typename S::shared);
    configure_splits(d, s, S::n_tile, S::k_step < 128 ? 128 : S::k_step, p);
}

template <template <int> class S>
void configure(const qc_cuda_device *d, const qc_matmul_shape *s, uint64_t rows, qc_matmul_plan *p)
{
    static constexpr decltype(&configure_tile<S<8>>) tiles[] = {
        configure_tile<S<8>>, configure_tile<S<16>>, configure_tile<S<32>>, configure_tile<S<64>>};
    tiles[qc_mma_tile_index(rows)](d, s, p);
}

template <int m_tile> using nf4_shape = shape<m_tile, codes::nf4>;
template <int m_tile> using int8_blocks_shape = shape<m_tile, codes::int8_blocks>;
template <int m_tile> using int8_rows_shape = shape<m_tile, codes::int8_rows>;
template <int m_tile> using any_nf4_shape = any_shape<m_tile, true>;
template <int m_tile> using any_int8_shape = any_shape<m_tile, false>;

template <typename S>
qc_status launch_group(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    auto kernel = matmul_mma884<S>;
    QC_TRY(
        qc_cuda_keep_resident(kernel, p->shared_bytes, (unsigned)S::blocks, "matmul_mma884", err));
    group g;
    static_assert(sizeof g <= 4096, "kernels take no more");
    uint64_t n_tiles = 0;
    for (uint32_t i = 0; i < QC_MATMUL_GROUP_MOST; i++) {
        g.first[i] = i < count ? (uint32_t)n_tiles : UINT32_MAX;
        g.each[i] = qc_mma_args_of(c + (i < count ? i : 0));
        qc_run_source &w = g.each[i].w;
        w.block_shift -= w.by_row ? 0 : 5;
        if (w.absmax) {
            w.nested_absmax = w.absmax;
            w.nested_shift = 0;
        }
        if (i < count)
            n_tiles += (c[i].n + p->n_tile - 1) / p->n_tile;
    }
    if (n_tiles > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "y has too many columns for one launch");
    /* Places are 32 bits wide and count units of 16 bytes of x and runs of codes, which is enough
     * for 64 GB of either. */
    if (c->m > (UINT64_C(1) << 32) / (c->ldx / 8))
        QC_FAIL(err, QC_ERR_USAGE,
                "x is too large for path mma-884, which takes at most 2^35 elements");
    for (uint32_t i = 0; i < count; i++)
        if (c[i].n > ((UINT64_C(1) << 32) - g.each[i].w.first / QC_RUN_ELEMS) /
                         (g.each[i].w.ld / QC_RUN_ELEMS))
            QC_FAIL(err, QC_ERR_USAGE,
                    "a weight is too large for path mma-884, which takes at most 2^37 elements");
    uint64_t m_tiles = (c->m + p->m_tile - 1) / p->m_tile, most = INT32_MAX / n_tiles, now;
    for (uint64_t done = 0; done < m_tiles; done += now) {
        now = m_tiles - done < most ? m_tiles - done : most;
        for (uint32_t i = 0; i < QC_MATMUL_GROUP_MOST; i++) {
            g.each[i].m_first = done * p->m_tile;
            g.each[i].m_tiles = (uint32_t)now;
        }
        dim3 grid((unsigned)(n_tiles * now), p->splits, 1);
        QC_TRY(qc_cuda_start("matmul_mma884", kernel, grid, dim3(p->threads), p->shared_bytes, s,
                             err, g));
    }
    return QC_OK;
}

template <int m_tile>
qc_status launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s, qc_error *err)
{
    qc_form_kind kind = c->weights.w.form.ops->kind;
    if (c->plan.aligned)
        return kind == QC_FORM_NF4 ? launch_group<nf4_shape<m_tile>>(c, count, s, err)
               : kind == QC_FORM_INT8_ROWS
                   ? launch_group<int8_rows_shape<m_tile>>(c, count, s, err)
                   : launch_group<int8_blocks_shape<m_tile>>(c, count, s, err);
    auto kernel = kind == QC_FORM_NF4 ? matmul_mma884_any<m_tile, true, qc_mma_args>
                                      : matmul_mma884_any<m_tile, false, qc_mma_args>;
    for (uint32_t i = 0; i < count; i++)
        QC_TRY(qc_mma_launch_tiles(kernel, c + i, 1, "matmul_mma884_any", s, err));
    return QC_OK;
}

} // namespace

extern "C" void qc_mma884_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                    qc_matmul_plan *p)
{
    bool aligned = p->aligned, v100 = d->sm < 75;
    /* Tiles of 64 rows of NF4 are for sm_70, where the last one would have more than 32. */
    uint64_t nf4_rows = s->m > 32 && (!v100 || (s->m - 1) % 64 < 32) ? 32 : s->m;
    if (s->kind == QC_FORM_NF4)
        aligned ? configure<nf4_shape>(d, s, nf4_rows, p) : configure<any_nf4_shape>(d, s, s->m, p);
    else if (s->kind == QC_FORM_INT8_ROWS && aligned)
        configure<int8_rows_shape>(d, s, s->m, p);
    else
        aligned ? configure<int8_blocks_shape>(d, s, s->m, p)
                : configure<any_int8_shape>(d, s, s->m, p);
}

extern "C" qc_status qc_mma884_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                      qc_error *err)
{
    static constexpr decltype(&launch<8>) tiles[] = {launch<8>, launch<16>, launch<32>, launch<64>};
    return tiles[qc_mma_tile_index(c->plan.m_tile)](c, count, s, err);
}
