/* formats/file_stamp.h: what changes in a file is told, what does not matter is not. */
#include "formats/file_stamp.h"

#include "tests/fixtures/fixture_files.h"

#include <fcntl.h>

static fx_dir dir;

static int make_dir(void **state)
{
    (void)state;
    fx_make_dir(&dir);
    return 0;
}

static const char *path_of(const char *name)
{
    static char path[2][FX_PATH_BYTES];
    static int turn;
    turn = !turn;
    fx_join(path[turn], dir.path, name);
    return path[turn];
}

/* A time long ago, so that every write after it is another time. */
static void set_old(const char *name, long ns)
{
    const struct timespec times[2] = {{1000000000, ns}, {1000000000, ns}};
    assert_int_equal(utimensat(AT_FDCWD, path_of(name), times, 0), 0);
}

/* In place: the same file with other bytes. */
static void overwrite(const char *name, const char *text)
{
    int fd = open(path_of(name), O_WRONLY | O_TRUNC);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    assert_int_equal(close(fd), 0);
}

typedef struct {
    qc_file file;
    qc_file_stamp stamp;
} opened;

static void open_fresh(opened *o)
{
    fx_put(dir.path, "a", "hello", 5);
    set_old("a", 5);
    assert_int_equal(qc_file_open_read(&o->file, path_of("a"), NULL), QC_OK);
    assert_int_equal(qc_file_stamp_take(&o->stamp, &o->file, NULL), QC_OK);
    assert_int_equal(o->stamp.bytes, 5);
    assert_true(o->stamp.modified_ns == 1000000000000000005);
    assert_int_equal(qc_file_stamp_check(&o->stamp, &o->file, NULL), QC_OK);
}

/* The check fails with a sentence that has the path and `words`; closes. */
static void expect_changed(opened *o, const char *words)
{
    qc_error err = {0};
    assert_int_equal(qc_file_stamp_check(&o->stamp, &o->file, &err), QC_ERR_CHANGED);
    assert_non_null(strstr(err.msg, words));
    assert_non_null(strstr(err.msg, o->file.path));
    assert_int_equal(qc_status_exit_code(err.code), 3);
    qc_file_discard(&o->file);
}

TEST(tells_what_changed)
{
    opened o;
    open_fresh(&o);
    overwrite("a", "hello!");
    expect_changed(&o, "it had 5 bytes, now it has 6");

    open_fresh(&o);
    overwrite("a", "");
    expect_changed(&o, "it had 5 bytes, now it has 0");

    open_fresh(&o);
    overwrite("a", "HELLO");
    expect_changed(&o, "written to");

    open_fresh(&o);
    set_old("a", 6); /* one nanosecond */
    expect_changed(&o, "written to");

    open_fresh(&o);
    assert_int_equal(unlink(path_of("a")), 0);
    expect_changed(&o, "removed or renamed");

    open_fresh(&o);
    assert_int_equal(rename(path_of("a"), path_of("b")), 0);
    expect_changed(&o, "removed or renamed");

    open_fresh(&o);
    assert_int_equal(rename(path_of("a"), path_of("b")), 0);
    fx_put(dir.path, "a", "hello", 5);
    set_old("a", 5);
    expect_changed(&o, "another file");
}

/* Permissions, further names, reading: none of them is a change. */
TEST(leaves_alone_what_is_none)
{
    opened o;
    char buf[5];
    open_fresh(&o);
    (void)unlink(path_of("c"));
    assert_int_equal(link(path_of("a"), path_of("c")), 0);
    assert_int_equal(chmod(path_of("a"), 0600), 0);
    assert_int_equal(qc_file_pread(&o.file, buf, sizeof buf, 0, NULL), QC_OK);
    assert_int_equal(rename(path_of("a"), path_of("d")), 0);
    assert_int_equal(symlink("d", path_of("a")), 0); /* leads to the same file */
    assert_int_equal(qc_file_stamp_check(&o.stamp, &o.file, NULL), QC_OK);
    qc_file_discard(&o.file);
}

TEST(times_beyond_the_clock)
{
    opened o;
    open_fresh(&o);
    const struct timespec times[2] = {{INT64_C(20000000000), 0}, {INT64_C(20000000000), 0}};
    if (utimensat(AT_FDCWD, path_of("a"), times, 0) == 0)
        expect_changed(&o, "written to"); /* saturated or as the file system clamps it */
    else
        qc_file_discard(&o.file);
}

TEST_GROUP(make_dir, NULL)
