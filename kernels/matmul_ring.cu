/* y = x W^T for up to 8 rows of x (sm_80 and newer). Codes and scales go through a ring in shared
 * memory that each warp has of its own.
 *
 * A warp multiplies entries of 16 rows of W and 256 k (128 of int8): 2 KB of codes, which are whole
 * lines of memory where rows begin on such. Lane 4 g + t copies, and later reads, 64 bytes of an
 * entry; no other lane needs them:
 *
 *                     window 0: 64 bytes of a row        window 1: the next 64
 *     row g        |t = 0: 16 bytes|t = 1|t = 2|t = 3| |t = 0|t = 1|t = 2|t = 3|
 *     row g + 8    |                                 | |                       |
 *
 * Any k may stand at any place of a fragment of mma.m16n8k16 as long as both operands agree. So a
 * lane's 32 codes of a row and window (16 of int8) are its part of eight products (four), and the
 * lanes t = 0 .. 3 have codes of different blocks of scales in the same product. To keep their sums
 * apart, x stands in several of the 8 columns of the product: column c has row c / blocks of x, and
 * zeros where lane t has not block c % blocks of the window. `blocks` is 2 for NF4 in granules of
 * 64 codes with one scale, 4 in granules of 32, 1 and 2 for int8. A pass is 8 columns; the
 * fragments of weights are made once for all passes. Sums leave the products in float, where the
 * scale of their block is multiplied in (matmul_codes.cuh). Granules of 32 serve blocks of 32 and
 * rows or slices that begin within 64.
 *
 * The scales of an entry, raw as the file has them, come by the same ring: lane 16 h + r copies 4
 * bytes of row r at a time. Of plain scales copy i is that of granule 2 i + h. Of nested ones h = 0
 * is a word of codes, and h = 1 the nested scale of the row's first granule, then of its last.
 *
 * Copies are cp.async, whose groups are waited for by number; one or two entries are under way
 * while one is multiplied. Loads into registers would not do: compilers put all those of a loop on
 * one scoreboard, and a wait is for all of them (docs/kernels.md).
 *
 * Each block of threads has some tiles of 16 rows and all of K, or one of the plan's splits of it,
 * for which x stands in its shared memory. The pieces of a tile's K go to the warps in turn, tile
 * after tile. A warp puts the sums of its piece into shared memory and counts itself; the last one
 * adds them in the order of k and finishes the tile. No barrier is behind the first. A warp that is
 * too far ahead waits for the place of its sums.
 *
 * So the order of sums is: windows of an entry (two lanes' blocks of 32 apart, until the piece
 * ends), entries, pieces, splits. BF16 x is turned into float16 when it is put into shared memory:
 * each 256 columns of a row are multiplied by a power of two, which is divided out behind the
 * products. That is exact for elements of at least 2^-31 of the largest of the 256. */
#include "base/checked.h"
#include "kernels/matmul_ring.cuh"

namespace
{

/* ---- the kernel ------------------------------------------------------------------------------ */

template <typename S> QC_DEVICE void fill_tables(typename S::room &room, const args &a)
{
    const unsigned thread = threadIdx.x;
    if (thread < SLOTS_MOST)
        room.counted[thread] = room.finished[thread] = 0;
    if constexpr (S::nf4) {
        qc_run_fill_codes(room.small, a.parts[0].w, thread);
        __syncthreads();
        qc_codes_fill(room.table, room.small, a.parts[0].w, thread, blockDim.x);
    }
    if constexpr (S::of == NF4) { /* 16 bytes of a row's gap at a time */
        const unsigned mask = (1u << a.ring.maps_log) - 1;
        for (unsigned i = thread; !a.plain && i < 256 * 8; i += blockDim.x) {
            uint32_t v[4] = {0, 0, 0, 0};
#pragma unroll
            for (unsigned j = 0; j < 4; j++)
                if (((i * 4 + j) & mask) < a.count)
                    v[j] = __float_as_uint(a.parts[(i * 4 + j) & mask].w.nested_map[i / 8]);
            uint4 four = {v[0], v[1], v[2], v[3]};
            *reinterpret_cast<uint4 *>(map_of<S>(room, a, 0, 0) + map_row<S>(a, i / 8) +
                                       i % 8 * 16) = four;
        }
    } else if constexpr (!S::by_row) {
        for (unsigned i = thread; !a.plain && i < 256 * a.count; i += blockDim.x)
            *reinterpret_cast<float *>(map_of<S>(room, a, i / 256, 0) + map_row<S>(a, i % 256)) =
                a.parts[i / 256].w.nested_map[i % 256];
    }
}

template <typename S>
static __global__ void __launch_bounds__(32 * S::warps, 1) matmul_ring(const args a)
{
    QC_SHARED(typename S::room, room);
    unsigned char *bytes = reinterpret_cast<unsigned char *>(&room);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float *sums = reinterpret_cast<float *>(bytes + a.ring.sums_at);
    uint4 *xs = reinterpret_cast<uint4 *>(bytes + a.ring.x_at);
    float *powers = reinterpret_cast<float *>(bytes + a.ring.powers_at);
    /* Kept, and not calculated again and again. */
    const uint32_t ring = qc_anew(a.ring.ring_at + warp * (S::stages * S::stage_bytes));

    qc_grid_release();
    if (!a.complete)
        qc_grid_wait();
    cursor c;
    c.next = first_place(a, warp);
    seek<S>(c, a, lane);
#pragma unroll
    for (unsigned i = 0; i + 1 < S::stages; i++)
        bring<S>(c, a, bytes + ring + i * S::stage_bytes, lane);
    fill_tables<S>(room, a);
    if (a.complete)
        qc_grid_wait();
    fill_x<S>(xs, powers, a);
    __syncthreads();

    operand<S> x;
    operand_begin<S>(x, a, xs, powers, g, t);
    const scale_place places[2] = {place_of(a, S::scales == 2 ? t % 2 : t, g),
                                   place_of(a, 4 + t, g)};
    uint32_t at = ring; /* the stage of the entry, and of the one before, which is free */
    uint32_t free_at = ring + (S::stages - 1) * S::stage_bytes;
    segment s;
    for (place now = first_place(a, warp); find(s, now, a); next_place(now, a)) {
        const part &w = a.parts[s.which];
        typename S::sums sum = {};
        decoding how = {map_of<S>(room, a, s.which, lane), w.w.nested_offset, w.skipped, {0, 0}};
        if (!S::by_row)
            for (unsigned i = 0; i < 2; i++)
                how.first[i] = granule_at<S>(a, s, g + 8 * i, s.first);
#pragma unroll 1
        for (uint32_t e = s.first; e < s.first + s.count; e++) {
            const unsigned char *from = bytes + at, *raw = from + CODE_BYTES;
            uint4 q[4];
            float by[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}}, d[2][S::passes][4];
            qc_cp_async_wait<S::stages - 2>();
            __syncwarp(); /* scales were copied by other lanes, and all have read the free stage */
#pragma unroll
            for (unsigned i = 0; i < 4; i++)
                q[i] = reinterpret_cast<const uint4 *>(from)[i * 32 + lane];
            if constexpr (!S::by_row)
#pragma unroll
                for (unsigned i = 0; i < (S::scales == 8 ? 4 : 2); i++) {
                    scale_place p = places[i / 2];
                    if (!a.plain && !a.together)
                        p = place_anywhere(a, p, how.first[i % 2], how.skipped, g);
                    by[i / 2][i % 2] = scale_at<S>(raw + i % 2 * 32, p, how, a);
                }
            bring<S>(c, a, bytes + free_at, lane);
            free_at = at;
            at = at == ring + (S::stages - 1) * S::stage_bytes ? ring : at + S::stage_bytes;
            multiply<S>(d, q, room, x, a, e, lane);
            add_scaled<S>(sum, d, by, t);
            how.first[0] += S::scales;
            how.first[1] += S::scales;
        }
        hand_in<S>(room, sums, a, now, s, sum, lane);
    }
}

/* ---- what a plan has ------------------------------------------------------------------------- */

/* All that follows from shapes: the numbers of a kind and granule, and how tiles are shared out. */
struct sizes {
    unsigned entry, blocks, stages, stage_bytes;
    size_t room_bytes;
};

template <kind of, unsigned granule> constexpr sizes sizes_of()
{
    typedef shape<of, granule, 1> S;
    return {S::entry, S::blocks, S::stages, S::stage_bytes, sizeof(typename S::room)};
}

#define SHARED_WIDE (160u << 10) /* of a block, from which on the wide table leaves enough */

kind kind_of(const qc_cuda_device *d, qc_form_kind k)
{
    return k == QC_FORM_INT8_ROWS                 ? INT8_ROWS
           : k == QC_FORM_INT8_BLOCKS             ? INT8_BLOCKS
           : d->shared_block_bytes >= SHARED_WIDE ? NF4
                                                  : NF4_NARROW;
}

unsigned granule_of(const qc_matmul_shape *s)
{
    const uint64_t ld = s->ldw ? s->ldw : s->k;
    return s->kind == QC_FORM_INT8_ROWS ||
                   (s->k % 64 == 0 && ld % 64 == 0 && !s->inside_64 && s->block_elems >= 64)
               ? 64
               : 32;
}

sizes sizes_for(unsigned of, unsigned granule)
{
    static constexpr sizes all[4][2] = {{sizes_of<NF4, 32>(), sizes_of<NF4, 64>()},
                                        {sizes_of<NF4_NARROW, 32>(), sizes_of<NF4_NARROW, 64>()},
                                        {sizes_of<INT8_ROWS, 64>(), sizes_of<INT8_ROWS, 64>()},
                                        {sizes_of<INT8_BLOCKS, 32>(), sizes_of<INT8_BLOCKS, 64>()}};
    return all[of][granule == 64];
}

unsigned passes_of(const sizes &z, uint64_t m)
{
    const uint64_t columns = m * z.blocks; /* 32 at most */
    return columns <= 8 ? 1 : columns <= 16 ? 2 : 4;
}

/* Decides how a block's warps share its tiles. A piece is put at half an entry besides its own: its
 * end, and the tile's. */
void share_pieces(qc_matmul_ring *r, uint64_t entries, uint64_t tiles_each, uint32_t warps)
{
    double best = 0.0;
    for (uint64_t wanted = 1; wanted <= 2 * WARPS_MOST && wanted <= entries; wanted++) {
        const uint64_t each = qc_ceil_div_u64(entries, wanted);
        const uint64_t pieces = qc_ceil_div_u64(entries, each);
        const double time =
            ((double)each + 0.5) * (double)qc_ceil_div_u64(tiles_each * pieces, warps);
        if (wanted == 1 || time < best) {
            best = time;
            r->each = (uint32_t)each;
            r->pieces = (uint32_t)pieces;
        }
    }
    r->slots_log = qc_log2_of(1 + (uint32_t)qc_ceil_div_u64(warps, r->pieces));
}

/* Lays out shared memory, of which it returns the bytes. */
uint64_t lay_out(qc_matmul_ring *r, const sizes &z, uint64_t m, uint64_t entries, uint32_t warps)
{
    const uint64_t columns = qc_align_u64(entries * z.entry, X_GROUP);
    const uint64_t map_bytes = r->kind == NF4 ? 0 : 1024ull << r->maps_log;
    const uint64_t sums_at = z.room_bytes + map_bytes;
    const uint64_t x_at = sums_at + ((uint64_t)r->pieces << r->slots_log) * ROWS * m * 4;
    const uint64_t powers_at = x_at + m * (columns / 8 + X_GAP) * 16;
    const uint64_t ring_at = qc_align_u64(powers_at + m * (columns / X_GROUP) * 4, 128);
    r->x_units = (uint32_t)(columns / 8) + X_GAP;
    r->map_at = r->kind == NF4 ? 128 : (uint32_t)z.room_bytes; /* NF4: in the table's gaps */
    r->sums_at = (uint32_t)sums_at;
    r->x_at = (uint32_t)x_at;
    r->powers_at = (uint32_t)powers_at;
    r->ring_at = (uint32_t)ring_at;
    return ring_at + (uint64_t)warps * z.stages * z.stage_bytes;
}

/* Chooses into how many parts K is split, as few as x has room for, and how many warps there are.
 * Returns 0 where nothing has room. */
int arrange(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p)
{
    qc_matmul_ring *r = &p->ring;
    r->kind = kind_of(d, s->kind);
    r->granule = granule_of(s);
    r->maps_log = qc_log2_of(s->parts ? s->parts : 1);
    const sizes z = sizes_for(r->kind, r->granule);
    const uint64_t entries = qc_ceil_div_u64(s->k, z.entry), tiles = qc_matmul_tiles(s, ROWS);
    const uint32_t most = z.blocks == 4 && passes_of(z, s->m) > 1 ? 12 : WARPS_MOST;
    const uint64_t slots = p->blocks ? p->blocks : d->multiprocessors ? d->multiprocessors : 1;
    for (uint64_t split = entries; split; split = split > 1 ? qc_ceil_div_u64(split, 2) : 0) {
        const uint64_t splits = qc_ceil_div_u64(entries, split);
        const uint64_t share = slots > splits ? slots / splits : 1;
        const uint64_t each = qc_ceil_div_u64(tiles, share);
        for (uint32_t warps = most; warps >= WARPS_LEAST; warps--) {
            share_pieces(r, split, each, warps);
            const uint64_t bytes = lay_out(r, z, s->m, split, warps);
            if (bytes > d->shared_block_bytes)
                continue;
            p->splits = (uint32_t)splits;
            p->split_k = split * z.entry;
            p->blocks = (uint32_t)qc_ceil_div_u64(tiles, each);
            p->threads = 32 * warps;
            p->shared_bytes = (uint32_t)bytes;
            return 1;
        }
    }
    return 0;
}

template <typename S>
qc_status start(const args &a, const qc_matmul_plan *p, qc_cuda_stream s, qc_error *err)
{
    auto kernel = matmul_ring<S>;
    QC_TRY(qc_cuda_allow_shared(kernel, p->shared_bytes, "matmul_ring", err));
    return qc_cuda_launch_overlapping(kernel, dim3(p->blocks, p->splits), dim3(p->threads),
                                      p->shared_bytes, s, p->overlaps, "matmul_ring", err, a);
}

/* Four passes are for four blocks of a window, two for as many or more. */
template <kind of, unsigned granule>
qc_status start_passes(const args &a, const qc_matmul_plan *p, qc_cuda_stream s, qc_error *err)
{
    constexpr unsigned blocks = shape<of, granule, 1>::blocks;
    const unsigned passes = passes_of(sizes_of<of, granule>(), a.m);
    if (passes == 1)
        return start<shape<of, granule, 1>>(a, p, s, err);
    if (passes == 2)
        return start<shape<of, granule, blocks == 1 ? 1 : 2>>(a, p, s, err);
    return start<shape<of, granule, blocks>>(a, p, s, err);
}

} // namespace

extern "C" int qc_ring_takes(const qc_cuda_device *d, const qc_matmul_shape *s,
                             const qc_matmul_plan *p)
{
    const uint64_t ld = s->ldw ? s->ldw : s->k;
    if (d->sm < 80 || !p->aligned || !s->m || !s->n || !s->k || s->m > QC_MATMUL_RING_ROWS ||
        (s->kind != QC_FORM_NF4 && s->kind != QC_FORM_INT8_ROWS && s->kind != QC_FORM_INT8_BLOCKS))
        return 0;
    /* Granules of the whole weight are counted in 32 bits, and bytes of 8 rows. */
    if (ld >= 1u << 28 || s->n > UINT32_MAX / (ld / 32 + 1) - ROWS ||
        s->n * (ld / 32) + s->first_most / 32 > UINT32_MAX / 2)
        return 0;
    qc_matmul_plan tried = *p;
    return arrange(d, s, &tried);
}

extern "C" void qc_ring_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                  qc_matmul_plan *p)
{
    p->variant = QC_MATMUL_RING;
    p->m_tile = (uint32_t)s->m;
    p->n_tile = ROWS;
    p->copies_x = s->x_alignment < 16;
    (void)arrange(d, s, p);
}

extern "C" qc_status qc_ring_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                    qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    const qc_form *form = &c->weights.w.form;
    const unsigned granule = p->ring.granule;
    const sizes z = sizes_for(p->ring.kind, granule);
    args a = {};
    a.count = count;
    a.m = (uint32_t)c->m;
    a.k = (uint32_t)c->k;
    a.row_bytes = (uint32_t)qc_form_code_bytes(form, form->cols);
    a.row_scales = (uint32_t)(form->cols / granule);
    a.all_entries = (uint32_t)qc_ceil_div_u64(c->k, z.entry);
    a.entries = (uint32_t)(p->split_k / z.entry);
    a.plain = c->weights.w.absmax != nullptr;
    a.together = !a.plain && form->block_elems == granule && z.entry >= 4 * granule;
    a.bf16 = c->x_dtype == QC_DTYPE_BF16;
    a.complete = 1;
    a.x = static_cast<const uint16_t *>(c->x);
    a.ldx = c->ldx;
    a.x_exponent = c->x_exponent;
    for (uint32_t i = 0; i < count; i++) {
        part *to = &a.parts[i];
        const uintptr_t codes = reinterpret_cast<uintptr_t>(c[i].weights.w.absmax_codes);
        to->w = qc_run_source_there(&c[i].weights);
        to->out = c[i].out;
        to->partials = c[i].partials;
        to->first_tile = a.tiles;
        to->scale_first = (uint32_t)(to->w.first / granule);
        to->skipped = codes % 4;
        to->scale_codes = c[i].weights.w.absmax_codes - to->skipped;
        a.tiles += (uint32_t)qc_ceil_div_u64(c[i].n, ROWS);
        a.complete = a.complete && c[i].weights.complete == QC_MATMUL_WEIGHTS_COMPLETE;
        a.scale_shift = to->w.block_shift - qc_log2_of(granule);
        a.nested_shift = to->w.nested_shift;
        if (to->skipped || to->w.nested_shift < 3 || form->cols % z.entry || to->w.first % z.entry)
            a.together = 0;
    }
    a.ring = p->ring;
    switch (p->ring.kind) {
    case NF4:
        return granule == 64 ? start_passes<NF4, 64>(a, p, s, err)
                             : start_passes<NF4, 32>(a, p, s, err);
    case NF4_NARROW:
        return granule == 64 ? start_passes<NF4_NARROW, 64>(a, p, s, err)
                             : start_passes<NF4_NARROW, 32>(a, p, s, err);
    case INT8_BLOCKS:
        return granule == 64 ? start_passes<INT8_BLOCKS, 64>(a, p, s, err)
                             : start_passes<INT8_BLOCKS, 32>(a, p, s, err);
    default:
        return start_passes<INT8_ROWS, 64>(a, p, s, err);
    }
}
