/* Products that share x in one launch of the mma-884 kernels: each has the bits of a launch of its
 * own with the same plan, is right, and is written to nowhere else. At the launcher, with plans
 * made for the group and with K split further. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_kernels.h"

#define PARTS 3

static const uint64_t part_n[PARTS] = {33, 130, 5};

typedef struct {
    km_weight w[PARTS];
    km_data d[PARTS];
    qc_matmul_call c[PARTS];
    void *bases[4 * PARTS + 1];
    size_t base_count;
    size_t partial_bytes[PARTS];
} group;

static void *device_memory(group *g, size_t bytes)
{
    void *p = NULL;
    KM_OK(qc_cuda_malloc(&p, bytes ? bytes : 1, &km_error));
    g->bases[g->base_count++] = p;
    return p;
}

/* x of the first part goes to all; as the launcher wants it: float16, zero up to k_padded. */
static void group_make(group *g, const qc_matmul *h, const qc_cuda_device *d, const km_spec *like,
                       uint64_t m, uint32_t splits, qt_rng *rng)
{
    qc_matmul_shape shape = {.kind = like->kind,
                             .m = m,
                             .k = like->k,
                             .parts = PARTS,
                             .block_elems = like->block,
                             .x_dtype = QC_DTYPE_F16,
                             .y_dtype = QC_DTYPE_F16,
                             .ldx = (like->k + 31) / 32 * 32,
                             .x_alignment = 16,
                             .has_epilogue = 1};
    qc_matmul_plan plan;
    memset(g, 0, sizeof *g);
    for (int i = 0; i < PARTS; i++)
        shape.n += shape.part_n[i] = part_n[i];
    KM_OK(qc_matmul_plan_make(d, &shape, QC_MATMUL_MMA_884, 0, &plan, &km_error));
    if (splits) {
        plan.split_k = ((like->k + 127) / 128 + splits - 1) / splits * 128;
        plan.splits = (uint32_t)((like->k + plan.split_k - 1) / plan.split_k);
    }
    for (int i = 0; i < PARTS; i++) {
        km_spec spec = *like;
        spec.n = part_n[i];
        km_weight_make(&g->w[i], h, &spec, rng);
        km_job job = {.m = m,
                      .ldx = shape.ldx,
                      .ldy = spec.n + (uint64_t)i,
                      .x_dtype = QC_DTYPE_F16,
                      .y_dtype = QC_DTYPE_F16,
                      .bias = i != 1};
        km_data_make(&g->d[i], &g->w[i], &job, rng);
        if (i > 0)
            memcpy(g->d[i].x, g->d[0].x, m * shape.ldx * 2);
        for (uint64_t j = 0; i == 0 && j < m * shape.ldx; j++)
            g->d[0].x[j] = j % shape.ldx < like->k ? g->d[0].x[j] : 0;
        if (i == 0)
            g->c[0].x = km_upload(g->d[0].x, m * shape.ldx * 2, 0, &g->bases[g->base_count++]);
        qc_matmul_call *c = &g->c[i];
        *c = (qc_matmul_call){.plan = plan,
                              .weights = g->w[i].ready,
                              .m = m,
                              .n = spec.n,
                              .k = like->k,
                              .x = g->c[0].x,
                              .x_dtype = QC_DTYPE_F16,
                              .ldx = shape.ldx,
                              .out = {.dtype = QC_DTYPE_F16, .ldy = job.ldy}};
        c->out.y = device_memory(g, m * job.ldy * 2);
        if (job.bias)
            c->out.bias = km_upload(g->d[i].bias, spec.n * 2, 0, &g->bases[g->base_count++]);
        g->partial_bytes[i] = plan.splits > 1 ? plan.splits * m * spec.n * 4 : 0;
        c->partials = device_memory(g, g->partial_bytes[i]);
    }
}

static void group_free(group *g)
{
    for (int i = 0; i < PARTS; i++) {
        km_data_free(&g->d[i]);
        km_weight_free(&g->w[i]);
    }
    for (size_t i = 0; i < g->base_count; i++)
        qc_cuda_free(g->bases[i]);
}

/* y of all parts to d[].y, by launches of `together` calls each. */
static void run(group *g, uint32_t together)
{
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    for (int i = 0; i < PARTS; i++) {
        const qc_matmul_call *c = &g->c[i];
        for (uint64_t j = 0; j < c->m * c->out.ldy; j++)
            g->d[i].y[j] = KM_GAP;
        KM_OK(qc_cuda_to_device(c->out.y, g->d[i].y, c->m * c->out.ldy * 2, s, &km_error));
        KM_OK(qc_cuda_fill(c->partials, 0xff, g->partial_bytes[i], s, &km_error));
    }
    for (uint32_t i = 0; i < PARTS; i += together)
        KM_OK(qc_mma884_launch(g->c + i, together, s, &km_error));
    for (int i = 0; i < PARTS; i++) {
        const qc_matmul_call *c = &g->c[i];
        if (c->plan.splits > 1)
            KM_OK(qc_matmul_reduce_launch(c, s, &km_error));
        km_download(g->d[i].y, c->out.y, c->m * c->out.ldy * 2, s);
        for (uint64_t j = 0; j < c->m * c->out.ldy; j++)
            if (j % c->out.ldy >= c->n)
                QT_CHECK(g->d[i].y[j] == KM_GAP, "part %d was written to behind a row", i);
    }
    qc_cuda_stream_destroy(s);
}

/* As planned for device d, on the one that there is. */
static void check(const qc_matmul *h, const qc_cuda_device *d, const km_spec *like, uint64_t m,
                  uint32_t splits, qt_rng *rng)
{
    group g;
    group_make(&g, h, d, like, m, splits, rng);
    run(&g, PARTS);
    uint16_t *together[PARTS];
    for (int i = 0; i < PARTS; i++) {
        together[i] = km_host(m * g.c[i].out.ldy * 2);
        memcpy(together[i], g.d[i].y, m * g.c[i].out.ldy * 2);
        km_check(&g.w[i], &g.d[i], (km_rounding){.weight = 0x1p-11, .absolute = 0x1p-25});
    }
    run(&g, 1);
    for (int i = 0; i < PARTS; i++) {
        QT_CHECK(memcmp(together[i], g.d[i].y, m * g.c[i].out.ldy * 2) == 0,
                 "part %d of %u splits, %u rows a tile, has other bits alone", i,
                 g.c[i].plan.splits, g.c[i].plan.m_tile);
        free(together[i]);
    }
    group_free(&g);
}

static void test_groups(void **state)
{
    (void)state;
    static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};
    static const uint64_t ms[] = {1, 9, 20, 40}, ks[] = {416, 1184, 77};
    qt_rng rng = {.state = 11};
    qc_matmul *h = km_handle();
    unsigned turn = 0;
    for (int kind = 0; kind < 3 && qc_matmul_device(h)->sm >= 70; kind++)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 3; j++, turn++) {
                if (turn % qt_every(5))
                    continue;
                km_spec like = {.kind = kinds[kind],
                                .k = ks[j],
                                .block = turn % 2 ? 32 : 64,
                                .nested = kind != 1 && turn % 3 != 0};
                check(h, qc_matmul_device(h), &like, ms[i], j == 1 ? 3 : 0, &rng);
            }
    qc_matmul_destroy(h);
}

static const qc_cuda_device v100 = {
    .sm = 70, .multiprocessors = 80, .shared_multiprocessor_bytes = 96 << 10};

#ifdef QC_CUDA_SHIM
/* Tiles of 64 rows of NF4, which no other device has: from one step of k to many, with a last one
 * that is not whole, and tiles of x that are not. */
static void test_64_rows(void **state)
{
    (void)state;
    static const uint64_t ms[] = {33, 64, 107}, ks[] = {32, 128, 416, 1184};
    qt_rng rng = {.state = 12};
    qc_matmul *h = km_handle();
    for (unsigned i = 0; i < 3; i++)
        for (unsigned j = 0; j < 4; j++) {
            km_spec like = {
                .kind = QC_FORM_NF4, .k = ks[j], .block = j % 2 ? 32 : 64, .nested = i != 1};
            check(h, &v100, &like, ms[i], j == 3 ? 3 : 0, &rng);
        }
    qc_matmul_destroy(h);
}
#endif

/* Tiles of x: on sm_70 two of 32 rows are one of 64 where both have rows. */
static void test_tiles_of_x(void **state)
{
    (void)state;
    static const struct {
        uint64_t m;
        uint32_t with, without;
    } rows[] = {{8, 8, 8},    {16, 16, 16}, {32, 32, 32}, {33, 64, 32},  {64, 64, 32},
                {65, 32, 32}, {96, 32, 32}, {97, 64, 32}, {128, 64, 32}, {4096, 64, 32}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (unsigned sm = 70; sm < 100; sm++) {
            qc_cuda_device d = v100;
            qc_matmul_plan p = {.path = QC_MATMUL_MMA_884, .aligned = 1};
            qc_matmul_shape s = {.kind = QC_FORM_NF4, .m = rows[i].m, .n = 8192, .k = 8192};
            d.sm = sm;
            qc_mma884_configure(&d, &s, &p);
            assert_int_equal(p.m_tile, sm < 75 ? rows[i].with : rows[i].without);
            assert_true(p.shared_bytes <= 64 << 10);
            s.kind = QC_FORM_INT8_ROWS;
            qc_mma884_configure(&d, &s, &p);
            assert_int_equal(p.m_tile, rows[i].m > 32 ? 64 : rows[i].with);
        }
}

/* The fewest tiles that hold a group: those of a part do not reach into the next. */
static void test_plan(void **state)
{
    (void)state;
    static const uint64_t shapes[][2] = {{28672, 8192}, {8192, 28672}, {8192, 8192}, {1024, 8192}};
    for (size_t i = 0; i < 4; i++)
        for (uint64_t m = 1; m <= 64; m *= 2) {
            qc_matmul_shape s = {.kind = QC_FORM_NF4,
                                 .m = m,
                                 .n = shapes[i][0],
                                 .k = shapes[i][1],
                                 .block_elems = 64,
                                 .x_dtype = QC_DTYPE_F16,
                                 .y_dtype = QC_DTYPE_F16,
                                 .ldx = shapes[i][1],
                                 .x_alignment = 16};
            qc_matmul_plan p;
            KM_OK(qc_matmul_plan_make(&v100, &s, QC_MATMUL_MMA_884, 0, &p, &km_error));
            uint64_t tiles = qc_matmul_tiles(&s, p.n_tile) * ((m + p.m_tile - 1) / p.m_tile);
            uint64_t waves = (tiles * p.splits + 79) / 80;
            double work = (double)(s.k * tiles) / 80.0; /* k that a multiprocessor must do */
            QT_CHECK((double)(waves * p.split_k) <= 1.3 * work,
                     "%u x %" PRIu64 " of k: the busiest multiprocessor has %.2f times its share",
                     p.splits, p.split_k, (double)(waves * p.split_k) / work);
        }
}

int main(void)
{
    if (km_no_device())
        return 77;
    km_without_cublas();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups),
#ifdef QC_CUDA_SHIM
        cmocka_unit_test(test_64_rows),
#endif
        cmocka_unit_test(test_tiles_of_x),
        cmocka_unit_test(test_plan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
