/* What --vram takes and refuses. QC_SEED=n replays one run of the random part. */
#include "convert/fit/budget.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test_random.h"

#define ROUNDS     20000
#define TERMS_MOST 8

static void check_devices(const char *text, const char *names, const uint64_t *bytes)
{
    SCOPED(qc_arena) arena = {0};
    qc_error err = {0};
    qc_budget b;
    if (qc_budget_parse(&b, &arena, text, &err) != QC_OK)
        fail_msg("%s: %s", text, err.msg);
    char got[512] = "";
    for (uint32_t i = 0; i < b.count; i++) {
        size_t used = strlen(got);
        (void)snprintf(got + used, sizeof got - used, "%s%s", i ? " " : "", b.devices[i].name);
        if (b.devices[i].total_bytes != bytes[i])
            fail_msg("%s: device %u has %" PRIu64 " bytes", text, (unsigned)i,
                     b.devices[i].total_bytes);
        assert_int_equal(b.devices[i].tier == QC_TIER_GPU, i < b.gpu_count);
    }
    assert_string_equal(got, names);
    if (strpbrk(text, " ")) /* two ways to write a budget are one text, which can be read again */
        check_devices(b.text, names, bytes);
    else
        assert_string_equal(b.text, text);
}

/* A size has one spelling, and what a card is called stays. */
TEST(one_text)
{
    static const char *const cases[][2] = {
        {"40g", "40GB"},
        {"2 x 40 GB", "2x40GB"},
        {"40gib", "40GiB"},
        {"1.5t+cpu:64g", "1.5TB+cpu:64GB"},
        {"4070ti", "4070ti"},
        {"3090x2", "3090x2"},
        {"2x A100-40gb", "2xA100-40gb"},
        {"cpu+disk", "cpu+disk"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(qc_arena) arena = {0};
        qc_budget b;
        assert_int_equal(qc_budget_parse(&b, &arena, cases[i][0], NULL), QC_OK);
        assert_string_equal(b.text, cases[i][1]);
    }
}

TEST(sizes_and_tiers_are_read)
{
    const uint64_t gb = 1000000000, gib = 1073741824;
    check_devices("40GB", "cuda:0", (uint64_t[]){40 * gb});
    check_devices("2x40GiB", "cuda:0 cuda:1", (uint64_t[]){40 * gib, 40 * gib});
    check_devices("24GB+16GB", "cuda:0 cuda:1", (uint64_t[]){24 * gb, 16 * gb});
    check_devices("2x24GB+1.5GB+cpu:64GB", "cuda:0 cuda:1 cuda:2 cpu",
                  (uint64_t[]){24 * gb, 24 * gb, 1500000000, 64 * gb});
    check_devices(
        "3090x2", "cuda:0 cuda:1",
        (uint64_t[]){qc_card_find("3090", 4)->memory_bytes, qc_card_find("3090", 4)->memory_bytes});
    check_devices("disk+cpu:1GB+8GB", "cuda:0 cpu disk", (uint64_t[]){8 * gb, gb, UINT64_MAX});
    check_devices(" 8GB + CPU : 2GB + Disk:3TB ", "cuda:0 cpu disk",
                  (uint64_t[]){8 * gb, 2 * gb, 3000 * gb});
    check_devices("cpu:64GB", "cpu", (uint64_t[]){64 * gb});
    check_devices("cpu:64GB+disk", "cpu disk", (uint64_t[]){64 * gb, UINT64_MAX});
    check_devices("1x7b", "cuda:0", (uint64_t[]){7});
    check_devices("2X 40GB", "cuda:0 cuda:1", (uint64_t[]){40 * gb, 40 * gb});
    /* As others write it. */
    static const char *const twice[] = {"40GBx2",
                                        "2*40GB",
                                        "40GB*2",
                                        "40GB,40GB",
                                        "2 x 40GB",
                                        "2\xc3\x97"
                                        "40GB",
                                        "40GB\xc3\x97"
                                        "2",
                                        "40 GB x 2",
                                        "40GB, 40 GB",
                                        "2x 40gb"};
    for (size_t i = 0; i < sizeof twice / sizeof *twice; i++)
        check_devices(twice[i], "cuda:0 cuda:1", (uint64_t[]){40 * gb, 40 * gb});
    check_devices("24GBx2,16GB+cpu:64GB", "cuda:0 cuda:1 cuda:2 cpu",
                  (uint64_t[]){24 * gb, 24 * gb, 16 * gb, 64 * gb});
    check_devices("2x40GiB", "cuda:0 cuda:1", (uint64_t[]){40 * gib, 40 * gib});
}

TEST(every_card_is_read_by_name)
{
    SCOPED(qc_arena) arena = {0};
    for (unsigned i = 0; i < qc_card_count; i++) {
        char text[96];
        qc_budget b;
        (void)snprintf(text, sizeof text, "2x%s+cpu:1GB", qc_card_table[i].name);
        assert_int_equal(qc_budget_parse(&b, &arena, text, NULL), QC_OK);
        assert_int_equal(b.gpu_count, 2);
        assert_ptr_equal(b.devices[1].card, &qc_card_table[i]);
        assert_int_equal(b.devices[1].total_bytes, qc_card_table[i].memory_bytes);
    }
}

TEST(mistakes_are_named)
{
    static const struct {
        const char *text, *says; /* a part of the message */
    } bad[] = {
        {"", "found nothing"},
        {"+", "found nothing"},
        {"40GB+", "found nothing"},
        {"+40GB", "found nothing"},
        {"40GB++16GB", "found nothing"},
        {"0x40GB", "'0x40GB': expected a count from 1 to 256"},
        {"257x40GB", "'257x40GB': expected a count from 1 to 256"},
        {"99999999999999999999999x1GB", "expected a count from 1 to 256"},
        {"200x1GB+57x1GB", "expected at most 256 GPUs"},
        {"2x", "'2x': expected a size or a card after 'x'"},
        {"x40GB", "'x40GB': expected a size (40GB, 40GiB), a card"},
        {"2x2x40GB", "'2x2x40GB'"},
        {"40", "'40': expected a unit, such as 40GB"},
        {"2x40", "'2x40': expected a unit, such as 40GB"},
        {"cpu:64", "'cpu:64': expected a unit, such as 64GB"},
        {"1.5", "'1.5': expected a unit"},
        {"-1GB", "'-1GB': expected a size"},
        {"0GB", "'0GB': expected more than 0 bytes"},
        {"cpu:0", "'cpu:0': expected"},
        {"cpu:0GB", "'cpu:0GB': expected more than 0 bytes"},
        {"cpu:", "'cpu:': expected a size after ':'"},
        {"8GB+cpu:x", "'cpu:x': expected a size"},
        {"cpu:1GB+cpu:2GB", "expected cpu at most once"},
        {"8GB+disk+disk", "expected disk at most once"},
        {"disk", "expected a GPU or cpu beside disk"},
        {"2xcpu", "expected no count before 'cpu'"},
        {"2xauto", "expected no count before 'auto'"},
        {"3xdisk:5GB", "expected no count before 'disk'"},
        {"cpuu:5GB", "'cpuu:5GB': expected"},
        {"99999999999999999999GB", "expected less than 2^64 bytes"},
        {"2x40GB,", "found nothing"},
        {"1,5GB", "'1': expected a unit"},
        {"2x40GBx2", "'2x40GBx2': expected a size"},
        {"40x2", "expected a unit, such as 2GB"},
        {"40GBx", "'40GBx': expected a size"},
        {"40GBx0", "'40GBx0': expected a count from 1 to 256"},
        {"40GBx257", "'40GBx257': expected a count from 1 to 256"},
        {"gtx1080", "'gtx1080': expected a size"},
        {"40 16GB", "'40 16GB': expected a size"},
        {"7900xtx", "'7900xtx': expected a size"},
        {"7900x3090", "expected a count from 1 to 256"},
        {"mi300x", "the cards that are known: docs/hardware.md"},
        {"40GB 16GB", "'40GB 16GB'"},
        {"A100-41GB", "did you mean A100-40GB?"},
        {"2x3091", "did you mean"},
        {"qwertyuiop", "'qwertyuiop': expected a size"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        SCOPED(qc_arena) arena = {0};
        qc_error err = {0};
        qc_budget b;
        if (qc_budget_parse(&b, &arena, bad[i].text, &err) != QC_ERR_USAGE)
            fail_msg("'%s' was taken, or: %s", bad[i].text, err.msg);
        if (strncmp(err.msg, "--vram: '", 9) != 0 || !strstr(err.msg, bad[i].says))
            fail_msg("'%s': %s", bad[i].text, err.msg);
    }
}

/* Pieces of the grammar and of what is not in it, so that a good part of the strings is taken. */
static void random_text(char *out, size_t room)
{
    static const char *const pieces[] = {"40GB",    "2x",  "1.5GiB", "A100-40GB", "3090",  "cpu",
                                         "cpu:8GB", "+",   "disk",   ":",         "64MiB", " ",
                                         "x",       "257", "0",      "b",         "h100",  "%s"};
    size_t used = 0, terms = 1 + below(TERMS_MOST);
    out[0] = '\0';
    for (size_t i = 0; i < terms; i++) {
        char byte[2] = {(char)(1 + below(255)), '\0'};
        const char *piece = below(24) == 0 ? byte : pieces[below(sizeof pieces / sizeof *pieces)];
        int n = snprintf(out + used, room - used, "%s%s", i && below(2) ? "+" : "", piece);
        used += (size_t)n;
    }
}

TEST_WITH(any_text_is_read_or_refused, NULL, print_seed)
{
    const char *given = getenv("QC_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20260117;
    unsigned taken = 0;
    for (int round = 0; round < (given ? 1 : ROUNDS); round++, seed++) {
        random_begin(seed);
        char text[256];
        random_text(text, sizeof text);
        /* What looks at this machine is tested elsewhere. */
        if (strstr(text, "cpu") && !strstr(text, "cpu:"))
            continue;
        SCOPED(qc_arena) arena = {0};
        qc_error err = {0};
        qc_budget b;
        qc_status st = qc_budget_parse(&b, &arena, text, &err);
        if (st == QC_OK) {
            assert_true(b.count > 0 && b.count <= QC_MAX_DEVICES + 2 && b.gpu_count <= b.count);
            taken++;
        } else {
            assert_int_equal(st, QC_ERR_USAGE);
            assert_memory_equal(err.msg, "--vram: '", 9);
        }
    }
    assert_true(given || taken > ROUNDS / 50);
}

TEST(the_machine_is_asked_for_auto)
{
    assert_int_equal(setenv("QCONV_NVML", "/nonexistent/libnvidia-ml.so", 1), 0);
    assert_int_equal(unsetenv("QCONV_DEVICE"), 0);
    SCOPED(qc_arena) arena = {0};
    qc_error err = {0};
    qc_budget b;
    assert_int_equal(qc_budget_parse(&b, &arena, "auto", &err), QC_ERR_DEVICE);
    assert_non_null(strstr(err.msg, "'auto' found no GPU"));
    assert_int_equal(qc_budget_parse(&b, &arena, "auto+disk", &err), QC_ERR_DEVICE);
    assert_int_equal(qc_budget_parse(&b, &arena, "auto+cpu", &err), QC_OK);
    assert_int_equal(b.count, 1);
    assert_int_equal(b.gpu_count, 0);
    assert_true(b.devices[0].total_bytes > 0 && b.devices[0].total_bytes < UINT64_MAX);
    assert_int_equal(qc_budget_parse(&b, &arena, "auto+auto", &err), QC_ERR_USAGE);
}

TEST(no_memory_is_an_error)
{
    EACH_ALLOCATION_FAILS (fault, 1) {
        SCOPED(qc_arena) arena = {0};
        qc_budget b;
        fault.st = qc_budget_parse(&b, &arena, "2x40GB+3090+cpu:4GB", NULL);
    }
}
