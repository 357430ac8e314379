/* Which kernel, tiles and workspace for which shape: a pure function, so devices are made up. */
#include "tests/fixtures/kernel_plans.h"

static qc_cuda_device pascal(void)
{
    return device(60, 56, 4);
}
static qc_cuda_device v100(void)
{
    return device(70, 80, 6);
}
static qc_cuda_device t4(void)
{
    return device(75, 40, 4);
}
static qc_cuda_device a100(void)
{
    return device(80, 108, 40);
}
static qc_cuda_device rtx3090(void)
{
    return device(86, 82, 6);
}
static qc_cuda_device rtx4090(void)
{
    return device(89, 128, 72);
}
static qc_matmul_path chosen(qc_cuda_device d, uint64_t m, uint64_t n, uint64_t k)
{
    qc_matmul_shape s = shape(m, n, k);
    return plan_of(&d, &s, QC_MATMUL_AUTO, 0).path;
}

/* The path just below and from the row count on where cuBLAS takes over. Where matmul_wgmma.cu has
 * such rows, only the count is looked at, which says where cuBLAS would; test_wgmma has the rest.
 */
static void expect_gemm_from(qc_cuda_device d, uint64_t n, uint64_t k, uint64_t rows,
                             qc_matmul_path below)
{
    qc_matmul_shape s = shape(1, n, k);
    assert_int_equal(qc_matmul_gemm_rows(&d, &s), rows);
    if (d.sm == 90 && n >= 4096 && k % 64 == 0 && km_wgmma_was_built())
        return;
    assert_int_equal(chosen(d, rows - 1, n, k), below);
    assert_int_equal(chosen(d, rows, n, k), QC_MATMUL_DEQUANT_GEMM);
    s = shape(rows, n, k);
    s.have_gemm = 0;
    assert_int_equal(plan_of(&d, &s, QC_MATMUL_AUTO, 0).path, below);
    s.m = 1u << 20;
    assert_int_equal(plan_of(&d, &s, QC_MATMUL_AUTO, 0).path, below);
}

static void expect_gemm_rows(qc_cuda_device d, qc_form_kind kind, uint64_t n, uint64_t k,
                             uint64_t rows)
{
    qc_matmul_shape s = shape(1, n, k);
    s.kind = kind;
    assert_int_equal(qc_matmul_gemm_rows(&d, &s), rows);
}

TEST(test_empty)
{
    qc_cuda_device d = h200();
    const uint64_t sizes[][3] = {{0, 8, 8}, {8, 0, 8}, {8, 8, 0}, {0, 0, 0}};
    for (size_t i = 0; i < 4; i++) {
        qc_matmul_shape s = shape(sizes[i][0], sizes[i][1], sizes[i][2]);
        for (int path = QC_MATMUL_AUTO; path <= QC_MATMUL_DEQUANT_GEMM; path++) {
            qc_matmul_plan p = plan_of(&d, &s, (qc_matmul_path)path, QC_MATMUL_NO_WORKSPACE);
            assert_int_equal(p.path, QC_MATMUL_FILL);
            assert_int_equal(p.workspace_bytes, 0);
            assert_int_equal(p.splits, 0);
        }
    }
}

TEST(test_auto)
{
    for (uint64_t m = 1; m <= 8; m++) {
        assert_int_equal(chosen(h200(), m, 8192, 8192), QC_MATMUL_MMA_16816);
        assert_int_equal(chosen(h200(), m, 8192, 8191), QC_MATMUL_GEMV);
        assert_int_equal(chosen(v100(), m, 1024, 8192), m < 3 ? QC_MATMUL_GEMV : QC_MATMUL_MMA_884);
        assert_int_equal(chosen(v100(), m, 1024, 8191), QC_MATMUL_GEMV);
        assert_int_equal(chosen(t4(), m, 1024, 8192), QC_MATMUL_GEMV);
    }
    assert_int_equal(chosen(h200(), 9, 8192, 8192), QC_MATMUL_MMA_16816);
    assert_int_equal(chosen(v100(), 9, 8192, 8192), QC_MATMUL_MMA_884);
    assert_int_equal(chosen(t4(), 9, 8192, 8192), QC_MATMUL_MMA_884);
    assert_int_equal(chosen(pascal(), 9, 8192, 8192), QC_MATMUL_GEMV);
    expect_gemm_from(pascal(), 8192, 8192, 257, QC_MATMUL_GEMV);
    expect_gemm_from(v100(), 1024, 8192, 257, QC_MATMUL_MMA_884);
    expect_gemm_from(t4(), 1024, 8192, 65, QC_MATMUL_MMA_884);
    /* Where the tiles of these have the shape, whatever N. */
    expect_gemm_from(a100(), 28672, 8192, 193, QC_MATMUL_MMA_16816);
    expect_gemm_from(a100(), 1024, 512, 193, QC_MATMUL_MMA_16816);
    expect_gemm_rows(a100(), QC_FORM_INT8_BLOCKS, 8192, 8192, 257);
    expect_gemm_rows(a100(), QC_FORM_INT8_ROWS, 8192, 8192, 257);
    expect_gemm_from(rtx3090(), 4096, 4096, 129, QC_MATMUL_MMA_16816);
    expect_gemm_from(rtx3090(), 1024, 8192, 129, QC_MATMUL_MMA_16816);
    expect_gemm_from(rtx4090(), 28672, 8192, 257, QC_MATMUL_MMA_16816);
    expect_gemm_from(rtx4090(), 1024, 8192, 257, QC_MATMUL_MMA_16816);
    expect_gemm_rows(rtx4090(), QC_FORM_INT8_ROWS, 1024, 8192, 257);
    expect_gemm_from(h200(), 28672, 8192, 129, QC_MATMUL_MMA_16816);
    expect_gemm_from(h200(), 1024, 8192, 129, QC_MATMUL_MMA_16816);
    /* Where not: tiles of 64 columns, 28672 / 64 = 448, 8192 / 64 = 128, 1024 / 64 = 16. */
    expect_gemm_from(a100(), 28672, 8160, 129, QC_MATMUL_MMA_16816);
    expect_gemm_from(a100(), 8192, 8224, 33, QC_MATMUL_MMA_16816);
    expect_gemm_from(a100(), 8192, 4128, 65, QC_MATMUL_MMA_16816);
    expect_gemm_from(a100(), 4096, 2016, 129, QC_MATMUL_MMA_16816);
    expect_gemm_from(a100(), 4096, 4128, 17, QC_MATMUL_MMA_16816);
    expect_gemm_from(a100(), 1024, 480, 17, QC_MATMUL_MMA_16816);
    expect_gemm_from(rtx3090(), 4096, 4128, 65, QC_MATMUL_MMA_16816);
    expect_gemm_from(rtx4090(), 28672, 8160, 257, QC_MATMUL_MMA_16816);
    expect_gemm_from(rtx4090(), 4096, 4128, 65, QC_MATMUL_MMA_16816);
    expect_gemm_from(h200(), 28672, 8160, 65, QC_MATMUL_MMA_16816);
    expect_gemm_from(h200(), 17920, 8160, 49, QC_MATMUL_MMA_16816);
    expect_gemm_from(h200(), 8960, 8160, 33, QC_MATMUL_MMA_16816);
}

/* Rules go by ranges of compute capabilities, so that those which come between and after have
 * sensible ones; what splits a range is the shared memory that a kernel needs. */
TEST(test_capabilities)
{
    /* From which rows on: 8192 x 8192 where the tiles have the shape (K % 64 == 0), where not, and
     * 1024 x 8160. */
    static const struct {
        unsigned sm, multiprocessors;
        uint64_t tiles, general, narrow;
        qc_matmul_path below;
    } rows[] = {
        {60, 56, 257, 257, 257, QC_MATMUL_GEMV},      {62, 56, 257, 257, 257, QC_MATMUL_GEMV},
        {70, 80, 257, 257, 257, QC_MATMUL_MMA_884},   {72, 8, 257, 257, 257, QC_MATMUL_MMA_884},
        {74, 80, 257, 257, 257, QC_MATMUL_MMA_884},   {75, 40, 129, 129, 65, QC_MATMUL_MMA_884},
        {79, 40, 129, 129, 65, QC_MATMUL_MMA_884},    {80, 108, 193, 65, 17, QC_MATMUL_MMA_16816},
        {86, 82, 129, 129, 17, QC_MATMUL_MMA_16816},  {87, 16, 193, 129, 33, QC_MATMUL_MMA_16816},
        {88, 64, 129, 129, 17, QC_MATMUL_MMA_16816},  {89, 128, 257, 129, 17, QC_MATMUL_MMA_16816},
        {90, 132, 129, 17, 17, QC_MATMUL_MMA_16816},  {99, 132, 129, 17, 17, QC_MATMUL_MMA_16816},
        {100, 148, 65, 33, 33, QC_MATMUL_MMA_16816},  {103, 160, 65, 33, 33, QC_MATMUL_MMA_16816},
        {110, 20, 129, 33, 33, QC_MATMUL_MMA_16816},  {119, 148, 129, 33, 33, QC_MATMUL_MMA_16816},
        {120, 170, 129, 65, 17, QC_MATMUL_MMA_16816}, {121, 48, 129, 129, 17, QC_MATMUL_MMA_16816},
        {130, 170, 129, 65, 17, QC_MATMUL_MMA_16816},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        qc_cuda_device d = device(rows[i].sm, rows[i].multiprocessors, 50);
        expect_gemm_from(d, 8192, 8192, rows[i].tiles, rows[i].below);
        expect_gemm_from(d, 8192, 8160, rows[i].general, rows[i].below);
        expect_gemm_from(d, 1024, 8160, rows[i].narrow, rows[i].below);
    }
}

TEST(test_forced)
{
    qc_cuda_device h = h200(), v = v100(), t = t4(), old = pascal();
    qc_matmul_shape s = shape(100, 4096, 4096);
    for (int path = QC_MATMUL_GEMV; path <= QC_MATMUL_DEQUANT_GEMM; path++)
        assert_int_equal(plan_of(&h, &s, (qc_matmul_path)path, 0).path, path);
    assert_int_equal(plan_of(&v, &s, QC_MATMUL_MMA_884, 0).path, QC_MATMUL_MMA_884);
    expect_usage(&v, &s, QC_MATMUL_MMA_16816, 0,
                 "path mma-16816 needs sm_80, but this device is sm_70");
    expect_usage(&t, &s, QC_MATMUL_MMA_16816, 0, "sm_75");
    expect_usage(&old, &s, QC_MATMUL_MMA_884, 0,
                 "path mma-884 needs sm_70, but this device is sm_60");
    expect_usage(&h, &s, QC_MATMUL_FILL, 0, "cannot be asked for");
    expect_usage(&h, &s, QC_MATMUL_PATH_COUNT, 0, "cannot be asked for");
    expect_usage(&h, &s, -1, 0, "cannot be asked for");
    s.have_gemm = 0;
    expect_usage(&h, &s, QC_MATMUL_DEQUANT_GEMM, 0, "needs cuBLAS");
    s = shape(UINT64_MAX / 2, 4096, 4096);
    s.x_dtype = QC_DTYPE_BF16;
    expect_usage(&h, &s, QC_MATMUL_MMA_16816, 0, "overflow");
    s = shape(1, UINT64_MAX / 2, 1);
    expect_usage(&h, &s, QC_MATMUL_AUTO, 0, "overflows 64 bits");
}

TEST(test_alignment)
{
    qc_cuda_device d = h200();
    qc_matmul_shape s = shape(1, 64, 2880);
    assert_true(plan_of(&d, &s, QC_MATMUL_AUTO, 0).aligned);
    s.repacked = 1;
    assert_false(plan_of(&d, &s, QC_MATMUL_AUTO, 0).aligned);
    s = shape(1, 64, 3420);
    assert_false(plan_of(&d, &s, QC_MATMUL_AUTO, 0).aligned);
    assert_int_equal(plan_of(&d, &s, QC_MATMUL_AUTO, 0).k_padded, 3424);
}

TEST(test_copies_of_x)
{
    qc_cuda_device h = h200(), v = v100();
    for (int path = QC_MATMUL_MMA_884; path <= QC_MATMUL_MMA_16816; path++) {
        qc_matmul_shape s = shape(16, 4096, 4096);
        assert_false(plan_of(&h, &s, (qc_matmul_path)path, 0).copies_x);
        s.x_alignment = 8;
        assert_true(plan_of(&h, &s, (qc_matmul_path)path, 0).copies_x);
        s = shape(16, 4096, 4104);
        assert_true(plan_of(&h, &s, (qc_matmul_path)path, 0).copies_x);
        s = shape(16, 4096, 4096);
        s.x_dtype = QC_DTYPE_BF16;
        assert_true(plan_of(&h, &s, (qc_matmul_path)path, 0).copies_x);
    }
    qc_matmul_shape s = shape(4, 4096, 4095);
    s.x_dtype = QC_DTYPE_BF16;
    assert_false(plan_of(&h, &s, QC_MATMUL_GEMV, 0).copies_x);
    s.m = 4096;
    s.x_alignment = 2;
    s.y_dtype = QC_DTYPE_BF16;
    qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_DEQUANT_GEMM, 0);
    assert_false(p.copies_x);
    assert_int_equal(p.dense_dtype, QC_DTYPE_BF16);
    assert_false(p.gemm_to_float);
    s.has_epilogue = 1;
    assert_true(plan_of(&h, &s, QC_MATMUL_DEQUANT_GEMM, 0).gemm_to_float);
    s.has_epilogue = 0;
    s.y_dtype = QC_DTYPE_F16; /* 1e-3 is promised */
    p = plan_of(&h, &s, QC_MATMUL_DEQUANT_GEMM, 0);
    assert_true(p.copies_x);
    assert_int_equal(p.dense_dtype, QC_DTYPE_F16);
    assert_true(p.gemm_to_float);
    s.y_dtype = QC_DTYPE_BF16;
    p = plan_of(&v, &s, QC_MATMUL_DEQUANT_GEMM, 0);
    assert_true(p.copies_x);
    assert_int_equal(p.dense_dtype, QC_DTYPE_F16);
    assert_true(p.gemm_to_float);
    s.x_dtype = s.y_dtype = QC_DTYPE_F16;
    p = plan_of(&v, &s, QC_MATMUL_DEQUANT_GEMM, 0);
    assert_false(p.copies_x);
    assert_false(p.gemm_to_float);
    s.y_dtype = QC_DTYPE_BF16;
    assert_true(plan_of(&v, &s, QC_MATMUL_DEQUANT_GEMM, 0).gemm_to_float);
}

TEST(test_gemv)
{
    qc_cuda_device d = h200();
    /* Enough rows of W: no split. */
    qc_matmul_shape s = shape(1, 28672, 8192);
    qc_matmul_plan p = plan_of(&d, &s, QC_MATMUL_GEMV, 0);
    assert_int_equal(p.splits, 1);
    assert_true(p.split_k >= 8192);
    assert_int_equal(p.workspace_bytes, 0);
    assert_int_equal(p.m_tile, 1);
    assert_int_equal(p.n_tile, 32);
    /* Few: K is cut into whole tiles of 1024, none of them empty. */
    s = shape(1, 1024, 8192);
    p = plan_of(&d, &s, QC_MATMUL_GEMV, 0);
    assert_int_equal(p.splits, 8);
    assert_int_equal(p.split_k, 1024);
    assert_int_equal(p.partial_offset, 0);
    assert_int_equal(p.workspace_bytes, 8 * 1024 * 4);
    s = shape(7, 1, 57344);
    p = plan_of(&d, &s, QC_MATMUL_GEMV, 0);
    assert_int_equal(p.n_tile, 16);
    assert_int_equal(p.splits, 28);
    assert_int_equal(p.split_k, 2048);
    s.kind = QC_FORM_INT8_ROWS;
    assert_int_equal(plan_of(&d, &s, QC_MATMUL_GEMV, 0).n_tile, 16);
    /* Many rows of x fill the device without. */
    s = shape(4096, 1024, 8192);
    p = plan_of(&d, &s, QC_MATMUL_GEMV, 0);
    assert_int_equal(p.splits, 1);
    assert_int_equal(p.m_tile, 8);
    /* sm_75 has shared memory for 7 rows of NF4, and of unaligned ones for 4. */
    d = t4();
    for (uint64_t m = 5; m <= 9; m++) {
        s = shape(m, 64, 4096);
        p = plan_of(&d, &s, QC_MATMUL_GEMV, 0);
        assert_int_equal(p.m_tile, m <= 7 ? m : 4);
        assert_true(p.shared_bytes <= d.shared_block_bytes);
        s.repacked = 1;
        p = plan_of(&d, &s, QC_MATMUL_GEMV, 0);
        assert_int_equal(p.m_tile, 4);
        assert_true(p.shared_bytes <= d.shared_block_bytes);
        s.kind = QC_FORM_INT8_ROWS;
        assert_int_equal(plan_of(&d, &s, QC_MATMUL_GEMV, 0).m_tile, m < 8 ? m : 8);
    }
    d = h200();
    for (uint64_t k = 1; k < 20000; k += 37)
        for (uint64_t n = 1; n < 6000; n = n * 3 + 1) {
            s = shape(1 + k % 8, n, k);
            p = plan_of(&d, &s, QC_MATMUL_GEMV, 0);
            assert_true(p.splits >= 1 && p.splits <= 32 && p.split_k % 1024 == 0);
            assert_true(p.split_k * p.splits >= k && p.split_k * (p.splits - 1) < k);
        }
}

/* Up to 8 rows on sm_80 and newer: a block of threads has equally many tiles of 16 rows as another
 * or one fewer, and K is split where x has no room; launches overlap where drivers can capture
 * that. */
TEST(test_ring)
{
    qc_cuda_device h = h200(), a = a100(), r = rtx3090();
    qc_matmul_shape s = shape(1, 8192, 8192);
    qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.variant, QC_MATMUL_RING);
    assert_int_equal(p.n_tile, 16);
    assert_int_equal(p.blocks, 128); /* 512 tiles, 4 each */
    assert_int_equal(p.splits, 1);
    assert_int_equal(p.threads, 512);
    assert_int_equal(p.workspace_bytes, 0);
    assert_int_equal(p.overlaps, 0);
    h.driver_version = h.runtime_version = 12030;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).overlaps, 1);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_GEMV, 0).overlaps, 1); /* the sum of its splits */
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_DEQUANT_GEMM, 0).overlaps, 0);
    h.code = 80; /* compute_80's PTX, compiled by the driver: it has no wait */
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).overlaps, 0);
    h.code = 90;
    h.driver_version = 12020;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).overlaps, 0);
    h.driver_version = a.driver_version = a.runtime_version = 13000;
    p = plan_of(&a, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.blocks, 103); /* of 108: 5 tiles each */
    assert_int_equal(p.overlaps, 0);
    /* A piece of K for each of the warps, in whole entries; all warps are at work. */
    for (uint64_t n = 16; n < 100000; n = n * 5 / 2)
        for (uint64_t k = 64; k < 40000; k = k * 7 / 4 / 64 * 64 + 64)
            for (uint64_t m = 1; m <= 8; m++) {
                s = shape(m, n, k);
                p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
                assert_int_equal(p.variant, QC_MATMUL_RING);
                const uint64_t entries = p.split_k / 256;
                assert_true(p.split_k * p.splits >= k && p.split_k * (p.splits - 1) < k);
                assert_true((uint64_t)p.ring.each * p.ring.pieces >= entries &&
                            (uint64_t)p.ring.each * (p.ring.pieces - 1) < entries);
                assert_true(p.ring.pieces << p.ring.slots_log >= p.threads / 32 + 1);
                assert_true(p.shared_bytes <= h.shared_block_bytes);
            }
    /* Less shared memory: the narrow table, and K is split sooner. */
    s = shape(1, 8192, 8192);
    p = plan_of(&r, &s, QC_MATMUL_AUTO, 0);
    assert_true(p.variant == QC_MATMUL_RING && p.shared_bytes <= r.shared_block_bytes);
    assert_int_equal(p.splits, 1);
    s = shape(8, 8192, 8192);
    assert_true(plan_of(&r, &s, QC_MATMUL_AUTO, 0).splits > plan_of(&h, &s, 0, 0).splits);
    assert_true(plan_of(&h, &s, QC_MATMUL_AUTO, 0).splits > 1);
    /* No room for partial sums: the kernel for any shape. */
    assert_int_not_equal(plan_of(&h, &s, QC_MATMUL_AUTO, QC_MATMUL_NO_WORKSPACE).variant,
                         QC_MATMUL_RING);
    s.x_dtype = QC_DTYPE_BF16; /* which that one would copy */
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, QC_MATMUL_NO_WORKSPACE).path, QC_MATMUL_GEMV);
    /* No more blocks than there is work for. */
    s = shape(8, 1024, 1024);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).blocks, 64);
    /* Weights that share x are one list of tiles, which do not reach from one into the next. */
    s = shape(1, 65 + 64 + 1, 8192);
    s.parts = 3;
    s.part_n[0] = 65;
    s.part_n[1] = 64;
    s.part_n[2] = 1;
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.variant, QC_MATMUL_RING);
    assert_int_equal(p.blocks, 5 + 4 + 1);
    assert_int_equal(p.ring.maps_log, 2);
    /* Granules of 32. */
    s = shape(8, 8192, 8192);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).ring.granule, 64);
    s.block_elems = 32;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).ring.granule, 32);
    s = shape(8, 8192, 8192 + 32);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).ring.granule, 32);
    s = shape(8, 8192, 8192);
    s.inside_64 = 1;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).ring.granule, 32);
    /* What it does not take. */
    s = shape(9, 8192, 8192);
    assert_int_not_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).variant, QC_MATMUL_RING);
    s = shape(1, 8192, 8192 + 8);
    assert_int_not_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).variant, QC_MATMUL_RING);
    s = shape(1, 8192, 8192);
    s.repacked = 1;
    assert_int_not_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).variant, QC_MATMUL_RING);
}

static void expect_layout(const qc_cuda_device *d, const qc_matmul_shape *s,
                          const qc_matmul_plan *p)
{
    uint64_t rows =
        s->m + (p->image_rows ? (p->image_rows - s->m % p->image_rows) % p->image_rows : 0);
    uint64_t x = p->copies_x ? rows * p->k_padded * 2 : 0;
    uint64_t partials = p->splits > 1 ? s->m * s->n * 4 * p->splits : 0, dense = 0;
    if (p->path == QC_MATMUL_DEQUANT_GEMM) {
        partials = p->gemm_to_float ? s->m * p->chunk_rows * 4 : 0;
        dense = p->chunk_rows * p->k_padded * 2;
        assert_true(p->chunk_rows >= 1 && p->chunk_rows <= s->n);
        if (p->dense_stride) {
            uint64_t rest = s->n - p->chunk_rows;
            assert_true(p->dense_stride >= dense && p->dense_stride % 256 == 0);
            dense =
                p->dense_stride + (rest < p->chunk_rows ? rest : p->chunk_rows) * p->k_padded * 2;
        }
        assert_true(p->workspace_bytes - p->gemm_offset >= 4 * MIB);
    } else {
        assert_int_equal(p->gemm_offset, p->workspace_bytes);
        assert_true(p->shared_bytes <= d->shared_block_bytes);
        assert_true(p->splits >= 1 && p->split_k % 128 == 0);
        assert_true(p->split_k * p->splits >= s->k && p->split_k * (p->splits - 1) < s->k);
    }
    assert_true(p->x_exponent_offset - p->x_offset >= x);
    assert_true(p->partial_offset - p->x_exponent_offset >= (p->copies_x ? s->m * 4 : 0));
    assert_true(p->dense_offset - p->partial_offset >= partials);
    assert_true(p->gemm_offset - p->dense_offset >= dense);
    assert_true(p->workspace_bytes >= p->gemm_offset || !p->workspace_bytes);
    const uint64_t offsets[] = {p->x_offset, p->x_exponent_offset, p->partial_offset,
                                p->dense_offset, p->gemm_offset};
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(offsets[i] % 256, 0);
}

/* Workspace for max_m rows is enough for every smaller m, with any dtypes, strides and bias, and
 * whatever the limit was, plans stay within it. */
TEST(test_workspace)
{
    const qc_cuda_device devices[] = {v100(), t4(), a100(), rtx3090(), h200()};
    const uint64_t shapes[][2] = {{28672, 8192}, {1024, 8192}, {2880, 2880}, {65, 3420}, {1, 63}};
    const uint64_t most[] = {1, 7, 16, 100, 257, 1024, 3000};
    const uint64_t limits[] = {0, 64 * MIB, 6 * MIB, 3 * MIB};
    qt_rng rng = qt_rng_start("workspace");
    for (size_t d = 0; d < 5; d++)
        for (size_t i = 0; i < 5; i++)
            for (size_t j = 0; j < 7; j++)
                for (size_t l = 0; l < 4; l++) {
                    qc_matmul_shape s = shape(0, shapes[i][0], shapes[i][1]);
                    s.have_gemm = (i + j) % 3 != 0;
                    s.kind = j % 2 ? QC_FORM_NF4 : QC_FORM_INT8_BLOCKS;
                    uint64_t bytes = qc_matmul_plan_workspace(&devices[d], &s, most[j],
                                                              QC_MATMUL_AUTO, limits[l]);
                    if (bytes == UINT64_MAX) { /* not even x has room */
                        assert_true(limits[l] && most[j] * (shapes[i][1] + 36) * 2 > limits[l]);
                        continue;
                    }
                    assert_true(!limits[l] || bytes <= limits[l]);
                    uint64_t limit = bytes ? bytes : QC_MATMUL_NO_WORKSPACE;
                    for (uint64_t m = 1; m <= most[j]; m += 1 + qt_below(&rng, 1 + most[j] / 60)) {
                        uint64_t random = qt_next(&rng);
                        s.m = m;
                        s.x_dtype = random & 1 ? QC_DTYPE_F16 : QC_DTYPE_BF16;
                        s.y_dtype = random & 2 ? QC_DTYPE_F16 : QC_DTYPE_BF16;
                        s.has_epilogue = (random & 4) != 0;
                        s.x_alignment = random & 8 ? 16 : 2;
                        qc_matmul_plan p = plan_of(&devices[d], &s, QC_MATMUL_AUTO, limit);
                        expect_layout(&devices[d], &s, &p);
                        assert_true(p.workspace_bytes <= bytes);
                    }
                }
    /* A wish that is larger gives nothing more. */
    qc_cuda_device h = h200();
    qc_matmul_shape s = shape(0, 1024, 8192);
    uint64_t free_of_limit = qc_matmul_plan_workspace(&h, &s, 4096, QC_MATMUL_AUTO, 0);
    assert_int_equal(free_of_limit,
                     qc_matmul_plan_workspace(&h, &s, 4096, QC_MATMUL_AUTO, free_of_limit));
    assert_int_equal(qc_matmul_plan_workspace(&h, &s, 0, QC_MATMUL_AUTO, 0), 0);
    qc_cuda_device v = v100();
    assert_true(UINT64_MAX == qc_matmul_plan_workspace(&v, &s, 64, QC_MATMUL_MMA_16816, 0));
}

TEST(test_limits)
{
    qc_cuda_device h = h200(), a = a100();
    /* With room for it as the chunk rule has it, which tests/kernels/kernel_chunks.c looks at. */
    qc_matmul_shape s = shape(4096, 28672, 8192);
    qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.chunk_rows, 4096);
    assert_int_equal(p.dense_stride, 4096 * 16384);
    assert_int_equal(p.gemm_offset - p.dense_offset, 2 * 4096 * 16384);
    assert_int_equal(p.workspace_bytes - p.gemm_offset, 32 * MIB);
    p = plan_of(&a, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.workspace_bytes - p.gemm_offset, 4 * MIB);
    /* The second buffer has room for the last chunk only, if there are two. */
    s = shape(1024, 28672, 8192);
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.chunk_rows, 16000);
    assert_int_equal(p.gemm_offset - p.dense_offset, 28672 * 16384);
    /* A weight with less than three waves whole, in one buffer. */
    s = shape(4096, 100, 8192);
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.chunk_rows, 100);
    assert_int_equal(p.dense_stride, 0);
    /* Weights that share x go one by one, so the largest counts. */
    s = shape(600, 8192 + 1024 + 1024, 8192);
    s.parts = 3;
    s.part_n[0] = s.part_n[2] = 1024;
    s.part_n[1] = 8192;
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    assert_int_equal(p.chunk_rows, 8192);
    /* Fewer rows within a limit, then the tensor cores. */
    s = shape(4096, 28672, 8192);
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 30 * MIB);
    assert_int_equal(p.path, QC_MATMUL_DEQUANT_GEMM);
    assert_true(p.workspace_bytes <= 30 * MIB);
    assert_int_equal(p.chunk_rows, 1024); /* 1,536 have room, and would be two waves of 132 */
    assert_int_equal(p.dense_stride, 0);
    assert_int_equal(p.workspace_bytes - p.gemm_offset, 4 * MIB);
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 5 * MIB + 1024);
    assert_int_equal(p.path, QC_MATMUL_DEQUANT_GEMM);
    assert_int_equal(p.chunk_rows, 64);
    p = plan_of(&h, &s, QC_MATMUL_AUTO, 4 * MIB);
    assert_int_equal(p.path, QC_MATMUL_MMA_16816);
    assert_int_equal(p.workspace_bytes, 0);
    expect_usage(&h, &s, QC_MATMUL_DEQUANT_GEMM, 4 * MIB, "4194304 are allowed");
    /* K is split less within a limit. */
    s = shape(1, 1024, 8192);
    p = plan_of(&h, &s, QC_MATMUL_GEMV, 5 * 1024 * 4);
    assert_int_equal(p.splits, 4);
    assert_int_equal(p.split_k, 2048);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_GEMV, QC_MATMUL_NO_WORKSPACE).splits, 1);
    /* x has to fit. */
    s = shape(64, 1024, 8192);
    s.x_dtype = QC_DTYPE_BF16;
    expect_usage(&h, &s, QC_MATMUL_MMA_16816, QC_MATMUL_NO_WORKSPACE, "0 are allowed");
    p = plan_of(&h, &s, QC_MATMUL_MMA_16816, 64 * 8192 * 2 + 256);
    assert_int_equal(p.splits, 1);
    /* And K is never split for very many rows. */
    s = shape(QC_MATMUL_SPLIT_ROWS + 1, 1, 65536);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_MMA_16816, 0).splits, 1);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_MMA_884, 0).splits, 1);
}

/* ---- matmul_wgmma.cu ---- */

static void skip_without_wgmma(void)
{
    if (km_wgmma_was_built())
        return;
    print_message("skipped: the kernels were built without matmul_wgmma.cu\n");
    skip();
}

/* The path that is chosen on an H200 for a weight in these parts, of which the unused are 0. */
static qc_matmul_path chosen_for(qc_form_kind kind, uint64_t m, uint64_t n0, uint64_t n1,
                                 uint64_t n2)
{
    qc_cuda_device d = h200();
    qc_matmul_shape s = shape(m, n0 + n1 + n2, 4096);
    s.kind = kind;
    s.parts = n2 ? 3 : n1 ? 2 : 0;
    s.part_n[0] = n0;
    s.part_n[1] = n1;
    s.part_n[2] = n2;
    return plan_of(&d, &s, QC_MATMUL_AUTO, 0).path;
}

/* Which rows of x and of W it has. */
TEST(test_wgmma)
{
    const qc_form_kind nf4 = QC_FORM_NF4, int8s[] = {QC_FORM_INT8_ROWS, QC_FORM_INT8_BLOCKS};
    const qc_matmul_path wgmma = QC_MATMUL_WGMMA, mma = QC_MATMUL_MMA_16816;
    skip_without_wgmma();
    assert_int_equal(chosen_for(nf4, 32, 4096, 0, 0), mma);
    assert_int_equal(chosen_for(nf4, 33, 4096, 0, 0), wgmma);
    assert_int_equal(chosen_for(nf4, 33, 4095, 0, 0), mma);
    assert_int_equal(chosen_for(nf4, 512, 4096, 0, 0), wgmma);
    assert_int_equal(chosen_for(nf4, 513, 4096, 0, 0), QC_MATMUL_DEQUANT_GEMM);
    assert_int_equal(chosen_for(nf4, 512, 4095, 0, 0), QC_MATMUL_DEQUANT_GEMM);
    /* All parts count. */
    assert_int_equal(chosen_for(nf4, 33, 2048, 1024, 1024), wgmma);
    assert_int_equal(chosen_for(nf4, 33, 2048, 1024, 1023), mma);
    /* One wave of tiles of 256 rows on 132 multiprocessors: 99 to 132, those of each part. */
    for (uint64_t m = 9; m <= 32; m++) {
        assert_int_equal(chosen_for(nf4, m, 98 * 256, 0, 0), mma);
        assert_int_equal(chosen_for(nf4, m, 98 * 256 + 1, 0, 0), wgmma);
        assert_int_equal(chosen_for(nf4, m, 132 * 256, 0, 0), wgmma);
        assert_int_equal(chosen_for(nf4, m, 132 * 256 + 1, 0, 0), mma);
        assert_int_equal(chosen_for(nf4, m, 128, 98 * 256 - 128, 0), wgmma);
        assert_int_equal(chosen_for(nf4, m, 128, 132 * 256 - 128, 0), mma);
        for (int i = 0; i < 2; i++)
            assert_int_equal(chosen_for(int8s[i], m, 112 * 256, 0, 0), m > 16 ? wgmma : mma);
    }
    assert_int_equal(chosen_for(nf4, 33, 132 * 256 + 1, 0, 0), wgmma);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(chosen_for(int8s[i], 32, 4096, 0, 0), mma);
        assert_int_equal(chosen_for(int8s[i], 33, 4096, 0, 0), wgmma);
    }
    /* Without cuBLAS the other kernels have what is more. */
    qc_cuda_device h = h200();
    qc_matmul_shape s = shape(513, 8192, 8192);
    s.have_gemm = 0;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, mma);
}

/* Which weights and devices it has; any x will do. */
TEST(test_wgmma_takes)
{
    skip_without_wgmma();
    const unsigned others[] = {70, 75, 80, 86, 89, 99, 100, 103, 110, 120, 121};
    qc_cuda_device h = h200();
    qc_matmul_shape s = shape(64, 8192, 8192);
    s.x_dtype = s.y_dtype = QC_DTYPE_BF16;
    s.x_alignment = 2;
    s.ldx = s.k + 3;
    s.has_epilogue = 1;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_WGMMA);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        qc_cuda_device d = device(others[i], 132, 50);
        char words[64];
        d.shared_block_bytes = h.shared_block_bytes;
        assert_int_not_equal(plan_of(&d, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_WGMMA);
        (void)snprintf(words, sizeof words, "needs sm_90, kernels built for it, aligned rows");
        expect_usage(&d, &s, QC_MATMUL_WGMMA, 0, words);
        (void)snprintf(words, sizeof words, "this device is sm_%u, and the weight", others[i]);
        expect_usage(&d, &s, QC_MATMUL_WGMMA, 0, words);
    }
    h.shared_block_bytes--;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_MMA_16816);
    h = h200();
    struct {
        qc_matmul_shape s;
        const char *words;
    } refused[] = {{shape(64, 8192, 8192 + 32), "the weight has 8224 columns"},
                   {shape(64, 8192, 8192), "aligned rows of codes"},
                   {shape(64, 8192, 8192), "blocks of 64 or more"}};
    refused[1].s.repacked = 1;
    refused[2].s.block_elems = 32;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        expect_usage(&h, &refused[i].s, QC_MATMUL_WGMMA, 0, refused[i].words);
        assert_int_not_equal(plan_of(&h, &refused[i].s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_WGMMA);
    }
    /* Scales by rows have no blocks. */
    refused[2].s.kind = QC_FORM_INT8_ROWS;
    refused[2].s.block_elems = 0;
    assert_int_equal(plan_of(&h, &refused[2].s, QC_MATMUL_AUTO, 0).path, QC_MATMUL_WGMMA);
    /* Forced, it has any numbers of rows. */
    s = shape(1, 1, 64);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_WGMMA, 0).path, QC_MATMUL_WGMMA);
    s = shape(100000, 1, 64);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_WGMMA, 0).path, QC_MATMUL_WGMMA);
    s = shape((uint64_t)INT32_MAX + 1, 1, 64);
    expect_usage(&h, &s, QC_MATMUL_WGMMA, 0, "path wgmma needs");
}

/* The image of x has whole tiles of rows. */
TEST(test_wgmma_image)
{
    skip_without_wgmma();
    qc_cuda_device h = h200();
    static const uint64_t rows[][3] = {/* m, of a tile, of the image */
                                       {1, 16, 16},     {16, 16, 16},    {17, 32, 32},
                                       {33, 64, 64},    {64, 64, 64},    {65, 128, 128},
                                       {129, 256, 256}, {257, 256, 512}, {512, 256, 512}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            qc_matmul_shape s = shape(rows[i][0], 8192, 4096);
            s.x_dtype = bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
            qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_WGMMA, 0);
            assert_true(p.copies_x);
            assert_int_equal(p.m_tile, rows[i][1]);
            assert_int_equal(p.n_tile, p.m_tile <= 64 ? 256 : 128);
            assert_int_equal(p.image_rows, p.m_tile);
            assert_int_equal(p.x_exponent_offset - p.x_offset, rows[i][2] * 4096 * 2);
            assert_true(p.partial_offset - p.x_exponent_offset >= s.m * 4);
            expect_layout(&h, &s, &p);
        }
    /* Launches may overlap where drivers can capture that. */
    qc_matmul_shape s = shape(64, 8192, 4096);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).overlaps, 0);
    h.driver_version = h.runtime_version = 12030;
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 0).overlaps, 1);
}

/* K is split less within a limit; where the image alone has no room, the other rules hold. */
TEST(test_wgmma_limits)
{
    skip_without_wgmma();
    qc_cuda_device h = h200();
    qc_matmul_shape s = shape(33, 4096, 8192);
    const uint64_t least = 64 * 8192 * 2 + 256;
    qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_AUTO, 0);
    uint32_t splits = p.splits;
    assert_int_equal(p.path, QC_MATMUL_WGMMA);
    assert_true(splits > 2);
    for (uint64_t limit = p.workspace_bytes; limit > least; limit -= 33 * 4096) {
        p = plan_of(&h, &s, QC_MATMUL_AUTO, limit);
        assert_int_equal(p.path, QC_MATMUL_WGMMA);
        assert_true(p.workspace_bytes <= limit && p.splits <= splits);
        assert_true(p.splits == splits || p.worker_k == 0);
        expect_layout(&h, &s, &p);
        splits = p.splits;
    }
    p = plan_of(&h, &s, QC_MATMUL_AUTO, least);
    assert_int_equal(p.path, QC_MATMUL_WGMMA);
    assert_int_equal(p.splits, 1);
    assert_int_equal(p.workspace_bytes, least);
    p = plan_of(&h, &s, QC_MATMUL_AUTO, least - 1);
    assert_int_equal(p.path, QC_MATMUL_MMA_16816);
    expect_usage(&h, &s, QC_MATMUL_WGMMA, least - 1, "path wgmma needs a workspace of at least");
    p = plan_of(&h, &s, QC_MATMUL_AUTO, QC_MATMUL_NO_WORKSPACE);
    assert_int_equal(p.path, QC_MATMUL_MMA_16816);
    assert_int_equal(p.workspace_bytes, 0);
    expect_usage(&h, &s, QC_MATMUL_WGMMA, QC_MATMUL_NO_WORKSPACE, "but 0 are allowed");
    /* cuBLAS, from its rows on, takes less than an image of 512 x 8192. */
    s = shape(512, 8192, 8192);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 6 * MIB).path, QC_MATMUL_DEQUANT_GEMM);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 4 * MIB).path, QC_MATMUL_MMA_16816);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_AUTO, 9 * MIB).path, QC_MATMUL_WGMMA);
    /* Where no kernel has room, the sentence is about the one that needs least. */
    s = shape(64, 8192, 8192);
    s.x_dtype = QC_DTYPE_BF16;
    expect_usage(&h, &s, QC_MATMUL_AUTO, QC_MATMUL_NO_WORKSPACE, "path mma-16816 needs");
    /* K is never split for very many rows. */
    s = shape(QC_MATMUL_SPLIT_ROWS + 1, 1, 65536);
    assert_int_equal(plan_of(&h, &s, QC_MATMUL_WGMMA, 0).splits, 1);
}

/* The answer for max_m rows is enough for fewer, within any limit. */
TEST(test_wgmma_workspace)
{
    skip_without_wgmma();
    static const uint64_t shapes[][2] = {{28672, 8192}, {4096, 4096}, {300, 576}, {1, 64}};
    static const uint64_t most[] = {1, 17, 64, 65, 300, 1024, 1025, 2000};
    qc_cuda_device h = h200();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t j = 0; j < sizeof most / sizeof *most; j++) {
            qc_matmul_shape s = shape(0, shapes[i][0], shapes[i][1]);
            uint64_t bytes = qc_matmul_plan_workspace(&h, &s, most[j], QC_MATMUL_WGMMA, 0);
            assert_true(bytes != UINT64_MAX);
            for (s.m = 1; s.m <= most[j]; s.m++) {
                s.x_dtype = s.m % 3 ? QC_DTYPE_F16 : QC_DTYPE_BF16;
                qc_matmul_plan p = plan_of(&h, &s, QC_MATMUL_WGMMA, 0);
                qc_matmul_plan within = plan_of(&h, &s, QC_MATMUL_WGMMA, bytes);
                QT_CHECK(p.workspace_bytes <= bytes,
                         "%" PRIu64 " of up to %" PRIu64 " rows need %" PRIu64
                         " bytes, not %" PRIu64,
                         s.m, most[j], p.workspace_bytes, bytes);
                assert_memory_equal(&p, &within, sizeof p);
                expect_layout(&h, &s, &p);
            }
            uint64_t limit = bytes / 2;
            bytes = qc_matmul_plan_workspace(&h, &s, most[j], QC_MATMUL_AUTO, limit);
            assert_true(bytes == UINT64_MAX || bytes <= limit);
        }
}
