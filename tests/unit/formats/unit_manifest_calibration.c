/* formats/manifest.h: version 3, with calibrated weights */
#include "formats/manifest.h"
#include "tests/fixtures/manifest_sample.h"
#include "tests/fixtures/test.h"

static const qc_manifest_outputs outputs = {0.0123, 0.00456};

static void with_text(sample *s, qc_manifest_calibration *c, int placed)
{
    if (placed)
        make_placed_sample(s, 1);
    else
        make_sample(s, 1);
    *c = (qc_manifest_calibration){.text = "a \"text\".txt",
                                   .digest = digest_of("text"),
                                   .tokenizer = "bpe",
                                   .tokens = 131072,
                                   .windows = 64,
                                   .context = 2048,
                                   .damping = 0.01,
                                   .sided = "one"};
    s->m.calibration = c;
    s->tensors[1].outputs = &outputs;
}

TEST(a_text_is_read_back)
{
    for (int kind = 0; kind < 4; kind++) {
        const int placed = kind & 1, images = kind & 2;
        sample s;
        qc_manifest_calibration c;
        qc_strbuf text, again;
        qc_arena a;
        qc_manifest m;
        qc_error err = {0};
        with_text(&s, &c, placed);
        c.image_states = images ? "images.safetensors" : NULL;
        write_text(&s.m, &text);
        assert_non_null(strstr(text.data, "\"version\": 3,"));
        assert_non_null(strstr(text.data, "    ],\n"
                                          "    \"calibrate\": {\n"));
        assert_int_equal(strstr(text.data, "      \"image_states\": \"images.safetensors\",\n") !=
                             NULL,
                         images != 0);
        assert_non_null(strstr(text.data, "      \"text\": \"a \\\"text\\\".txt\",\n"));
        assert_non_null(strstr(text.data, "      \"tokenizer\": \"bpe\",\n"
                                          "      \"tokens\": 131072,\n"
                                          "      \"windows\": 64,\n"
                                          "      \"context\": 2048,\n"
                                          "      \"damping\": 0.01,\n"
                                          "      \"sided\": \"one\"\n"
                                          "    }\n"
                                          "  },\n"));
        assert_non_null(strstr(text.data, "\"max_err_index\": 77, \"calibrated\": {\"rounded\": "
                                          "0.0123, \"calibrated\": 0.00456}, \"source\": "));
        qc_arena_init(&a);
        if (qc_manifest_parse(&m, &a, text.data, text.len, &err) != QC_OK)
            fail_msg("%s", err.msg);
        assert_non_null(m.calibration);
        assert_string_equal(m.calibration->text, c.text);
        assert_null(m.calibration->hessians);
        assert_int_equal(m.calibration->image_states != NULL, images != 0);
        assert_true(qc_digest_equal(&m.calibration->digest, &c.digest));
        assert_string_equal(m.calibration->tokenizer, "bpe");
        assert_true(m.calibration->tokens == 131072 && m.calibration->windows == 64 &&
                    m.calibration->context == 2048 && m.calibration->damping == 0.01);
        assert_int_equal(m.placement.device_count, placed ? 3 : 0);
        for (size_t i = 0; i < m.tensor_count; i++) {
            if (i != 1)
                assert_null(m.tensors[i].outputs);
        }
        assert_true(m.tensors[1].outputs->rounded == outputs.rounded &&
                    m.tensors[1].outputs->calibrated == outputs.calibrated);
        write_text(&m, &again);
        assert_string_equal(text.data, again.data);
        qc_strbuf_deinit(&text);
        qc_strbuf_deinit(&again);
        qc_arena_deinit(&a);
    }
}

TEST(moments_are_read_back)
{
    sample s;
    qc_manifest_calibration c = {
        .hessians = "moments.safetensors", .damping = 0.05, .sided = "two"};
    qc_strbuf text;
    qc_manifest m;
    qc_error err = {0};
    make_sample(&s, 0);
    s.m.calibration = &c;
    write_text(&s.m, &text);
    assert_non_null(strstr(text.data, "    \"calibrate\": {\n"
                                      "      \"hessians\": \"moments.safetensors\",\n"
                                      "      \"damping\": 0.05,\n"
                                      "      \"sided\": \"two\"\n"
                                      "    }\n"));
    SCOPED(qc_arena) a = {0};
    assert_int_equal(qc_manifest_parse(&m, &a, text.data, text.len, &err), QC_OK);
    assert_string_equal(m.calibration->hessians, c.hessians);
    assert_null(m.calibration->text);
    assert_string_equal(m.calibration->sided, "two");
    qc_strbuf_deinit(&text);
}

TEST(wrong_ones_are_refused)
{
    static const wrong_text cases[] = {
        {"\"version\": 3", "\"version\": 1", QC_ERR_INPUT, "member 'calibrate' is not known"},
        {"\"calibrate\": {", "\"calibrate\": null, \"c\": {", QC_ERR_INPUT, "calibrate"},
        {"\"text\": ", "\"words\": ", QC_ERR_INPUT, "expected member 'text'"},
        {"\"tokens\": 131072", "\"tokens\": -1", QC_ERR_INPUT, "tokens"},
        {"\"damping\": 0.01", "\"damping\": -1", QC_ERR_INPUT,
         "damping: expected a finite number of 0 or more, found -1"},
        {"\"damping\": 0.01", "\"damping\": 0.01, \"more\": 1", QC_ERR_INPUT, "'more'"},
        {"\"sided\": \"one\"", "\"sided\": \"three\"", QC_ERR_INPUT, "sided"},
        {",\n      \"sided\": \"one\"", "", QC_ERR_INPUT, "sided"},
        {"\"rounded\": 0.0123", "\"rounded\": -1", QC_ERR_INPUT, "errors in outputs"},
        {"\"rounded\": 0.0123, ", "", QC_ERR_INPUT, "expected member 'rounded'"},
        {"\"calibrated\": 0.00456", "\"calibrated\": 0.00456, \"x\": 1", QC_ERR_INPUT, "'x'"},
    };
    sample s;
    qc_manifest_calibration c;
    qc_strbuf text;
    qc_error err = {0};
    with_text(&s, &c, 0);
    write_text(&s.m, &text);
    assert_wrong(&text, cases, sizeof cases / sizeof *cases);
    qc_strbuf_deinit(&text);
    c.tokenizer = NULL;
    qc_strbuf_init(&text, TEXT_MAX);
    assert_int_equal(qc_manifest_write(&s.m, &text, &err), QC_ERR_INPUT);
    qc_strbuf_deinit(&text);
}
