/* convert/hardware/card_table.h: names, products and what architectures can do. */
#include "convert/hardware/card_table.h"
#include "tests/fixtures/test.h"

static const qc_card *find(const char *text)
{
    return qc_card_find(text, strlen(text));
}

static void expect(const char *text, const char *name)
{
    const qc_card *c = find(text);
    if (!c || strcmp(c->name, name) != 0)
        fail_msg("'%s' is %s, expected %s", text, c ? c->name : "nothing", name);
}

/* Every name and alias finds its own card, so none is there twice. */
TEST(names_are_unique)
{
    for (unsigned i = 0; i < qc_card_count; i++) {
        const qc_card *c = &qc_card_table[i];
        expect(c->name, c->name);
        for (const char *p = c->aliases; *p;) {
            size_t n = strcspn(p, " ");
            if (n > 0 && qc_card_find(p, n) != c)
                fail_msg("alias '%.*s' of %s finds %s", (int)n, p, c->name,
                         qc_card_find(p, n) ? qc_card_find(p, n)->name : "nothing");
            for (size_t k = 0; k < n; k++)
                assert_false(p[k] >= 'A' && p[k] <= 'Z');
            p += n + (p[n] != '\0');
        }
    }
}

TEST(spelling_does_not_matter)
{
    expect("A100", "A100-40GB");
    expect("a100 40gb", "A100-40GB");
    expect("A100_40GB", "A100-40GB");
    expect("a10040gb", "A100-40GB");
    expect("NVIDIA A100-SXM4-80GB", "A100-80GB");
    expect("A100 80GB PCIe", "A100-80GB-PCIe");
    expect("V100", "V100-16GB");
    expect("Tesla V100-SXM2-32GB", "V100-32GB");
    expect("3090", "RTX3090");
    expect("RTX 3090", "RTX3090");
    expect("NVIDIA GeForce RTX 3090", "RTX3090");
    expect("rtx-3090 ti", "RTX3090Ti");
    expect("4090", "RTX4090");
    expect("3080", "RTX3080-10GB");
    expect("RTX A6000", "A6000");
    expect("A6000", "A6000");
    expect("H100-80GB", "H100-80GB");
    expect("h200", "H200-141GB");
    expect("RTX 6000 Ada", "RTX6000-Ada");
    expect("T4", "T4");
    static const char *const none[] = {"",    " ",      "A",   "A1",  "A1000", "nvidia", "40GB",
                                       "rtx", "A100-x", "P40", "309", "3090+", "cpu",    "auto"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        if (find(none[i]))
            fail_msg("'%s' finds %s", none[i], find(none[i])->name);
    char longest[200];
    memset(longest, 'a', sizeof longest);
    assert_null(qc_card_find(longest, sizeof longest));
    assert_null(qc_card_near(longest, sizeof longest));
    /* len ends it, not a NUL. */
    assert_string_equal(qc_card_find("3090+4090", 4)->name, "RTX3090");
}

TEST(near_names_are_offered)
{
    static const struct {
        const char *text, *name;
    } cases[] = {
        {"A100-48GB", "A100-40GB"},
        {"V100-64GB", "V100-16GB"},
        {"4091", "RTX4090"},
        {"H1000", "H100-80GB"},
        {"RTX 309O", "RTX3090"},
        {"A6OOO", NULL},
        {"Radeon VII", NULL},
        {"x", NULL},
        {"", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *name = qc_card_near(cases[i].text, strlen(cases[i].text));
        if (!name != !cases[i].name || (name && strcmp(name, cases[i].name) != 0))
            fail_msg("near '%s': %s, expected %s", cases[i].text, name ? name : "nothing",
                     cases[i].name ? cases[i].name : "nothing");
    }
}

static void expect_product(const char *product, uint64_t mebi, const char *name)
{
    const qc_card *c = qc_card_of_product(product, mebi << 20);
    if (!c != !name || (c && name && strcmp(c->name, name) != 0))
        fail_msg("'%s' with %u MiB is %s, expected %s", product, (unsigned)mebi,
                 c ? c->name : "nothing", name ? name : "nothing");
}

TEST(products_are_recognised)
{
    expect_product("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB");
    expect_product("A100-SXM4-40GB", 40536, "A100-40GB");
    expect_product("NVIDIA A100 80GB PCIe", 81920, "A100-80GB-PCIe");
    expect_product("Tesla V100-SXM2-16GB", 16384, "V100-16GB");
    expect_product("Tesla T4", 15360, "T4");
    expect_product("Tesla T4", 20000, NULL);
    expect_product("NVIDIA GeForce RTX 3090", 24576, "RTX3090");
    expect_product("NVIDIA GeForce RTX 3090 Ti", 24564, "RTX3090Ti");
    expect_product("NVIDIA GeForce RTX 3080", 10240, "RTX3080-10GB");
    expect_product("NVIDIA GeForce RTX 3080", 12288, "RTX3080-12GB");
    expect_product("NVIDIA GeForce RTX 3080", 0, "RTX3080-10GB");
    expect_product("NVIDIA GeForce RTX 3080 Ti", 12288, "RTX3080Ti");
    expect_product("NVIDIA GeForce RTX 4090", 24564, "RTX4090");
    expect_product("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, NULL);
    expect_product("NVIDIA H100 80GB HBM3", 81559, "H100-80GB");
    expect_product("NVIDIA H200", 143771, "H200-141GB");
    expect_product("NVIDIA B300 SXM6 AC", 275040, "B300-288GB");
    expect_product("NVIDIA GeForce RTX 5060 Ti", 16311, "RTX5060Ti-16GB");
    expect_product("NVIDIA GeForce RTX 5060 Ti", 8151, "RTX5060Ti-8GB");
    expect_product("NVIDIA GeForce RTX 5070", 12227, "RTX5070");
    expect_product("NVIDIA GeForce RTX 4060 Ti", 8188, "RTX4060Ti-8GB");
    expect_product("NVIDIA GeForce RTX 4060", 8188, "RTX4060");
    expect_product("Tesla P100-PCIE-16GB", 16280, "P100-16GB");
    expect_product("NVIDIA GB200", 189471, "GB200-186GB");
    expect_product("NVIDIA GeForce RTX 5070 Ti", 16303, "RTX5070Ti");
    expect_product("NVIDIA GB10", 0, "GB10");
    expect_product("NVIDIA A10", 23028, "A10");
    expect_product("NVIDIA A10G", 23028, "A10");
    expect_product("Quadro RTX 6000", 24576, "RTX6000-Turing");
    expect_product("NVIDIA RTX 6000 Ada Generation", 49140, "RTX6000-Ada");
    expect_product("", 1, NULL);
    expect_product("NVIDIA", 1, NULL);
}

/* What a row says must hold together: a digit too many or too few is seen here. */
TEST(rows_are_plausible)
{
    for (unsigned i = 0; i < qc_card_count; i++) {
        const qc_card *c = &qc_card_table[i];
        assert_true(c->memory_bytes > 8000000000u && c->memory_bytes < 300000000000u);
        assert_true(c->bandwidth >= 200e9 && c->bandwidth <= 8e12);
        assert_true(c->host_link >= 7e9 && c->host_link <= 450e9);
        assert_true(c->peer_link == 0 || c->peer_link > c->host_link);
        assert_true(c->sm >= 60 && *qc_arch_of(c->sm).architecture);
        /* The size in a name is that of the box: more than there is, by less than a seventh. */
        const char *digits = strrchr(c->name, '-');
        unsigned box = 0;
        for (const char *p = digits ? digits + 1 : ""; *p >= '0' && *p <= '9'; p++)
            box = box * 10 + (unsigned)(*p - '0');
        if (box)
            assert_in_range(c->memory_bytes, (uint64_t)box * 960000000u,
                            (uint64_t)box * 1073741824u);
    }
    assert_in_range(find("A100-40GB")->memory_bytes, 42250000000u, 42350000000u);
    assert_in_range(find("3090")->memory_bytes, 25200000000u, 25400000000u);
}

TEST(architectures_are_known)
{
    static const struct {
        unsigned sm;
        const char *name, *dtype;
        int fp16, bf16, tf32, int8, fp8;
    } cases[] = {
        {0, "", "float16", 0, 0, 0, 0, 0},
        {61, "Pascal", "float16", 0, 0, 0, 0, 0},
        {70, "Volta", "float16", 1, 0, 0, 0, 0},
        {72, "Volta", "float16", 1, 0, 0, 1, 0},
        {75, "Turing", "float16", 1, 0, 0, 1, 0},
        {80, "Ampere", "bfloat16", 1, 1, 1, 1, 0},
        {86, "Ampere", "bfloat16", 1, 1, 1, 1, 0},
        {89, "Ada", "bfloat16", 1, 1, 1, 1, 1},
        {90, "Hopper", "bfloat16", 1, 1, 1, 1, 1},
        {100, "Blackwell", "bfloat16", 1, 1, 1, 1, 1},
        {103, "Blackwell", "bfloat16", 1, 1, 1, 1, 1},
        {110, "Blackwell", "bfloat16", 1, 1, 1, 1, 1},
        {120, "Blackwell", "bfloat16", 1, 1, 1, 1, 1},
        {121, "Blackwell", "bfloat16", 1, 1, 1, 1, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_arch_facts f = qc_arch_of(cases[i].sm);
        assert_int_equal(f.sm, cases[i].sm);
        assert_string_equal(f.architecture, cases[i].name);
        assert_string_equal(f.compute_dtype, cases[i].dtype);
        assert_int_equal(f.fp16_tensor, cases[i].fp16);
        assert_int_equal(f.bf16_tensor, cases[i].bf16);
        assert_int_equal(f.tf32_tensor, cases[i].tf32);
        assert_int_equal(f.int8_tensor, cases[i].int8);
        assert_int_equal(f.fp8_tensor, cases[i].fp8);
    }
}
