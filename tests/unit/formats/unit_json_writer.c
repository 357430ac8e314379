/* formats/json_writer.h */
#include "formats/json_strict.h"
#include "formats/json_writer.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

#include <inttypes.h>
#include <math.h>

static void write_sample(qc_json_writer *w)
{
    qc_json_begin_object(w, NULL);
    qc_json_begin_object(w, "empty object");
    qc_json_end(w);
    qc_json_begin_list(w, "empty list");
    qc_json_end(w);
    qc_json_begin_list(w, "scalars");
    qc_json_put_u64(w, NULL, 18446744073709551615u);
    qc_json_put_double(w, NULL, 6.0);
    qc_json_put_bool(w, NULL, 1);
    qc_json_put_bool(w, NULL, 0);
    qc_json_put_null(w, NULL);
    qc_json_put_text(w, NULL, NULL);
    qc_json_end(w);
    qc_json_begin_list(w, "rows");
    for (uint64_t i = 0; i < 2; i++) {
        qc_json_begin_row(w, NULL);
        qc_json_put_u64(w, "n", i);
        qc_json_begin_line(w, "list"); /* inside a row: nothing new */
        qc_json_begin_list(w, NULL);
        qc_json_end(w);
        qc_json_put_u64(w, NULL, 7);
        qc_json_end(w);
        qc_json_end(w);
    }
    qc_json_end(w);
    qc_json_end(w);
}

/* Made with json.dumps(indent=2), rows by hand. */
static const char sample[] = "{\n"
                             "  \"empty object\": {},\n"
                             "  \"empty list\": [],\n"
                             "  \"scalars\": [\n"
                             "    18446744073709551615,\n"
                             "    6.0,\n"
                             "    true,\n"
                             "    false,\n"
                             "    null,\n"
                             "    null\n"
                             "  ],\n"
                             "  \"rows\": [\n"
                             "    {\"n\": 0, \"list\": [[], 7]},\n"
                             "    {\"n\": 1, \"list\": [[], 7]}\n"
                             "  ]\n"
                             "}";

TEST(indents_as_python_does)
{
    qc_json_writer w;
    qc_error err = {0};
    qc_json *doc = NULL;
    SCOPED(qc_strbuf) b = {.max = 10000};
    qc_json_write_init(&w, &b, &err);
    write_sample(&w);
    assert_int_equal(qc_json_write_finish(&w), QC_OK);
    assert_string_equal(b.data, sample);
    assert_int_equal(qc_json_parse(&doc, b.data, b.len, 0, &err), QC_OK);
    qc_json_destroy(doc);
}

TEST(a_lone_value_is_a_text)
{
    qc_json_writer w;
    SCOPED(qc_strbuf) b = {.max = 100};
    qc_json_write_init(&w, &b, NULL);
    qc_json_put_text(&w, NULL, "x");
    assert_int_equal(qc_json_write_finish(&w), QC_OK);
    assert_string_equal(b.data, "\"x\"");
}

TEST(deep_levels_are_indented)
{
    qc_json_writer w;
    SCOPED(qc_strbuf) b = {.max = 10000};
    qc_json_write_init(&w, &b, NULL);
    for (int i = 0; i < 20; i++)
        qc_json_begin_list(&w, NULL);
    for (int i = 0; i < 20; i++)
        qc_json_end(&w);
    assert_int_equal(qc_json_write_finish(&w), QC_OK);
    char want[128];
    (void)snprintf(want, sizeof want, "\n%38s[]\n%36s]", "", "");
    assert_non_null(strstr(b.data, want));
}

/* As Python does, and what JSON would let stand but a terminal acts on. */
TEST(escapes_as_python_does)
{
    qc_json_writer w;
    SCOPED(qc_strbuf) b = {.max = 1000};
    qc_json_write_init(&w, &b, NULL);
    qc_json_put_text(&w, NULL,
                     "a\"b\\c/\b\f\n\r\t\x01\x1f\x7f\xc2\x9b\xe2\x80\xae \xc3\xa9 \xe2\x82\xac "
                     "\xf0\x9f\x98\x80");
    assert_int_equal(qc_json_write_finish(&w), QC_OK);
    assert_string_equal(b.data,
                        "\"a\\\"b\\\\c/\\b\\f\\n\\r\\t\\u0001\\u001f\\u007f\\u009b\\u202e \xc3\xa9 "
                        "\xe2\x82\xac \xf0\x9f\x98\x80\"");
}

TEST(paths_are_shown_whatever_they_hold)
{
    qc_json_writer w;
    SCOPED(qc_strbuf) b = {.max = 1000};
    qc_json_write_init(&w, &b, NULL);
    qc_json_put_path(&w, NULL, "a\xff/\xc3\xa9\xe2\x82\x1b");
    assert_int_equal(qc_json_write_finish(&w), QC_OK);
    assert_string_equal(b.data, "\"a\\ufffd/\xc3\xa9\\ufffd\\ufffd\\u001b\"");
}

TEST(refuses_what_is_not_utf8)
{
    static const char *const wrong[] = {"\x80",
                                        "\xc0\x80",
                                        "\xc1\xbf",
                                        "\xc3",
                                        "\xc3(",
                                        "\xe0\x9f\xbf",
                                        "\xed\xa0\x80",
                                        "\xe2\x82",
                                        "\xe2(\xac",
                                        "\xf0\x8f\xbf\xbf",
                                        "\xf4\x90\x80\x80",
                                        "\xf5\x80\x80\x80",
                                        "\xf0\x9f\x98",
                                        "\xf0\x9f(\x80",
                                        "\xff"};
    static const char *const right[] = {"\xc2\x80",         "\xdf\xbf",        "\xe0\xa0\x80",
                                        "\xed\x9f\xbf",     "\xef\xbf\xbf",    "\xf0\x90\x80\x80",
                                        "\xf4\x8f\xbf\xbf", "\xf1\x80\x80\x80"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        qc_strbuf b;
        qc_json_writer w;
        qc_error err = {0};
        qc_strbuf_init(&b, 1000);
        qc_json_write_init(&w, &b, &err);
        qc_json_put_text(&w, NULL, wrong[i]);
        qc_json_put_text(&w, NULL, "later calls do nothing");
        assert_int_equal(qc_json_write_finish(&w), QC_ERR_INPUT);
        assert_int_equal(err.code, QC_ERR_INPUT);
        qc_strbuf_deinit(&b);
    }
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        qc_strbuf b;
        qc_json_writer w;
        qc_strbuf_init(&b, 1000);
        qc_json_write_init(&w, &b, NULL);
        qc_json_put_text(&w, NULL, right[i]);
        assert_int_equal(qc_json_write_finish(&w), QC_OK);
        qc_strbuf_deinit(&b);
    }
}

TEST(refuses_numbers_json_has_not)
{
    static const double wrong[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (size_t i = 0; i < 3; i++) {
        qc_json_writer w;
        SCOPED(qc_strbuf) b = {.max = 1000};
        qc_json_write_init(&w, &b, NULL);
        qc_json_begin_list(&w, NULL);
        qc_json_put_double(&w, NULL, wrong[i]);
        qc_json_put_double(&w, NULL, wrong[i]);
        qc_json_end(&w);
        assert_int_equal(qc_json_write_finish(&w), QC_ERR_RANGE);
    }
}

TEST(a_failed_allocation_is_kept)
{
    EACH_ALLOCATION_FAILS (fault, 0) {
        SCOPED(qc_strbuf) b = {.max = 10000};
        qc_json_writer w;
        qc_json_write_init(&w, &b, NULL);
        write_sample(&w);
        fault.st = qc_json_write_finish(&w);
    }
}

/* tests/golden/gen_py_repr.py */
TEST(doubles_look_as_in_python)
{
    FILE *f = fopen(QC_TEST_GOLDEN "/py_repr.txt", "r");
    char want[64], have[QC_PY_REPR_BYTES];
    uint64_t bits = 0;
    int lines = 0;
    assert_non_null(f);
    while (fscanf(f, "%" SCNx64 " %63s", &bits, want) == 2) {
        double v;
        memcpy(&v, &bits, sizeof v);
        assert_int_equal(qc_py_repr_double(v, have), strlen(want));
        assert_string_equal(have, want);
        lines++;
    }
    (void)fclose(f);
    assert_true(lines > 400);
    assert_int_equal(qc_py_repr_double((double)NAN, have), 3);
    assert_string_equal(have, "nan");
    (void)qc_py_repr_double((double)INFINITY, have);
    assert_string_equal(have, "inf");
    (void)qc_py_repr_double(-(double)INFINITY, have);
    assert_string_equal(have, "-inf");
}

TEST(doubles_read_back)
{
    uint64_t bits = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        char text[QC_PY_REPR_BYTES];
        double v;
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        uint64_t b = i % 5 == 0 ? bits & 0xfff0000000000000u : bits; /* powers of two too */
        memcpy(&v, &b, sizeof v);
        if (!isfinite(v))
            continue;
        assert_true(qc_py_repr_double(v, text) < QC_PY_REPR_BYTES - 6);
        assert_true(strtod(text, NULL) == v);
    }
}
