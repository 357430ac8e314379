/* Tables of choices: lookup, what the plan makes of a choice, what there is to choose from, and
 * that a handle multiplies as its table says. */
#include "kernels/matmul_tuning.h"
#include "tests/fixtures/kernel_plans.h"

static qc_matmul_tuned row(uint64_t n, uint64_t k, uint64_t least, uint64_t most,
                           qc_matmul_path path, uint32_t variant, uint32_t blocks)
{
    return (qc_matmul_tuned){90, 132, QC_FORM_NF4, n, k, least, most, {path, variant, blocks}};
}

/* ---- lookup ---- */

TEST(test_lookup)
{
    const qc_cuda_device h = device(90, 132, 40), other = device(90, 114, 40),
                         a = device(80, 132, 40);
    const qc_matmul_tuned rows[] = {
        row(64, 128, 1, 1, QC_MATMUL_GEMV, 0, 3),
        row(64, 128, 3, 8, QC_MATMUL_GEMV, 0, 4),
        row(64, 128, 5, 20, QC_MATMUL_GEMV, 0, 5), /* overlaps: the first one counts */
        {0, 0, QC_FORM_NF4, 64, 128, 1, 30, {QC_MATMUL_GEMV, 0, 6}}};
    static const struct {
        uint64_t m;
        uint32_t blocks;
    } expected[] = {{1, 3}, {2, 6}, {3, 4}, {5, 4}, {8, 4}, {9, 5}, {20, 5}, {21, 6}, {30, 6}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        qc_matmul_shape s = shape(expected[i].m, 64, 128);
        assert_int_equal(qc_matmul_tuned_find(rows, 4, &h, &s).blocks, expected[i].blocks);
        /* Rows for another GPU have no effect; those for any have. */
        assert_int_equal(qc_matmul_tuned_find(rows, 4, &other, &s).blocks, 6);
        assert_int_equal(qc_matmul_tuned_find(rows, 4, &a, &s).blocks, 6);
        assert_int_equal(qc_matmul_tuned_find(rows, 3, &a, &s).path, QC_MATMUL_AUTO);
    }
    qc_matmul_shape s = shape(31, 64, 128);
    assert_int_equal(qc_matmul_tuned_find(rows, 4, &h, &s).path, QC_MATMUL_AUTO);
    assert_int_equal(qc_matmul_tuned_find(NULL, 0, &h, &s).path, QC_MATMUL_AUTO);
    /* n, k and kind are exact. */
    s = shape(1, 65, 128);
    assert_int_equal(qc_matmul_tuned_find(rows, 4, &h, &s).path, QC_MATMUL_AUTO);
    s = shape(1, 64, 129);
    assert_int_equal(qc_matmul_tuned_find(rows, 4, &h, &s).path, QC_MATMUL_AUTO);
    s = shape(1, 64, 128);
    s.kind = QC_FORM_INT8_ROWS;
    assert_int_equal(qc_matmul_tuned_find(rows, 4, &h, &s).path, QC_MATMUL_AUTO);
}

static void expect_refused(qc_matmul_tuned wrong, const char *words)
{
    const qc_matmul_tuned rows[] = {row(64, 128, 1, 8, QC_MATMUL_GEMV, 0, 0), wrong};
    qc_error err = {0};
    km_expect(qc_matmul_tuned_check(rows, 2, &err), QC_ERR_USAGE, &err, words);
    QT_CHECK(strstr(err.msg, "row 1"), "'%s' does not say which row", err.msg);
}

TEST(test_check)
{
    qc_error err = {0};
    expect_refused(row(64, 128, 0, 8, QC_MATMUL_GEMV, 0, 0), "found 0 to 8");
    expect_refused(row(64, 128, 9, 8, QC_MATMUL_GEMV, 0, 0), "found 9 to 8");
    expect_refused(row(64, 128, 1, 8, QC_MATMUL_AUTO, 0, 0), "path 0");
    expect_refused(row(64, 128, 1, 8, QC_MATMUL_FILL, 0, 0), "cannot be chosen");
    expect_refused(row(64, 128, 1, 8, QC_MATMUL_GEMV, 1, 0), "variant 1");
    expect_refused(row(64, 128, 1, 8, QC_MATMUL_MMA_16816, QC_MATMUL_VARIANT_COUNT, 0), "variant");
    expect_refused(row(64, 128, 1, 8, QC_MATMUL_GEMV, 0, QC_MATMUL_BLOCKS_MOST + 1), "65536");
    qc_matmul_tuned kind = row(64, 128, 1, 8, QC_MATMUL_GEMV, 0, 0);
    kind.kind = (qc_form_kind)99;
    expect_refused(kind, "kind 99");
    km_expect(qc_matmul_tuned_check(&kind, QC_MATMUL_TUNED_MOST + 1, &err), QC_ERR_USAGE, &err,
              "4097");
    assert_int_equal(qc_matmul_tuned_check(NULL, 0, &err), QC_OK);
}

/* ---- the plan ---- */

TEST(test_plan)
{
    const qc_cuda_device h = device(90, 132, 40), v = device(70, 80, 40);
    qc_matmul_shape s = shape(4, 1024, 8192);
    const qc_matmul_plan own = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(own.path, QC_MATMUL_MMA_16816);
    assert_int_equal(own.variant, QC_MATMUL_STREAM);
    assert_int_equal(own.blocks, 128);
    const qc_matmul_plan gemv = plan_of(&h, &s, QC_MATMUL_GEMV, 0);

    s.choice = (qc_matmul_choice){QC_MATMUL_MMA_16816, QC_MATMUL_GENERAL, 4};
    qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.path, QC_MATMUL_MMA_16816);
    assert_int_equal(p.variant, QC_MATMUL_GENERAL);
    assert_int_equal(p.blocks, 4);
    assert_int_equal(p.splits, 4);
    assert_int_equal(p.split_k, 2048);
    /* Workspace for them. */
    assert_true(p.workspace_bytes >= 4 * 4 * 1024 * 4);
    /* A path that is asked for is that path as it is without. */
    p = plan_of(&h, &s, QC_MATMUL_GEMV, 0);
    assert_memory_equal(&p, &gemv, sizeof p);
    /* Not on this device. */
    s.choice.path = QC_MATMUL_MMA_16816;
    p = plan_of(&v, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.path, QC_MATMUL_MMA_884);
    assert_int_equal(p.variant, 0);
    /* K is split no finer than 128, and less within a limit. */
    s.choice = (qc_matmul_choice){QC_MATMUL_GEMV, 0, 65535};
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.splits, 64);
    assert_int_equal(p.split_k, 128);
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 5 * 4 * 1024 * 4);
    assert_true(p.splits > 1 && p.splits <= 5);
    s.choice.blocks = 1;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).splits, 1);
    /* Never for very many rows. */
    s = shape(QC_MATMUL_SPLIT_ROWS + 1, 1, 65536);
    s.choice = (qc_matmul_choice){QC_MATMUL_MMA_16816, 0, 8};
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.path, QC_MATMUL_MMA_16816);
    assert_int_equal(p.splits, 1);
    /* What has no room or no cuBLAS is as without a choice. */
    s = shape(64, 1024, 8192);
    s.choice = (qc_matmul_choice){QC_MATMUL_DEQUANT_GEMM, 0, 0};
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_DEQUANT_GEMM);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 2 * MIB).path, QC_MATMUL_MMA_16816);
    s.have_gemm = 0;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_MMA_16816);
    s.k = 0;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_FILL);
    /* A table; the choice of the shape itself goes before it. */
    const qc_matmul_tuned rows[] = {row(1024, 8192, 2, 4, QC_MATMUL_GEMV, 0, 2)};
    s = shape(4, 1024, 8192);
    s.tuned = rows;
    s.tuned_count = 1;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).splits, 2);
    s.choice = (qc_matmul_choice){QC_MATMUL_GEMV, 0, 4};
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).splits, 4);
    s.choice.path = QC_MATMUL_AUTO;
    s.m = 5;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_MMA_16816);
    /* matmul_wgmma.cu, where it was built and the device has it. */
    const qc_cuda_device a = device(80, 108, 40);
    s.choice = (qc_matmul_choice){QC_MATMUL_WGMMA, 0, 2};
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    if (km_wgmma_was_built()) {
        assert_int_equal(p.path, QC_MATMUL_WGMMA);
        assert_int_equal(p.splits, 2);
        assert_int_equal(p.worker_k, 0);
    } else {
        assert_int_equal(p.path, QC_MATMUL_MMA_16816);
    }
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, QC_MATMUL_NO_WORKSPACE).path,
                     QC_MATMUL_MMA_16816);
    assert_int_not_equal(plan_of(&a, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_WGMMA);
}

/* The answer for max_m rows is enough for any number up to that, so that no plan is another one for
 * want of room. */
TEST(test_workspace)
{
    static const qc_matmul_path paths[] = {QC_MATMUL_GEMV, QC_MATMUL_MMA_884, QC_MATMUL_MMA_16816,
                                           QC_MATMUL_DEQUANT_GEMM, QC_MATMUL_WGMMA};
    const qc_cuda_device h = device(90, 132, 40);
    qt_rng rng = qt_rng_start("workspace");
    for (unsigned turn = 0; turn < 40; turn++) {
        qc_matmul_tuned rows[12];
        for (size_t i = 0; i < 12; i++) {
            uint64_t least = 1 + qt_next(&rng) % (i % 2 ? 5000 : 40);
            rows[i] = row(i % 5 ? 512 : 513, 1024, least, least + qt_next(&rng) % 2000,
                          paths[qt_next(&rng) % 5], 0, (uint32_t)(qt_next(&rng) % 9));
        }
        qc_matmul_shape s = shape(0, 512, 1024);
        s.tuned = rows;
        s.tuned_count = 12;
        uint64_t max_m = 1 + qt_next(&rng) % 6000;
        uint64_t bytes = qc_matmul_plan_workspace(&h, &s, max_m, QC_MATMUL_AUTO, 0);
        assert_true(bytes != UINT64_MAX);
        for (s.m = 1; s.m <= max_m; s.m += 1 + s.m / 16) {
            qc_matmul_plan free_one = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
            qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_AUTO, bytes);
            QT_CHECK(free_one.workspace_bytes <= bytes,
                     "%" PRIu64 " of up to %" PRIu64 " rows need %" PRIu64 " bytes, %" PRIu64
                     " were told",
                     s.m, max_m, free_one.workspace_bytes, bytes);
            assert_memory_equal(&p, &free_one, sizeof p);
        }
    }
}

/* ---- candidates ---- */

static void check_candidates(const qc_cuda_device *d, const qc_matmul_shape *shape_in,
                             uint64_t limit)
{
    qc_matmul_choice c[QC_MATMUL_CANDIDATES_MOST];
    qc_matmul_plan plans[QC_MATMUL_CANDIDATES_MOST];
    qc_matmul_shape s = *shape_in;
    uint32_t count = qc_matmul_candidates(d, shape_in, limit, c), wgmma = 0;
    /* A table in the shape is not looked at. */
    s.tuned = NULL;
    s.tuned_count = 0;
    /* None was left out for want of room. */
    assert_in_range(count, s.m > QC_MATMUL_SPLIT_ROWS ? 1 : 2, QC_MATMUL_CANDIDATES_MOST - 1);
    assert_int_equal(c[0].path, QC_MATMUL_AUTO);
    for (uint32_t i = 0; i < count; i++) {
        s.choice = c[i];
        plans[i] = plan_of(d, &s, QC_MATMUL_AUTO, limit);
        assert_true(i == 0 || plans[i].path == c[i].path);
        assert_true(!limit || plans[i].workspace_bytes <= limit);
        assert_false(plans[i].path == QC_MATMUL_MMA_884 && d->sm >= 80);
        wgmma += plans[i].path == QC_MATMUL_WGMMA;
        for (uint32_t j = 0; j < i; j++)
            assert_true(
                plans[i].path != plans[j].path || plans[i].splits != plans[j].splits ||
                plans[i].split_k != plans[j].split_k || plans[i].variant != plans[j].variant ||
                (plans[i].variant == QC_MATMUL_STREAM && plans[i].blocks != plans[j].blocks));
    }
    int has_wgmma = d->sm == 90 && s.k % 64 == 0 && km_wgmma_was_built();
    assert_true(has_wgmma ? wgmma > 0 || limit : wgmma == 0);
}

TEST(test_candidates)
{
    const qc_cuda_device devices[] = {device(70, 80, 40), device(75, 40, 40), device(80, 108, 40),
                                      device(90, 132, 40)};
    static const uint64_t sizes[][2] = {{28672, 8192}, {8192, 28672}, {1024, 8192}, {33, 130}};
    const qc_matmul_tuned table[] = {row(28672, 8192, 1, 5000, QC_MATMUL_GEMV, 0, 7)};
    for (size_t d = 0; d < 4; d++)
        for (size_t i = 0; i < 4; i++)
            for (uint64_t m = 1; m <= 4096; m *= 2) {
                qc_matmul_shape s = shape(m, sizes[i][0], sizes[i][1]);
                s.tuned = table;
                s.tuned_count = 1;
                if (sizes[i][1] < 256) /* nothing to split: another path may be all there is */
                    s.m = m < 32 ? 16 : 32;
                check_candidates(&devices[d], &s, 0);
                check_candidates(&devices[d], &s, 64 * MIB);
            }
    qc_matmul_choice c[QC_MATMUL_CANDIDATES_MOST];
    qc_matmul_shape s = shape(0, 64, 64);
    assert_int_equal(qc_matmul_candidates(&devices[0], &s, 0, c), 1); /* nothing to multiply */
    s = shape(64, 1024, 8192);
    s.x_dtype = QC_DTYPE_BF16;
    assert_int_equal(qc_matmul_candidates(&devices[3], &s, QC_MATMUL_NO_WORKSPACE, c), 0);
}

/* ---- a handle ---- */

TEST(test_handle)
{
    qc_matmul *h = km_handle();
    qc_error err = {0};
    size_t count = 1;
    assert_null(qc_matmul_tuning(h, &count));
    assert_int_equal(count, 0);
    qc_matmul_tuned rows[] = {row(64, 128, 1, 8, QC_MATMUL_GEMV, 0, 2)};
    KM_OK(qc_matmul_set_tuning(h, rows, 1, &km_error));
    rows[0].m_least = 0; /* it has a copy, and keeps it */
    km_expect(qc_matmul_set_tuning(h, rows, 1, &err), QC_ERR_USAGE, &err, "tuned row 0");
    assert_int_equal(qc_matmul_tuning(h, &count)[0].m_least, 1);
    assert_int_equal(count, 1);
    KM_OK(qc_matmul_set_tuning(h, NULL, 0, &km_error));
    assert_null(qc_matmul_tuning(h, &count));
    qc_matmul_destroy(h);
}

static void run_with(qc_matmul *h, const km_weight *w, km_data *d, qc_matmul_path path,
                     uint32_t blocks)
{
    const qc_cuda_device *of = qc_matmul_device(h);
    const qc_matmul_tuned rows[] = {{of->sm,
                                     of->multiprocessors,
                                     w->ready.w.form.ops->kind,
                                     d->n,
                                     d->k,
                                     1,
                                     64,
                                     {path, 0, blocks}}};
    KM_OK(qc_matmul_set_tuning(h, rows, path == QC_MATMUL_AUTO ? 0 : 1, &km_error));
    km_run(h, w, d);
}

TEST(test_run)
{
    qc_matmul *h = km_handle();
    qt_rng rng = qt_rng_start("run");
    const uint64_t n = 48, k = 1664, m = 12;
    const unsigned sm = qc_matmul_device(h)->sm;
    const qc_matmul_path tensor = sm >= 80 ? QC_MATMUL_MMA_16816 : QC_MATMUL_MMA_884;
    const size_t count = sm == 90 && km_wgmma_was_built() ? 3 : 2; /* of paths */
    for (int nf4 = 0; nf4 < 2; nf4++) {
        const km_spec spec = {.kind = nf4 ? QC_FORM_NF4 : QC_FORM_INT8_ROWS,
                              .n = n,
                              .k = k,
                              .block = nf4 ? 64 : 0,
                              .nested = nf4};
        km_weight w;
        km_data d;
        km_job job = {.m = m, .x_dtype = QC_DTYPE_F16, .y_dtype = QC_DTYPE_F16};
        km_weight_make(&w, h, &spec, &rng);
        km_data_make(&d, &w, &job, &rng);
        uint16_t *before = km_host(m * n * 2);
        /* The table's path gives the bits of that path forced. */
        const qc_matmul_path paths[] = {QC_MATMUL_GEMV, tensor, QC_MATMUL_WGMMA};
        for (size_t i = 0; i < count; i++) {
            d.job.path = paths[i];
            run_with(h, &w, &d, QC_MATMUL_AUTO, 0);
            memcpy(before, d.y, m * n * 2);
            d.job.path = QC_MATMUL_AUTO;
            run_with(h, &w, &d, paths[i], 0);
            assert_memory_equal(d.y, before, m * n * 2);
        }
        /* Any splits of K: right, and the same bits again. 13 of 128 are the most. */
        for (uint32_t blocks = 1; blocks <= 13; blocks += 3)
            for (size_t i = 0; i < count; i++) {
                run_with(h, &w, &d, paths[i], blocks);
                km_check(&w, &d, (km_rounding){i < 2 ? 0x1p-11 : 0x1p-10, 0x1p-25});
                memcpy(before, d.y, m * n * 2);
                run_with(h, &w, &d, paths[i], blocks);
                assert_memory_equal(d.y, before, m * n * 2);
            }
        free(before);
        km_data_free(&d);
        km_weight_free(&w);
    }
    qc_matmul_destroy(h);
}

int main(void)
{
    if (km_no_device())
        return 77;
    return test_run_all(NULL);
}
