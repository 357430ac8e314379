#include "convert/model/recipe.h"
#include "convert/term/glob.h"
#include "tests/fixtures/test.h"

TEST(literals_and_wildcards)
{
    static const struct {
        const char *glob, *name;
        int match;
    } cases[] = {
        {"", "", 1},
        {"", "a", 0},
        {"a", "", 0},
        {"*", "", 1},
        {"**", "", 1},
        {"*", "model.layers.0.mlp", 1},
        {"?", "", 0},
        {"?", "a", 1},
        {"a?c", "abc", 1},
        {"a?c", "ac", 0},
        {"model.layers.0.*", "model.layers.0.mlp.up_proj.weight", 1},
        {"model.layers.0.*", "model.layers.10.mlp.up_proj.weight", 0},
        {"*.q_proj.*", "model.layers.3.self_attn.q_proj.weight", 1},
        {"*.q_proj.*", "model.layers.3.self_attn.k_proj.weight", 0},
        {"*.q_proj", "model.layers.3.self_attn.q_proj.weight", 0},
        {"*ab*ab", "abab", 1},
        {"*ab*ab", "ababa", 0},
        {"*ab*ab", "xabyabab", 1},
        {"a*b*c", "aXbYc", 1},
        {"a*b*c", "aXcYb", 0},
        {"lm_head.weight", "lm_head.weight", 1},
        {"lm_head.weight", "LM_head.weight", 0},
        {"layers.[0-3].*", "layers.2.w", 1},
        {"layers.[0-3].*", "layers.4.w", 0},
        {"layers.[!0-3].*", "layers.4.w", 1},
        {"layers.[^0-3].*", "layers.2.w", 0},
        {"[abc]", "b", 1},
        {"[abc]", "d", 0},
        {"[]]", "]", 1},
        {"[]a]x", "ax", 1},
        {"[!]]", "]", 0},
        {"[!]]", "a", 1},
        {"[a-]", "-", 1},
        {"[-a]", "-", 1},
        {"[\\]x]", "]", 1},
        {"[a\\-z]", "-", 1},
        {"[a\\-z]", "m", 0},
        {"[z-a]", "m", 0},
        {"\\*", "*", 1},
        {"\\*", "a", 0},
        {"a\\?", "a?", 1},
        {"\\[x]", "[x]", 1},
        {"a\\", "a\\", 1},
        {"[abc", "[abc", 1},
        {"[abc", "a", 0},
        {"[", "[", 1},
        {"[!", "[!", 1},
        {"*[x", "aa[x", 1},
        {"\xc3\xa9*", "\xc3\xa9t\xc3\xa9", 1},
        {"[\xc0-\xc3]?", "\xc3\xa9", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (qc_glob_match(cases[i].glob, cases[i].name) != cases[i].match)
            fail_msg("glob '%s' and name '%s': expected %d", cases[i].glob, cases[i].name,
                     cases[i].match);
    }
}

/* The definition, exponential and recursive, for literals, '?' and '*'. */
static int plain_match(const char *g, const char *s)
{
    if (!*g)
        return !*s;
    if (*g == '*')
        return plain_match(g + 1, s) || (*s && plain_match(g, s + 1));
    return *s && (*g == '?' || *g == *s) && plain_match(g + 1, s + 1);
}

TEST(agrees_with_definition)
{
    /* Every glob of up to 6 symbols of "ab?*" with every name of up to 6 of "ab". */
    static const char symbols[] = "ab?*";
    for (unsigned gn = 0; gn <= 5; gn++) {
        for (unsigned g = 0; g < 1u << (2 * gn); g++) {
            char glob[8] = {0};
            for (unsigned i = 0; i < gn; i++)
                glob[i] = symbols[g >> (2 * i) & 3];
            for (unsigned nn = 0; nn <= 6; nn++) {
                for (unsigned n = 0; n < 1u << nn; n++) {
                    char name[8] = {0};
                    for (unsigned i = 0; i < nn; i++)
                        name[i] = (n >> i & 1) ? 'b' : 'a';
                    if (qc_glob_match(glob, name) != plain_match(glob, name))
                        fail_msg("glob '%s' and name '%s'", glob, name);
                }
            }
        }
    }
}

TEST(hostile_globs_end_soon)
{
    enum { N = 4000 };
    static char glob[2 * N + 3], name[N + 1];
    memset(name, 'a', N);
    for (unsigned i = 0; i < N; i++) {
        glob[2 * i] = '*';
        glob[2 * i + 1] = 'a';
    }
    memcpy(glob + 2 * N, "b", 2);
    assert_int_equal(qc_glob_match(glob, name), 0);
    /* A star and brackets that never close, against a name of brackets. */
    memset(name, '[', N);
    memset(glob, '[', N);
    glob[0] = '*';
    memcpy(glob + N / 2, "b", 2);
    assert_int_equal(qc_glob_match(glob, name), 0);
    /* A long class tried at every byte. */
    memset(name, 'a', N);
    memset(glob, 'x', N);
    memcpy(glob, "*[", 2);
    memcpy(glob + N - 1, "]", 2);
    assert_int_equal(qc_glob_match(glob, name), 0);
}

TEST(natural_order)
{
    static const char *const ordered[] = {
        "",
        "a",
        "layers.2.mlp",
        "layers.2.mlp.experts.9.w1",
        "layers.2.mlp.experts.10.w1",
        "layers.10.mlp",
        "layers.10.mlp.w01",
        "layers.10.mlp.w1",
        "layers.10.mlp.w1x",
        "layers.18446744073709551616.mlp",
        "layers.18446744073709551617.mlp",
        "layers.x",
        "model",
        "z\xc3\xa9",
    };
    size_t n = sizeof ordered / sizeof *ordered;
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < n; j++) {
            int c = qc_natural_compare(ordered[i], ordered[j]);
            int want = i < j ? -1 : i > j;
            if ((c > 0) - (c < 0) != want)
                fail_msg("'%s' and '%s': %d", ordered[i], ordered[j], c);
        }
    }
}
