/* What qconv bench asks and how it counts: shapes, bytes, floors, sums over a layer. */
#include "convert/device/bench.h"
#include "tests/fixtures/test.h"

TEST(shapes_of_models)
{
    qc_bench_request q = {0};
    assert_int_equal(qc_bench_parse_shapes(NULL, NULL, &q, NULL), QC_OK);
    assert_int_equal(q.shape_count, 8);
    uint64_t weights[2] = {0, 0};
    for (uint32_t i = 0; i < q.shape_count; i++)
        weights[strcmp(q.shapes[i].model, "Llama-3.1-8B") == 0] +=
            q.shapes[i].count * q.shapes[i].n * q.shapes[i].k;
    /* The parameters of a layer's linear weights, as the models' cards add up: 80 layers of
     * 855,638,016 and 32 of 218,103,808. */
    assert_int_equal(weights[0], 855638016);
    assert_int_equal(weights[1], 218103808);
}

TEST(shapes_given)
{
    qc_bench_request q = {0};
    SCOPED(qc_arena) arena = {0};
    assert_int_equal(qc_bench_parse_shapes("64x96,1X16777216", &arena, &q, NULL), QC_OK);
    assert_int_equal(q.shape_count, 2);
    assert_int_equal(q.shapes[0].n, 64);
    assert_int_equal(q.shapes[0].k, 96);
    assert_int_equal(q.shapes[0].count, 0);
    assert_string_equal(q.shapes[0].layer, "64x96");
    assert_int_equal(q.shapes[1].k, 16777216);
    static const char *const wrong[] = {"",
                                        "x",
                                        "64",
                                        "64x",
                                        "x64",
                                        "64x96,",
                                        ",64x96",
                                        "64x96 ",
                                        "0x5",
                                        "5x0",
                                        "-1x5",
                                        "5x16777217",
                                        "99999999999999999999x1",
                                        "64x96x1"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        qc_error err = {0};
        assert_int_equal(qc_bench_parse_shapes(wrong[i], &arena, &q, &err), QC_ERR_USAGE);
        assert_non_null(strstr(err.msg, "--shapes"));
    }
    assert_int_equal(qc_bench_parse_shapes("2x2,2x2", &arena, &q, NULL), QC_ERR_USAGE);
    char many[4 * QC_BENCH_MAX_LIST * 4];
    size_t used = 0;
    for (unsigned i = 1; i <= QC_BENCH_MAX_LIST + 1; i++)
        used += (size_t)snprintf(many + used, sizeof many - used, "%s%ux1", i > 1 ? "," : "", i);
    assert_int_equal(qc_bench_parse_shapes(many, &arena, &q, NULL), QC_ERR_USAGE);
}

TEST(schemes_and_m)
{
    qc_bench_request q = {0};
    qc_error err = {0};
    SCOPED(qc_arena) arena = {0};
    assert_int_equal(qc_bench_parse_schemes(NULL, &arena, &q, NULL), QC_OK);
    assert_int_equal(q.scheme_count, 2);
    assert_int_equal(q.schemes[0], QC_BENCH_NF4);
    assert_int_equal(q.schemes[1], QC_BENCH_INT8);
    assert_int_equal(qc_bench_parse_schemes("int8-blocks,nf4-plain,int8,nf4", &arena, &q, NULL),
                     QC_OK);
    assert_int_equal(q.scheme_count, 4);
    assert_int_equal(q.schemes[0], QC_BENCH_INT8_BLOCK);
    assert_int_equal(q.schemes[1], QC_BENCH_NF4_PLAIN);
    static const char *const wrong[] = {"", "nf", "nf4,", ",nf4", "nf4,nf4", "int8-block", "NF4"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(qc_bench_parse_schemes(wrong[i], &arena, &q, &err), QC_ERR_USAGE);
    const uint64_t m[] = {16, 1, 4096, 2};
    assert_int_equal(qc_bench_set_m(m, 4, &arena, &q, NULL), QC_OK);
    assert_int_equal(q.m_count, 4);
    assert_int_equal(q.m[0], 1);
    assert_int_equal(q.m[3], 4096);
}

TEST(bytes)
{
    /* 8192 x 8192 in NF4: half a byte, a byte per 64, 4 bytes per 16384, the map. */
    assert_int_equal(qc_bench_weight_bytes(QC_BENCH_NF4, 8192, 8192),
                     33554432 + 1048576 + 16384 + 1024);
    assert_int_equal(qc_bench_weight_bytes(QC_BENCH_NF4_PLAIN, 8192, 8192), 33554432 + 4194304);
    assert_int_equal(qc_bench_weight_bytes(QC_BENCH_INT8, 8192, 8192), 67108864 + 32768);
    assert_int_equal(qc_bench_weight_bytes(QC_BENCH_INT8_BLOCK, 8192, 8192),
                     67108864 + 1048576 + 16384 + 1024);
    assert_int_equal(qc_bench_weight_bytes(QC_BENCH_NF4_PLAIN, 3, 5), 8 + 4); /* odd */
    assert_int_equal(qc_bench_bytes(1000, 2, 3, 5), 1000 + 2 * 2 * 5 + 2 * 2 * 3);
    assert_true(qc_bench_flops(4096, 28672, 8192) == 2.0 * 4096 * 28672 * 8192);
}

TEST(floors)
{
    qc_bench_roof roof = {.copy_gbps = {4000, 3900, 4100, 30}, .gemm_tflops = {700, 690, 710, 30}};
    /* 4 MB at 4000 GB/s: 1 us; 7e9 operations at 700 TFLOP/s: 10 us. The later one counts. */
    assert_float_equal(qc_bench_floor_us(&roof, 4000000, 7e7), 1, 1e-9);
    assert_float_equal(qc_bench_floor_us(&roof, 4000000, 7e9), 10, 1e-9);
    /* What moves the most counts: a copy of ours, or reading. */
    roof.kernel_copy_gbps.median = 5000;
    assert_float_equal(qc_bench_copy_gbps(&roof), 5000, 0);
    assert_float_equal(qc_bench_floor_us(&roof, 4000000, 7e7), 0.8, 1e-9);
    roof.read_gbps.median = 8000;
    assert_float_equal(qc_bench_copy_gbps(&roof), 5000, 0);
    assert_float_equal(qc_bench_memory_gbps(&roof), 8000, 0);
    assert_float_equal(qc_bench_floor_us(&roof, 4000000, 7e7), 0.5, 1e-9);
    roof.kernel_copy_gbps = roof.read_gbps = (qc_bench_spread){0};
    roof.gemm_tflops = (qc_bench_spread){0};
    assert_float_equal(qc_bench_floor_us(&roof, 4000000, 7e9), 1, 1e-9);
    roof.copy_gbps = (qc_bench_spread){0};
    assert_float_equal(qc_bench_floor_us(&roof, 4000000, 7e9), 0, 0);
}

TEST(sums_of_a_layer)
{
    const qc_bench_shape shapes[] = {
        {.model = "one", .layer = "a", .n = 8, .k = 8, .count = 2},
        {.model = "two", .layer = "c", .n = 8, .k = 8, .count = 1},
        {.model = "one", .layer = "b", .n = 8, .k = 8, .count = 1},
        {.model = "given", .layer = "8x8", .n = 8, .k = 8, .count = 0}};
    qc_bench_row rows[4] = {
        {.shape = 0, .m = 1, .us = {10, 9, 11, 4}, .dense = {30, 29, 31, 4}},
        {.shape = 2, .m = 1, .us = {5, 4, 6, 4}, .dense = {7, 6, 8, 4}},
        {.shape = 1, .m = 1, .us = {3, 2, 4, 4}},
        {.shape = 3, .m = 1, .us = {3, 2, 4, 4}},
    };
    const uint64_t m[] = {1, 2};
    const qc_bench_scheme nf4 = QC_BENCH_NF4;
    qc_bench_request q = {.shapes = shapes,
                          .shape_count = 4,
                          .m = m,
                          .m_count = 2,
                          .schemes = &nf4,
                          .scheme_count = 1};
    qc_bench_result r = {.rows = rows, .row_count = 4};
    qc_bench_layer l;
    assert_int_equal(qc_bench_layer_of(&q, &r, 0, QC_BENCH_NF4, 1, &l), 1);
    assert_string_equal(l.model, "one");
    assert_float_equal(l.us, 2 * 10 + 5, 1e-9);
    assert_float_equal(l.dense_us, 2 * 30 + 7, 1e-9);
    assert_int_equal(qc_bench_layer_of(&q, &r, 1, QC_BENCH_NF4, 1, &l), 1);
    assert_float_equal(l.dense_us, 0, 0); /* not measured */
    assert_int_equal(qc_bench_layer_of(&q, &r, 0, QC_BENCH_NF4, 2, &l), 0);
    assert_int_equal(qc_bench_layer_of(&q, &r, 0, QC_BENCH_INT8, 1, &l), 0);
    assert_int_equal(qc_bench_layer_of(&q, &r, 3, QC_BENCH_NF4, 1, &l), 0);
    rows[1].m = 2; /* one of two weights is missing: no sum */
    assert_int_equal(qc_bench_layer_of(&q, &r, 0, QC_BENCH_NF4, 1, &l), 0);
    assert_int_equal(qc_bench_first_of_model(&q, 0), 1);
    assert_int_equal(qc_bench_first_of_model(&q, 1), 1);
    assert_int_equal(qc_bench_first_of_model(&q, 2), 0);
}
