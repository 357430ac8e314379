/* Identities of conversions; and a commit that stops at every rename, and goes on. */
#include "convert/cli/commands.h"
#include "convert/run/resume.h"
#include "formats/file_io.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"
#include "tests/fixtures/test_world.h"

#include <errno.h>
#include <sys/stat.h>

#define STAGING ".qconv-partial"
#define SHARD   "model.safetensors.zst"

static int setup(void **state)
{
    const world *w = *state = world_in(test_folder);
    test_write_model(w->model);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_io_fail_at(QC_IO_RENAME, 0, 0, 0);
    return 0;
}

/* ---- identities ---- */

static qc_status compare(const char *then, const char *now, qc_error *err)
{
    return qc_identity_compare(then, strlen(then), now, strlen(now), "OUT", err);
}

TEST_WITH(test_identities, setup, teardown)
{
    static const struct {
        const char *then, *now;
        qc_status want;
        const char *has[4];
    } cases[] = {
        {"", "", QC_OK, {NULL}},
        {"a=1\nb=2\n", "a=1\nb=2\n", QC_OK, {NULL}},
        {"--to=nf4\nb=2\n",
         "--to=int8\nb=2\n",
         QC_ERR_USAGE,
         {"OUT holds", "--to was 'nf4' then and is 'int8' now", "--restart"}},
        {"--keep=x\nplan=1\n", "plan=1\n", QC_ERR_USAGE, {"--keep 'x'", "plan '1'"}},
        {"plan=1\n", "plan=1\n--keep=x\n", QC_ERR_USAGE, {"--keep 'x'"}},
        {"a=1\n", "", QC_ERR_USAGE, {"a '1'", "nothing"}},
        {"source.2=a, 5 bytes\n",
         "source.2=a, 6 bytes\n",
         QC_ERR_INPUT,
         {"source.2 was 'a, 5 bytes' then and is 'a, 6 bytes' now", "--restart"}},
        {"source.config=1\n", "source.config=2\n", QC_ERR_INPUT, {"source.config"}},
        {"source.1=a\n", "plan=a\n", QC_ERR_USAGE, {"source.1 'a'", "plan 'a'"}},
        {"plan=a\n", "source.1=a\n", QC_ERR_INPUT, {"plan 'a'", "source.1 'a'"}},
        {"no equals", "no equals\n", QC_OK, {NULL}},
        {"no equals", "no=equals", QC_ERR_USAGE, {"no equals"}},
        {"=\n", "==\n", QC_ERR_USAGE, {"'='"}},
        {"\n\n", "\n", QC_ERR_USAGE, {NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_error err = {0};
        qc_status st = compare(cases[i].then, cases[i].now, &err);
        if (st != cases[i].want)
            fail_msg("case %zu: %s: %s", i, qc_status_name(st), err.msg);
        for (size_t k = 0; k < 4 && cases[i].has[k]; k++) {
            if (!strstr(err.msg, cases[i].has[k]))
                fail_msg("case %zu: no \"%s\" in: %s", i, cases[i].has[k], err.msg);
        }
    }
}

/* Values of any length: what is shown of them is not. */
TEST_WITH(test_long_values, setup, teardown)
{
    static char then[5000], now[5000];
    qc_error err = {0};
    memset(then, 'x', sizeof then - 1);
    memset(now, 'x', sizeof now - 1);
    memcpy(then, "--keep=", 7);
    memcpy(now, "--keep=", 7);
    now[sizeof now - 2] = 'y';
    assert_int_equal(compare(then, then, &err), QC_OK);
    assert_int_equal(compare(then, now, &err), QC_ERR_USAGE);
    assert_non_null(strstr(err.msg, "--restart"));
}

static void identity_of(const world *w, const char *words, unsigned parts, qc_strbuf *out)
{
    char line[512], *argv[32] = {NULL}, *rest = NULL;
    int argc = 0;
    qc_options o;
    qc_checkpoint *m = NULL;
    qc_recipe recipe;
    qc_plan plan;
    qc_error err = {0};
    (void)snprintf(line, sizeof line, "qconv -q %s %s %s", words, w->model, w->out);
    for (char *p = strtok_r(line, " ", &rest); p; p = strtok_r(NULL, " ", &rest))
        argv[argc++] = p;
    SCOPED(qc_arena) a = {0};
    test_must(qc_options_parse(&o, &a, argc, argv, &err), &err);
    test_must(qc_checkpoint_open(&m, o.model, &err), &err);
    test_must(qc_recipe_make(&recipe, &a, m, &o.convert.plan.recipe, &err), &err);
    test_must(qc_plan_make(&plan, &a, m, &recipe, &o.call, &o.convert.plan, &err), &err);
    qc_strbuf_init(out, 1u << 20);
    test_must(qc_identity_make(out, &plan, parts, &err), &err);
    qc_checkpoint_close(m);
}

static int same_identity(const world *w, const char *a, unsigned a_parts, const char *b,
                         unsigned b_parts)
{
    qc_strbuf x, y;
    qc_error err = {0};
    identity_of(w, a, a_parts, &x);
    identity_of(w, b, b_parts, &y);
    qc_status st = qc_identity_compare(x.data, x.len, y.data, y.len, "OUT", &err);
    qc_strbuf_deinit(&x);
    qc_strbuf_deinit(&y);
    return st == QC_OK;
}

TEST_WITH(test_identities_of_commands, setup, teardown)
{
    static const char *const same[] = {"--threads 3", "--device cpu", "--json", "--force",
                                       "--restart"};
    static const char *const other[] = {
        "--block-size 32",      "--no-double-quant",       "--scale absmax",
        "--rest fp16",          "--compress zstd:2",       "--compress none",
        "--max-shard-size 1KB", "--compute-dtype float32", "--keep *"};
    const world *w = *state;
    char words[128];
    assert_true(same_identity(w, "--to nf4", 1, "--to nf4", 1));
    assert_false(same_identity(w, "--to nf4", 1, "--to nf4", 2));
    assert_false(same_identity(w, "--to nf4", 1, "--to int8", 1));
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        (void)snprintf(words, sizeof words, "--to nf4 %s", same[i]);
        if (!same_identity(w, "--to nf4", 1, words, 1))
            fail_msg("%s has a say", same[i]);
    }
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        (void)snprintf(words, sizeof words, "--to nf4 %s", other[i]);
        if (same_identity(w, "--to nf4", 1, words, 1))
            fail_msg("%s has no say", other[i]);
    }
}

/* ---- commits ---- */

static qc_status convert(const world *w, const char *to, qc_error *err)
{
    return test_run_line(test_command, err, "qconv --to %s -q --force --threads=2 %s %s", to,
                         w->model, w->out);
}

static void must_verify(const world *w)
{
    qc_error err = {0};
    test_must(test_run_line(test_command, &err, "qconv verify -q --threads=2 %s%s", w->out, ""),
              &err);
}

static int inode_of(const world *w, const char *name, ino_t *out)
{
    char path[256];
    struct stat st;
    (void)snprintf(path, sizeof path, "%s/%s", w->out, name);
    if (stat(path, &st) != 0)
        return 0;
    *out = st.st_ino;
    return 1;
}

static void slurp(const world *w, const char *name, qc_strbuf *out)
{
    char path[256];
    qc_error err = {0};
    qc_strbuf_init(out, 1u << 24);
    (void)snprintf(path, sizeof path, "%s/%s", w->out, name);
    test_must(qc_file_slurp(path, out, &err), &err);
}

static void rename_in(const world *w, const char *from, const char *to)
{
    char a[256], b[256];
    (void)snprintf(a, sizeof a, "%s/%s", w->out, from);
    (void)snprintf(b, sizeof b, "%s/%s", w->out, to);
    assert_int_equal(rename(a, b), 0);
}

/* What is in OUT is the reference, and nothing else is. */
static void must_be(const world *w, const qc_strbuf *manifest)
{
    qc_strbuf now;
    ino_t ignored;
    slurp(w, "qconv.json", &now);
    assert_int_equal(now.len, manifest->len);
    assert_memory_equal(now.data, manifest->data, now.len);
    qc_strbuf_deinit(&now);
    assert_false(inode_of(w, STAGING, &ignored));
    must_verify(w);
}

/* The run stops at the n-th rename; the same command then moves what is left to move. */
static void check_commits(const world *w, const char *before)
{
    qc_strbuf manifest;
    qc_error err = {0};
    unsigned moved_on = 0;
    test_must(convert(w, "nf4", &err), &err);
    slurp(w, "qconv.json", &manifest);
    for (uint64_t n = 1;; n++) {
        ino_t staged = 0, now = 0, ignored;
        test_remove(w->out);
        if (before)
            test_must(convert(w, before, &err), &err);
        qc_io_fail_at(QC_IO_RENAME, n, 1, EIO);
        qc_status st = convert(w, "nf4", &err);
        uint64_t tried = qc_io_count(QC_IO_RENAME);
        qc_io_fail_at(QC_IO_RENAME, 0, 0, 0);
        if (tried < n) {
            assert_int_equal(st, QC_OK);
            break;
        }
        assert_int_equal(st, QC_ERR_IO);
        assert_non_null(strstr(err.msg, "the same command continues"));
        int committing = inode_of(w, STAGING "/qconv.json", &ignored);
        int has_shard = inode_of(w, STAGING "/" SHARD, &staged) || inode_of(w, SHARD, &staged);
        assert_true(has_shard);
        if (committing) {
            /* Another command has no business there. */
            assert_int_equal(convert(w, "int8", &err), QC_ERR_USAGE);
            moved_on++;
        }
        test_must(convert(w, "nf4", &err), &err);
        assert_true(inode_of(w, SHARD, &now));
        assert_int_equal(now, staged); /* not made again */
        must_be(w, &manifest);
    }
    assert_true(moved_on >= 2);
    qc_strbuf_deinit(&manifest);
}

TEST_WITH(test_commit_at_every_rename, setup, teardown)
{
    check_commits(*state, NULL);
}

TEST_WITH(test_commit_over_an_old_output, setup, teardown)
{
    check_commits(*state, "int8");
}

/* Killed between the last rename and the removal of the staging folder. */
TEST_WITH(test_nothing_left_but_to_clean_up, setup, teardown)
{
    const world *w = *state;
    qc_strbuf manifest;
    qc_error err = {0};
    ino_t before = 0, after = 0;
    test_must(convert(w, "nf4", &err), &err);
    slurp(w, "qconv.json", &manifest);
    test_remove(w->out);
    uint64_t renames = 0;
    for (uint64_t n = 1; renames == 0; n++) {
        qc_io_fail_at(QC_IO_RENAME, n, 1, EIO);
        qc_status st = convert(w, "nf4", &err);
        renames = qc_io_count(QC_IO_RENAME) < n ? n - 1 : 0;
        qc_io_fail_at(QC_IO_RENAME, 0, 0, 0);
        assert_int_equal(st, renames ? QC_OK : QC_ERR_IO);
        test_remove(w->out);
    }
    qc_io_fail_at(QC_IO_RENAME, renames, 1, EIO);
    assert_int_equal(convert(w, "nf4", &err), QC_ERR_IO);
    qc_io_fail_at(QC_IO_RENAME, 0, 0, 0);
    rename_in(w, STAGING "/qconv.json", "qconv.json");
    assert_true(inode_of(w, SHARD, &before));
    test_must(convert(w, "nf4", &err), &err);
    assert_true(inode_of(w, SHARD, &after));
    assert_int_equal(before, after);
    must_be(w, &manifest);
    qc_strbuf_deinit(&manifest);
}
