/* The chunk rule of DEQUANT_GEMM.
 *
 * cuBLAS cuts y into tiles, and each multiprocessor computes one tile at a time, so a product takes
 * as long as the number of waves: its tiles, divided by the multiprocessors, rounded up. A chunk
 * with few tiles leaves most of the device without work. (Chunks of half the L2, which this rule
 * replaces, left cuBLAS 4 tiles for 132 multiprocessors at 256 rows of x.) So a chunk has at least
 * three waves, and its rows are chosen so that the last wave is as full as it can be.
 *
 * Assumed, not measured: tiles of 128 x 256 or 256 x 128, whichever are fewer. Those are the sizes
 * in the names of the kernels that profiles of large float16 products show: 128x256 and 256x128 of
 * "s16816gemm" on an A100, "tilesize128x256x64" on an H100, 256x128 of "s884gemm" on a V100.
 *
 * The rule weighs waves against dequantizing: a wave costs as much time as dequantizing about 128 x
 * 128 rows. (By the rates of docs/kernels.md, with K in both: 134 x 128 on a V100, 124 on an A100,
 * 111 on an H100, 161 on an H200.) The first chunk is dequantized before cuBLAS can begin. The
 * others are dequantized while it works, which hides a part of their time; half is assumed.
 * Dequantizing is bound by memory and the product by tensor cores, but a tile of this size takes
 * all registers of a multiprocessor, so work that overlaps runs where a wave is not full. Whether
 * the whole weight is better as two chunks at up to 512 rows was calculated as well: half of the
 * weight then has fewer than three waves, and all that could be gained is half of the second half's
 * time, so it stays whole.
 *
 * Chunks now come from memory instead of from the L2, where chunks of half its size would still be.
 * The float16 product that this is compared with reads its weights from memory too, and with more
 * than 256 rows of x the tensor cores are its bound. But the dense rows are really written to
 * memory, so dequantizing costs 2.5 bytes a weight and not 0.5. What chunks in the L2 would gain is
 * less than what their waves lose (tests/kernels/kernel_chunks.c, test_expected). */
#include "kernels/matmul_chunks.h"

#include "base/checked.h"

#define TILE_SHORT 128u /* sides of a tile */
#define TILE_LONG  256u
#define WAVE_COST  128u /* in units of dequantizing a column: TILE_SHORT rows of W */
/* With little room for chunks, at most this many sizes are compared. */
#define SIZES_MOST 1024u

static uint64_t columns_of(uint64_t rows)
{
    return qc_ceil_div_u64(rows, TILE_SHORT);
}

/* Returns how many tiles so many columns have; a column is TILE_SHORT rows of W. */
static uint64_t tiles_of(uint64_t columns, uint64_t m)
{
    uint64_t a = qc_sat_mul(columns, qc_ceil_div_u64(m, TILE_LONG));
    uint64_t b = qc_sat_mul(qc_ceil_div_u64(columns, 2), qc_ceil_div_u64(m, TILE_SHORT));
    return a < b ? a : b;
}

uint64_t qc_chunk_tiles(uint64_t rows, uint64_t m)
{
    return tiles_of(columns_of(rows), m);
}

uint64_t qc_chunk_waves(unsigned multiprocessors, uint64_t rows, uint64_t m)
{
    return qc_ceil_div_u64(qc_chunk_tiles(rows, m), multiprocessors ? multiprocessors : 1);
}

uint64_t qc_chunk_dense_rows(uint64_t n, qc_chunks chunks)
{
    uint64_t rest = n - chunks.rows;
    if (!chunks.paired)
        return chunks.rows;
    return qc_sat_add(chunks.rows, rest < chunks.rows ? rest : chunks.rows);
}

static int has_room(const qc_chunk_room *room, uint64_t n, qc_chunks chunks)
{
    uint64_t dense = qc_sat_mul(qc_chunk_dense_rows(n, chunks), room->dense_row);
    return qc_sat_add(dense, qc_sat_mul(chunks.rows, room->sums_row)) <= room->bytes;
}

/* Returns the waves of all chunks, or 0 where the last chunk has fewer tiles than `least`. */
static uint64_t waves_of_all(uint64_t sms, uint64_t columns, uint64_t chunk, uint64_t m,
                             uint64_t least)
{
    uint64_t rest = columns % chunk, last = tiles_of(rest, m);
    if (rest && last < least)
        return 0;
    uint64_t each = qc_ceil_div_u64(tiles_of(chunk, m), sms);
    return qc_sat_add(qc_sat_mul(columns / chunk, each), qc_ceil_div_u64(last, sms));
}

/* Returns what a chunk of so many columns costs, in units of dequantizing one: its waves, and its
 * dequantizing, half of which is hidden behind products where chunks are paired. */
static uint64_t cost_of(uint64_t waves, uint64_t columns, uint64_t chunk, int paired)
{
    uint64_t seen = paired ? chunk + (columns - chunk) / 2 : columns;
    return qc_sat_add(qc_sat_mul(waves, WAVE_COST), seen);
}

/* Handles one buffer with less room than the whole weight takes. Returns the largest chunk that
 * fits, or one of at least half its size that makes fewer waves in all. */
static qc_chunks largest(uint64_t sms, uint64_t n, uint64_t m, const qc_chunk_room *room,
                         uint64_t *cost)
{
    const uint64_t each = qc_sat_add(room->dense_row, room->sums_row), columns = columns_of(n);
    const uint64_t rows = each ? room->bytes / each : n, most = rows / TILE_SHORT;
    qc_chunks best = {.rows = QC_CHUNK_LEAST < n ? QC_CHUNK_LEAST : n};
    *cost = UINT64_MAX;
    for (uint64_t chunk = most; chunk > most / 2 && most - chunk < SIZES_MOST; chunk--) {
        uint64_t this = cost_of(waves_of_all(sms, columns, chunk, m, 0), columns, chunk, 0);
        if (this < *cost) {
            best.rows = chunk * TILE_SHORT;
            *cost = this;
        }
    }
    return best;
}

qc_chunks qc_chunks_choose(unsigned multiprocessors, uint64_t n, uint64_t m, qc_chunk_room room)
{
    const uint64_t sms = multiprocessors ? multiprocessors : 1, least = QC_CHUNK_WAVES * sms;
    const uint64_t columns = columns_of(n);
    qc_chunks best = {.rows = n};
    uint64_t cost;
    /* This is how many columns `least` tiles of either shape take. */
    uint64_t from = qc_ceil_div_u64(least, qc_ceil_div_u64(m, TILE_LONG));
    uint64_t other = 2 * qc_ceil_div_u64(least, qc_ceil_div_u64(m, TILE_SHORT)) - 1;
    from = from < other ? other : from;
    if (has_room(&room, n, best)) {
        /* With a hundred thousand rows of x, a single column has enough waves, and dequantizing
         * costs next to nothing. */
        if (m <= QC_CHUNK_WHOLE_ROWS || from == 1)
            return best;
        cost = cost_of(waves_of_all(sms, columns, columns, m, 0), columns, columns, 0);
    } else {
        best = largest(sms, n, m, &room, &cost);
    }
    for (uint64_t chunk = from; chunk < 2 * from && chunk < columns; chunk++) {
        qc_chunks c = {.rows = chunk * TILE_SHORT, .paired = 1};
        uint64_t waves = waves_of_all(sms, columns, chunk, m, least);
        uint64_t this = cost_of(waves, columns, chunk, 1);
        if (waves && this < cost && has_room(&room, n, c)) {
            best = c;
            cost = this;
        }
    }
    return best;
}
