/* The tensor-core kernel for aligned codes (matmul_tiles.cu), beside what kernel_products.c has for
 * all kernels: launched directly with plans of our own, for every amount of shared memory, for
 * groups and for every way of sharing out the work. Packed weights have the bits of the file's
 * layout everywhere. */
#include "tests/fixtures/kernel_matmul.h"

#include "kernels/matmul_kernels.h"
#include "kernels/matmul_packed.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static qc_matmul *handle;
static qt_rng rng;

/* ---- launched directly ----------------------------------------------------------------------- */

static qc_cuda_device device(unsigned sm, unsigned multiprocessors, uint32_t shared_kib)
{
    qc_cuda_device d;
    memset(&d, 0, sizeof d);
    d.sm = sm;
    d.multiprocessors = multiprocessors;
    d.shared_block_bytes = shared_kib << 10;
    d.shared_multiprocessor_bytes = d.shared_block_bytes + 1024;
    return d;
}

static qc_matmul_shape shape(const km_spec *spec, uint64_t m)
{
    qc_matmul_shape s;
    memset(&s, 0, sizeof s);
    s.kind = spec->kind;
    s.m = m;
    s.n = spec->n;
    s.k = spec->k;
    s.block_elems = spec->kind == QC_FORM_INT8_ROWS ? 0 : spec->block;
    s.x_dtype = s.y_dtype = QC_DTYPE_F16;
    s.ldx = s.k;
    s.x_alignment = 16;
    return s;
}

static int plan_of(qc_matmul_plan *p, const qc_cuda_device *d, const qc_matmul_shape *s)
{
    memset(p, 0, sizeof *p);
    p->path = QC_MATMUL_MMA_16816;
    p->aligned = 1;
    p->k_padded = s->k;
    if (!qc_tiles_takes(d, s, p))
        return 0;
    qc_tiles_configure(d, s, p);
    return 1;
}

#define PARTS_MOST 3

static uint32_t *fault; /* of calls launched directly */

/* y of `count` weights that share x in one launch, to d[i].y. x of d[0] for all. Packed ones run in
 * a graph. */
static void run_directly(const qc_matmul_plan *p, const km_weight *w, km_data *d, uint32_t count)
{
    qc_matmul_call c[PARTS_MOST];
    qc_cuda_graph graph = NULL;
    void *x = NULL, *y[PARTS_MOST] = {NULL}, *partials[PARTS_MOST] = {NULL};
    uint64_t m = d->job.m;
    qc_cuda_stream s = NULL;
    KM_OK(qc_cuda_stream_create(&s, &km_error));
    (void)km_upload(d->x, m * d->k * 2, 0, &x);
    for (uint32_t i = 0; i < count; i++) {
        KM_OK(qc_cuda_malloc(&y[i], m * d[i].n * 2, &km_error));
        KM_OK(qc_cuda_malloc(&partials[i], m * d[i].n * 4 * p->splits, &km_error));
        KM_OK(qc_cuda_fill(y[i], 0xff, m * d[i].n * 2, s, &km_error));
        KM_OK(qc_cuda_fill(partials[i], 0xff, m * d[i].n * 4 * p->splits, s, &km_error));
        c[i] = (qc_matmul_call){.plan = *p,
                                .weights = w[i].ready,
                                .m = m,
                                .n = d[i].n,
                                .k = d->k,
                                .x = x,
                                .x_dtype = QC_DTYPE_F16,
                                .ldx = d->k,
                                .out = {.y = y[i], .dtype = d->job.y_dtype, .ldy = d[i].n},
                                .partials = partials[i],
                                .fault = fault};
    }
    if (w->ready.packed)
        KM_OK(qc_cuda_capture_begin(s, &km_error));
    KM_OK(qc_tiles_launch(c, count, s, &km_error));
    for (uint32_t i = 0; i < count && p->splits > 1; i++)
        KM_OK(qc_matmul_reduce_launch(&c[i], s, &km_error));
    if (w->ready.packed) {
        KM_OK(qc_cuda_capture_end(&graph, s, &km_error));
        KM_OK(qc_cuda_graph_launch(graph, s, &km_error));
    }
    for (uint32_t i = 0; i < count; i++) {
        km_download(d[i].y, y[i], m * d[i].n * 2, s);
        qc_cuda_free(y[i]);
        qc_cuda_free(partials[i]);
    }
    qc_cuda_graph_destroy(graph);
    qc_cuda_free(x);
    qc_cuda_stream_destroy(s);
}

/* The weights whose y is in d[i].y, or others of the same values, once more. */
static void expect_bits(const qc_matmul_plan *p, const km_weight *w, const km_data *d,
                        uint32_t count, const char *what)
{
    km_data again[PARTS_MOST];
    for (uint32_t i = 0; i < count; i++) {
        again[i] = d[i];
        again[i].y = km_host(d->job.m * d[i].n * 2);
    }
    run_directly(p, w, again, count);
    for (uint32_t i = 0; i < count; i++) {
        QT_CHECK(memcmp(again[i].y, d[i].y, d->job.m * d[i].n * 2) == 0,
                 "weight %u %s has other bits", i, what);
        free(again[i].y);
    }
}

/* Part `part` of a weight, NULL for all of it, against the truth and then packed. */
static void check_directly(const qc_matmul_plan *p, const km_spec *spec,
                           const qc_weights_part *part, uint64_t m)
{
    km_weight w, packed;
    km_data d;
    const km_job job = {.m = m, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    km_weight_make(&w, handle, spec, &rng);
    packed = w;
    km_pack(handle, &packed, 0);
    if (part) {
        KM_OK(qc_matmul_slice(&w.ready, part, &w.ready, &km_error));
        KM_OK(qc_matmul_slice(&packed.ready, part, &packed.ready, &km_error));
    }
    km_data_make(&d, &w, &job, &rng);
    run_directly(p, &w, &d, 1);
    km_check(&w, &d, km_rounding_of_codes(&w));
    expect_bits(p, &packed, &d, 1, "packed");
    km_data_free(&d);
    km_weight_free(&packed);
}

#ifdef QC_CUDA_SHIM
/* A block whose shared memory begins where the wide table has no room: the call's word says so, no
 * element of y is written, and the device goes on. */
static void test_no_room_for_the_table(void **state)
{
    (void)state;
    const qc_cuda_device d = device(90, 4, 227);
    const km_spec spec = km_next_spec(0, 260, 448);
    const km_job job = {.m = 12, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
    qc_matmul_shape s = shape(&spec, job.m);
    qc_matmul_plan p;
    km_weight w;
    km_data data;
    void *word = NULL;
    assert_true(plan_of(&p, &d, &s));
    p.splits = 1;
    p.split_k = s.k;
    p.worker_k = 0;
    km_weight_make(&w, handle, &spec, &rng);
    km_data_make(&data, &w, &job, &rng);
    KM_OK(qc_cuda_host_malloc(&word, sizeof *fault, &km_error));
    fault = word;
    for (unsigned i = 0; i < 2; i++) {
        *fault = 0;
        qc_shim_set_shared_begin(i == 0 ? 2048 : 1024);
        run_directly(&p, &w, &data, 1);
        assert_int_equal(*fault, i == 0 ? QC_MATMUL_FAULT_SHARED : 0);
        if (i == 0)
            for (uint64_t e = 0; e < job.m * data.n; e++)
                assert_int_equal(data.y[e], 0xffff);
    }
    km_check(&w, &data, km_rounding_of_codes(&w));
    fault = NULL;
    qc_cuda_host_free(word);
    km_data_free(&data);
    km_weight_free(&w);
}
#endif

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
static void test_every_memory(void **state)
{
    static const struct {
        uint32_t kib;
        unsigned sm;
    } devices[] = {{227, 90}, {227, 100}, {163, 80}, {99, 86}};
    static const uint64_t ms[] = {12, 30, 50, 115};
    (void)state;
    uint32_t most = qc_matmul_device(handle)->shared_block_bytes;
    for (size_t i = 0; i < COUNT(devices); i++)
        for (unsigned v = 0; v < 12; v += qt_every(4)) {
            const uint32_t kib = devices[i].kib;
            if (kib << 10 > most)
                continue;
            qc_cuda_device d = device(devices[i].sm, 4, kib);
            const km_spec spec = specs[v % 3][(i + v / 3) % SPECS];
            qc_matmul_shape s = shape(&spec, ms[v / 3]);
            qc_matmul_plan p;
            int taken = plan_of(&p, &d, &s);
            assert_true(taken);
            assert_true(p.shared_bytes <= d.shared_block_bytes);
            int large = spec.kind != QC_FORM_INT8_ROWS && d.sm != 90;
            uint64_t rows = large && ms[v / 3] > 64 ? 128 : 64; /* the most a tile has */
            rows = kib == 99 ? 32 : rows;
            assert_int_equal(p.m_tile, v / 3 == 0 ? 16 : v / 3 == 1 ? 32 : rows);
            check_directly(&p, &spec, NULL, s.m);
        }
}

/* Parts of a weight: rows and columns that begin and end at borders of what is packed. */
static void test_slices(void **state)
{
    static const qc_weights_part parts[] = {
        {64, 236, 256, 512}, {128, 64, 0, 1024}, {0, 300, 768, 256}, {192, 108, 512, 512}};
    qc_cuda_device d = *qc_matmul_device(handle);
    (void)state;
    d.multiprocessors = 4;
    for (size_t i = 0; i < COUNT(parts); i += qt_every(3)) {
        const km_spec spec = {.kind = i == 2 ? QC_FORM_INT8_BLOCKS : QC_FORM_NF4,
                              .n = 300,
                              .k = 1024,
                              .block = 64,
                              .nested = 1};
        qc_matmul_shape s = shape(&spec, 9 + 12 * i);
        qc_matmul_plan p;
        s.ldw = spec.k;
        s.n = parts[i].rows;
        s.k = parts[i].cols;
        s.first_most = parts[i].row * spec.k + parts[i].col;
        assert_true(plan_of(&p, &d, &s));
        check_directly(&p, &spec, &parts[i], s.m);
    }
}

/* Blocks that go on from tile to tile: a tile's parts are as many as its blocks, fewer than there
 * is room for in some; and blocks with several tiles. Steps of 128: 9, the last one half, or 10. */
static void test_every_worker(void **state)
{
    static const uint64_t steps[] = {1, 2, 4, 5, 7, 8, 9, 10, 13, 18, 40};
    (void)state;
    for (size_t i = 0; i < COUNT(steps); i += qt_every(5)) {
        int large = i % 4 == 3; /* tiles of 128 rows of x */
        qc_cuda_device d = device(large ? 80 : 90, 1, i % 2 ? 227 : 163);
        uint64_t tile_steps = 9 + i % 3 % 2;
        km_spec spec =
            km_next_spec((unsigned)i % 4, 400 + i, tile_steps == 9 ? 9 * 128 - 64 : 10 * 128);
        qc_matmul_shape s = shape(&spec, large ? 70 : i % 3 == 0 ? 9 : i % 3 == 1 ? 20 : 35);
        qc_matmul_plan p;
        if (d.shared_block_bytes > qc_matmul_device(handle)->shared_block_bytes)
            continue;
        assert_true(plan_of(&p, &d, &s));
        p.worker_k = steps[i] * 128;
        p.splits = (uint32_t)((tile_steps + steps[i] - 2) / steps[i] + 1 + i % 2);
        check_directly(&p, &spec, NULL, s.m);
    }
}

/* Several weights in one grid have the bits that they have alone with the same plan, and packed. */
static void test_groups(void **state)
{
    static const uint64_t ns[PARTS_MOST] = {300, 17, 193};
    (void)state;
    for (unsigned v = 0; v < 8; v += qt_every(5)) {
        km_weight w[PARTS_MOST], packed[PARTS_MOST];
        km_data d[PARTS_MOST];
        static const uint64_t rows[] = {10, 31, 70, 200};
        km_job job = {.m = rows[v / 2], .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_BF16};
        uint64_t n = 0;
        for (uint32_t i = 0; i < PARTS_MOST; i++) {
            km_spec spec = {.kind = v % 2 ? QC_FORM_INT8_ROWS : QC_FORM_NF4,
                            .n = ns[i],
                            .k = 512,
                            .block = 64,
                            .nested = v % 2 == 0 && i != 1,
                            .custom_map = v % 2 == 0 && i == 2};
            km_weight_make(&w[i], handle, &spec, &rng);
            packed[i] = w[i];
            km_pack(handle, &packed[i], 0);
            km_data_make(&d[i], &w[i], &job, &rng);
            if (i)
                memcpy(d[i].x, d[0].x, job.m * spec.k * 2);
            n += ns[i];
        }
        qc_matmul_shape s = shape(&w[0].spec, job.m);
        s.n = n;
        s.parts = PARTS_MOST;
        memcpy(s.part_n, ns, sizeof ns);
        qc_cuda_device dev = *qc_matmul_device(handle);
        dev.multiprocessors = v % 3 ? 16 : 3;
        dev.sm = v / 2 == 3 ? 80 : dev.sm;
        qc_matmul_plan p;
        assert_true(plan_of(&p, &dev, &s));
        run_directly(&p, w, d, PARTS_MOST);
        for (uint32_t i = 0; i < PARTS_MOST; i++)
            km_check(&w[i], &d[i], km_rounding_of_codes(&w[i]));
        expect_bits(&p, packed, d, PARTS_MOST, "packed in a group");
        if (p.worker_k) { /* borders of blocks depend on all weights; then each in its own parts */
            p.worker_k = 0;
            p.splits = 1;
            run_directly(&p, w, d, PARTS_MOST);
        }
        for (uint32_t i = 0; i < PARTS_MOST; i++)
            expect_bits(&p, &w[i], &d[i], 1, "alone");
        for (uint32_t i = 0; i < PARTS_MOST; i++) {
            km_data_free(&d[i]);
            km_weight_free(&packed[i]);
        }
    }
}

/* ---- plans ----------------------------------------------------------------------------------- */

static void test_takes(void **state)
{
    (void)state;
    qc_cuda_device h200 = device(90, 132, 227), rtx = device(86, 82, 99), t4 = device(75, 40, 64);
    km_spec spec = {.kind = QC_FORM_NF4, .n = 8192, .k = 8192, .block = 64};
    qc_matmul_shape s = shape(&spec, 33);
    qc_matmul_plan p;
    assert_true(plan_of(&p, &h200, &s));
    assert_true(plan_of(&p, &rtx, &s));
    s.packed = 1;
    assert_true(plan_of(&p, &h200, &s) && plan_of(&p, &rtx, &s));
    s.packed = 0;
    assert_false(plan_of(&p, &t4, &s));
    p.aligned = 0;
    assert_false(qc_tiles_takes(&h200, &s, &p));
    s.block_elems = 32;
    assert_false(plan_of(&p, &h200, &s));
    s.kind = QC_FORM_INT8_ROWS;
    s.block_elems = 0;
    assert_true(plan_of(&p, &h200, &s));
    assert_true(plan_of(&p, &rtx, &s));
    s.k = 8224;
    assert_false(plan_of(&p, &h200, &s));
    s.k = 1u << 30;
    assert_false(plan_of(&p, &h200, &s));
}

/* How many rows of x a tile has: two tiles of 64 are one of 128 where both have rows, weights are
 * scaled in the loop, and wgmma does not take so many rows anyway. */
static void test_tiles_of_x(void **state)
{
    static const struct {
        uint64_t m;
        uint32_t scaled, other;
    } rows[] = {{16, 16, 16},   {17, 32, 32},  {33, 64, 64},   {64, 64, 64},   {65, 128, 64},
                {128, 128, 64}, {129, 64, 64}, {192, 64, 64},  {193, 128, 64}, {256, 128, 64},
                {257, 64, 64},  {320, 64, 64}, {321, 128, 64}, {4096, 128, 64}};
    static const unsigned with[] = {80, 87, 100, 103, 110};
    (void)state;
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j <= COUNT(with); j++) {
            qc_cuda_device d = device(j < COUNT(with) ? with[j] : 90, 108, 163);
            for (unsigned kind = 0; kind < 3; kind++) {
                km_spec spec = km_next_spec(kind == 2 ? 3 : kind == 1 ? 2 : 0, 8192, 8192);
                qc_matmul_shape s = shape(&spec, rows[i].m);
                qc_matmul_plan p;
                int large = d.sm != 90 && spec.kind != QC_FORM_INT8_ROWS;
                assert_true(plan_of(&p, &d, &s));
                assert_int_equal(p.m_tile, large ? rows[i].scaled : rows[i].other);
            }
        }
}

/* What a plan promises, for all that it decides; and the shapes that it is for fill the device. */
static void test_plans(void **state)
{
    static const uint64_t shapes[][2] = {{28672, 8192}, {8192, 28672}, {8192, 8192}, {1024, 8192},
                                         {57344, 8192}, {10240, 8192}, {2880, 2880}, {1, 64},
                                         {300, 192},    {128256, 4096}};
    const qc_cuda_device devices[] = {device(90, 132, 227), device(80, 108, 163),
                                      device(86, 82, 99), device(89, 128, 99)};
    (void)state;
    for (size_t i = 0; i < COUNT(devices); i++)
        for (size_t j = 0; j < COUNT(shapes); j++)
            for (uint64_t m = 1; m <= 200; m += m < 70 ? 1 : 37) {
                const qc_cuda_device *d = &devices[i];
                km_spec spec = {.kind = m % 5 == 4 ? QC_FORM_INT8_ROWS : QC_FORM_NF4,
                                .n = shapes[j][0],
                                .k = shapes[j][1],
                                .block = 64};
                qc_matmul_shape s = shape(&spec, m);
                qc_matmul_plan p;
                assert_true(plan_of(&p, d, &s));
                assert_true(p.splits >= 1 && p.split_k % 128 == 0 && p.worker_k % 128 == 0);
                assert_true(p.split_k * p.splits >= s.k && p.split_k * (p.splits - 1) < s.k);
                uint64_t tiles = qc_matmul_tiles(&s, p.n_tile) * ((m + p.m_tile - 1) / p.m_tile);
                uint64_t steps = (s.k + 127) / 128, each = p.split_k / 128;
                uint64_t blocks = tiles * p.splits;
                if (p.worker_k) {
                    each = p.worker_k / 128;
                    blocks = (tiles * steps + each - 1) / each;
                    assert_true(blocks <= d->multiprocessors);
                    for (uint64_t t = 0; t < tiles; t++)
                        assert_true(((t + 1) * steps - 1) / each - t * steps / each < p.splits);
                }
                if (j >= 3 || m > 64)
                    continue;
                uint64_t waves = (blocks + d->multiprocessors - 1) / d->multiprocessors;
                double share = (double)(tiles * steps) /
                               ((double)waves * (double)d->multiprocessors * (double)each);
                QT_CHECK(share >= 0.75, "%zu, %zu, m %" PRIu64 ": %.0f %% of the device", i, j, m,
                         100.0 * share);
            }
}

int main(void)
{
    if (km_no_device())
        return 77;
    km_without_cublas();
    rng.state = 8;
    KM_OK(qc_matmul_create(&handle, 0, &km_error));
    if (qc_matmul_device(handle)->sm < 80) {
        print_message("skipped: this device is sm_%u\n", qc_matmul_device(handle)->sm);
        qc_matmul_destroy(handle);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_takes),
        cmocka_unit_test(test_tiles_of_x),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_every_memory),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_every_worker),
        cmocka_unit_test(test_groups),
#ifdef QC_CUDA_SHIM
        cmocka_unit_test(test_no_room_for_the_table),
#endif
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    qc_matmul_destroy(handle);
    return failed;
}
