/* The codes of a panel where outputs do not count alike; the contract is in
 * cuda_feedback_internal.h.
 *
 * A thread block takes a block of G, for its rows are coupled: a code is chosen with all changes
 * before it known. Rows go by tiles of 16, as in quant/error_feedback_outputs.c, and a tile has
 * three steps.
 *
 *   1. Eight warps bring G E H of the tile up to date: D + (G less) H, where `less` is what the
 *      tiles above have changed E by, in chunks of 64 rows that are staged in shared memory. Chunks
 *      that nothing has changed in are left out, so late sweeps have little to do here. A thread
 *      has 2 rows and 4 columns of every second 32 rows of a chunk; a step of it loads six times
 *      128 bits and multiplies and adds 32 times.
 *   2. The first warp walks over the columns. Lanes l and l + 16 have row l. All rows look for a
 *      better code at once, and the first that finds one takes it: a ballot says which, one shuffle
 *      gives the others its change, and those behind it look again. Columns go by eights in
 *      registers, as in cuda_feedback_rows.cu, and then both halves of the warp feed them into
 *      every second later column. Each operation is that of quant/error_feedback_lanes_body.h, in
 *      its order and nothing fused, so of the same G E H it makes the same codes.
 *   3. All store E, what E has changed by, and codes.
 *
 * The work of a panel for b rows: 64 b^2 / 2 multiplications and additions for step 1, less what is
 * left out, at some 50 a cycle with the loads, and b / 16 tiles x 64 columns x (1 + changes in it)
 * looks of some 200 cycles for step 2. For b = 1024 a panel without changes takes 0.8 million
 * cycles, and one with all sums and four changes for each 16 codes 4.8 million; a sweep over 4096
 * columns 35 to 200 ms at 1.5 GHz. This is calculated, not timed. A weight has as many thread
 * blocks as G has blocks, at most one on a multiprocessor, so the others are idle meanwhile. Shared
 * memory: 58 KB, of which an sm_75 has 65.
 *
 * Barriers are reached by all threads, since what decides about them is the same for all of
 * them: counts of rows, and flags that are read behind a barrier. Whole warps make the warp-wide
 * calls. */
#include "kernels/cuda_feedback_form.cuh"

#include "quant/error_feedback_factors.h"

namespace
{

constexpr unsigned threads = 256;
constexpr unsigned panel = QC_CUDA_PANEL;
constexpr unsigned chunk = QC_CUDA_OUTPUTS_CHUNK;
constexpr unsigned tile_rows = 16;
constexpr unsigned row_stride = tile_rows + 1; /* of what lies column by column */
constexpr unsigned wide = panel + 4;           /* of what is read 16 bytes at a time */
constexpr unsigned step = 8;
constexpr unsigned code_stride = panel + 4;
static_assert(chunk == panel, "the arrays for both have the same rows");

/* The first four come first because their rows are read 16 bytes at a time. */
struct outputs_shared {
    float h[panel * wide];        /* H of the panel, both triangles; 0 beyond it */
    float g[tile_rows * wide];    /* G of the tile's rows and a chunk's; then G less */
    float less[chunk * panel];    /* of a chunk; then the sums of the other half */
    float in[panel * row_stride]; /* G E H; then E */
    float target[panel * row_stride];
    float scale[panel * row_stride];
    float from_scale[panel * row_stride];
    float inverse[panel];
    float own[tile_rows * tile_rows]; /* G of the tile's rows */
    float own_inverse[tile_rows];     /* 1 / G_ii; 0: the row keeps its codes */
    unsigned changed;                 /* codes of the tile */
    int8_t code[tile_rows * code_stride];
};

/* A block of G, and its rows within the piece. */
struct unit {
    uint64_t first, rows;
    const float *g; /* [rows][ld] */
    uint32_t *moved;
};

QC_DEVICE unit unit_of(const qc_cuda_rows &p, const qc_cuda_rows_outputs &a, uint64_t number)
{
    const uint64_t first = number * a.block, left = p.rows - first;
    unit u = {first, left < a.block ? left : a.block, a.g + number * a.block * a.ld,
              a.moved + number * ((a.block + chunk - 1) / chunk)};
    return u;
}

QC_DEVICE void load_square(const qc_cuda_rows &p, const qc_cuda_rows_outputs &a,
                           outputs_shared &shared)
{
    for (unsigned i = threadIdx.x; i < panel * panel; i += threads) {
        const unsigned row = i / panel, col = i % panel;
        const unsigned low = row < col ? row : col, high = row < col ? col : row;
        shared.h[row * wide + col] =
            high < a.cols ? p.hu[(a.col + low) * p.n + a.col + high] : 0.0f;
    }
    if (threadIdx.x < panel)
        shared.inverse[threadIdx.x] = threadIdx.x < a.cols ? p.inverse[a.col + threadIdx.x] : 0.0f;
}

/* ---- step 1 ---------------------------------------------------------------------------------- */

QC_DEVICE void load_chunk(const qc_cuda_rows_outputs &a, const unit &u, uint64_t tile,
                          uint64_t from, outputs_shared &shared)
{
    for (unsigned i = threadIdx.x; i < tile_rows * chunk; i += threads) {
        const unsigned r = i / chunk, k = i % chunk;
        float g = 0.0f;
        if (tile + r < u.rows && from + k < tile)
            g = u.g[(tile + r) * a.ld + from + k];
        shared.g[r * wide + k] = g;
    }
    for (unsigned i = threadIdx.x; i < chunk * panel; i += threads) {
        const unsigned k = i / panel, col = i % panel;
        float less = 0.0f; /* nobody has written the columns from a.cols on */
        if (from + k < tile && col < a.cols)
            less = a.less[(u.first + from + k) * panel + col];
        shared.less[i] = less;
    }
}

QC_DEVICE void add_four(float (&sum)[4], float x, const float4 &y)
{
    sum[0] = __fmaf_rn(x, y.x, sum[0]);
    sum[1] = __fmaf_rn(x, y.y, sum[1]);
    sum[2] = __fmaf_rn(x, y.z, sum[2]);
    sum[3] = __fmaf_rn(x, y.w, sum[3]);
}

QC_DEVICE float4 four_at(const float *p)
{
    return *reinterpret_cast<const float4 *>(p);
}

/* Adds the products of this thread's half of a chunk. */
QC_DEVICE void add_chunk(const outputs_shared &shared, unsigned row, unsigned col,
                         float (&sum)[2][4])
{
    const unsigned begin = threadIdx.x / 128 * (chunk / 2);
    for (unsigned k = begin; k < begin + chunk / 2; k += 4) {
        const float4 a = four_at(shared.g + row * wide + k);
        const float4 b = four_at(shared.g + (row + 1) * wide + k);
        const float4 v = four_at(shared.less + k * panel + col);
        const float4 w = four_at(shared.less + (k + 1) * panel + col);
        const float4 x = four_at(shared.less + (k + 2) * panel + col);
        const float4 y = four_at(shared.less + (k + 3) * panel + col);
        add_four(sum[0], a.x, v);
        add_four(sum[0], a.y, w);
        add_four(sum[0], a.z, x);
        add_four(sum[0], a.w, y);
        add_four(sum[1], b.x, v);
        add_four(sum[1], b.y, w);
        add_four(sum[1], b.z, x);
        add_four(sum[1], b.w, y);
    }
}

/* Leaves G less of the tile's rows in shared.g. Returns whether anything above has changed. */
QC_DEVICE bool sum_above(const qc_cuda_rows_outputs &a, const unit &u, uint64_t tile,
                         outputs_shared &shared)
{
    const unsigned row = threadIdx.x % 128 / 16 * 2, col = threadIdx.x % 16 * 4;
    float sum[2][4] = {};
    bool any = false;
    for (uint64_t from = 0; from < tile; from += chunk) {
        if (u.moved[from / chunk] == 0)
            continue;
        any = true;
        load_chunk(a, u, tile, from, shared);
        __syncthreads();
        add_chunk(shared, row, col, sum);
        __syncthreads();
    }
    if (!any)
        return false;
    if (threadIdx.x >= 128) {
#pragma unroll
        for (unsigned i = 0; i < 8; i++)
            shared.less[(row + i / 4) * panel + col + i % 4] = sum[i / 4][i % 4];
    }
    __syncthreads();
    if (threadIdx.x < 128) {
#pragma unroll
        for (unsigned i = 0; i < 8; i++)
            shared.g[(row + i / 4) * wide + col + i % 4] =
                __fadd_rn(sum[i / 4][i % 4], shared.less[(row + i / 4) * panel + col + i % 4]);
    }
    __syncthreads();
    return true;
}

/* Leaves G E H of the tile in shared.in. */
QC_DEVICE void load_gradients(const qc_cuda_rows_outputs &a, const unit &u, uint64_t tile,
                              bool above, outputs_shared &shared)
{
    const unsigned row = threadIdx.x / 16, col = threadIdx.x % 16 * 4;
    float sum[4] = {};
    if (above)
        for (unsigned k = 0; k < panel; k++)
            add_four(sum, shared.g[row * wide + k], four_at(shared.h + k * wide + col));
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        float d = 0.0f;
        if (tile + row < u.rows && col + i < a.cols)
            d = a.d[(u.first + tile + row) * panel + col + i];
        shared.in[(col + i) * row_stride + row] = __fadd_rn(d, sum[i]);
    }
}

/* Loads what else is known of a tile. */
QC_DEVICE void load_tile(const qc_cuda_rows &p, const qc_cuda_rows_outputs &a, const unit &u,
                         uint64_t tile, outputs_shared &shared)
{
    for (unsigned i = threadIdx.x; i < tile_rows * panel; i += threads) {
        const unsigned r = i / panel, k = i % panel;
        float target = 0.0f, scale = 0.0f, from_scale = 0.0f;
        int8_t code = 0;
        if (tile + r < u.rows && k < a.cols) {
            const uint64_t at = (u.first + tile + r) * p.n + a.col + k;
            const uint64_t index = p.form.by_rows ? u.first + tile + r : at >> p.shift;
            target = p.target[at];
            scale = p.absmax[index];
            from_scale = p.from_absmax[index];
            code = p.codes[at];
        }
        shared.target[k * row_stride + r] = target;
        shared.scale[k * row_stride + r] = scale;
        shared.from_scale[k * row_stride + r] = from_scale;
        shared.code[r * code_stride + k] = code;
    }
    /* 256 threads are 16 x 16 */
    const unsigned r = threadIdx.x / tile_rows, k = threadIdx.x % tile_rows;
    float g = 0.0f;
    if (tile + r < u.rows && tile + k < u.rows)
        g = u.g[(tile + r) * a.ld + tile + k];
    shared.own[r * tile_rows + k] = g;
    if (r == k)
        shared.own_inverse[r] = g > QC_FEEDBACK_LEAST_MOMENT ? __frcp_rn(g) : 0.0f;
}

/* ---- step 2 ---------------------------------------------------------------------------------- */

/* One row of a tile in one column. */
struct place {
    float target, scale, from_scale, old, error;
    int was, code;
};

QC_DEVICE uint32_t those_that_differ(bool differs)
{
    return __ballot_sync(QC_ALL_LANES, differs) & 0xffffu;
}

/* Chooses the codes of column k; in is G E H there. Returns G times what they change E by, and adds
 * their number to changed. */
template <bool table>
QC_DEVICE float choose_column(const qc_cuda_form &form, const qc_nf4_tables &tables,
                              const outputs_shared &shared, unsigned k, unsigned rows, float in,
                              place &at, unsigned &changed)
{
    const unsigned row = threadIdx.x % tile_rows;
    const float inverse = shared.inverse[k], diagonal = shared.h[k * wide + k];
    const float size = __fmul_rn(shared.own_inverse[row], inverse);
    float moved = 0.0f;
    for (unsigned next = 0; next < rows;) {
        const float now = __fadd_rn(in, __fmul_rn(moved, diagonal));
        /* a dead column gets what is nearest to its weight */
        const float value = inverse == 0.0f ? at.target : __fadd_rn(at.old, __fmul_rn(now, size));
        const int code = qc_form_code(table, form, tables, __fmul_rn(value, at.from_scale));
        const uint32_t found = those_that_differ(row >= next && row < rows && code != at.was);
        if (found == 0)
            break;
        const unsigned first = (unsigned)__ffs((int)found) - 1u;
        const float number = qc_form_number(table, tables, code);
        const float made = qc_form_made(table, form, number, at.scale);
        const float less = __shfl_sync(QC_ALL_LANES, __fadd_rn(at.old, -made), (int)first);
        if (row == first) {
            at.code = code;
            at.error = __fadd_rn(at.target, -made);
        }
        moved = __fadd_rn(moved, __fmul_rn(less, shared.own[first * tile_rows + row]));
        next = first + 1;
        changed++;
    }
    return moved;
}

/* Leaves E in shared.in. The first warp runs this. Returns the number of changed codes. */
template <bool table>
QC_DEVICE unsigned walk_tile(const qc_cuda_form &form, unsigned rows, unsigned cols,
                             outputs_shared &shared)
{
    const unsigned row = threadIdx.x % tile_rows, half = threadIdx.x / tile_rows;
    const qc_nf4_tables tables = qc_nf4_tables_of_lane(threadIdx.x);
    unsigned changed = 0;
    for (unsigned s = 0; s < cols; s += step) {
        float x[step], moved[step];
        const unsigned before = changed;
#pragma unroll
        for (unsigned i = 0; i < step; i++)
            x[i] = shared.in[(s + i) * row_stride + row];
#pragma unroll
        for (unsigned i = 0; i < step; i++) {
            const unsigned k = s + i, here = k * row_stride + row;
            place at;
            at.target = shared.target[here];
            at.scale = shared.scale[here];
            at.from_scale = shared.from_scale[here];
            at.was = at.code = shared.code[row * code_stride + k];
            at.old = qc_form_made(table, form, qc_form_number(table, tables, at.was), at.scale);
            at.error = __fadd_rn(at.target, -at.old);
            moved[i] = choose_column<table>(form, tables, shared, k, k < cols ? rows : 0, x[i], at,
                                            changed);
            __syncwarp(); /* both halves have read what is written here */
            if (half == 0) {
                shared.in[here] = at.error;
                shared.code[row * code_stride + k] = (int8_t)at.code;
            }
#pragma unroll
            for (unsigned j = i + 1; j < step; j++)
                x[j] = __fadd_rn(x[j], __fmul_rn(moved[i], shared.h[(s + j) * wide + k]));
        }
        if (changed == before)
            continue;
#pragma unroll 2
        for (unsigned j = s + step + half; j < panel; j += 2) {
            float *in = &shared.in[j * row_stride + row];
            *in = qc_form_feed(*in, moved, shared.h + j * wide + s);
        }
        __syncwarp(); /* each half reads what the other has written */
    }
    return changed;
}

/* ---- step 3 ---------------------------------------------------------------------------------- */

QC_DEVICE void store_tile(const qc_cuda_rows &p, const qc_cuda_rows_outputs &a, const unit &u,
                          uint64_t tile, const outputs_shared &shared)
{
    for (unsigned i = threadIdx.x; i < tile_rows * panel; i += threads) {
        const unsigned r = i / panel, k = i % panel;
        if (tile + r >= u.rows || k >= a.cols)
            continue;
        const uint64_t row = u.first + tile + r, at = row * p.n + a.col + k;
        const float error = shared.in[k * row_stride + r];
        a.less[row * panel + k] = __fadd_rn(error, -p.e[at]);
        p.e[at] = error;
        p.codes[at] = shared.code[r * code_stride + k];
    }
}

/* Says that nothing changes: for a block of G that is done. */
QC_DEVICE void rest_unit(const qc_cuda_rows_outputs &a, const unit &u)
{
    for (uint64_t i = threadIdx.x; i < u.rows * panel; i += threads)
        a.less[u.first * panel + i] = 0.0f;
}

template <bool table>
QC_DEVICE unsigned decide_tile(const qc_cuda_rows &p, const qc_cuda_rows_outputs &a, const unit &u,
                               uint64_t tile, outputs_shared &shared)
{
    const bool above = sum_above(a, u, tile, shared);
    load_gradients(a, u, tile, above, shared);
    load_tile(p, a, u, tile, shared);
    __syncthreads();
    if (threadIdx.x < 32) {
        const uint64_t left = u.rows - tile;
        const unsigned rows = left < tile_rows ? (unsigned)left : tile_rows;
        const unsigned changed = walk_tile<table>(p.form, rows, (unsigned)a.cols, shared);
        if (threadIdx.x == 0) {
            shared.changed = changed;
            if (changed)
                u.moved[tile / chunk] = 1;
        }
    }
    __syncthreads();
    const unsigned changed = shared.changed;
    store_tile(p, a, u, tile, shared);
    __syncthreads(); /* the next tile reads `less` and writes what is read here */
    return changed;
}

template <bool table>
__global__ void __launch_bounds__(threads, 1)
    decide_outputs(const qc_cuda_rows p, const qc_cuda_rows_outputs a)
{
    QC_SHARED(outputs_shared, shared);
    const uint64_t units = (p.rows + a.block - 1) / a.block;
    load_square(p, a, shared);
    for (uint64_t number = blockIdx.x; number < units; number += gridDim.x) {
        const unit u = unit_of(p, a, number);
        unsigned long long changed = 0;
        if (a.before[number] == 0) {
            rest_unit(a, u);
            continue;
        }
        for (uint64_t i = threadIdx.x; i * chunk < u.rows; i += threads)
            u.moved[i] = 0; /* the first tile has a barrier before anything reads it */
        for (uint64_t tile = 0; tile < u.rows; tile += tile_rows)
            changed += decide_tile<table>(p, a, u, tile, shared);
        if (threadIdx.x == 0)
            a.now[number] += changed;
    }
}

/* ---- G --------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(threads)
    prepare(float *g, uint64_t rows, uint64_t ld, float scale, float damping)
{
    for (uint64_t i = (uint64_t)blockIdx.x * threads + threadIdx.x; i < rows * rows;
         i += (uint64_t)gridDim.x * threads) {
        const uint64_t row = i / rows, col = i % rows;
        float *at = g + row * ld + col;
        *at = __fadd_rn(__fmul_rn(*at, scale), row == col ? damping : 0.0f);
    }
}

} // namespace

qc_status qc_cuda_outputs_prepare(float *g, uint64_t rows, uint64_t ld, float scale, float damping,
                                  qc_cuda_stream s, qc_error *err)
{
    if (rows == 0)
        return QC_OK;
    return qc_cuda_start("cuda_feedback moments of outputs", prepare,
                         dim3(qc_cuda_grid_x(rows * rows, threads)), dim3(threads), 0, s, err, g,
                         rows, ld, scale, damping);
}

qc_status qc_cuda_rows_sweep_outputs(const qc_cuda_rows *p, const qc_cuda_rows_outputs *a,
                                     qc_cuda_stream s, qc_error *err)
{
    const char *what = "cuda_feedback sweep of outputs";
    if (p->rows == 0 || a->cols == 0)
        return QC_OK;
    if (a->cols > panel)
        QC_FAIL(err, QC_ERR_USAGE, "a panel has more than %u columns", panel);
    void (*kernel)(qc_cuda_rows, qc_cuda_rows_outputs) =
        p->form.table ? decide_outputs<true> : decide_outputs<false>;
    QC_TRY(qc_cuda_keep_resident(kernel, sizeof(outputs_shared), 1, what, err));
    return qc_cuda_start(what, kernel, dim3(qc_cuda_grid_x(p->rows, a->block)), dim3(threads),
                         sizeof(outputs_shared), s, err, *p, *a);
}
