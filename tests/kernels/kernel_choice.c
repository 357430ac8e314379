/* What the plan makes of a choice that a test makes, and that products with any splits of K are
 * right. */
#include "kernels/matmul_handle.h"
#include "tests/fixtures/kernel_plans.h"

TEST(test_plan)
{
    const qc_cuda_device h = device(90, 132, 40), v = device(70, 80, 40);
    qc_matmul_shape s = shape(4, 1024, 8192);
    const qc_matmul_plan own = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(own.path, QC_MATMUL_MMA_16816);
    assert_int_equal(own.variant, QC_MATMUL_RING);
    assert_int_equal(own.blocks, 64);
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
    s = shape(4, 1024, 8192);
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

static void run_with(qc_matmul *h, const km_weight *w, km_data *d, qc_matmul_path path,
                     uint32_t blocks)
{
    h->choice = (qc_matmul_choice){path, 0, blocks};
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
        /* The chosen path gives the bits of that path forced. */
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
