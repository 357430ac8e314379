/* Tokenizers: small ones whose ids can be worked out by hand, what is refused, and memory that runs
 * out. That real ones give the ids of the tokenizers package: tests/interop. */
#include "base/alloc.h"
#include "base/workers.h"
#include "convert/tokenizer.h"
#include "test_model.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

#define VOCAB  "\"vocab\":{\"<unk>\":0,\"a\":1,\"b\":2,\"ab\":3,\"aba\":4,\"ba\":5,\"_\":6}"
#define MERGES "\"merges\":[\"a b\",[\"ab\",\"a\"],\"b a\"]"
#define MODEL                                                                                      \
    "\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"fuse_unk\":true," VOCAB "," MERGES "}"

static void ids_are(const char *json, int specials, const char *text, const char *want)
{
    qc_tokenizer *t = NULL;
    qc_error err = {0};
    uint32_t *ids = NULL;
    size_t count = 0, len = 0;
    char got[256] = "";
    test_must(qc_tokenizer_open_text(&t, json, strlen(json), &err), &err);
    test_must(qc_tokenizer_encode(t, text, strlen(text), specials, &ids, &count, &err), &err);
    for (size_t i = 0; i < count; i++)
        len += (size_t)snprintf(got + len, sizeof got - len, i ? " %u" : "%u", ids[i]);
    assert_string_equal(got, want);
    qc_free(ids);
    qc_tokenizer_close(t);
}

static void merging(void **state)
{
    (void)state;
    const char *plain = "{" MODEL "}";
    ids_are(plain, 0, "", "");
    ids_are(plain, 0, "a", "1");
    ids_are(plain, 0, "ab", "3");
    ids_are(plain, 0, "ba", "5");
    ids_are(plain, 0, "aba", "4");
    ids_are(plain, 0, "abab", "3 3"); /* both "a b" before any "ab a" */
    ids_are(plain, 0, "bab", "2 3");
    ids_are(plain, 0, "abaa", "4 1");
    ids_are(plain, 0, "a??b?", "1 0 2 0"); /* unknown ones become one */
}

static void on_alarm(int number)
{
    (void)number;
    qc_interrupt();
}

/* A text without a pre-tokenizer is one piece, of which long ones take minutes. This one takes a
 * second, of which the alarm leaves little. */
static void long_piece(const qc_tokenizer *t)
{
    const size_t len = (size_t)4 << 20;
    const struct itimerval soon = {.it_value = {.tv_usec = 50000}};
    struct sigaction now = {.sa_handler = on_alarm}, before;
    qc_error err = {0};
    uint32_t *ids = NULL;
    size_t count = 0;
    void *v = NULL;
    test_must(qc_malloc(&v, len, &err), &err);
    char *text = v;
    for (size_t i = 0; i < len; i++)
        text[i] = i % 2 ? 'b' : 'a';
    assert_int_equal(sigaction(SIGALRM, &now, &before), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &soon, NULL), 0);
    qc_status st = qc_tokenizer_encode(t, text, len, 0, &ids, &count, &err);
    while (!qc_interrupted())
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    assert_int_equal(sigaction(SIGALRM, &before, NULL), 0);
    qc_interrupt_clear();
    qc_free(ids);
    qc_free(v);
    assert_int_equal(st, QC_ERR_INTERRUPTED);
}

static void interrupted(void **state)
{
    (void)state;
    const char *const forms[] = {
        "{" MODEL "}",
        "{" MODEL ",\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},"
        "\"content\":\"b\"}}",
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        qc_tokenizer *t = NULL;
        qc_error err = {0};
        uint32_t *ids = NULL;
        size_t count = 0;
        test_must(qc_tokenizer_open_text(&t, forms[i], strlen(forms[i]), &err), &err);
        qc_interrupt();
        qc_status st = qc_tokenizer_encode(t, "abab", 4, 0, &ids, &count, &err);
        qc_interrupt_clear();
        assert_int_equal(st, QC_ERR_INTERRUPTED);
        assert_null(ids);
        if (i == 0)
            long_piece(t);
        qc_tokenizer_close(t);
    }
}

static void stages(void **state)
{
    (void)state;
    const char *json =
        "{" MODEL ",\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"\\\\s+\"},"
        "\"content\":\"_\"},\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"_\"},"
        "\"behavior\":\"Isolated\",\"invert\":false},\"added_tokens\":[{\"id\":7,\"content\":\"<s>"
        "\","
        "\"special\":true,\"normalized\":false}],\"post_processor\":{\"type\":"
        "\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":"
        "{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[7]}}}}";
    ids_are(json, 0, "ab \t a", "3 6 1");
    ids_are(json, 1, "ab", "7 3");
    ids_are(json, 1, "", "7");
    ids_are(json, 0, "a<s>b<s><s>", "1 7 2 7 7");
    qc_tokenizer *t = NULL;
    const uint32_t *front = NULL;
    size_t count = 0;
    assert_int_equal(qc_tokenizer_open_text(&t, json, strlen(json), NULL), QC_OK);
    qc_tokenizer_front(t, &front, &count);
    assert_true(count == 1 && front[0] == 7);
    assert_int_equal(qc_tokenizer_vocabulary(t), 8);
    assert_string_equal(qc_tokenizer_kind(t), "BPE");
    qc_tokenizer_close(t);
}

static void bytes(void **state)
{
    (void)state;
    qc_tokenizer *t = NULL;
    uint32_t *ids = NULL;
    size_t count = 0;
    assert_int_equal(qc_tokenizer_open_bytes(&t, NULL), QC_OK);
    assert_int_equal(qc_tokenizer_encode(t,
                                         "\0\xff"
                                         "a",
                                         3, 1, &ids, &count, NULL),
                     QC_OK);
    assert_true(count == 3 && ids[0] == 0 && ids[1] == 255 && ids[2] == 'a');
    assert_int_equal(qc_tokenizer_vocabulary(t), 256);
    qc_free(ids);
    qc_tokenizer_close(t);
}

static void refuses(const char *json, qc_status want, const char *message)
{
    qc_tokenizer *t = NULL;
    qc_error err = {0};
    assert_int_equal(qc_tokenizer_open_text(&t, json, strlen(json), &err), want);
    assert_null(t);
    if (!strstr(err.msg, message))
        fail_msg("'%s' does not say '%s'", err.msg, message);
}

static void refused(void **state)
{
    (void)state;
#define PRE(text) "{" MODEL ",\"pre_tokenizer\":" text "}"
#define SPLIT(regex)                                                                               \
    PRE("{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"" regex "\"}}")
    const qc_status no = QC_ERR_UNSUPPORTED, bad = QC_ERR_INPUT;
    refuses("[]", bad, "expected an object");
    refuses("{}", bad, "model: it is missing");
    refuses("{\"model\":{\"type\":\"Unigram\"}}", no, "the model 'Unigram' is not supported");
    refuses("{\"model\":{\"type\":\"BPE\",\"dropout\":0.1}}", no, "dropout of 0.1");
    refuses("{\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\"}}", no,
            "'end_of_word_suffix'");
    refuses("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", bad, "a");
    refuses("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1},\"merges\":[\"a a\"]}}", bad,
            "is not in the vocabulary");
    refuses("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1},\"merges\":[\"a b c\"]}}", bad,
            "with a space between");
    refuses("{" MODEL ",\"normalizer\":{\"type\":\"Lowercase\"}}", no, "normalizer 'Lowercase'");
    refuses("{" MODEL ",\"post_processor\":{\"type\":\"X\"}}", no, "post_processor 'X'");
    refuses("{" MODEL ",\"added_tokens\":[{\"id\":9,\"content\":\"x\"}]}", no,
            "has the id 9, but would be given 7");
    refuses(PRE("{\"type\":\"Punctuation\"}"), no, "pre_tokenizer 'Punctuation'");
    refuses(SPLIT("\\\\w+"), no, "\\w in a regular expression is not supported");
    refuses(SPLIT("[a[b]]"), no, "a set within a set");
    refuses(SPLIT("[^\\\\S]"), no, "\\S in a regular expression's set");
    refuses(SPLIT("[a&&b]"), no, "a set within a set");
    refuses(SPLIT("a.b"), no, "'.' in a regular expression");
    refuses(SPLIT("^a"), no, "'^'");
    refuses(SPLIT("(?<=a)"), no, "the group (?<=");
    refuses(SPLIT("a{,3}"), no, "{,3}");
    refuses(SPLIT("a{2}?"), no, "{2}?");
    refuses(SPLIT("(?i:ss)"), no, "'ss' in (?i:...)");
    refuses(SPLIT("(?i:[k])"), no, "'[' in (?i:...)");
    refuses(SPLIT("\\\\p{Cn}"), no, "the property \\p{Cn}");
    refuses(SPLIT("[a"), bad, "does not end");
    refuses(SPLIT("(a"), bad, "is not one");
    enum { LONG = 70000 };
    char *text = malloc(LONG + 1000);
    assert_non_null(text);
    int at = snprintf(text, 1000, "%s",
                      "{" MODEL ",\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":"
                      "\"Isolated\",\"pattern\":{\"Regex\":\"");
    memset(text + at, 'a', LONG);
    (void)snprintf(text + at + LONG, 10, "%s", "\"}}}");
    refuses(text, no, "a pattern of 70000 bytes is too long");
    free(text);
#undef SPLIT
#undef PRE
}

static void not_utf8(void **state)
{
    (void)state;
    const char *json = "{" MODEL "}";
    static const char *const bad[] = {"ab\x80", "ab\xc3", "ab\xed\xa0\x80", "ab\xf4\x90\x80\x80",
                                      "ab\xc0\x80"};
    qc_tokenizer *t = NULL;
    assert_int_equal(qc_tokenizer_open_text(&t, json, strlen(json), NULL), QC_OK);
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint32_t *ids = NULL;
        size_t count = 0;
        qc_error err = {0};
        assert_int_equal(qc_tokenizer_encode(t, bad[i], strlen(bad[i]), 0, &ids, &count, &err),
                         QC_ERR_INPUT);
        assert_string_equal(err.msg, "the text is no UTF-8 at byte 2");
        assert_null(ids);
    }
    qc_tokenizer_close(t);
}

static void allocations(void **state)
{
    (void)state;
    const char *json = "{" MODEL ",\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":"
                       "\"ByteLevel\"},\"added_tokens\":[{\"id\":7,\"content\":\"x\"}]}";
    for (uint64_t n = 1;; n++) {
        qc_tokenizer *t = NULL;
        uint32_t *ids = NULL;
        size_t count = 0;
        qc_alloc_fail_at(n, 0);
        qc_status st = qc_tokenizer_open_text(&t, json, strlen(json), NULL);
        if (st == QC_OK)
            st = qc_tokenizer_encode(t, "ab ab\xc3\xa9", 7, 0, &ids, &count, NULL);
        int reached = qc_alloc_count() >= n;
        qc_alloc_fail_at(0, 0);
        /* Compiled patterns run without machine code where that finds no memory. */
        assert_true(st == QC_ERR_NOMEM || st == QC_OK);
        assert_true(st == QC_OK || reached);
        qc_free(ids);
        qc_tokenizer_close(t);
        if (!reached)
            break;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merging),     cmocka_unit_test(stages),  cmocka_unit_test(bytes),
        cmocka_unit_test(interrupted), cmocka_unit_test(refused), cmocka_unit_test(not_utf8),
        cmocka_unit_test(allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
