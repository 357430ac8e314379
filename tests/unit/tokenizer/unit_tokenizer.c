/* Tokenizers: small ones whose ids can be worked out by hand, what is refused, how much a file may
 * ask for, and memory that runs out. That real ones give the ids of the tokenizers package:
 * tests/interop. */
#include "base/alloc.h"
#include "base/workers.h"
#include "convert/tokenizer/tokenizer.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <signal.h>

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

TEST(merging)
{
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

/* ids of "[UNK]", "a", "##a", "##ab", "b", "##b", "!", U+4E00, "e" are 0 to 8. */
#define PIECES                                                                                     \
    "\"model\":{\"type\":\"WordPiece\",\"max_input_chars_per_word\":6,\"vocab\":{\"[UNK]\":0,"     \
    "\"a\":1,\"##a\":2,\"##ab\":3,\"b\":4,\"##b\":5,\"!\":6,\"\xe4\xb8\x80\":7,\"e\":8}}"
#define BERT(more)                                                                                 \
    "{" PIECES ",\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"},\"normalizer\":{\"type\":"      \
    "\"BertNormalizer\"" more "}}"

TEST(wordpieces)
{
    const char *bert = BERT(""), *cased = BERT(",\"lowercase\":false");
    ids_are(bert, 0, "", "");
    ids_are(bert, 0, "a b", "1 4");
    ids_are(bert, 0, "aab", "1 3"); /* the longest piece first */
    ids_are(bert, 0, "aaba", "1 3 2");
    ids_are(bert, 0, "ac a", "0 1"); /* the whole word is unknown, not only its rest */
    ids_are(bert, 0, "aaaaaa aaaaaaa", "1 2 2 2 2 2 0");
    ids_are(bert, 0, "a!!b\ta\nb", "1 6 6 4 1 4");
    ids_are(bert, 0, "AB", "1 5");
    ids_are(bert, 0, "\xc3\x89", "8"); /* E with an acute accent */
    ids_are(bert, 0,
            "a\xe4\xb8\x80"
            "b",
            "1 7 4"); /* stands apart */
    ids_are(bert, 0,
            "a\xc2\xad"
            "b\x01\xef\xbf\xbd",
            "1 5"); /* what nobody sees goes */
    ids_are(cased, 0, "AB ab", "0 1 5");
    ids_are(cased, 0, "\xc3\xa9", "0"); /* accents stay with case, if the file does not say */
    ids_are(BERT(",\"lowercase\":false,\"strip_accents\":true"), 0, "\xc3\xa9", "8");
    ids_are(BERT(",\"handle_chinese_chars\":false"), 0, "a\xe4\xb8\x80", "0");
    ids_are(BERT(",\"clean_text\":false"), 0,
            "a\xc2\xad"
            "b",
            "0");
    ids_are("{" PIECES "}", 0, "aab", "1 3");
    ids_are("{" PIECES "}", 0, "a a", "0"); /* nothing cuts it */
    qc_tokenizer *t = NULL;
    test_must(qc_tokenizer_open_text(&t, bert, strlen(bert), NULL), NULL);
    assert_string_equal(qc_tokenizer_kind(t), "WordPiece");
    qc_tokenizer_close(t);
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

TEST(interrupted)
{
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

TEST(stages)
{
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

TEST(bytes)
{
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

TEST(refused)
{
#define PRE(text) "{" MODEL ",\"pre_tokenizer\":" text "}"
#define SPLIT(regex)                                                                               \
    PRE("{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"" regex "\"}}")
    const qc_status no = QC_ERR_UNSUPPORTED, bad = QC_ERR_INPUT;
    refuses("[]", bad, "expected an object");
    refuses("{}", bad, "model: it is missing");
    refuses("{\"model\":{\"type\":\"Unigram\"}}", no, "the model 'Unigram' is not supported");
    refuses("{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0}}}", bad,
            "unk_token: '[UNK]' is not in the vocabulary");
    refuses("{\"model\":{\"type\":\"WordPiece\"}}", bad, "vocab: expected an object");
    refuses("{\"model\":{\"type\":\"WordPiece\",\"max_input_chars_per_word\":-1}}", bad,
            "max_input_chars_per_word");
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
    refuses(SPLIT("[a"), bad, "has a set without an end");
    refuses(SPLIT("(a"), bad, "' of the tokenizer cannot be read: ");
    enum { LONG = 70000 };
    char *text = malloc(LONG + 1000);
    assert_non_null(text);
    int at = snprintf(text, 1000, "%s",
                      "{" MODEL ",\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":"
                      "\"Isolated\",\"pattern\":{\"Regex\":\"");
    memset(text + at, 'a', LONG);
    (void)snprintf(text + at + LONG, 10, "%s", "\"}}}");
    refuses(text, no, "a pattern of the tokenizer with 70000 bytes is too long");
    free(text);
#undef SPLIT
#undef PRE
}

/* ---- budgets: what one text may ask for ---- */

#define LINES 600u

/* What encoding a text of `len` bytes ends with, and the words. */
static qc_status encode_many(const char *json, char byte, size_t len, size_t *count, qc_error *err)
{
    qc_tokenizer *t = NULL;
    uint32_t *ids = NULL;
    void *v = NULL;
    test_must(qc_tokenizer_open_text(&t, json, strlen(json), err), err);
    test_must(qc_malloc(&v, len, err), err);
    memset(v, byte, len);
    qc_status st = qc_tokenizer_encode(t, v, len, 0, &ids, count, err);
    qc_free(ids);
    qc_free(v);
    qc_tokenizer_close(t);
    return st;
}

static void too_much(const char *json, char byte, size_t len, const char *words)
{
    qc_error err = {0};
    size_t count = 0;
    assert_int_equal(encode_many(json, byte, len, &count, &err), QC_ERR_INPUT);
    if (!strstr(err.msg, words))
        fail_msg("'%s' does not say '%s'", err.msg, words);
}

#define REPLACE(from, to) "{\"type\":\"Replace\",\"pattern\":{" from "},\"content\":\"" to "\"}"
#define TEN_A(text)       text text text text text text text text text text
#define NORMS(list)       "{" MODEL ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[" list "]}}"
#define PRE_SEQUENCE(list)                                                                         \
    "{" MODEL ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" list "]}}"
#define SPLIT_AT(regex)                                                                            \
    PRE_SEQUENCE("{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"" regex   \
                 "\"}}")

TEST(budget_of_bytes)
{
    const char *ten = REPLACE("\"String\":\"a\"", "aaaaaaaaaa");
    const char *bytes = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}";
    char text[4096];
    qc_error err = {0};
    size_t count = 0;
    /* Ten for one is within it, as is the rest of what is there for every text. */
    (void)snprintf(text, sizeof text, NORMS("%s"), ten);
    assert_int_equal(encode_many(text, 'a', 20000, &count, &err), QC_OK);
    assert_int_equal(count, 200000);
    (void)snprintf(text, sizeof text, NORMS("%s,%s"), ten, ten);
    assert_int_equal(encode_many(text, 'a', 700, &count, &err), QC_OK);
    /* Sixteen for one and 65,536 more are the end. */
    too_much(text, 'a', 20000,
             "the tokenizer's normalizer makes more than 385536 bytes of the text's 20000");
    (void)snprintf(text, sizeof text, NORMS("%s,%s,%s,%s,%s,%s,%s,%s"), ten, ten, ten, ten, ten,
                   ten, ten, ten);
    too_much(text, 'a', 700, "normalizer makes more than 76736 bytes");
    too_much(NORMS("{\"type\":\"Prepend\",\"prepend\":\"" TEN_A(TEN_A(
                 "0123456789")) "\"},{\"type\":"
                                "\"Replace\",\"pattern\":{\"Regex\":\"[^x]\"},\"content\":\"" TEN_A(
                                    "0123456789") "\"}"),
             '?', 20000, "normalizer makes more than");
    too_much("{" MODEL
             ",\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"" TEN_A("01234") "\"}}",
             ' ', 20000, "pre_tokenizer makes more than");
    (void)snprintf(text, sizeof text, PRE_SEQUENCE("%s,%s,%s,%s,%s,%s,%s,%s"), bytes, bytes, bytes,
                   bytes, bytes, bytes, bytes, bytes);
    too_much(text, ' ', 20000, "pre_tokenizer makes more than");
}

TEST(budget_of_steps)
{
    const char *words = "patterns take more than 37257216 steps for the text's 20000 bytes";
    char text[32768];
    size_t len = 0, count = 0;
    qc_error err = {0};
    /* Each of these is far below the limit of one match. */
    too_much(SPLIT_AT("a(?=[^b]*)"), 'a', 20000, words);
    too_much(SPLIT_AT("[^b]+c|a"), 'a', 20000, words);
    too_much(SPLIT_AT("\\\\p{L}++\\\\p{N}"), 'a', 20000, words);
    /* utf8proc would put 40,000 marks in order, each against all before it. */
    too_much(NORMS(REPLACE("\"Regex\":\"[^b]\"", "\xcc\x81\xcc\x96") ",{\"type\":\"NFC\"}"), 'a',
             20000, words);
    /* Tokens that begin alike are not compared one by one, and what is compared counts. */
    len += (size_t)snprintf(text, sizeof text, "{" MODEL ",\"added_tokens\":[");
    for (unsigned i = 0; i < LINES; i++)
        len += (size_t)snprintf(text + len, sizeof text - len,
                                "%s{\"id\":%u,\"content\":\"aaaaaaaa%u\"}", i ? "," : "", 7 + i, i);
    (void)snprintf(text + len, sizeof text - len, "]}");
    assert_int_equal(encode_many(text, 'a', 20000, &count, &err), QC_OK);
    ids_are(text, 0, "aaaaaaaa1aaaaaaaa12aaaaaaaa", "8 19 1 1 1 1 1 1 1 1");
    /* What models do takes less than twenty steps for a byte. */
    assert_int_equal(
        encode_many(SPLIT_AT("[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}|"
                             " ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|"
                             "\\\\s+(?!\\\\S)|\\\\s+"),
                    ' ', (size_t)1 << 20, &count, &err),
        QC_OK);
}

static uint64_t fnv(const char *s)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * 0x100000001b3u;
    return h ^ h >> 32;
}

/* Files of which every line costs as much as all before it. */
TEST(budget_of_reading)
{
    static char text[65536];
    size_t len = 0;
    /* 600 tokens of one slot in a table of 2,048. */
    len += (size_t)snprintf(text, sizeof text, "{\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (unsigned i = 0, found = 0; found < LINES; i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "t%u", i);
        if (fnv(name) % 2048 == 77)
            len += (size_t)snprintf(text + len, sizeof text - len, "%s\"%s\":%u", found ? "," : "",
                                    name, found),
                found++;
    }
    (void)snprintf(text + len, sizeof text - len, "},\"merges\":[]}}");
    refuses(text, QC_ERR_INPUT, "vocab: too many tokens have the hash of 't");
    /* A post-processor for each of which all before are copied. */
    len = (size_t)snprintf(text, sizeof text,
                           "{" MODEL ",\"post_processor\":{\"type\":\"Sequence\",\"processors\":[");
    for (unsigned i = 0; i < LINES; i++)
        len += (size_t)snprintf(
            text + len, sizeof text - len,
            "%s{\"type\":\"BertProcessing\",\"cls\":[\"a\",1],\"sep\":[\"b\",2]}", i ? "," : "");
    (void)snprintf(text + len, sizeof text - len, "]}}");
    refuses(text, QC_ERR_UNSUPPORTED, "a post_processor that adds more than 64 tokens");
    refuses(SPLIT_AT("a{1001}"), QC_ERR_UNSUPPORTED, "{1001} in a regular expression");
    refuses(SPLIT_AT("a{2,70000}"), QC_ERR_UNSUPPORTED, "{2,7000");
    len = (size_t)snprintf(text, sizeof text,
                           "{" MODEL ",\"pre_tokenizer\":{\"type\":\"Split\","
                           "\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"[");
    memset(text + len, 'x', 4096);
    (void)snprintf(text + len + 4096, sizeof text - len - 4096, "]\"}}}");
    refuses(text, QC_ERR_UNSUPPORTED, "a set of 4098 bytes in a regular expression");
}

/* A long token in the vocabulary makes each place of a long word try as many pieces. */
TEST(budget_of_pieces)
{
    enum { LONG = 20000 };
    char *json = malloc(LONG + 1000);
    assert_non_null(json);
    int at = snprintf(json, 1000, "%s",
                      "{\"model\":{\"type\":\"WordPiece\",\"max_input_chars_per_word\":1000000000,"
                      "\"vocab\":{\"[UNK]\":0,\"a\":1,\"##a\":2,\"");
    memset(json + at, 'b', LONG);
    (void)snprintf(json + at + LONG, 10, "%s", "\":3}}}");
    too_much(json, 'a', 5000, "steps for the text's 5000 bytes");
    free(json);
}

TEST(not_utf8)
{
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
        assert_string_equal(err.msg, "the text is not UTF-8 at byte 2; convert it to UTF-8");
        assert_null(ids);
    }
    qc_tokenizer_close(t);
}

static void allocations_of(const char *json)
{
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

TEST(allocations)
{
    allocations_of("{" MODEL ",\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":"
                   "\"ByteLevel\"},\"added_tokens\":[{\"id\":7,\"content\":\"x\"}]}");
    allocations_of(BERT(""));
}
