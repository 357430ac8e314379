/* The order in which the syncer brings files to the disk, and what follows an error. */
#define _GNU_SOURCE /* syscall */
#include "convert/pipeline/syncer.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHARDS 2

typedef struct {
    char root[64], shard[SHARDS][96], journal_path[96];
    qc_plan plan;
    qc_output_dir out;
    qc_shard_state shards[SHARDS];
    qc_recorder recorder;
    qc_pipeline p;
    char events[64]; /* '0', '1': a shard was synced; j: the journal */
    int fail;        /* the journal cannot be synced */
} world;

static world w;

static void event(char c)
{
    size_t n = strlen(w.events);
    if (n + 1 < sizeof w.events) /* on the syncer's thread, where nothing is asserted */
        w.events[n] = c;
}

static int names(int fd, const char *path)
{
    char link[64], real[256], want[4096];
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, real, sizeof real - 1);
    real[n < 0 ? 0 : n] = '\0';
    return realpath(path, want) && strcmp(real, want) == 0;
}

/* In place of the C library's. */
int fdatasync(int fd)
{
    for (int i = 0; i < SHARDS; i++) {
        if (names(fd, w.shard[i]))
            event((char)('0' + i));
    }
    if (w.recorder.journal && names(fd, w.journal_path)) {
        event('j');
        if (w.fail) {
            errno = EIO;
            return -1;
        }
    }
    return (int)syscall(SYS_fdatasync, fd);
}

static int setup(void **state)
{
    qc_error err = {0};
    (void)state;
    memset(&w, 0, sizeof w);
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.journal_path, sizeof w.journal_path, "%s/journal", w.root);
    test_must(qc_journal_open(&w.recorder.journal, w.journal_path, NULL, NULL, NULL, &err), &err);
    for (int i = 0; i < SHARDS; i++) {
        (void)snprintf(w.shard[i], sizeof w.shard[i], "%s/shard-%d", w.root, i);
        test_must(qc_file_put(w.shard[i], "frames", 6, &err), &err);
        w.shards[i].path = w.shard[i];
        w.shards[i].file = QC_FILE_CLOSED;
        atomic_store(&w.shards[i].unsynced, 1);
    }
    w.plan.layout.count = SHARDS;
    w.out.staging = w.root;
    w.p.plan = &w.plan;
    w.p.out = &w.out;
    w.p.shards = w.shards;
    w.p.recorder = &w.recorder;
    w.events[0] = '\0';
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_journal_close(w.recorder.journal);
    w.recorder.journal = NULL;
    return 0;
}

/* Shards, then the journal that speaks of them. */
TEST_WITH(test_order, setup, teardown)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    test_must(qc_syncer_finish(s, QC_OK, &err), &err);
    assert_string_equal(w.events, "01j");
}

/* Another part's shard is not touched; nor is one that nobody wrote to. */
TEST_WITH(test_not_its_own, setup, teardown)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    w.shards[0].foreign = 1;
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    test_must(qc_syncer_finish(s, QC_OK, &err), &err);
    assert_string_equal(w.events, "1j");
}

/* An error stops the workers, and is told rather than that they were stopped. */
TEST_WITH(test_errors, setup, teardown)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    w.fail = 1;
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    for (int ms = 0; !atomic_load(&w.p.halted) && ms < 60000; ms++)
        usleep(1000);
    assert_int_equal(atomic_load(&w.p.halted), 1);
    assert_int_equal(qc_syncer_finish(s, QC_ERR_INTERRUPTED, &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, w.journal_path));
    assert_string_equal(w.events, "01j");
}

TEST_WITH(test_a_shard_that_is_gone, setup, teardown)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    assert_int_equal(unlink(w.shard[1]), 0);
    assert_int_equal(mkdir(w.shard[1], 0777), 0);
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    assert_int_equal(qc_syncer_finish(s, QC_OK, &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, "shard-1"));
    assert_string_equal(w.events, "0"); /* the journal is not synced */
}
