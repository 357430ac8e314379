/* The chunk rule of dequantize-and-cuBLAS: its numbers as a table, what holds for all shapes, and
 * the expected ratios of docs/kernels.md, which are calculated here.
 *
 *   kernel_chunks                  the tests
 *   kernel_chunks --print          the page's tables
 *   kernel_chunks --check PAGE     exit 1 if the page has others
 *   kernel_chunks --update PAGE    writes them into the page */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_chunks.h"

#include <stdarg.h>

static const uint64_t shapes[][2] = {{28672, 8192}, {8192, 28672}, {8192, 8192}, {1024, 8192}};
static const uint64_t row_counts[] = {256, 512, 1024, 4096};

static const qc_chunk_room anywhere = {UINT64_MAX, 2, 0};

static uint64_t rest_of(uint64_t n, uint64_t rows)
{
    return n % rows ? n % rows : rows;
}

static uint64_t waves_of_all(unsigned sms, uint64_t n, uint64_t m, uint64_t rows)
{
    uint64_t waves = 0;
    for (uint64_t first = 0; first < n; first += rows)
        waves += qc_chunk_waves(sms, n - first < rows ? n - first : rows, m);
    return waves;
}

/* ---- the rule -------------------------------------------------------------------------------- */

TEST(test_table)
{
    /* Rows of a chunk, chunks, tiles of the first and of the last, waves of all, waves of the
     * weight as one, dense rows in the workspace. Where a row is left out the weight is one chunk.
     */
    static const struct {
        unsigned sms;
        uint64_t n, m, rows, chunks, tiles, last, waves, whole, dense;
    } table[] = {
        {80, 28672, 256, 28672, 1, 224, 224, 3, 3, 28672},
        {80, 28672, 512, 28672, 1, 448, 448, 6, 6, 28672},
        {80, 28672, 1024, 9600, 3, 300, 296, 12, 12, 19200},
        {80, 28672, 4096, 3200, 9, 400, 384, 45, 45, 6400},
        {80, 8192, 4096, 8192, 1, 1024, 1024, 13, 13, 8192},
        {108, 28672, 512, 28672, 1, 448, 448, 5, 5, 28672},
        {108, 28672, 1024, 14848, 2, 464, 432, 9, 9, 28672},
        {108, 28672, 4096, 4224, 7, 528, 416, 34, 34, 8448},
        {108, 8192, 1024, 8192, 1, 256, 256, 3, 3, 8192},
        {108, 8192, 4096, 4096, 2, 512, 512, 10, 10, 8192},
        {132, 28672, 256, 28672, 1, 224, 224, 2, 2, 28672},
        {132, 28672, 512, 28672, 1, 448, 448, 4, 4, 28672},
        {132, 28672, 513, 28672, 1, 560, 560, 5, 5, 28672},
        {132, 28672, 1024, 16000, 2, 500, 396, 7, 7, 28672},
        {132, 28672, 4096, 4096, 7, 512, 512, 28, 28, 8192},
        {132, 28672, 32768, 28672, 1, 28672, 28672, 218, 218, 28672},
        {132, 28672, 200000, 28672, 1, 175056, 175056, 1327, 1327, 28672},
        {132, 8192, 256, 8192, 1, 64, 64, 1, 1, 8192},
        {132, 8192, 1024, 8192, 1, 256, 256, 2, 2, 8192},
        {132, 8192, 4096, 4096, 2, 512, 512, 8, 8, 8192},
        {132, 1024, 4096, 1024, 1, 128, 128, 1, 1, 1024},
        {148, 28672, 4096, 5760, 5, 720, 704, 25, 25, 11520},
        {0, 100, 1, 100, 1, 1, 1, 1, 1, 100}, /* a device that does not say how many it has */
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const uint64_t n = table[i].n, m = table[i].m;
        qc_chunks c = qc_chunks_choose(table[i].sms, n, m, anywhere);
        assert_int_equal(c.rows, table[i].rows);
        assert_int_equal((n + c.rows - 1) / c.rows, table[i].chunks);
        assert_int_equal(c.paired, table[i].chunks > 1);
        assert_int_equal(qc_chunk_tiles(c.rows, m), table[i].tiles);
        assert_int_equal(qc_chunk_tiles(rest_of(n, c.rows), m), table[i].last);
        assert_int_equal(waves_of_all(table[i].sms, n, m, c.rows), table[i].waves);
        assert_int_equal(qc_chunk_waves(table[i].sms, n, m), table[i].whole);
        assert_int_equal(qc_chunk_dense_rows(n, c), table[i].dense);
    }
}

/* The fewer of 128 x 256 and 256 x 128. */
TEST(test_tiles)
{
    assert_int_equal(qc_chunk_tiles(1, 1), 1);
    assert_int_equal(qc_chunk_tiles(129, 128), 1);
    assert_int_equal(qc_chunk_tiles(128, 256), 1);
    assert_int_equal(qc_chunk_tiles(256, 129), 2);
    assert_int_equal(qc_chunk_tiles(257, 257), 6);
    assert_int_equal(qc_chunk_tiles(8192, 1024), 256);
    assert_int_equal(qc_chunk_waves(132, 8448, 1024), 2);
    assert_int_equal(qc_chunk_waves(132, 8449, 1024), 3);
    assert_true(qc_chunk_tiles(UINT64_MAX, UINT64_MAX) == UINT64_MAX);
}

/* Whatever the shape: enough for the device, within the room, no more waves than are worth it. */
TEST(test_any)
{
    qt_rng rng = qt_rng_start("chunks");
    for (int i = 0; i < 20000; i++) {
        const unsigned sms = 1 + (unsigned)qt_below(&rng, 180);
        const uint64_t n = 1 + qt_below(&rng, 1u << (6 + qt_below(&rng, 12)));
        const uint64_t m = 1 + qt_below(&rng, 1u << (4 + qt_below(&rng, 12)));
        qc_chunk_room room = {UINT64_MAX, 2 * (32 + qt_below(&rng, 30000)), i % 3 ? 0 : 4 * m};
        if (i % 2)
            room.bytes = qt_below(&rng, n * (room.dense_row + room.sums_row));
        const int whole_fits = n <= room.bytes / (room.dense_row + room.sums_row);
        qc_chunks c = qc_chunks_choose(sms, n, m, room);
        assert_true(c.rows >= 1 && c.rows <= n);
        uint64_t dense = qc_chunk_dense_rows(n, c);
        assert_true(dense <= n && (c.paired ? dense > c.rows : dense == c.rows));
        if (dense * room.dense_row + c.rows * room.sums_row > room.bytes)
            assert_true(c.rows <= QC_CHUNK_LEAST && !c.paired);
        if (whole_fits && m <= QC_CHUNK_WHOLE_ROWS)
            assert_int_equal(c.rows, n);
        if (c.paired) {
            assert_true(c.rows % 128 == 0 && c.rows < n);
            assert_true(qc_chunk_tiles(c.rows, m) >= QC_CHUNK_WAVES * sms);
            assert_true(qc_chunk_tiles(rest_of(n, c.rows), m) >= QC_CHUNK_WAVES * sms);
        }
        if (whole_fits && c.rows < n) /* what overlapping may hide: half of the dequantizing */
            assert_true(128 * waves_of_all(sms, n, m, c.rows) <=
                        128 * qc_chunk_waves(sms, n, m) + (n + 127) / 128 / 2);
    }
}

/* ---- what is expected of it ------------------------------------------------------------------ */

/* Rates that are reached, not those of the data sheet, as docs/kernels.md says; the rule before
 * this one took half of a large L2. */
typedef struct {
    const char *name;
    unsigned sms;
    double bytes_second, flop_second;
    uint64_t l2;
} card;

static const card cards[] = {
    {"V100", 80, 0.78e12, 95e12, 6u << 20},
    {"A100, 40 GB", 108, 1.35e12, 240e12, 40u << 20},
    {"H100", 132, 2.93e12, 700e12, 50u << 20},
    {"H200", 132, 4.2e12, 700e12, 60u << 20},
};

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static double dequantize_seconds(const card *g, uint64_t rows, uint64_t k, double bytes)
{
    return bytes * (double)rows * (double)k / g->bytes_second;
}

/* cuBLAS: waves, or what it has to move. weights: bytes of each that come from memory. */
static double product_seconds(const card *g, uint64_t rows, uint64_t k, uint64_t m, double waves,
                              double weights)
{
    double wave = 2.0 * 128 * 256 * (double)k * g->sms / g->flop_second;
    double bytes = weights * (double)rows * (double)k + 2.0 * (double)m * (double)(k + rows);
    return larger(waves * wave, bytes / g->bytes_second);
}

/* Of n x k, in chunks of which so many rows are dense at a time; where those fit half of a large L2
 * they are written and read there, for nothing. */
static int in_l2(const card *g, uint64_t dense_rows, uint64_t k)
{
    return g->l2 >= 32u << 20 && 2 * dense_rows * k <= g->l2 / 2;
}

/* Of cuBLAS with float16 weights. best: every chunk but the first is dequantized for nothing, and a
 * wave that is not full takes as long as one that is, so that there is more to compare with. Else
 * nothing overlaps, and cuBLAS loses nothing in its last wave, but what chunks add to it. */
static double ratio_of(const card *g, uint64_t n, uint64_t k, uint64_t m, qc_chunks c, int best)
{
    const int near = in_l2(g, qc_chunk_dense_rows(n, c), k);
    const double dense_bytes = near ? 0.516 : 2.516, product_bytes = near ? 0.0 : 2.0;
    const double whole = (double)qc_chunk_waves(g->sms, n, m);
    const double waves = (double)waves_of_all(g->sms, n, m, c.rows);
    if (!best) {
        const double full = (double)qc_chunk_tiles(n, m) / g->sms;
        const double added = waves > whole ? waves - whole : 0.0;
        return product_seconds(g, n, k, m, full, 2.0) /
               (product_seconds(g, n, k, m, full + added, product_bytes) +
                dequantize_seconds(g, n, k, dense_bytes));
    }
    double seconds = 0.0, product = 0.0;
    for (uint64_t first = 0; first < n; first += c.rows) {
        uint64_t rows = n - first < c.rows ? n - first : c.rows;
        double dense = dequantize_seconds(g, rows, k, dense_bytes);
        seconds += c.paired && first ? larger(dense, product) : product + dense;
        product =
            product_seconds(g, rows, k, m, (double)qc_chunk_waves(g->sms, rows, m), product_bytes);
    }
    return product_seconds(g, n, k, m, whole, 2.0) / (seconds + product);
}

/* Rows of a chunk by the rule before: half of a large L2, else 64 MiB. */
static uint64_t old_rows(const card *g, uint64_t n, uint64_t k)
{
    uint64_t bytes = g->l2 >= 32u << 20 ? g->l2 / 2 : 64u << 20, rows = bytes / (2 * k) / 64 * 64;
    return rows < n ? rows : n;
}

/* A text that grows; main ends the process where there is no memory. */
typedef struct {
    char *text;
    size_t used, room;
} page;

static void say(page *p, const char *format, ...)
{
    va_list arguments;
    if (p->room - p->used < 1024) {
        p->room += 65536;
        p->text = realloc(p->text, p->room);
        if (!p->text)
            exit(1);
    }
    va_start(arguments, format);
    p->used += (size_t)vsnprintf(p->text + p->used, 1024, format, arguments);
    va_end(arguments);
}

static void say_ratio(page *p, const card *g, uint64_t n, uint64_t k, uint64_t m, qc_chunks c)
{
    const double from = ratio_of(g, n, k, m, c, 0), to = ratio_of(g, n, k, m, c, 1);
    say(p, "%.2f", from);
    if (to - from >= 0.01)
        say(p, " to %.2f", to);
}

/* Chunks, waves of cuBLAS and the expected ratio on each card. */
static void say_cards(page *p)
{
    say(p, "\n| N x K | rows of x |");
    for (size_t g = 0; g < sizeof cards / sizeof *cards; g++)
        say(p, " %s |", cards[g].name);
    say(p, "\n|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t j = 0; j < sizeof row_counts / sizeof *row_counts; j++) {
            const uint64_t n = shapes[i][0], k = shapes[i][1], m = row_counts[j];
            if (m == QC_CHUNK_WHOLE_ROWS)
                continue;
            say(p, "| %llu x %llu | %llu |", (unsigned long long)n, (unsigned long long)k,
                (unsigned long long)m);
            for (size_t at = 0; at < sizeof cards / sizeof *cards; at++) {
                const qc_chunk_room room = {UINT64_MAX, 2 * k, 0};
                const qc_chunks c = qc_chunks_choose(cards[at].sms, n, m, room);
                say(p, " %llu, %llu, ", (unsigned long long)((n + c.rows - 1) / c.rows),
                    (unsigned long long)waves_of_all(cards[at].sms, n, m, c.rows));
                say_ratio(p, &cards[at], n, k, m, c);
                say(p, " |");
            }
            say(p, "\n");
        }
}

#define BEGIN_MARK "<!-- tables: shim_chunks --update docs/kernels.md -->\n"
#define END_MARK   "<!-- end of tables -->\n"

/* 0, or 1 where the page cannot be read, lacks its marks, or has other tables. */
static int with_page(const char *path, const page *tables, int update)
{
    page old = {0}, new = {0};
    char line[1024];
    int inside = 0, marks = 0;
    FILE *f = fopen(path, "r");
    if (!f) {
        fprintf(stderr, "%s cannot be read\n", path);
        return 1;
    }
    while (fgets(line, sizeof line, f)) {
        say(&old, "%s", line);
        if (inside && strcmp(line, END_MARK) == 0)
            inside = 0;
        if (!inside)
            say(&new, "%s", line);
        if (strcmp(line, BEGIN_MARK) != 0)
            continue;
        inside = 1;
        marks++;
        for (size_t at = 0, part; at < tables->used; at += part) {
            part = tables->used - at < 1000 ? tables->used - at : 1000;
            say(&new, "%.*s", (int)part, tables->text + at);
        }
    }
    fclose(f);
    int same = old.used == new.used &&memcmp(old.text, new.text, old.used) == 0;
    if (marks != 1 || inside) {
        fprintf(stderr, "%s: the marks of the tables are missing\n", path);
        return 1;
    }
    if (!same && !update)
        fprintf(stderr,
                "%s: the tables are not what the chunk rule gives; shim_chunks --update %s writes "
                "them\n",
                path, path);
    if (!same && update) {
        f = fopen(path, "w");
        same = f && fwrite(new.text, 1, new.used, f) == new.used;
        same = (!f || fclose(f) == 0) && same;
    }
    free(old.text);
    free(new.text);
    return !same;
}

/* The rule is better than the old one on the shapes of the table, and no more than cuBLAS. */
TEST(test_expected)
{
    for (size_t g = 0; g < sizeof cards / sizeof *cards; g++)
        for (size_t i = 0; i < 4; i++)
            for (size_t j = 0; j < 4; j++) {
                const uint64_t n = shapes[i][0], k = shapes[i][1], m = row_counts[j];
                const qc_chunk_room room = {UINT64_MAX, 2 * k, 0};
                qc_chunks c = qc_chunks_choose(cards[g].sms, n, m, room);
                double from = ratio_of(&cards[g], n, k, m, c, 0);
                double to = ratio_of(&cards[g], n, k, m, c, 1);
                assert_true(from > 0.3 && from <= to + 1e-9 && to < 1.0);
                const qc_chunks old = {.rows = old_rows(&cards[g], n, k)};
                assert_true(ratio_of(&cards[g], n, k, m, old, 1) <= to + 1e-9);
            }
}

int main(int argc, char **argv)
{
    page p = {0};
    if (argc < 2)
        return test_run_all(NULL);
    say_cards(&p);
    say(&p, "\n");
    int code = 2;
    if (argc == 2 && strcmp(argv[1], "--print") == 0)
        code = fwrite(p.text, 1, p.used, stdout) != p.used;
    else if (argc == 3 && (strcmp(argv[1], "--check") == 0 || strcmp(argv[1], "--update") == 0))
        code = with_page(argv[2], &p, strcmp(argv[1], "--update") == 0);
    free(p.text);
    return code;
}
