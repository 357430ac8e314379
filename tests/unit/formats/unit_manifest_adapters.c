/* formats/manifest.h: version 4, with merged adapters */
#include "formats/manifest.h"
#include "tests/fixtures/manifest_sample.h"
#include "tests/fixtures/test.h"

static qc_manifest_adapter adapters[2];

static void with_adapters(sample *s, size_t count, int placed)
{
    if (placed)
        make_placed_sample(s, 1);
    else
        make_sample(s, 1);
    adapters[0] =
        (qc_manifest_adapter){"a \"b\"", 1.0, digest_of("config"), 123456789, digest_of("weights")};
    adapters[1] = (qc_manifest_adapter){"c", -0.1, digest_of("x"), 7, digest_of("y")};
    s->m.adapters = adapters;
    s->m.adapter_count = count;
}

TEST(they_are_read_back)
{
    static const qc_manifest_calibration moments = {
        .hessians = "moments", .damping = 0.05, .sided = "one"};
    for (unsigned i = 0; i < 8; i++) {
        sample s;
        qc_strbuf text, again;
        qc_arena a;
        qc_manifest m;
        qc_error err = {0};
        size_t count = 1 + i / 4;
        with_adapters(&s, count, i % 2);
        s.m.calibration = i / 2 % 2 ? &moments : NULL;
        write_text(&s.m, &text);
        assert_non_null(strstr(text.data, "\"version\": 4,"));
        assert_non_null(strstr(text.data, "  \"adapters\": [\n"
                                          "    {\"name\": \"a \\\"b\\\"\", \"scale\": 1.0, "
                                          "\"config_xxh3_128\": \""));
        qc_arena_init(&a);
        if (qc_manifest_parse(&m, &a, text.data, text.len, &err) != QC_OK)
            fail_msg("%s", err.msg);
        assert_int_equal(m.adapter_count, count);
        for (size_t k = 0; k < count; k++) {
            assert_string_equal(m.adapters[k].name, adapters[k].name);
            assert_true(m.adapters[k].scale == adapters[k].scale);
            assert_true(m.adapters[k].bytes == adapters[k].bytes);
            assert_true(qc_digest_equal(&m.adapters[k].config, &adapters[k].config));
            assert_true(qc_digest_equal(&m.adapters[k].weights, &adapters[k].weights));
        }
        assert_int_equal(m.placement.device_count, i % 2 ? 3 : 0);
        assert_true((m.calibration != NULL) == (s.m.calibration != NULL));
        write_text(&m, &again);
        assert_string_equal(text.data, again.data);
        qc_strbuf_deinit(&text);
        qc_strbuf_deinit(&again);
        qc_arena_deinit(&a);
    }
}

TEST(wrong_ones_are_refused)
{
    static const wrong_text cases[] = {
        {"\"version\": 4", "\"version\": 3", QC_ERR_INPUT, "calibrate"},
        {"\"version\": 4", "\"version\": 1", QC_ERR_INPUT, "'sources'"},
        {"\"version\": 4", "\"version\": 5", QC_ERR_UNSUPPORTED, "1 to 4"},
        {"\"adapters\": [", "\"adapters\": [], \"more\": [", QC_ERR_INPUT, "adapters is empty"},
        {"\"adapters\": [", "\"adapter\": [", QC_ERR_INPUT, "expected member 'adapters'"},
        {"\"scale\": 1.0", "\"scale\": 1.0, \"x\": 1", QC_ERR_INPUT, "'x'"},
        {"\"scale\": 1.0, ", "", QC_ERR_INPUT, "expected member 'scale'"},
        {"\"bytes\": 123456789", "\"bytes\": -1", QC_ERR_INPUT, "bytes"},
        {"\"a \\\"b\\\"\"", "\"\"", QC_ERR_INPUT, "adapters[0] has no name"},
    };
    sample s;
    qc_strbuf text;
    with_adapters(&s, 1, 0);
    write_text(&s.m, &text);
    assert_wrong(&text, cases, sizeof cases / sizeof *cases);
    qc_strbuf_deinit(&text);
}
