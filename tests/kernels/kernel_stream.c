/* The streaming matmul for up to 8 rows of x (kernels/matmul_stream.cu), beside what all kernels
 * have in kernel_products.c: tiles shared by blocks of threads, several weights with one x, few
 * rows; and packed weights, which have the plans and the bits of those in the file's layout.
 *
 *   kernel_stream         quick enough for the CPU shim
 *   kernel_stream --slow  more of everything
 *
 * What is shared by how many blocks depends on the device's multiprocessors: run with 132 and 3. */
#include "kernels/matmul_handle.h"
#include "kernels/matmul_kernels.h"
#include "tests/fixtures/kernel_matmul.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static int slow;

static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};

/* The plan that a product gets, with the file's layout or a packed weight. */
static qc_matmul_plan plan_of_layout(const qc_matmul *h, const km_spec *s, const km_job *j,
                                     int packed)
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
        .packed = packed,
        .choice = h->choice,
    };
    qc_matmul_plan p;
    KM_OK(qc_matmul_plan_make(qc_matmul_device(h), &shape, j->path, j->limit_bytes, &p, &km_error));
    return p;
}

static qc_matmul_plan plan_of(const qc_matmul *h, const km_spec *s, const km_job *j)
{
    return plan_of_layout(h, s, j, 0);
}

/* All products with this number of blocks of threads, from AUTO. */
static void use_blocks(qc_matmul *h, uint32_t blocks)
{
    h->choice = (qc_matmul_choice){QC_MATMUL_MMA_16816, QC_MATMUL_STREAM, blocks};
}

/* job.path: AUTO for the handle's choice, else MMA_16816. */
static void multiply(qc_matmul *h, qt_rng *rng, const km_spec *spec, km_job job)
{
    km_weight w;
    km_data d;
    if (job.path != QC_MATMUL_AUTO)
        job.path = QC_MATMUL_MMA_16816;
    qc_matmul_plan p = plan_of(h, spec, &job);
    QT_CHECK(p.variant == QC_MATMUL_STREAM, "%" PRIu64 " x %" PRIu64 " is not streamed", spec->n,
             spec->k);
    km_weight_make(&w, h, spec, rng);
    km_data_make(&d, &w, &job, rng);
    km_run(h, &w, &d);
    km_check(&w, &d, km_rounding_of_codes(&w));
    const size_t y_bytes = job.m * d.job.ldy * 2;
    uint16_t *before = km_host(y_bytes);
    memcpy(before, d.y, y_bytes);
    if (slow || job.m % 4 == 1) {
        km_run(h, &w, &d);
        QT_CHECK(memcmp(before, d.y, y_bytes) == 0, "another run, other bits");
    }
    const qc_matmul_plan again = plan_of_layout(h, spec, &job, 1);
    assert_memory_equal(&again, &p, sizeof p);
    km_pack(h, &w, job.m / 2 % 2);
    km_run(h, &w, &d);
    QT_CHECK(memcmp(before, d.y, y_bytes) == 0,
             "a packed weight of %" PRIu64 " x %" PRIu64 " makes other bits", spec->n, spec->k);
    free(before);
    km_data_free(&d);
    km_weight_free(&w);
}

/* A packed weight may have any number of rows, as its bands are filled up with zeros. */
TEST(test_few_packed_rows)
{
    static const uint64_t ns[] = {1, 8, 31, 33, 63};
    qt_rng rng = qt_rng_start("rows");
    qc_matmul *h = km_handle();
    for (unsigned t = 0; t < 15; t++) {
        km_spec spec = {.kind = kinds[t % 3],
                        .n = ns[t / 3],
                        .k = t % 2 ? 1024 : 320,
                        .block = t % 4 == 3 ? 128 : 64,
                        .nested = t % 3 != 1 && t % 5 != 4};
        /* One weight alone may be wrong by more than the norm allows of many. */
        km_job job = {.m = spec.n == 1 ? 8 : 1 + t % 8,
                      .x_dtype = t / 3 % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                      .y_dtype = QC_DTYPE_F16,
                      .bias = 1,
                      .path = t % 4 ? QC_MATMUL_MMA_16816 : QC_MATMUL_AUTO};
        km_weight w;
        km_data d;
        assert_int_equal(plan_of_layout(h, &spec, &job, 1).variant, QC_MATMUL_STREAM);
        km_weight_make(&w, h, &spec, &rng);
        km_data_make(&d, &w, &job, &rng);
        km_pack(h, &w, t % 2);
        km_run(h, &w, &d);
        km_check(&w, &d, (km_rounding){.weight = 0x1p-11, .absolute = 0});
        km_data_free(&d);
        km_weight_free(&w);
    }
    qc_matmul_destroy(h);
}

/* Tiles that several blocks share, and, where there is no workspace for it, none. The bits of a sum
 * may differ between the two, its value not. */
TEST(test_shared_tiles)
{
    qt_rng rng = qt_rng_start("shared");
    qc_matmul *h = km_handle();
    unsigned meets = 0, whole = 0;
    for (unsigned t = 0; t < 12; t++) {
        km_spec spec = {.kind = kinds[t % 3],
                        .n = t / 3 % 2 ? 70 : 260,
                        .k = t / 6 ? 5120 : 8192,
                        .block = 64,
                        .nested = t % 3 != 1};
        km_job job = {.m = 1 + t % 3,
                      .x_dtype = QC_DTYPE_F16,
                      .y_dtype = QC_DTYPE_F16,
                      .path = QC_MATMUL_MMA_16816,
                      .limit_bytes = 0};
        if (t % 4 == 3) /* for x in another dtype, as the answer is for any */
            job.limit_bytes = QC_MATMUL_HEADER_BYTES + job.m * spec.k * 2 + 256;
        qc_matmul_plan p = plan_of(h, &spec, &job);
        meets += p.meets != 0;
        whole += !p.meets;
        multiply(h, &rng, &spec, job);
    }
    QT_CHECK(meets && whole, "%u plans share tiles, %u do not", meets, whole);
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

/* Twice, with y empty before: counters are left as they were found. The second run is a graph's;
 * with `run` 1 it is the only one. */
static void group_run(group *g, const qc_matmul *h, qc_matmul_path path, int run)
{
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_fill(g->workspace, 0xff, g->bytes, s, &km_error));
    KM_OK(qc_matmul_workspace_init(g->workspace, g->bytes, s, &km_error));
    for (; run < 2; run++) {
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

/* The same group with packed weights: each y has the same bits. */
static void group_run_packed(group *g, const qc_matmul *h, qc_matmul_path path)
{
    uint16_t *before[GROUP_MOST];
    for (uint32_t i = 0; i < g->count; i++) {
        const size_t bytes = g->io[i].m * g->io[i].ldy * 2;
        before[i] = km_host(bytes);
        memcpy(before[i], g->d[i].y, bytes);
        km_pack(h, &g->w[i], g->count % 2);
    }
    assert_int_equal(qc_matmul_group_workspace_bytes(h, g->ready, g->count, g->io[0].m, path, 0),
                     g->bytes);
    group_run(g, h, path, 1);
    for (uint32_t i = 0; i < g->count; i++) {
        QT_CHECK(memcmp(before[i], g->d[i].y, g->io[i].m * g->io[i].ldy * 2) == 0,
                 "weight %u of %u, packed: other bits", i, g->count);
        free(before[i]);
    }
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
        group_run(&g, h, job.path, 0);
        for (uint32_t i = 0; i < count; i++)
            km_check(&g.w[i], &g.d[i],
                     (km_rounding){.weight = 0x1p-11, .absolute = 0x1p-24 * 1e-3});
        if (t % 4 < 2 && k % 64 == 0 && job.m <= 8)
            group_run_packed(&g, h, job.path);
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
    group_run(&g, h, QC_MATMUL_AUTO, 0);
    group_free(&g);
    qc_matmul_destroy(h);
}

/* ---- what a kernel cannot do ------------------------------------------------------------------
 */

/* A launch that cannot work: *fault becomes `fault`, if there is one, y and the workspace stay as
 * they are, and nothing is broken afterwards. */
static void expect_fault(qc_matmul_call *c, uint32_t *fault, uint32_t want, uint64_t y_bytes,
                         uint64_t workspace_bytes)
{
    unsigned char *y = km_host(y_bytes), *workspace = km_host(workspace_bytes);
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    for (int with = 0; with < 2; with++) {
        *fault = 0;
        c->fault = with ? fault : NULL;
        KM_OK(qc_cuda_fill(c->out.y, 0xcd, y_bytes, s, &km_error));
        KM_OK(qc_stream_launch(c, 1, s, &km_error));
        km_download(y, c->out.y, y_bytes, s);
        km_download(workspace, c->counters, workspace_bytes, s);
        assert_int_equal(*fault, with ? want : 0);
        for (uint64_t i = 0; i < y_bytes; i++)
            QT_CHECK(y[i] == 0xcd, "byte %" PRIu64 " of y was written", i);
        for (uint64_t i = 4; i < workspace_bytes; i++)
            QT_CHECK(workspace[i] == 0, "byte %" PRIu64 " of the workspace was written", i);
    }
    qc_cuda_stream_destroy(s);
    free(y);
    free(workspace);
}

/* A tile that 16 blocks of threads share, with a workspace that was not made ready, then (on the
 * shim, where that can be had) with shared memory that begins too late, then with all as it has to
 * be: as if nothing had happened. */
TEST(test_faults)
{
    qt_rng rng = qt_rng_start("faults");
    qc_matmul *h = km_handle();
    km_spec spec = {.kind = QC_FORM_NF4, .n = 64, .k = 1216, .block = 64, .nested = 1};
    km_job job = {.m = 2, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    km_weight w;
    km_data d;
    void *bx = NULL, *by = NULL, *workspace = NULL, *word = NULL;
    qc_cuda_stream s = NULL;
    use_blocks(h, 16);
    km_weight_make(&w, h, &spec, &rng);
    km_data_make(&d, &w, &job, &rng);
    km_run(h, &w, &d);
    uint64_t x_bytes = job.m * spec.k * 2, y_bytes = job.m * spec.n * 2;
    qc_matmul_plan p = plan_of(h, &spec, &job);
    assert_true(p.variant == QC_MATMUL_STREAM && p.meets && p.blocks == 16);
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_malloc(&workspace, p.workspace_bytes, &km_error));
    KM_OK(qc_cuda_host_malloc(&word, sizeof(uint32_t), &km_error));
    KM_OK(qc_cuda_fill(workspace, 0, p.workspace_bytes, s, &km_error));
    KM_OK(qc_cuda_stream_synchronize(s, &km_error));
    qc_matmul_call c = {
        .plan = p,
        .weights = w.ready,
        .m = job.m,
        .n = spec.n,
        .k = spec.k,
        .x = km_upload(d.x, x_bytes, 0, &bx),
        .x_dtype = job.x_dtype,
        .ldx = spec.k,
        .out = {.y = km_upload(d.y, y_bytes, 0, &by), .dtype = job.y_dtype, .ldy = spec.n},
        .partials = (float *)(void *)((char *)workspace + p.partial_offset),
        .counters = workspace};
    for (int complete = 0; complete < 2; complete++) {
        c.weights.complete = complete;
        expect_fault(&c, word, QC_MATMUL_FAULT_WORKSPACE, y_bytes, p.workspace_bytes);
    }
#ifdef QC_CUDA_SHIM
    if (p.shared_bytes > 100u << 10) { /* the table lies apart */
        qc_shim_set_shared_begin(40u << 10);
        expect_fault(&c, word, QC_MATMUL_FAULT_SHARED, y_bytes, p.workspace_bytes);
        qc_shim_set_shared_begin(1024);
    }
#endif
    uint16_t *y = km_host(y_bytes);
    c.fault = word;
    *c.fault = 0;
    KM_OK(qc_matmul_workspace_init(workspace, p.workspace_bytes, s, &km_error));
    KM_OK(qc_stream_launch(&c, 1, s, &km_error));
    km_download(y, c.out.y, y_bytes, s);
    assert_int_equal(*c.fault, 0);
    assert_memory_equal(y, d.y, y_bytes);
    free(y);
    qc_cuda_stream_destroy(s);
    qc_cuda_host_free(word);
    qc_cuda_free(workspace);
    qc_cuda_free(bx);
    qc_cuda_free(by);
    km_data_free(&d);
    km_weight_free(&w);
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
