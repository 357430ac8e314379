/* quant/cpu_matmul.h: products of few rows by integers, of more by panels, on threads that wait. */
#include "quant/cpu_matmul.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/matmul_testing.h"
#include "tests/fixtures/sanitized.h"

#include <pthread.h>
#include <stdlib.h>

/* Forms whose rows begin with a block and are whole groups of 64. */
static const struct {
    qc_form_kind kind;
    uint32_t block;
    int nested;
} forms[] = {
    {QC_FORM_NF4, 64, 1},          {QC_FORM_NF4, 32, 1},         {QC_FORM_NF4, 32, 0},
    {QC_FORM_NF4, 64, 0},          {QC_FORM_NF4, 128, 1},        {QC_FORM_NF4, 256, 0},
    {QC_FORM_INT8_ROWS, 0, 0},     {QC_FORM_INT8_BLOCKS, 32, 1}, {QC_FORM_INT8_BLOCKS, 64, 1},
    {QC_FORM_INT8_BLOCKS, 256, 0}, {QC_FORM_W4A16, 32, 0},       {QC_FORM_W4A16, 128, 0},
    {QC_FORM_W4A16, 0, 0},         {QC_FORM_W8A16, 32, 0},       {QC_FORM_W8A16, 128, 0},
    {QC_FORM_W8A16, 0, 0},         {QC_FORM_W8A8, 0, 0},         {QC_FORM_W2A16, 64, 0},
    {QC_FORM_W3A16, 32, 0},        {QC_FORM_W5A16, 128, 0},      {QC_FORM_W6A16, 32, 0},
    {QC_FORM_W6A16, 0, 0},         {QC_FORM_W7A16, 64, 0}};
enum { FORMS = sizeof forms / sizeof *forms };
static const qc_dtype types[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};

static qc_cpu_matmul *open_matmul(qc_isa isa, unsigned threads)
{
    qc_cpu_matmul *h = NULL;
    qc_error err = {0};
    assert_int_equal(setenv("QCONV_ISA", qc_isa_name(isa), 1), 0);
    if (qc_cpu_matmul_create(&h, threads, &err) != QC_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(unsetenv("QCONV_ISA"), 0);
    return h;
}

typedef struct {
    mt_weights t;
    void *x;
    float *bias;
    qc_matmul_cpu_io io;
} job;

static void make_job(job *j, qt_rng *rng, unsigned form, uint64_t n, uint64_t k, uint64_t m)
{
    memset(j, 0, sizeof *j);
    mt_make(&j->t, rng, forms[form].kind, n, k, forms[form].block, forms[form].nested);
    const qc_dtype x_type = types[qt_below(rng, 3)], y_type = types[qt_below(rng, 3)];
    const uint64_t ldx = k + qt_below(rng, 2) * 3, ldy = n + qt_below(rng, 2) * 5;
    j->x = qt_alloc(m * ldx, qt_size(x_type));
    mt_random_x(rng, j->x, x_type, m * ldx);
    /* Some groups are large, tiny, or zero. */
    for (uint64_t i = 0; i < m * ldx; i++)
        if (i / 64 % 5 == 1)
            qt_put(j->x, x_type, i, qt_get(j->x, x_type, i) * (i % 2 ? 3000.0 : 0x1p-8));
        else if (i / 64 % 5 == 2)
            qt_put(j->x, x_type, i, 0.0);
    if (qt_below(rng, 2)) {
        j->bias = qt_alloc(n, sizeof *j->bias);
        mt_random_x(rng, j->bias, QC_DTYPE_F32, n);
    }
    j->io = (qc_matmul_cpu_io){j->x, x_type, m, ldx, NULL, y_type, ldy, j->bias};
}

static void free_job(job *j)
{
    mt_free(&j->t);
    free(j->x);
    free(j->bias);
}

static void *run(qc_cpu_matmul *h, const job *j, qc_dtype y_type)
{
    qc_matmul_cpu_io io = j->io;
    qc_error err = {0};
    io.y_dtype = y_type;
    io.y = qt_alloc(io.m * io.ldy, qt_size(y_type));
    if (qc_cpu_matmul_run(h, &j->t.w, &io, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return io.y;
}

/* The bound that cpu_matmul.h states: half a unit of x's integers times the weights, half a unit of
 * the codes' table times x, and the roundings of float sums. */
static void check_bound(const job *j, const float *y, const float *values)
{
    const qc_form *f = &j->t.w.form;
    const double table = f->ops->bits == 4 ? 0x1p-15 * 1.001 : 0.0;
    const double sums = ((double)f->cols / 32 + 12) * 0x1p-24;
    for (uint64_t i = 0; i < j->io.m; i++)
        for (uint64_t r = 0; r < j->t.w.rows; r++) {
            double exact = j->bias ? (double)j->bias[r] : 0.0, bound = fabs(exact) * 0x1p-23;
            for (uint64_t g = 0; g < f->cols; g += 64) {
                double most = 0.0, w_sum = 0.0, x_sum = 0.0, wx = 0.0, scale = 0.0;
                for (uint64_t k = g; k < g + 64; k++) {
                    const double x = qt_get(j->x, j->io.x_dtype, i * j->io.ldx + k);
                    const double w = (double)values[r * f->cols + k];
                    most = fmax(most, fabs(x));
                    w_sum += fabs(w);
                    x_sum += fabs(x);
                    wx += fabs(w * x);
                    scale = fmax(scale, fabs(w));
                    exact += w * x;
                }
                /* The largest value of a code times its scale is at most 16 times the largest
                 * weight that is there: 1 by 0.08 for NF4, 8 by 1 for integers. */
                bound += most / 16383 * 0.501 * w_sum + table * 16 * scale * x_sum + wx * sums;
            }
            const double got = (double)y[i * j->io.ldy + r];
            QT_CHECK(fabs(got - exact) <= bound, "row %d, output %d: %g is not %g within %g",
                     (int)i, (int)r, got, exact, bound);
        }
}

TEST(products_are_within_their_bound)
{
    qt_rng rng = qt_rng_start("bound");
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        if (!qc_isa_available((qc_isa)isa))
            continue;
        qc_cpu_matmul *h = open_matmul((qc_isa)isa, 2);
        for (unsigned f = 0; f < FORMS; f++)
            for (uint64_t m = 1; m <= QC_CPU_MATMUL_ROWS; m += m < 9 ? 1 : 7) {
                job j;
                make_job(&j, &rng, f, 1 + qt_below(&rng, 40), 256 * (1 + qt_below(&rng, 3)), m);
                assert_true(qc_cpu_matmul_is_fast(&j.t.w));
                float *values = mt_values(&j.t), *y = run(h, &j, QC_DTYPE_F32);
                check_bound(&j, y, values);
                free(y);
                free(values);
                free_job(&j);
            }
        qc_cpu_matmul_destroy(h);
    }
}

/* On normal numbers an x is off by a unit / sqrt(12), where a unit is the largest of 64 (2.4 sigma
 * on average) / 16383, and a value of NF4 by 2^-14 / sqrt(12) beside a mean square of 0.23:
 * together 0.00006 of the outputs. Cut instead of rounded, either would be off by twice as much. */
TEST(products_are_as_exact_as_rounding_allows)
{
    enum { N = 64, K = 4096 };
    qt_rng rng = qt_rng_start("exact");
    static const unsigned of[] = {3, 6, 11}; /* NF4 by 64, int8 by rows, W4A16 by 128 */
    for (unsigned f = 0; f < 3; f++) {
        mt_weights t;
        double off = 0.0, all = 0.0;
        float *x = qt_alloc(K, sizeof *x), *y = qt_alloc(N, sizeof *y);
        mt_make(&t, &rng, forms[of[f]].kind, N, K, forms[of[f]].block, 0);
        mt_random_x(&rng, x, QC_DTYPE_F32, K);
        float *values = mt_values(&t);
        qc_cpu_matmul *h = open_matmul(QC_ISA_SCALAR, 1);
        const qc_matmul_cpu_io io = {x, QC_DTYPE_F32, 1, K, y, QC_DTYPE_F32, N, NULL};
        assert_int_equal(qc_cpu_matmul_run(h, &t.w, &io, NULL), QC_OK);
        for (unsigned r = 0; r < N; r++) {
            double exact = 0.0;
            for (unsigned k = 0; k < K; k++)
                exact += (double)values[r * K + k] * (double)x[k];
            off += ((double)y[r] - exact) * ((double)y[r] - exact);
            all += exact * exact;
        }
        QT_CHECK(sqrt(off / all) < 8e-5, "form %u: off by %g", of[f], sqrt(off / all));
        qc_cpu_matmul_destroy(h);
        free(values);
        free(x);
        free(y);
        mt_free(&t);
    }
}

/* Whole groups and blocks; some rows are longer than what is worked on at a time. */
static uint64_t random_cols(qt_rng *rng, unsigned form)
{
    const uint64_t unit = forms[form].block > 64 ? forms[form].block : 64;
    const uint64_t most = qt_below(rng, 4) == 0 ? 128 * 64 * 2 : 1024;
    return unit * (1 + qt_below(rng, most / unit));
}

TEST(bits_depend_on_neither_threads_nor_instructions)
{
    qt_rng rng = qt_rng_start("bits");
    qc_cpu_matmul *scalar = open_matmul(QC_ISA_SCALAR, 1), *others[QC_ISA_COUNT][3] = {{NULL}};
    for (int isa = 0; isa < QC_ISA_COUNT; isa++)
        for (unsigned t = 0; t < 3 && qc_isa_available((qc_isa)isa); t++)
            others[isa][t] = open_matmul((qc_isa)isa, t + 1);
    for (unsigned round = 0; round < (TEST_SANITIZED ? 30 : 120); round++) {
        job j;
        make_job(&j, &rng, round % FORMS, 1 + qt_below(&rng, 70), random_cols(&rng, round % FORMS),
                 1 + qt_below(&rng, 18));
        void *want = run(scalar, &j, j.io.y_dtype);
        for (int isa = 0; isa < QC_ISA_COUNT; isa++)
            for (unsigned t = 0; t < 3 && others[isa][t]; t++) {
                void *got = run(others[isa][t], &j, j.io.y_dtype);
                QT_CHECK(memcmp(got, want, (size_t)(j.io.m * j.io.ldy) * qt_size(j.io.y_dtype)) ==
                             0,
                         "%s, %u threads, form %u", qc_isa_name((qc_isa)isa), t + 1, round % FORMS);
                free(got);
            }
        free(want);
        free_job(&j);
    }
    for (int isa = 0; isa < QC_ISA_COUNT; isa++)
        for (unsigned t = 0; t < 3; t++)
            qc_cpu_matmul_destroy(others[isa][t]);
    qc_cpu_matmul_destroy(scalar);
}

/* Rows that are no whole groups, and many rows of x, have the bits of matmul_ops.h. */
TEST(other_shapes_take_the_panels)
{
    qt_rng rng = qt_rng_start("panels");
    static const uint64_t shapes[][3] = {{5, 440, 1}, {33, 96, 3}, {40, 256, 17}, {3, 100, 40}};
    qc_cpu_matmul *h = open_matmul(QC_ISA_SCALAR, 3);
    for (unsigned s = 0; s < 4; s++) {
        job j;
        make_job(&j, &rng, 0, shapes[s][0], shapes[s][1], shapes[s][2]);
        assert_int_equal(qc_cpu_matmul_is_fast(&j.t.w), shapes[s][1] % 64 == 0);
        qc_matmul_cpu_io io = j.io;
        const size_t bytes = (size_t)(io.m * io.ldy) * qt_size(io.y_dtype);
        void *scratch = mt_scratch(io.m, shapes[s][1]), *got = run(h, &j, io.y_dtype);
        io.y = qt_alloc(io.m * io.ldy, qt_size(io.y_dtype));
        qc_matmul_cpu_quantized(qc_matmul_ops_for(QC_ISA_SCALAR), &j.t.w, 0, j.t.w.rows, &io,
                                scratch);
        assert_memory_equal(got, io.y, bytes);
        free(scratch);
        free(got);
        free(io.y);
        free_job(&j);
    }
    qc_cpu_matmul_destroy(h);
}

TEST(what_is_not_finite_stays_in_its_row)
{
    qt_rng rng = qt_rng_start("nan");
    static const double bad[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
        if (!qc_isa_available((qc_isa)isa))
            continue;
        qc_cpu_matmul *h = open_matmul((qc_isa)isa, 2);
        for (unsigned b = 0; b < 3; b++) {
            job j;
            make_job(&j, &rng, 0, 20, 512, 5);
            float *plain = run(h, &j, QC_DTYPE_F32);
            qt_put(j.x, j.io.x_dtype, 3 * j.io.ldx + 300, bad[b]);
            float *y = run(h, &j, QC_DTYPE_F32);
            for (uint64_t i = 0; i < 5; i++)
                for (uint64_t r = 0; r < 20; r++) {
                    const uint64_t at = i * j.io.ldy + r;
                    assert_int_equal(qc_f32_bits(y[at]),
                                     i == 3 ? 0x7fc00000u : qc_f32_bits(plain[at]));
                }
            free(y);
            free(plain);
            free_job(&j);
        }
        qc_cpu_matmul_destroy(h);
    }
}

/* A NaN of the bias comes out as the one NaN that outputs have, whatever its sign was. */
TEST(a_nan_of_the_bias_is_the_usual_one)
{
    qt_rng rng = qt_rng_start("bias");
    qc_cpu_matmul *h = open_matmul(QC_ISA_SCALAR, 1);
    job j;
    make_job(&j, &rng, 0, 20, 512, 2);
    free(j.bias);
    j.io.bias = j.bias = qt_alloc(20, sizeof *j.bias);
    memset(j.bias, 0, 20 * sizeof *j.bias);
    j.bias[7] = qc_f32_of_bits(0xffc00001u);
    float *y = run(h, &j, QC_DTYPE_F32);
    assert_int_equal(qc_f32_bits(y[7]), 0x7fc00000u);
    assert_int_equal(qc_f32_bits(y[j.io.ldy + 7]), 0x7fc00000u);
    assert_true(isfinite(y[6]));
    free(y);
    free_job(&j);
    qc_cpu_matmul_destroy(h);
}

typedef struct {
    qc_cpu_matmul *h;
    const job *j;
    const void *want;
} caller;

static void *call_often(void *arg)
{
    const caller *c = arg;
    for (unsigned i = 0; i < 50; i++) {
        void *y = run(c->h, c->j, c->j->io.y_dtype);
        QT_CHECK(memcmp(y, c->want,
                        (size_t)(c->j->io.m * c->j->io.ldy) * qt_size(c->j->io.y_dtype)) == 0,
                 "product %u", i);
        free(y);
    }
    return NULL;
}

TEST(several_threads_may_call)
{
    qt_rng rng = qt_rng_start("callers");
    qc_cpu_matmul *h = open_matmul(QC_ISA_SCALAR, 3);
    job jobs[3];
    caller callers[3];
    pthread_t ids[3];
    for (unsigned i = 0; i < 3; i++) {
        make_job(&jobs[i], &rng, i, 50, 256 * (i + 1), i * 9 + 1);
        callers[i] = (caller){h, &jobs[i], run(h, &jobs[i], jobs[i].io.y_dtype)};
    }
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&ids[i], NULL, call_often, &callers[i]), 0);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(pthread_join(ids[i], NULL), 0);
    for (unsigned i = 0; i < 3; i++) {
        union {
            const void *in;
            void *out;
        } want = {callers[i].want};
        free(want.out);
        free_job(&jobs[i]);
    }
    qc_cpu_matmul_destroy(h);
}

TEST(what_is_wrong_is_refused)
{
    qt_rng rng = qt_rng_start("refused");
    qc_error err = {0};
    job j;
    float y[8];
    qc_cpu_matmul *h = open_matmul(QC_ISA_SCALAR, 1), *none = NULL;
    make_job(&j, &rng, 0, 4, 256, 1);
    qc_matmul_cpu_io io = j.io;
    io.y = y;
    io.y_dtype = QC_DTYPE_F32;
    assert_int_equal(qc_cpu_matmul_threads(h), 1);
    assert_int_equal(qc_cpu_matmul_threads(NULL), 0);
    assert_int_equal(qc_cpu_matmul_create(NULL, 1, &err), QC_ERR_USAGE);
    assert_int_equal(qc_cpu_matmul_run(NULL, &j.t.w, &io, &err), QC_ERR_USAGE);
    assert_int_equal(qc_cpu_matmul_run(h, NULL, &io, &err), QC_ERR_USAGE);
    assert_int_equal(qc_cpu_matmul_run(h, &j.t.w, NULL, &err), QC_ERR_USAGE);
    assert_int_equal(qc_cpu_matmul_create(&none, 1025, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "1025 threads; expected 1 to 1024, or 0 for one per processor");
    assert_null(none);
    qc_weights formless = j.t.w;
    formless.form.ops = NULL;
    assert_int_equal(qc_cpu_matmul_run(h, &formless, &io, &err), QC_ERR_USAGE);
    assert_int_equal(qc_cpu_matmul_is_fast(NULL), 0);
    io.x_dtype = (qc_dtype)1000;
    assert_int_equal(qc_cpu_matmul_run(h, &j.t.w, &io, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "a product takes F32, F16 or BF16, not an unknown dtype and F32");
    io.x_dtype = QC_DTYPE_I8;
    assert_int_equal(qc_cpu_matmul_run(h, &j.t.w, &io, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "a product takes F32, F16 or BF16, not I8 and F32");
    io.x_dtype = j.io.x_dtype;
    io.ldx = 255;
    assert_int_equal(qc_cpu_matmul_run(h, &j.t.w, &io, &err), QC_ERR_USAGE);
    io.ldx = j.io.ldx;
    io.x = NULL;
    assert_int_equal(qc_cpu_matmul_run(h, &j.t.w, &io, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "qc_cpu_matmul_run: x is NULL");
    io.m = 0;
    assert_int_equal(qc_cpu_matmul_run(h, &j.t.w, &io, &err), QC_OK);
    assert_int_equal(setenv("QCONV_ISA", "sse9", 1), 0);
    assert_int_equal(qc_cpu_matmul_create(&none, 1, &err), QC_ERR_USAGE);
    assert_null(none);
    assert_int_equal(unsetenv("QCONV_ISA"), 0);
    free_job(&j);
    qc_cpu_matmul_destroy(h);
    qc_cpu_matmul_destroy(NULL);
}

TEST(out_of_memory_is_said)
{
    qt_rng rng = qt_rng_start("memory");
    for (uint64_t rows = 1; rows <= 20; rows += 19)
        EACH_ALLOCATION_FAILS (fault, 0) {
            job j;
            float y[20 * 8];
            qc_cpu_matmul *h = NULL;
            make_job(&j, &rng, 0, 3, 256, rows);
            qc_matmul_cpu_io io = j.io;
            io.y = y;
            io.y_dtype = QC_DTYPE_F32;
            io.ldy = 8;
            fault.st = qc_cpu_matmul_create(&h, 2, NULL);
            if (fault.st == QC_OK)
                fault.st = qc_cpu_matmul_run(h, &j.t.w, &io, NULL);
            qc_cpu_matmul_destroy(h);
            free_job(&j);
            assert_true(fault.st != QC_OK || fault.at > 3);
        }
}
