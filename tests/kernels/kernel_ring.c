/* The kernel for few rows of x (kernels/matmul_ring.cu), beside what all kernels have in
 * kernel_products.c: blocks of threads with many tiles, K that is split because x has no room, BF16
 * of any size, and several weights with one x.
 *
 *   kernel_ring         quick enough for the CPU shim
 *   kernel_ring --slow  more of everything
 *
 * What a block of threads has depends on the device's multiprocessors: run with 132 and 3. */
#include "kernels/matmul_handle.h"
#include "kernels/matmul_kernels.h"
#include "tests/fixtures/kernel_matmul.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static int slow;

static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};

/* The plan that a product gets. */
static qc_matmul_plan plan_of(const qc_matmul *h, const km_spec *s, const km_job *j)
{
    qc_matmul_shape shape = {
        .kind = s->kind,
        .m = j->m,
        .n = s->n,
        .k = s->k,
        .block_elems = s->block,
        .x_dtype = j->x_dtype,
        .y_dtype = j->y_dtype,
        .ldx = j->ldx ? j->ldx : s->k,
        .x_alignment = j->ldx % 8 || j->x_shift % 8 ? 2 : 16,
        .choice = h->choice,
    };
    qc_matmul_plan p;
    KM_OK(qc_matmul_plan_make(qc_matmul_device(h), &shape, j->path, j->limit_bytes, &p, &km_error));
    return p;
}

/* All products with this number of blocks of threads, from AUTO. */
static void use_blocks(qc_matmul *h, uint32_t blocks)
{
    h->choice = (qc_matmul_choice){QC_MATMUL_MMA_16816, QC_MATMUL_RING, blocks};
}

/* job.path: AUTO for the handle's choice, else MMA_16816. */
static void multiply(qc_matmul *h, qt_rng *rng, const km_spec *spec, km_job job)
{
    km_weight w;
    km_data d;
    if (job.path != QC_MATMUL_AUTO)
        job.path = QC_MATMUL_MMA_16816;
    qc_matmul_plan p = plan_of(h, spec, &job);
    QT_CHECK(p.variant == QC_MATMUL_RING, "%" PRIu64 " x %" PRIu64 " has another kernel", spec->n,
             spec->k);
    km_weight_make(&w, h, spec, rng);
    km_data_make(&d, &w, &job, rng);
    km_run(h, &w, &d);
    km_check(&w, &d, km_rounding_of_codes(&w));
    if (slow || job.m % 4 == 1) {
        const size_t y_bytes = job.m * d.job.ldy * 2;
        uint16_t *before = km_host(y_bytes);
        memcpy(before, d.y, y_bytes);
        w.ready.complete = QC_MATMUL_WEIGHTS_COMPLETE;
        km_run(h, &w, &d);
        QT_CHECK(memcmp(before, d.y, y_bytes) == 0, "another run, other bits");
        free(before);
    }
    km_data_free(&d);
    km_weight_free(&w);
}

/* Rows of x that have no room in shared memory split K; without room for the partial sums, another
 * kernel has the product. */
TEST(test_splits)
{
    qt_rng rng = qt_rng_start("splits");
    qc_matmul *h = km_handle();
    unsigned splits = 0, whole = 0;
    for (unsigned t = 0; t < 9; t++) {
        km_spec spec = {.kind = kinds[t % 3],
                        .n = t / 3 % 2 ? 70 : 40,
                        .k = 8192 + t % 2 * 14336 + 64 * t,
                        .block = 64,
                        .nested = t % 3 != 1};
        km_job job = {.m = 2 + 3 * (t / 3),
                      .x_dtype = t % 4 == 3 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                      .y_dtype = QC_DTYPE_F16,
                      .path = QC_MATMUL_MMA_16816};
        const qc_matmul_plan p = plan_of(h, &spec, &job);
        splits += p.splits > 1;
        whole += p.splits == 1;
        assert_true(p.splits > 1 || p.workspace_bytes == 0);
        multiply(h, &rng, &spec, job);
        job.path = QC_MATMUL_AUTO;
        job.limit_bytes = QC_MATMUL_NO_WORKSPACE;
        if (p.splits > 1)
            assert_int_not_equal(plan_of(h, &spec, &job).variant, QC_MATMUL_RING);
    }
    QT_CHECK(splits && whole, "%u plans split K, %u do not", splits, whole);
    qc_matmul_destroy(h);
}

/* BF16 has float's range: columns of 64 far from each other in size, next to nothing, and zeros. */
TEST(test_bf16_range)
{
    static const int powers[] = {0, -126, 100, -133, 30, -60, 7, -20};
    qt_rng rng = qt_rng_start("range");
    qc_matmul *h = km_handle();
    for (unsigned t = 0; t < 6; t++) {
        km_spec spec = {.kind = kinds[t % 3], .n = 64, .k = 512, .block = 64, .nested = t % 3 == 2};
        km_job job = {.m = 8,
                      .x_dtype = QC_DTYPE_BF16,
                      .y_dtype = QC_DTYPE_BF16,
                      .path = QC_MATMUL_MMA_16816};
        km_weight w;
        km_data d;
        km_weight_make(&w, h, &spec, &rng);
        km_data_make(&d, &w, &job, &rng);
        for (uint64_t m = 0; m < job.m; m++)
            for (uint64_t k = 0; k < spec.k; k++) {
                int power = t / 3 ? powers[(m + k / 64) % 8] : powers[m];
                uint16_t *x = &d.x[m * d.job.ldx + k];
                *x = qc_bf16_from_f32(ldexpf(qc_f32_from_bf16(*x), power));
                if ((m + k / 64) % 5 == 0 && t / 3)
                    *x = 0;
            }
        km_run(h, &w, &d);
        km_check(&w, &d, (km_rounding){.weight = 0x1p-11 * 0.6, .absolute = 0});
        km_data_free(&d);
        km_weight_free(&w);
    }
    qc_matmul_destroy(h);
}

/* Blocks of threads with several tiles, some of which end in one and begin in the next; warps that
 * have nothing of a tile and go on at once. */
TEST(test_few_blocks)
{
    static const uint64_t ks[] = {192, 576, 1024, 4096};
    qt_rng rng = qt_rng_start("few");
    qc_matmul *h = km_handle();
    for (unsigned t = 0; t < 24; t++) {
        km_spec spec = {.kind = kinds[t % 3],
                        .n = t / 3 % 2 ? 450 : 300,
                        .k = ks[t / 6],
                        .block = 64,
                        .nested = t % 3 != 1};
        use_blocks(h, 1 + (t + t / 6) % 4);
        multiply(h, &rng, &spec,
                 (km_job){.m = 1 + t % 8,
                          .x_dtype = t % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                          .y_dtype = QC_DTYPE_F16,
                          .path = QC_MATMUL_AUTO});
    }
    qc_matmul_destroy(h);
}

/* ---- groups ---------------------------------------------------------------------------------- */

enum { GROUP_MOST = QC_MATMUL_GROUP_MOST };

typedef struct {
    uint32_t count;
    km_weight w[GROUP_MOST];
    km_data d[GROUP_MOST];
    const qc_matmul_weights *ready[GROUP_MOST];
    qc_matmul_io io[GROUP_MOST];
    void *bases[2 * GROUP_MOST + 1];
    void *workspace;
    uint64_t bytes;
} group;

/* x of the first is that of all. */
static void group_make(group *g, qc_matmul *h, const km_spec *specs, uint32_t count, km_job job,
                       qt_rng *rng)
{
    memset(g, 0, sizeof *g);
    g->count = count;
    for (uint32_t i = 0; i < count; i++) {
        job.bias = i % 2 == 0;
        job.ldy = specs[i].n + i;
        km_weight_make(&g->w[i], h, &specs[i], rng);
        km_data_make(&g->d[i], &g->w[i], &job, rng);
        memcpy(g->d[i].x, g->d[0].x, job.m * g->d[0].job.ldx * 2);
        g->ready[i] = &g->w[i].ready;
        g->io[i] = (qc_matmul_io){.m = job.m,
                                  .x_dtype = job.x_dtype,
                                  .ldx = g->d[i].job.ldx,
                                  .y_dtype = job.y_dtype,
                                  .ldy = job.ldy};
        g->io[i].x =
            i ? g->io[0].x : km_upload(g->d[0].x, job.m * g->d[0].job.ldx * 2, 0, &g->bases[0]);
        g->io[i].y = km_upload(g->d[i].y, job.m * job.ldy * 2, 0, &g->bases[2 * i + 1]);
        if (job.bias)
            g->io[i].bias = km_upload(g->d[i].bias, specs[i].n * 2, 0, &g->bases[2 * i + 2]);
    }
    g->bytes = qc_matmul_group_workspace_bytes(h, g->ready, count, job.m, job.path, 0);
    assert_true(g->bytes != UINT64_MAX);
    KM_OK(qc_cuda_malloc(&g->workspace, g->bytes, &km_error));
}

/* Twice, with y empty before. The second run is a graph's. */
static void group_run(group *g, const qc_matmul *h, qc_matmul_path path)
{
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_fill(g->workspace, 0xff, g->bytes, s, &km_error));
    for (int run = 0; run < 2; run++) {
        qc_cuda_graph graph = NULL;
        for (uint32_t i = 0; i < g->count; i++)
            KM_OK(qc_cuda_fill(g->io[i].y, 0xcd, g->io[i].m * g->io[i].ldy * 2, s, &km_error));
        if (run)
            KM_OK(qc_cuda_capture_begin(s, &km_error));
        KM_OK(qc_matmul_run_group(h, g->ready, g->io, g->count, path, g->workspace, g->bytes, s,
                                  &km_error));
        if (run) {
            KM_OK(qc_cuda_capture_end(&graph, s, &km_error));
            KM_OK(qc_cuda_graph_launch(graph, s, &km_error));
            KM_OK(qc_cuda_stream_synchronize(s, &km_error));
            qc_cuda_graph_destroy(graph);
        }
    }
    for (uint32_t i = 0; i < g->count; i++) {
        km_download(g->d[i].y, g->io[i].y, g->io[i].m * g->io[i].ldy * 2, s);
        for (uint64_t j = 0; j < g->io[i].m * g->io[i].ldy; j++)
            if (j % g->io[i].ldy >= g->d[i].n)
                QT_CHECK(g->d[i].y[j] == 0xcdcdu, "y of weight %u was written to behind a row", i);
    }
    qc_cuda_stream_destroy(s);
}

static void group_free(group *g)
{
    for (uint32_t i = 0; i < g->count; i++) {
        km_data_free(&g->d[i]);
        km_weight_free(&g->w[i]);
    }
    for (size_t i = 0; i < COUNT(g->bases); i++)
        qc_cuda_free(g->bases[i]);
    qc_cuda_free(g->workspace);
}

/* All paths, alike and unlike weights, groups of 1 to 8: each y is right. */
TEST(test_groups)
{
    qt_rng rng = qt_rng_start("groups");
    qc_matmul *h = km_handle();
    const qc_matmul_path paths[] = {QC_MATMUL_MMA_16816, QC_MATMUL_AUTO, QC_MATMUL_GEMV,
                                    QC_MATMUL_MMA_884};
    for (unsigned t = 0; t < (slow ? 48u : 16u); t++) {
        km_spec specs[GROUP_MOST];
        uint32_t count = t < 4 ? 3 : 1 + t % GROUP_MOST;
        uint64_t k = t % 5 == 4 ? 96 : t % 3 ? 1024 : 320;
        if (t == 0 || t == 4 || t == 12) /* tiles that blocks share, with many multiprocessors */
            k = 8192;
        for (uint32_t i = 0; i < count; i++)
            specs[i] = (km_spec){
                .kind = t % 4 == 3 ? kinds[i % 3] : kinds[t / 4 % 3], /* some unlike */
                .n = i == 1   ? 130
                     : i == 2 ? 65
                              : 64 + 3 * i,
                .k = k,
                .block = 64,
                .nested = kinds[t / 4 % 3] != QC_FORM_INT8_ROWS && t % 4 != 3,
                .custom_map = t % 8 == 6 && i == 1,
                .scale = i % 2 ? 0.05 : 1e-4,
            };
        km_job job = {.m = t % 3 == 2 ? 11 : 1 + t % 8,
                      .x_dtype = t / 2 % 4 == 3 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                      .y_dtype = QC_DTYPE_F16,
                      .path = paths[t % 4]};
        group g;
        use_blocks(h, 2); /* of AUTO: a block of threads goes on to the next weight */
        group_make(&g, h, specs, count, job, &rng);
        group_run(&g, h, job.path);
        for (uint32_t i = 0; i < count; i++)
            km_check(&g.w[i], &g.d[i],
                     (km_rounding){.weight = 0x1p-11, .absolute = 0x1p-24 * 1e-3});
        group_free(&g);
    }
    qc_matmul_destroy(h);
}

static void expect_group(const group *g, const qc_matmul *h, uint32_t count, const char *words)
{
    qc_error err = {0};
    km_expect(qc_matmul_run_group(h, g->ready, g->io, count, QC_MATMUL_AUTO, g->workspace, g->bytes,
                                  NULL, &err),
              QC_ERR_USAGE, &err, words);
}

TEST(test_group_arguments)
{
    qt_rng rng = qt_rng_start("arguments");
    qc_matmul *h = km_handle();
    km_spec specs[2] = {{.kind = QC_FORM_NF4, .n = 64, .k = 128, .block = 64},
                        {.kind = QC_FORM_NF4, .n = 80, .k = 128, .block = 64}};
    km_job job = {.m = 2, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    group g;
    group_make(&g, h, specs, 2, job, &rng);
    expect_group(&g, h, 0, "group has 0 weights");
    expect_group(&g, h, GROUP_MOST + 1, "group has 9 weights");
    const qc_matmul_io io = g.io[1];
    g.io[1].m = 3;
    expect_group(&g, h, 2, "weight 1 of the group differs from the first in m;");
    g.io[1] = io;
    g.io[1].x = io.y;
    expect_group(&g, h, 2, "first in x;");
    g.io[1] = io;
    g.io[1].y_dtype = QC_DTYPE_BF16;
    expect_group(&g, h, 2, "first in the dtype of x or y;");
    g.io[1] = io;
    g.io[1].ldx = 136;
    expect_group(&g, h, 2, "first in ldx;");
    g.io[1] = io;
    g.w[1].ready.part.cols = 64;
    expect_group(&g, h, 2, "first in K;");
    g.w[1].ready.part.cols = 128;
    group_run(&g, h, QC_MATMUL_AUTO);
    group_free(&g);
    qc_matmul_destroy(h);
}

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    if (km_no_device())
        return 77;
    km_without_cublas();
    qc_matmul *h = km_handle();
    unsigned sm = qc_matmul_device(h)->sm;
    qc_matmul_destroy(h);
    if (sm < 80) {
        print_message("skipped: this device is sm_%u\n", sm);
        return 77;
    }
    return test_run_all(NULL);
}
