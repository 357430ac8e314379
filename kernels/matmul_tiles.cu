/* y = x W^T with mma.m16n8k16 (sm_80 and newer), meant for 9 rows of x and more. Codes and x both
 * pass through a ring in shared memory, and scales are applied after the products
 * (matmul_codes.cuh). It takes aligned runs with K % 64 == 0 and one scale per 64 codes of a row,
 * or per row; matmul_mma16816.cu takes the rest.
 *
 * A block makes tiles of m_tile rows of x (16, 32, 64, 128) by n_tile rows of W, and takes 128 of
 * k at a time (a step). Its 8 warps are 4 along N by 2 along K: a warp has a_tiles times 16 rows of
 * W, and 64 of each step's k. These 64 have one scale per row.
 *
 *            64 k of a warp, one row of W (32 bytes of NF4, 64 of int8)
 *       t = 0          t = 1          t = 2          t = 3
 *    |-- 16 codes --|-- 16 codes --|-- 16 codes --|-- 16 codes --|   row g of an A tile
 *    |--------------|--------------|--------------|--------------|   row g + 8
 *
 *    product j of 4: elements 4 j .. 4 j + 3 of every lane's 16 (g = lane / 4, t = lane % 4)
 *      a[0]  (row g; 4 j, 4 j + 1)    a[2]  (row g; 4 j + 2, 4 j + 3)    a[1], a[3]  row g + 8
 *      b[0], b[1]  row g of 8 rows of x, the same four elements
 *
 * The first of the four products starts from zero, and the result of the last is multiplied by the
 * rows' scales and added to the sums. That is one rounding in float, and only the code values and x
 * are in float16. Row-wise int8 has exact products and gets its scale at the very end.
 *
 * A warp has many A tiles because x is read from shared memory once for all of them:
 * m_tile / a_tiles wavefronts per 1024 weights, beside 16 for the look-ups. The registers have no
 * room for these tiles and for codes on their way too, so codes come by cp.async, 16 bytes a lane
 * and in whole sectors, and wait in shared memory. Writing and reading them takes 8 wavefronts per
 * 1024 weights of NF4.
 *
 *    m_tile  a_tiles  n_tile  stage, KB   stages      under way, KB  shared memory, bytes
 *                             NF4 / int8  NF4 / int8  NF4 / int8     NF4 / wide / int8
 *      16       4       256    20 / 36     6 / 4        80 / 72      160,896 / 196,608 / 152,704
 *      32       4       256    24 / 40     5 / 3        72 / 40      160,896 / 196,608 / 128,128
 *      64       3       192    28 / 40     4 / 3        56 / 40      151,680 / 196,608 / 127,104
 *     128       2       128    40 / 48     3 / 3        40 / 48      158,848 / 196,608 / 150,656
 *    in 99 KB (sm_86, sm_89, sm_120):                                 NF4 / int8
 *      16     4 / 3   256 / 192  20 / 28     3 / 3        20 / 28       99,456 / 90,240
 *      32     3 / 2   192 / 128  20 / 24     3 / 3        20 / 24       98,432 / 76,928
 *
 * With 64 rows of x, row-wise int8 has 4 A tiles, 256 rows of W, stages of 48 KB and 152,704 bytes.
 * It has no tile of 128 rows, where x would be read twice as often.
 *
 * A ring of n stages has n - 2 of them on their way. While a step is computed, the next stage is
 * already complete, so that its x and the codes of its first tile are in registers before the
 * barrier. With 128 rows of x the sums leave no room for x in registers: both A tiles are decoded
 * first, whose codes are there before the barrier, and then x is read 8 rows at a time.
 *
 * The table of NF4 is the narrow one, or the wide one where there are 192 KB of shared memory
 * (sm_90, sm_100). The wide one lies at a multiple of 64 KB so that one PRMT makes a whole address.
 * Otherwise the compiler would add the start of shared memory, which is no constant on sm_90, to
 * every address.
 *
 * In shared memory a row of x is 16 units of 16 bytes, with unit u of row m at u ^ (m & 1). A row
 * of codes is 4 units for NF4, with unit u of row n at u ^ (n >> 1 & 1) << 1, or 8 for int8, with
 * unit u at u ^ (n & 1) << 2. So copies and the loads of fragments touch all 32 banks once per 128
 * bytes.
 *
 * Packed weights (matmul_packed.h) are copied 512 bytes a warp, and a stage has them in the same
 * units: the tile's units of the first 64 k, then those of the second. A lane loads the codes of
 * rows g and g + 8 at once, 16 bytes of NF4 or twice 16 of int8, and neighbours lie side by side. A
 * thread decodes the scales of its row as before; of packed ones it loads the codes of four.
 *
 * The work is the tiles of all weights in a row, with tile_steps for each. Block b has
 * worker_steps, beginning at b * worker_steps. Either that is a tile or an equal part of a tile's
 * K, or blocks go on from tile to tile so that all multiprocessors have the same amount of work (a
 * tile then has as many parts as it has blocks). matmul_reduce.cu adds the parts' sums in the order
 * of k.
 *
 * Cost and bound: docs/kernels.md. */
#include "kernels/matmul_tiles_kernel.cuh"

namespace
{

/* ---- which tiles, and how they are shared out ------------------------------------------------ */

/* Rows of x in a tile. 128 cost less than 64 and 64 (docs/kernels.md) where weights are scaled in
 * the loop; sm_90 has matmul_wgmma.cu for so many. */
uint32_t m_tile_of(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    bool hopper = d->sm >= 90 && d->sm < 100, half = (s->m - 1) % 128 < 64; /* of the last tile */
    if (s->m > 64 && !half && !hopper && s->kind != QC_FORM_INT8_ROWS)
        return 128;
    return s->m <= 16 ? 16 : s->m <= 32 ? 32 : 64;
}

template <kind what, memory in> variant large(uint32_t m_tile)
{
    switch (m_tile) {
    case 16:
        return variant_of<16, what, in>();
    case 32:
        return variant_of<32, what, in>();
    case 64:
        return variant_of<64, what, in>();
    default:
        return variant_of<128, what, in>();
    }
}

template <kind what> variant choose(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    uint32_t m_tile = m_tile_of(d, s);
    bool wide = what == KIND_NF4 && d->shared_block_bytes >= WIDE_SHARED;
    variant v = wide ? large<KIND_NF4, WIDE>(m_tile) : large<what, NARROW>(m_tile);
    return v.shared_bytes <= d->shared_block_bytes ? v : small<what>(s->m);
}

/* Where no variant fits, shared_bytes is 0. */
variant choose(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    kind what = kind_of(s->kind);
    variant v = what == KIND_NF4           ? choose<KIND_NF4>(d, s)
                : what == KIND_INT8_BLOCKS ? choose<KIND_INT8_BLOCKS>(d, s)
                                           : choose<KIND_INT8_ROWS>(d, s);
    return v.shared_bytes <= d->shared_block_bytes ? v : variant{0, 0, 0};
}

/* Bytes from memory per clock and multiprocessor, by data sheets: 10 on V100 and A100, 21 on H200,
 * 29 on B200, and 3 to 9 with GDDR or LPDDR (8.6 to 8.9, 11 and 12). */
double memory_rate(unsigned sm)
{
    return sm < 86 ? 10.0 : sm >= 90 && sm < 110 ? 20.0 : 5.0;
}

/* What one step, a block and the reduction cost, in rough clocks that are all calculated
 * (docs/kernels.md). Only their proportions matter. */
double step_clocks(const qc_cuda_device *d, const qc_matmul_shape *s, const qc_matmul_plan *p)
{
    double per_1024 = (s->kind == QC_FORM_NF4 ? 28.0 : 20.0) + 80.0 * p->m_tile / p->n_tile;
    double shared = per_1024 * (p->n_tile * K_STEP / 1024);
    double tensor = (double)p->n_tile * K_STEP * p->m_tile / 1024;
    double bytes = p->n_tile * K_STEP * (s->kind == QC_FORM_NF4 ? 0.516 : 1.0);
    double memory = bytes / memory_rate(d->sm);
    double most = shared > tensor ? shared : tensor;
    return most > memory ? most : memory;
}

constexpr double block_clocks = 3000.0; /* launch, table, filling the ring; the last sums */
constexpr double tile_clocks = 1500.0;  /* the same for a block's further tiles */

double reduce_clocks(const qc_matmul_shape *s, uint64_t splits)
{
    double elems = (double)s->m * (double)s->n;
    return splits > 1 ? 3500.0 + elems * (8.0 * (double)splits + 2.0) / 2500.0 : 0.0;
}

/* Returns the most blocks that share a tile, where each has worker_steps in a row. */
uint64_t parts_of(uint64_t tile_steps, uint64_t worker_steps)
{
    if (worker_steps % tile_steps == 0)
        return 1;
    if (tile_steps % worker_steps == 0)
        return tile_steps / worker_steps;
    return (tile_steps + worker_steps - 2) / worker_steps + 1;
}

uint64_t tiles_of(const qc_matmul_shape *s, uint32_t m_tile, uint32_t n_tile)
{
    return qc_matmul_tiles(s, n_tile) * qc_ceil_div_u64(s->m, m_tile);
}

/* Decides which part of the work a block has; `clocks` is what a step costs. */
void share_out(const qc_cuda_device *d, const qc_matmul_shape *s, double clocks, qc_matmul_plan *p)
{
    uint64_t steps = qc_ceil_div_u64(s->k, K_STEP), tiles = tiles_of(s, p->m_tile, p->n_tile);
    uint64_t slots = d->multiprocessors ? d->multiprocessors : 1;
    double best = 0.0;
    /* First choice: a block has a tile or an equal part of its K, of two steps at least. */
    uint64_t most = steps / 2 < slots ? steps / 2 : slots;
    for (uint64_t wanted = 1; wanted == 1 || wanted <= most; wanted++) {
        uint64_t each = qc_ceil_div_u64(steps, wanted), splits = qc_ceil_div_u64(steps, each);
        double time = (double)qc_ceil_div_u64(tiles * splits, slots) *
                          ((double)each * clocks + block_clocks) +
                      reduce_clocks(s, splits);
        if (wanted == 1 || time < best) {
            best = time;
            p->splits = (uint32_t)splits;
            p->split_k = each * K_STEP;
        }
        if (tiles * splits > 8 * slots)
            break;
    }
    /* Second choice: all multiprocessors have the same amount of work. It is not for several tiles
     * of x, because blocks whose tiles share weights should run at the same time. */
    if (s->m > p->m_tile)
        return;
    uint64_t each = qc_ceil_div_u64(tiles * steps, slots), splits = parts_of(steps, each);
    uint64_t split_k = qc_ceil_div_u64(qc_ceil_div_u64(s->k, splits), K_STEP) * K_STEP;
    double time = (double)each * clocks + block_clocks +
                  (double)qc_ceil_div_u64(each, steps) * tile_clocks + reduce_clocks(s, splits);
    if (splits > 1 && split_k * (splits - 1) < s->k && time < best) {
        p->splits = (uint32_t)splits;
        p->split_k = split_k;
        p->worker_k = each * K_STEP;
    }
}

} // namespace

extern "C" int qc_tiles_takes(const qc_cuda_device *d, const qc_matmul_shape *s,
                              const qc_matmul_plan *p)
{
    if (d->sm < 80 || !p->aligned || !qc_matmul_by_64(s) || !s->m || !s->n)
        return 0;
    if (s->kind != QC_FORM_INT8_ROWS && s->block_elems < BLOCK)
        return 0;
    variant v = choose(d, s);
    if (!v.shared_bytes)
        return 0;
    /* Steps of all tiles are counted in 31 bits, and K in 30. */
    if (s->m > INT32_MAX || s->n > INT32_MAX || s->k > INT32_MAX / 2)
        return 0;
    uint64_t tiles = tiles_of(s, v.m_tile, v.n_tile), steps = qc_ceil_div_u64(s->k, K_STEP);
    return tiles < INT32_MAX && tiles <= INT32_MAX / (2 * steps);
}

extern "C" void qc_tiles_share_out(const qc_cuda_device *d, const qc_matmul_shape *s, double clocks,
                                   qc_matmul_plan *p)
{
    share_out(d, s, clocks, p);
}

extern "C" void qc_tiles_configure(const qc_cuda_device *d, const qc_matmul_shape *s,
                                   qc_matmul_plan *p)
{
    variant v = choose(d, s);
    p->m_tile = v.m_tile;
    p->n_tile = v.n_tile;
    p->threads = THREADS;
    p->shared_bytes = v.shared_bytes;
    share_out(d, s, step_clocks(d, s, p), p);
}

extern "C" qc_status qc_tiles_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                     qc_error *err)
{
    return c->weights.packed ? qc_tiles_launch_packed(c, count, s, err)
                             : launch_any<IN_ROWS>(c, count, s, err);
}
