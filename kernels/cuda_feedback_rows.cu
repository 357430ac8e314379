/* The contracts are in cuda_feedback_internal.h.
 *
 * A panel: a thread block keeps 32 rows, and up to 64 columns of them, in shared memory. They lie
 * column by column, with a column every 33 floats. The four warps of the block copy them in and out
 * a row at a time (128 bytes a warp), and the first warp walks over the columns, with lane l in row
 * l. Neither of them meets a bank twice. Columns go by eights: a lane has eight in registers,
 * decides them one after the other, and then feeds all eight into each later column, so that such a
 * column is loaded and stored once for eight products. The eight numbers of U (or H) that this
 * takes lie side by side (two 128-bit loads, the same for all lanes). A column gets its products in
 * the order of quant/error_feedback_lanes_body.h, and nothing is fused, so the bits are the same.
 *
 * The work is 2016 multiplications and additions per row and panel, about 7,000 instructions of one
 * warp (calculated) with what is around them. It takes 53 KB of shared memory, so that an sm_75 has
 * one block on a multiprocessor and an sm_90 four. 8,192 rows are 256 blocks. Compared with the
 * panel's products (2 * rows * n * 64 multiply-adds), a panel of n = 8192 is 1/250 of the
 * arithmetic.
 *
 * All threads of a block reach its barriers, since nothing returns before them. Whole warps make
 * the warp-wide calls (shuffles). */
#include "kernels/cuda_feedback_form.cuh"

namespace
{

constexpr unsigned threads_per_block = 256;
constexpr unsigned warps_per_block = threads_per_block / 32;
constexpr unsigned panel_threads = 128;
constexpr unsigned panel_blocks = 4; /* per multiprocessor */
constexpr unsigned tile_rows = 32;
constexpr unsigned panel = QC_CUDA_PANEL;
constexpr unsigned row_stride = tile_rows + 1;
constexpr unsigned u_stride = panel + 4;
constexpr unsigned code_stride = panel + 4;
constexpr unsigned step = 8; /* columns that a lane keeps in registers */

/* u comes first because its rows are read 16 bytes at a time. */
struct panel_shared {
    float u[panel * u_stride]; /* [j][k]: of column k for a later column j; 0 elsewhere */
    float in[panel * row_stride];
    float target[panel * row_stride];
    float scale[panel * row_stride];
    float from_scale[panel * row_stride]; /* from_absmax */
    float inverse[panel];
    int8_t code[tile_rows * code_stride];
};

QC_DEVICE uint64_t scale_index(const qc_cuda_rows &p, uint64_t row, uint64_t col)
{
    return p.form.by_rows ? row : (row * p.n + col) >> p.shift;
}

/* ---- a panel --------------------------------------------------------------------------------- */

template <bool sweeping>
QC_DEVICE void load_panel(const qc_cuda_rows &p, const qc_cuda_rows_panel &a, uint64_t first,
                          panel_shared &shared)
{
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < panel * panel; i += panel_threads) {
        unsigned row = i / panel, other = i % panel; /* a row and a column of hu */
        unsigned k = sweeping ? row : other, j = sweeping ? other : row;
        float u = 0.0f;
        if (k < j && j < a.cols)
            u = p.hu[(a.col + row) * p.n + a.col + other];
        shared.u[j * u_stride + k] = u;
    }
    if (threadIdx.x < panel)
        shared.inverse[threadIdx.x] =
            sweeping && threadIdx.x < a.cols ? p.inverse[a.col + threadIdx.x] : 0.0f;
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < tile_rows * panel; i += panel_threads) {
        unsigned r = i / panel, k = i % panel;
        uint64_t row = first + r;
        float in = 0.0f, target = 0.0f, scale = 0.0f, from_scale = 0.0f;
        int8_t code = 0;
        if (row < p.rows && k < a.cols) {
            uint64_t column = sweeping ? a.col + k : p.order[a.col + k];
            target = p.target[row * p.n + column];
            uint64_t index = scale_index(p, row, column);
            scale = p.absmax[index];
            from_scale = p.from_absmax[index];
            if (sweeping) {
                in = a.g[row * a.ldg + k];
                code = p.codes[row * p.n + column];
            } else {
                in = a.g ? __fadd_rn(target, a.g[row * a.ldg + k]) : target;
            }
        }
        shared.in[k * row_stride + r] = in;
        shared.target[k * row_stride + r] = target;
        shared.scale[k * row_stride + r] = scale;
        shared.from_scale[k * row_stride + r] = from_scale;
        if (sweeping)
            shared.code[r * code_stride + k] = code;
    }
}

/* Leaves the errors in `in`. Columns from a.cols on have a scale of 0 and feed nothing. */
template <bool table, bool sweeping>
QC_DEVICE unsigned walk_panel(const qc_cuda_form &form, unsigned cols, unsigned lane,
                              panel_shared &shared)
{
    qc_nf4_tables tables = qc_nf4_tables_of_lane(lane);
    unsigned changed = 0;
    for (unsigned s = 0; s < cols; s += step) {
        float x[step], fed[step], scale[step], inverse[step];
#pragma unroll
        for (unsigned i = 0; i < step; i++) {
            x[i] = shared.in[(s + i) * row_stride + lane];
            scale[i] = shared.scale[(s + i) * row_stride + lane];
            inverse[i] = shared.from_scale[(s + i) * row_stride + lane];
        }
#pragma unroll
        for (unsigned i = 0; i < step; i++) {
            float target = shared.target[(s + i) * row_stride + lane], place = x[i], old = 0.0f;
            int was = 0;
            if (sweeping) {
                was = shared.code[lane * code_stride + s + i];
                old = qc_form_made(table, form, qc_form_number(table, tables, was), scale[i]);
                float own = shared.inverse[s + i];
                /* a dead column gets what is nearest to its weight */
                place = own == 0.0f ? target : __fadd_rn(old, __fmul_rn(place, own));
            }
            int code = qc_form_code(table, form, tables, __fmul_rn(place, inverse[i]));
            float number = qc_form_number(table, tables, code);
            float value = qc_form_made(table, form, number, scale[i]);
            float error = __fadd_rn(target, -value);
            fed[i] = sweeping ? __fadd_rn(old, -value) : error;
            if (sweeping)
                changed += s + i < cols && code != was;
            shared.in[(s + i) * row_stride + lane] = error;
            shared.code[lane * code_stride + s + i] = (int8_t)code;
#pragma unroll
            for (unsigned j = i + 1; j < step; j++)
                x[j] = __fadd_rn(x[j], __fmul_rn(fed[i], shared.u[(s + j) * u_stride + s + i]));
        }
#pragma unroll 4
        for (unsigned j = s + step; j < panel; j++) {
            float *in = &shared.in[j * row_stride + lane];
            *in = qc_form_feed(*in, fed, shared.u + j * u_stride + s);
        }
    }
    return changed;
}

template <bool sweeping>
QC_DEVICE void store_panel(const qc_cuda_rows &p, const qc_cuda_rows_panel &a, uint64_t first,
                           const panel_shared &shared)
{
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < tile_rows * panel; i += panel_threads) {
        unsigned r = i / panel, k = i % panel;
        uint64_t row = first + r;
        if (row >= p.rows || k >= a.cols)
            continue;
        uint64_t at = row * p.n + (sweeping ? a.col + k : p.order[a.col + k]);
        float error = shared.in[k * row_stride + r];
        if (sweeping) {
            if (a.less) {
                float *less = a.less + row * panel + k;
                *less = __fadd_rn(error, -(a.before ? *less : p.e[at]));
            }
        } else {
            a.by_place[row * p.n + a.col + k] = error;
        }
        p.e[at] = error;
        p.codes[at] = shared.code[r * code_stride + k];
    }
}

/* Without panel_blocks, ptxas keeps to 64 registers and spills one. */
template <bool table, bool sweeping>
__global__ void __launch_bounds__(panel_threads, panel_blocks)
    decide_panel(const qc_cuda_rows p, const qc_cuda_rows_panel a)
{
    QC_SHARED(panel_shared, shared);
    const uint64_t tiles = (p.rows + tile_rows - 1) / tile_rows;
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        load_panel<sweeping>(p, a, tile * tile_rows, shared);
        __syncthreads();
        if (threadIdx.x < 32) {
            unsigned changed =
                walk_panel<table, sweeping>(p.form, (unsigned)a.cols, threadIdx.x, shared);
            if (sweeping) {
                /* rows that do not exist are zero and stay so, but an NF4 code's 0 is 7 */
                if (tile * tile_rows + threadIdx.x >= p.rows)
                    changed = 0;
#pragma unroll
                for (int mask = 16; mask > 0; mask /= 2)
                    changed += __shfl_xor_sync(QC_ALL_LANES, changed, mask);
                if (threadIdx.x == 0 && changed)
                    atomicAdd(p.changed, (unsigned long long)changed);
            }
        }
        __syncthreads();
        /* After this a thread loads only what it stored here itself, and u, which nobody reads any
         * more. */
        store_panel<sweeping>(p, a, tile * tile_rows, shared);
    }
}

/* ---- one element a thread -------------------------------------------------------------------- */

QC_DEVICE uint64_t thread_index()
{
    return (uint64_t)blockIdx.x * threads_per_block + threadIdx.x;
}

QC_DEVICE uint64_t threads_of_grid()
{
    return (uint64_t)gridDim.x * threads_per_block;
}

__global__ void __launch_bounds__(threads_per_block)
    cast(const void *src, qc_dtype dtype, uint64_t elems, float *out, uint64_t *bad)
{
    for (uint64_t i = thread_index(); i < elems; i += threads_of_grid()) {
        float x = qc_search_element(src, dtype, i);
        if (qc_magnitude(x) >= QC_CUDA_F32_INF)
            qc_bad_at(bad, i);
        out[i] = x;
    }
}

/* This is apart from the panels: amid their loads, a division's slow path costs ptxas registers and
 * makes it spill. */
__global__ void __launch_bounds__(threads_per_block) invert(const qc_cuda_rows p, uint64_t scales)
{
    for (uint64_t i = thread_index(); i < scales; i += threads_of_grid())
        p.from_absmax[i] = qc_form_inverse(p.form, p.absmax[i]);
}

/* Warps go on together, because all lanes take part in looking codes up. */
__global__ void __launch_bounds__(threads_per_block)
    round_rows(const qc_cuda_rows p, const float *w)
{
    const qc_nf4_tables tables = qc_nf4_tables_of_lane(threadIdx.x % 32);
    const uint64_t elems = p.rows * p.n;
    for (uint64_t at = thread_index() / 32 * 32; at < elems; at += threads_of_grid()) {
        uint64_t i = at + threadIdx.x % 32;
        bool inside = i < elems;
        float x = 0.0f, scale = 0.0f, from_scale = 0.0f;
        if (inside) {
            uint64_t index = p.form.by_rows ? i / p.n : i >> p.shift;
            x = w[i];
            scale = p.absmax[index];
            from_scale = p.from_absmax[index];
        }
        float number = qc_form_nearest(p.form.table, p.form, tables, __fmul_rn(x, from_scale));
        float value = qc_form_made(p.form.table, p.form, number, scale);
        if (inside)
            p.e[i] = __fadd_rn(p.target[i], -value);
    }
}

__global__ void __launch_bounds__(threads_per_block)
    square(const float *hu, uint64_t n, uint64_t col, uint64_t cols, float *out)
{
    for (uint64_t i = thread_index(); i < cols * cols; i += threads_of_grid()) {
        uint64_t j = i / cols, k = i % cols, low = j < k ? j : k, high = j < k ? k : j;
        out[i] = hu[(col + low) * n + col + high];
    }
}

__global__ void __launch_bounds__(threads_per_block)
    units_of(const qc_cuda_rows p, uint64_t col, uint64_t cols, float *units, uint64_t ldu)
{
    const qc_nf4_tables tables = qc_nf4_tables_of_lane(threadIdx.x % 32);
    const uint64_t elems = p.rows * cols;
    for (uint64_t at = thread_index() / 32 * 32; at < elems; at += threads_of_grid()) {
        uint64_t i = at + threadIdx.x % 32, row = i / cols, k = i % cols;
        int code = i < elems ? p.codes[row * p.n + col + k] : 0;
        float unit = qc_form_unit(p.form, qc_form_number(p.form.table, tables, code));
        if (i < elems)
            units[row * ldu + k] = unit;
    }
}

/* Says how the codes of a row are stored. */
struct storing {
    unsigned bits;
    bool low_first;
    int add;  /* to a code as it is kept here */
    int fill; /* what comes after the last one */
    uint64_t cols, row_bytes;
};

/* Returns code k of the row, as it is stored. */
QC_DEVICE unsigned stored_code(const storing &how, const int8_t *codes, uint64_t k)
{
    return (k < how.cols ? (unsigned)(codes[k] + how.add) : (unsigned)how.fill) &
           ((1u << how.bits) - 1);
}

/* A thread has a byte, in which one code or several lie, the first and the last perhaps in part. */
__global__ void __launch_bounds__(threads_per_block)
    pack(const storing how, const int8_t *codes, uint64_t bytes, uint8_t *out)
{
    for (uint64_t i = thread_index(); i < bytes; i += threads_of_grid()) {
        const uint64_t row = i / how.row_bytes, bit = i % how.row_bytes * 8;
        const int8_t *from = codes + row * how.cols;
        uint64_t k = bit / how.bits;
        const unsigned cut = (unsigned)(bit - k * how.bits);
        unsigned byte = stored_code(how, from, k) >> cut;
        for (unsigned have = how.bits - cut; have < 8; have += how.bits)
            byte |= stored_code(how, from, ++k) << have;
        out[i] = (uint8_t)(how.low_first ? byte : byte << 4 | (byte >> 4 & 15u));
    }
}

/* ---- one row a warp -------------------------------------------------------------------------- */

QC_DEVICE double sum_of_warp(double v)
{
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
        v = v + __shfl_xor_sync(QC_ALL_LANES, v, mask);
    return v;
}

__global__ void __launch_bounds__(threads_per_block)
    dot(const float *a, uint64_t lda, const float *b, uint64_t ldb, uint64_t rows, uint64_t cols,
        double *sums)
{
    const unsigned lane = threadIdx.x % 32;
    uint64_t row = (uint64_t)blockIdx.x * warps_per_block + threadIdx.x / 32;
    for (; row < rows; row += (uint64_t)gridDim.x * warps_per_block) {
        double sum = 0.0;
        for (uint64_t k = lane; k < cols; k += 32)
            sum += (double)a[row * lda + k] * (double)b[row * ldb + k];
        sum = sum_of_warp(sum);
        if (lane == 0)
            sums[row] += sum;
    }
}

/* Does what possible_scale of quant/error_feedback_rows.c does. */
QC_DEVICE float possible_scale(const qc_cuda_rows &p, uint64_t index, float wish, unsigned *code)
{
    float scale = qc_form_scale(p.form, wish);
    if (p.absmax_codes) {
        float group = p.nested_absmax[index / 256];
        float place = __fdiv_rn(__fadd_rn(wish, -p.offset), group);
        unsigned low = 0, high = 255;
        if (!(group > 0.0f) || qc_magnitude(place) >= QC_CUDA_F32_INF)
            return 0.0f;
        while (low < high) {
            unsigned middle = (low + high) / 2;
            if (p.map[middle] < place)
                low = middle + 1;
            else
                high = middle;
        }
        if (low > 0 && __fadd_rn(place, -p.map[low - 1]) <= __fadd_rn(p.map[low], -place))
            low--;
        *code = low;
        scale = __fadd_rn(__fmul_rn(p.map[low], group), p.offset);
    }
    if (qc_magnitude(scale) >= QC_CUDA_F32_INF || (!p.form.signed_scales && scale < 0.0f))
        return 0.0f;
    return qc_form_inverse(p.form, scale) == 0.0f ? 0.0f : scale;
}

/* All lanes of a warp have the same row, so they come to the same scale. */
__global__ void __launch_bounds__(threads_per_block)
    refit(const qc_cuda_rows p, const qc_cuda_rows_refit_args a)
{
    const unsigned lane = threadIdx.x % 32;
    uint64_t row = (uint64_t)blockIdx.x * warps_per_block + threadIdx.x / 32;
    for (; row < p.rows; row += (uint64_t)gridDim.x * warps_per_block) {
        const float *units = a.units + row * a.ldu, *v = a.v + row * a.ldv;
        float *g = a.g + row * a.ldg, *e = p.e + row * p.n + a.col;
        const uint64_t index = scale_index(p, row, a.col);
        double ug = 0.0, uu = 0.0;
        for (uint64_t k = lane; k < a.width; k += 32) {
            ug += (double)units[k] * (double)g[k];
            uu += (double)units[k] * (double)v[k];
        }
        ug = sum_of_warp(ug);
        uu = sum_of_warp(uu);
        if (!a.first) {
            ug += a.sums[2 * row];
            uu += a.sums[2 * row + 1];
        }
        __syncwarp(); /* sums and the scale are read before they are written */
        if (!a.last) {
            if (lane == 0) {
                a.sums[2 * row] = ug;
                a.sums[2 * row + 1] = uu;
            }
            continue;
        }
        const float scale = p.absmax[index];
        float better = 0.0f;
        double more = 0.0;
        unsigned code = 0;
        if (uu > 0.0) {
            better = possible_scale(p, index, (float)((double)scale + ug / uu), &code);
            more = (double)better - (double)scale;
            if (better != 0.0f && !(more * (more * uu - 2.0 * ug) < 0.0))
                better = 0.0f;
        }
        __syncwarp();
        if (a.before)
            for (uint64_t k = lane; k < a.cols; k += 32)
                a.before[row * panel + k] = e[k];
        if (better == 0.0f)
            continue;
        if (lane == 0) {
            p.absmax[index] = better;
            p.from_absmax[index] = qc_form_inverse(p.form, better);
            if (p.absmax_codes)
                p.absmax_codes[index] = (uint8_t)code;
            atomicAdd(p.changed, 1ull);
        }
        /* The tables are made here because there are no registers to keep them over the divisions
         * above. */
        const qc_nf4_tables tables = qc_nf4_tables_of_lane(lane);
        for (uint64_t at = 0; at < a.cols; at += 32) {
            uint64_t k = at + lane, i = row * p.n + a.col + k;
            bool inside = k < a.cols;
            float number = qc_form_number(p.form.table, tables, inside ? p.codes[i] : 0);
            float value = qc_form_made(p.form.table, p.form, number, better);
            if (inside)
                e[k] = __fadd_rn(p.target[i], -value);
        }
        if (a.width == a.cols)
            for (uint64_t k = lane; k < a.cols; k += 32)
                g[k] = __fadd_rn(g[k], -__fmul_rn((float)more, v[k]));
    }
}

/* Starts a kernel whose thread blocks take `each` of so many items. */
template <typename... P, typename... A>
qc_status start(const char *what, void (*kernel)(P...), uint64_t items, uint64_t each,
                qc_cuda_stream s, qc_error *err, A... args)
{
    if (items == 0)
        return QC_OK;
    return qc_cuda_start(what, kernel, dim3(qc_cuda_grid_x(items, each)), dim3(threads_per_block),
                         0, s, err, args...);
}

template <bool sweeping>
qc_status decide(const qc_cuda_rows *p, const qc_cuda_rows_panel *a, qc_cuda_stream s,
                 const char *what, qc_error *err)
{
    if (p->rows == 0 || a->cols == 0)
        return QC_OK;
    if (a->cols > panel)
        QC_FAIL(err, QC_ERR_USAGE, "a panel has more than %u columns", panel);
    void (*kernel)(qc_cuda_rows, qc_cuda_rows_panel) =
        p->form.table ? decide_panel<true, sweeping> : decide_panel<false, sweeping>;
    QC_TRY(qc_cuda_keep_resident(kernel, sizeof(panel_shared), panel_blocks, what, err));
    return qc_cuda_start(what, kernel, dim3(qc_cuda_grid_x(p->rows, tile_rows)),
                         dim3(panel_threads), sizeof(panel_shared), s, err, *p, *a);
}

} // namespace

qc_status qc_cuda_rows_cast(const void *src, qc_dtype dtype, uint64_t elems, float *out,
                            uint64_t *bad, qc_cuda_stream s, qc_error *err)
{
    return start("cuda_feedback cast", cast, elems, threads_per_block, s, err, src, dtype, elems,
                 out, bad);
}

qc_status qc_cuda_rows_invert(const qc_cuda_rows *p, uint64_t scales, qc_cuda_stream s,
                              qc_error *err)
{
    return start("cuda_feedback invert", invert, scales, threads_per_block, s, err, *p, scales);
}

qc_status qc_cuda_rows_round(const qc_cuda_rows *p, const float *w, qc_cuda_stream s, qc_error *err)
{
    return start("cuda_feedback round", round_rows, p->rows * p->n, threads_per_block, s, err, *p,
                 w);
}

qc_status qc_cuda_rows_square(const float *hu, uint64_t n, uint64_t col, uint64_t cols, float *out,
                              qc_cuda_stream s, qc_error *err)
{
    return start("cuda_feedback square", square, cols * cols, threads_per_block, s, err, hu, n, col,
                 cols, out);
}

qc_status qc_cuda_rows_dot(const qc_cuda_strip *a, const qc_cuda_strip *b, uint64_t rows,
                           uint64_t cols, double *sums, qc_cuda_stream s, qc_error *err)
{
    return start("cuda_feedback dot", dot, rows, warps_per_block, s, err, a->at, a->ld, b->at,
                 b->ld, rows, cols, sums);
}

qc_status qc_cuda_rows_feed(const qc_cuda_rows *p, const qc_cuda_rows_panel *a, qc_cuda_stream s,
                            qc_error *err)
{
    return decide<false>(p, a, s, "cuda_feedback feed", err);
}

qc_status qc_cuda_rows_sweep(const qc_cuda_rows *p, const qc_cuda_rows_panel *a, qc_cuda_stream s,
                             qc_error *err)
{
    return decide<true>(p, a, s, "cuda_feedback sweep", err);
}

qc_status qc_cuda_rows_units(const qc_cuda_rows *p, uint64_t col, uint64_t cols, float *units,
                             uint64_t ldu, qc_cuda_stream s, qc_error *err)
{
    return start("cuda_feedback units", units_of, p->rows * cols, threads_per_block, s, err, *p,
                 col, cols, units, ldu);
}

qc_status qc_cuda_rows_refit(const qc_cuda_rows *p, const qc_cuda_rows_refit_args *a,
                             qc_cuda_stream s, qc_error *err)
{
    return start("cuda_feedback refit", refit, p->rows, warps_per_block, s, err, *p, *a);
}

qc_status qc_cuda_rows_pack(const qc_form *form, const int8_t *codes, uint64_t elems, uint8_t *out,
                            qc_cuda_stream s, qc_error *err)
{
    const qc_form_ops *ops = form->ops;
    const bool table = qc_form_is_table(ops), gaps = qc_form_has_gaps(form);
    const uint64_t bytes = qc_form_code_bytes(form, elems);
    const storing how = {ops->bits,
                         ops->low_first || ops->bits == 8,
                         table ? 0 : ops->zero,
                         ops->words ? 0 : ops->zero,
                         gaps ? form->cols : elems,
                         gaps ? qc_form_row_bytes(form) : bytes};
    return start("cuda_feedback pack", pack, bytes, threads_per_block, s, err, how, codes, bytes,
                 out);
}
