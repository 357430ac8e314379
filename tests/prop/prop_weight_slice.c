/* Properties of slices of quantized weights over random shapes, forms and cuts: the values of a
 * slice are the slice of the values, bit for bit; a cut is refused exactly where no block allows
 * it; nothing is written behind the memory that was asked for. */
#include "quant/cpu_matmul.h"
#include "quant/weight_slice.h"
#include "tests/fixtures/matmul_testing.h"

#include "base/checked.h"

static const struct {
    qc_form_kind kind;
    uint32_t block;
    int nested;
} forms[] = {{QC_FORM_NF4, 64, 1},      {QC_FORM_NF4, 64, 0},         {QC_FORM_NF4, 4096, 1},
             {QC_FORM_NF4, 32, 1},      {QC_FORM_INT8_BLOCKS, 64, 1}, {QC_FORM_INT8_BLOCKS, 256, 1},
             {QC_FORM_W4A16, 128, 0},   {QC_FORM_W4A16, 0, 0},        {QC_FORM_W8A16, 32, 0},
             {QC_FORM_INT8_ROWS, 0, 0}, {QC_FORM_W8A8, 0, 0}};
enum { FORMS = sizeof forms / sizeof *forms };

/* Scales that differ from block to block and groups that are small, so that a wrong one shows. */
static void make(mt_weights *t, qt_rng *rng)
{
    const unsigned f = (unsigned)qt_below(rng, FORMS);
    const unsigned bits = qc_form_ops_of(forms[f].kind)->bits;
    static const uint64_t units[] = {1, 2, 16, 32, 96, 64, 128, 256};
    uint64_t unit = units[qt_below(rng, 8)], rows = 1 + qt_below(rng, 70);
    if (qc_form_ops_of(forms[f].kind)->integer) /* groups do not cross rows */
        unit = forms[f].block > 0 ? forms[f].block : bits == 4 ? 2 : 1;
    mt_make(t, rng, forms[f].kind, rows, unit * (1 + qt_below(rng, 1 + 600 / unit)), forms[f].block,
            forms[f].nested);
    if (!forms[f].nested || qt_below(rng, 2) == 0)
        return;
    /* Groups of another size; the fixture has 256. */
    t->w.nested_block = 1u << qt_below(rng, 11);
    t->nested_scales = (t->scales + t->w.nested_block - 1) / t->w.nested_block;
    free(t->nested_absmax);
    t->nested_absmax = qt_alloc(t->nested_scales, sizeof(float));
    for (uint64_t i = 0; i < t->nested_scales; i++)
        t->nested_absmax[i] = (float)qt_uniform(rng) * 0.05f;
    t->w.nested_absmax = t->nested_absmax;
}

/* A part whose edges are multiples of a random power of two, or of none. */
static void pick(qt_rng *rng, uint64_t size, uint64_t *first, uint64_t *count)
{
    const uint64_t step = qt_below(rng, 4) == 0 ? 1 : UINT64_C(1) << qt_below(rng, 9);
    uint64_t end = 0;
    *first = qt_below(rng, size / step + 1) * step;
    end = qt_below(rng, 2) ? size : *first + qt_below(rng, (size - *first) / step + 1) * step;
    *count = end - *first;
}

/* Whether smaller blocks can hold the part: by trying whether 32 elements ever cross an edge. */
static int possible(const qc_weights *w, const qc_weights_part *p)
{
    const uint64_t cols = w->form.cols, end = p->col + p->cols;
    uint64_t least = w->form.block_elems ? 32 : w->form.ops->bits == 4 ? 2 : 1;
    if (p->rows == 0 || p->cols == 0)
        return 1;
    if (p->col == 0 && end == cols)
        return p->row * cols % least == 0;
    for (uint64_t r = 0; r < 32; r++)
        if ((r * cols + p->col) % least != 0 || (r * cols + end) % least != 0)
            return 0;
    return 1;
}

static float *values_of(const qc_weights *w)
{
    qc_error err = {0};
    float *out = qt_alloc(w->rows * w->form.cols, sizeof *out);
    if (qc_weights_dequantize(w, 0, w->rows, out, QC_DTYPE_F32, 1, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return out;
}

static void check_values(const mt_weights *t, const qc_weights_part *p, const qc_weights *slice)
{
    const uint64_t cols = t->w.form.cols;
    float *all = mt_values(t), *own = values_of(slice);
    for (uint64_t r = 0; r < p->rows; r++)
        QT_CHECK(memcmp(own + r * p->cols, all + (p->row + r) * cols + p->col,
                        (size_t)p->cols * sizeof *own) == 0,
                 "%s [%" PRIu64 ", %" PRIu64 "] blocks of %u, groups of %u: row %" PRIu64
                 " of %" PRIu64 "+%" PRIu64 ", %" PRIu64 "+%" PRIu64 " differs",
                 t->w.form.ops->name, t->w.rows, cols, t->w.form.block_elems, t->w.nested_block, r,
                 p->row, p->rows, p->col, p->cols);
    free(all);
    free(own);
}

/* The slice is itself sound, and can be cut again. A nested scale is for two scales at least. */
static void check_sound(const qc_weights *s, const qc_weights *whole)
{
    qc_error err = {0};
    const uint64_t elems = s->rows * s->form.cols, blocks = qc_form_scales(&s->form, elems);
    const uint64_t scales = qc_form_by_rows(&s->form) ? s->rows : blocks;
    const uint64_t nested = s->form.nested && scales ? qc_ceil_div_u64(scales, s->nested_block) : 0;
    if (qc_weights_check(s, qc_form_code_bytes(&s->form, elems), scales, nested, &err) != QC_OK)
        fail_msg("%s", err.msg);
    if (scales > 0)
        assert_true(!s->absmax == (s->form.nested != 0));
    if (nested > 0 && whole->nested_block > 1)
        assert_true(s->nested_block > 1);
}

static int inside(const void *p, const unsigned char *memory, uint64_t bytes)
{
    return (uintptr_t)p >= (uintptr_t)memory && (uintptr_t)p < (uintptr_t)memory + bytes;
}

static void check_cuts(const qc_weights *w, const qc_weights_part *p, uint64_t bytes, int fits)
{
    qc_weights_cuts cuts;
    assert_int_equal(qc_weights_cuts_of(w, &cuts, NULL), QC_OK);
    const uint64_t end = p->col + p->cols;
    const int says = p->rows == 0 || p->cols == 0 ||
                     (p->row % cuts.rows == 0 && p->col % cuts.cols == 0 &&
                      (end == w->form.cols || end % cuts.cols == 0));
    assert_int_equal(says, fits);
    if (fits && p->cols == w->form.cols && p->row % cuts.rows_in_place == 0)
        assert_int_equal(bytes, 0);
    if (fits && p->cols == w->form.cols && p->rows > 0 && p->row % cuts.rows_in_place != 0)
        assert_true(bytes > 0);
}

static void one_slice(qt_rng *rng, unsigned *refusals, unsigned *copies)
{
    enum { GUARD = 64 };
    mt_weights t;
    qc_weights_part p;
    qc_weights slice;
    qc_error err = {0};
    uint64_t bytes = 0;
    make(&t, rng);
    pick(rng, t.w.rows, &p.row, &p.rows);
    pick(rng, t.w.form.cols, &p.col, &p.cols);
    if (p.rows > 0 && qt_below(rng, 8) == 0)
        p.rows = 1;
    if (qt_below(rng, 3) == 0) {
        p.col = 0;
        p.cols = t.w.form.cols;
    }
    const int fits = possible(&t.w, &p);
    const qc_status st = qc_weights_slice_bytes(&t.w, &p, &bytes, &err);
    QT_CHECK(st == (fits ? QC_OK : QC_ERR_SHAPE),
             "rows %" PRIu64 "+%" PRIu64 ", columns %" PRIu64 "+%" PRIu64 " of [%" PRIu64
             ", %" PRIu64 "] in %s %u: %s",
             p.row, p.rows, p.col, p.cols, t.w.rows, t.w.form.cols, t.w.form.ops->name,
             t.w.form.block_elems, st == QC_OK ? "taken" : err.msg);
    check_cuts(&t.w, &p, bytes, fits);
    *refusals += !fits;
    *copies += bytes > 0;
    unsigned char *memory = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64 + GUARD));
    memset(memory, 0xa5, (size_t)((bytes + 63) / 64 * 64 + GUARD));
    assert_int_equal(qc_weights_slice(&t.w, &p, bytes ? memory : NULL, &slice, &err), st);
    for (uint64_t i = bytes; i < (bytes + 63) / 64 * 64 + GUARD; i++)
        assert_int_equal(memory[i], 0xa5);
    if (st == QC_OK) {
        check_sound(&slice, &t.w);
        check_values(&t, &p, &slice);
        assert_true(bytes > 0 || !inside(slice.codes, memory, GUARD));
    } else {
        QT_CHECK(strstr(err.msg, "it can be cut at multiples of") != NULL, "'%s'", err.msg);
    }
    free(memory);
    mt_free(&t);
}

/* What is to be read for a part is the part, and rows before it only where a block begins with none
 * of the part's; and it makes the weight that the slice of the same rows is. */
static void one_reading(qt_rng *rng, unsigned *skips)
{
    mt_weights t;
    qc_weights_part p = {0};
    qc_weights_read r;
    qc_weights slice;
    qc_error err = {0};
    make(&t, rng);
    pick(rng, t.w.rows, &p.row, &p.rows);
    pick(rng, t.w.form.cols, &p.col, &p.cols);
    if (qt_below(rng, 2) == 0)
        p = (qc_weights_part){.row = p.row, .rows = p.rows, .cols = t.w.form.cols};
    const int whole = p.cols == t.w.form.cols;
    qc_weights shape = {.form = t.w.form, .rows = t.w.rows, .nested_block = t.w.nested_block};
    const qc_status st = qc_weights_read_of(&shape, &p, &r, &err);
    assert_int_equal(st, whole || possible(&t.w, &p) ? QC_OK : QC_ERR_SHAPE);
    if (st == QC_OK && p.rows > 0 && p.cols > 0) {
        const uint64_t cols = t.w.form.cols, block = qc_max_u64(t.w.form.block_elems, 1);
        uint64_t bytes = 0;
        assert_int_equal(r.read.row + r.skip, p.row);
        assert_int_equal(r.read.rows - r.skip, p.rows);
        assert_true(r.skip < (block > 1 ? block : 2));
        for (uint64_t row = r.read.row + 1; whole && block > 1 && row <= p.row; row++)
            assert_true(row * cols % block != 0);
        if (whole)
            assert_int_equal(r.block_elems, t.w.form.block_elems);
        assert_int_equal(qc_weights_slice_bytes(&t.w, &r.read, &bytes, NULL), QC_OK);
        void *memory = aligned_alloc(64, (size_t)((bytes + 64) / 64 * 64));
        assert_int_equal(qc_weights_slice(&t.w, &r.read, memory, &slice, NULL), QC_OK);
        assert_int_equal(slice.form.block_elems, r.block_elems);
        assert_int_equal(slice.form.nested ? slice.nested_block : 0, r.nested_block);
        if (qc_weights_check(&slice, r.code_bytes, r.scales, r.nested_scales, &err) != QC_OK)
            fail_msg("%s", err.msg);
        free(memory);
    }
    *skips += st == QC_OK && r.skip > 0;
    mt_free(&t);
}

TEST(test_readings)
{
    qt_rng rng = qt_rng_start("readings");
    unsigned skips = 0;
    enum { ROUNDS = 3000 };
    for (unsigned i = 0; i < ROUNDS; i++)
        one_reading(&rng, &skips);
    assert_in_range(skips, ROUNDS / 50, ROUNDS / 2);
}

TEST(test_slices)
{
    qt_rng rng = qt_rng_start("slices");
    unsigned refusals = 0, copies = 0;
    enum { ROUNDS = 6000 };
    for (unsigned i = 0; i < ROUNDS; i++)
        one_slice(&rng, &refusals, &copies);
    /* Every way is taken often. */
    assert_in_range(refusals, ROUNDS / 20, ROUNDS / 2);
    assert_in_range(copies, ROUNDS / 10, ROUNDS * 3 / 4);
}

/* What a model of usual shapes costs: the parts of two cards keep nested scales. */
TEST(test_usual_shapes)
{
    qt_rng rng = qt_rng_start("usual");
    mt_weights t;
    qc_weights s;
    qc_weights_cuts cuts;
    uint64_t bytes = 0;
    mt_make(&t, &rng, QC_FORM_NF4, 16, 14336, 64, 1);
    assert_int_equal(qc_weights_cuts_of(&t.w, &cuts, NULL), QC_OK);
    assert_int_equal(cuts.rows, 1);
    assert_int_equal(cuts.cols, 32);
    assert_int_equal(cuts.rows_in_place, 8); /* 224 blocks a row, 256 to a group */
    /* Rows: the codes of weights and scales stay where they are, and groups of 224 = 7 * 32. */
    const qc_weights_part rows = {.row = 5, .rows = 11, .cols = 14336};
    assert_int_equal(qc_weights_slice_bytes(&t.w, &rows, &bytes, NULL), QC_OK);
    assert_int_equal(bytes, 11 * 224 / 32 * sizeof(float));
    float *memory = aligned_alloc(64, 1 << 20);
    assert_int_equal(qc_weights_slice(&t.w, &rows, memory, &s, NULL), QC_OK);
    assert_ptr_equal(s.codes, t.codes + 5 * 14336 / 2);
    assert_ptr_equal(s.absmax_codes, t.absmax_codes + 5 * 224);
    assert_int_equal(s.nested_block, 32);
    /* Columns: the second half of each row, in groups of 16. */
    const qc_weights_part half = {.rows = 16, .col = 7168, .cols = 7168};
    assert_int_equal(qc_weights_slice_bytes(&t.w, &half, &bytes, NULL), QC_OK);
    assert_int_equal(bytes, 16 * 3584 + 16 * 112 + 16 * 112 / 16 * sizeof(float));
    assert_int_equal(qc_weights_slice(&t.w, &half, memory, &s, NULL), QC_OK);
    assert_int_equal(s.nested_block, 16);
    assert_int_equal(s.form.block_elems, 64);
    free(memory);
    mt_free(&t);
}

/* A product with a slice, whose groups of scales may be small, has the bits of one with the same
 * scales in float. */
TEST(test_products)
{
    enum { M = 3, ROWS = 40, COLS = 1792 };
    static const uint64_t cols[] = {64, 128, 256, 448, 896, COLS};
    qt_rng rng = qt_rng_start("products");
    qc_cpu_matmul *h = NULL;
    assert_int_equal(qc_cpu_matmul_create(&h, 2, NULL), QC_OK);
    for (unsigned i = 0; i < 24; i++) {
        mt_weights t;
        qc_weights s;
        const uint64_t count = cols[i % 6];
        const qc_weights_part p = {.row = qt_below(&rng, ROWS),
                                   .rows = ROWS / 2,
                                   .col = qt_below(&rng, COLS / count) * count,
                                   .cols = count};
        mt_make(&t, &rng, i % 2 ? QC_FORM_NF4 : QC_FORM_INT8_BLOCKS, 2 * ROWS, COLS, 64, 1);
        void *memory = aligned_alloc(64, 1 << 18);
        float x[M * COLS], y[2][M * ROWS], *scales = NULL;
        mt_random_x(&rng, x, QC_DTYPE_F32, M * COLS);
        memset(y, 0, sizeof y);
        assert_int_equal(qc_weights_slice(&t.w, &p, memory, &s, NULL), QC_OK);
        qc_matmul_cpu_io io = {x, QC_DTYPE_F32, M, COLS, y[0], QC_DTYPE_F32, ROWS, NULL};
        assert_int_equal(qc_cpu_matmul_run(h, &s, &io, NULL), QC_OK);
        const uint64_t blocks = qc_form_scales(&s.form, s.rows * s.form.cols);
        scales = qt_alloc(blocks, sizeof *scales);
        for (uint64_t b = 0; b < blocks; b++)
            scales[b] = qc_weights_scale(&s, b);
        s.absmax = scales;
        s.form.nested = 0;
        io.y = y[1];
        assert_int_equal(qc_cpu_matmul_run(h, &s, &io, NULL), QC_OK);
        assert_memory_equal(y[0], y[1], sizeof y[0]);
        free(scales);
        free(memory);
        mt_free(&t);
    }
    qc_cpu_matmul_destroy(h);
}

TEST(test_wrong_calls)
{
    qt_rng rng = qt_rng_start("wrong");
    mt_weights t;
    qc_weights s, none = {0};
    qc_weights_cuts cuts;
    qc_weights_read r;
    qc_error err = {0};
    uint64_t bytes = 0;
    const qc_weights_part all = {.rows = 4, .cols = 64}, half = {.rows = 4, .col = 32, .cols = 32};
    mt_make(&t, &rng, QC_FORM_NF4, 4, 64, 64, 0);
    assert_int_equal(qc_weights_cuts_of(NULL, &cuts, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_cuts_of(&t.w, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_cuts_of(&none, &cuts, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_read_of(NULL, &all, &r, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_read_of(&t.w, NULL, &r, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_read_of(&t.w, &all, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_read_of(&none, &all, &r, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_slice_bytes(NULL, &all, &bytes, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_slice_bytes(&none, &all, &bytes, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_slice_bytes(&t.w, NULL, &bytes, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_slice_bytes(&t.w, &all, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_slice(&t.w, &all, NULL, NULL, NULL), QC_ERR_USAGE);
    assert_int_equal(qc_weights_slice(&t.w, &all, NULL, &s, NULL), QC_OK);
    assert_int_equal(qc_weights_slice(&t.w, &half, NULL, &s, &err), QC_ERR_USAGE);
    QT_CHECK(strstr(err.msg, "memory is NULL") != NULL, "'%s'", err.msg);
    static const qc_weights_part some = {.row = 1, .rows = 2, .cols = 64};
    for (unsigned i = 0; i < 6; i++) { /* numbers that a file may say */
        qc_weights w = t.w;
        w.form.nested = 1;
        w.absmax = NULL;
        w.nested_block = i == 0 ? 0 : i == 1 ? 3 : 256;
        w.form.block_elems = i == 2 ? 1 : i == 3 ? 96 : i == 4 ? 1u << 31 : 64;
        w.rows = i == 5 ? UINT64_MAX / 64 : 4;
        assert_int_equal(qc_weights_read_of(&w, &some, &r, &err), QC_ERR_SHAPE);
        assert_int_equal(qc_weights_cuts_of(&w, &cuts, &err), QC_ERR_SHAPE);
        assert_int_equal(qc_weights_slice_bytes(&w, &some, &bytes, &err), QC_ERR_SHAPE);
    }
    static const qc_weights_part outside[] = {
        {.row = 5, .cols = 64},
        {.row = 1, .rows = 4, .cols = 64},
        {.row = 1, .rows = UINT64_MAX, .cols = 64},
        {.rows = 4, .col = 65},
        {.rows = 4, .col = 32, .cols = 64},
        {.rows = 4, .col = 32, .cols = UINT64_MAX},
    };
    for (unsigned i = 0; i < sizeof outside / sizeof *outside; i++) {
        assert_int_equal(qc_weights_slice(&t.w, &outside[i], NULL, &s, &err), QC_ERR_USAGE);
        assert_int_equal(qc_weights_read_of(&t.w, &outside[i], &r, NULL), QC_ERR_USAGE);
        QT_CHECK(strstr(err.msg, "not within a weight of 4 rows and 64 columns") != NULL, "'%s'",
                 err.msg);
    }
    mt_free(&t);
}
