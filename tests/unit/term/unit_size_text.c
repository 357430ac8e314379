#include "convert/cli/options.h"
#include "convert/term/size_text.h"
#include "tests/fixtures/test.h"

TEST(sizes_are_read)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"4096", 4096},
        {"7B", 7},
        {"5GB", 5000000000u},
        {"5gb", 5000000000u},
        {"5G", 5000000000u},
        {"1k", 1000},
        {"1KiB", 1024},
        {"512MiB", 536870912u},
        {"512mib", 536870912u},
        {"2TiB", 2199023255552u},
        {"1.5GB", 1500000000u},
        {"5 GB", 5000000000u},
        {"1 KiB", 1024},
        {"40Gi", 42949672960u},
        {"1.5KiB", 1536},
        {"0.000001T", 1000000},
        {"1.300KiB", 1331},
        {"18446744073709551615", UINT64_MAX},
        {"16777215TiB", 18446742974197923840u},
        {"18446744.073709TB", 18446744073709000000u},
    };
    static const char *const bad[] = {
        "",      "GB",   "B",      "-1",          "+1",          " 1",
        "1  GB", "1.",   ".5G",    "1.5",         "1.5B",        "1GBB",
        "1 ",    "1iB",  "1.5.5G", "1e3",         "1,5GB",       "0x10",
        "1 5GB", "1.GB", "five",   "5PB",         "1.1234567GB", "18446744073709551616",
        "5GB ",  "5g\n", "1KBi",   "16777216TiB", "18446745TB",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        qc_error err = {0};
        uint64_t v = 1;
        if (qc_parse_size(good[i].text, "--x", &v, &err) != QC_OK)
            fail_msg("%s: %s", good[i].text, err.msg);
        assert_int_equal(v, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        qc_error err = {0};
        uint64_t v = 1;
        if (qc_parse_size(bad[i], "--x", &v, &err) != QC_ERR_USAGE)
            fail_msg("'%s' was taken for %llu", bad[i], (unsigned long long)v);
        assert_memory_equal(err.msg, "--x: ", 5);
    }
}

TEST(sizes_are_written)
{
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"},         {999, "999 B"},      {1000, "1.00 KB"},         {1234, "1.23 KB"},
        {9994, "9.99 KB"},  {9996, "10.0 KB"},   {99940, "99.9 KB"},        {99960, "100 KB"},
        {999499, "999 KB"}, {999500, "1.00 MB"}, {14000000000u, "14.0 GB"}, {UINT64_MAX, "18.4 EB"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[QC_SIZE_TEXT_BYTES];
        assert_string_equal(qc_text_bytes(out, cases[i].bytes), cases[i].text);
    }
}

TEST(rates_times_and_counts_are_written)
{
    char out[QC_SIZE_TEXT_BYTES];
    assert_string_equal(qc_text_rate(out, 1624000000, 2.0), "812 MB/s");
    assert_string_equal(qc_text_rate(out, 1, 0.0), "-");
    assert_string_equal(qc_text_rate(out, 0, 1.0), "0 B/s");
    assert_string_equal(qc_text_seconds(out, 0.0), "0.00 s");
    assert_string_equal(qc_text_seconds(out, 0.844), "0.84 s");
    assert_string_equal(qc_text_seconds(out, 12.34), "12.3 s");
    assert_string_equal(qc_text_seconds(out, 59.96), "1:00 min");
    assert_string_equal(qc_text_seconds(out, 185.2), "3:05 min");
    assert_string_equal(qc_text_seconds(out, 3599.6), "1:00:00 h");
    assert_string_equal(qc_text_seconds(out, 7425.0), "2:03:45 h");
    assert_string_equal(qc_text_seconds(out, -1.0), "0.00 s");
    assert_string_equal(qc_text_count(out, 0), "0");
    assert_string_equal(qc_text_count(out, 999), "999");
    assert_string_equal(qc_text_count(out, 1000), "1,000");
    assert_string_equal(qc_text_count(out, 8030261248u), "8,030,261,248");
    assert_string_equal(qc_text_count(out, UINT64_MAX), "18,446,744,073,709,551,615");
}
