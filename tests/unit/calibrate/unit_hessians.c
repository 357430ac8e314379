/* convert/calibrate/hessians.h: second moments from a file, and what is wrong with files. */
#include "convert/calibrate/hessians.h"

#include "base/alloc.h"
#include "base/text.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fixture_files.h"
#include "tests/fixtures/st_header.h"

#include <math.h>

static fx_dir root;
static char path[FX_PATH_BYTES];

/* A tensor of a test's file. */
typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[3];
    const void *data;
    uint64_t bytes;
} piece;

static int make_root(void **state)
{
    (void)state;
    fx_make_dir(&root);
    fx_join(path, root.path, "m.safetensors");
    return 0;
}

static void put(const char *dir, const char *name, const piece *p, size_t count)
{
    qc_st_tensor t[16] = {0};
    uint64_t at = 0;
    assert_true(count <= 16);
    for (size_t i = 0; i < count; i++) {
        t[i] = (qc_st_tensor){.name = p[i].name, .dtype = p[i].dtype, .ndim = p[i].ndim};
        memcpy(t[i].dims, p[i].dims, sizeof p[i].dims);
        t[i].begin = at;
        t[i].end = at += p[i].bytes;
    }
    SCOPED(qc_strbuf) b = {.max = 10000000};
    assert_int_equal(st_header_build(&b, t, count, NULL, 0, NULL), QC_OK);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(qc_strbuf_add(&b, p[i].data, (size_t)p[i].bytes, NULL), QC_OK);
    fx_put(dir, name, b.data, b.len);
}

static const double good[9] = {2, 0.5, -1, 0.5, 3, 0.25, -1, 0.25, 1};
static const float good32[4] = {1.5f, -0.5f, -0.5f, 4};
static const int64_t seven = 7;
static const int64_t two = 2;

#define M64(name, data)                                                                            \
    {                                                                                              \
        name, QC_DTYPE_F64, 2, {3, 3}, data, 72                                                    \
    }
#define TOKENS(name, data)                                                                         \
    {                                                                                              \
        name, QC_DTYPE_I64, 1, {1}, data, 8                                                        \
    }
#define SAME(name, text)                                                                           \
    {                                                                                              \
        name, QC_DTYPE_U8, 1, {sizeof(text) - 1}, text, sizeof(text) - 1                           \
    }

static qc_hessians *open_path(void)
{
    qc_hessians *h = NULL;
    qc_error err = {0};
    if (qc_hessians_open(&h, path, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return h;
}

static const piece whole[] = {
    M64("l.0.q_proj.second_moment", good),
    TOKENS("l.0.q_proj.tokens", &seven),
    SAME("l.0.k_proj.same_as", "l.0.q_proj"),
    SAME("l.0.a.same_as", "l.0.q_proj"),
    {"l.0.q_proj.x.second_moment", QC_DTYPE_F32, 2, {2, 2}, good32, 16},
    TOKENS("l.0.q_proj.x.tokens", &two),
};

/* The number of a module, or UINT32_MAX. */
static uint32_t module_of(const qc_hessians *h, const char *name)
{
    for (uint32_t i = 0; i < qc_hessians_count(h); i++)
        if (strcmp(qc_hessians_name(h, i), name) == 0)
            return i;
    return UINT32_MAX;
}

static uint32_t find(const qc_hessians *h, const char *name, uint64_t *n, uint64_t *tokens)
{
    return qc_hessians_moments(h, module_of(h, name), n, tokens);
}

/* Names that begin alike, a name before the one it refers to, F64 and F32. */
TEST(reads)
{
    uint64_t n = 0;
    uint64_t tokens = 0;
    double out[9];
    put(root.path, "m.safetensors", whole, 6);
    qc_hessians *h = open_path();
    assert_int_equal(qc_hessians_count(h), 4);
    assert_string_equal(qc_hessians_name(h, 0), "l.0.a");
    assert_string_equal(qc_hessians_name(h, 3), "l.0.q_proj.x");
    uint32_t q = find(h, "l.0.q_proj", &n, &tokens);
    assert_int_equal(n, 3);
    assert_int_equal(tokens, 7);
    n = tokens = 0;
    assert_int_equal(find(h, "l.0.k_proj", &n, &tokens), q);
    assert_int_equal(n, 3);
    assert_int_equal(tokens, 7);
    assert_int_equal(find(h, "l.0.a", &n, &tokens), q);
    uint32_t x = find(h, "l.0.q_proj.x", &n, &tokens);
    assert_int_not_equal(x, q);
    assert_int_equal(n, 2);
    assert_int_equal(tokens, 2);
    assert_int_equal(qc_hessians_moments(h, 4, &n, &tokens), UINT32_MAX);

    assert_int_equal(qc_hessians_read(h, q, out, NULL), QC_OK);
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 3; j++)
            assert_true(out[i * 3 + j] == (j <= i ? 7 * good[i * 3 + j] : 0));
    }
    assert_int_equal(qc_hessians_read(h, x, out, NULL), QC_OK);
    assert_true(out[0] == 3 && out[1] == 0 && out[2] == -1 && out[3] == 8);
    qc_hessians_close(h);
    qc_hessians_close(NULL);
}

/* More rows than one read takes: 512 x 512 doubles are two MiB. */
TEST(many_rows)
{
    enum { N = 512 };
    static double m[N * N];
    static double out[N * N];
    uint64_t n = 0;
    uint64_t tokens = 0;
    for (int i = 0; i < N; i++) {
        for (int j = 0; j <= i; j++)
            m[i * N + j] = m[j * N + i] = i == j ? 1 + i : sin(i * 3.0 + j);
    }
    const piece p[] = {{"w.second_moment", QC_DTYPE_F64, 2, {N, N}, m, sizeof m},
                       TOKENS("w.tokens", &two)};
    put(root.path, "m.safetensors", p, 2);
    qc_hessians *h = open_path();
    uint32_t i = find(h, "w", &n, &tokens);
    assert_int_equal(qc_hessians_read(h, i, out, NULL), QC_OK);
    for (int k = 0; k < N * N; k++)
        assert_true(out[k] == (k % N <= k / N ? 2 * m[k] : 0));
    qc_hessians_close(h);
}

/* A folder with an index over two files. */
TEST(sharded)
{
    char dir[FX_PATH_BYTES];
    qc_hessians *h = NULL;
    uint64_t n = 0;
    uint64_t tokens = 0;
    double out[9];
    fx_join(dir, root.path, "shards");
    assert_int_equal(mkdir(dir, 0777), 0);
    put(dir, "a.safetensors", whole, 3);
    put(dir, "b.safetensors", whole + 3, 3);
    fx_puts(dir, "model.safetensors.index.json",
            "{\"weight_map\":{\"l.0.q_proj.second_moment\":\"a.safetensors\","
            "\"l.0.q_proj.tokens\":\"a.safetensors\",\"l.0.k_proj.same_as\":\"a.safetensors\","
            "\"l.0.a.same_as\":\"b.safetensors\",\"l.0.q_proj.x.second_moment\":\"b.safetensors\","
            "\"l.0.q_proj.x.tokens\":\"b.safetensors\"}}");
    assert_int_equal(qc_hessians_open(&h, dir, NULL), QC_OK);
    assert_int_equal(qc_hessians_count(h), 4);
    uint32_t i = find(h, "l.0.a", &n, &tokens);
    assert_int_equal(qc_hessians_read(h, i, out, NULL), QC_OK);
    assert_true(out[4] == 21);
    qc_hessians_close(h);
}

static void refused(const piece *p, size_t count, qc_status status, const char *part)
{
    qc_hessians *h = (void *)1;
    qc_error err = {0};
    put(root.path, "m.safetensors", p, count);
    qc_status st = qc_hessians_open(&h, path, &err);
    if (st != status || !strstr(err.msg, part) || !strstr(err.msg, "m.safetensors"))
        fail_msg("%s '%s', expected %s with '%s'", qc_status_name(st), err.msg,
                 qc_status_name(status), part);
    assert_null(h);
}
#define REFUSED(status, part, ...)                                                                 \
    do {                                                                                           \
        const piece list_[] = {__VA_ARGS__};                                                       \
        refused(list_, sizeof list_ / sizeof *list_, status, part);                                \
    } while (0)

TEST(bad_files)
{
    static const int64_t zero = 0;
    static const int64_t minus = -3;
    REFUSED(QC_ERR_INPUT, "'w.weight' does not belong in a file of second moments",
            {"w.weight", QC_DTYPE_F32, 2, {2, 2}, good32, 16});
    REFUSED(QC_ERR_INPUT, "'.second_moment' does not belong in a file",
            M64(".second_moment", good));
    REFUSED(QC_ERR_INPUT, "whose name ends in '.second_moment', found none",
            TOKENS("w.tokens", &seven));
    REFUSED(QC_ERR_INPUT, "has no 'tokens' beside it", M64("w.second_moment", good));
    REFUSED(QC_ERR_INPUT, "at least 1 token, found 0", M64("w.second_moment", good),
            TOKENS("w.tokens", &zero));
    REFUSED(QC_ERR_INPUT, "at least 1 token, found -3", M64("w.second_moment", good),
            TOKENS("w.tokens", &minus));
    REFUSED(QC_ERR_INPUT, "expected one I64, found 8 bytes of F64", M64("w.second_moment", good),
            {"w.tokens", QC_DTYPE_F64, 1, {1}, good, 8});
    REFUSED(QC_ERR_INPUT, "expected one I64, found 16 bytes of I64", M64("w.second_moment", good),
            {"w.tokens", QC_DTYPE_I64, 1, {2}, good, 16});
    REFUSED(QC_ERR_SHAPE, "expected a square matrix",
            {"w.second_moment", QC_DTYPE_F64, 2, {2, 3}, good, 48}, TOKENS("w.tokens", &seven));
    REFUSED(QC_ERR_SHAPE, "expected a square matrix",
            {"w.second_moment", QC_DTYPE_F64, 1, {3}, good, 24}, TOKENS("w.tokens", &seven));
    REFUSED(QC_ERR_SHAPE, "expected a square matrix",
            {"w.second_moment", QC_DTYPE_F64, 2, {0, 0}, good, 0}, TOKENS("w.tokens", &seven));
    REFUSED(QC_ERR_INPUT, "expected F64 or F32, found BF16",
            {"w.second_moment", QC_DTYPE_BF16, 2, {3, 3}, good, 18}, TOKENS("w.tokens", &seven));
    REFUSED(QC_ERR_INPUT, "both 'second_moment' and 'same_as'", M64("w.second_moment", good),
            TOKENS("w.tokens", &seven), SAME("w.same_as", "w"));
    REFUSED(QC_ERR_INPUT, "both 'tokens' and 'same_as'", M64("v.second_moment", good),
            TOKENS("v.tokens", &seven), TOKENS("w.tokens", &seven), SAME("w.same_as", "v"));
    REFUSED(QC_ERR_INPUT, "no second moments of 'x'", M64("v.second_moment", good),
            TOKENS("v.tokens", &seven), SAME("w.same_as", "x"));
    /* A chain, and a module that names itself. */
    REFUSED(QC_ERR_INPUT, "no second moments of 'w'", M64("v.second_moment", good),
            TOKENS("v.tokens", &seven), SAME("w.same_as", "v"), SAME("x.same_as", "w"));
    REFUSED(QC_ERR_INPUT, "no second moments of 'w'", SAME("w.same_as", "w"));
    REFUSED(QC_ERR_INPUT, "expected the name of a module as U8", M64("v.second_moment", good),
            TOKENS("v.tokens", &seven), {"w.same_as", QC_DTYPE_U8, 1, {0}, "", 0});
    REFUSED(QC_ERR_INPUT, "expected the name of a module as U8", M64("v.second_moment", good),
            TOKENS("v.tokens", &seven), {"w.same_as", QC_DTYPE_F32, 1, {1}, good, 4});
    static char letters[2000];
    memset(letters, 'x', sizeof letters - 1);
    REFUSED(QC_ERR_INPUT, "expected the name of a module as U8", M64("v.second_moment", good),
            TOKENS("v.tokens", &seven), {"w.same_as", QC_DTYPE_U8, 1, {1999}, letters, 1999});
    memcpy(letters + 1980, ".same_as", 9);
    REFUSED(QC_ERR_INPUT, "its name is too long", M64("v.second_moment", good),
            TOKENS("v.tokens", &seven), SAME(letters, "v"));
    fx_puts(root.path, "m.safetensors", "no tensors");
    qc_hessians *h = (void *)1;
    assert_int_not_equal(qc_hessians_open(&h, path, NULL), QC_OK);
    assert_null(h);
    fx_puts(root.path, "m.safetensors", "");
    assert_int_not_equal(qc_hessians_open(&h, path, NULL), QC_OK);
    assert_int_not_equal(qc_hessians_open(&h, "/nowhere/at/all.safetensors", NULL), QC_OK);
}

static void unreadable(const double *m, qc_status status, const char *part)
{
    double out[9];
    uint64_t n = 0;
    uint64_t tokens = 0;
    qc_error err = {0};
    const piece p[] = {M64("w.second_moment", m), TOKENS("w.tokens", &two)};
    put(root.path, "m.safetensors", p, 2);
    qc_hessians *h = open_path();
    qc_status st = qc_hessians_read(h, find(h, "w", &n, &tokens), out, &err);
    if (st != status || (part && !strstr(err.msg, part)))
        fail_msg("%s '%s', expected %s", qc_status_name(st), err.msg, qc_status_name(status));
    assert_int_equal(qc_hessians_read(h, 1, out, NULL), QC_ERR_INTERNAL);
    qc_hessians_close(h);
}

TEST(bad_matrices)
{
    double m[9];
    memcpy(m, good, sizeof m);
    m[1] += 1.9e-3; /* the diagonal's mean is 2 */
    unreadable(m, QC_OK, NULL);
    m[1] += 2e-4;
    unreadable(m, QC_ERR_INPUT, "is not symmetric");
    memcpy(m, good, sizeof m);
    m[8] = -1e-9;
    unreadable(m, QC_ERR_INPUT, "element 2 of the diagonal is negative");
    m[8] = 0;
    unreadable(m, QC_ERR_INPUT, "row 2, column 0 is -1, where the diagonal has 0 and 2");
    m[2] = m[5] = m[6] = m[7] = 0; /* an input that is zero in every token */
    unreadable(m, QC_OK, NULL);
    m[1] = m[3] = -2.4515; /* the square root of 6, and 8e-4 of it */
    unreadable(m, QC_OK, NULL);
    m[1] = m[3] = -2.4525;
    unreadable(m, QC_ERR_INPUT, "is not positive: the element at row 1, column 0 is -2.4525");
    m[5] = (double)NAN;
    unreadable(m, QC_ERR_NONFINITE, "row 1, column 2 is not a finite number");
    m[5] = 0.25;
    m[0] = (double)INFINITY;
    unreadable(m, QC_ERR_NONFINITE, "row 0, column 0");
    memset(m, 0, sizeof m);
    unreadable(m, QC_OK, NULL);
}

/* Two blocks of two outputs, a matrix of all three, and a cross moment, which need not be
 * symmetric. */
TEST(reads_outputs)
{
    static const double blocks[8] = {1, 0.5, 0.5, 4, 9, 0, 0, 0};
    static const double cross[9] = {1, 2, 3, 4, 5, 6, 7, 8, -9};
    const piece p[] = {
        M64("a.second_moment", good),
        TOKENS("a.tokens", &seven),
        M64("a.cross_moment", cross),
        {"a.output_moment", QC_DTYPE_F64, 3, {2, 2, 2}, blocks, 64},
        TOKENS("a.output_tokens", &two),
        SAME("b.same_as", "a"),
        {"b.output_moment", QC_DTYPE_F32, 2, {2, 2}, good32, 16},
        TOKENS("b.output_tokens", &seven),
        SAME("c.same_as", "a"),
    };
    double out[9];
    float g[8];
    put(root.path, "m.safetensors", p, 9);
    qc_hessians *h = open_path();
    assert_int_equal(qc_hessians_count(h), 3);
    const uint32_t a = module_of(h, "a"), b = module_of(h, "b");
    qc_hessians_outputs o = qc_hessians_outputs_of(h, a);
    assert_true(o.blocks == 2 && o.block == 2 && o.tokens == 2 && !o.whole);
    assert_int_equal(qc_hessians_read_outputs(h, a, g, NULL), QC_OK);
    for (int i = 0; i < 8; i++)
        assert_true(g[i] == (float)blocks[i]);
    o = qc_hessians_outputs_of(h, b);
    assert_true(o.blocks == 1 && o.block == 2 && o.tokens == 7 && o.whole);
    assert_int_equal(qc_hessians_read_outputs(h, b, g, NULL), QC_OK);
    assert_memory_equal(g, good32, sizeof good32);
    const uint32_t c = module_of(h, "c");
    assert_int_equal(qc_hessians_outputs_of(h, c).blocks, 0);
    assert_int_equal(qc_hessians_read_outputs(h, c, g, NULL), QC_ERR_INTERNAL);
    assert_int_equal(qc_hessians_outputs_of(h, UINT32_MAX).blocks, 0);
    assert_true(qc_hessians_has_cross(h, a) && !qc_hessians_has_cross(h, c));
    assert_int_equal(qc_hessians_read_cross(h, a, out, NULL), QC_OK);
    for (int i = 0; i < 9; i++)
        assert_true(out[i] == 7 * cross[i]);
    assert_int_equal(qc_hessians_read_cross(h, c, out, NULL), QC_ERR_INTERNAL);
    qc_hessians_close(h);
}

TEST(bad_outputs)
{
    static const int64_t zero = 0;
#define WELL   M64("w.second_moment", good), TOKENS("w.tokens", &seven)
#define SQUARE {"w.output_moment", QC_DTYPE_F32, 2, {2, 2}, good32, 16}
    REFUSED(QC_ERR_INPUT, "'w.output_moment' has no 'output_tokens' beside it", WELL, SQUARE);
    REFUSED(QC_ERR_INPUT, "at least 1 token, found 0", WELL, SQUARE,
            TOKENS("w.output_tokens", &zero));
    REFUSED(QC_ERR_INPUT, "'w.output_tokens' has no 'output_moment' beside it", WELL,
            TOKENS("w.output_tokens", &two));
    REFUSED(QC_ERR_INPUT, "'x.output_moment' has no 'second_moment' or 'same_as' beside it", WELL,
            {"x.output_moment", QC_DTYPE_F32, 2, {2, 2}, good32, 16},
            TOKENS("x.output_tokens", &two));
    REFUSED(QC_ERR_SHAPE, "a square matrix or a list of them", WELL,
            {"w.output_moment", QC_DTYPE_F32, 3, {2, 2, 1}, good32, 16},
            TOKENS("w.output_tokens", &two));
    REFUSED(QC_ERR_SHAPE, "a square matrix or a list of them", WELL,
            {"w.output_moment", QC_DTYPE_F32, 1, {4}, good32, 16}, TOKENS("w.output_tokens", &two));
    REFUSED(QC_ERR_SHAPE, "a square matrix or a list of them", WELL,
            {"w.output_moment", QC_DTYPE_F32, 3, {0, 2, 2}, good32, 0},
            TOKENS("w.output_tokens", &two));
    REFUSED(QC_ERR_INPUT, "expected F64 or F32, found F16", WELL,
            {"w.output_moment", QC_DTYPE_F16, 2, {2, 2}, good32, 8},
            TOKENS("w.output_tokens", &two));
    REFUSED(QC_ERR_INPUT, "'v.cross_moment' has no 'second_moment' beside it", WELL,
            SAME("v.same_as", "w"), M64("v.cross_moment", good));
    REFUSED(QC_ERR_SHAPE, "expected the shape of 'w.second_moment', [3, 3], found another", WELL,
            {"w.cross_moment", QC_DTYPE_F32, 2, {2, 2}, good32, 16});
    REFUSED(QC_ERR_INPUT, "expected F64 or F32, found I64", WELL,
            {"w.cross_moment", QC_DTYPE_I64, 2, {3, 3}, good, 72});
}

/* In either block, and of either number. */
TEST(bad_output_values)
{
    static const struct {
        int at;
        float value;
        qc_status status;
        const char *part;
    } cases[] = {
        {0, -1.0f, QC_ERR_INPUT, "element 0 of the diagonal is negative"},
        {7, -1.0f, QC_ERR_INPUT, "element 1 of the diagonal is negative"},
        {1, 0.75f, QC_ERR_INPUT, "is not symmetric"},
        {6, 0.75f, QC_ERR_INPUT, "is not symmetric"},
        {3, 0.0f, QC_ERR_INPUT, "is not positive"},
        {4, 0.0f, QC_ERR_INPUT, "is not positive"},
        {2, NAN, QC_ERR_NONFINITE, "row 1, column 0 is not a finite number"},
        {5, INFINITY, QC_ERR_NONFINITE, "row 2, column 1 is not a finite number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float g[8] = {1, 0.5f, 0.5f, 2, 1, 0.5f, 0.5f, 2}, out[8];
        qc_error err = {0};
        g[cases[i].at] = cases[i].value;
        const piece p[] = {WELL,
                           {"w.output_moment", QC_DTYPE_F32, 3, {2, 2, 2}, g, 32},
                           TOKENS("w.output_tokens", &two)};
        put(root.path, "m.safetensors", p, 4);
        qc_hessians *h = open_path();
        qc_status st = qc_hessians_read_outputs(h, 0, out, &err);
        if (st != cases[i].status || !strstr(err.msg, cases[i].part) ||
            !strstr(err.msg, "'w.output_moment'"))
            fail_msg("case %zu: %s '%s'", i, qc_status_name(st), err.msg);
        qc_hessians_close(h);
    }
    double c[9], out[9];
    memcpy(c, good, sizeof c);
    c[7] = (double)NAN;
    const piece p[] = {WELL, M64("w.cross_moment", c)};
    put(root.path, "m.safetensors", p, 3);
    qc_hessians *h = open_path();
    assert_int_equal(qc_hessians_read_cross(h, 0, out, NULL), QC_ERR_NONFINITE);
    qc_hessians_close(h);
}

/* Every allocation fails once: no leak (sanitizers), nothing handed out. */
TEST(no_memory)
{
    put(root.path, "m.safetensors", whole, 6);
    EACH_ALLOCATION_FAILS (fault, 0) {
        qc_hessians *h = (void *)1;
        fault.st = qc_hessians_open(&h, path, NULL);
        assert_true(fault.st == QC_OK || !h);
        qc_hessians_close(h);
    }
    qc_hessians *h = open_path();
    double out[9];
    EACH_ALLOCATION_FAILS (fault, 0)
        fault.st = qc_hessians_read(h, 2, out, NULL);
    qc_hessians_close(h);
}

TEST_GROUP(make_root, NULL)
