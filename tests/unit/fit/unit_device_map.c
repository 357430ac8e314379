#include "convert/fit/device_map.h"
#include "formats/json_strict.h"
#include "tests/fixtures/fit_report_fixture.h"
#include "tests/fixtures/test.h"

TEST(whole)
{
    fit_fixture f;
    SCOPED(qc_arena) arena = {0};
    SCOPED(qc_strbuf) out = {.max = 10000};
    fit_fixture_make(&f, &arena);
    assert_int_equal(qc_device_map_text(&out, &arena, &f.fit, NULL), QC_OK);
    assert_string_equal(out.data, "{\n"
                                  "  \"lm_head\": \"cpu\",\n"
                                  "  \"model.embed_tokens\": 0,\n"
                                  "  \"model.layers.0\": 0,\n"
                                  "  \"model.layers.1\": 0,\n"
                                  "  \"model.layers.10\": 1,\n"
                                  "  \"model.norm\": 1\n"
                                  "}\n");
}

/* Layer 10 after layer 2, not between 1 and 2. */
TEST(natural_order)
{
    fit_fixture f;
    static const char *two[] = {"model.layers.2", "model.a.b"};
    SCOPED(qc_arena) arena = {0};
    SCOPED(qc_strbuf) out = {.max = 10000};
    fit_fixture_make(&f, &arena);
    f.segments[1].modules = two;
    f.segments[1].module_count = 2;
    f.devices[2].tier = QC_TIER_DISK;
    assert_int_equal(qc_device_map_text(&out, &arena, &f.fit, NULL), QC_OK);
    const char *two_at = strstr(out.data, "model.layers.2\""), *ten = strstr(out.data, "layers.10");
    assert_non_null(strstr(out.data, "\"model.a.b\": 0"));
    assert_non_null(strstr(out.data, "\"lm_head\": \"disk\""));
    assert_true(two_at && ten && two_at < ten);
}

TEST(twice)
{
    fit_fixture f;
    qc_error err = {0};
    SCOPED(qc_arena) arena = {0};
    SCOPED(qc_strbuf) out = {.max = 10000};
    fit_fixture_make(&f, &arena);
    f.segments[1].modules = f.segments[0].modules;
    assert_int_equal(qc_device_map_text(&out, &arena, &f.fit, &err), QC_ERR_INTERNAL);
    assert_string_equal(err.msg, "the module 'model.embed_tokens' lies in two segments");
}

TEST(renamed)
{
    static const char *old[4] = {"language_model.model.layers.0", "language_model.lm_head",
                                 "vision_model", "multi_modal_projector"};
    static const char *const want[] = {"\"language_model.model.layers.0\": 0",
                                       "\"model.language_model.layers.0\": 0",
                                       "\"language_model.lm_head\": 0",
                                       "\"lm_head\": 0",
                                       "\"vision_model\": 0",
                                       "\"model.vision_model\": 0",
                                       "\"multi_modal_projector\": 0",
                                       "\"model.multi_modal_projector\": 0"};
    fit_fixture f;
    SCOPED(qc_arena) arena = {0};
    SCOPED(qc_strbuf) out = {.max = 10000};
    fit_fixture_make(&f, &arena);
    f.map.count = 1;
    f.segments[0].modules = old;
    f.segments[0].module_count = 4;
    assert_int_equal(qc_device_map_text(&out, &arena, &f.fit, NULL), QC_OK);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        assert_non_null(strstr(out.data, want[i]));
}

TEST(nothing)
{
    fit_fixture f;
    SCOPED(qc_arena) arena = {0};
    SCOPED(qc_strbuf) out = {.max = 10000};
    fit_fixture_make(&f, &arena);
    f.map.count = 0;
    assert_int_equal(qc_device_map_text(&out, &arena, &f.fit, NULL), QC_OK);
    assert_string_equal(out.data, "{}\n");
}
