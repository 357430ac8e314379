/* Properties of the matmul on the CPU over random shapes: every table gives the scalar one's bits,
 * neither the cut into ranges nor the weight's form matters, nothing is written between rows, and
 * the error against sums in double keeps its bound. */
#include "tests/fixtures/matmul_testing.h"

#define GAP -7.0

static const qc_dtype types[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};

static uint64_t pick_size(qt_rng *rng, uint64_t most)
{
    static const uint64_t edges[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65};
    if (qt_below(rng, 2) == 0) {
        uint64_t n = edges[qt_below(rng, sizeof edges / sizeof *edges)];
        return n < most ? n : most;
    }
    return 1 + qt_below(rng, most);
}

typedef struct {
    mt_weights t;
    void *dense, *x, *scratch;
    float *bias;
    qc_dtype dense_type;
    uint64_t n, k, m, ldx, ldy;
    qc_matmul_cpu_io io;
} job;

static void make_job(job *j, qt_rng *rng, int special)
{
    unsigned f = (unsigned)qt_below(rng, MT_FORMS);
    memset(j, 0, sizeof *j);
    j->n = pick_size(rng, 40);
    j->k = pick_size(rng, 1300); /* up to three steps: a first, a middle and a last one */
    j->m = pick_size(rng, 40);
    j->ldx = j->k + qt_below(rng, 3);
    j->ldy = j->n + qt_below(rng, 3);
    mt_make(&j->t, rng, mt_forms[f].kind, j->n, j->k, mt_forms[f].block, mt_forms[f].nested);
    qc_dtype x_type = types[qt_below(rng, 3)];
    j->x = qt_alloc(j->m * j->ldx, qt_size(x_type));
    mt_random_x(rng, j->x, x_type, j->m * j->ldx);
    static const double specials[] = {
        (double)NAN, (double)INFINITY, (double)-INFINITY, -0.0, 1e-40, -1e-45, 6e4};
    for (unsigned i = 0; special && i < 20; i++)
        qt_put(j->x, x_type, qt_below(rng, j->m * j->ldx), specials[qt_below(rng, 7)]);
    j->dense_type = types[qt_below(rng, 3)];
    j->dense = qt_alloc(j->n * j->k, qt_size(j->dense_type));
    mt_random_x(rng, j->dense, j->dense_type, j->n * j->k);
    if (qt_below(rng, 2)) {
        j->bias = qt_alloc(j->n, sizeof *j->bias);
        mt_random_x(rng, j->bias, QC_DTYPE_F32, j->n);
    }
    j->scratch = mt_scratch(j->m, j->k);
    j->io = (qc_matmul_cpu_io){j->x,   x_type, j->m, j->ldx, NULL, types[qt_below(rng, 3)],
                               j->ldy, j->bias};
}

static void free_job(job *j)
{
    mt_free(&j->t);
    free(j->dense);
    free(j->x);
    free(j->bias);
    free(j->scratch);
}

/* y, with what lies between its rows as it was. */
static void *run(const job *j, qc_isa isa, int dense, uint64_t step)
{
    qc_matmul_cpu_io io = j->io;
    const qc_matmul_ops *ops = qc_matmul_ops_for(isa);
    io.y = qt_alloc(j->m * j->ldy, qt_size(io.y_dtype));
    for (uint64_t i = 0; i < j->m * j->ldy; i++)
        qt_put(io.y, io.y_dtype, i, GAP);
    for (uint64_t at = 0; at < j->n; at += step) {
        uint64_t count = j->n - at < step ? j->n - at : step;
        if (dense)
            qc_matmul_cpu_dense(ops, j->dense, j->dense_type, j->k, at, count, &io, j->scratch);
        else
            qc_matmul_cpu_quantized(ops, &j->t.w, at, count, &io, j->scratch);
    }
    for (uint64_t i = 0; i < j->m * j->ldy; i++)
        if (i % j->ldy >= j->n)
            assert_true(qt_get(io.y, io.y_dtype, i) == GAP);
    return io.y;
}

TEST(test_every_table_gives_the_same_bits)
{
    qt_rng rng = qt_rng_start("tables");
    for (unsigned round = 0; round < 150; round++) {
        job j;
        make_job(&j, &rng, round % 3 == 0);
        size_t bytes = (size_t)(j.m * j.ldy) * qt_size(j.io.y_dtype);
        for (int dense = 0; dense < 2; dense++) {
            void *want = run(&j, QC_ISA_SCALAR, dense, j.n);
            for (int isa = 0; isa < QC_ISA_COUNT; isa++) {
                if (!qc_isa_available((qc_isa)isa))
                    continue;
                void *whole = run(&j, (qc_isa)isa, dense, j.n);
                void *cut = run(&j, (qc_isa)isa, dense, 1 + qt_below(&rng, j.n));
                QT_CHECK(memcmp(want, whole, bytes) == 0,
                         "%s, dense %d: n %d k %d m %d x %s y %s kind %d block %u",
                         qc_isa_name((qc_isa)isa), dense, (int)j.n, (int)j.k, (int)j.m,
                         qc_dtype_name(j.io.x_dtype), qc_dtype_name(j.io.y_dtype),
                         (int)j.t.w.form.ops->kind, j.t.w.form.block_elems);
                QT_CHECK(memcmp(want, cut, bytes) == 0, "%s: the cut matters",
                         qc_isa_name((qc_isa)isa));
                free(whole);
                free(cut);
            }
            free(want);
        }
        free_job(&j);
    }
}

/* A product with a quantized weight has the bits of one with its values in F32, and those of a sum
 * in F32 that is rounded once. */
TEST(test_values_and_rounding)
{
    qt_rng rng = qt_rng_start("values");
    for (unsigned round = 0; round < 60; round++) {
        job j;
        make_job(&j, &rng, 0);
        void *y = run(&j, QC_ISA_SCALAR, 0, j.n);
        qc_dtype y_type = j.io.y_dtype;
        free(j.dense);
        j.dense = mt_values(&j.t);
        j.dense_type = j.io.y_dtype = QC_DTYPE_F32;
        float *wide = run(&j, QC_ISA_SCALAR, 1, j.n);
        for (uint64_t i = 0; i < j.m * j.ldy; i++) {
            uint64_t want = 0;
            qt_put(&want, y_type, 0, (double)wide[i]);
            assert_memory_equal((char *)y + i * qt_size(y_type), &want, qt_size(y_type));
        }
        free(wide);
        free(y);
        free_job(&j);
    }
}

/* With u = 2^-24 a product passes at most ceil(k / 16) fused additions, four folds and the bias's
 * addition: |sum - exact| <= g / (1 - g) * (sum |w| |x| + |bias|), g = (ceil(k / 16) + 5) u. */
TEST(test_error_bound)
{
    qt_rng rng = qt_rng_start("bound");
    for (unsigned round = 0; round < 60; round++) {
        job j;
        make_job(&j, &rng, 0);
        j.io.y_dtype = QC_DTYPE_F32;
        float *y = run(&j, QC_ISA_SCALAR, 0, j.n), *values = mt_values(&j.t);
        double g = ((double)((j.k + 15) / 16) + 5.0) * 0x1p-24;
        for (uint64_t i = 0; i < j.m; i++) {
            for (uint64_t n = 0; n < j.n; n++) {
                double b = j.bias ? (double)j.bias[n] : 0.0, size = fabs(b), exact = 0.0;
                for (uint64_t k = 0; k < j.k; k++) {
                    double product =
                        (double)values[n * j.k + k] * qt_get(j.x, j.io.x_dtype, i * j.ldx + k);
                    exact += product;
                    size += fabs(product);
                }
                double e = fabs((double)y[i * j.ldy + n] - (exact + b));
                QT_CHECK(e <= g / (1.0 - g) * size, "error %g, bound %g", e, g / (1.0 - g) * size);
            }
        }
        free(values);
        free(y);
        free_job(&j);
    }
}
