/* What the syncer calls durable: the order of syncs, and what comes between them. */
#define _GNU_SOURCE /* syscall */
#include "convert/pipeline/syncer.h"

#include "tests/fixtures/test_model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define SHARDS 2
#define TYPE   77u

typedef struct {
    char root[64], shard[SHARDS][96], journal_path[96];
    qc_plan plan;
    qc_output_dir out;
    qc_shard_state shards[SHARDS];
    qc_recorder recorder;
    qc_pipeline p;
    uint64_t length; /* of the journal when the first shard was synced */
    char events[64]; /* '0', '1': a shard was synced; j: the journal; d: durable, L: of too much */
    int fail_at;     /* that call of durable fails */
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

static void record(void)
{
    qc_error err = {0};
    test_must(qc_journal_append(w.recorder.journal, TYPE, "x", 1, NULL, &err), &err);
}

/* In place of the C library's. While a shard is being synced a worker finishes a weight: its frames
 * come too late for this sync. */
int fdatasync(int fd)
{
    for (int i = 0; i < SHARDS; i++) {
        if (!names(fd, w.shard[i]))
            continue;
        if (i == 0)
            w.length = qc_journal_bytes(w.recorder.journal);
        event((char)('0' + i));
        record();
    }
    if (w.recorder.journal && names(fd, w.journal_path))
        event('j');
    return (int)syscall(SYS_fdatasync, fd);
}

static qc_status durable(void *ctx, uint64_t journal_bytes, qc_error *err)
{
    (void)ctx;
    event(w.length > 0 && journal_bytes > w.length ? 'L' : 'd');
    if (w.fail_at && --w.fail_at == 0)
        QC_FAIL(err, QC_ERR_IO, "told to fail");
    return QC_OK;
}

static int setup(void **state)
{
    qc_error err = {0};
    (void)state;
    memset(&w, 0, sizeof w);
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.journal_path, sizeof w.journal_path, "%s/journal", w.root);
    test_must(qc_journal_open(&w.recorder.journal, w.journal_path, NULL, NULL, NULL, &err), &err);
    record();
    for (int i = 0; i < SHARDS; i++) {
        (void)snprintf(w.shard[i], sizeof w.shard[i], "%s/shard-%d", w.root, i);
        test_must(qc_file_put(w.shard[i], "frames", 6, &err), &err);
        w.shards[i].path = w.shard[i];
        w.shards[i].file = QC_FILE_CLOSED;
        atomic_store(&w.shards[i].news, 1);
    }
    w.plan.layout.count = SHARDS;
    w.out.staging = w.root;
    w.p.plan = &w.plan;
    w.p.out = &w.out;
    w.p.shards = w.shards;
    w.p.recorder = &w.recorder;
    w.p.durable = durable;
    w.events[0] = '\0';
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_journal_close(w.recorder.journal);
    w.recorder.journal = NULL;
    test_remove(w.root);
    return 0;
}

/* Shards, then the journal, then who wants to know; of what the journal held before all that. */
static void test_order(void **state)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    (void)state;
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    qc_syncer_round(s);
    assert_string_equal(w.events, "01jd");
    w.length = 0; /* nothing new in the shards: all of the journal counts */
    test_must(qc_syncer_finish(s, QC_OK, &err), &err);
    assert_string_equal(w.events, "01jdjd");
}

/* Another part's shard is not touched; nor is one that nobody wrote to. */
static void test_not_its_own(void **state)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    (void)state;
    w.shards[0].foreign = 1;
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    test_must(qc_syncer_finish(s, QC_OK, &err), &err);
    assert_string_equal(w.events, "1jd");
}

/* The first error ends the thread, stops the workers, frees who waits for a round, and is the one
 * that is told. */
static void test_errors(void **state)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    (void)state;
    w.fail_at = 1;
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    qc_syncer_round(s);
    qc_syncer_round(s); /* of a thread that has ended */
    assert_int_equal(qc_syncer_finish(s, QC_ERR_INTERRUPTED, &err), QC_ERR_IO);
    assert_string_equal(err.msg, "told to fail");
    assert_int_equal(atomic_load(&w.p.halted), 1);
    assert_string_equal(w.events, "01jd");
}

static void test_a_shard_that_is_gone(void **state)
{
    qc_error err = {0};
    qc_syncer *s = NULL;
    (void)state;
    assert_int_equal(unlink(w.shard[1]), 0);
    assert_int_equal(mkdir(w.shard[1], 0777), 0);
    test_must(qc_syncer_start(&s, &w.p, &err), &err);
    assert_int_equal(qc_syncer_finish(s, QC_OK, &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, "shard-1"));
    assert_string_equal(w.events, "0"); /* nobody was told that anything is durable */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_its_own, setup, teardown),
        cmocka_unit_test_setup_teardown(test_errors, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_shard_that_is_gone, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
