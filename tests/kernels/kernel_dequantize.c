/* Dequantizing on the device leaves the bytes of the scalar truth. */
#include "tests/fixtures/quant_device_fixture.h"

#include "kernels/cuda_quantize.h"
#include "quant/quant_internal.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

static int slow;

static const qc_dtype types[3] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};

/* ---- weights ----------------------------------------------------------------------------------
 */

/* A weight in host memory, everything random; scales of any size, so that some overflow. */
typedef struct {
    qc_weights w; /* pointers to host memory */
    uint8_t *codes, *absmax_codes;
    float *scales; /* plain absmax, or what the double-quantized ones decode to */
    float *nested, *map;
    float code_map[16];
    uint64_t code_bytes, blocks, groups;
} host_weight;

typedef enum { SCALES_SMALL, SCALES_LARGE, SCALES_ODD, SCALES_NESTED } scale_kind;

static float scale_value(qt_rng *rng, scale_kind kind)
{
    if (kind == SCALES_LARGE) /* float16 overflows, or bfloat16 and float */
        return ldexpf(1.0f + (float)qt_uniform(rng), qt_below(rng, 3) ? 15 : 127);
    if (kind == SCALES_ODD) {
        static const float odd[] = {0.0f, -0.0f, 0x1p-149f, 0x1p-126f, -1.5f, 0x1p-20f, 65520.0f};
        uint64_t i = qt_below(rng, 10);
        return i < 7 ? odd[i] : i == 7 ? INFINITY : i == 8 ? -INFINITY : qt_any_float(rng);
    }
    return fabsf(qt_randn(rng)) * 0.1f;
}

/* What is dequantized: every form, integers by blocks and by rows. */
typedef struct {
    const qc_form_ops *ops;
    int by_rows;
} tried_form;

static const tried_form forms[] = {
    {&qc_form_nf4, 0},   {&qc_form_int8_rows, 1}, {&qc_form_int8_blocks, 0}, {&qc_form_w2a16, 0},
    {&qc_form_w3a16, 0}, {&qc_form_w4a16, 0},     {&qc_form_w5a16, 0},       {&qc_form_w6a16, 0},
    {&qc_form_w7a16, 0}, {&qc_form_w8a16, 0},     {&qc_form_w8a8, 0},        {&qc_form_w2a16, 1},
    {&qc_form_w3a16, 1}, {&qc_form_w4a16, 1},     {&qc_form_w5a16, 1},       {&qc_form_w6a16, 1},
    {&qc_form_w7a16, 1}, {&qc_form_w8a16, 1},     {&qc_form_w8a8, 1}};
#define FORMS (sizeof forms / sizeof *forms)

static int can_be_nested(const tried_form *f)
{
    return !f->by_rows && !f->ops->integer;
}

/* Packed codes have whole groups in a row, which begins with a byte, so that it has more columns
 * then. */
static host_weight make_weight(qt_rng *rng, const tried_form *f, uint64_t rows, uint64_t cols,
                               uint32_t block, scale_kind scales, int code_map)
{
    host_weight h;
    memset(&h, 0, sizeof h);
    if (f->ops->low_first) {
        const uint64_t whole = f->by_rows ? 1 + (f->ops->bits == 4) : block;
        cols = (cols + whole - 1) / whole * whole;
    }
    uint64_t n = rows * cols;
    h.w = (qc_weights){.form = {.ops = f->ops, .cols = cols}, .rows = rows};
    h.w.form.block_elems = f->by_rows ? 0 : block;
    h.code_bytes = qc_form_code_bytes(&h.w.form, n);
    h.blocks = qc_form_scales(&h.w.form, n);
    h.codes = qt_alloc(h.code_bytes, 1);
    for (uint64_t i = 0; i < h.code_bytes; i++)
        h.codes[i] = (uint8_t)qt_next(rng);
    h.scales = qt_alloc(h.blocks, 4);
    for (uint64_t i = 0; i < h.blocks; i++)
        h.scales[i] = scale_value(rng, scales);
    h.w.codes = h.codes;
    if (scales == SCALES_NESTED) {
        uint32_t nested_block = 64;
        h.groups = h.blocks / nested_block + 1;
        h.absmax_codes = qt_alloc(h.blocks, 1);
        h.nested = qt_alloc(h.groups, 4);
        h.map = qt_alloc(256, 4);
        memcpy(h.map, qc_dynamic_map, 256 * 4);
        for (uint64_t i = 0; i < h.blocks; i++)
            h.absmax_codes[i] = (uint8_t)qt_next(rng);
        for (uint64_t i = 0; i < h.groups; i++)
            h.nested[i] = fabsf(qt_randn(rng));
        h.w.form.offset = 0.0625f;
        h.w.nested_block = nested_block;
        qc_quant_ops_for(QC_ISA_SCALAR)
            ->nested_dequantize(h.absmax_codes, h.nested, h.map, h.blocks, nested_block,
                                h.w.form.offset, h.scales);
    } else {
        h.w.absmax = h.scales;
    }
    memcpy(h.code_map, qc_nf4_code, sizeof h.code_map);
    if (code_map)
        for (int i = 0; i < 16; i++)
            h.code_map[i] = qt_randn(rng) * 3.0f;
    return h;
}

static void drop_weight(host_weight *h)
{
    free(h->codes), free(h->scales), free(h->absmax_codes), free(h->nested), free(h->map);
}

/* Values of rows [first_row, first_row + rows) as floats, by the scalar truth on the whole. */
static float *values_of(const host_weight *h, uint64_t first_row, uint64_t rows)
{
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    uint64_t cols = h->w.form.cols, n = h->w.rows * cols, overflow;
    float *all = qt_alloc(n, 4), *out = qt_alloc(rows * cols, 4);
    const qc_form form = {.ops = h->w.form.ops,
                          .block_elems = h->w.form.block_elems,
                          .cols = cols,
                          .code_map = h->code_map};
    uint64_t whole = n;
    if (form.ops->integer && form.block_elems) /* the last block of bytes may be short here */
        whole = n / form.block_elems * form.block_elems;
    form.ops->dequantize(ops, &form, h->codes, h->scales, whole, all, QC_DTYPE_F32, &overflow);
    for (uint64_t i = whole; i < n; i++)
        all[i] = qc_form_value(form.ops, qc_form_code_at(form.ops, h->codes, i),
                               h->scales[h->blocks - 1]);
    memcpy(out, all + first_row * cols, (size_t)(rows * cols) * 4);
    free(all);
    return out;
}

/* Values of some columns of the same rows. */
static void check_columns(const host_weight *h, uint64_t col, uint64_t cols, qc_dtype dtype)
{
    char what[120];
    const uint64_t rows = h->w.rows, ld = (cols + 7) / 8 * 8;
    const size_t each = qt_size(dtype);
    snprintf(what, sizeof what, "%s columns %" PRIu64 "+%" PRIu64 " of %" PRIu64 " %s",
             h->w.form.ops->name, col, cols, h->w.form.cols, qc_dtype_name(dtype));
    float *values = values_of(h, 0, rows);
    unsigned char *want = qt_alloc(rows * ld, each);
    memset(want, 0, (size_t)(rows * ld) * each);
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t overflow;
        qc_quant_ops_for(QC_ISA_SCALAR)
            ->cast(values + row * h->w.form.cols + col, QC_DTYPE_F32, cols, want + row * ld * each,
                   dtype, &overflow);
    }
    qc_weights w = h->w;
    const qc_weights_part part = {0, rows, col, cols};
    qd_buffer d_codes = qd_new_from(h->codes, (size_t)h->code_bytes, 0);
    qd_buffer d_scales = qd_new_from(h->scales, (size_t)h->blocks * 4, 4);
    qd_buffer d_out = qd_new((size_t)(rows * ld) * each, 0);
    w.codes = d_codes.p;
    w.absmax = d_scales.p;
    QD_OK(qc_cuda_dequantize_part(&w, &part, d_out.p, dtype, ld, NULL, NULL, qd.stream, &qd.err));
    unsigned char *got = qd_take(&d_out, what);
    qd_same(got, want, (size_t)(rows * ld) * each, what);
    free(got), free(want), free(values);
    qd_drop(&d_codes), qd_drop(&d_scales);
}

static void check_dequantize(const host_weight *h, int code_map, uint64_t first_row, uint64_t rows,
                             qc_dtype dtype, uint64_t ld, size_t dst_offset, const int *exponent)
{
    char what[200];
    uint64_t cols = h->w.form.cols;
    size_t each = qt_size(dtype);
    snprintf(what, sizeof what,
             "%s block %u rows %" PRIu64 "+%" PRIu64 " of %" PRIu64 " x %" PRIu64 " ld %" PRIu64
             " %s dst+%zu exponent %d",
             h->w.form.ops->name, h->w.form.block_elems, first_row, rows, h->w.rows, cols, ld,
             qc_dtype_name(dtype), dst_offset, exponent ? *exponent : 0);
    float *values = values_of(h, first_row, rows);
    if (exponent)
        for (uint64_t i = 0; i < rows * cols; i++)
            values[i] = ldexpf(values[i], *exponent);
    unsigned char *want = qt_alloc(rows * ld, each);
    uint64_t overflow = UINT64_MAX;
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t in_row;
        qc_quant_ops_for(QC_ISA_SCALAR)
            ->cast(values + row * cols, QC_DTYPE_F32, cols, want + row * ld * each, dtype, &in_row);
        if (in_row != UINT64_MAX && overflow == UINT64_MAX)
            overflow = (first_row + row) * cols + in_row;
    }

    qc_weights w = h->w;
    qd_buffer d_codes = qd_new_from(h->codes, (size_t)h->code_bytes, 0);
    qd_buffer d_scales = qd_new_from(h->scales, (size_t)h->blocks * 4, 4);
    qd_buffer d_map = qd_new_from(h->code_map, sizeof h->code_map, 4);
    qd_buffer d_out = qd_new((size_t)(rows * ld) * each, dst_offset * each);
    qd_buffer d_overflow = qd_new(8, 8), d_exponent = qd_new(4, 4);
    qd_buffer d_absmax_codes = qd_new(1, 0), d_nested = qd_new(4, 0), d_nested_map = qd_new(4, 0);
    w.codes = d_codes.p;
    w.absmax = d_scales.p;
    w.form.code_map = code_map ? d_map.p : NULL;
    if (h->absmax_codes) {
        qd_drop(&d_absmax_codes), qd_drop(&d_nested), qd_drop(&d_nested_map);
        d_absmax_codes = qd_new_from(h->absmax_codes, (size_t)h->blocks, 5);
        d_nested = qd_new_from(h->nested, (size_t)h->groups * 4, 4);
        d_nested_map = qd_new_from(h->map, 256 * 4, 8);
        w.absmax = NULL;
        w.absmax_codes = d_absmax_codes.p;
        w.nested_absmax = d_nested.p;
        w.nested_map = d_nested_map.p;
    }
    if (exponent)
        QD_OK(qc_cuda_to_device(d_exponent.p, exponent, 4, qd.stream, &qd.err));
    QD_OK(qc_cuda_dequantize(&w, first_row, rows, d_out.p, dtype, ld,
                             exponent ? d_exponent.p : NULL, d_overflow.p, qd.stream, &qd.err));
    unsigned char *got = qd_take(&d_out, what);
    uint64_t *got_overflow = qd_take(&d_overflow, what);
    qd_same(got, want, (size_t)(rows * ld) * each, what);
    QT_CHECK(*got_overflow == overflow, "%s: overflow at %" PRIu64 ", not %" PRIu64, what,
             *got_overflow, overflow);
    free(got), free(got_overflow), free(want), free(values);
    qd_drop(&d_codes), qd_drop(&d_scales), qd_drop(&d_map), qd_drop(&d_exponent);
    qd_drop(&d_absmax_codes), qd_drop(&d_nested), qd_drop(&d_nested_map);
}

/* Shapes: several thread blocks, K no multiple of 8 or of the block, blocks over rows, one element,
 * with and without a gap behind the rows. */
TEST(test_shapes)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t shapes[][3] = {{1, 1, 1},       {1, 7, 8},       {3, 8, 8},
                                         {5, 576, 576},   {4, 72, 80},     {3, 100, 104},
                                         {2, 4104, 4112}, {3, 4100, 4100}, {7, 63, 63},
                                         {9, 65, 72},     {1, 8199, 8199}, {5, 40, 41}};
    for (size_t k = 0; k < FORMS; k++)
        for (int t = 0; t < 3; t++)
            for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s += qt_every(2)) {
                scale_kind scales =
                    can_be_nested(&forms[k]) && s % 2 ? SCALES_NESTED : SCALES_SMALL;
                host_weight h = make_weight(&rng, &forms[k], shapes[s][0], shapes[s][1],
                                            s % 3 ? 64 : 32, scales, 0);
                check_dequantize(&h, 0, 0, h.w.rows, types[t],
                                 h.w.form.cols + shapes[s][2] - shapes[s][1], 0, NULL);
                drop_weight(&h);
            }
}

/* Rows out of the middle, and destinations that are not aligned. */
TEST(test_rows_of_weight)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t cols[] = {24, 60, 33};
    for (size_t k = 0; k < FORMS; k++)
        for (int c = 0; c < 3; c++) {
            host_weight h = make_weight(&rng, &forms[k], 11, cols[c], 64, SCALES_SMALL, 1);
            for (int t = 0; t < 3; t++)
                for (uint64_t first = 0; first < 11; first += 3 * qt_every(2)) {
                    uint64_t rows = qt_below(&rng, 12 - first);
                    const uint64_t ld = h.w.form.cols;
                    check_dequantize(&h, 1, first, rows, types[t], ld, first % 2, NULL);
                    check_dequantize(&h, 1, first, rows, types[t], ld + 8, 0, NULL);
                }
            drop_weight(&h);
        }
}

/* Columns that begin within a block, a word or a byte, and end there. */
TEST(test_columns_of_weight)
{
    qt_rng rng = qt_rng_start(__func__);
    static const uint64_t parts[][2] = {{0, 64}, {8, 72}, {24, 13}, {3, 40}, {61, 67}, {56, 80}};
    for (size_t k = 0; k < FORMS; k++)
        for (int c = 0; c < 2; c++) {
            host_weight h = make_weight(&rng, &forms[k], 5, c ? 136 : 141, 64, SCALES_SMALL, 0);
            for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
                check_columns(&h, parts[i][0], parts[i][1], types[i % 3]);
            drop_weight(&h);
        }
}

TEST(test_block_sizes)
{
    qt_rng rng = qt_rng_start(__func__);
    for (size_t k = 0; k < FORMS; k++)
        for (uint32_t block = 32; !forms[k].by_rows && block <= 4096; block *= 2) {
            scale_kind scales = can_be_nested(&forms[k]) ? SCALES_NESTED : SCALES_SMALL;
            host_weight h = make_weight(&rng, &forms[k], 3, 2 * block + 40, block, scales, 0);
            check_dequantize(&h, 0, 0, 3, QC_DTYPE_F16, h.w.form.cols, 0, NULL);
            drop_weight(&h);
        }
}

/* Zeros behind rows, also behind one that ends with products that overflow. */
TEST(test_gap_behind_large)
{
    qt_rng rng = qt_rng_start(__func__);
    for (size_t k = 0; k < FORMS; k++)
        for (int t = 0; t < 3; t++) {
            host_weight h = make_weight(&rng, &forms[k], 9, 72, 64, SCALES_LARGE, 0);
            check_dequantize(&h, 0, 0, 9, types[t], h.w.form.cols + 24, 0, NULL);
            drop_weight(&h);
        }
}

/* Products that overflow, infinite scales, subnormals: bytes, NaNs too, and the lowest index. */
TEST(test_range)
{
    qt_rng rng = qt_rng_start(__func__);
    for (size_t k = 0; k < FORMS; k++)
        for (int t = 0; t < 3; t++)
            for (int round = 0; round < (slow ? 60 : 8); round += (int)qt_every(3)) {
                host_weight h = make_weight(&rng, &forms[k], 12, round % 2 ? 200 : 203, 64,
                                            round % 4 < 2 ? SCALES_LARGE : SCALES_ODD, round % 3);
                check_dequantize(&h, round % 3 != 0, 0, 12, types[t], h.w.form.cols, 0, NULL);
                /* the gap is zeros whatever the scale of a row's end */
                check_dequantize(&h, round % 3 != 0, 0, 12, types[t], (h.w.form.cols + 15) / 8 * 8,
                                 0, NULL);
                drop_weight(&h);
            }
}

TEST(test_exponent)
{
    qt_rng rng = qt_rng_start(__func__);
    static const int exponents[] = {0, 1, -1, 9, -20, 24, 100, -60};
    for (size_t k = 0; k < FORMS; k++)
        for (int t = 0; t < 3; t++)
            for (size_t e = 0; e < sizeof exponents / sizeof *exponents; e += qt_every(3)) {
                host_weight h =
                    make_weight(&rng, &forms[k], 5, e % 2 ? 200 : 203, 64, SCALES_SMALL, 0);
                check_dequantize(&h, 0, 0, 5, types[t], h.w.form.cols, 0, &exponents[e]);
                drop_weight(&h);
            }
}

TEST(test_arguments)
{
    qc_weights w = {.form = {.ops = &qc_form_nf4, .block_elems = 64, .cols = 64}, .rows = 4};
    float absmax = 0;
    w.absmax = &absmax;
    qc_cuda_stream s = qd.stream;
    assert_int_equal(qc_cuda_dequantize(&w, 0, 4, NULL, QC_DTYPE_F64, 64, NULL, NULL, s, &qd.err),
                     QC_ERR_USAGE);
    assert_int_equal(qc_cuda_dequantize(&w, 0, 5, NULL, QC_DTYPE_F32, 64, NULL, NULL, s, &qd.err),
                     QC_ERR_USAGE);
    assert_int_equal(qc_cuda_dequantize(&w, 5, 0, NULL, QC_DTYPE_F32, 64, NULL, NULL, s, &qd.err),
                     QC_ERR_USAGE);
    assert_int_equal(qc_cuda_dequantize(&w, 0, 4, NULL, QC_DTYPE_F32, 63, NULL, NULL, s, &qd.err),
                     QC_ERR_USAGE);
    w.form.block_elems = 96;
    assert_int_equal(qc_cuda_dequantize(&w, 0, 4, NULL, QC_DTYPE_F32, 64, NULL, NULL, s, &qd.err),
                     QC_ERR_USAGE);
    w.form.block_elems = 64;
    w.absmax = NULL;
    assert_int_equal(qc_cuda_dequantize(&w, 0, 4, NULL, QC_DTYPE_F32, 64, NULL, NULL, s, &qd.err),
                     QC_ERR_USAGE);
    w.nested_block = 256;
    QD_OK(qc_cuda_dequantize(&w, 4, 0, NULL, QC_DTYPE_F32, 64, NULL, NULL, s, &qd.err));
    w.form.ops = &qc_form_int8_rows;
    w.absmax = &absmax;
    assert_int_equal(qc_cuda_dequantize(&w, 0, 4, NULL, QC_DTYPE_F32, 64, NULL, NULL, s, &qd.err),
                     QC_ERR_USAGE);
}

#ifdef QC_CUDA_SHIM
/* Thread blocks that go round, as a device's do behind 2^31 of them. */
TEST(test_grid_steps)
{
    qc_shim_set_grid(1);
    test_shapes(state);
    qc_shim_set_grid(0);
}
#endif

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    qd_start();
    int failed = test_run_all(NULL);
    qd_end();
    return failed;
}
