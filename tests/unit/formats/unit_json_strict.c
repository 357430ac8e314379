/* formats/json_strict.h: what is JSON and what is not, typed access, splicing. */
#include "base/alloc.h"
#include "formats/json_strict.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

#include <float.h>
#include <math.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* The text in a block of exactly its size, so that a read behind it is seen by the sanitizer. */
static qc_status parse_exact(qc_json **doc, const char *text, size_t len, unsigned flags,
                             qc_error *err)
{
    char *copy = malloc(len ? len : 1);
    assert_non_null(copy);
    if (len)
        memcpy(copy, text, len);
    qc_status st = qc_json_parse(doc, copy, len, flags, err);
    free(copy);
    return st;
}

typedef struct {
    const char *text;
    size_t len; /* 0: strlen */
    const char *message;
} refused_case;

static const refused_case refused[] = {
    {"", 0, "JSON byte 0: expected a JSON value, found the end of the text"},
    {" \t\r\n", 0, "JSON byte 4: expected a JSON value, found the end of the text"},
    {"\xef\xbb\xbf{}", 0, "JSON byte 0: a byte order mark is not accepted"},
    {"{}x", 0, "JSON byte 2: expected the end of the text, found 'x'"},
    {"{} {}", 0, "JSON byte 3: expected the end of the text, found '{'"},
    {"{}\0", 3, "JSON byte 2: expected the end of the text, found byte 0x00"},
    {"{}\v", 0, "JSON byte 2: expected the end of the text, found byte 0x0b"},
    {"{", 0, "JSON byte 1: expected a key in quotes, found the end of the text"},
    {"}", 0, "JSON byte 0: expected a JSON value, found '}'"},
    {"[", 0, "JSON byte 1: expected a JSON value, found the end of the text"},
    {"[1,]", 0, "JSON byte 3: expected a JSON value, found ']'"},
    {"[1 2]", 0, "JSON byte 3: expected ',' or ']', found '2'"},
    {"[1", 0, "JSON byte 2: expected ',' or ']', found the end of the text"},
    {"[,1]", 0, "JSON byte 1: expected a JSON value, found ','"},
    {"{\"a\":1,}", 0, "JSON byte 7: expected a key in quotes, found '}'"},
    {"{\"a\" 1}", 0, "JSON byte 5: expected ':' after a key, found '1'"},
    {"{\"a\"", 0, "JSON byte 4: expected ':' after a key, found the end of the text"},
    {"{\"a\":}", 0, "JSON byte 5: expected a JSON value, found '}'"},
    {"{\"a\":1", 0, "JSON byte 6: expected ',' or '}', found the end of the text"},
    {"{\"a\":1 \"b\":2}", 0, "JSON byte 7: expected ',' or '}', found '\"'"},
    {"{a:1}", 0, "JSON byte 1: expected a key in quotes, found 'a'"},
    {"{'a':1}", 0, "JSON byte 1: expected a key in quotes, found '''"},
    {"{1:1}", 0, "JSON byte 1: expected a key in quotes, found '1'"},
    {"// x\n1", 0, "JSON byte 0: expected a JSON value, found '/'"},
    /* words */
    {"nul", 0, "JSON byte 0: expected a JSON value, found 'n'"},
    {"True", 0, "JSON byte 0: expected a JSON value, found 'T'"},
    {"tru3", 0, "JSON byte 0: expected a JSON value, found 't'"},
    {"falsy", 0, "JSON byte 0: expected a JSON value, found 'f'"},
    {"nullx", 0, "JSON byte 4: expected the end of the text, found 'x'"},
    {"NaN", 0, "JSON byte 0: expected a JSON value, found 'N'"},
    {"[NaN]", 0, "JSON byte 1: expected a JSON value, found 'N'"},
    {"Infinity", 0, "JSON byte 0: expected a JSON value, found 'I'"},
    {"-Infinity", 0, "JSON byte 1: expected a digit, found 'I'"},
    /* numbers */
    {"01", 0, "JSON byte 1: expected the end of the text, found '1'"},
    {"-", 0, "JSON byte 1: expected a digit, found the end of the text"},
    {"-01", 0, "JSON byte 2: expected the end of the text, found '1'"},
    {"+1", 0, "JSON byte 0: expected a JSON value, found '+'"},
    {".5", 0, "JSON byte 0: expected a JSON value, found '.'"},
    {"1.", 0,
     "JSON byte 2: expected a digit after the decimal point, found the end of the "
     "text"},
    {"1.e3", 0, "JSON byte 2: expected a digit after the decimal point, found 'e'"},
    {"1e", 0, "JSON byte 2: expected a digit in the exponent, found the end of the text"},
    {"1e+", 0, "JSON byte 3: expected a digit in the exponent, found the end of the text"},
    {"1ex", 0, "JSON byte 2: expected a digit in the exponent, found 'x'"},
    {"0x10", 0, "JSON byte 1: expected the end of the text, found 'x'"},
    {"1e400", 0, "JSON byte 0: a number is beyond the range of a double"},
    {"[-1E+999]", 0, "JSON byte 1: a number is beyond the range of a double"},
    {"1234567890123456789012345678901234567890123456789012345678901234", 0,
     "JSON byte 0: a number has more than 63 characters"},
    /* strings */
    {"\"", 0, "JSON byte 0: a string begins here and does not end"},
    {"\"abc", 0, "JSON byte 0: a string begins here and does not end"},
    {"\"\\\"", 0, "JSON byte 0: a string begins here and does not end"},
    {"\"\\", 0, "JSON byte 2: expected the rest of an escape, found the end of the text"},
    {"\"\\x\"", 0, "JSON byte 2: expected an escape, found 'x'"},
    {"\"\\\0\"", 4, "JSON byte 2: expected an escape, found byte 0x00"},
    {"\"\\u12\"", 0, "JSON byte 1: \\u is not followed by four hexadecimal digits"},
    {"\"\\u", 0, "JSON byte 1: \\u is not followed by four hexadecimal digits"},
    {"\"\\u12g4\"", 0, "JSON byte 1: \\u is not followed by four hexadecimal digits"},
    {"\"\\u0000\"", 0, "JSON byte 1: \\u0000 is not accepted in a string"},
    {"{\"k\\u0000x\":1}", 0, "JSON byte 3: \\u0000 is not accepted in a string"},
    {"\"\\ud800\"", 0, "JSON byte 1: one half of a surrogate pair stands without the other"},
    {"\"\\udc00\"", 0, "JSON byte 1: one half of a surrogate pair stands without the other"},
    {"\"\\ud800\\ud800\"", 0, "JSON byte 1: one half of a surrogate pair stands without the other"},
    {"\"\\ud800\\n12345\"", 0,
     "JSON byte 1: one half of a surrogate pair stands without the other"},
    {"\"\\ud800\\u00zz\"", 0, "JSON byte 1: one half of a surrogate pair stands without the other"},
    {"\"\\ud800x12345\"", 0, "JSON byte 1: one half of a surrogate pair stands without the other"},
    {"\"\\ud800\\ue000\"", 0, "JSON byte 1: one half of a surrogate pair stands without the other"},
    {"\"\n\"", 0, "JSON byte 1: no control character may stand in a string, found byte 0x0a"},
    {"\"a\0b\"", 5, "JSON byte 2: no control character may stand in a string, found byte 0x00"},
    /* UTF-8 */
    {"\xff", 0, "JSON byte 0: expected a JSON value, found byte 0xff"},
    {"\"\x80\"", 0, "JSON byte 1: the text is not valid UTF-8"},
    {"\"\xc0\xaf\"", 0, "JSON byte 1: the text is not valid UTF-8"}, /* overlong '/' */
    {"\"\xc1\xbf\"", 0, "JSON byte 1: the text is not valid UTF-8"}, /* overlong */
    {"\"\xc3\"", 0, "JSON byte 1: the text is not valid UTF-8"},     /* cut by the quote */
    {"\"\xc3", 0, "JSON byte 1: the text is not valid UTF-8"},       /* cut by the end */
    {"\"\xc3\xc3\"", 0, "JSON byte 1: the text is not valid UTF-8"},
    {"\"\xe0\x9f\x80\"", 0, "JSON byte 1: the text is not valid UTF-8"}, /* overlong */
    {"\"\xed\xa0\x80\"", 0, "JSON byte 1: the text is not valid UTF-8"}, /* U+D800 */
    {"\"\xe2\x82\"", 0, "JSON byte 1: the text is not valid UTF-8"},
    {"\"\xe2\x82\xff\"", 0, "JSON byte 1: the text is not valid UTF-8"},
    {"\"\xf0\x8f\xbf\xbf\"", 0, "JSON byte 1: the text is not valid UTF-8"}, /* overlong */
    {"\"\xf4\x90\x80\x80\"", 0, "JSON byte 1: the text is not valid UTF-8"}, /* U+110000 */
    {"\"\xf5\x80\x80\x80\"", 0, "JSON byte 1: the text is not valid UTF-8"},
    {"\"\xf0\x9f\x98\x01\"", 0, "JSON byte 1: the text is not valid UTF-8"},
    /* duplicates */
    {"{\"a\":1,\"a\":2}", 0,
     "JSON byte 7: key 'a' appears a second time in one object (first at byte 1)"},
    {"{\"a\":1,\"\\u0061\":2}", 0,
     "JSON byte 7: key 'a' appears a second time in one object (first at byte 1)"},
    {"{\"\\ud83d\\ude00\":1,\"\xf0\x9f\x98\x80\":2}", 0,
     "JSON byte 18: key '\xf0\x9f\x98\x80' appears a second time in one object (first at byte 1)"},
    {"{\"b\":{\"y\":0,\"x\":1,\"y\":2},\"a\":2}", 0,
     "JSON byte 18: key 'y' appears a second time in one object (first at byte 6)"},
    {"{\"\\u20ac\":1,\"\xe2\x82\xac\":2}", 0,
     "JSON byte 12: key '\xe2\x82\xac' appears a second time in one object (first at byte 1)"},
    {"{\"\":1,\"\":1}", 0,
     "JSON byte 6: key '' appears a second time in one object (first at byte 1)"},
    {"{\"\\n\":1,\"b\":2,\"\\u000a\":1}", 0,
     "JSON byte 14: key '?' appears a second time in one object (first at byte 1)"},
};

TEST(refuses_what_is_no_json)
{
    for (size_t i = 0; i < COUNT(refused); i++) {
        qc_json *doc = (void *)1;
        qc_error err = {0};
        size_t len = refused[i].len ? refused[i].len : strlen(refused[i].text);
        qc_status st = parse_exact(&doc, refused[i].text, len, 0, &err);
        if (st != QC_ERR_INPUT || strcmp(err.msg, refused[i].message) != 0)
            fail_msg("case %zu '%s': %s '%s', expected '%s'", i, refused[i].text,
                     qc_status_name(st), err.msg, refused[i].message);
        assert_null(doc);
    }
}

static const struct {
    const char *text;
    qc_json_kind kind;
} accepted[] = {
    {"null", QC_JSON_NULL},
    {" true ", QC_JSON_BOOL},
    {"\tfalse\r\n", QC_JSON_BOOL},
    {"0", QC_JSON_NUMBER},
    {"-0", QC_JSON_NUMBER},
    {"-0.0e-0", QC_JSON_NUMBER},
    {"1E+2", QC_JSON_NUMBER},
    {"1e-999", QC_JSON_NUMBER},
    {"123456789012345678901234567890123456789012345678901234567890123", QC_JSON_NUMBER},
    {"\"\"", QC_JSON_STRING},
    {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\uFFFF\"", QC_JSON_STRING},
    {"\"\\ud83d\\uDE00 \xf0\x9f\x98\x80 \xc3\xa9 \xe2\x82\xac \xed\x9f\xbf \x7f\"", QC_JSON_STRING},
    {"\"\xe0\xa0\x80 \xf0\x90\x80\x80 \xf4\x8f\xbf\xbf \xc2\x80 \xdf\xbf \xef\xbf\xbf\"",
     QC_JSON_STRING},
    {"[]", QC_JSON_ARRAY},
    {"[ ]", QC_JSON_ARRAY},
    {"[[],{},[ 1 , 2 ]]", QC_JSON_ARRAY},
    {"{}", QC_JSON_OBJECT},
    {"{ }", QC_JSON_OBJECT},
    {"{\"A\":1,\"a\":2}", QC_JSON_OBJECT},
    {"{\"b\":1,\"a\":{\"b\":2},\"c\":{\"b\":3}}", QC_JSON_OBJECT},
    {"{\"ab\":1,\"a\":2,\"\":3,\"abc\":4}", QC_JSON_OBJECT},
};

TEST(accepts_what_is_json)
{
    for (size_t i = 0; i < COUNT(accepted); i++) {
        qc_json *doc = NULL;
        qc_error err = {0};
        qc_status st = parse_exact(&doc, accepted[i].text, strlen(accepted[i].text), 0, &err);
        if (st != QC_OK)
            fail_msg("case %zu '%s': %s", i, accepted[i].text, err.msg);
        assert_int_equal(qc_json_kind_of(qc_json_root(doc)), accepted[i].kind);
        qc_json_destroy(doc);
    }
}

/* Every proper prefix of a text is no text (it ends in a bracket, so none can be a whole value). */
TEST(refuses_every_truncation)
{
    static const char text[] = "{\"a\\u00e9\\ud83d\\ude00\":[1,-2.5e+3,\"x\\n\xc3\xa9\",true,false,"
                               "null,{\"b\":{}}],\"c\":\"\xf0\x9f\x98\x80\"}";
    qc_json *doc = NULL;
    assert_int_equal(parse_exact(&doc, text, sizeof text - 1, 0, NULL), QC_OK);
    qc_json_destroy(doc);
    for (size_t n = 0; n < sizeof text - 1; n++) {
        qc_error err = {0};
        assert_int_equal(parse_exact(&doc, text, n, 0, &err), QC_ERR_INPUT);
        assert_non_null(strstr(err.msg, "JSON byte "));
        assert_null(doc);
    }
}

TEST(limits_nesting_to_64)
{
    char text[200];
    for (size_t depth = 63; depth <= 66; depth++) {
        for (int object = 0; object < 2; object++) {
            qc_json *doc = NULL;
            qc_error err = {0};
            size_t n = 0;
            for (size_t i = 0; i + 1 < depth; i++)
                text[n++] = '[';
            text[n++] = object ? '{' : '[';
            text[n++] = object ? '}' : ']';
            for (size_t i = 0; i + 1 < depth; i++)
                text[n++] = ']';
            qc_status st = parse_exact(&doc, text, n, 0, &err);
            assert_int_equal(st, depth <= 64 ? QC_OK : QC_ERR_INPUT);
            if (st != QC_OK)
                assert_string_equal(
                    err.msg, "JSON byte 64: arrays and objects are nested more than 64 deep");
            qc_json_destroy(doc);
        }
    }
}

TEST(limits_values_by_length)
{
    size_t n = 6u << 20;
    qc_json *doc = NULL;
    qc_error err = {0};
    char *text = malloc(n);
    assert_non_null(text);
    for (size_t i = 0; i < n; i++)
        text[i] = i % 2 ? ',' : '0';
    text[0] = '[';
    text[1] = '0';
    for (size_t i = 2; i < n; i++)
        text[i] = i % 2 ? '0' : ',';
    text[n - 1] = ']';
    text[n - 2] = '0';
    text[n - 3] = ' ';
    assert_int_equal(qc_json_parse(&doc, text, n, 0, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "there are more values than a text of this length may hold"));
    free(text);
}

TEST(integers_only_when_asked)
{
    static const struct {
        const char *text;
        const char *message; /* NULL: accepted */
    } cases[] = {
        {"[0,-0,1,-1,9007199254740991,-9007199254740991]", NULL},
        {"9007199254740992", "JSON byte 0: an integer is beyond 2^53 - 1"},
        {"[-9007199254740992]", "JSON byte 1: an integer is beyond 2^53 - 1"},
        {"18446744073709551616", "JSON byte 0: an integer is beyond 2^53 - 1"},
        {"99999999999999999999999999999999999999", "JSON byte 0: an integer is beyond 2^53 - 1"},
        {"1.0",
         "JSON byte 0: a number has a fraction or an exponent where only integers are accepted"},
        {"{\"a\":1e2}",
         "JSON byte 5: a number has a fraction or an exponent where only integers are accepted"},
        {"\"1.5\"", NULL},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_json *doc = NULL;
        qc_error err = {0};
        qc_status st =
            parse_exact(&doc, cases[i].text, strlen(cases[i].text), QC_JSON_INTEGERS, &err);
        assert_int_equal(st, cases[i].message ? QC_ERR_INPUT : QC_OK);
        if (cases[i].message)
            assert_string_equal(err.msg, cases[i].message);
        qc_json_destroy(doc);
    }
}

TEST(takes_what_python_writes_when_asked)
{
    static const char text[] = "{\"a\": [0.0, Infinity, -Infinity, NaN, -1, 7], \"b\":NaN}";
    static const char *const still_refused[] = {"nan",     "Inf",        "-NaN",      "NaNN",
                                                "Infinit", "-Infinity1", "+Infinity", "[NaN 1]",
                                                "{NaN:1}", "-"};
    qc_json *doc = NULL;
    uint64_t u = 0;
    double d = 0.0;
    qc_error err = {0};
    qc_strbuf out;
    assert_int_equal(parse_exact(&doc, text, sizeof text - 1, 0, &err), QC_ERR_INPUT);
    assert_int_equal(parse_exact(&doc, text, sizeof text - 1, QC_JSON_PYTHON, &err), QC_OK);
    const qc_json_node *n = qc_json_first(qc_json_get(qc_json_root(doc), "a"));
    assert_int_equal(qc_json_as_double(n, "x", &d, &err), QC_OK);
    for (int i = 0; i < 3; i++) {
        static const char *const shown[] = {"inf", "-inf", "nan"};
        char expected[100];
        n = qc_json_next(n);
        assert_int_equal(qc_json_kind_of(n), QC_JSON_NUMBER);
        assert_int_equal(qc_json_as_u64(n, "x", &u, &err), QC_ERR_INPUT);
        assert_int_equal(qc_json_as_double(n, "x", &d, &err), QC_ERR_INPUT);
        (void)snprintf(expected, sizeof expected, "x is %s; expected a finite number", shown[i]);
        assert_string_equal(err.msg, expected);
    }
    n = qc_json_next(n);
    assert_int_equal(qc_json_as_double(n, "x", &d, &err), QC_OK);
    assert_true(d < -0.5);
    assert_int_equal(qc_json_as_u64(qc_json_next(n), "x", &u, &err), QC_OK);
    assert_true(u == 7);
    qc_json_destroy(doc);
    for (size_t i = 0; i < COUNT(still_refused); i++)
        assert_int_equal(
            parse_exact(&doc, still_refused[i], strlen(still_refused[i]), QC_JSON_PYTHON, &err),
            QC_ERR_INPUT);
    qc_strbuf_init(&out, 1000);
    qc_strbuf_puts(&out, text);
    assert_int_equal(qc_json_splice(&out, NULL, "q", "1", &err), QC_OK);
    assert_string_equal(out.data,
                        "{\"a\": [0.0, Infinity, -Infinity, NaN, -1, 7], \"b\":NaN, \"q\": 1}");
    qc_strbuf_deinit(&out);
    for (uint64_t at = 1; at <= 2; at++) {
        qc_alloc_fail_at(at, 1);
        qc_status st = qc_json_parse(&doc, text, sizeof text - 1, QC_JSON_PYTHON, &err);
        qc_alloc_fail_at(0, 0);
        assert_int_equal(st, QC_ERR_NOMEM);
    }
}

TEST(gives_typed_access)
{
    static const char text[] =
        "{\"s\":\"h\\u00e9\\ud83d\\ude00\",\"i\":42,\"max\":9007199254740991,\"over\":"
        "9007199254740993,\"neg\":-1,\"mz\":-0,\"f\":4.0,\"e\":1e3,\"t\":true,\"n\":null,"
        "\"A\":\"upper\",\"arr\":[7,8.5,\"x\"],\"o\":{\"i\":1},\"b\":false,\"a\":\"lower\"}";
    qc_json *doc = NULL;
    const char *s = NULL;
    uint64_t u = 0;
    double d = 0.0;
    int b = -1;
    qc_error err = {0};
    assert_int_equal(parse_exact(&doc, text, sizeof text - 1, 0, &err), QC_OK);
    const qc_json_node *r = qc_json_root(doc);

    assert_int_equal(qc_json_as_string(qc_json_get(r, "s"), "s", &s, &err), QC_OK);
    assert_string_equal(s, "h\xc3\xa9\xf0\x9f\x98\x80");
    assert_int_equal(qc_json_as_u64(qc_json_get(r, "i"), "i", &u, &err), QC_OK);
    assert_true(u == 42);
    assert_int_equal(qc_json_as_u64(qc_json_get(r, "max"), "max", &u, &err), QC_OK);
    assert_true(u == 9007199254740991u);
    assert_int_equal(qc_json_as_u64(qc_json_get(qc_json_get(r, "o"), "i"), "i", &u, &err), QC_OK);
    assert_true(u == 1);
    static const char *const no_u64[] = {"over", "neg", "mz", "f", "e"};
    for (size_t i = 0; i < COUNT(no_u64); i++) {
        assert_int_equal(qc_json_as_u64(qc_json_get(r, no_u64[i]), "it", &u, &err), QC_ERR_INPUT);
        assert_non_null(strstr(err.msg, "an integer of 0 to 2^53 - 1 written as digits"));
    }
    assert_int_equal(qc_json_as_double(qc_json_get(r, "f"), "f", &d, &err), QC_OK);
    assert_true(d >= 4.0 && d <= 4.0);
    assert_int_equal(qc_json_as_double(qc_json_get(r, "neg"), "neg", &d, &err), QC_OK);
    assert_true(d >= -1.0 && d <= -1.0);
    assert_int_equal(qc_json_as_bool(qc_json_get(r, "t"), "t", &b, &err), QC_OK);
    assert_int_equal(b, 1);
    assert_int_equal(qc_json_as_bool(qc_json_get(r, "b"), "b", &b, &err), QC_OK);
    assert_int_equal(b, 0);

    /* Not "A" for "a", nor what stands beside nothing. */
    assert_string_equal(qc_json_string_or(qc_json_get(r, "a"), ""), "lower");
    assert_string_equal(qc_json_string_or(qc_json_get(r, "A"), ""), "upper");
    assert_null(qc_json_get(r, "S"));
    assert_null(qc_json_get(NULL, "s"));
    assert_null(qc_json_get(qc_json_get(r, "arr"), "x"));
    assert_string_equal(qc_json_string_or(qc_json_get(r, "i"), "other"), "other");
    assert_string_equal(qc_json_string_or(NULL, "other"), "other");
    assert_int_equal(qc_json_bool_or(qc_json_get(r, "t"), 0), 1);
    assert_int_equal(qc_json_bool_or(qc_json_get(r, "i"), 7), 7);
    assert_int_equal(qc_json_bool_or(NULL, 7), 7);

    assert_int_equal(qc_json_as_string(NULL, "model_type", &s, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "model_type is missing; expected a string");
    assert_int_equal(qc_json_as_string(qc_json_get(r, "n"), "n", &s, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "n is of kind null; expected a string");
    assert_int_equal(qc_json_as_u64(qc_json_get(r, "o"), "o", &u, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "o is of kind object; expected a number");
    assert_int_equal(qc_json_as_double(qc_json_get(r, "arr"), "arr", &d, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "arr is of kind array; expected a number");
    assert_int_equal(qc_json_as_bool(qc_json_get(r, "s"), "s", &b, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "s is of kind string; expected a boolean");

    /* order of members and elements */
    const qc_json_node *m = qc_json_first(r);
    assert_string_equal(qc_json_key(m), "s");
    assert_string_equal(qc_json_key(qc_json_next(m)), "i");
    const qc_json_node *e = qc_json_first(qc_json_get(r, "arr"));
    assert_int_equal(qc_json_as_u64(e, "e", &u, &err), QC_OK);
    assert_true(u == 7);
    assert_int_equal(qc_json_kind_of(qc_json_next(qc_json_next(e))), QC_JSON_STRING);
    assert_null(qc_json_next(qc_json_next(qc_json_next(e))));
    qc_json_destroy(doc);
    qc_json_destroy(NULL);
}

TEST(quotes_as_serde_json)
{
    qc_strbuf out;
    qc_strbuf_init(&out, 1000);
    qc_json_quote(&out, "a\"\\/\b\f\n\r\t\x01\x1f\x7f\xc3\xa9z", 15);
    assert_string_equal(out.data, "\"a\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\xc3\xa9z\"");
    out.len = 0;
    qc_json_quote(&out, "\0", 1);
    assert_string_equal(out.data, "\"\\u0000\"");
    out.len = 0;
    qc_json_quote(&out, "", 0);
    assert_string_equal(out.data, "\"\"");
    qc_strbuf_deinit(&out);
    /* a buffer that is too small fails at every place */
    for (size_t max = 0; max < 13; max++) {
        qc_strbuf_init(&out, max);
        qc_json_quote(&out, "ab\n\x01zz", 6);
        assert_int_equal(qc_strbuf_status(&out, NULL), QC_ERR_NOMEM);
        qc_strbuf_deinit(&out);
    }
}

typedef struct {
    const char *text;
    const char *key;
    const char *value; /* NULL: remove */
    const char *result;
} splice_case;

static const splice_case splices[] = {
    /* replace in place, byte for byte around it */
    {"{\n  \"a\": 1.50,\n  \"b\": 2\n}\n", "a", "\"x\"", "{\n  \"a\": \"x\",\n  \"b\": 2\n}\n"},
    {"{\"a\":{\"x\":[1,\"}\"]},\"b\":2}", "a", "null", "{\"a\":null,\"b\":2}"},
    {"{\"a\":1 , \"b\" : \"q\\\"}\" }", "b", "3", "{\"a\":1 , \"b\" : 3 }"},
    {"{\"x\":true,\"a\":false}", "x", "1", "{\"x\":1,\"a\":false}"},
    {"{\"\\u0061\": 1}", "a", "2", "{\"\\u0061\": 2}"},
    /* only the top level counts */
    {"{\"o\": {\"a\": 1}, \"b\": 2}", "a", "3", "{\"o\": {\"a\": 1}, \"b\": 2, \"a\": 3}"},
    /* add last */
    {"{\n  \"a\": 1\n}", "q", "{}", "{\n  \"a\": 1,\n  \"q\": {}\n}"},
    {"{\n    \"a\" : [1,\n 2]\n}\n", "q", "5", "{\n    \"a\" : [1,\n 2],\n    \"q\" : 5\n}\n"},
    {"{\"a\":1,\"b\":2}", "q", "5", "{\"a\":1,\"b\":2,\"q\":5}"},
    {"{\"a\":1, \"b\":2}", "q", "5", "{\"a\":1, \"b\":2, \"q\":5}"},
    {"{\"a\": 1}", "q", "5", "{\"a\": 1, \"q\": 5}"},
    {"{\"a\":1}", "q", "5", "{\"a\":1,\"q\":5}"},
    {"{ \"a\": 1 }", "q", "5", "{ \"a\": 1, \"q\": 5 }"},
    {"{}", "q\"", "5", "{\n  \"q\\\"\": 5\n}"},
    {" { \n } ", "q", "5", " {\n  \"q\": 5\n} "},
    /* remove */
    {"{\n  \"a\": 1,\n  \"b\": 2,\n  \"c\": 3\n}", "a", NULL, "{\n  \"b\": 2,\n  \"c\": 3\n}"},
    {"{\n  \"a\": 1,\n  \"b\": 2,\n  \"c\": 3\n}", "b", NULL, "{\n  \"a\": 1,\n  \"c\": 3\n}"},
    {"{\n  \"a\": 1,\n  \"b\": 2,\n  \"c\": 3\n}", "c", NULL, "{\n  \"a\": 1,\n  \"b\": 2\n}"},
    {"{\n  \"a\": 1\n}", "a", NULL, "{}"},
    {"{\"a\":1,\"b\":2}", "z", NULL, "{\"a\":1,\"b\":2}"},
    {"{}", "z", NULL, "{}"},
};

TEST(splices_one_member)
{
    for (size_t i = 0; i < COUNT(splices); i++) {
        qc_json *doc = NULL;
        const char *key = splices[i].key, *value = splices[i].value;
        SCOPED(qc_strbuf) out = {.max = 1000};
        qc_strbuf_puts(&out, splices[i].text);
        assert_int_equal(qc_json_splice(&out, NULL, key, value, NULL), QC_OK);
        if (strcmp(out.data, splices[i].result) != 0)
            fail_msg("case %zu: '%s', expected '%s'", i, out.data, splices[i].result);
        assert_int_equal(qc_json_parse(&doc, out.data, out.len, 0, NULL), QC_OK);
        assert_int_equal(qc_json_get(qc_json_root(doc), key) != NULL, value != NULL);
        qc_json_destroy(doc);
        /* a buffer that is too small fails at every place, and keeps its text */
        for (size_t max = strlen(splices[i].text); max < strlen(splices[i].result); max++) {
            SCOPED(qc_strbuf) small = {.max = max};
            qc_strbuf_puts(&small, splices[i].text);
            assert_int_equal(qc_json_splice(&small, NULL, key, value, NULL), QC_ERR_NOMEM);
            assert_string_equal(small.data, splices[i].text);
        }
    }
}

TEST(splices_inside_a_member)
{
    static const splice_case cases[] = {
        {"{\n  \"o\": {\n    \"a\": 1\n  }\n}", "b", "2",
         "{\n  \"o\": {\n    \"a\": 1,\n    \"b\": 2\n  }\n}"},
        {"{\"a\": 0, \"o\": {\"a\": 1}}", "a", "[]", "{\"a\": 0, \"o\": {\"a\": []}}"},
        {"{\"o\": {\"a\": 1, \"b\": 2}, \"b\": 3}", "b", NULL, "{\"o\": {\"a\": 1}, \"b\": 3}"},
    };
    qc_error err = {0};
    for (size_t i = 0; i < COUNT(cases); i++) {
        SCOPED(qc_strbuf) out = {.max = 1000};
        qc_strbuf_puts(&out, cases[i].text);
        assert_int_equal(qc_json_splice(&out, "o", cases[i].key, cases[i].value, NULL), QC_OK);
        assert_string_equal(out.data, cases[i].result);
    }
    SCOPED(qc_strbuf) out = {.max = 1000};
    qc_strbuf_puts(&out, "{\"o\": 1}");
    assert_int_equal(qc_json_splice(&out, "o", "a", "1", &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "o is of kind number; expected an object");
    assert_int_equal(qc_json_splice(&out, "p", "a", "1", &err), QC_ERR_INPUT);
    assert_string_equal(out.data, "{\"o\": 1}");
}

TEST(splice_needs_an_object)
{
    qc_error err = {0};
    SCOPED(qc_strbuf) out = {.max = 1000};
    qc_strbuf_puts(&out, "[1]");
    assert_int_equal(qc_json_splice(&out, NULL, "a", "1", &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, "JSON text is of kind array; expected an object");
    out.len = 0;
    qc_strbuf_puts(&out, "{");
    assert_int_equal(qc_json_splice(&out, NULL, "a", "1", &err), QC_ERR_INPUT);
    assert_string_equal(out.data, "{");
}

TEST(survives_every_failed_allocation)
{
    /* Two escaped keys and enough members and numbers to grow every array. */
    char text[16000];
    size_t n = 0;
    n += (size_t)snprintf(text, sizeof text, "{\"\\u00e9\":1,\"\\n\":2");
    for (int i = 0; i < 300; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, ",\"k%03d\":%d", i, i);
    n += (size_t)snprintf(text + n, sizeof text - n, ",\"b\":1}");
    for (int persistent = 0; persistent < 2; persistent++) {
        EACH_ALLOCATION_FAILS (fault, persistent) {
            qc_json *doc = NULL;
            fault.st = qc_json_parse(&doc, text, n, 0, NULL);
            assert_true(fault.st == QC_OK || !doc);
            qc_json_destroy(doc);
        }
    }
}
