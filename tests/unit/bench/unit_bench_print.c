/* What qconv bench prints of a made-up result. */
#include "convert/device/bench.h"
#include "tests/fixtures/test.h"

static const qc_bench_shape shapes[] = {
    {.model = "Tiny", .layer = "q, o", .n = 64, .k = 128, .count = 2},
    {.model = "Tiny", .layer = "down", .n = 128, .k = 64, .count = 1}};
static const uint64_t some_m[] = {1, 16};
static const qc_bench_scheme nf4 = QC_BENCH_NF4;
static const qc_bench_request request = {.shapes = shapes,
                                         .shape_count = 2,
                                         .m = some_m,
                                         .m_count = 2,
                                         .schemes = &nf4,
                                         .scheme_count = 1,
                                         .seed = 1,
                                         .rounds = 15};

typedef struct {
    qc_arena arena;
    qc_strbuf out;
    qc_bench_result r;
    qc_bench_row rows[3];
} fixture;

static int setup(void **state)
{
    static fixture f;
    memset(&f, 0, sizeof f);
    qc_arena_init(&f.arena);
    qc_strbuf_init(&f.out, 1 << 20);
    f.r = (qc_bench_result){.device = {"Made Up 1", "0000:01:00.0", 90, 132, 1000000000, 1000,
                                       13000, 13000, "CUDA 13.0: sm_90", NULL},
                            .roof = {.copy_bytes = 1u << 30,
                                     .copy_gbps = {1000, 900, 1100, 30},
                                     .gemm_size = 8192,
                                     .gemm_tflops = {100, 99, 101, 30},
                                     .launch_us = {1.25, 1, 2, 30},
                                     .host_bytes = 1u << 28,
                                     .to_device_gbps = {55.5, 50, 60, 30}},
                            .kernels = {{"nf4 from bf16", 4, 8192, 1000, {850, 800, 900, 30}}},
                            .kernel_count = 1,
                            .rows = f.rows,
                            .row_count = 3,
                            .left_out = 1,
                            .seconds = 12.5};
    /* 64 x 128 in NF4: 4096 + 128 + 4 + 1024 bytes, x 256, y 128: 5.636 ns at 1000 GB/s. */
    f.rows[0] = (qc_bench_row){.m = 1,
                               .path = "gemv",
                               .error = 0.0003,
                               .us = {0.011272, 0.011, 0.012, 30},
                               .dense = {0.022544, 0.02, 0.03, 30},
                               .ratio = {2, 1.9, 2.1, 15},
                               .turn = {5, 20, 30000},
                               .dense_turn = {2, 20, 32768}};
    f.rows[1] = f.rows[0];
    f.rows[1].shape = 1;
    f.rows[2] = f.rows[0];
    f.rows[2].m = 16;
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    qc_strbuf_deinit(&f->out);
    qc_arena_deinit(&f->arena);
    return 0;
}

static void has(const fixture *f, const char *text)
{
    if (!f->out.data || !strstr(f->out.data, text))
        fail_msg("no '%s' in:\n%s", text, f->out.data ? f->out.data : "");
}

static void lacks(const fixture *f, const char *text)
{
    if (f->out.data && strstr(f->out.data, text))
        fail_msg("'%s' in:\n%s", text, f->out.data);
}

TEST_WITH(line, setup, teardown)
{
    fixture *f = *state;
    assert_int_equal(qc_bench_row_line(&request, &f->r, &f->rows[0], &f->out, NULL), QC_OK);
    assert_string_equal(f->out.data,
                        "Tiny q, o M=1 nf4 gemv: 0.01 us, 50% of the roof, 2.00x fp16");
}

TEST_WITH(text, setup, teardown)
{
    fixture *f = *state;
    assert_int_equal(qc_bench_text(&request, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f, "Made Up 1, sm_90, 132 multiprocessors, 1.00 GB, L2 1.00 KB\n");
    has(f, "device copy of 1.07 GB, read + written    1000  GB/s      900 to 1100\n");
    has(f, "a kernel that does nothing, in a graph    1.25  us       1.00 to 2.00\n");
    lacks(f, "device to host");
    lacks(f, "by a kernel");
    has(f, "nf4 from bf16   850  800 to 900          85%          85%\n");
    has(f, "\nTiny\n");
    has(f, "one decoder layer");
    has(f, "3 measured in 12.5 s, 1 left out: no time or no memory\n");
    lacks(f, "may have helped");
    f->rows[0].turn.bytes = 4000;
    f->r.roof.kernel_copy_gbps = (qc_bench_spread){1700, 1600, 1800, 30};
    f->r.roof.read_gbps = (qc_bench_spread){2000, 1900, 2100, 30};
    f->r.device.no_gemm = "libcublas is not here";
    f->out.len = 0;
    assert_int_equal(qc_bench_text(&request, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f, "No comparison with cuBLAS: libcublas is not here.\n");
    has(f, "the same by a kernel of qconv             1700  GB/s     1600 to 1800\n");
    has(f, "reading 1.07 GB by a kernel of qconv      2000  GB/s     1900 to 2100\n");
    has(f, "nf4 from bf16   850  800 to 900          50%          42%\n");
    has(f, "  25%"); /* 50% of the copy alone */
    has(f, "In 1 the weights together are not more than four times the L2 cache");
}

TEST_WITH(markdown, setup, teardown)
{
    fixture *f = *state;
    assert_int_equal(qc_bench_markdown(&request, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f, "### Made Up 1\n");
    has(f, "| cuBLAS, 8192 x 8192 x 8192 | 100 | TFLOP/s | 99.0 to 101 |\n");
    has(f, "#### Tiny, nf4\n\n| M | q, o, 64 x 128 | down, 128 x 64 | all of a layer |\n"
           "|--|--|--|--|\n"
           "| 1 | 2.00x, 50% | 2.00x, 50% | 2.00x, 0.03 us |\n");
    has(f, "\n| 16 | 2.00x, "); /* and down is missing, so is the sum */
    has(f, " | - | - |\n");
    has(f, "|\n\n1 left out: no time or no memory.\n");
    lacks(f, "may have helped");
    lacks(f, "No comparison");
    f->rows[1].turn.bytes = 4000;
    f->r.device.no_gemm = "libcublas is not here";
    f->out.len = 0;
    assert_int_equal(qc_bench_markdown(&request, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f, "\nNo comparison with cuBLAS: libcublas is not here.\n");
    has(f, "\nIn 1 the weights together are not more than four times the L2 cache");
}

TEST_WITH(json, setup, teardown)
{
    fixture *f = *state;
    assert_int_equal(qc_bench_json(&request, &f->r, &f->out, NULL), QC_OK);
    has(f, "\"to_host_gbps\": null");
    has(f, "\"launch_us\": {\"median\": 1.25, \"p10\": 1.0, \"p90\": 2.0, \"samples\": 30}");
    has(f, "\"forced_path\": null");
    has(f, "\"rotation\": {\"copies\": 5, \"bytes\": 30000, \"launches\": 20}");
    has(f, "\"left_out\": 1");
    has(f, "{\"model\": \"Tiny\", \"scheme\": \"nf4\", \"m\": 1, \"us\": ");
    has(f, "\"failed\": [],\n  \"complete\": false");
}

/* What was wrong or did not run is named in each form, with its point or without one. */
TEST_WITH(failed, setup, teardown)
{
    fixture *f = *state;
    qc_bench_failure failures[] = {
        {.shape = 1, .scheme = QC_BENCH_NF4, .m = 16, .path = "gemv", .what = "it is wrong"},
        {.shape = 0, .scheme = QC_BENCH_SCHEME_COUNT, .m = 1, .path = "cublas", .what = "refused"},
        {.shape = QC_BENCH_NO_SHAPE, .scheme = QC_BENCH_SCHEME_COUNT, .what = "no roof"}};
    const char *list = "\nWrong, or could not run:\n\n"
                       "- Tiny down M=16 nf4 (gemv): it is wrong\n"
                       "- Tiny q, o M=1 (cublas): refused\n"
                       "- no roof\n";
    f->r.failed = failures;
    f->r.failed_count = 3;
    f->r.complete = 1;
    assert_int_equal(qc_bench_text(&request, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f, list);
    f->out.len = 0;
    assert_int_equal(qc_bench_markdown(&request, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f, list);
    f->out.len = 0;
    assert_int_equal(qc_bench_json(&request, &f->r, &f->out, NULL), QC_OK);
    has(f, "\"layer\": \"down\",\n      \"n\": 128,\n      \"k\": 64,\n      \"m\": 16,\n"
           "      \"scheme\": \"nf4\",\n      \"path\": \"gemv\",\n"
           "      \"what\": \"it is wrong\"");
    has(f, "\"scheme\": null,\n      \"path\": \"cublas\"");
    has(f, "\"m\": null,\n      \"scheme\": null,\n      \"path\": null,\n"
           "      \"what\": \"no roof\"");
    has(f, "\"complete\": true");
}

/* Packed weights stand beside the file's layout; a row without them is not in the table. */
TEST_WITH(packed, setup, teardown)
{
    fixture *f = *state;
    qc_bench_request q = request;
    qc_bench_packing packing = {.file_bytes = 4224, .packed_bytes = 8448, .us = {1.5, 1, 2, 30}};
    q.packed = 1;
    f->r.packings = &packing;
    f->r.packing_count = 1;
    assert_int_equal(qc_bench_json(&q, &f->r, &f->out, NULL), QC_OK);
    has(f, "\"packed\": null");
    lacks(f, "\"packed\": {");
    f->out.len = 0;
    f->rows[1].packed = (qc_bench_packed){.path = "mma-16816",
                                          .error = 0.0002,
                                          .us = {0.01, 0.009, 0.011, 30},
                                          .ratio = {1.125, 1.1, 1.25, 15},
                                          .turn = {5, 20, 4000}};
    assert_int_equal(qc_bench_row_line(&q, &f->r, &f->rows[1], &f->out, NULL), QC_OK);
    assert_string_equal(f->out.data,
                        "Tiny down M=1 nf4 gemv: 0.01 us, 50% of the roof, 2.00x fp16; packed "
                        "mma-16816: 0.01 us, 1.12x the file's layout");
    f->out.len = 0;
    assert_int_equal(qc_bench_text(&q, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f,
        "\nTiny, packed weights\n"
        "  weight  M  scheme  file's layout    us  packed       us  file / packed    p10 to p90\n"
        "  down    1  nf4     gemv           0.01  mma-16816  0.01          1.12x  1.10 to 1.25\n"
        "\nTiny, packing\n"
        "  weight  scheme  in the file   packed  us to pack    p10 to p90\n"
        "  q, o    nf4         4.22 KB  8.45 KB        1.50  1.00 to 2.00\n");
    has(f, "In 1 the weights together are not more than four times the L2 cache");
    f->out.len = 0;
    assert_int_equal(qc_bench_markdown(&q, &f->r, &f->arena, &f->out, NULL), QC_OK);
    has(f, "\n#### Tiny, packed weights\n\n"
           "| weight | M | scheme | file's layout | us | packed | us | file / packed | p10 to p90 "
           "|\n|--|--|--|--|--|--|--|--|--|\n"
           "| down | 1 | nf4 | gemv | 0.01 | mma-16816 | 0.01 | 1.12x | 1.10 to 1.25 |\n"
           "\n#### Tiny, packing\n\n");
    f->out.len = 0;
    assert_int_equal(qc_bench_json(&q, &f->r, &f->out, NULL), QC_OK);
    has(f, "\"path\": \"mma-16816\",\n        \"error\": 0.0002,\n        \"us\": {");
    has(f, "\"file_bytes\": 4224,\n      \"packed_bytes\": 8448,\n      \"us\": {\"median\": 1.5,");
    f->out.len = 0;
    assert_int_equal(qc_bench_json(&request, &f->r, &f->out, NULL), QC_OK);
    lacks(f, "\"packed\"");
    lacks(f, "packing");
}
