/* formats/direct_read.h: the bytes are those of the file, wherever a range begins and ends and
 * however it is taken; what cannot be served, or not here, is refused and no more. Skipped where
 * the folder for temporary files cannot be read past the page cache. */
#include "formats/direct_read.h"

#include "base/alloc.h"
#include "base/random.h"
#include "base/workers.h"
#include "tests/fixtures/fixture_files.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define FILE_BYTES (11u * QC_DIRECT_CHUNK_BYTES + 12345u)

static fx_dir dir;
static qc_file file;
static unsigned char *content;
static qc_direct_reader *reader;

static void must(qc_status st, const qc_error *err)
{
    if (st != QC_OK)
        fail_msg("%s", err->msg);
}

static int setup(void **state)
{
    char path[FX_PATH_BYTES];
    qc_error err = {0};
    void *v = NULL;
    uint64_t seed = 1;
    (void)state;
    fx_make_dir(&dir);
    fx_join(path, dir.path, "file");
    must(qc_malloc(&v, FILE_BYTES + 8, &err), &err);
    content = v;
    for (size_t i = 0; i < FILE_BYTES; i += 8) {
        uint64_t r = qc_random_next(&seed);
        memcpy(content + i, &r, 8);
    }
    must(qc_file_create(&file, path, &err), &err);
    must(qc_file_pwrite(&file, content, FILE_BYTES, 0, &err), &err);
    must(qc_file_sync(&file, &err), &err);
    must(qc_direct_create(&reader, &err), &err);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_alloc_fail_at(0, 0);
    qc_direct_destroy(reader);
    qc_file_discard(&file);
    qc_free(content);
    return 0;
}

static void needs_direct(void)
{
    if (!qc_direct_begin(reader, &file, 0, 1))
        skip();
}

/* [offset, offset + bytes) in steps of at most `step`, of random length if `seed`. */
static void takes(qc_direct_reader *d, uint64_t offset, uint64_t bytes, size_t step, uint64_t *seed)
{
    static _Thread_local unsigned char buf[3u * QC_DIRECT_CHUNK_BYTES];
    assert_true(qc_direct_begin(d, &file, offset, bytes));
    for (uint64_t done = 0; done < bytes;) {
        size_t n = seed ? (size_t)(qc_random_next(seed) % step) + 1 : step;
        if (n > bytes - done)
            n = (size_t)(bytes - done);
        memset(buf, 0, n);
        assert_true(qc_direct_read(d, &file, buf, n, offset + done));
        assert_memory_equal(buf, content + offset + done, n);
        done += n;
    }
    qc_direct_end(d);
}

TEST_WITH(ranges_of_all_kinds, setup, teardown)
{
    uint64_t seed = 5;
    needs_direct();
    takes(reader, 0, FILE_BYTES, 512u << 10, NULL);
    takes(reader, 8, FILE_BYTES - 8, 512u << 10, NULL);
    takes(reader, 4095, FILE_BYTES - 4095, QC_DIRECT_CHUNK_BYTES, NULL);
    takes(reader, FILE_BYTES - 1, 1, 1, NULL);
    takes(reader, 12345, 3, 1, NULL);
    takes(reader, QC_DIRECT_CHUNK_BYTES - 1, 2, 1, NULL);
    for (int i = 0; i < 60; i++) {
        uint64_t offset = qc_random_next(&seed) % FILE_BYTES;
        uint64_t bytes = 1 + qc_random_next(&seed) % (FILE_BYTES - offset);
        takes(reader, offset, bytes, i % 2 ? 3u * QC_DIRECT_CHUNK_BYTES : 70000, &seed);
    }
}

TEST_WITH(what_is_not_next_is_refused, setup, teardown)
{
    qc_file other = file;
    unsigned char buf[64];
    uint64_t chunk = QC_DIRECT_CHUNK_BYTES;
    assert_false(qc_direct_read(reader, &file, buf, 1, 0));
    needs_direct();
    assert_true(qc_direct_begin(reader, &file, chunk, 8 * chunk));
    assert_false(qc_direct_read(reader, &file, buf, 1, chunk - 1));
    assert_false(qc_direct_read(reader, &file, buf, 1, 9 * chunk));
    assert_false(qc_direct_read(reader, &file, buf, 2, 9 * chunk - 1));
    assert_false(qc_direct_read(reader, &file, buf, 1, UINT64_MAX));
    assert_false(qc_direct_read(reader, &other, buf, 1, chunk));
    /* None of it harmed the range. */
    assert_true(qc_direct_read(reader, &file, buf, 64, chunk));
    assert_memory_equal(buf, content + chunk, 64);
    /* Ahead within the range: what lies between is passed over. */
    assert_true(qc_direct_read(reader, &file, buf, 64, 7 * chunk + 3));
    assert_memory_equal(buf, content + 7 * chunk + 3, 64);
    assert_true(qc_direct_read(reader, &file, buf, 64, 7 * chunk));
    assert_false(qc_direct_read(reader, &file, buf, 64, 2 * chunk));
    assert_true(qc_direct_read(reader, &file, buf, 64, 9 * chunk - 64));
    /* Another range, while the last one is under way. */
    assert_true(qc_direct_begin(reader, &file, 0, FILE_BYTES));
    takes(reader, 5, 3 * chunk, 100000, NULL);
    assert_false(qc_direct_begin(reader, &file, 0, 0));
    assert_false(qc_direct_begin(reader, &file, UINT64_MAX, 1));
    assert_false(qc_direct_begin(reader, &file, 1, UINT64_MAX));
}

/* Shorter than it was: what is missing is not made up. */
TEST_WITH(a_file_that_shrinks, setup, teardown)
{
    unsigned char buf[8];
    needs_direct();
    assert_int_equal(ftruncate(file.fd, 100), 0);
    assert_true(qc_direct_begin(reader, &file, 0, FILE_BYTES));
    assert_true(qc_direct_read(reader, &file, buf, 8, 92));
    assert_false(qc_direct_read(reader, &file, buf, 8, 93));
    assert_false(qc_direct_read(reader, &file, buf, 8, 5000000));
}

/* The descriptor must not keep the room of a deleted file. */
TEST_WITH(nothing_is_held_open, setup, teardown)
{
    needs_direct();
    qc_direct_end(reader);
    int before = dup(file.fd);
    assert_true(before >= 0);
    assert_int_equal(close(before), 0);
    assert_true(qc_direct_begin(reader, &file, 0, 100));
    int during = dup(file.fd);
    assert_int_not_equal(during, before);
    assert_int_equal(close(during), 0);
    qc_direct_end(reader);
    int after = dup(file.fd);
    assert_int_equal(after, before);
    assert_int_equal(close(after), 0);
}

static qc_status take_range(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    qc_direct_reader *d = NULL;
    uint64_t seed = index;
    (void)team, (void)ctx;
    QC_TRY(qc_direct_create(&d, err));
    for (int i = 0; i < 5; i++)
        takes(d, index * 1000u, FILE_BYTES - index * 1000u, 600000, &seed);
    qc_direct_destroy(d);
    return QC_OK;
}

TEST_WITH(each_thread_has_its_own, setup, teardown)
{
    qc_error err = {0};
    needs_direct();
    must(qc_team_run(4, take_range, NULL, &err), &err);
}

/* In this process a call fails from here on, as in a container that forbids it. */
static int forbid(long call, int e)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)e),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* 0: refused, every time, or served with the right bytes. 77: nothing can be forbidden here. */
static int read_without(long call, int e)
{
    qc_direct_reader *d = NULL;
    static unsigned char buf[4096];
    if (!forbid(call, e))
        return 77;
    if (qc_direct_create(&d, NULL) != QC_OK)
        return 1;
    int began = qc_direct_begin(d, &file, 5, FILE_BYTES - 5);
    if (began != (call == SYS_io_getevents)) /* which is not called before a read */
        return 2;
    for (uint64_t at = 5; at + sizeof buf < FILE_BYTES; at += 1000000) {
        if (qc_direct_read(d, &file, buf, sizeof buf, at))
            return 3;
    }
    qc_direct_end(d);
    if (qc_direct_begin(d, &file, 5, FILE_BYTES - 5) || qc_direct_read(d, &file, buf, 1, 5))
        return 4;
    qc_direct_destroy(d);
    return 0;
}

/* No asynchronous reads (ENOSYS, EPERM) or no more of them (EAGAIN): who asks reads otherwise. */
TEST_WITH(where_calls_are_forbidden, setup, teardown)
{
    static const struct {
        long call;
        int e;
    } cases[] = {{SYS_io_setup, ENOSYS},  {SYS_io_setup, EPERM},   {SYS_io_setup, EAGAIN},
                 {SYS_io_submit, ENOSYS}, {SYS_io_submit, EAGAIN}, {SYS_io_getevents, EPERM}};
    needs_direct();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int status = 0;
        pid_t pid = fork();
        if (pid == 0)
            _exit(read_without(cases[i].call, cases[i].e));
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == 77)
            skip();
        if (WEXITSTATUS(status) != 0)
            fail_msg("case %zu: %d", i, WEXITSTATUS(status));
    }
}

TEST_WITH(without_memory, setup, teardown)
{
    qc_direct_reader *d = NULL;
    qc_error err = {0};
    for (uint64_t n = 1; n <= 2; n++) {
        qc_alloc_fail_at(n, 0);
        assert_int_equal(qc_direct_create(&d, &err), QC_ERR_NOMEM);
        assert_null(d);
    }
    qc_alloc_fail_at(0, 0);
    qc_direct_destroy(NULL);
}
