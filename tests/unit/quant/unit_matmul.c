/* The matmul on the CPU, case by case: where rows begin, special values, empty shapes, and
 * descriptors that lie. prop_matmul.c compares tables, forms and bounds. */
#include "tests/fixtures/matmul_testing.h"

static const uint64_t shapes[][2] = {{1, 1},    {3, 1},    {5, 63},   {4, 64},  {7, 65},
                                     {3, 4096}, {2, 4095}, {3, 4097}, {9, 200}, {2, 9001}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

TEST(test_rows_are_what_dequantizing_gives)
{
    qt_rng rng = qt_rng_start("rows");
    for (unsigned f = 0; f < MT_FORMS; f++) {
        for (unsigned s = 0; s < SHAPES; s++) {
            mt_weights t;
            mt_make(&t, &rng, mt_forms[f].kind, shapes[s][0], shapes[s][1], mt_forms[f].block,
                    mt_forms[f].nested);
            float *want = mt_values(&t), *row = qt_alloc(t.w.form.cols, sizeof *row);
            for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
                if (!qc_isa_available((qc_isa)isa))
                    continue;
                for (uint64_t r = 0; r < t.w.rows; r++) {
                    qc_weights_row(qc_quant_ops_for((qc_isa)isa), &t.w, r, row);
                    QT_CHECK(memcmp(row, want + r * t.w.form.cols, t.w.form.cols * sizeof *row) ==
                                 0,
                             "form %u, row %d of [%d, %d]", f, (int)r, (int)t.w.rows,
                             (int)t.w.form.cols);
                }
            }
            free(row);
            free(want);
            mt_free(&t);
        }
    }
}

TEST(test_code_map_of_the_file)
{
    qt_rng rng = qt_rng_start("map");
    mt_weights t;
    float map[16], row[64];
    mt_make(&t, &rng, QC_FORM_NF4, 1, 64, 64, 0);
    for (unsigned i = 0; i < 16; i++)
        map[i] = (float)i;
    t.w.form.code_map = map;
    qc_weights_row(qc_quant_ops_for(QC_ISA_SCALAR), &t.w, 0, row);
    for (unsigned i = 0; i < 64; i++)
        assert_true(row[i] == (float)qt_nibble(t.codes, i) * t.absmax[0]);
    mt_free(&t);
}

TEST(test_special_values)
{
    const float w[2][20] = {{0.0f, 1.0f, -1.0f, 2.0f}, {3.0f, 0.0f, 0.5f, 0.0f, 1.0f}};
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        if (!qc_isa_available((qc_isa)isa))
            continue;
        const qc_matmul_ops *ops = qc_matmul_ops_for((qc_isa)isa);
        float x[4][20] = {{0}}, y[4][2], bias[2] = {10.0f, -20.0f};
        void *scratch = mt_scratch(4, 20);
        x[0][19] = NAN;           /* with a weight of zero, and in the tail */
        x[1][0] = INFINITY;       /* 0 * inf, 3 * inf */
        x[2][1] = -INFINITY;      /* 1 * -inf, 0 * inf */
        x[3][0] = x[3][3] = 1.5f; /* nothing special */
        qc_matmul_cpu_io io = {x, QC_DTYPE_F32, 4, 20, y, QC_DTYPE_F32, 2, bias};
        qc_matmul_cpu_dense(ops, w, QC_DTYPE_F32, 20, 0, 2, &io, scratch);
        assert_int_equal(qc_f32_bits(y[0][0]), 0x7fc00000);
        assert_int_equal(qc_f32_bits(y[0][1]), 0x7fc00000);
        assert_int_equal(qc_f32_bits(y[1][0]), 0x7fc00000);
        assert_true(isinf(y[1][1]) && y[1][1] > 0);
        assert_true(isinf(y[2][0]) && y[2][0] < 0);
        assert_int_equal(qc_f32_bits(y[2][1]), 0x7fc00000);
        assert_true(y[3][0] == 13.0f && y[3][1] == -15.5f);
        free(scratch);
    }
}

TEST(test_empty)
{
    qt_rng rng = qt_rng_start("empty");
    const float bias[2] = {1.5f, -2.0f};
    mt_weights t;
    float y[4] = {9.0f, 9.0f, 9.0f, 9.0f}, x[1] = {0.0f};
    void *scratch = mt_scratch(2, 0);
    mt_make(&t, &rng, QC_FORM_NF4, 2, 0, 64, 0);
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        if (!qc_isa_available((qc_isa)isa))
            continue;
        const qc_matmul_ops *ops = qc_matmul_ops_for((qc_isa)isa);
        qc_matmul_cpu_io io = {x, QC_DTYPE_F32, 2, 0, y, QC_DTYPE_F32, 2, bias};
        qc_matmul_cpu_quantized(ops, &t.w, 0, 2, &io, scratch); /* K == 0: the bias */
        assert_true(y[0] == 1.5f && y[1] == -2.0f && y[2] == 1.5f && y[3] == -2.0f);
        io.m = 0;
        y[0] = 9.0f;
        qc_matmul_cpu_quantized(ops, &t.w, 0, 2, &io, scratch);
        io.m = 2;
        qc_matmul_cpu_quantized(ops, &t.w, 0, 0, &io, scratch);
        assert_true(y[0] == 9.0f);
    }
    free(scratch);
    mt_free(&t);
}

/* One scratch serves products of any width up to the one that it was made for: nothing behind it is
 * written, whatever whole rows of fewer columns fill a panel. */
TEST(test_scratch_of_the_widest)
{
    static const uint64_t widths[] = {1,    16,   300,  2048,  2049,  3072,  4096,
                                      5120, 6144, 8192, 11008, 13824, 14336, 28672};
    enum { WIDTHS = sizeof widths / sizeof *widths, ROWS = 130, GUARD = 64 };
    qt_rng rng = qt_rng_start("scratch");
    for (unsigned most = 0; most < WIDTHS; most++)
        for (unsigned i = 0; i <= most; i++)
            QT_CHECK(qc_matmul_cpu_scratch_bytes(1, widths[i]) <=
                         qc_matmul_cpu_scratch_bytes(1, widths[most]),
                     "scratch of %d columns is less than that of %d", (int)widths[most],
                     (int)widths[i]);
    /* 14336 columns fill a panel with 16 rows, 4096 with 64 and more of it. */
    const uint64_t k = 4096, bytes = qc_matmul_cpu_scratch_bytes(1, 14336);
    unsigned char *scratch = NULL;
    void *v = NULL;
    assert_int_equal(posix_memalign(&v, 64, (size_t)bytes + GUARD), 0);
    scratch = v;
    memset(scratch + bytes, 0xa5, GUARD);
    float *w = qt_alloc(ROWS * k, sizeof *w), *x = qt_alloc(k, sizeof *x), y[ROWS];
    for (uint64_t j = 0; j < ROWS * k; j++)
        w[j] = qt_randn(&rng);
    for (uint64_t j = 0; j < k; j++)
        x[j] = qt_randn(&rng);
    const qc_matmul_cpu_io io = {.x = x,
                                 .x_dtype = QC_DTYPE_F32,
                                 .m = 1,
                                 .ldx = k,
                                 .y = y,
                                 .y_dtype = QC_DTYPE_F32,
                                 .ldy = ROWS};
    qc_matmul_cpu_dense(qc_matmul_ops_for(QC_ISA_SCALAR), w, QC_DTYPE_F32, k, 0, ROWS, &io,
                        scratch);
    for (unsigned j = 0; j < GUARD; j++)
        QT_CHECK(scratch[bytes + j] == 0xa5, "byte %u behind the scratch was written", j);
    free(w);
    free(x);
    free(v);
}

/* Sums in double are those of plain loops. */
TEST(test_double)
{
    qt_rng rng = qt_rng_start("double");
    enum { K = 70, LDX = 73 };
    static const uint64_t counts[] = {1, 15, 16, 17, 40};
    for (unsigned c = 0; c < sizeof counts / sizeof *counts; c++) {
        uint64_t m = counts[c];
        float w[K];
        uint16_t *x = qt_alloc(m * LDX, sizeof *x);
        double *packed = qt_alloc((m + 15) / 16 * 16 * K, sizeof *packed);
        double *y = qt_alloc(m, sizeof *y);
        for (unsigned k = 0; k < K; k++)
            w[k] = (float)qt_uniform(&rng) - 0.5f;
        mt_random_x(&rng, x, QC_DTYPE_F16, m * LDX);
        qc_matmul_double_pack(x, QC_DTYPE_F16, m, LDX, K, packed);
        for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
            if (!qc_isa_available((qc_isa)isa))
                continue;
            qc_matmul_ops_for((qc_isa)isa)->double_row(w, K, packed, m, y);
            for (uint64_t i = 0; i < m; i++) {
                double sum = 0.0;
                for (unsigned k = 0; k < K; k++)
                    sum += (double)w[k] * qt_get(x, QC_DTYPE_F16, i * LDX + k);
                assert_true(sum == y[i]);
            }
        }
        free(y);
        free(packed);
        free(x);
    }
}

TEST(test_tables)
{
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        qc_isa got = qc_matmul_ops_for((qc_isa)isa)->isa;
        assert_true(got == qc_quant_ops_for((qc_isa)isa)->isa && got <= (qc_isa)isa);
    }
}
