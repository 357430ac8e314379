/* Files of token ids and the cutting of windows. */
#include "base/random.h"
#include "base/workers.h"
#include "convert/forward/token_text.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

static void parses(const char *text, uint64_t max_tokens, const char *want)
{
    SCOPED(qc_eval_ids) ids;
    char got[256];
    size_t len = 0, at = 0;
    assert_int_equal(qc_eval_ids_parse(&ids, text, strlen(text), 5000000000u, max_tokens, NULL),
                     QC_OK);
    got[0] = '\0';
    for (uint64_t i = 0; i < ids.count; i++)
        for (uint64_t k = 0; k < ids.lengths[i]; k++)
            len += (size_t)snprintf(got + len, sizeof got - len, "%u%s", ids.ids[at++],
                                    k + 1 < ids.lengths[i] ? " " : ";");
    assert_string_equal(got, want);
    assert_int_equal(ids.tokens, at);
}

static void refuses(const char *text, size_t len, const char *want)
{
    qc_eval_ids ids;
    qc_error err = {0};
    assert_int_equal(qc_eval_ids_parse(&ids, text, len, 100, 0, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg, want);
}

TEST(good_ids)
{
    parses("1 2 3\n4 5\n", 0, "1 2 3;4 5;");
    parses("1 2 3\n4 5", 0, "1 2 3;4 5;");
    parses("", 0, "");
    parses("\n\n  \n\t\n", 0, "");
    parses("  7\t8  \r\n\r\n9\r", 0, "7 8;9;");
    parses("0 4294967295\n", 0, "0 4294967295;");
    parses("1 2 3\n4 5 6\n7", 4, "1 2 3;4;");
    parses("1 2 3\n4 5 6\n7", 3, "1 2 3;");
    parses("1 2 3\n4 5 6\n7", 70, "1 2 3;4 5 6;7;");
    parses("1\n2\n3\n", 1, "1;");
}

TEST(bad_ids)
{
#define REFUSES(text, want) refuses(text, sizeof(text) - 1, want)
    REFUSES("1 2\n3 x", "line 2, column 3: expected a decimal token id, found 'x'");
    REFUSES("-1", "line 1, column 1: expected a decimal token id, found '-'");
    REFUSES("1,2", "line 1, column 2: expected a decimal token id, found ','");
    REFUSES("1.5", "line 1, column 2: expected a decimal token id, found '.'");
    REFUSES("\n\n 0x1", "line 3, column 3: expected a decimal token id, found 'x'");
    REFUSES("1 \0 2", "line 1, column 3: expected a decimal token id, found the byte 0x00");
    REFUSES("\xef\xbb\xbf"
            "1",
            "line 1, column 1: expected a decimal token id, found the byte 0xef");
    REFUSES("1\r2", "line 1, column 2: expected a decimal token id, found the byte 0x0d");
    REFUSES("1 02", "line 1, column 3: a token id has no leading zeros");
    REFUSES("99 100", "line 1, column 4: token id 100 is not in the vocabulary of 100");
    REFUSES("18446744073709551617",
            "line 1, column 1: token id 18446744073709551617 is not in the vocabulary of 100");
    REFUSES("111111111111111111111111111111",
            "line 1, column 1: token id 111111111111111111111111... is not in the vocabulary of "
            "100");
#undef REFUSES
}

/* "1 2 3|4 5": the windows of sequences of ids from 1 on. */
TEST(interrupted)
{
    qc_eval_ids ids;
    qc_interrupt();
    qc_status st = qc_eval_ids_parse(&ids, "1 2", 3, 100, 0, NULL);
    qc_interrupt_clear();
    assert_int_equal(st, QC_ERR_INTERRUPTED);
    assert_null(ids.ids);
}

static void cuts(const uint64_t *lengths, uint64_t count, uint64_t front_count, uint64_t context,
                 const char *want, uint64_t predicted)
{
    static const uint32_t front[] = {900, 901, 902};
    uint32_t all[64];
    uint64_t own[8];
    qc_eval_ids ids = {.ids = all, .lengths = own, .count = count};
    SCOPED(qc_eval_windows) w;
    char got[512] = "";
    size_t len = 0, at = 0;
    for (uint64_t i = 0; i < count; i++) {
        own[i] = lengths[i];
        for (uint64_t k = 0; k < lengths[i]; k++, ids.tokens++)
            all[ids.tokens] = (uint32_t)ids.tokens + 1;
    }
    qc_error err = {0};
    assert_int_equal(qc_eval_windows_cut(&w, &ids, front, front_count, context, &err), QC_OK);
    uint64_t longest = 0;
    for (uint64_t i = 0; i < w.count; i++) {
        longest = w.lengths[i] > longest ? w.lengths[i] : longest;
        for (uint64_t k = 0; k < w.lengths[i]; k++)
            len += (size_t)snprintf(got + len, sizeof got - len, "%u%s", w.ids[at++],
                                    k + 1 < w.lengths[i] ? " "
                                    : i + 1 < w.count    ? "|"
                                                         : "");
    }
    assert_string_equal(got, want);
    assert_int_equal(w.tokens, at);
    assert_int_equal(w.predicted, predicted);
    assert_int_equal(w.longest, longest);
}

TEST(windows)
{
    const uint64_t seven[] = {7}, lines[] = {1, 4, 2}, two[] = {2}, one[] = {1};
    cuts(seven, 1, 0, 3, "1 2 3|4 5 6", 4); /* 7 alone would predict nothing */
    cuts(seven, 1, 0, 4, "1 2 3 4|5 6 7", 5);
    cuts(seven, 1, 0, 7, "1 2 3 4 5 6 7", 6);
    cuts(seven, 1, 0, 100, "1 2 3 4 5 6 7", 6);
    cuts(seven, 1, 1, 4, "900 1 2 3|900 4 5 6|900 7", 7);
    cuts(seven, 1, 2, 5, "900 901 1 2 3|900 901 4 5 6|900 901 7", 7);
    cuts(seven, 1, 1, 100, "900 1 2 3 4 5 6 7", 7);
    cuts(lines, 3, 0, 3, "2 3 4|6 7", 3);
    cuts(lines, 3, 1, 3, "900 1|900 2 3|900 4 5|900 6 7", 7);
    cuts(two, 1, 0, 2, "1 2", 1);
    cuts(one, 1, 1, 2, "900 1", 1);
}

TEST(no_windows)
{
    uint32_t ids[] = {1, 2, 3};
    uint64_t lengths[] = {1, 1, 1};
    qc_eval_ids s = {.ids = ids, .lengths = lengths, .count = 3, .tokens = 3};
    qc_eval_windows w;
    qc_error err = {0};
    assert_int_equal(qc_eval_windows_cut(&w, &s, NULL, 0, 8, &err), QC_ERR_INPUT);
    assert_string_equal(
        err.msg,
        "3 tokens in 3 sequences are too few to predict one; expected a sequence of at least 2");
    s = (qc_eval_ids){.ids = ids, .lengths = lengths};
    assert_int_equal(qc_eval_windows_cut(&w, &s, ids, 1, 8, &err), QC_ERR_INPUT);
    assert_int_equal(qc_eval_windows_cut(&w, &s, ids, 2, 2, &err), QC_ERR_USAGE);
    assert_string_equal(err.msg, "--context 2 predicts nothing; expected at least 3, the tokens "
                                 "that begin each window and one more");
}

TEST(allocations)
{
    EACH_ALLOCATION_FAILS (fault, 0) {
        SCOPED(qc_eval_ids) ids = {0};
        SCOPED(qc_eval_windows) w = {0};
        uint32_t front = 7;
        fault.st = qc_eval_ids_parse(&ids, "1 2 3\n4 5", 9, 10, 0, NULL);
        if (fault.st == QC_OK)
            fault.st = qc_eval_windows_cut(&w, &ids, &front, 1, 3, NULL);
    }
}
