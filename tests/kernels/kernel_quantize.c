/* The quantizing kernels leave what the scalar truth leaves, bit for bit: codes, scales, error
 * sums, bad elements. --slow: more sizes. */
#include "tests/fixtures/quantizer_fixture.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

static int slow;

/* One call on elements [0, n) of src, compared with the truth. Offsets are in elements of the
 * source and bytes of the codes. */
typedef struct {
    int nf4;
    qc_dtype dtype;
    uint64_t n;
    uint32_t block;
    size_t src_offset, codes_offset;
    int errors;
} blocks_case;

static void check_blocks(const blocks_case *c, const void *src)
{
    char what[160];
    snprintf(what, sizeof what, "%s %s n %" PRIu64 " block %u src+%zu codes+%zu errors %d",
             c->nf4 ? "nf4" : "int8", qc_dtype_name(c->dtype), c->n, c->block, c->src_offset,
             c->codes_offset, c->errors);
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    uint64_t blocks = c->n / c->block + (c->n % c->block != 0);
    size_t code_bytes = c->nf4 ? (size_t)(c->n + 1) / 2 : (size_t)c->n;
    uint8_t *codes = qt_alloc(code_bytes, 1);
    float *absmax = qt_alloc(blocks, sizeof *absmax);
    qc_block_error *block_errors = qt_alloc(blocks, sizeof *block_errors);
    qc_block_error *got_errors = qt_alloc(blocks, sizeof *got_errors);
    qc_piece_sums sums, got = {0};
    if (c->nf4)
        ops->nf4_quantize(src, c->dtype, c->n, c->block, codes, absmax,
                          c->errors ? block_errors : NULL, &sums);
    else
        ops->int8_blocks_quantize(src, c->dtype, c->n, c->block, (int8_t *)codes, absmax,
                                  c->errors ? block_errors : NULL, &sums);

    size_t each = qt_size(c->dtype);
    qd_buffer d_src = qd_new_from(src, (size_t)c->n * each, c->src_offset * each);
    qd_buffer d_codes = qd_new(code_bytes, c->codes_offset);
    qd_buffer d_absmax = qd_new((size_t)blocks * 4, 4);
    qd_buffer d_errors = qd_new((size_t)blocks * 16, 16);
    qd_buffer d_bad = qd_new(8, 8);
    const qc_cuda_quantize_job a = {
        .src = d_src.p,
        .dtype = c->dtype,
        .n = c->n,
        .form = {.ops = c->nf4 ? &qc_form_nf4 : &qc_form_int8_blocks, .block_elems = c->block},
        .codes = d_codes.p,
        .absmax = d_absmax.p,
        .sums = c->errors ? d_errors.p : NULL,
        .bad = d_bad.p};
    QD_OK(qc_cuda_quantize(&a, qd.stream, &qd.err));
    uint8_t *got_codes = qd_take(&d_codes, what);
    float *got_absmax = qd_take(&d_absmax, what);
    float *lanes = qd_take(&d_errors, what);
    uint64_t *bad = qd_take(&d_bad, what);
    qd_drop(&d_src);

    if (!qz_check_bad(bad, &sums, what)) {
        qd_same(got_codes, codes, code_bytes, what);
        qd_same(got_absmax, absmax, (size_t)blocks * 4, what);
        if (c->errors) {
            qc_blocks_collect(got_absmax, lanes, blocks, got_errors, &got);
            qd_same(got_errors, block_errors, (size_t)blocks * sizeof *got_errors, what);
            QT_CHECK(qc_f64_bits(got.sum_ee) == qc_f64_bits(sums.sum_ee) &&
                         qc_f64_bits(got.sum_xx) == qc_f64_bits(sums.sum_xx),
                     "%s: sums %a %a, not %a %a", what, got.sum_ee, got.sum_xx, sums.sum_ee,
                     sums.sum_xx);
        } else {
            for (size_t i = 0; i < (size_t)blocks * 16; i++)
                QT_CHECK(((unsigned char *)lanes)[i] == QD_POISON, "%s: errors written", what);
        }
    }
    free(codes), free(absmax), free(block_errors), free(got_errors);
    free(got_codes), free(got_absmax), free(lanes), free(bad);
}

static void check_source(const blocks_case *c, qd_kind kind, qt_rng *rng)
{
    void *src = qd_source(rng, kind, c->dtype, c->n);
    check_blocks(c, src);
    free(src);
}

/* Every kind of source through the kernel of pairs (blocks to 128) and that of halves. */
TEST(test_kinds)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint32_t blocks[] = {32, 64, 128, 256};
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (int k = 0; k < QD_KINDS; k += (int)qt_every(4))
                for (int b = 0; b < 4; b++) {
                    blocks_case c = {nf4, types[t], 64 * blocks[b] + 1024, blocks[b], 0, 0, 1};
                    check_source(&c, (qd_kind)k, &rng);
                }
}

/* Every finite 16-bit pattern, in blocks of 64. */
TEST(test_patterns)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 1; t < 3; t++) {
            blocks_case c = {nf4, types[t], 65536, 64, 0, 0, 1};
            check_source(&c, QD_PATTERNS, &rng);
        }
}

/* Ends: nothing, one element, odd, a short last block, several thread blocks and a short one. */
TEST(test_sizes)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t sizes[] = {0, 1, 31, 63, 64, 65, 127, 1023, 16 * 64, 8195};
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s += qt_every(3))
                for (int errors = 0; errors < 2; errors++) {
                    blocks_case c = {nf4, types[t], sizes[s], 64, 0, 0, errors};
                    check_source(&c, QD_NORMAL, &rng);
                }
}

/* Sources and codes at addresses that are no multiple of 16, of 4, of anything. */
TEST(test_alignment)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (size_t offset = 0; offset < 12; offset += qt_every(5)) {
                blocks_case c = {nf4, types[t], 517, 64, offset % 3 ? offset : 0, offset / 3, 1};
                check_source(&c, QD_NORMAL, &rng);
            }
}

TEST(test_block_sizes)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (uint32_t block = 32; block <= 4096; block *= 2)
                for (int more = 0; more < 2; more++) {
                    blocks_case c = {nf4, types[t], block + (more ? block / 2 + 3 : 0), block, 0,
                                     0,   1};
                    check_source(&c, QD_NORMAL, &rng);
                }
}

/* Several bad elements: the lowest is named, whichever thread, block or thread block has it. */
TEST(test_bad)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint32_t blocks[] = {64, 128, 512};
    for (int nf4 = 0; nf4 < 2; nf4++)
        for (int t = 0; t < 3; t++)
            for (int b = 0; b < 3; b++)
                for (int round = 0; round < (slow ? 40 : 6); round += (int)qt_every(5)) {
                    uint64_t n = 8200 + qt_below(&rng, 600);
                    blocks_case c = {nf4, types[t], n, blocks[b], 0, 0, round % 2};
                    void *src = qd_source(&rng, QD_NORMAL, types[t], n);
                    for (int i = 0; i < 1 + round; i++) {
                        uint64_t at = round < 2 ? n - 1 - 70 * (uint64_t)i : qt_below(&rng, n);
                        qt_put(src, types[t], at, qz_bad_value(i));
                    }
                    check_blocks(&c, src);
                    free(src);
                }
}

/* Every NaN and infinity of 16 bits is seen. */
TEST(test_bad_patterns)
{
    for (int t = 1; t < 3; t++) {
        uint32_t infinity = types[t] == QC_DTYPE_F16 ? QC_F16_INF : QC_BF16_INF;
        uint16_t src[64];
        for (uint32_t h = infinity; h < 0x8000u; h += slow ? 1 : 37 * qt_every(7)) {
            for (unsigned i = 0; i < 64; i++)
                src[i] = (uint16_t)(i * 3);
            src[h % 64] = (uint16_t)(h | (h & 1u) << 15);
            blocks_case c = {1, types[t], 64, 64, 0, 0, 0};
            check_blocks(&c, src);
        }
    }
}

/* ---- rows -------------------------------------------------------------------------------------
 */

static void rows_truth(const qz_rows *r, void *codes, float *scb, qc_piece_sums *sums)
{
    qc_quant_ops_for(QC_ISA_SCALAR)
        ->int8_rows_quantize(r->src, r->dtype, r->rows, r->cols, codes, scb, sums);
}

static qc_status rows_kernel(const qz_rows *r, const qz_rows_io *at)
{
    const qc_cuda_quantize_job a = {.src = at->src,
                                    .dtype = r->dtype,
                                    .n = r->rows * r->cols,
                                    .form = {.ops = &qc_form_int8_rows, .cols = r->cols},
                                    .codes = at->codes,
                                    .absmax = at->scb,
                                    .sums = at->errors,
                                    .bad = at->bad};
    return qc_cuda_quantize(&a, qd.stream, &qd.err);
}

static void check_rows(qc_dtype dtype, uint64_t rows, uint64_t cols, const void *src,
                       size_t src_offset, size_t codes_offset, int errors)
{
    const qz_rows r = {.dtype = dtype,
                       .rows = rows,
                       .cols = cols,
                       .src = src,
                       .src_offset = src_offset,
                       .codes_offset = codes_offset,
                       .errors = errors};
    qz_check_rows(&r, rows_truth, rows_kernel);
}

TEST(test_rows_shapes)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t shapes[][2] = {{0, 5},    {1, 1},    {37, 1},    {5, 63},   {9, 64},
                                         {130, 16}, {3, 1023}, {3, 1024},  {2, 1025}, {17, 1040},
                                         {2, 2880}, {1, 9000}, {1, 17408}, {1, 33000}};
    for (int t = 0; t < 3; t++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s += qt_every(2)) {
            uint64_t rows = shapes[s][0], cols = shapes[s][1];
            void *src = qz_row_source(&rng, QD_NORMAL, types[t], rows * cols);
            check_rows(types[t], rows, cols, src, 0, 0, s % 5 != 4);
            if (cols < 2000)
                check_rows(types[t], rows, cols, src, 1, 3, 1);
            free(src);
        }
}

TEST(test_rows_kinds)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < QD_KINDS; k += (int)qt_every(4)) {
            void *src = qz_row_source(&rng, (qd_kind)k, types[t], 65536);
            check_rows(types[t], 32, 2048, src, 0, 0, 1);
            check_rows(types[t], 910, 72, src, 0, 0, 1);
            free(src);
        }
}

/* Without error sums nothing but __syncwarp brings the lanes of a whole run together between its
 * codes and their stores. */
TEST(test_rows_without_errors)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int t = 0; t < 3; t++) {
        void *src = qz_row_source(&rng, QD_NORMAL, types[t], 3 * 2048);
        check_rows(types[t], 6, 1024, src, 0, 0, 0);
        check_rows(types[t], 3, 2048, src, 0, 0, 0);
        free(src);
    }
}

/* Equal errors in many columns: the lowest is named. */
TEST(test_rows_ties)
{
    qt_rng rng = qt_rng_start(__func__);
    for (int round = 0; round < 8; round += (int)qt_every(4)) {
        float src[3 * 2100];
        for (unsigned i = 0; i < 3 * 2100; i++)
            src[i] = i % 2100 == 77 ? 127.0f : (float)((int)qt_below(&rng, 4) - 2);
        for (int i = 0; i < 5; i++)
            src[qt_below(&rng, 3 * 2100)] = i % 2 ? 3.25f : -3.25f;
        check_rows(QC_DTYPE_F32, 3, 2100, src, 0, 0, 1);
    }
}

/* Not finite, or only too large for float16: 65520 is, the float below is not. */
TEST(test_rows_bad)
{
    qt_rng rng = qt_rng_start(__func__);
    static const double values[] = {NAN, INFINITY, -INFINITY, 65520.0, -70000.0, 1e30};
    for (int t = 0; t < 3; t++)
        for (int round = 0; round < 24; round += (int)qt_every(5)) {
            uint64_t cols = round % 3 == 0 ? 100 : round % 3 == 1 ? 3000 : 33000;
            uint64_t rows = cols == 33000 ? 1 : 5;
            void *src = qz_row_source(&rng, QD_NORMAL, types[t], rows * cols);
            for (int i = 0; i < 1 + round % 4; i++)
                qt_put(src, types[t], qt_below(&rng, rows * cols), values[(round + i) % 6]);
            check_rows(types[t], rows, cols, src, (size_t)(round % 2), 0, 1);
            free(src);
        }
    float edge[64] = {0};
    edge[7] = qt_step(65520.0f, -1);
    check_rows(QC_DTYPE_F32, 1, 64, edge, 0, 0, 1);
    edge[9] = 65520.0f;
    check_rows(QC_DTYPE_F32, 1, 64, edge, 0, 0, 1);
}

#ifdef QC_CUDA_SHIM
/* Rows of 9000 columns are 16 runs in shared memory, 33 KB: four blocks are wanted where two of the
 * largest kind would be. */
TEST(test_rows_resident)
{
    qt_rng rng = qt_rng_start(__func__);
    if (qd.device.sm != 90)
        skip(); /* the numbers below are an sm_90's */
    assert_int_equal(qd.device.shared_multiprocessor_bytes, 228 << 10);
    void *src = qz_row_source(&rng, QD_NORMAL, QC_DTYPE_F16, 9000);
    /* The same kernel with 8 runs, and again with 16: each time what it is launched with. */
    static const uint64_t cols[] = {9000, 1000, 9000};
    static const int least[] = {58, 61, 58};
    for (size_t i = 0; i < sizeof cols / sizeof *cols; i++) {
        check_rows(QC_DTYPE_F16, 1, cols[i], src, 0, 0, 1);
        assert_in_range(qc_shim_last_carveout(), least[i], least[i] + 2);
    }
    free(src);
}

/* More than a grid can have, where a grid has one block or three: thread blocks go round. A device
 * comes to that with 2^31 thread blocks only. */
TEST(test_grid_steps)
{
    static const uint64_t shapes[][2] = {{130, 16}, {40, 1024}, {5, 2100}};
    qt_rng rng = qt_rng_start(__func__);
    for (unsigned grid = 1; grid <= 3; grid += 2) {
        qc_shim_set_grid(grid);
        test_sizes(state);
        for (int t = 0; t < 3; t++) {
            for (int nf4 = 0; nf4 < 2; nf4++)
                for (uint32_t block = 32; block <= 1024; block *= 2) {
                    blocks_case c = {nf4, types[t], 8195, block, 0, 0, 1};
                    check_source(&c, QD_NORMAL, &rng);
                }
            for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
                uint64_t rows = shapes[s][0], cols = shapes[s][1];
                void *src = qz_falling_rows(&rng, types[t], rows, cols);
                check_rows(types[t], rows, cols, src, 0, 0, (int)(s % 2));
                free(src);
            }
        }
    }
    qc_shim_set_grid(0);
}
#endif

/* ---- arguments --------------------------------------------------------------------------------
 */

TEST(test_arguments)
{
    uint64_t bad = 0;
    qc_cuda_quantize_job a = {.dtype = QC_DTYPE_F32,
                              .n = 64,
                              .form = {.ops = &qc_form_nf4, .block_elems = 48},
                              .bad = &bad};
    assert_int_equal(qc_cuda_quantize(&a, qd.stream, &qd.err), QC_ERR_USAGE);
    a.form.block_elems = 16;
    assert_int_equal(qc_cuda_quantize(&a, qd.stream, &qd.err), QC_ERR_USAGE);
    a.form = (qc_form){.ops = &qc_form_int8_blocks, .block_elems = 8192};
    assert_int_equal(qc_cuda_quantize(&a, qd.stream, &qd.err), QC_ERR_USAGE);
    a.form.block_elems = 64;
    a.dtype = QC_DTYPE_F64;
    assert_int_equal(qc_cuda_quantize(&a, qd.stream, &qd.err), QC_ERR_USAGE);
    a.form = (qc_form){.ops = &qc_form_int8_rows, .cols = 1};
    assert_int_equal(qc_cuda_quantize(&a, qd.stream, &qd.err), QC_ERR_USAGE);
    /* Integers by absmax have final sums, which are not those of so many elements. */
    a = (qc_cuda_quantize_job){.dtype = QC_DTYPE_F32,
                               .n = 2048,
                               .form = {.ops = &qc_form_w5a16, .block_elems = 2048},
                               .bad = &bad};
    assert_int_equal(qc_cuda_quantize(&a, qd.stream, &qd.err), QC_ERR_USAGE);
}

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    qd_start();
    int failed = test_run_all(NULL);
    qd_end();
    return failed;
}
