/* y = x W^T for up to 8 rows of x (sm_80 and newer). Weights are streamed past shared memory
 * straight into matrix fragments.
 *
 * A block of 16 warps makes a tile [8, n_tile] of y, where n_tile is 64 (32 for int8). Every warp
 * has all rows of the tile and its own part of K, in entries of 64 k (one block of scales):
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
 * Any k may stand at any place of a fragment as long as both operands agree. So a lane's own 16
 * codes are its part of four products, and 32 contiguous bytes of x are the other operand. The four
 * products of an entry are summed in the tensor core and leave it as float. There they are
 * multiplied by the scale of the row's block (matmul_codes.cuh), with one multiply-add per 8
 * weights and lane.
 *
 * BF16 x is turned into float16 in the registers: each row's 64 columns are multiplied by a power
 * of two of their own, which is divided out again where the scale is multiplied. That is exact for
 * elements of at least 2^-31 of the largest of the 64.
 *
 * Warps share nothing in the main loop, and there is no barrier in it. Codes, scales and x go from
 * memory to registers two entries ahead, which keeps 64 KB per multiprocessor on their way; x comes
 * from L1 or L2. Lane 8 r + g loads the scales of rows 16 r + g and 16 r + 8 + g, as the bytes of
 * four blocks at once where K % 256 == 0. It decodes them once for the warp, and shuffles bring
 * them to the lanes whose sums they belong to.
 *
 * The work is cut into equal ranges of blocks of 64 k, tile after tile. Each block of threads has
 * one range, and each multiprocessor one block of threads (persistent). Where a range ends within a
 * tile, the parts of the tile meet in the workspace: each block puts its sums there and counts
 * itself, and the last one to come adds all of them, in the order of ranges, not of arrival. Within
 * a block the 16 warps' sums meet in shared memory once per tile and are added in order. So sums
 * have one order, which the plan fixes.
 *
 * Several weights that share x form one list of tiles.
 *
 * The kernel takes K % 64 == 0, aligned codes, blocks of 64 or more and at least n_tile rows in
 * each weight. The last tile of a weight reaches back into rows of the tile before it, and does not
 * write them.
 *
 * A packed weight (matmul_packed.h) may have any number of rows, as the last tile has its whole
 * band. An entry is 2,048 bytes in a row there: four loads of 16 bytes a lane, at constant
 * distances from one address. A warp's entries in a tile lie behind each other. Where the codes of
 * scales are packed as well, a lane has those of its two rows and of four entries in one load of 8
 * bytes. Sums are those of the file's layout bit for bit. Cost and bound: docs/kernels.md. */
#include "base/checked.h"
#include "kernels/matmul_stream.cuh"

namespace
{

/* ---- a tile's end ---------------------------------------------------------------------------- */

/* Returns where block b of threads puts its part of a tile. */
QC_DEVICE float *partial_of(const args &a, uint32_t b, uint32_t tile, unsigned sums)
{
    unsigned further = tile != range_begin(a, b) / a.k_blocks;
    return a.partials + (2 * b + further) * sums;
}

/* Adds up a tile that several ranges share. All threads call it. Each block puts its part into the
 * workspace; the last one to come gets true, with the whole sum in *total.
 *
 * One thread's addition publishes the stores of all 512. In the PTX memory model a barrier
 * synchronizes the threads that take part. So a store of any of them precedes the barrier, the
 * barrier precedes the addition of thread 0, and therefore the store precedes that addition in
 * causality order, which is transitive (8.9 and 8.10 of the PTX ISA: base causality through
 * bar.sync and program order). The addition is a release at the scope of the device, and so it
 * publishes everything that precedes it, not only what its own thread wrote. The last block's
 * addition reads a value that goes back to every other one through additions that are releases and
 * acquires themselves, so it synchronizes with all of them. Its second barrier hands that on to the
 * threads that read. They read from L2 (ld.cg), because another block's stores do not reach a
 * multiprocessor's L1. */
template <kind of>
QC_DEVICE bool meet(float *total, uint32_t *shared_last, const args &a, uint32_t tile,
                    unsigned thread)
{
    constexpr unsigned sums = shape<of>::sums;
    uint32_t first = range_of(a, tile * a.k_blocks);
    uint32_t last = range_of(a, (tile + 1) * a.k_blocks - 1);
    if (thread < sums)
        partial_of(a, blockIdx.x, tile, sums)[thread] = *total;
    __syncthreads();
    if (thread == 0) {
        uint32_t *counter = a.counters + 1 + first;
        *shared_last = qc_add_acq_rel(counter, 1) == last - first;
        if (*shared_last)
            *counter = 0; /* this resets it for the next launch */
    }
    __syncthreads();
    if (!*shared_last)
        return false;
    if (thread < sums) {
        float v = __ldcg(partial_of(a, first, tile, sums) + thread);
        for (uint32_t b = first + 1; b <= last; b++)
            v = __fadd_rn(v, __ldcg(partial_of(a, b, tile, sums) + thread));
        *total = v;
    }
    return true;
}

/* Turns the sums of the warps into those of the segment at `begin`, and those of a whole tile into
 * y. All threads call it. It returns the segment's end. */
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
    if (whole && thread < sums && m < a.m &&
        (shape<of>::packed ? row < a.parts[s.which].w.rows : row >= s.own)) {
        float v = total;
        if (shape<of>::nf4) {
            v = __fmul_rn(v, qc_codes_factor(a.parts[s.which].w));
        } else {
            if (shape<of>::by_row)
                v = __fmul_rn(v,
                              __fmul_rn(__fmul_rn(a.parts[s.which].w.absmax[row], sh.how.power.a),
                                        sh.how.power.b));
            v = __fmul_rn(v, QC_INT8_STEP);
        }
        qc_finish(a.parts[s.which].out, m, row, v,
                  sh.how.exponent + (a.x_exponent ? a.x_exponent[m] : 0));
    }
    return s.end;
}

/* Makes ready for the segment at `at` and returns the warp's number of entries. *other tells
 * whether it belongs to another part than the segment before. */
template <kind of>
QC_DEVICE uint32_t begin(position &p, uint32_t at, uint32_t tile, const args &a, uint32_t range_end,
                         float (&sum)[shape<of>::a_tiles][4], unsigned warp, unsigned lane,
                         bool *other)
{
    segment s = segment_at<of>(a, tile, at, range_end, warp);
    *other = p.which != s.which;
    __syncwarp();
    if (lane == 0) {
        p.at = at;
        p.tile = tile;
        p.which = s.which;
    }
    __syncwarp();
    zero_sums<of>(sum);
    return s.count;
}

/* Holds what the scales of a part are decoded with. load_part loads it into registers of each
 * thread, and use_part puts it into shared memory and leaves the barrier to the caller. */
struct part_scales {
    float map;    /* element `thread` */
    int exponent; /* in thread 0 only */
};

QC_DEVICE part_scales load_part(const part &w, unsigned thread)
{
    part_scales v = {0.0f, 0};
    if (!w.w.absmax && thread < 256)
        v.map = w.w.nested_map[thread];
    if (thread == 0 && w.w.exponent)
        v.exponent = *w.w.exponent;
    return v;
}

template <kind of>
QC_DEVICE void use_part(shared_of<of> &sh, const part &w, const part_scales &v, unsigned thread)
{
    if (!w.w.absmax && thread < 256)
        sh.small.map[thread] = v.map;
    if (thread == 0) {
        sh.how.offset = w.w.nested_offset;
        sh.how.exponent = v.exponent;
        sh.how.power = qc_run_power_of(v.exponent);
    }
}

QC_DEVICE void report(const args &a, uint32_t fault)
{
    if (threadIdx.x == 0 && a.fault) {
        qc_st_system(a.fault, fault);
        __threadfence_system();
    }
}

/* Whatever follows from parameters alone is done before the wait, so that next to nothing is left
 * between the wait and the first loads. Weights that are complete are loaded before the wait. */
template <kind of, bool fixed, bool bf16>
static __global__ void __launch_bounds__(THREADS, 1) matmul_stream(const args a)
{
    QC_SHARED(shared_of<of>, sh);
    unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned char *table_at = reinterpret_cast<unsigned char *>(&sh + 1);
    if (fixed)
        table_at += (0u - qc_shared_address(table_at)) & (QC_CODES_FIXED - 1);

    qc_grid_release();
    if (fixed && qc_shared_address(table_at) != QC_CODES_FIXED) {
        /* More than 30 KB lie in front of the block's own memory, so the table would reach beyond
         * it. The host cannot know where shared memory begins. */
        qc_grid_wait();
        report(a, QC_MATMUL_FAULT_SHARED);
        return;
    }
    qc_codes_wide *table = reinterpret_cast<qc_codes_wide *>(table_at);
    lookup l = {table, shape<of>::nf4 ? qc_shared_address(table) + 4 * lane : 0, lane};
    bool from_memory = a.parts[0].w.code_map != nullptr;
    bool nested = !a.parts[0].w.absmax;
    if (shape<of>::nf4 && !from_memory) { /* the codes are constants */
        qc_run_fill_codes(sh.small, a.parts[0].w, thread);
        __syncthreads();
        qc_codes_fill(*table, sh.small, a.parts[0].w, thread, THREADS);
    }
    uint32_t at = range_begin(a, blockIdx.x), end = range_begin(a, blockIdx.x + 1);
    position &p = sh.positions[warp];
    if (lane == 0) {
        p.next = at;
        p.ahead = at / a.k_blocks;
        p.which = UINT32_MAX;
    }
    __syncwarp();
    cursor c;
    entry<of> even, odd;
#pragma unroll
    for (int i = 0; i < 8; i++)
        even.x[i] = odd.x[i] = 0;
    seek<of>(c, p, a, end, warp, lane);
    float sum[shape<of>::a_tiles][4];
    bool other;
    uint32_t left = begin<of>(p, at, at / a.k_blocks, a, end, sum, warp, lane, &other);
    uint32_t which = p.which, ready = QC_MATMUL_READY;

    if (!a.complete) {
        qc_grid_wait();
        if (a.counters && thread == 0)
            ready = *a.counters;
    }
    part_scales scales = load_part(a.parts[which], thread);
    /* The cursor goes on, so the places of x for the first two entries are kept here. */
    bool is_even = c.at != c.end && lane / 4 < a.m;
    const uint16_t *x_even = c.x;
    load<of, false>(even, c, p, a, end, warp, lane);
    bool is_odd = c.at != c.end && lane / 4 < a.m;
    const uint16_t *x_odd = c.x;
    load<of, false>(odd, c, p, a, end, warp, lane);
    if (a.complete) {
        prefetch<of>(c, a, lane);
        qc_grid_wait();
        if (a.counters && thread == 0)
            ready = *a.counters;
    }
    load_x<of>(even, x_even, is_even);
    load_x<of>(odd, x_odd, is_odd);
    if (shape<of>::nf4 && from_memory) {
        qc_run_fill_codes(sh.small, a.parts[0].w, thread);
        __syncthreads();
        qc_codes_fill(*table, sh.small, a.parts[0].w, thread, THREADS);
    }
    use_part<of>(sh, a.parts[which], scales, thread);
    if (thread == 0)
        sh.ready = ready == QC_MATMUL_READY;
    __syncthreads();
    if (!sh.ready) { /* else the sums would never meet */
        report(a, QC_MATMUL_FAULT_WORKSPACE);
        return;
    }
    for (unsigned turn = 0;; turn ^= 1) {
        while (left == 0) {
            uint32_t tile = p.tile, from = finish<of>(sh, a, tile, p.at, end, sum, warp, lane);
            if (from == end)
                return;
            __syncthreads();
            left = begin<of>(p, from, tile + 1, a, end, sum, warp, lane, &other);
            if (other) {
                const part &w = a.parts[p.which];
                use_part<of>(sh, w, load_part(w, thread), thread);
                __syncthreads();
            }
        }
        left--;
        if (turn == 0) {
            multiply<of, fixed, bf16>(sum, even, sh, l, nested);
            load<of>(even, c, p, a, end, warp, lane);
        } else {
            multiply<of, fixed, bf16>(sum, odd, sh, l, nested);
            load<of>(odd, c, p, a, end, warp, lane);
        }
    }
}

template <kind of, bool fixed, bool bf16>
qc_status start_dtype(const args &a, const qc_matmul_plan *p, qc_cuda_stream s, qc_error *err)
{
    auto kernel = matmul_stream<of, fixed, bf16>;
    QC_TRY(qc_cuda_allow_shared(kernel, p->shared_bytes, "matmul_stream", err));
    return qc_cuda_launch_overlapping(kernel, dim3(p->blocks), dim3(THREADS), p->shared_bytes, s,
                                      p->overlaps, "matmul_stream", err, a);
}

template <kind of, bool fixed>
qc_status start_layout(const args &a, const qc_matmul_call *c, qc_cuda_stream s, qc_error *err)
{
    return c->x_dtype == QC_DTYPE_BF16 ? start_dtype<of, fixed, true>(a, &c->plan, s, err)
                                       : start_dtype<of, fixed, false>(a, &c->plan, s, err);
}

template <kind of, bool fixed>
qc_status start(const args &a, const qc_matmul_call *c, qc_cuda_stream s, qc_error *err)
{
    if (!c->weights.packed)
        return start_layout<of, fixed>(a, c, s, err);
    if constexpr (!shape<of>::by_row)
        if (qc_packed_has_scales(&c->weights.w))
            return start_layout<kind(of | PACKED_SCALES), fixed>(a, c, s, err);
    return start_layout<kind(of | PACKED), fixed>(a, c, s, err);
}

/* The shared memory of a block for NF4: SHARED_FIXED where the device allows that much, else
 * SHARED_NEAR. */
#define SHARED_FIXED (2 * QC_CODES_FIXED)
#define SHARED_NEAR  ((uint32_t)(sizeof(shared_of<NF4>) + sizeof(qc_codes_wide)))
static_assert(sizeof(shared_of<NF4>) + 8192 < QC_CODES_FIXED, "all else lies below the table");

uint32_t tile_of(qc_form_kind k)
{
    return k == QC_FORM_NF4 ? shape<NF4>::n_tile : shape<INT8_ROWS>::n_tile;
}

uint32_t shared_bytes_of(qc_form_kind k, const qc_cuda_device *d)
{
    if (k != QC_FORM_NF4)
        return (uint32_t)sizeof(shared_of<INT8_ROWS>);
    return d->shared_block_bytes >= SHARED_FIXED ? SHARED_FIXED : SHARED_NEAR;
}

/* Ranges start at multiples of this many blocks of 64 k: one for each warp, where rows allow
 * that. */
uint32_t grain_of(uint64_t k_blocks)
{
    return k_blocks % WARPS == 0 ? WARPS : 1;
}

} // namespace

extern "C" int qc_stream_takes(const qc_cuda_device *d, const qc_matmul_shape *s,
                               const qc_matmul_plan *p)
{
    uint32_t n_tile = tile_of(s->kind), least = s->packed ? 1 : n_tile; /* rows of a weight */
    if (d->sm < 80 || s->m > M_TILE || !p->aligned || !qc_matmul_by_64(s) || s->k >= 1u << 28 ||
        d->shared_block_bytes < shared_bytes_of(s->kind, d))
        return 0;
    if (s->kind != QC_FORM_INT8_ROWS && s->block_elems < ENTRY_K)
        return 0;
    if (qc_sat_mul(qc_matmul_tiles(s, n_tile) * n_tile, s->k / ENTRY_K) > UINT32_MAX)
        return 0;
    for (uint32_t i = 0; i < s->parts; i++)
        if (s->part_n[i] < least)
            return 0;
    return s->n >= least;
}

/* Decides whether a block of threads has whole tiles or a range that may end anywhere. It takes
 * what costs less, counted in grains of the fullest block. A meeting of ranges (sums through L2,
 * and a wait for the last) is put at one grain of 16 blocks: 65,536 weights, or 1.1 us of an H200's
 * bandwidth. This was not measured. */
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
    qc_form_kind k = c->weights.w.form.ops->kind;
    args a = {};
    a.count = count;
    a.m = (uint32_t)c->m;
    a.k_blocks = (uint32_t)(c->k / ENTRY_K);
    a.row_blocks = (uint32_t)(c->weights.w.form.cols / ENTRY_K);
    a.row_bytes8 = a.row_blocks * (k == QC_FORM_NF4 ? 256u : 512u);
    a.scales_by_four = a.row_blocks % 4 == 0;
    a.complete = 1;
    for (uint32_t i = 0; i < count; i++) {
        const qc_weights *w = &c[i].weights.w;
        part *to = &a.parts[i];
        to->w = qc_run_source_there(&c[i].weights);
        if (c->weights.packed && w->absmax) { /* load_packed_scales looks there */
            to->w.nested_absmax = w->absmax;
            to->w.nested_shift = 0;
        }
        to->block_first = (uint32_t)(to->w.first / ENTRY_K);
        to->first_tile = a.tiles;
        to->out = c[i].out;
        a.complete = a.complete && c[i].weights.complete == QC_MATMUL_WEIGHTS_COMPLETE;
        a.tiles += (uint32_t)((c[i].n + p->n_tile - 1) / p->n_tile);
        if (w->form.block_elems != ENTRY_K || w->absmax || w->nested_block < 4 ||
            to->block_first % 4 != 0 || reinterpret_cast<uintptr_t>(w->absmax_codes) % 4)
            a.scales_by_four = 0;
    }
    /* With whole tiles only, a range's bounds are those of tiles. */
    a.grain = p->meets ? grain_of(a.k_blocks) : a.k_blocks;
    a.x = static_cast<const uint16_t *>(c->x);
    a.ldx = c->ldx;
    a.x_exponent = c->x_exponent;
    a.counters = p->meets ? c->counters : nullptr;
    a.partials = c->partials;
    a.fault = c->fault;
    if (k == QC_FORM_INT8_ROWS)
        return start<INT8_ROWS, false>(a, c, s, err);
    if (k == QC_FORM_INT8_BLOCKS)
        return start<INT8_BLOCKS, false>(a, c, s, err);
    return p->shared_bytes == SHARED_FIXED ? start<NF4, true>(a, c, s, err)
                                           : start<NF4, false>(a, c, s, err);
}
