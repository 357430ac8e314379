/* formats/file_io.h */
#include "formats/file_io.h"
#include "formats/text_file.h"

#include "base/alloc.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fixture_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

static fx_dir dir;
static char path[FX_PATH_BYTES];

static int setup(void **state)
{
    (void)state;
    fx_make_dir(&dir);
    fx_join(path, dir.path, "file");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (int k = 0; k < QC_IO_KIND_COUNT; k++)
        qc_io_fail_at((qc_io_kind)k, 0, 0, 0);
    qc_alloc_fail_at(0, 0);
    return 0;
}

TEST_WITH(writes_and_reads_at_offsets, setup, teardown)
{
    qc_file f = QC_FILE_CLOSED;
    char buf[8] = {0};
    uint64_t bytes = 0;
    qc_error err = {0};
    assert_int_equal(qc_file_create(&f, path, &err), QC_OK);
    assert_int_equal(qc_file_pwrite(&f, "world", 5, 6, &err), QC_OK);
    assert_int_equal(qc_file_pwrite(&f, "hello ", 6, 0, &err), QC_OK);
    assert_int_equal(qc_file_pwrite(&f, "", 0, 100, &err), QC_OK);
    qc_file_hint_write_back(&f, 0, 11);
    qc_file_hint_write_back(&f, UINT64_MAX, 1);
    assert_int_equal(qc_file_sync(&f, &err), QC_OK);
    assert_int_equal(qc_file_close(&f, &err), QC_OK);
    assert_int_equal(f.fd, -1);
    assert_null(f.path);
    assert_int_equal(qc_file_close(&f, &err), QC_OK);

    assert_int_equal(qc_file_open_read(&f, path, &err), QC_OK);
    assert_int_equal(qc_file_size(&f, &bytes, &err), QC_OK);
    assert_int_equal(bytes, 11);
    qc_file_hint_read_soon(&f, 0, 11);
    qc_file_hint_read_soon(&f, 0, UINT64_MAX);
    assert_int_equal(qc_file_pread(&f, buf, 5, 6, &err), QC_OK);
    assert_string_equal(buf, "world");
    assert_int_equal(qc_file_pread(&f, buf, 0, 99, &err), QC_OK);
    assert_int_equal(qc_file_pread(&f, buf, 8, 6, &err), QC_ERR_TRUNCATED);
    assert_non_null(strstr(err.msg, "3 of 8 bytes"));
    assert_non_null(strstr(err.msg, path));
    assert_int_equal(qc_file_pread(&f, buf, 1, UINT64_MAX, &err), QC_ERR_INPUT);
    assert_int_equal(qc_file_pread(&f, buf, 2, INT64_MAX, &err), QC_ERR_INPUT);
    assert_int_equal(qc_file_pwrite(&f, buf, 1, UINT64_MAX, &err), QC_ERR_NOSPACE);
    assert_int_equal(qc_file_pwrite(&f, buf, 1, 0, &err), QC_ERR_IO); /* read only */
    qc_file_discard(&f);
    qc_file_discard(&f);
}

TEST_WITH(create_empties, setup, teardown)
{
    qc_file f = QC_FILE_CLOSED;
    uint64_t bytes = 9;
    fx_puts(dir.path, "file", "old");
    assert_int_equal(qc_file_create(&f, path, NULL), QC_OK);
    assert_int_equal(qc_file_size(&f, &bytes, NULL), QC_OK);
    assert_int_equal(bytes, 0);
    qc_file_discard(&f);
}

TEST_WITH(refuses_what_is_no_file, setup, teardown)
{
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    assert_int_equal(qc_file_open_read(&f, path, &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, path));
    assert_int_equal(qc_file_open_read(&f, dir.path, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "directory"));
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(qc_file_open_read(&f, path, &err), QC_ERR_INPUT); /* does not wait */
    assert_non_null(strstr(err.msg, "pipe"));
    assert_int_equal(f.fd, -1);
    assert_int_equal(qc_file_create(&f, dir.path, &err), QC_ERR_IO);
}

TEST_WITH(a_link_is_not_written_through, setup, teardown)
{
    char link_path[FX_PATH_BYTES];
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    uint64_t bytes = 0;
    qc_path_kind kind = QC_PATH_MISSING;
    fx_puts(dir.path, "file", "four");
    fx_join(link_path, dir.path, "to-file");
    assert_int_equal(symlink("file", link_path), 0);
    assert_int_equal(qc_file_create(&f, link_path, &err), QC_ERR_IO);
    assert_int_equal(f.fd, -1);
    assert_int_equal(qc_path_stat(path, &kind, &bytes, &err), QC_OK);
    assert_int_equal(bytes, 4);
}

TEST_WITH(operations_on_a_bad_descriptor_fail, setup, teardown)
{
    char name[] = "gone";
    qc_file f = {-1, name};
    uint64_t bytes = 0;
    char c = 0;
    assert_int_equal(qc_file_size(&f, &bytes, NULL), QC_ERR_IO);
    assert_int_equal(qc_file_pread(&f, &c, 1, 0, NULL), QC_ERR_IO);
    assert_int_equal(qc_file_pwrite(&f, &c, 1, 0, NULL), QC_ERR_IO);
    assert_int_equal(qc_file_sync(&f, NULL), QC_ERR_IO);
    f.fd = 1 << 20; /* was never open */
    f.path = NULL;
    qc_error err = {0};
    assert_int_equal(qc_strdup(&f.path, name, NULL), QC_OK);
    assert_int_equal(qc_file_close(&f, &err), QC_ERR_IO);
    assert_int_equal(f.fd, -1);
}

TEST_WITH(slurps_and_keeps_to_the_limit, setup, teardown)
{
    qc_strbuf b;
    qc_error err = {0};
    static char big[600000];
    memset(big, 'x', sizeof big);
    fx_put(dir.path, "file", big, sizeof big);
    qc_strbuf_init(&b, sizeof big + 1);
    assert_int_equal(qc_strbuf_adds(&b, ">", NULL), QC_OK);
    assert_int_equal(qc_file_slurp(path, &b, &err), QC_OK);
    assert_int_equal(b.len, sizeof big + 1);
    assert_memory_equal(b.data + 1, big, sizeof big);
    assert_int_equal(qc_file_slurp(path, &b, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "600000"));
    assert_int_equal(b.len, sizeof big + 1);
    qc_strbuf_deinit(&b);

    qc_strbuf_init(&b, 10);
    assert_int_equal(qc_file_slurp(path, &b, &err), QC_ERR_INPUT);
    fx_puts(dir.path, "file", "");
    assert_int_equal(qc_file_slurp(path, &b, &err), QC_OK);
    assert_string_equal(b.data, "");
    qc_strbuf_deinit(&b);
    fx_join(path, dir.path, "missing");
    assert_int_equal(qc_file_slurp(path, &b, &err), QC_ERR_IO);
}

static void assert_content(const char *name, const char *want)
{
    SCOPED(qc_strbuf) b = {.max = 1000};
    assert_int_equal(qc_file_slurp(name, &b, NULL), QC_OK);
    assert_string_equal(b.data, want);
}

static size_t entries(const char *folder)
{
    size_t n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    while (readdir(d))
        n++;
    (void)closedir(d);
    return n - 2;
}

/* Whatever fails, the old content stays whole and no temporary file is left. */
TEST_WITH(put_replaces_at_once_or_not_at_all, setup, teardown)
{
    qc_error err = {0};
    assert_int_equal(qc_file_put(path, "old", 3, &err), QC_OK);
    for (int kind = QC_IO_WRITE; kind <= QC_IO_RENAME; kind++) {
        qc_io_fail_at((qc_io_kind)kind, 1, 0, ENOSPC);
        assert_int_equal(qc_file_put(path, "new", 3, &err), QC_ERR_NOSPACE);
        qc_io_fail_at((qc_io_kind)kind, 0, 0, 0);
        assert_content(path, "old");
        assert_int_equal(entries(dir.path), 1);
    }
    for (uint64_t n = 1;; n++) {
        qc_alloc_fail_at(n, 0);
        qc_status st = qc_file_put(path, "old", 3, &err);
        qc_alloc_fail_at(0, 0);
        if (st == QC_OK)
            break;
        assert_int_equal(st, QC_ERR_NOMEM);
        assert_content(path, "old");
        assert_int_equal(entries(dir.path), 1);
    }
    /* The folder's sync comes last: the file is there, but nobody may rely on it. */
    qc_io_fail_at(QC_IO_SYNC, 2, 0, EIO);
    assert_int_equal(qc_file_put(path, "new", 3, &err), QC_ERR_IO);
    qc_io_fail_at(QC_IO_SYNC, 0, 0, 0);
    assert_content(path, "new");
    fx_join(path, dir.path, "no/such/folder");
    assert_int_equal(qc_file_put(path, "new", 3, &err), QC_ERR_IO);
}

TEST_WITH(put_into_the_working_folder, setup, teardown)
{
    char before[FX_PATH_BYTES];
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(dir.path), 0);
    assert_int_equal(qc_file_put("here", "1", 1, NULL), QC_OK);
    assert_content("here", "1");
    assert_int_equal(chdir(before), 0);
    qc_error err = {0};
    assert_int_not_equal(qc_file_put("/", "1", 1, &err), QC_OK);
}

TEST_WITH(a_full_disk_says_how_much_is_missing, setup, teardown)
{
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    uint64_t bytes = 0;
    char buf[1000] = {0};
    assert_int_equal(qc_file_create(&f, path, &err), QC_OK);
    qc_io_fail_at(QC_IO_WRITE, 2, 0, ENOSPC);
    assert_int_equal(qc_file_pwrite(&f, buf, sizeof buf, 0, &err), QC_OK);
    assert_int_equal(qc_file_pwrite(&f, buf, sizeof buf, 1000, &err), QC_ERR_NOSPACE);
    assert_non_null(strstr(err.msg, "500 of 1000 bytes could not be written"));
    assert_int_equal(qc_file_size(&f, &bytes, &err), QC_OK);
    assert_int_equal(bytes, 1500);
    assert_int_equal(qc_file_pwrite(&f, buf, sizeof buf, 1000, &err), QC_OK);
    assert_int_equal(qc_io_count(QC_IO_WRITE), 3);
    qc_io_fail_at(QC_IO_WRITE, 1, 1, EDQUOT);
    for (int i = 0; i < 3; i++)
        assert_int_equal(qc_file_pwrite(&f, buf, 1, 0, &err), QC_ERR_NOSPACE);
    qc_io_fail_at(QC_IO_WRITE, 1, 0, EFBIG);
    assert_int_equal(qc_file_pwrite(&f, buf, 1, 0, &err), QC_ERR_NOSPACE);
    qc_io_fail_at(QC_IO_WRITE, 1, 0, ENOMEM);
    assert_int_equal(qc_file_pwrite(&f, buf, 1, 0, &err), QC_ERR_NOMEM);
    qc_io_fail_at(QC_IO_WRITE, 1, 0, EIO);
    assert_int_equal(qc_file_pwrite(&f, buf, 1, 0, &err), QC_ERR_IO);
    qc_io_fail_at(QC_IO_READ, 1, 0, EIO);
    assert_int_equal(qc_file_pread(&f, buf, 1, 0, &err), QC_ERR_IO);
    assert_int_equal(qc_file_pread(&f, buf, 1, 0, &err), QC_OK);
    qc_io_fail_at(QC_IO_SYNC, 1, 0, EDQUOT);
    assert_int_equal(qc_file_sync(&f, &err), QC_ERR_NOSPACE);
    qc_io_fail_at(QC_IO_SYNC, 1, 0, EINVAL); /* a file system that has no sync */
    assert_int_equal(qc_file_sync(&f, &err), QC_OK);
    qc_file_discard(&f);
}

/* The kernel itself: a limit on file sizes gives EFBIG after a partial write. */
TEST_WITH(a_real_limit_is_reported, setup, teardown)
{
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    struct rlimit old, low;
    char buf[8192] = {0};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = old;
    low.rlim_cur = 4096;
    (void)signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(qc_file_create(&f, path, &err), QC_OK);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    qc_status st = qc_file_pwrite(&f, buf, sizeof buf, 0, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(st, QC_ERR_NOSPACE);
    assert_non_null(strstr(err.msg, "4096 of 8192 bytes"));
    qc_file_discard(&f);
}

#define COUNT_THREADS 4
#define COUNT_EACH    500

static void *count_reads(void *arg)
{
    const qc_file *f = arg;
    char c;
    uintptr_t failed = 0;
    for (int i = 0; i < COUNT_EACH; i++)
        failed += qc_file_pread(f, &c, 1, 0, NULL) != QC_OK;
    return (void *)failed;
}

TEST_WITH(exactly_one_thread_gets_the_fault, setup, teardown)
{
    qc_file f = QC_FILE_CLOSED;
    pthread_t t[COUNT_THREADS];
    uintptr_t failed = 0;
    fx_puts(dir.path, "file", "x");
    assert_int_equal(qc_file_open_read(&f, path, NULL), QC_OK);
    qc_io_fail_at(QC_IO_READ, 700, 0, EIO);
    for (int i = 0; i < COUNT_THREADS; i++)
        assert_int_equal(pthread_create(&t[i], NULL, count_reads, &f), 0);
    for (int i = 0; i < COUNT_THREADS; i++) {
        void *r = NULL;
        assert_int_equal(pthread_join(t[i], &r), 0);
        failed += (uintptr_t)r;
    }
    assert_int_equal(failed, 1);
    assert_int_equal(qc_io_count(QC_IO_READ), COUNT_THREADS * COUNT_EACH);
    qc_file_discard(&f);
}

TEST_WITH(makes_examines_and_removes, setup, teardown)
{
    char deep[FX_PATH_BYTES], other[FX_PATH_BYTES];
    qc_path_kind kind = QC_PATH_OTHER;
    uint64_t bytes = 7;
    qc_error err = {0};
    fx_join(deep, dir.path, "a//b/c/");
    qc_io_fail_at(QC_IO_SYNC, 0, 0, 0);
    assert_int_equal(qc_dir_make(deep, &err), QC_OK);
    assert_int_equal(qc_io_count(QC_IO_SYNC), 3); /* what holds a, b and c */
    assert_int_equal(qc_dir_make(deep, &err), QC_OK);
    assert_int_equal(qc_io_count(QC_IO_SYNC), 3);
    fx_join(other, dir.path, "new");
    qc_io_fail_at(QC_IO_SYNC, 1, 0, EIO);
    assert_int_equal(qc_dir_make(other, &err), QC_ERR_IO);
    qc_io_fail_at(QC_IO_SYNC, 0, 0, 0);
    assert_int_equal(qc_path_stat(deep, &kind, &bytes, &err), QC_OK);
    assert_int_equal(kind, QC_PATH_DIR);
    assert_int_equal(bytes, 0);
    assert_int_equal(qc_path_stat(path, &kind, NULL, &err), QC_OK);
    assert_int_equal(kind, QC_PATH_MISSING);
    fx_puts(dir.path, "file", "four");
    assert_int_equal(qc_path_stat(path, &kind, &bytes, &err), QC_OK);
    assert_int_equal(kind, QC_PATH_FILE);
    assert_int_equal(bytes, 4);
    fx_join(other, dir.path, "file/below");
    assert_int_equal(qc_path_stat(other, &kind, NULL, &err), QC_OK); /* ENOTDIR */
    assert_int_equal(kind, QC_PATH_MISSING);
    assert_int_equal(qc_path_stat("/dev/null", &kind, NULL, &err), QC_OK);
    assert_int_equal(kind, QC_PATH_OTHER);
    assert_int_equal(qc_dir_make(path, &err), QC_ERR_IO); /* is a file */
    assert_int_equal(qc_dir_make(other, &err), QC_ERR_IO);
    fx_join(other, dir.path, "renamed");
    assert_int_equal(qc_path_rename(path, other, &err), QC_OK);
    assert_int_equal(qc_path_rename(path, other, &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, other));
    qc_io_fail_at(QC_IO_RENAME, 1, 0, EXDEV);
    assert_int_equal(qc_path_rename(other, path, &err), QC_ERR_IO);
    assert_int_equal(qc_path_remove(other, &err), QC_OK);
    assert_int_equal(qc_path_remove(other, &err), QC_OK);
    assert_int_equal(qc_path_remove(deep, &err), QC_ERR_IO);
    assert_int_equal(qc_dir_sync(dir.path, &err), QC_OK);
    assert_int_equal(qc_dir_sync(other, &err), QC_ERR_IO);
    qc_io_fail_at(QC_IO_SYNC, 1, 0, EIO);
    assert_int_equal(qc_dir_sync(dir.path, &err), QC_ERR_IO);
    static char too_long[8192];
    memset(too_long, 'x', sizeof too_long - 1);
    assert_int_equal(qc_path_stat(too_long, &kind, NULL, &err), QC_ERR_IO);
}

TEST_WITH(joins_with_one_slash, setup, teardown)
{
    static const struct {
        const char *folder, *name, *want;
    } cases[] = {{"a", "b", "a/b"}, {"a/", "b", "a/b"},    {"a//", "/b", "a/b"}, {"/", "b", "/b"},
                 {"", "b", "b"},    {"a", "b/c", "a/b/c"}, {"a", "", "a/"},      {".", "b", "./b"}};
    SCOPED(qc_arena) a = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *out = NULL;
        assert_int_equal(qc_path_join(&a, &out, cases[i].folder, cases[i].name, NULL), QC_OK);
        assert_string_equal(out, cases[i].want);
    }
}

TEST_WITH(lists_a_tree, setup, teardown)
{
    char link_path[FX_PATH_BYTES];
    qc_arena a;
    qc_tree_file *files = NULL;
    size_t count = 0;
    qc_error err = {0};
    fx_puts(dir.path, "b", "22");
    fx_puts(dir.path, "a/z", "1");
    fx_puts(dir.path, "a/y/x", "333");
    fx_puts(dir.path, "a-b", "");
    fx_puts(dir.path, ".gitattributes", "g");
    fx_puts(dir.path, ".git/config", "hidden");
    fx_join(link_path, dir.path, "link");
    assert_int_equal(symlink("a/y/x", link_path), 0);
    fx_join(link_path, dir.path, "folder-link");
    assert_int_equal(symlink("a", link_path), 0);
    fx_join(link_path, dir.path, "pipe");
    assert_int_equal(mkfifo(link_path, 0600), 0);
    qc_arena_init(&a);
    assert_int_equal(qc_dir_tree(&a, dir.path, 6, &files, &count, &err), QC_OK);
    static const qc_tree_file want[] = {
        {".gitattributes", 1}, {"a-b", 0}, {"a/y/x", 3}, {"a/z", 1}, {"b", 2}, {"link", 3}};
    assert_int_equal(count, 6);
    for (size_t i = 0; i < count; i++) {
        assert_string_equal(files[i].path, want[i].path);
        assert_int_equal(files[i].bytes, want[i].bytes);
    }
    assert_int_equal(qc_dir_tree(&a, dir.path, 5, &files, &count, &err), QC_ERR_INPUT);
    assert_int_equal(count, 0);
    assert_non_null(strstr(err.msg, "more than 5 files"));
    EACH_ALLOCATION_FAILS (fault, 0) {
        SCOPED(qc_arena) b = {0};
        fault.st = qc_dir_tree(&b, dir.path, 6, &files, &count, &err);
    }
    fx_join(link_path, dir.path, "dangling");
    assert_int_equal(symlink("nowhere", link_path), 0);
    assert_int_equal(qc_dir_tree(&a, dir.path, 99, &files, &count, &err), QC_ERR_INPUT);
    assert_non_null(strstr(err.msg, "dangling"));
    assert_int_equal(unlink(link_path), 0);
    assert_int_equal(symlink("dangling", link_path), 0); /* a link to itself */
    assert_int_equal(qc_dir_tree(&a, dir.path, 99, &files, &count, &err), QC_ERR_IO);
    fx_join(link_path, dir.path, "no-such-folder");
    assert_int_equal(qc_dir_tree(&a, link_path, 99, &files, &count, &err), QC_ERR_IO);
    qc_arena_deinit(&a);
}

TEST_WITH(lists_many_files, setup, teardown)
{
    qc_tree_file *files = NULL;
    size_t count = 0;
    char name[64];
    for (int i = 0; i < 200; i++) {
        (void)snprintf(name, sizeof name, "d%d/f%d", i % 90, i);
        fx_puts(dir.path, name, "x");
    }
    SCOPED(qc_arena) a = {0};
    assert_int_equal(qc_dir_tree(&a, dir.path, 1000, &files, &count, NULL), QC_OK);
    assert_int_equal(count, 200);
    for (size_t i = 1; i < count; i++)
        assert_true(strcmp(files[i - 1].path, files[i].path) < 0);
}
