/* formats/text_file.h */
#include "formats/text_file.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

#include <errno.h>
#include <unistd.h>

static char dir[64];

static const char *path_of(const char *name)
{
    static char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

/* `count` lines; returns what qc_text_file_finish said. */
static qc_status write_lines(const char *path, unsigned count, qc_digest *digest, qc_error *err)
{
    qc_text_file t = QC_TEXT_FILE_NONE;
    qc_status st = qc_text_file_open(&t, path, err);
    for (unsigned i = 0; st == QC_OK && i < count; i++) {
        st = qc_strbuf_addf(&t.text, err, "line %08u\n", i);
        if (st == QC_OK)
            st = qc_text_file_step(&t, err);
    }
    if (st == QC_OK) {
        assert_true(t.text.cap <= 256u << 10); /* however long the text */
        assert_int_not_equal(access(path, F_OK), 0);
        st = qc_text_file_finish(&t, err);
    }
    if (st == QC_OK) {
        assert_int_equal(t.bytes, count * 14);
        *digest = qc_text_file_digest(&t);
    }
    qc_text_file_deinit(&t);
    return st;
}

TEST(a_text_is_what_was_appended)
{
    static const unsigned counts[] = {0, 1, 5000, 100000};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        const char *path = path_of("a");
        qc_digest digest, want;
        qc_strbuf text;
        char line[32];
        assert_int_equal(write_lines(path, counts[k], &digest, NULL), QC_OK);
        qc_strbuf_init(&text, SIZE_MAX / 2);
        assert_int_equal(qc_file_slurp(path, &text, NULL), QC_OK);
        assert_int_equal(text.len, counts[k] * 14);
        for (unsigned i = 0; i < counts[k]; i++) {
            (void)snprintf(line, sizeof line, "line %08u\n", i);
            assert_memory_equal(text.data + (size_t)i * 14, line, 14);
        }
        want = qc_digest_bytes(text.data, text.len);
        assert_true(qc_digest_equal(&digest, &want));
        qc_strbuf_deinit(&text);
        assert_int_equal(unlink(path), 0);
    }
}

TEST(a_failure_leaves_nothing)
{
    static const qc_io_kind kinds[] = {QC_IO_WRITE, QC_IO_SYNC, QC_IO_RENAME};
    const char *path = path_of("b");
    qc_digest digest;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        qc_error err = {0};
        qc_io_fail_at(kinds[k], 1, 0, EIO);
        assert_int_equal(write_lines(path, 10, &digest, &err), QC_ERR_IO);
        qc_io_fail_at(kinds[k], 0, 0, 0);
        assert_int_not_equal(access(path, F_OK), 0);
    }
    EACH_ALLOCATION_FAILS (fault, 0) {
        (void)unlink(path); /* there if it was the folder's sync */
        fault.st = write_lines(path, 10, &digest, NULL);
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(dir), 0); /* no temporary file, whatever failed */
}

static int setup(void **state)
{
    (void)state;
    test_folder_on_disk(dir, sizeof dir);
    return 0;
}

TEST_GROUP(setup, NULL)
