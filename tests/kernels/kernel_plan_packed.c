/* Which kernel for a packed weight: a pure function, so devices are made up. */
#include "tests/fixtures/kernel_plans.h"

/* Whether a plan's kernel reads packed weights. */
static int reads_packed(const qc_matmul_plan *p)
{
    return p->path == QC_MATMUL_DEQUANT_GEMM || p->path == QC_MATMUL_WGMMA ||
           (p->path == QC_MATMUL_MMA_16816 && p->variant != QC_MATMUL_GENERAL);
}

/* The plan that is chosen for a packed weight: that of the file's layout where it reads both,
 * and the same with a choice of other kernels. */
static void expect_packed(const qc_cuda_device *d, const qc_matmul_shape *shape)
{
    static const qc_matmul_choice others[] = {{QC_MATMUL_GEMV, 0, 0},
                                              {QC_MATMUL_MMA_884, 0, 2},
                                              {QC_MATMUL_MMA_16816, QC_MATMUL_GENERAL, 2}};
    qc_matmul_plan p;
    qc_matmul_shape s = *shape;
    const qc_matmul_plan file = plan_of(d, &s, QC_MATMUL_AUTO, 0);
    s.packed = 1;
    expect_usage(d, &s, QC_MATMUL_GEMV, 0, "path gemv does not read packed weights");
    expect_usage(d, &s, QC_MATMUL_MMA_884, 0, "path mma-884 does not read packed weights");
    const qc_matmul_plan packed = plan_of(d, &s, QC_MATMUL_AUTO, 0);
    assert_true(reads_packed(&packed));
    if (reads_packed(&file)) {
        assert_int_equal(packed.path, file.path);
        assert_int_equal(packed.variant, file.variant);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        s.choice = others[i];
        p = plan_of(d, &s, QC_MATMUL_AUTO, 0);
        assert_memory_equal(&p, &packed, sizeof p);
    }
    s.choice = (qc_matmul_choice){QC_MATMUL_AUTO, 0, 0};
    for (int path = QC_MATMUL_MMA_16816; path < QC_MATMUL_PATH_COUNT; path++)
        if (qc_matmul_plan_make(d, &s, (qc_matmul_path)path, 0, &p, NULL) == QC_OK)
            assert_true(reads_packed(&p));
}

TEST(test_packed)
{
    static const unsigned sms[] = {80, 86, 87, 89, 90, 99, 100, 103, 110, 120, 121, 130};
    static const qc_form_kind kinds[] = {QC_FORM_NF4, QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};
    static const uint64_t m[] = {1, 8, 9, 33, 64, 65, 192, 300, 4096, 1u << 20};
    static const uint64_t n[] = {1, 31, 63, 64, 1000, 28672}, k[] = {64, 320, 8192};
    for (size_t i = 0; i < sizeof sms / sizeof *sms * 3 * 2; i++)
        for (size_t j = 0; j < sizeof m / sizeof *m; j++)
            for (size_t l = 0; l < sizeof n / sizeof *n * 3; l++) {
                qc_cuda_device d = device(sms[i / 6], 100, 50);
                qc_matmul_shape s = shape(m[j], n[l / 3], k[l % 3]);
                s.kind = kinds[i / 2 % 3];
                s.have_gemm = i % 2 == 0;
                if (l % 4 == 3) { /* two that share x */
                    s.parts = 2;
                    s.part_n[0] = 64;
                    s.part_n[1] = s.n;
                    s.n += 64;
                }
                expect_packed(&d, &s);
            }
    /* Nothing is read of a weight without rows, or for no rows of x. */
    qc_cuda_device h = h200();
    qc_matmul_shape s = shape(0, 64, 64);
    s.packed = 1;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_MMA_16816, 0).path, QC_MATMUL_FILL);
    s = shape(1, 0, 64);
    s.packed = 1;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_FILL);
}
