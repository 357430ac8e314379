/* The kernel of sm_90a (matmul_wgmma.cu), beside what kernel_products.c has for all kernels: with
 * plans of our own, for groups and for every way of sharing out the work. Packed weights then have
 * the same bits.
 *
 *   kernel_wgmma            quick enough for the CPU shim
 *   kernel_wgmma --slow     more of the same */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_kernels.h"

#include <inttypes.h>
#include <math.h>

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static int slow;
static qc_matmul *handle;
static qt_rng rng;

/* d.y, to be compared with later ones. */
static uint16_t *copy_of_y(const km_data *d)
{
    uint16_t *y = km_host(d->job.m * d->job.ldy * 2);
    memcpy(y, d->y, d->job.m * d->job.ldy * 2);
    return y;
}

static void expect_bits(const km_data *d, const uint16_t *y, const char *what)
{
    QT_CHECK(memcmp(y, d->y, d->job.m * d->job.ldy * 2) == 0,
             "%s has other bits: %" PRIu64 " rows of x, %" PRIu64 " x %" PRIu64, what, d->job.m,
             d->n, d->k);
}

/* ---- plans of our own ------------------------------------------------------------------------ */

#define PARTS_MOST 3

static qc_matmul_shape shape(const km_spec *spec, uint64_t m)
{
    return (qc_matmul_shape){.kind = spec->kind,
                             .m = m,
                             .n = spec->n,
                             .k = spec->k,
                             .block_elems = spec->kind == QC_FORM_INT8_ROWS ? 0 : spec->block,
                             .x_dtype = QC_DTYPE_BF16,
                             .y_dtype = QC_DTYPE_F16,
                             .ldx = spec->k,
                             .x_alignment = 16};
}

/* The plan for a device that has so many multiprocessors. */
static qc_matmul_plan plan_for(uint32_t multiprocessors, const qc_matmul_shape *s)
{
    qc_cuda_device d = *qc_matmul_device(handle);
    qc_matmul_plan p;
    d.multiprocessors = multiprocessors;
    KM_OK(qc_matmul_plan_make(&d, s, QC_MATMUL_WGMMA, 0, &p, &km_error));
    return p;
}

/* y of `count` weights that share the dense x of d[0], in one launch with this plan, to d[i].y. Its
 * partial sums get the room that its splits need. */
static void run_planned(const qc_matmul_plan *p, const km_weight *w, km_data *d, uint32_t count)
{
    const qc_matmul_weights *ready[PARTS_MOST];
    qc_matmul_io io[PARTS_MOST];
    qc_matmul_planned planned;
    void *x = NULL, *y[PARTS_MOST] = {NULL}, *bias[PARTS_MOST] = {NULL}, *workspace = NULL;
    uint64_t m = d->job.m, partials = 0;
    qc_cuda_stream s = NULL;
    (void)km_upload(d->x, m * d->k * 2, 0, &x);
    for (uint32_t i = 0; i < count; i++) {
        for (uint64_t j = 0; j < m * d[i].n; j++)
            d[i].y[j] = KM_GAP;
        (void)km_upload(d[i].y, m * d[i].n * 2, 0, &y[i]);
        (void)km_upload(d[i].bias, d[i].n * 2, 0, &bias[i]);
        partials += m * d[i].n * 4 * p->splits;
        ready[i] = &w[i].ready;
        io[i] = (qc_matmul_io){.m = m,
                               .x = x,
                               .x_dtype = d->job.x_dtype,
                               .y = y[i],
                               .y_dtype = d->job.y_dtype,
                               .bias = d[i].job.bias ? bias[i] : NULL};
    }
    KM_OK(
        qc_matmul_plan_product(handle, ready, io, count, QC_MATMUL_WGMMA, 0, &planned, &km_error));
    assert_int_equal(planned.sets, 1);
    planned.set[0].plan = *p;
    planned.workspace_bytes = p->partial_offset + (p->splits > 1 ? partials : 0);
    KM_OK(qc_cuda_malloc(&workspace, planned.workspace_bytes, &km_error));
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_fill(workspace, 0xff, planned.workspace_bytes, s, &km_error));
    KM_OK(qc_matmul_workspace_init(workspace, planned.workspace_bytes, s, &km_error));
    KM_OK(qc_matmul_run_planned(handle, &planned, ready, io, workspace, planned.workspace_bytes, s,
                                &km_error));
    for (uint32_t i = 0; i < count; i++) {
        km_download(d[i].y, y[i], m * d[i].n * 2, s);
        qc_cuda_free(y[i]);
        qc_cuda_free(bias[i]);
    }
    qc_cuda_free(x);
    qc_cuda_free(workspace);
    qc_cuda_stream_destroy(s);
}

static void check_planned(const qc_matmul_plan *p, const km_spec *spec, km_job job, int packed)
{
    km_weight w;
    km_data d;
    km_weight_make(&w, handle, spec, &rng);
    km_data_make(&d, &w, &job, &rng);
    run_planned(p, &w, &d, 1);
    km_check(&w, &d, km_rounding_of_wgmma(&w));
    if (packed) {
        uint16_t *y = copy_of_y(&d);
        km_pack(handle, &w, p->splits % 2);
        km_forget_file(&w);
        run_planned(p, &w, &d, 1);
        expect_bits(&d, y, "a packed weight with a plan of our own");
        free(y);
    }
    km_data_free(&d);
    km_weight_free(&w);
}

/* Blocks that go on from tile to tile: a tile's parts are as many as its blocks, fewer than there
 * is room for in some; and blocks with several tiles. Then K in equal parts. Steps of 128: 9, the
 * last one half. */
static void test_every_worker(void **state)
{
    static const uint64_t steps[] = {1, 2, 4, 5, 7, 8, 9, 10, 13, 18, 40}, ms[] = {9, 20, 35, 70};
    (void)state;
    for (size_t i = 0; i < COUNT(steps); i += qt_every(5))
        for (int equal = 0; equal < 2; equal++) {
            uint64_t m = ms[i % COUNT(ms)];
            km_spec spec = km_next_spec((unsigned)i % 4, 400 + i, 9 * 128 - 64);
            km_job job = {.m = m,
                          .x_dtype = i % 3 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                          .y_dtype = QC_DTYPE_F16,
                          .bias = i % 2};
            qc_matmul_shape s = shape(&spec, m);
            qc_matmul_plan p = plan_for(1, &s);
            p.worker_k = p.split_k = steps[i] * 128;
            p.splits = (uint32_t)((9 + steps[i] - 2) / steps[i] + 1 + i % 2);
            if (equal) {
                p.worker_k = 0;
                p.splits = (uint32_t)((9 + steps[i] - 1) / steps[i]);
            }
            if (!equal || (steps[i] <= 9 && (slow || i % 2)))
                check_planned(&p, &spec, job, slow || (!equal && i % 3 == 0));
        }
}

/* Several weights in one grid, one of them less than a tile, have the bits that they have alone
 * with the same plan. */
static void test_groups(void **state)
{
    static const uint64_t ns[PARTS_MOST] = {300, 17, 193}, ms[] = {10, 31, 70};
    (void)state;
    for (unsigned v = 0; v < 6; v += qt_every(5)) {
        km_weight w[PARTS_MOST];
        km_data d[PARTS_MOST], alone;
        km_job job = {.m = ms[v / 2],
                      .x_dtype = v % 3 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                      .y_dtype = QC_DTYPE_BF16};
        const km_spec first = {.kind = v == 3  ? QC_FORM_INT8_BLOCKS
                                       : v % 2 ? QC_FORM_INT8_ROWS
                                               : QC_FORM_NF4,
                               .k = 640,
                               .block = 64,
                               .nested = v % 2 == 0};
        qc_matmul_shape s = shape(&first, job.m);
        s.parts = PARTS_MOST;
        for (uint32_t i = 0; i < PARTS_MOST; i++) {
            km_spec spec = first;
            spec.n = s.part_n[i] = ns[i];
            s.n += ns[i];
            job.bias = i == 1;
            km_weight_make(&w[i], handle, &spec, &rng);
            km_data_make(&d[i], &w[i], &job, &rng);
            if (i)
                memcpy(d[i].x, d[0].x, job.m * first.k * 2);
        }
        qc_matmul_plan p = plan_for(v % 3 ? 16 : 3, &s);
        run_planned(&p, w, d, PARTS_MOST);
        for (uint32_t i = 0; i < PARTS_MOST; i++)
            km_check(&w[i], &d[i], km_rounding_of_wgmma(&w[i]));
        if (p.worker_k) { /* borders of blocks depend on all weights; then each in its own parts */
            p.worker_k = 0;
            p.splits = 1;
            run_planned(&p, w, d, PARTS_MOST);
        }
        for (uint32_t i = 0; i < PARTS_MOST; i++) {
            alone = d[i];
            alone.y = km_host(job.m * ns[i] * 2);
            run_planned(&p, &w[i], &alone, 1);
            QT_CHECK(memcmp(alone.y, d[i].y, job.m * ns[i] * 2) == 0,
                     "weight %u of a group has other bits than alone", i);
            free(alone.y);
        }
        uint16_t *y[PARTS_MOST];
        const int packed = slow || v < 4;
        for (uint32_t i = 0; i < PARTS_MOST && packed; i++) {
            y[i] = copy_of_y(&d[i]);
            km_pack(handle, &w[i], v % 2);
            km_forget_file(&w[i]);
        }
        if (packed)
            run_planned(&p, w, d, PARTS_MOST);
        for (uint32_t i = 0; i < PARTS_MOST; i++) {
            if (packed) {
                expect_bits(&d[i], y[i], "a packed weight of a group");
                free(y[i]);
            }
            km_data_free(&d[i]);
            km_weight_free(&w[i]);
        }
    }
}

/* ---- packed weights alone -------------------------------------------------------------------- */

/* Parts of K that begin within the four blocks of a row whose codes lie side by side. */
static void test_packed_scales_of_workers(void **state)
{
    static const uint64_t steps[] = {1, 3, 7, 13}; /* of 128, of which K has 6 */
    (void)state;
    for (unsigned i = 0; i < COUNT(steps); i += qt_every(2)) {
        const km_spec spec = {.kind = i == 1 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                              .n = 330 + i,
                              .k = 6 * 128,
                              .block = 64,
                              .nested = 1};
        const km_job job = {
            .m = i % 2 ? 40 : 12, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16, .bias = 1};
        qc_matmul_shape s = shape(&spec, job.m);
        qc_matmul_plan p = plan_for(1, &s);
        p.worker_k = p.split_k = steps[i] * 128;
        p.splits = (uint32_t)((6 + steps[i] - 2) / steps[i] + 1);
        check_planned(&p, &spec, job, 1);
    }
}

/* What a plan promises: no tile has more parts than there is room for, and blocks that go on from
 * tile to tile are one wave. */
static void test_plans(void **state)
{
    static const uint64_t shapes[][2] = {{28672, 8192}, {8192, 28672}, {1024, 8192},
                                         {57344, 8192}, {10240, 8192}, {2880, 2880},
                                         {1, 64},       {300, 192},    {128256, 4096}};
    unsigned shared = 0;
    (void)state;
    for (size_t j = 0; j < COUNT(shapes); j++)
        for (uint64_t m = 1; m <= 600; m += m < 70 ? 1 : 37) {
            km_spec spec = {.kind = m % 5 == 4 ? QC_FORM_INT8_ROWS : QC_FORM_NF4,
                            .n = shapes[j][0],
                            .k = shapes[j][1],
                            .block = 64};
            qc_matmul_shape s = shape(&spec, m);
            qc_matmul_plan p = plan_for(132, &s);
            assert_true(p.shared_bytes <= 227u << 10 && p.threads <= 1024);
            assert_true(p.splits >= 1 && p.split_k % 128 == 0 && p.worker_k % 128 == 0);
            assert_true(p.split_k * p.splits >= s.k && p.split_k * (p.splits - 1) < s.k);
            if (!p.worker_k)
                continue;
            uint64_t tiles = qc_matmul_tiles(&s, p.n_tile) * ((m + p.m_tile - 1) / p.m_tile);
            uint64_t steps = (s.k + 127) / 128, each = p.worker_k / 128;
            assert_true((tiles * steps + each - 1) / each <= 132);
            for (uint64_t t = 0; t < tiles; t++)
                assert_true(((t + 1) * steps - 1) / each - t * steps / each < p.splits);
            shared++;
        }
    assert_true(shared > 0);
}

#ifdef QC_CUDA_SHIM
/* A block whose shared memory begins where the rings have no room: the handle says so, no element
 * of y is written, and the device goes on. */
static void test_no_room_for_the_table(void **state)
{
    (void)state;
    for (unsigned t = 0; t < 2; t++) {
        const km_spec spec = km_next_spec(t * 2, 260, 448);
        const km_job job = {.m = 12,
                            .x_dtype = QC_DTYPE_F16,
                            .y_dtype = QC_DTYPE_F16,
                            .path = QC_MATMUL_WGMMA,
                            /* no room for partial sums */
                            .limit_bytes = QC_MATMUL_HEADER_BYTES + 16 * 448 * 2 + 256};
        km_weight w;
        km_data d;
        qc_error err = {0};
        km_weight_make(&w, handle, &spec, &rng);
        km_data_make(&d, &w, &job, &rng);
        qc_shim_set_shared_begin(2048);
        km_run(handle, &w, &d);
        km_expect(qc_matmul_check(handle, &err), QC_ERR_INTERNAL, &err, "(fault 2 of its kernel)");
        for (uint64_t e = 0; e < job.m * d.n; e++)
            assert_int_equal(d.y[e], KM_GAP);
        qc_shim_set_shared_begin(1024);
        km_run(handle, &w, &d);
        KM_OK(qc_matmul_check(handle, &km_error));
        km_check(&w, &d, km_rounding_of_wgmma(&w));
        km_data_free(&d);
        km_weight_free(&w);
    }
}
#endif

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    if (km_no_device())
        return 77;
    if (!km_wgmma_was_built()) {
        print_message("skipped: the kernels were built without matmul_wgmma.cu\n");
        return 77;
    }
    km_without_cublas();
    rng.state = 18;
    KM_OK(qc_matmul_create(&handle, 0, &km_error));
    if (qc_matmul_device(handle)->sm != 90) {
        print_message("skipped: this device is sm_%u\n", qc_matmul_device(handle)->sm);
        qc_matmul_destroy(handle);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_worker),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_packed_scales_of_workers),
        cmocka_unit_test(test_plans),
#ifdef QC_CUDA_SHIM
        cmocka_unit_test(test_no_room_for_the_table),
#endif
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    qc_matmul_destroy(handle);
    return failed;
}
