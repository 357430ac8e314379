/* formats/safetensors_file.h: plain and compressed files read alike; broken ones do not open. */
#include "formats/safetensors_file.h"

#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fixture_files.h"
#include "tests/fixtures/st_header.h"

#include <errno.h>
#include <pthread.h>

#define NAMES       "a b c"
#define BYTES_EACH  40u
#define DATA_BYTES  (3 * BYTES_EACH)
#define COUNT(a)    (sizeof(a) / sizeof *(a))
#define FRAME_BYTES 37u

static fx_dir dir;

static int make_dir(void **state)
{
    (void)state;
    fx_make_dir(&dir);
    return 0;
}

static const char *path_of(const char *name)
{
    static char path[FX_PATH_BYTES];
    fx_join(path, dir.path, name);
    return path;
}

static unsigned char data_byte(uint64_t i)
{
    static const char *const names[] = {"a", "b", "c"};
    return fx_byte(names[i / BYTES_EACH], i % BYTES_EACH);
}

/* Both files in the scratch folder, and their bytes. */
static void make_pair(qc_strbuf *plain, qc_strbuf *packed)
{
    static const qc_st_meta meta = {"format", "pt"};
    fx_build(plain, NAMES, BYTES_EACH, &meta, 1);
    fx_compress(packed, plain, FRAME_BYTES);
    fx_put(dir.path, "m.safetensors", plain->data, plain->len);
    fx_put(dir.path, "m.safetensors.zst", packed->data, packed->len);
}

static void free_pair(qc_strbuf *plain, qc_strbuf *packed)
{
    qc_strbuf_deinit(plain);
    qc_strbuf_deinit(packed);
}

static void check_range(const qc_st_file *f, qc_st_cursor *cur, uint64_t offset, size_t len)
{
    unsigned char *buf = malloc(len ? len : 1);
    assert_non_null(buf);
    assert_int_equal(qc_st_file_read(f, cur, offset, buf, len, NULL), QC_OK);
    for (size_t i = 0; i < len; i++) {
        if (buf[i] != data_byte(offset + i))
            fail_msg("byte %zu of %zu at %llu is wrong", i, len, (unsigned long long)offset);
    }
    free(buf);
}

TEST(reads_every_range_of_both_kinds)
{
    static const char *const names[] = {"m.safetensors", "m.safetensors.zst"};
    qc_strbuf plain;
    qc_strbuf packed;
    make_pair(&plain, &packed);
    for (int k = 0; k < 2; k++) {
        qc_st_file f;
        qc_st_cursor *cur = NULL;
        assert_int_equal(qc_st_file_open(&f, path_of(names[k]), NULL), QC_OK);
        assert_int_equal(f.compressed, k);
        assert_true(f.file_bytes == (k ? packed.len : plain.len));
        assert_true(f.data_offset == plain.len - DATA_BYTES);
        assert_true(f.header.tensor_count == 3 && f.header.data_bytes == DATA_BYTES);
        assert_string_equal(st_header_meta(&f.header, "format"), "pt");
        assert_int_equal(qc_st_cursor_create(&cur, NULL), QC_OK);
        for (uint64_t offset = 0; offset <= DATA_BYTES; offset++) {
            for (size_t len = 0; len <= DATA_BYTES - offset; len++)
                check_range(&f, cur, offset, len);
        }
        qc_st_cursor_destroy(cur);
        qc_st_file_close(&f);
        assert_int_equal(f.file.fd, -1);
        qc_st_file_close(&f); /* closed is fine */
    }
    qc_st_file_close(NULL);
    qc_st_cursor_destroy(NULL);
    free_pair(&plain, &packed);
}

TEST(refuses_ranges_outside_the_data)
{
    static const struct {
        uint64_t offset;
        size_t len;
    } cases[] = {{DATA_BYTES + 1, 0}, {DATA_BYTES, 1}, {0, DATA_BYTES + 1},
                 {UINT64_MAX, 1},     {1, SIZE_MAX},   {UINT64_MAX - 8, SIZE_MAX}};
    qc_strbuf plain;
    qc_strbuf packed;
    qc_st_file f;
    char b = 0;
    make_pair(&plain, &packed);
    assert_int_equal(qc_st_file_open(&f, path_of("m.safetensors"), NULL), QC_OK);
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_error err = {0};
        assert_int_equal(qc_st_file_read(&f, NULL, cases[i].offset, &b, cases[i].len, &err),
                         QC_ERR_INPUT);
        assert_non_null(strstr(err.msg, "were asked for, but the data has 120 bytes"));
    }
    qc_st_file_close(&f);
    free_pair(&plain, &packed);
}

/* Magic numbers decide, not names. */
TEST(looks_at_bytes_not_names)
{
    qc_strbuf plain;
    qc_strbuf packed;
    qc_st_file f;
    make_pair(&plain, &packed);
    fx_put(dir.path, "swapped.safetensors", packed.data, packed.len);
    fx_put(dir.path, "swapped.zst", plain.data, plain.len);
    assert_int_equal(qc_st_file_open(&f, path_of("swapped.safetensors"), NULL), QC_OK);
    assert_int_equal(f.compressed, 1);
    qc_st_file_close(&f);
    assert_int_equal(qc_st_file_open(&f, path_of("swapped.zst"), NULL), QC_OK);
    assert_int_equal(f.compressed, 0);
    qc_st_file_close(&f);
    free_pair(&plain, &packed);
}

TEST(messages_name_the_path)
{
    static const struct {
        const char *bytes;
        size_t len;
        qc_status status;
        const char *message; /* behind the path */
    } cases[] = {
        {"", 0, QC_ERR_TRUNCATED,
         ": the file has 0 bytes; a safetensors file begins with 8 bytes of header length"},
        {"abc", 3, QC_ERR_TRUNCATED,
         ": the file has 3 bytes; a safetensors file begins with 8 bytes of header length"},
        {"\x02\0\0\0\0\0\0\0[]", 10, QC_ERR_INPUT, ": header is of kind array; expected an object"},
        {"version https://git-lfs.github.com/spec/v1\n", 43, QC_ERR_INPUT,
         ": the file is a git-lfs pointer, not the file itself (run 'git lfs pull')"},
        {"<!doctype html><html>", 21, QC_ERR_INPUT,
         ": the file is an HTML page, not safetensors (a failed download?)"},
    };
    qc_st_file f;
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_error err = {0};
        char expected[FX_PATH_BYTES + 200];
        fx_put(dir.path, "bad", cases[i].bytes, cases[i].len);
        assert_int_equal(qc_st_file_open(&f, path_of("bad"), &err), cases[i].status);
        (void)snprintf(expected, sizeof expected, "%s%s", path_of("bad"), cases[i].message);
        assert_string_equal(err.msg, expected);
        assert_int_equal(f.file.fd, -1);
    }
    qc_error err = {0};
    assert_int_not_equal(qc_st_file_open(&f, path_of("missing"), &err), QC_OK);
    assert_non_null(strstr(err.msg, "missing"));
    assert_int_equal(qc_st_file_open(&f, dir.path, &err), QC_ERR_INPUT);
    /* A zstd file without a seek table, and a skippable frame alone. */
    static const char skippable[] = "\x50\x2a\x4d\x18\x04\0\0\0abcd";
    fx_put(dir.path, "skippable", skippable, sizeof skippable - 1);
    assert_int_equal(qc_status_exit_code(qc_st_file_open(&f, path_of("skippable"), &err)), 3);
}

/* One cursor, two files with equal layout, and one opened again in the place of the other. */
TEST(keeps_frames_of_files_apart)
{
    qc_strbuf plain;
    qc_strbuf packed;
    qc_strbuf other;
    qc_strbuf other_packed;
    qc_st_file f;
    qc_st_file g;
    qc_st_cursor *cur = NULL;
    unsigned char a = 0;
    make_pair(&plain, &packed);
    fx_build(&other, "x y z", BYTES_EACH, NULL, 0);
    fx_compress(&other_packed, &other, FRAME_BYTES);
    fx_put(dir.path, "other.zst", other_packed.data, other_packed.len);
    assert_int_equal(qc_st_cursor_create(&cur, NULL), QC_OK);
    assert_int_equal(qc_st_file_open(&f, path_of("m.safetensors.zst"), NULL), QC_OK);
    assert_int_equal(qc_st_file_open(&g, path_of("other.zst"), NULL), QC_OK);
    for (uint64_t i = 0; i < BYTES_EACH; i++) {
        assert_int_equal(qc_st_file_read(&f, cur, i, &a, 1, NULL), QC_OK);
        assert_int_equal(a, fx_byte("a", i));
        assert_int_equal(qc_st_file_read(&g, cur, i, &a, 1, NULL), QC_OK);
        assert_int_equal(a, fx_byte("x", i));
    }
    qc_st_file_close(&f);
    qc_st_file_close(&g);
    assert_int_equal(qc_st_file_open(&g, path_of("m.safetensors.zst"), NULL), QC_OK);
    assert_int_equal(qc_st_file_read(&g, cur, BYTES_EACH - 1, &a, 1, NULL), QC_OK);
    assert_int_equal(a, fx_byte("a", BYTES_EACH - 1));
    qc_st_file_close(&g);
    qc_st_cursor_destroy(cur);
    qc_strbuf_deinit(&other);
    qc_strbuf_deinit(&other_packed);
    free_pair(&plain, &packed);
}

/* Open and read everything; what was taken is given back either way. */
static qc_status open_and_read(const char *name, qc_error *err)
{
    qc_st_file f;
    qc_st_cursor *cur = NULL;
    unsigned char data[DATA_BYTES];
    qc_status st = QC_OK;
    QC_TRY(qc_st_file_open(&f, path_of(name), err));
    QC_TRY_GOTO(st, done, qc_st_cursor_create(&cur, err));
    QC_TRY_GOTO(st, done, qc_st_file_read(&f, cur, 1, data, DATA_BYTES - 2, err));
    for (size_t i = 0; i < DATA_BYTES - 2; i++)
        assert_int_equal(data[i], data_byte(i + 1));
done:
    qc_st_cursor_destroy(cur);
    qc_st_file_close(&f);
    return st;
}

TEST(survives_every_failed_allocation)
{
    static const char *const names[] = {"m.safetensors", "m.safetensors.zst"};
    qc_strbuf plain;
    qc_strbuf packed;
    make_pair(&plain, &packed);
    for (int k = 0; k < 4; k++) {
        EACH_ALLOCATION_FAILS (fault, k / 2)
            fault.st = open_and_read(names[k % 2], NULL);
    }
    free_pair(&plain, &packed);
}

TEST(survives_every_failed_read)
{
    static const char *const names[] = {"m.safetensors", "m.safetensors.zst"};
    qc_strbuf plain;
    qc_strbuf packed;
    make_pair(&plain, &packed);
    for (int k = 0; k < 4; k++) {
        for (uint64_t at = 1;; at++) {
            qc_error err = {0};
            qc_io_fail_at(QC_IO_READ, at, k / 2, EIO);
            qc_status st = open_and_read(names[k % 2], &err);
            uint64_t tried = qc_io_count(QC_IO_READ);
            qc_io_fail_at(QC_IO_READ, 0, 0, 0);
            if (tried < at) {
                assert_int_equal(st, QC_OK);
                break;
            }
            assert_int_equal(st, QC_ERR_IO);
            assert_non_null(strstr(err.msg, "m.safetensors"));
        }
    }
    free_pair(&plain, &packed);
}

static void *read_backwards(void *arg)
{
    const qc_st_file *f = arg;
    qc_st_cursor *cur = NULL;
    void *wrong = NULL;
    if (qc_st_cursor_create(&cur, NULL) != QC_OK)
        return arg;
    for (int round = 0; round < 20; round++) {
        for (uint64_t i = DATA_BYTES; i-- > 0;) {
            unsigned char b = 0;
            if (qc_st_file_read(f, cur, i, &b, 1, NULL) != QC_OK || b != data_byte(i))
                wrong = arg;
        }
    }
    qc_st_cursor_destroy(cur);
    return wrong;
}

TEST(reads_from_many_threads)
{
    qc_strbuf plain;
    qc_strbuf packed;
    qc_st_file f;
    pthread_t threads[4];
    make_pair(&plain, &packed);
    assert_int_equal(qc_st_file_open(&f, path_of("m.safetensors.zst"), NULL), QC_OK);
    for (size_t i = 0; i < COUNT(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, read_backwards, &f), 0);
    for (size_t i = 0; i < COUNT(threads); i++) {
        void *wrong = &f;
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        assert_null(wrong);
    }
    qc_st_file_close(&f);
    free_pair(&plain, &packed);
}

TEST_GROUP(make_dir, NULL)
