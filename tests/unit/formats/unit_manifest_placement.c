/* formats/manifest.h: version 2, with a placement */
#include "formats/manifest.h"
#include "tests/fixtures/manifest_sample.h"
#include "tests/fixtures/test.h"

TEST(a_placement_is_read_back)
{
    sample s;
    qc_strbuf text;
    qc_manifest m;
    qc_error err = {0};
    make_placed_sample(&s, 1);
    write_text(&s.m, &text);
    assert_non_null(strstr(
        text.data, "  },\n"
                   "  \"placement\": {\n"
                   "    \"vram\": \"2x40GB+cpu\",\n"
                   "    \"margin\": 0.9,\n"
                   "    \"context\": 8192,\n"
                   "    \"batch\": 3,\n"
                   "    \"images\": 1,\n"
                   "    \"kv_bits\": 16,\n"
                   "    \"mla_expanded\": true,\n"
                   "    \"devices\": [\n"
                   "      {\"name\": \"cuda:0\", \"tensor_bytes\": 72, \"shard_bytes\": 172},\n"
                   "      {\"name\": \"cuda:1\", \"tensor_bytes\": 0, \"shard_bytes\": 0},\n"
                   "      {\"name\": \"cpu\", \"tensor_bytes\": 2, \"shard_bytes\": 106}\n"
                   "    ]\n"
                   "  },\n"
                   "  \"sources\": [\n"));
    assert_non_null(strstr(text.data, "\"version\": 2,"));
    SCOPED(qc_arena) a = {0};
    assert_int_equal(qc_manifest_parse(&m, &a, text.data, text.len, &err), QC_OK);
    qc_strbuf_deinit(&text);
    assert_string_equal(m.placement.vram, "2x40GB+cpu");
    assert_true(m.placement.margin == 0.9 && m.placement.context == 8192);
    assert_true(m.placement.batch == 3 && m.placement.images == 1 && m.placement.kv_bits == 16);
    assert_true(m.placement.mla_expanded && m.placement.device_count == 3);
    for (size_t i = 0; i < 3; i++) {
        assert_string_equal(m.placement.devices[i].name, s.devices[i].name);
        assert_int_equal(m.placement.devices[i].tensor_bytes, s.devices[i].tensor_bytes);
        assert_int_equal(m.placement.devices[i].shard_bytes, s.devices[i].shard_bytes);
    }
    assert_true(m.shards[0].device == 0 && m.shards[1].device == 2);
    /* A device is for a placement only. */
    s.m.placement.device_count = 0;
    qc_strbuf_init(&text, TEXT_MAX);
    assert_int_equal(qc_manifest_write(&s.m, &text, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "its device 2"));
    qc_strbuf_deinit(&text);
}

TEST(wrong_placements_are_refused)
{
    static const wrong_text cases[] = {
        {"\"version\": 2", "\"version\": 1", QC_ERR_INPUT, "found 'placement'"},
        {"\"placement\": {", "\"placement\": null, \"p\": {", QC_ERR_INPUT, "placement"},
        {"\"devices\": [", "\"devices\": [], \"d\": [", QC_ERR_INPUT, "devices is empty"},
        {"\"margin\": 0.9", "\"margin\": 0", QC_ERR_INPUT, "margin"},
        {"\"margin\": 0.9", "\"margin\": 1.01", QC_ERR_INPUT, "margin"},
        {"\"kv_bits\": 16", "\"kv_bits\": 0", QC_ERR_INPUT, "kv_bits"},
        {"\"kv_bits\": 16", "\"kv_bits\": 65", QC_ERR_INPUT, "kv_bits"},
        {"\"cuda:1\"", "\"cuda:0\"", QC_ERR_INPUT, "listed twice"},
        {"\"cuda:1\"", "\"\"", QC_ERR_INPUT, "no name"},
        {"\"tensor_bytes\": 72", "\"tensor_bytes\": 71", QC_ERR_INPUT, "'cuda:0' has"},
        {"\"shard_bytes\": 172", "\"shard_bytes\": 173", QC_ERR_INPUT, "'cuda:0' has"},
        {"\"shard_bytes\": 0", "\"shard_bytes\": 9", QC_ERR_INPUT, "'cuda:1' has"},
        {"\"device\": 0", "\"device\": 1", QC_ERR_INPUT, "'cuda:0' has"},
        {"\"device\": 2", "\"device\": 3", QC_ERR_INPUT, "no device number 3"},
        {"\"device\": 0", "\"device\": 2", QC_ERR_INPUT, "'cuda:0' has"},
        {"\"device\": 0, ", "", QC_ERR_INPUT, "expected member 'device'"},
    };
    sample s;
    qc_strbuf text;
    make_placed_sample(&s, 1);
    write_text(&s.m, &text);
    assert_wrong(&text, cases, sizeof cases / sizeof *cases);
    qc_strbuf_deinit(&text);
    s.shards[0].device = 2; /* out of order */
    s.shards[1].device = 0;
    qc_error err = {0};
    qc_strbuf_init(&text, TEXT_MAX);
    assert_int_equal(qc_manifest_write(&s.m, &text, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "out of order"));
    qc_strbuf_deinit(&text);
}
