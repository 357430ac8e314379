/* How the work of a product is shared out: plans of our own, and plans for other devices, run on
 * the one that there is, against double sums. K in equal parts; blocks of threads that go on from
 * tile to tile; several weights in one grid, which have the bits that they have alone with the same
 * plan; parts of weights; every amount of shared memory. And what plans promise.
 *
 *   kernel_sharing [--slow] [KERNEL]    --slow: more of everything; KERNEL: mma-884, tiles or wgmma
 *                                       alone */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_kernels.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define PARTS_MOST   3
#define STEP         128u /* columns that a block of threads takes at once */

typedef struct {
    const char *name;
    qc_matmul_path path;
    uint32_t variant;
    unsigned sm_least;
    int workers; /* blocks may go on from tile to tile */
    km_rounding (*rounding)(const km_weight *w);
} kernel;

static const kernel kernels[] = {
    {"mma-884", QC_MATMUL_MMA_884, QC_MATMUL_ANY, 70, 0, km_rounding_of_weights},
    {"tiles", QC_MATMUL_MMA_16816, QC_MATMUL_TILES, 80, 1, km_rounding_of_codes},
    {"wgmma", QC_MATMUL_WGMMA, QC_MATMUL_ANY, 90, 1, km_rounding_of_wgmma},
};

static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};

static qc_matmul *handle;
static const kernel *of; /* the kernel at work */
static qt_rng rng;
static int slow;

static int is_tiles(void)
{
    return of->variant == QC_MATMUL_TILES;
}

/* The device that there is, with other numbers; shared_kib 0: as much as there is. */
static qc_cuda_device device(unsigned sm, unsigned multiprocessors, uint32_t shared_kib)
{
    qc_cuda_device d = *qc_matmul_device(handle);
    d.sm = d.code = sm ? sm : d.sm;
    d.multiprocessors = multiprocessors;
    if (shared_kib) {
        d.shared_block_bytes = shared_kib << 10;
        d.shared_multiprocessor_bytes = d.shared_block_bytes + 1024;
    }
    return d;
}

static qc_matmul_shape shape(const km_spec *spec, uint64_t m)
{
    return (qc_matmul_shape){.kind = spec->kind,
                             .m = m,
                             .n = spec->n,
                             .k = spec->k,
                             .block_elems = spec->kind == QC_FORM_INT8_ROWS ? 0 : spec->block,
                             .x_dtype = QC_DTYPE_F16,
                             .y_dtype = QC_DTYPE_F16,
                             .ldx = spec->k,
                             .x_alignment = 16,
                             .has_epilogue = 1};
}

static qc_matmul_plan plan_for(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    qc_matmul_plan p;
    KM_OK(qc_matmul_plan_make(d, s, of->path, 0, &p, &km_error));
    assert_true(of->variant == QC_MATMUL_ANY || p.variant == of->variant);
    return p;
}

/* y of `count` weights that share the dense x of d[0], in one launch with this plan, to d[i].y. */
static void run(const qc_matmul_plan *p, const km_weight *w, km_data *d, uint32_t count)
{
    const qc_matmul_weights *ready[PARTS_MOST];
    qc_matmul_io io[PARTS_MOST];
    qc_matmul_planned planned;
    void *x = NULL, *y[PARTS_MOST] = {NULL}, *bias[PARTS_MOST] = {NULL}, *workspace = NULL;
    const uint64_t m = d->job.m;
    uint64_t partials = 0;
    qc_cuda_stream s = NULL;
    (void)km_upload(d->x, m * d->k * 2, 0, &x);
    for (uint32_t i = 0; i < count; i++) {
        for (uint64_t j = 0; j < m * d[i].job.ldy; j++)
            d[i].y[j] = KM_GAP;
        (void)km_upload(d[i].y, m * d[i].job.ldy * 2, 0, &y[i]);
        (void)km_upload(d[i].bias, d[i].n * 2, 0, &bias[i]);
        partials += m * d[i].n * 4 * p->splits;
        ready[i] = &w[i].ready;
        io[i] = (qc_matmul_io){.m = m,
                               .x = x,
                               .x_dtype = d->job.x_dtype,
                               .y = y[i],
                               .y_dtype = d->job.y_dtype,
                               .ldy = d[i].job.ldy,
                               .bias = d[i].job.bias ? bias[i] : NULL};
    }
    KM_OK(qc_matmul_plan_product(handle, ready, io, count, of->path, 0, &planned, &km_error));
    assert_int_equal(planned.sets, 1);
    planned.set[0].plan = *p;
    planned.workspace_bytes = p->partial_offset + partials;
    KM_OK(qc_cuda_malloc(&workspace, planned.workspace_bytes, &km_error));
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    KM_OK(qc_cuda_fill(workspace, 0xff, planned.workspace_bytes, s, &km_error));
    KM_OK(qc_matmul_run_planned(handle, &planned, ready, io, workspace, planned.workspace_bytes, s,
                                &km_error));
    for (uint32_t i = 0; i < count; i++) {
        km_download(d[i].y, y[i], m * d[i].job.ldy * 2, s);
        for (uint64_t j = 0; j < m * d[i].job.ldy; j++)
            if (j % d[i].job.ldy >= d[i].n)
                QT_CHECK(d[i].y[j] == KM_GAP, "weight %u: y was written to behind a row", i);
        qc_cuda_free(y[i]);
        qc_cuda_free(bias[i]);
    }
    qc_cuda_free(x);
    qc_cuda_free(workspace);
    qc_cuda_stream_destroy(s);
}

/* The weights whose y is in d[i].y, or others of the same values, once more. */
static void expect_bits(const qc_matmul_plan *p, const km_weight *w, const km_data *d,
                        uint32_t count, const char *what)
{
    km_data again[PARTS_MOST];
    for (uint32_t i = 0; i < count; i++) {
        again[i] = d[i];
        again[i].y = km_host(d->job.m * d[i].job.ldy * 2);
    }
    run(p, w, again, count);
    for (uint32_t i = 0; i < count; i++) {
        QT_CHECK(memcmp(again[i].y, d[i].y, d->job.m * d[i].job.ldy * 2) == 0,
                 "weight %u %s has other bits: %" PRIu64 " rows of x, %" PRIu64 " x %" PRIu64
                 ", %u splits, %u rows a tile",
                 i, what, d->job.m, d[i].n, d[i].k, p->splits, p->m_tile);
        free(again[i].y);
    }
}

/* A weight, or a part of it, against the truth. */
static void check(const qc_matmul_plan *p, const km_spec *spec, const qc_weights_part *part,
                  km_job job)
{
    km_weight w;
    km_data d;
    km_weight_make(&w, handle, spec, &rng);
    if (part)
        KM_OK(qc_matmul_slice(&w.ready, part, &w.ready, &km_error));
    km_data_make(&d, &w, &job, &rng);
    run(p, &w, &d, 1);
    km_check(&w, &d, of->rounding(&w));
    km_data_free(&d);
    km_weight_free(&w);
}

/* Blocks that go on from tile to tile: a tile's parts are as many as its blocks, fewer than there
 * is room for in some; and blocks with several tiles. Then K in equal parts. K has 9 steps, the
 * last one half; 10; or 6, where parts begin within the four blocks of a row whose codes of scales
 * lie side by side. */
TEST(test_every_worker)
{
    static const uint64_t steps[] = {1, 2, 4, 5, 7, 8, 9, 10, 13, 18, 40}, ms[] = {9, 20, 35, 70};
    static const uint64_t ks[] = {9 * STEP - 64, 10 * STEP, 6 * STEP};
    for (size_t i = 0; of->workers && i < COUNT(steps); i += qt_every(5))
        for (int equal = 0; equal < 2; equal++) {
            const int large = is_tiles() && i % 4 == 3; /* tiles of 128 rows of x */
            const qc_cuda_device d = device(large ? 80 : 0, 1, is_tiles() && i % 2 ? 163 : 0);
            km_spec spec = km_next_spec((unsigned)i % 4, 400 + i, ks[i % 3]);
            if (i % 3 == 2)
                spec = (km_spec){.kind = i % 2 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                                 .n = 330 + i,
                                 .k = ks[2],
                                 .block = 64,
                                 .nested = 1};
            const uint64_t in_k = (spec.k + STEP - 1) / STEP;
            const km_job job = {.m = ms[large ? 3 : i % COUNT(ms)],
                                .x_dtype = is_tiles() || i % 3 ? QC_DTYPE_F16 : QC_DTYPE_BF16,
                                .y_dtype = QC_DTYPE_F16,
                                .bias = i % 2};
            qc_matmul_shape s = shape(&spec, job.m);
            s.x_dtype = job.x_dtype;
            qc_matmul_plan p = plan_for(&d, &s);
            p.worker_k = p.split_k = steps[i] * STEP;
            p.splits = (uint32_t)((in_k + steps[i] - 2) / steps[i] + 1 + i % 2);
            if (equal) {
                p.worker_k = 0;
                p.splits = (uint32_t)((in_k + steps[i] - 1) / steps[i]);
            }
            if (d.shared_block_bytes <= qc_matmul_device(handle)->shared_block_bytes &&
                (!equal || (steps[i] <= in_k && (slow || i % 2))))
                check(&p, &spec, NULL, job);
        }
}

/* Several weights in one grid, one of them less than a tile, together and alone. */
static void check_group(const qc_cuda_device *d, const km_spec *like, km_job job, uint32_t splits)
{
    static const uint64_t ns[PARTS_MOST] = {300, 17, 193};
    km_weight w[PARTS_MOST];
    km_data data[PARTS_MOST];
    qc_matmul_shape s = shape(like, job.m);
    s.x_dtype = job.x_dtype;
    s.parts = PARTS_MOST;
    s.n = 0;
    for (uint32_t i = 0; i < PARTS_MOST; i++) {
        km_spec spec = *like;
        spec.n = s.part_n[i] = ns[i];
        s.n += ns[i];
        job.bias = i != 1;
        job.ldy = ns[i] + i;
        km_weight_make(&w[i], handle, &spec, &rng);
        km_data_make(&data[i], &w[i], &job, &rng);
        if (i)
            memcpy(data[i].x, data[0].x, job.m * spec.k * 2);
    }
    qc_matmul_plan p = plan_for(d, &s);
    if (splits) {
        p.split_k = ((like->k + STEP - 1) / STEP + splits - 1) / splits * STEP;
        p.splits = (uint32_t)((like->k + p.split_k - 1) / p.split_k);
    }
    run(&p, w, data, PARTS_MOST);
    for (uint32_t i = 0; i < PARTS_MOST; i++)
        km_check(&w[i], &data[i], of->rounding(&w[i]));
    if (p.worker_k) { /* borders of blocks depend on all weights; then each in its own parts */
        p.worker_k = 0;
        p.splits = 1;
        run(&p, w, data, PARTS_MOST);
    }
    for (uint32_t i = 0; i < PARTS_MOST; i++)
        expect_bits(&p, &w[i], &data[i], 1, "alone");
    for (uint32_t i = 0; i < PARTS_MOST; i++) {
        km_data_free(&data[i]);
        km_weight_free(&w[i]);
    }
}

TEST(test_groups)
{
    static const uint64_t ms[] = {10, 31, 70, 200}, ks[] = {512, 640, 1184};
    for (unsigned v = 0; v < 12; v += qt_every(5)) {
        const qc_cuda_device d = device(is_tiles() && v / 3 == 3 ? 80 : 0, v % 2 ? 16 : 3, 0);
        const km_spec like = {.kind = kinds[v % 3],
                              .k = of->workers ? ks[v % 2] : ks[v / 3 % 3],
                              .block = of->workers || v % 2 ? 64 : 32,
                              .nested = v % 3 != 1};
        const km_job job = {.m = of->workers ? ms[v / 3]
                                 : v / 3     ? ms[v / 3 - 1]
                                             : 1,
                            .x_dtype = QC_DTYPE_F16,
                            .y_dtype = v % 2 ? QC_DTYPE_BF16 : QC_DTYPE_F16};
        check_group(&d, &like, job, !of->workers && v / 3 == 2 ? 3 : 0);
    }
}

/* Rows and columns that begin and end within the weight. */
TEST(test_slices)
{
    static const qc_weights_part parts[] = {
        {64, 236, 256, 512}, {128, 64, 0, 1024}, {0, 300, 768, 256}, {192, 108, 512, 512}};
    const qc_cuda_device d = device(0, 4, 0);
    for (size_t i = 0; of->workers && i < COUNT(parts); i += qt_every(3)) {
        const km_spec spec = {.kind = i == 2 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                              .n = 300,
                              .k = 1024,
                              .block = 64,
                              .nested = 1};
        const km_job job = {
            .m = 9 + 12 * i, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16, .bias = i % 2};
        qc_matmul_shape s = shape(&spec, job.m);
        s.ldw = spec.k;
        s.n = parts[i].rows;
        s.k = s.ldx = parts[i].cols;
        s.first_most = parts[i].row * spec.k + parts[i].col;
        const qc_matmul_plan p = plan_for(&d, &s);
        check(&p, &spec, &parts[i], job);
    }
}

/* What a plan promises, for all that it decides: no tile has more parts than there is room for, and
 * blocks that go on from tile to tile are one wave. The shapes that tiles are for fill the device.
 */
TEST(test_plans)
{
    static const uint64_t shapes[][2] = {{28672, 8192}, {8192, 28672}, {8192, 8192}, {1024, 8192},
                                         {57344, 8192}, {10240, 8192}, {2880, 2880}, {1, 64},
                                         {300, 192},    {128256, 4096}};
    const qc_cuda_device devices[] = {device(0, 132, 0), device(80, 108, 163), device(86, 82, 99),
                                      device(89, 128, 99)};
    unsigned shared = 0;
    for (size_t i = 0; of->workers && i < (is_tiles() ? COUNT(devices) : 1); i++)
        for (size_t j = 0; j < COUNT(shapes); j++)
            for (uint64_t m = is_tiles() ? 9 : 1; m <= 600; m += m < 70 ? 1 : 37) {
                const qc_cuda_device *d = &devices[i];
                const km_spec spec = {.kind = m % 5 == 4 ? QC_FORM_INT8_ROWS : QC_FORM_NF4,
                                      .n = shapes[j][0],
                                      .k = shapes[j][1],
                                      .block = 64};
                const qc_matmul_shape s = shape(&spec, m);
                const qc_matmul_plan p = plan_for(d, &s);
                assert_true(p.shared_bytes <= d->shared_block_bytes && p.threads <= 1024);
                assert_true(p.splits >= 1 && p.split_k % STEP == 0 && p.worker_k % STEP == 0);
                assert_true(p.split_k * p.splits >= s.k && p.split_k * (p.splits - 1) < s.k);
                uint64_t tiles = qc_matmul_tiles(&s, p.n_tile) * ((m + p.m_tile - 1) / p.m_tile);
                uint64_t steps = (s.k + STEP - 1) / STEP, each = p.split_k / STEP;
                uint64_t blocks = tiles * p.splits;
                if (p.worker_k) {
                    each = p.worker_k / STEP;
                    blocks = (tiles * steps + each - 1) / each;
                    assert_true(blocks <= d->multiprocessors);
                    for (uint64_t t = 0; t < tiles; t++)
                        assert_true(((t + 1) * steps - 1) / each - t * steps / each < p.splits);
                    shared++;
                }
                if (!is_tiles() || j >= 3 || m > 64)
                    continue;
                uint64_t waves = (blocks + d->multiprocessors - 1) / d->multiprocessors;
                double share = (double)(tiles * steps) /
                               ((double)waves * (double)d->multiprocessors * (double)each);
                QT_CHECK(share >= 0.75, "%zu, %zu, m %" PRIu64 ": %.0f %% of the device", i, j, m,
                         100.0 * share);
            }
    assert_true(shared > 0 || !of->workers);
}

#ifdef QC_CUDA_SHIM
/* A block whose shared memory begins where the kernel has no room: the handle says so, no element
 * of y is written, and the device goes on. */
TEST(test_no_room)
{
    for (unsigned t = 0; of->workers && t < 2; t++) {
        const km_spec spec = km_next_spec(t * 2, 260, 448);
        const km_job job = {.m = 12, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
        const qc_cuda_device d = device(0, 4, 0);
        const qc_matmul_shape s = shape(&spec, job.m);
        qc_matmul_plan p = plan_for(&d, &s);
        km_weight w;
        km_data data;
        qc_error err = {0};
        if (is_tiles() && t) /* only NF4 has a table that needs the place */
            return;
        p.splits = 1;
        p.split_k = s.k;
        p.worker_k = 0;
        km_weight_make(&w, handle, &spec, &rng);
        km_data_make(&data, &w, &job, &rng);
        qc_shim_set_shared_begin(2048);
        run(&p, &w, &data, 1);
        km_expect(qc_matmul_check(handle, &err), QC_ERR_INTERNAL, &err, "(fault 1 of its kernel)");
        for (uint64_t e = 0; e < job.m * data.n; e++)
            assert_int_equal(data.y[e], KM_GAP);
        qc_shim_set_shared_begin(1024);
        run(&p, &w, &data, 1);
        KM_OK(qc_matmul_check(handle, &km_error));
        km_check(&w, &data, of->rounding(&w));
        km_data_free(&data);
        km_weight_free(&w);
    }
}
#endif

/* ---- tiles alone ----------------------------------------------------------------------------- */

/* Of each kind of weight what differs in how scales are read: eight codes of a row at once; four,
 * where they are packed; one; or floats. */
#define SPECS 4
static const km_spec specs[][SPECS] = {
    {{.kind = QC_FORM_NF4, .n = 130, .k = 512, .block = 64, .nested = 1, .custom_map = 1},
     {.kind = QC_FORM_NF4, .n = 200, .k = 768, .block = 64, .nested = 1},
     {.kind = QC_FORM_NF4, .n = 260, .k = 448, .block = 64, .nested = 1},
     {.kind = QC_FORM_NF4, .n = 260, .k = 320, .block = 128}},
    {{.kind = QC_FORM_INT8_ROWS, .n = 260, .k = 448},
     {.kind = QC_FORM_INT8_ROWS, .n = 260, .k = 64},
     {.kind = QC_FORM_INT8_ROWS, .n = 256, .k = 256},
     {.kind = QC_FORM_INT8_ROWS, .n = 1, .k = 512}},
    {{.kind = QC_FORM_INT8_BLOCKS, .n = 260, .k = 256, .block = 64, .nested = 1},
     {.kind = QC_FORM_INT8_BLOCKS, .n = 200, .k = 448, .block = 64},
     {.kind = QC_FORM_INT8_BLOCKS, .n = 70, .k = 512, .block = 128, .nested = 1},
     {.kind = QC_FORM_INT8_BLOCKS, .n = 130, .k = 768, .block = 64, .nested = 1}},
};

/* Tables and rings for every amount of shared memory. */
TEST(test_every_memory)
{
    static const struct {
        uint32_t kib;
        unsigned sm;
    } devices[] = {{227, 90}, {227, 100}, {163, 80}, {99, 86}};
    static const uint64_t ms[] = {12, 30, 50, 115};
    uint32_t most = qc_matmul_device(handle)->shared_block_bytes;
    for (size_t i = 0; is_tiles() && i < COUNT(devices); i++)
        for (unsigned v = 0; v < 12; v += qt_every(4)) {
            const uint32_t kib = devices[i].kib;
            if (kib << 10 > most)
                continue;
            const qc_cuda_device d = device(devices[i].sm, 4, kib);
            const km_spec spec = specs[v % 3][(i + v / 3) % SPECS];
            const km_job job = {
                .m = ms[v / 3], .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16, .bias = v % 2};
            const qc_matmul_shape s = shape(&spec, job.m);
            const qc_matmul_plan p = plan_for(&d, &s);
            assert_true(p.shared_bytes <= d.shared_block_bytes);
            int large = spec.kind != QC_FORM_INT8_ROWS && d.sm != 90;
            uint64_t rows = large && job.m > 64 ? 128 : 64; /* the most a tile has */
            rows = kib == 99 ? 32 : rows;
            assert_int_equal(p.m_tile, v / 3 == 0 ? 16 : v / 3 == 1 ? 32 : rows);
            check(&p, &spec, NULL, job);
        }
}

static int takes(const qc_cuda_device *d, const qc_matmul_shape *s, int aligned)
{
    const qc_matmul_plan p = {.path = QC_MATMUL_MMA_16816, .aligned = aligned, .k_padded = s->k};
    return qc_tiles_takes(d, s, &p);
}

TEST(test_takes)
{
    const qc_cuda_device h200 = device(90, 132, 227), rtx = device(86, 82, 99);
    const qc_cuda_device t4 = device(75, 40, 64);
    const km_spec spec = {.kind = QC_FORM_NF4, .n = 8192, .k = 8192, .block = 64};
    qc_matmul_shape s = shape(&spec, 33);
    assert_true(takes(&h200, &s, 1) && takes(&rtx, &s, 1));
    assert_false(takes(&t4, &s, 1));
    assert_false(takes(&h200, &s, 0));
    s.block_elems = 32;
    assert_false(takes(&h200, &s, 1));
    s.kind = QC_FORM_INT8_ROWS;
    s.block_elems = 0;
    assert_true(takes(&h200, &s, 1) && takes(&rtx, &s, 1));
    s.k = 8224;
    assert_false(takes(&h200, &s, 1));
    s.k = 1u << 30;
    assert_false(takes(&h200, &s, 1));
}

/* How many rows of x a tile has: two tiles of 64 are one of 128 where both have rows, weights are
 * scaled in the loop, and wgmma does not take so many rows anyway. */
TEST(test_tiles_of_x)
{
    static const struct {
        uint64_t m;
        uint32_t scaled, other;
    } rows[] = {{16, 16, 16},   {17, 32, 32},  {33, 64, 64},   {64, 64, 64},   {65, 128, 64},
                {128, 128, 64}, {129, 64, 64}, {192, 64, 64},  {193, 128, 64}, {256, 128, 64},
                {257, 64, 64},  {320, 64, 64}, {321, 128, 64}, {4096, 128, 64}};
    static const unsigned sms[] = {80, 87, 100, 103, 110, 90};
    for (size_t i = 0; is_tiles() && i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(sms); j++) {
            const qc_cuda_device d = device(sms[j], 108, 163);
            for (unsigned kind = 0; kind < 3; kind++) {
                const km_spec spec = {.kind = kinds[kind], .n = 8192, .k = 8192, .block = 64};
                const qc_matmul_shape s = shape(&spec, rows[i].m);
                const int large = d.sm != 90 && spec.kind != QC_FORM_INT8_ROWS;
                assert_int_equal(plan_for(&d, &s).m_tile, large ? rows[i].scaled : rows[i].other);
            }
        }
}

/* ---- mma-884 alone --------------------------------------------------------------------------- */

static const qc_cuda_device v100 = {
    .sm = 70, .multiprocessors = 80, .shared_multiprocessor_bytes = 96 << 10};

#ifdef QC_CUDA_SHIM
/* Tiles of 64 rows of NF4, which no other device has: from one step of k to many, with a last one
 * that is not whole, and tiles of x that are not. */
TEST(test_64_rows)
{
    static const uint64_t ms[] = {33, 64, 107}, ks[] = {32, 128, 416, 1184};
    for (unsigned i = 0; !of->workers && i < 3; i++)
        for (unsigned j = 0; j < 4; j++) {
            const km_spec like = {
                .kind = QC_FORM_NF4, .k = ks[j], .block = j % 2 ? 32 : 64, .nested = i != 1};
            check_group(&v100, &like,
                        (km_job){.m = ms[i], .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16},
                        j == 3 ? 3 : 0);
        }
}
#endif

/* Tiles of x: on sm_70 two of 32 rows are one of 64 where both have rows. */
TEST(test_tiles_of_884)
{
    static const struct {
        uint64_t m;
        uint32_t with, without;
    } rows[] = {{8, 8, 8},    {16, 16, 16}, {32, 32, 32}, {33, 64, 32},  {64, 64, 32},
                {65, 32, 32}, {96, 32, 32}, {97, 64, 32}, {128, 64, 32}, {4096, 64, 32}};
    for (size_t i = 0; i < COUNT(rows); i++)
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

/* Of a V100 the busiest multiprocessor has little more than its share. */
TEST(test_shares_of_884)
{
    static const uint64_t shapes[][2] = {{28672, 8192}, {8192, 28672}, {8192, 8192}, {1024, 8192}};
    for (size_t i = 0; !of->workers && i < COUNT(shapes); i++)
        for (uint64_t m = 1; m <= 64; m *= 2) {
            const km_spec spec = {
                .kind = QC_FORM_NF4, .n = shapes[i][0], .k = shapes[i][1], .block = 64};
            const qc_matmul_shape s = shape(&spec, m);
            const qc_matmul_plan p = plan_for(&v100, &s);
            uint64_t tiles = qc_matmul_tiles(&s, p.n_tile) * ((m + p.m_tile - 1) / p.m_tile);
            uint64_t waves = (tiles * p.splits + 79) / 80;
            double work = (double)(s.k * tiles) / 80.0; /* k that a multiprocessor must do */
            QT_CHECK((double)(waves * p.split_k) <= 1.3 * work,
                     "%u x %" PRIu64 " of k: the busiest multiprocessor has %.2f times its share",
                     p.splits, p.split_k, (double)(waves * p.split_k) / work);
        }
}

int main(int argc, char **argv)
{
    int failed = 0;
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    const char *only = argc > 1 + slow ? argv[1 + slow] : NULL;
    if (km_no_device())
        return 77;
    km_without_cublas();
    handle = km_handle();
    for (size_t i = 0; i < COUNT(kernels); i++) {
        of = &kernels[i];
        rng.state = 18;
        if ((!only || strcmp(only, of->name) == 0) &&
            km_is_here(handle, of->name, of->path, of->sm_least))
            failed += test_run_all(of->name);
    }
    qc_matmul_destroy(handle);
    return failed;
}
