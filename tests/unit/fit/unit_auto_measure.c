/* The first pass of --to auto: sampled errors against errors computed here, and the figures for
 * normally distributed weights against the quantizers. */
#include "base/alloc.h"
#include "convert/fit/auto_measure.h"
#include "quant/quant_decode.h"
#include "quant/quant_ops.h"
#include "quant/scale_search.h"
#include "tests/fixtures/sanitized.h"
#include "tests/fixtures/st_header.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <math.h>

/* The candidates of bitsandbytes, each at its first step. */
static const qc_candidate_form *forms(void)
{
    static qc_candidate_form all[QC_CANDIDATES];
    static const qc_recipe_options bitsandbytes;
    for (unsigned c = 0; c < QC_CANDIDATES; c++)
        (void)qc_candidate_step(&qc_candidates_of(&bitsandbytes)[c], 0, &all[c]);
    return all;
}

static qc_auto_sample sample_of(uint64_t rows, uint64_t cols)
{
    return (qc_auto_sample){.rows = rows, .cols = cols, .wanted = 7, .forms = forms()};
}

static uint64_t rng_state = 88172645463325252u;

static double unit(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return ((double)(rng_state >> 11) + 0.5) * 0x1p-53;
}

static float normal(void)
{
    return (float)(sqrt(-2 * log(unit())) * cos(6.283185307179586 * unit()));
}

typedef struct {
    char dir[256];
    qc_checkpoint *model;
    float *data;
    uint64_t rows, cols;
} fixture;

/* One F32 tensor [rows, cols] in a file. */
static void make(fixture *f, uint64_t rows, uint64_t cols, float (*value)(uint64_t))
{
    qc_error err = {0};
    qc_strbuf text;
    char path[300];
    uint64_t n = rows * cols;
    qc_st_tensor t = {.name = "w.weight", .dtype = QC_DTYPE_F32, .ndim = 2, .end = 4 * n};
    t.dims[0] = rows;
    t.dims[1] = cols;
    void *v = NULL;
    test_must(qc_malloc(&v, (size_t)(4 * n), &err), &err);
    f->data = v;
    f->rows = rows;
    f->cols = cols;
    for (uint64_t i = 0; i < n; i++)
        f->data[i] = value ? value(i) : normal();
    test_folder(f->dir, sizeof f->dir);
    qc_strbuf_init(&text, SIZE_MAX / 2);
    test_must(st_header_build(&text, &t, 1, NULL, 0, &err), &err);
    test_must(qc_strbuf_add(&text, f->data, (size_t)(4 * n), &err), &err);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", f->dir);
    test_must(qc_file_put(path, text.data, text.len, &err), &err);
    qc_strbuf_deinit(&text);
    test_must(qc_checkpoint_open(&f->model, f->dir, &err), &err);
}

static void drop(fixture *f)
{
    qc_checkpoint_close(f->model);
    qc_free(f->data);
}

static qc_auto_sample measure(const fixture *f, int transpose, int double_quant)
{
    qc_error err = {0};
    qc_auto_sample s = sample_of(transpose ? f->cols : f->rows, transpose ? f->rows : f->cols);
    s.transpose = transpose;
    test_must(qc_auto_measure(
                  &s, 1, f->model,
                  &(qc_recipe_options){.double_quant = double_quant, .scale = QC_SCALE_ABSMAX}, 1,
                  &err),
              &err);
    return s;
}

/* |x - dequantized|^2 / |x|^2 of all rows, straight from the definitions. */
static double direct(const float *x, uint64_t rows, uint64_t cols, unsigned candidate)
{
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    uint64_t n = rows * cols, overflow = UINT64_MAX;
    uint32_t block = candidate == QC_CANDIDATE_NF4 ? 64 : 32;
    void *codes = NULL, *scales = NULL, *y = NULL;
    qc_error err = {0};
    qc_piece_sums sums = {0};
    test_must(qc_malloc(&codes, (size_t)n, &err), &err);
    test_must(qc_malloc(&scales, (size_t)(4 * n), &err), &err);
    test_must(qc_malloc(&y, (size_t)(4 * n), &err), &err);
    if (candidate == QC_CANDIDATE_INT8) {
        ops->int8_rows_quantize(x, QC_DTYPE_F32, rows, cols, codes, scales, &sums);
        ops->int8_rows_dequantize(codes, scales, rows, cols, y, QC_DTYPE_F32, &overflow);
    } else {
        ops->nf4_quantize(x, QC_DTYPE_F32, n, block, codes, scales, NULL, &sums);
        ops->nf4_dequantize(codes, scales, qc_nf4_code, n, block, y, QC_DTYPE_F32, &overflow);
    }
    double ee = 0, xx = 0;
    for (uint64_t i = 0; i < n; i++) {
        double e = (double)x[i] - (double)((float *)y)[i];
        ee += e * e;
        xx += (double)x[i] * (double)x[i];
    }
    qc_free(codes);
    qc_free(scales);
    qc_free(y);
    return ee / xx;
}

static void near(double a, double b, double rel)
{
    if (!(fabs(a - b) <= rel * fabs(b)))
        fail_msg("expected %.9g, got %.9g", b, a);
}

/* A small weight is read whole: the figures are those of the whole weight. */
TEST(test_whole)
{
    fixture f;
    make(&f, 48, 70, NULL);
    qc_auto_sample s = measure(&f, 0, 0);
    assert_true(s.rows_read == 48 && s.bytes_read == 48u * 70 * 4);
    for (unsigned c = 0; c < 3; c++)
        near(s.rel_mse[c], direct(f.data, 48, 70, c), 1e-4);
    assert_true(s.rel_mse[QC_CANDIDATE_16BIT] <= 0 && s.rel_mse[QC_CANDIDATE_16BIT] >= 0);
    qc_auto_sample d = measure(&f, 0, 1); /* scales of the scales cost a little */
    assert_true(d.rel_mse[0] > s.rel_mse[0] && d.rel_mse[0] < 1.05 * s.rel_mse[0]);
    drop(&f);
}

TEST(test_transposed)
{
    fixture f;
    make(&f, 70, 48, NULL);
    float turned[48 * 70];
    for (int r = 0; r < 48; r++) {
        for (int k = 0; k < 70; k++)
            turned[r * 70 + k] = f.data[k * 48 + r];
    }
    qc_auto_sample s = measure(&f, 1, 0);
    for (unsigned c = 0; c < 3; c++)
        near(s.rel_mse[c], direct(turned, 48, 70, c), 1e-4);
    drop(&f);
}

/* Row r holds r + 1 over and over: a row's int8 error is 0 and its sum of squares tells which rows
 * were read. */
static float row_number(uint64_t i)
{
    return (float)(i / 4096 + 1);
}

static float column_number(uint64_t i)
{
    return (float)(i % 4096 + 1);
}

TEST(test_which_rows)
{
    fixture f;
    make(&f, 330, 4096, row_number);
    qc_auto_sample s = measure(&f, 0, 0);
    double want = 0;
    for (int k = 0; k < 32; k++)
        want += 4096.0 * (10 * k + 10 * k / 32 + 6) * (10 * k + 10 * k / 32 + 6);
    assert_int_equal(s.rows_read, 32);
    near(s.sum_xx, want, 1e-6);
    drop(&f);
    make(&f, 320, 4096, column_number); /* written rows are columns of the file */
    s = measure(&f, 1, 0);
    want = 0;
    for (int r = 0; r < 4; r++) {
        int first = (4096 - 205) / 3 * r + 51 * r;
        for (int i = 0; i < (r < 3 ? 51 : 52); i++)
            want += 320.0 * (first + i + 1) * (first + i + 1);
    }
    assert_int_equal(s.rows_read, 205); /* 65536 / 320, rounded up */
    near(s.sum_xx, want, 1e-6);
    drop(&f);
}

static float one_nan(uint64_t i)
{
    return i == 77 ? (float)NAN : 1;
}

static float one_large(uint64_t i)
{
    return i == 77 ? 1e6f : 1;
}

TEST(test_what_cannot_be)
{
    fixture f;
    make(&f, 8, 64, one_nan);
    qc_auto_sample s = measure(&f, 0, 1);
    assert_true(s.not_finite && isnan(s.rel_mse[0]) && isnan(s.rel_mse[1]) && isnan(s.rel_mse[2]));
    assert_true(s.rel_mse[QC_CANDIDATE_16BIT] >= 0);
    drop(&f);
    make(&f, 8, 64, one_large); /* beyond float16: no int8 */
    s = measure(&f, 0, 1);
    assert_true(!s.not_finite && isnan(s.rel_mse[2]) && s.rel_mse[0] >= 0);
    drop(&f);
}

/* A weight in FP8 is measured as its values are, sampled rows and scales of their tiles alike. */
TEST(test_coded)
{
    enum { ROWS = 330, COLS = 500, TILE = 32, ACROSS = 16, N = ROWS * COLS, TILES = 11 * ACROSS };
    static uint8_t codes[N];
    static float values[N];
    float scales[TILES], table[256];
    qc_error err = {0};
    qc_strbuf text;
    char dir[256], path[300];
    qc_checkpoint *model = NULL;
    uint64_t bad = UINT64_MAX;
    for (int i = 0; i < N; i++)
        codes[i] = (uint8_t)((i & 1) << 7 | (int)(unit() * 0x7f));
    for (int i = 0; i < TILES; i++)
        scales[i] = (float)(1 + i % 7);
    qc_tile_scales tiles = {COLS, TILE, TILE, ACROSS, scales};
    qc_f8_table(QC_DTYPE_F8_E4M3, table);
    qc_f8_decode(codes, table, &tiles, 0, N, values, &bad);
    assert_true(bad == UINT64_MAX);
    qc_st_tensor t[] = {
        {.name = "v", .dtype = QC_DTYPE_F32, .ndim = 2, .end = sizeof values},
        {.name = "w", .dtype = QC_DTYPE_F8_E4M3, .ndim = 2},
        {.name = "x", .dtype = QC_DTYPE_F32, .ndim = 1},
    };
    t[0].dims[0] = t[1].dims[0] = ROWS;
    t[0].dims[1] = t[1].dims[1] = COLS;
    t[2].dims[0] = TILES;
    t[1].begin = t[0].end;
    t[1].end = t[2].begin = t[1].begin + sizeof codes;
    t[2].end = t[2].begin + sizeof scales;
    test_folder(dir, sizeof dir);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", dir);
    qc_strbuf_init(&text, SIZE_MAX / 2);
    test_must(st_header_build(&text, t, 3, NULL, 0, &err), &err);
    test_must(qc_strbuf_add(&text, values, sizeof values, &err), &err);
    test_must(qc_strbuf_add(&text, codes, sizeof codes, &err), &err);
    test_must(qc_strbuf_add(&text, scales, sizeof scales, &err), &err);
    test_must(qc_file_put(path, text.data, text.len, &err), &err);
    qc_strbuf_deinit(&text);
    test_must(qc_checkpoint_open(&model, dir, &err), &err);
    qc_coded_weight coded = {.coding = QC_CODING_FP8,
                             .scales = 2,
                             .tile_rows = TILE,
                             .tile_cols = TILE,
                             .tiles_across = ACROSS,
                             .ndim = 2,
                             .dims = {ROWS, COLS}};
    qc_auto_sample s[] = {sample_of(ROWS, COLS), sample_of(ROWS, COLS)};
    s[1].tensor = 1;
    s[1].coded = &coded;
    test_must(qc_auto_measure(s, 2, model,
                              &(qc_recipe_options){.double_quant = 1, .scale = QC_SCALE_ABSMAX}, 1,
                              &err),
              &err);
    assert_true(s[1].rows_read == 132 && s[1].bytes_read == 132u * COLS);
    assert_memory_equal(s[0].rel_mse, s[1].rel_mse, sizeof s[0].rel_mse);
    assert_memory_equal(&s[0].sum_xx, &s[1].sum_xx, sizeof s[0].sum_xx);
    qc_checkpoint_close(model);
}

/* With the search's own sums; a weight that is read whole, straight and turned. */
TEST(test_searched)
{
    const qc_search_ops *ops = qc_search_ops_for(QC_ISA_SCALAR);
    fixture f;
    qc_error err = {0};
    make(&f, 48, 70, NULL);
    uint64_t n = 48u * 70;
    void *codes = NULL, *scales = NULL, *scratch = NULL;
    test_must(qc_malloc(&codes, (size_t)n, &err), &err);
    test_must(qc_malloc(&scales, (size_t)(4 * n), &err), &err);
    for (unsigned c = 0; c < 3; c++) {
        qc_form form = {.ops = &qc_form_nf4, .block_elems = c == QC_CANDIDATE_NF4 ? 64 : 32};
        qc_search_out out = {.codes = codes, .absmax = scales};
        qc_piece_sums sums = {0};
        const qc_form by_rows = {.ops = &qc_form_int8_rows, .cols = 70};
        const qc_form *of = c == QC_CANDIDATE_INT8 ? &by_rows : &form;
        test_must(qc_malloc_aligned(&scratch, 64, (size_t)qc_search_scratch_bytes(), &err), &err);
        ops->blocks(of, QC_SEARCH_ONCE, f.data, QC_DTYPE_F32, n, &out, scratch, &sums);
        qc_free(scratch);
        for (int nested = 0; nested < 2; nested++) {
            qc_auto_sample s = sample_of(48, 70), plain = s;
            test_must(qc_auto_measure(
                          &s, 1, f.model,
                          &(qc_recipe_options){.double_quant = nested, .scale = QC_SCALE_SEARCH}, 1,
                          &err),
                      &err);
            test_must(qc_auto_measure(
                          &plain, 1, f.model,
                          &(qc_recipe_options){.double_quant = nested, .scale = QC_SCALE_ABSMAX}, 1,
                          &err),
                      &err);
            if (!nested || !of)
                assert_true(s.rel_mse[c] == sums.sum_ee / sums.sum_xx);
            assert_true(s.rel_mse[c] < plain.rel_mse[c]);
        }
    }
    qc_free(codes);
    qc_free(scales);
    drop(&f);
}

TEST(test_threads)
{
    fixture f;
    qc_error err = {0};
    qc_auto_sample one[9], many[9];
    make(&f, 90, 90, NULL);
    for (int i = 0; i < 9; i++) {
        one[i] = sample_of(90, 90);
        one[i].transpose = i & 1;
        many[i] = one[i];
    }
    test_must(qc_auto_measure(one, 9, f.model,
                              &(qc_recipe_options){.double_quant = 1, .scale = QC_SCALE_ABSMAX}, 1,
                              &err),
              &err);
    test_must(qc_auto_measure(many, 9, f.model,
                              &(qc_recipe_options){.double_quant = 1, .scale = QC_SCALE_ABSMAX}, 4,
                              &err),
              &err);
    for (int i = 0; i < 9; i++)
        assert_memory_equal(one[i].rel_mse, many[i].rel_mse, sizeof one[i].rel_mse);
    drop(&f);
}

static double normal_mse(unsigned candidate, uint64_t cols, qc_scale_method scale)
{
    return qc_auto_normal_mse(forms()[candidate], cols, scale);
}

static void check_normal_searched(const fixture *f, uint64_t cols)
{
    qc_isa isa;
    qc_error err = {0};
    test_must(qc_isa_select(&isa, &err), &err);
    const qc_search_ops *ops = qc_search_ops_for(isa);
    uint64_t n = f->rows * cols;
    for (unsigned c = 0; c < 3; c++) {
        qc_form form = {.ops = &qc_form_nf4, .block_elems = c == QC_CANDIDATE_NF4 ? 64 : 32};
        const qc_form by_rows = {.ops = &qc_form_int8_rows, .cols = cols};
        const qc_form *of = c == QC_CANDIDATE_INT8 ? &by_rows : &form;
        void *codes = NULL, *scales = NULL, *scratch = NULL;
        qc_piece_sums sums = {0};
        test_must(qc_malloc(&codes, (size_t)n, &err), &err);
        test_must(qc_malloc(&scales, (size_t)n, &err), &err);
        test_must(qc_malloc_aligned(&scratch, 64, (size_t)qc_search_scratch_bytes(), &err), &err);
        qc_search_out out = {.codes = codes, .absmax = scales};
        ops->blocks(of, QC_SEARCH_ONCE, f->data, QC_DTYPE_F32, n, &out, scratch, &sums);
        near(normal_mse(c, cols, QC_SCALE_SEARCH), sums.sum_ee / sums.sum_xx, 0.02);
        qc_free(codes);
        qc_free(scales);
        qc_free(scratch);
    }
}

/* Integers of every width, by every step: what is stated is what the quantizers leave. */
TEST(test_normal_integers)
{
    static const uint64_t cols[] = {512, 2048, 8192};
    const qc_recipe_options o = {.format = QC_FORMAT_COMPRESSED_TENSORS, .activations_16 = 1};
    for (size_t l = 0; l < sizeof cols / sizeof *cols; l += TEST_SANITIZED ? 3 : 1) {
        fixture f;
        qc_error err = {0};
        make(&f, (1u << 20) / cols[l], cols[l], NULL);
        for (unsigned step = 0; step < QC_CANDIDATE_STEPS; step++)
            for (unsigned searched = 0; searched < 2; searched++) {
                qc_recipe_options with = o;
                qc_candidate_form form[QC_CANDIDATES];
                qc_auto_sample s = {.rows = f.rows, .cols = f.cols, .forms = form};
                with.scale = searched ? QC_SCALE_SEARCH : QC_SCALE_ABSMAX;
                for (unsigned c = 0; c < QC_CANDIDATES; c++)
                    if (qc_candidate_step(&qc_candidates_of(&o)[c], step, &form[c]) &&
                        c != QC_CANDIDATE_16BIT && qc_candidates_of(&o)[c].name)
                        s.wanted |= 1u << c;
                test_must(qc_auto_measure(&s, 1, f.model, &with, 1, &err), &err);
                for (unsigned c = 0; c < QC_CANDIDATES; c++)
                    if (s.wanted & 1u << c)
                        near(qc_auto_normal_mse(form[c], f.cols, with.scale), s.rel_mse[c], 0.1);
            }
        drop(&f);
    }
}

TEST(test_normal)
{
    static const uint64_t lengths[] = {64, 100, 1024, 4096, 14336};
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k += TEST_SANITIZED ? 4 : 1) {
        fixture f;
        uint64_t cols = lengths[k];
        make(&f, (4u << 20) / cols, cols, NULL);
        qc_auto_sample s = {.rows = f.rows, .cols = cols};
        for (unsigned c = 0; c < 3; c++)
            s.rel_mse[c] = direct(f.data, f.rows, cols, c);
        check_normal_searched(&f, cols);
        print_message("%5u columns: nf4 %.4e, nf4-32 %.4e, int8 %.4e (stated %.4e %.4e %.4e)\n",
                      (unsigned)cols, s.rel_mse[0], s.rel_mse[1], s.rel_mse[2],
                      normal_mse(0, cols, QC_SCALE_ABSMAX), normal_mse(1, cols, QC_SCALE_ABSMAX),
                      normal_mse(2, cols, QC_SCALE_ABSMAX));
        for (unsigned c = 0; c < 3; c++)
            near(normal_mse(c, cols, QC_SCALE_ABSMAX), s.rel_mse[c], 0.02);
        drop(&f);
    }
    assert_true(normal_mse(QC_CANDIDATE_16BIT, 64, QC_SCALE_ABSMAX) <= 0);
    assert_true(normal_mse(2, 1, QC_SCALE_ABSMAX) > 0 &&
                normal_mse(2, UINT64_MAX, QC_SCALE_ABSMAX) > 0);
}
