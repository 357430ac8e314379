/* The scale search on the GPU leaves what the scalar truth leaves, bit for bit: codes, scales,
 * nested scales, sums, bad elements. --slow: more of everything. */
#include "tests/fixtures/quantizer_fixture.h"

#include "kernels/cuda_quantize.h"
#include "quant/scale_search.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

static int slow;
static qd_buffer tables;

typedef struct {
    int nf4, nested, refit;
    qc_dtype dtype;
    uint64_t n;
    uint32_t block;
    float offset;
    size_t src_offset, codes_offset; /* elements, bytes */
    const qc_form_ops *integer;      /* instead of the first three */
    qc_dtype scale_dtype;
    int by_absmax;
} blocks_case;

static const qc_form_ops *ops_of(const blocks_case *c)
{
    return c->integer ? c->integer : c->nf4 ? &qc_form_nf4 : &qc_form_int8_blocks;
}

static void *scratch_for(void)
{
    void *p = aligned_alloc(64, (size_t)qc_search_scratch_bytes());
    QT_CHECK(p != NULL, "out of memory");
    return p;
}

static void check_blocks(const blocks_case *c, const void *src)
{
    char what[160];
    snprintf(what, sizeof what,
             "%s %s n %" PRIu64 " block %u nested %d refit %d offset %g src+%zu codes+%zu",
             ops_of(c)->name, qc_dtype_name(c->dtype), c->n, c->block, c->nested, c->refit,
             (double)c->offset, c->src_offset, c->codes_offset);
    uint64_t blocks = c->n / c->block + (c->n % c->block != 0), groups = (blocks + 255) / 256;
    qc_form form = {.ops = ops_of(c),
                    .block_elems = c->block,
                    .cols = c->block,
                    .nested = c->nested,
                    .offset = c->offset,
                    .scale_dtype = c->scale_dtype};
    size_t code_bytes = (size_t)qc_form_code_bytes(&form, c->n), each = qt_size(c->dtype);
    qc_search_out out = {.codes = qt_alloc(code_bytes, 1),
                         .absmax = qt_alloc(blocks, 4),
                         .absmax_codes = qt_alloc(blocks, 1),
                         .nested_absmax = qt_alloc(groups, 4)};
    qc_piece_sums sums, got_sums;
    void *scratch = scratch_for();
    if (c->by_absmax)
        form.ops->quantize(qc_quant_ops_for(QC_ISA_SCALAR), &form, src, c->dtype, c->n,
                           &(qc_form_out){.codes = out.codes, .absmax = out.absmax}, &sums);
    else
        qc_search_ops_for(QC_ISA_SCALAR)
            ->blocks(&form, c->refit ? QC_SEARCH_REFIT : QC_SEARCH_ONCE, src, c->dtype, c->n, &out,
                     scratch, &sums);

    qd_buffer d_src = qd_new_from(src, (size_t)c->n * each, c->src_offset * each);
    qd_buffer d_codes = qd_new(code_bytes, c->codes_offset), d_absmax = qd_new(blocks * 4, 4);
    qd_buffer d_absmax_codes = qd_new(c->nested ? blocks : 0, 1);
    qd_buffer d_nested = qd_new(c->nested ? groups * 4 : 0, 4);
    qd_buffer d_sums = qd_new(blocks * sizeof(qc_search_sum), 8), d_bad = qd_new(8, 8);
    const qc_cuda_quantize_job a = {.src = d_src.p,
                                    .dtype = c->dtype,
                                    .n = c->n,
                                    .form = form,
                                    .searched = !c->by_absmax,
                                    .refit = c->refit,
                                    .tables = tables.p,
                                    .codes = d_codes.p,
                                    .absmax = d_absmax.p,
                                    .absmax_codes = c->nested ? d_absmax_codes.p : NULL,
                                    .nested_absmax = c->nested ? d_nested.p : NULL,
                                    .sums = d_sums.p,
                                    .bad = d_bad.p};
    QD_OK(qc_cuda_quantize(&a, qd.stream, &qd.err));
    void *got_codes = qd_take(&d_codes, what), *got_absmax = qd_take(&d_absmax, what);
    void *got_absmax_codes = qd_take(&d_absmax_codes, what), *got_nested = qd_take(&d_nested, what);
    qc_search_sum *found = qd_take(&d_sums, what);
    uint64_t *bad = qd_take(&d_bad, what);
    qd_drop(&d_src);
    if (!qz_check_bad(bad, &sums, what)) {
        if (c->nested) {
            qd_same(got_nested, out.nested_absmax, groups * 4, what);
            qd_same(got_absmax_codes, out.absmax_codes, blocks, what);
        }
        qd_same(got_absmax, out.absmax, blocks * 4, what);
        qd_same(got_codes, out.codes, code_bytes, what);
        qc_search_collect(found, blocks, c->block, &got_sums);
        qz_check_sums(&got_sums, &sums, what);
    }
    free(out.codes), free(out.absmax), free(out.absmax_codes), free(out.nested_absmax);
    free(scratch), free(got_codes), free(got_absmax), free(got_absmax_codes), free(got_nested);
    free(found), free(bad);
}

/* All ways to search the source. */
static void check_ways(blocks_case c, qd_kind kind, qt_rng *rng)
{
    void *src = qd_source(rng, kind, c.dtype, c.n);
    for (int way = 0; way < 3; way++) {
        c.nested = way > 0;
        c.refit = way > 1;
        c.offset = c.nf4 || kind == QD_ZEROS ? 0.0f : 0x1p-4f;
        check_blocks(&c, src);
    }
    free(src);
}

/* Integers of all widths. */
static const qc_form_ops *const integers[] = {&qc_form_w2a16, &qc_form_w3a16, &qc_form_w4a16,
                                              &qc_form_w5a16, &qc_form_w6a16, &qc_form_w7a16,
                                              &qc_form_w8a16, &qc_form_w8a8};
#define INTEGERS ((int)(sizeof integers / sizeof *integers))

/* All kinds, groups and dtypes of scales. */
TEST(test_integers)
{
    static const uint32_t blocks[] = {128, 32, 64, 256, 2048};
    qt_rng rng = qt_rng_start(__func__);
    unsigned turn = 0;
    for (int f = 0; f < INTEGERS; f++)
        for (int k = 0; k < QD_KINDS; k++)
            for (int t = 0; t < (slow ? 3 : 1); t++, turn++) {
                const uint32_t block = blocks[turn % 5];
                blocks_case c = {.dtype = types[turn % 3],
                                 .n = block * (block < 256 ? 11 : 3),
                                 .block = block,
                                 .codes_offset = turn % 4,
                                 .integer = integers[f],
                                 .scale_dtype = types[turn / 3 % 3]};
                void *src = qd_source(&rng, (qd_kind)k, c.dtype, c.n);
                check_blocks(&c, src);
                if (block <= 1024) {
                    c.by_absmax = 1;
                    check_blocks(&c, src);
                }
                free(src);
            }
}

TEST(test_kinds)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint32_t blocks[] = {32, 64, 128, 256};
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (int k = 0; k < QD_KINDS; k += (int)qt_every(4)) {
                uint32_t block = blocks[(k + t) % 4];
                for (int b = 0; b < (slow ? 4 : 1); b++) {
                    blocks_case c = {.nf4 = nf4,
                                     .dtype = types[t],
                                     .n = 12 * (slow ? blocks[b] : block) + 7,
                                     .block = slow ? blocks[b] : block};
                    check_ways(c, (qd_kind)k, &rng);
                }
            }
}

/* Several groups, of which the last is short, ends in a short block, and that at an odd element. */
TEST(test_groups)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < (slow ? 3 : 1); t++) {
            blocks_case c = {
                .nf4 = nf4, .dtype = types[t], .n = 32 * 256 + 32 * 19 + 5, .block = 32};
            check_ways(c, QD_NORMAL, &rng);
            if (slow)
                check_ways(c, QD_SPREAD, &rng);
        }
}

TEST(test_sizes)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t sizes[] = {0, 1, 31, 63, 64, 65, 127, 1023, 1024};
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s += qt_every(3)) {
            blocks_case c = {.nf4 = nf4, .dtype = types[s % 3], .n = sizes[s], .block = 64};
            check_ways(c, QD_NORMAL, &rng);
        }
}

TEST(test_block_sizes)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (uint32_t block = 32; block <= 4096; block *= 2)
            for (int more = 0; more < 2; more++) {
                blocks_case c = {.nf4 = nf4,
                                 .dtype = types[block / 32 % 3],
                                 .n = block + (more ? block / 2 + 3 : 0),
                                 .block = block};
                check_ways(c, QD_NORMAL, &rng);
            }
}

TEST(test_alignment)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (size_t offset = 1; offset < 4; offset++) {
                blocks_case c = {.nf4 = nf4,
                                 .dtype = types[t],
                                 .n = 325,
                                 .block = 64,
                                 .src_offset = offset,
                                 .codes_offset = offset};
                check_ways(c, QD_NORMAL, &rng);
            }
}

/* Offsets that no scale is near, and such that there is little else. */
TEST(test_offsets)
{
    qt_rng rng = qt_rng_start(__func__);
    static const float offsets[] = {0.0f, 0.25f, -0.5f, 1e-30f, 3e38f, 0x1p-140f};
    void *src = qd_source(&rng, QD_NORMAL, QC_DTYPE_BF16, 900);
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++)
            for (int refit = 0; refit < 2; refit++) {
                blocks_case c = {.nf4 = nf4,
                                 .nested = 1,
                                 .refit = refit,
                                 .dtype = QC_DTYPE_BF16,
                                 .n = 900,
                                 .block = 64,
                                 .offset = offsets[i]};
                check_blocks(&c, src);
            }
    free(src);
}

/* Several bad elements: the lowest is named, whichever thread or block has it. */
TEST(test_bad)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint32_t blocks[] = {64, 128, 512};
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (int round = 0; round < (slow ? 20 : 3); round++) {
                uint64_t n = 2200 + qt_below(&rng, 600);
                blocks_case c = {.nf4 = nf4,
                                 .nested = round % 2,
                                 .dtype = types[t],
                                 .n = n,
                                 .block = blocks[(round + t) % 3]};
                void *src = qd_source(&rng, QD_NORMAL, types[t], n);
                for (int i = 0; i < 1 + round; i++) {
                    uint64_t at = round < 2 ? n - 1 - 70 * (uint64_t)i : qt_below(&rng, n);
                    qt_put(src, types[t], at, qz_bad_value(i));
                }
                check_blocks(&c, src);
                free(src);
            }
}

/* ---- rows ---- */

static void rows_truth(const qz_rows *r, void *codes, float *scb, qc_piece_sums *sums)
{
    void *scratch = scratch_for();
    const uint64_t n = r->rows * r->cols;
    const qc_form form = {.ops = r->integer ? r->integer : &qc_form_int8_rows,
                          .cols = r->cols,
                          .scale_dtype = r->scale_dtype};
    const qc_search_ops *search = qc_search_ops_for(QC_ISA_SCALAR);
    if (r->integer && r->by_absmax)
        form.ops->quantize(qc_quant_ops_for(QC_ISA_SCALAR), &form, r->src, r->dtype, n,
                           &(qc_form_out){.codes = codes, .absmax = scb}, sums);
    else
        search->blocks(&form, QC_SEARCH_ONCE, r->src, r->dtype, n,
                       &(qc_search_out){.codes = codes, .absmax = scb}, scratch, sums);
    free(scratch);
}

static qc_status rows_kernel(const qz_rows *r, const qz_rows_io *at)
{
    const qc_cuda_quantize_job a = {.src = at->src,
                                    .dtype = r->dtype,
                                    .n = r->rows * r->cols,
                                    .form = {.ops = r->integer ? r->integer : &qc_form_int8_rows,
                                             .cols = r->cols,
                                             .scale_dtype = r->scale_dtype},
                                    .searched = !(r->integer && r->by_absmax),
                                    .tables = tables.p,
                                    .codes = at->codes,
                                    .absmax = at->scb,
                                    .sums = at->errors,
                                    .bad = at->bad};
    return qc_cuda_quantize(&a, qd.stream, &qd.err);
}

static void check_rows(qc_dtype dtype, uint64_t rows, uint64_t cols, const void *src,
                       size_t src_offset, size_t codes_offset)
{
    const qz_rows r = {.dtype = dtype,
                       .rows = rows,
                       .cols = cols,
                       .src = src,
                       .src_offset = src_offset,
                       .codes_offset = codes_offset,
                       .errors = 1};
    qz_check_rows(&r, rows_truth, rows_kernel);
}

/* Integers by rows: all forms and dtypes of scales, searched and by absmax. */
static void check_integer_rows(qz_rows r)
{
    static unsigned turn;
    r.errors = 1;
    for (int f = 0; f < INTEGERS; f++, turn++) {
        r.integer = integers[f];
        if (r.integer->bits == 4 && r.cols % 2)
            continue;
        for (int t = 0; t < (slow ? 3 : 1); t++)
            for (r.by_absmax = 0; r.by_absmax < 2; r.by_absmax++) {
                r.scale_dtype = types[(turn / 3 + (unsigned)t) % 3];
                qz_check_rows(&r, rows_truth, rows_kernel);
            }
    }
}

TEST(test_integer_rows)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t shapes[][2] = {{0, 5},    {1, 2},    {17, 48},  {5, 63},
                                         {3, 1024}, {2, 1026}, {2, 2880}, {1, 17408}};
    for (int t = 0; t < 3; t++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s += qt_every(2)) {
            qz_rows r = {.dtype = types[t], .rows = shapes[s][0], .cols = shapes[s][1]};
            void *src = qd_source(&rng, QD_NORMAL, r.dtype, r.rows * r.cols);
            r.src = src;
            check_integer_rows(r);
            r.src_offset = 1, r.codes_offset = 3;
            if (r.cols < 100)
                check_integer_rows(r);
            free(src);
        }
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < QD_KINDS; k++) {
            qz_rows r = {.dtype = types[t], .rows = 9, .cols = k % 2 ? 1200 : 40};
            void *src = qd_source(&rng, (qd_kind)k, r.dtype, r.rows * r.cols);
            r.src = src;
            check_integer_rows(r);
            free(src);
        }
}

/* What float16 does not hold is a weight like any other here. */
TEST(test_integer_rows_bad)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int t = 0; t < 3; t++)
        for (int round = 0; round < (slow ? 20 : 4); round++) {
            qz_rows r = {.dtype = types[t], .rows = 3, .cols = 2100};
            void *src = qd_source(&rng, QD_NORMAL, r.dtype, r.rows * r.cols);
            for (int i = 0; i < round; i++)
                qt_put(src, r.dtype, qt_below(&rng, r.rows * r.cols),
                       i == 0 && r.dtype != QC_DTYPE_F16 ? 70000.0 : qz_bad_value(i));
            r.src = src;
            check_integer_rows(r);
            free(src);
        }
}

TEST(test_rows_shapes)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t shapes[][2] = {{0, 5},    {1, 1},    {17, 3},   {5, 63},   {3, 1023},
                                         {3, 1024}, {2, 1025}, {2, 2880}, {1, 17408}};
    for (int t = 0; t < 3; t++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s += qt_every(2)) {
            uint64_t rows = shapes[s][0], cols = shapes[s][1];
            void *src = qz_row_source(&rng, QD_NORMAL, types[t], rows * cols);
            check_rows(types[t], rows, cols, src, 0, 0);
            if (cols < 100)
                check_rows(types[t], rows, cols, src, 1, 3);
            free(src);
        }
}

TEST(test_rows_kinds)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < QD_KINDS; k += (int)qt_every(4)) {
            void *src = qz_row_source(&rng, (qd_kind)k, types[t], 8 * 1200);
            check_rows(types[t], 8, 1200, src, 0, 0);
            check_rows(types[t], 60, 40, src, 0, 0);
            free(src);
        }
}

TEST(test_rows_bad)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int t = 0; t < 3; t++)
        for (int round = 0; round < (slow ? 20 : 4); round++) {
            uint64_t n = 3 * 2100;
            void *src = qz_row_source(&rng, QD_NORMAL, types[t], n);
            for (int i = 0; i < 1 + round; i++)
                qt_put(src, types[t], qt_below(&rng, n),
                       i % 3 == 0   ? nan("")
                       : i % 3 == 1 ? -HUGE_VAL
                                    : 70000.0);
            check_rows(types[t], 3, 2100, src, 0, 0);
            free(src);
        }
}

/* ---- the rest ---- */

/* Four entries of the screen are added in 16 bits. */
TEST(test_tables)
{
    static qc_cuda_search_tables t;
    qc_cuda_search_tables_fill(&t);
    uint32_t most = 0;
    for (int list = 0; list < 2; list++)
        for (int row = 0; row < 256; row++)
            for (int m = 0; m < 32; m++)
                most = t.screen[list][row][m] > most ? t.screen[list][row][m] : most;
    QT_CHECK(most > 0 && most < 1u << 14, "an entry of %u", most);
}

#ifdef QC_CUDA_SHIM
/* Grids of one block or three go round. */
TEST(test_grid_steps)
{
    qt_rng rng = qt_rng_start(__func__);
    for (unsigned grid = 1; grid <= 3; grid += 2) {
        qc_shim_set_grid(grid);
        blocks_case c = {.nf4 = grid == 1, .dtype = QC_DTYPE_BF16, .n = 4 * 8192 + 70, .block = 32};
        void *src = qd_source(&rng, QD_SPREAD, c.dtype, c.n);
        for (c.nested = 0; c.nested < 2; c.nested++)
            check_blocks(&c, src);
        free(src);
        src = qz_falling_rows(&rng, QC_DTYPE_F16, 9, 1100);
        check_rows(QC_DTYPE_F16, 9, 1100, src, 0, 0);
        check_integer_rows((qz_rows){.dtype = QC_DTYPE_F16, .rows = 9, .cols = 1100, .src = src});
        free(src);
    }
    qc_shim_set_grid(0);
}
#endif

int main(int argc, char **argv)
{
    static qc_cuda_search_tables t;
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    qd_start();
    qc_cuda_search_tables_fill(&t);
    tables = qd_new_from(&t, sizeof t, 0);
    int failed = test_run_all(NULL);
    qd_drop(&tables);
    qd_end();
    return failed;
}
