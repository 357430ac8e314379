/* formats/json_cut.h */
#include "formats/json_cut.h"
#include "formats/json_strict.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

/* The parts, each parsed strictly and written with a letter before and '|' behind. */
typedef struct {
    char text[2000];
    qc_status refuse; /* given back for the second element */
    unsigned elements;
} seen;

static qc_status note(seen *s, char letter, const char *text, size_t len, qc_error *err)
{
    qc_json *doc = NULL;
    size_t at = strlen(s->text);
    QC_TRY(qc_json_parse(&doc, text, len, 0, err));
    qc_json_destroy(doc);
    (void)snprintf(s->text + at, sizeof s->text - at, "%c%.*s|", letter, (int)len, text);
    return QC_OK;
}

static qc_status head(void *ctx, const char *text, size_t len, qc_error *err)
{
    return note(ctx, 'h', text, len, err);
}

static qc_status element(void *ctx, const char *text, size_t len, qc_error *err)
{
    seen *s = ctx;
    if (++s->elements == 2 && s->refuse != QC_OK)
        return qc_error_set(err, s->refuse, __FILE__, __LINE__, "refused");
    return note(s, 'e', text, len, err);
}

static qc_status tail(void *ctx, const char *text, size_t len, qc_error *err)
{
    return note(ctx, 't', text, len, err);
}

static qc_status cut(seen *s, const char *text, size_t step, qc_error *err)
{
    SCOPED(qc_json_cut) c;
    qc_status st = QC_OK;
    size_t len = strlen(text);
    s->text[0] = '\0';
    s->elements = 0;
    qc_json_cut_init(&c, &(qc_json_parts){"rows", head, element, tail, s});
    for (size_t at = 0; st == QC_OK && at < len; at += step)
        st = qc_json_cut_feed(&c, text + at, len - at < step ? len - at : step, err);
    if (st == QC_OK)
        st = qc_json_cut_finish(&c, err);
    if (st == QC_OK && s->elements > 0)
        assert_int_equal(c.elements, s->elements);
    return st;
}

TEST(texts_are_cut_into_parts)
{
    static const struct {
        const char *text, *parts;
    } cases[] = {
        {"{\"rows\": [1, [2,3], {\"a\": \"],}\\\"[\"}], \"b\": 2}",
         "h{\"rows\": []}|e1|e [2,3]|e {\"a\": \"],}\\\"[\"}|t{ \"b\": 2}|"},
        {"{\"a\":1,\"rows\":[1,2],\"b\":2}", "h{\"a\":1,\"rows\":[]}|e1|e2|t{\"b\":2}|"},
        {"{\"rows\":[]}\n", "h{\"rows\":[]}|t{}|"},
        {"{\"rows\":[ \n]\t, \"b\":[1]}", "h{\"rows\":[]}|t{ \"b\":[1]}|"},
        {"{\"rows\":{\"x\":\"y\",\"z\":{}},\"b\":0}",
         "h{\"rows\":{}}|e{\"x\":\"y\"}|e{\"z\":{}}|t{\"b\":0}|"},
        {"{\"rows\":{}}", "h{\"rows\":{}}|t{}|"},
        /* Only the list itself: not below, not as a value, not without brackets. */
        {"{\"a\":{\"rows\":[1]},\"b\":\"rows\",\"rows\":[7]}",
         "h{\"a\":{\"rows\":[1]},\"b\":\"rows\",\"rows\":[]}|e7|t{}|"},
        {"{\"rows\":5,\"a\":[1,2]}", "h{\"rows\":5,\"a\":[1,2]}|"},
        {"{\"rowsandmore\":[1],\"row\":[2],\"rows\":[3]}",
         "h{\"rowsandmore\":[1],\"row\":[2],\"rows\":[]}|e3|t{}|"},
        {"[1,2]", "h[1,2]|"},
        {"[\"rows\",[1,2]]", "h[\"rows\",[1,2]]|"},
        {"[\"a\",\"rows\",{\"b\":1}]", "h[\"a\",\"rows\",{\"b\":1}]|"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t step = 1; step < 60; step++) {
            seen s = {.refuse = QC_OK};
            qc_error err = {0};
            if (cut(&s, cases[i].text, step, &err) != QC_OK)
                fail_msg("%s: %s", cases[i].text, err.msg);
            assert_string_equal(s.text, cases[i].parts);
        }
    }
}

TEST(what_is_wrong_is_refused_in_some_part)
{
    static const char *const texts[] = {
        "",
        "{",
        "{\"rows\":[",
        "{\"rows\":[1",
        "{\"rows\":[1]",
        "{\"rows\":[1}}",
        "{\"rows\":{\"a\":1]}",
        "{\"rows\":[1,]}",
        "{\"rows\":[,1]}",
        "{\"rows\":[1 2]}",
        "{\"rows\":[1]]",
        "{\"rows\":[1]}}",
        "{\"rows\":[1]} x",
        "{\"rows\":[1],}",
        "{\"rows\":[1] \"b\":2}",
        "{\"rows\":[1]\v}",
        "{\"rows\" [1]}",
        "{\"rows\":{1}}",
        "{\"rows\":{\"a\":1,}}",
        "{\"rows\":[1],\"b\":2} 3",
        "{\"a\":\"rows\",[1]}",
        "{\"rows\":[\"a]}",
        "{\"rows\":[1],\"rows\"}",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        for (size_t step = 1; step < 30; step++) {
            seen s = {.refuse = QC_OK};
            if (cut(&s, texts[i], step, NULL) == QC_OK)
                fail_msg("%s: taken as %s", texts[i], s.text);
        }
    }
}

/* A long string at the top is in memory once. */
TEST(of_a_long_key_only_the_beginning_is_kept)
{
    SCOPED(qc_json_cut) c;
    qc_json_cut_init(&c, &(qc_json_parts){.list = "rows"});
    assert_int_equal(qc_json_cut_feed(&c, "{\"", 2, NULL), QC_OK);
    for (int i = 0; i < 10000; i++)
        assert_int_equal(qc_json_cut_feed(&c, "rows rows ", 10, NULL), QC_OK);
    assert_int_equal(c.text.len, 100002);
    assert_int_equal(c.word.len, 5);
}

TEST(a_refusal_and_lack_of_memory_end_it)
{
    seen s = {.refuse = QC_ERR_SHAPE};
    qc_error err = {0};
    assert_int_equal(cut(&s, "{\"rows\":[1,2,3]}", 4, &err), QC_ERR_SHAPE);
    assert_string_equal(err.msg, "refused");
    assert_int_equal(s.elements, 2);
    s.refuse = QC_OK;
    EACH_ALLOCATION_FAILS (fault, 0)
        fault.st = cut(&s, "{\"a\":0,\"rows\":{\"x\":1},\"b\":2}", 4, &err);
}
