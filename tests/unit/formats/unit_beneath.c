/* Names beneath a folder: through no link, by openat2 and without it. */
#define _GNU_SOURCE /* symlink, mkfifo */
#include "formats/beneath.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <errno.h>
#include <limits.h>

typedef struct {
    char path[64];
    qc_file root; /* path/root; beside it "outside" with a file "precious" */
} place;

static const char *in(const place *p, const char *name)
{
    static char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", p->path, name);
    return path;
}

static void put(const place *p, const char *name)
{
    qc_error err = {0};
    test_must(qc_file_put(in(p, name), "x", 1, &err), &err);
}

static int there(const place *p, const char *name)
{
    struct stat s;
    return lstat(in(p, name), &s) == 0;
}

static int setup_with(void **state, int openat2)
{
    static place p;
    qc_error err = {0};
    qc_beneath_use_openat2(openat2);
    test_folder(p.path, sizeof p.path);
    test_must(qc_dir_make(in(&p, "root/a/b"), &err), &err);
    test_must(qc_dir_make(in(&p, "outside/sub"), &err), &err);
    put(&p, "outside/precious");
    put(&p, "outside/sub/precious");
    put(&p, "root/file");
    put(&p, "root/a/b/deep");
    assert_int_equal(symlink("../outside", in(&p, "root/link")), 0);
    assert_int_equal(symlink("../../outside", in(&p, "root/a/link")), 0);
    assert_int_equal(symlink("../outside/precious", in(&p, "root/to_file")), 0);
    assert_int_equal(symlink("nowhere", in(&p, "root/dangling")), 0);
    assert_int_equal(mkfifo(in(&p, "root/pipe"), 0600), 0);
    test_must(qc_beneath_open(&p.root, in(&p, "root"), &err), &err);
    *state = &p;
    return 0;
}

static int setup_openat2(void **state)
{
    return setup_with(state, 1);
}

static int setup_stepwise(void **state)
{
    return setup_with(state, 0);
}

static int teardown(void **state)
{
    place *p = *state;
    assert_true(there(p, "outside/precious"));
    assert_true(there(p, "outside/sub/precious"));
    qc_file_discard(&p->root);
    qc_beneath_use_openat2(1);
    return 0;
}

/* A test with openat2 and without. */
#define BOTH_WAYS(name)                                                                            \
    static void name(void **state);                                                                \
    TEST_WITH(name##_by_openat2, setup_openat2, teardown)                                          \
    {                                                                                              \
        name(state);                                                                               \
    }                                                                                              \
    TEST_WITH(name##_by_steps, setup_stepwise, teardown)                                           \
    {                                                                                              \
        name(state);                                                                               \
    }                                                                                              \
    static void name(void **state)

BOTH_WAYS(test_looking)
{
    static const struct {
        const char *name;
        qc_entry_kind kind;
        size_t blocked;
    } cases[] = {
        {"file", QC_ENTRY_FILE, 0},
        {"a/b/deep", QC_ENTRY_FILE, 0},
        {"a/b", QC_ENTRY_FOLDER, 0},
        {"nothing", QC_ENTRY_MISSING, 0},
        {"a/nothing/at/all", QC_ENTRY_MISSING, 0},
        {"link", QC_ENTRY_LINK, 0},
        {"to_file", QC_ENTRY_LINK, 0},
        {"dangling", QC_ENTRY_LINK, 0},
        {"pipe", QC_ENTRY_OTHER, 0},
        {"link/precious", QC_ENTRY_LINK, 4},
        {"link/sub/precious", QC_ENTRY_LINK, 4},
        {"a/link/precious", QC_ENTRY_LINK, 6},
        {"file/x", QC_ENTRY_FILE, 4},
        {"pipe/x/y", QC_ENTRY_OTHER, 4},
    };
    const place *p = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_error err = {0};
        qc_entry e;
        test_must(qc_beneath_look(&p->root, cases[i].name, &e, &err), &err);
        if (e.kind != cases[i].kind || e.blocked != cases[i].blocked)
            print_error("%s: %s, %zu\n", cases[i].name, qc_entry_text(e.kind), e.blocked);
        assert_int_equal(e.kind, cases[i].kind);
        assert_int_equal(e.blocked, cases[i].blocked);
    }
}

BOTH_WAYS(test_names_that_lead_out)
{
    static const char *const names[] = {"../outside/precious",
                                        "a/../../outside/precious",
                                        "/etc/hostname",
                                        "a//b",
                                        "./file",
                                        "",
                                        "a/b/",
                                        "..",
                                        "link/../outside/precious"};
    const place *p = *state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        qc_error err = {0};
        qc_entry e;
        assert_int_equal(qc_beneath_look(&p->root, names[i], &e, &err), QC_ERR_IO);
        assert_int_equal(qc_beneath_remove(&p->root, names[i], &err), QC_ERR_IO);
        assert_int_equal(qc_beneath_rename(&p->root, "file", names[i], &err), QC_ERR_IO);
        assert_int_equal(qc_beneath_rename(&p->root, names[i], "taken", &err), QC_ERR_IO);
        assert_int_equal(qc_beneath_open_fd(&p->root, names[i]), -1);
    }
    assert_true(there(p, "root/file"));
    assert_false(there(p, "root/taken"));
}

BOTH_WAYS(test_removing)
{
    static const char *const kept[] = {"link/precious", "a/link/precious", "link/sub/precious",
                                       "nothing",       "a/nothing/x",     "file/x"};
    const place *p = *state;
    qc_error err = {0};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        test_must(qc_beneath_remove(&p->root, kept[i], &err), &err);
    assert_true(there(p, "outside/precious"));
    test_must(qc_beneath_remove(&p->root, "to_file", &err), &err); /* the link itself */
    assert_false(there(p, "root/to_file"));
    assert_true(there(p, "outside/precious"));
    test_must(qc_beneath_remove(&p->root, "a/b/deep", &err), &err);
    qc_beneath_remove_empty(&p->root, "a/b/deep");
    assert_false(there(p, "root/a/b"));
    assert_true(there(p, "root/a"));
    assert_int_equal(qc_beneath_remove(&p->root, "a", &err), QC_ERR_IO); /* a folder is no file */
}

BOTH_WAYS(test_renaming)
{
    const place *p = *state;
    qc_error err = {0};
    assert_int_equal(qc_beneath_rename(&p->root, "file", "link/precious", &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, "something on the way to it is not a folder"));
    assert_int_equal(qc_beneath_rename(&p->root, "link/precious", "stolen", &err), QC_ERR_IO);
    assert_false(there(p, "root/stolen"));
    test_must(qc_beneath_rename(&p->root, "file", "to_file", &err), &err); /* replaces the link */
    qc_entry e;
    test_must(qc_beneath_look(&p->root, "to_file", &e, &err), &err);
    assert_int_equal(e.kind, QC_ENTRY_FILE);
    test_must(qc_beneath_rename(&p->root, "to_file", "a/b/moved", &err), &err);
    assert_true(there(p, "root/a/b/moved"));
    qc_io_fail_at(QC_IO_RENAME, 1, 0, ENOSPC);
    assert_int_equal(qc_beneath_rename(&p->root, "a/b/moved", "back", &err), QC_ERR_NOSPACE);
    qc_io_fail_at(QC_IO_RENAME, 0, 0, 0);
}

BOTH_WAYS(test_making)
{
    static const char *const refused[] = {"link/new", "a/link/new", "link",        "file/new",
                                          "file",     "dangling",   "dangling/new"};
    const place *p = *state;
    qc_error err = {0};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        assert_int_equal(qc_beneath_make_folder(&p->root, refused[i], &err), QC_ERR_IO);
    assert_false(there(p, "outside/new"));
    test_must(qc_beneath_make_folder(&p->root, "", &err), &err);
    test_must(qc_beneath_make_folder(&p->root, "a/b/c/d", &err), &err);
    test_must(qc_beneath_make_folder(&p->root, "a/b/c/d", &err), &err);
    assert_true(there(p, "root/a/b/c/d"));
    test_must(qc_beneath_sync(&p->root, "a/b/c", &err), &err);
    assert_int_equal(qc_beneath_sync(&p->root, "link", &err), QC_ERR_IO);
}

BOTH_WAYS(test_reading)
{
    const place *p = *state;
    int fd = qc_beneath_open_fd(&p->root, "a/b/deep");
    assert_true(fd >= 0);
    (void)close(fd);
    assert_int_equal(qc_beneath_open_fd(&p->root, "to_file"), -1);
    assert_int_equal(qc_beneath_open_fd(&p->root, "link/precious"), -1);
}

static qc_status count_entry(void *ctx, const char *name, qc_error *err)
{
    (void)name, (void)err;
    ++*(int *)ctx;
    return QC_OK;
}

BOTH_WAYS(test_whole_folders)
{
    const place *p = *state;
    char odd[PATH_MAX];
    qc_entry_kind kind;
    qc_error err = {0};
    int count = 0;
    test_must(qc_beneath_list(&p->root, "link", count_entry, &count, &err), &err);
    assert_int_equal(count, 0);
    test_must(qc_beneath_list(&p->root, "a", count_entry, &count, &err), &err);
    assert_int_equal(count, 2);
    test_must(qc_beneath_find_odd(&p->root, "a", odd, &kind, &err), &err);
    assert_string_equal(odd, "a/link");
    assert_int_equal(kind, QC_ENTRY_LINK);
    test_must(qc_beneath_find_odd(&p->root, "a/b", odd, &kind, &err), &err);
    assert_string_equal(odd, "");
    qc_beneath_clear(&p->root, "link", NULL);
    assert_true(there(p, "root/link"));
    qc_beneath_clear(&p->root, "a", NULL); /* the link in it goes, what it leads to does not */
    assert_false(there(p, "root/a"));
}

BOTH_WAYS(test_the_root_may_be_a_link)
{
    const place *p = *state;
    qc_file root = QC_FILE_CLOSED;
    qc_error err = {0};
    qc_entry e;
    test_must(qc_beneath_open(&root, in(p, "root/link"), &err), &err);
    test_must(qc_beneath_look(&root, "sub/precious", &e, &err), &err);
    assert_int_equal(e.kind, QC_ENTRY_FILE);
    qc_file_discard(&root);
    assert_int_equal(qc_beneath_open(&root, in(p, "root/file"), &err), QC_ERR_IO);
    test_must(qc_beneath_look_once(in(p, "nowhere"), "x", &e, &err), &err);
    assert_int_equal(e.kind, QC_ENTRY_MISSING);
}
