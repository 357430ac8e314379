#include "convert/run/summary.h"
#include "formats/json_strict.h"
#include "tests/fixtures/test.h"

/* 1000 weights of NF4 at 4.5 bits, 100 kept in BF16. */
static qc_convert_report example(void)
{
    qc_convert_report r = {.model = "model",
                           .out = "out",
                           .to = "nf4",
                           .compressed = 1,
                           .seconds = 2.0,
                           .bytes_in = 2200000000u,
                           .bytes_out_content = 762600000u,
                           .bytes_out_stored = 700000000u,
                           .shards = 1,
                           .side_files = 3,
                           .threads = 2,
                           .isa = "avx2",
                           .worst_name = "a.weight",
                           .worst_rel_mse = 0.00875,
                           .worst_max_err = 0.25};
    r.schemes[QC_SCHEME_NF4] = (qc_report_scheme){10, 1000000000u, 2000000000u, 562500000u};
    r.schemes[QC_SCHEME_KEEP] = (qc_report_scheme){4, 100000000u, 200000000u, 200000000u};
    return r;
}

static void text_is(const qc_convert_report *r, const char *want)
{
    SCOPED(qc_strbuf) out = {.max = 10000};
    assert_int_equal(qc_report_text(r, &out, NULL), QC_OK);
    assert_string_equal(out.data, want);
}

TEST(bits)
{
    qc_convert_report r = example();
    assert_true(qc_report_quantized_bits(&r) == 4.5);
    assert_true(qc_report_overall_bits(&r) > 5.546 && qc_report_overall_bits(&r) < 5.547);
    memset(&r, 0, sizeof r);
    assert_true(qc_report_quantized_bits(&r) == 0.0);
    assert_true(qc_report_overall_bits(&r) == 0.0);
}

TEST(text)
{
    qc_convert_report r = example();
    text_is(&r, "converted model -> out as nf4, compressed (.safetensors.zst)\n"
                "  size      2.20 GB -> 763 MB (34.7%), 700 MB on disk in 1 shard\n"
                "  bits      4.500 per quantized weight, 5.546 over all\n"
                "  tensors   4 keep, 10 nf4\n"
                "  worst     a.weight: relative MSE 8.750e-03, largest error 2.500e-01\n"
                "  time      2.00 s, 1.10 GB/s in, 350 MB/s out, 2 threads, avx2\n");
    r.found.bytes_kept = 2000000000u; /* an earlier run did these, and not in this time */
    r.found.stored_kept = 600000000u;
    text_is(&r, "converted model -> out as nf4, compressed (.safetensors.zst)\n"
                "  size      2.20 GB -> 763 MB (34.7%), 700 MB on disk in 1 shard\n"
                "  bits      4.500 per quantized weight, 5.546 over all\n"
                "  tensors   4 keep, 10 nf4\n"
                "  worst     a.weight: relative MSE 8.750e-03, largest error 2.500e-01\n"
                "  time      2.00 s, 100 MB/s in, 50.0 MB/s out, 2 threads, avx2\n");
    r.found.bytes_kept = r.found.stored_kept = 0;
    r.dry_run = 1;
    r.shards = 2;
    r.out = NULL;
    text_is(&r, "dry run: model as nf4\n"
                "  size      2.20 GB -> 763 MB (34.7%) in 2 shards\n"
                "  bits      4.500 per quantized weight, 5.546 over all\n"
                "  tensors   4 keep, 10 nf4\n");
    r.scale = "absmax"; /* what everybody does is not said */
    r.out = "out";
    r.dry_run = 0;
    r.shards = 1;
    r.schemes[QC_SCHEME_KEEP] = (qc_report_scheme){0};
    r.worst_name = NULL;
    text_is(&r, "converted model -> out as nf4, compressed (.safetensors.zst)\n"
                "  size      2.20 GB -> 763 MB (34.7%), 700 MB on disk in 1 shard\n"
                "  bits      4.500 per quantized weight, 6.101 over all\n"
                "  tensors   10 nf4\n"
                "  time      2.00 s, 1.10 GB/s in, 350 MB/s out, 2 threads, avx2\n");
    r.scale = "search";
    r.dry_run = 1;
    text_is(&r, "dry run: model -> out as nf4, scale search\n"
                "  size      2.20 GB -> 763 MB (34.7%) in 1 shard\n"
                "  bits      4.500 per quantized weight, 6.101 over all\n"
                "  tensors   10 nf4\n");
    r = example();
    r.compressed = 0;
    r.schemes[QC_SCHEME_NF4] = (qc_report_scheme){0};
    r.worst_name = NULL;
    r.model = "a\nb\033[m";
    text_is(&r, "converted a?b?[m -> out as nf4\n"
                "  size      2.20 GB -> 763 MB (34.7%) in 1 shard\n"
                "  tensors   4 keep\n"
                "  time      2.00 s, 1.10 GB/s in, 350 MB/s out, 2 threads, avx2\n");
}

static qc_json *json_of(const qc_convert_report *r)
{
    qc_json *doc = NULL;
    qc_error err = {0};
    SCOPED(qc_strbuf) out = {.max = 10000};
    assert_int_equal(qc_report_json(r, &out, NULL), QC_OK);
    if (qc_json_parse(&doc, out.data, out.len, 0, &err) != QC_OK)
        fail_msg("%s in %s", err.msg, out.data);
    return doc;
}

TEST(json)
{
    qc_convert_report r = example();
    qc_json *doc = json_of(&r);
    const qc_json_node *root = qc_json_root(doc);
    uint64_t n = 0;
    double d = 0.0;
    assert_int_equal(qc_json_as_u64(qc_json_get(root, "bytes_stored"), "x", &n, NULL), QC_OK);
    assert_int_equal(n, 700000000u);
    const qc_json_node *nf4 = qc_json_get(qc_json_get(root, "schemes"), "nf4");
    assert_int_equal(qc_json_as_u64(qc_json_get(nf4, "weights"), "x", &n, NULL), QC_OK);
    assert_int_equal(n, 1000000000u);
    assert_null(qc_json_get(qc_json_get(root, "schemes"), "int8"));
    const qc_json_node *worst = qc_json_get(root, "worst");
    assert_int_equal(qc_json_as_double(qc_json_get(worst, "rel_mse"), "x", &d, NULL), QC_OK);
    assert_true(d == 0.00875);
    qc_json_destroy(doc);

    r.worst_name = NULL;
    doc = json_of(&r);
    const qc_json_node *none = qc_json_get(qc_json_root(doc), "worst");
    assert_int_equal(qc_json_kind_of(none), QC_JSON_NULL);
    qc_json_destroy(doc);
}

/* Of several parts: what is to come while it is, sizes of the part until then. */
TEST(parts)
{
    static const unsigned left[] = {0, 2, 3, 4, 7, 8};
    qc_convert_report r = example();
    r.part_index = 1;
    r.part_count = 9;
    r.parts_left = left;
    r.parts_left_count = 6;
    r.worst_name = NULL;
    text_is(&r,
            "part 2 of 9 is done: converted model -> out as nf4, compressed (.safetensors.zst)\n"
            "  size      2.20 GB -> 763 MB (34.7%), 700 MB on disk in 1 shard\n"
            "  bits      4.500 per quantized weight, 5.546 over all\n"
            "  tensors   4 keep, 10 nf4\n"
            "  time      2.00 s, 1.10 GB/s in, 350 MB/s out, 2 threads, avx2\n"
            "  to come   parts 1, 3 to 5, 8, 9; the last to finish completes OUT\n");
    qc_json *doc = json_of(&r);
    const qc_json_node *part = qc_json_get(qc_json_root(doc), "part");
    const qc_json_node *to_come = qc_json_first(qc_json_get(part, "to_come"));
    uint64_t n = 0;
    assert_int_equal(qc_json_as_u64(qc_json_get(part, "index"), "x", &n, NULL), QC_OK);
    assert_int_equal(n, 2);
    assert_int_equal(qc_json_as_u64(qc_json_get(part, "of"), "x", &n, NULL), QC_OK);
    assert_int_equal(n, 9);
    for (unsigned i = 0; i < r.parts_left_count; i++, to_come = qc_json_next(to_come)) {
        assert_int_equal(qc_json_as_u64(to_come, "x", &n, NULL), QC_OK);
        assert_int_equal(n, left[i] + 1);
    }
    assert_null(to_come);
    qc_json_destroy(doc);

    r.shards = 0;
    text_is(&r, "part 2 of 9 had nothing to do: OUT has fewer shards than there are parts "
                "(--max-shard-size makes more)\n"
                "  to come   parts 1, 3 to 5, 8, 9; the last to finish completes OUT\n");
    r.shards = 1;

    r.parts_left_count = 0;
    text_is(
        &r,
        "part 2 of 9 was the last: converted model -> out as nf4, compressed (.safetensors.zst)\n"
        "  size      2.20 GB -> 763 MB (34.7%), 700 MB on disk in 1 shard\n"
        "  bits      4.500 per quantized weight, 5.546 over all\n"
        "  tensors   4 keep, 10 nf4\n"
        "  time      2.00 s for part 2, 2 threads, avx2\n");
    r.complete_meanwhile = 1;
    text_is(&r,
            "part 2 of 9 is done: converted model -> out as nf4, compressed (.safetensors.zst)\n"
            "  size      2.20 GB -> 763 MB (34.7%), 700 MB on disk in 1 shard\n"
            "  bits      4.500 per quantized weight, 5.546 over all\n"
            "  tensors   4 keep, 10 nf4\n"
            "  time      2.00 s, 1.10 GB/s in, 350 MB/s out, 2 threads, avx2\n"
            "  complete  by another part meanwhile\n");
    r.complete_meanwhile = 0;
    r.complete_before = 1;
    text_is(&r, "part 2 of 9: out is complete already; --restart makes it anew\n");
}
