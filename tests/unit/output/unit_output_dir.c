/* The output folder while others write to it. */
#define _GNU_SOURCE /* syscall, flock */
#include "base/alloc.h"
#include "base/workers.h"
#include "convert/output/output_dir.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/syscall.h>

#include "tests/fixtures/manifest_sample.h"

#define COMMITS 400
#define FILES   4

typedef struct {
    char root[64], source[96], out[96];
    atomic_int done;
    atomic_int failed;
} world;

static int setup(void **state)
{
    static world w;
    memset(&w, 0, sizeof w);
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.source, sizeof w.source, "%s/source", w.root);
    (void)snprintf(w.out, sizeof w.out, "%s/out", w.root);
    *state = &w;
    return 0;
}

static qc_status write_once(const world *w, qc_error *err)
{
    static const char *const names[FILES] = {"f0", "f1", "f2", "f3"};
    qc_manifest_file files[FILES];
    const char *path = NULL;
    qc_output_dir d = QC_OUTPUT_DIR_NONE;
    sample s;
    make_sample(&s, 1);
    for (int i = 0; i < FILES; i++)
        files[i] = (qc_manifest_file){names[i], 1, digest_of("x")};
    s.m.files = files;
    s.m.file_count = FILES;
    SCOPED(qc_strbuf) manifest = {.max = TEXT_MAX};
    test_must(qc_manifest_write(&s.m, &manifest, err), err);
    SCOPED(qc_arena) arena = {0};
    qc_status st = qc_output_dir_begin(&d, &arena, w->out, w->source, 0, err);
    for (int i = 0; st == QC_OK && i < FILES; i++)
        st = qc_output_dir_put(&d, names[i], "x", 1, err);
    if (st == QC_OK)
        st = qc_path_join(d.arena, &path, d.staging, QC_MANIFEST_NAME, err);
    if (st == QC_OK)
        st = qc_file_put(path, manifest.data, manifest.len, err);
    if (st == QC_OK)
        st = qc_output_dir_move(&d, err);
    qc_output_dir_abort(&d);
    return st;
}

static int is_refusal(const qc_error *err)
{
    return strstr(err->msg, "another qconv is writing to ") == err->msg;
}

static void *write_often(void *state)
{
    world *w = state;
    for (int i = 0; i < COMMITS; i++) {
        qc_error err = {0};
        /* Somebody who looks holds the lock for a moment. */
        if (write_once(w, &err) != QC_OK && !is_refusal(&err)) {
            print_error("%s\n", err.msg);
            atomic_store(&w->failed, 1);
        }
    }
    atomic_store(&w->done, 1);
    return NULL;
}

/* At every moment of a commit, its first and its last included, an OUT is free, or qconv's, or
 * being written: never somebody else's. */
TEST_WITH(test_looking_during_commits, setup, NULL)
{
    world *w = *state;
    pthread_t writer;
    size_t looks = 0;
    assert_int_equal(pthread_create(&writer, NULL, write_often, w), 0);
    while (!atomic_load(&w->done)) {
        qc_error err = {0};
        qc_arena arena;
        qc_arena_init(&arena);
        qc_status st = qc_output_check(&arena, w->out, w->source, 0, NULL, &err);
        qc_arena_deinit(&arena);
        if (st != QC_OK && !is_refusal(&err)) {
            print_error("look %zu: %s\n", looks, err.msg);
            atomic_store(&w->failed, 1);
            break;
        }
        looks++;
    }
    assert_int_equal(pthread_join(writer, NULL), 0);
    assert_int_equal(atomic_load(&w->failed), 0);
    assert_true(looks > 0);
}

TEST_WITH(test_a_folder_of_somebody_else, setup, NULL)
{
    world *w = *state;
    char path[160];
    qc_error err = {0};
    SCOPED(qc_arena) arena = {0};
    assert_int_equal(qc_dir_make(w->out, &err), QC_OK);
    (void)snprintf(path, sizeof path, "%s/theirs", w->out);
    assert_int_equal(qc_file_put(path, "x", 1, &err), QC_OK);
    assert_int_equal(qc_output_check(&arena, w->out, w->source, 0, NULL, &err), QC_ERR_USAGE);
    assert_non_null(strstr(err.msg, "is not empty, and it is no output of qconv"));
    assert_int_equal(qc_output_check(&arena, w->out, w->source, 1, NULL, &err), QC_OK);
}

/* ---- locks ---- */

static int flock_fails; /* with this errno */

/* In place of the C library's. */
int flock(int fd, int operation)
{
    if (flock_fails) {
        errno = flock_fails;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}

static qc_status open_part(const world *w, unsigned part_count, qc_error *err)
{
    qc_output_dir d;
    SCOPED(qc_arena) arena = {0};
    qc_status st = qc_output_dir_open(&d, &arena, w->out, w->source, 0, 0, part_count, err);
    qc_output_dir_abort(&d);
    return st;
}

TEST_WITH(test_no_locks, setup, NULL)
{
    static const int reasons[] = {ENOLCK, ENOSYS, EOPNOTSUPP};
    const world *w = *state;
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        for (unsigned parts = 1; parts <= 2; parts++) {
            qc_error err = {0};
            flock_fails = reasons[i];
            qc_status st = open_part(w, parts, &err);
            flock_fails = 0;
            assert_int_equal(st, QC_ERR_IO);
            assert_non_null(strstr(err.msg, "cannot be locked"));
            assert_non_null(strstr(err.msg, strerror(reasons[i])));
        }
    }
}

TEST_WITH(test_interrupted_while_it_waits, setup, NULL)
{
    const world *w = *state;
    char lock[160];
    qc_file f = QC_FILE_CLOSED;
    qc_error err = {0};
    (void)snprintf(lock, sizeof lock, "%s/.qconv-partial", w->out);
    test_must(qc_dir_make(lock, &err), &err);
    (void)snprintf(lock, sizeof lock, "%s/.qconv-partial/lock", w->out);
    test_must(qc_file_open_update(&f, lock, &err), &err);
    assert_int_equal(flock(f.fd, LOCK_EX), 0);
    qc_interrupt();
    qc_status st = open_part(w, 2, &err);
    qc_interrupt_clear();
    qc_file_discard(&f);
    assert_int_equal(st, QC_ERR_INTERRUPTED);
}

/* ---- a run that died while its files moved ---- */

/* d->dead after opening; reads or allocations may be told to fail. */
static qc_status look_at_dead(const world *w, size_t *shards, qc_error *err)
{
    qc_output_dir d;
    SCOPED(qc_arena) arena = {0};
    qc_status st = qc_output_dir_open(&d, &arena, w->out, w->source, 0, 0, 1, err);
    *shards = st == QC_OK ? d.dead.shard_count : 0;
    qc_output_dir_leave(&d);
    return st;
}

/* A staged manifest that cannot be read just now is not taken for none: what has moved would be
 * made again. */
TEST_WITH(test_a_dead_run_is_not_overlooked, setup, NULL)
{
    const world *w = *state;
    char path[160];
    qc_error err = {0};
    qc_strbuf text;
    sample s;
    size_t shards = 0;
    make_sample(&s, 1);
    qc_strbuf_init(&text, TEXT_MAX);
    test_must(qc_manifest_write(&s.m, &text, &err), &err);
    (void)snprintf(path, sizeof path, "%s/.qconv-partial", w->out);
    test_must(qc_dir_make(path, &err), &err);
    (void)snprintf(path, sizeof path, "%s/.qconv-partial/qconv.json", w->out);
    test_must(qc_file_put(path, text.data, text.len, &err), &err);
    qc_strbuf_deinit(&text);
    test_must(look_at_dead(w, &shards, &err), &err);
    assert_int_equal(shards, 2);
    uint64_t failures = 0;
    for (uint64_t n = 1;; n++) {
        qc_alloc_fail_at(n, 0);
        qc_status st = look_at_dead(w, &shards, &err);
        int reached = qc_alloc_count() >= n;
        qc_alloc_fail_at(0, 0);
        if (!reached)
            break;
        failures++;
        assert_true(st == QC_ERR_NOMEM || shards == 2);
    }
    assert_true(failures > 10);
    qc_io_fail_at(QC_IO_READ, 1, 0, EIO);
    qc_status st = look_at_dead(w, &shards, &err);
    qc_io_fail_at(QC_IO_READ, 0, 0, 0);
    assert_int_equal(st, QC_ERR_IO);
    assert_non_null(strstr(err.msg, "qconv.json"));
    test_must(look_at_dead(w, &shards, &err), &err);
    assert_int_equal(shards, 2);
    test_must(qc_file_put(path, "{", 1, &err), &err); /* damaged: none */
    test_must(look_at_dead(w, &shards, &err), &err);
    assert_int_equal(shards, 0);
}
