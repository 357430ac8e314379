/* Parts of a conversion in one staging folder: turns, and what others left. */
#include "base/strbuf.h"
#include "base/workers.h"
#include "convert/output/dir_lock.h"
#include "convert/run/part_run.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"
#include "tests/fixtures/test_world.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NOW "format=1\nparts=3\n--to=nf4\n"

static const qc_call quiet = {.quiet = 1};

static qc_arena arena;
static const world *here;
static qc_output_dir first; /* of part 1 of 3 */

static void enter(qc_output_dir *d, unsigned part, unsigned of)
{
    assert_int_equal(qc_output_dir_open(d, &arena, here->out, here->model, 0, part, of, NULL),
                     QC_OK);
}

static int setup(void **state)
{
    (void)state;
    qc_arena_init(&arena);
    here = world_in(test_folder);
    enter(&first, 0, 3);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_output_dir_leave(&first);
    qc_arena_deinit(&arena);
    return 0;
}

static void write_journal(const char *name, const char *identity)
{
    const char *path = NULL;
    qc_journal *j = NULL;
    assert_int_equal(qc_path_join(&arena, &path, first.staging, name, NULL), QC_OK);
    assert_int_equal(qc_journal_open(&j, path, NULL, NULL, NULL, NULL), QC_OK);
    if (identity)
        assert_int_equal(qc_journal_append(j, QC_RECORD_IDENTITY, identity, strlen(identity), NULL),
                         QC_OK);
    qc_journal_close(j);
}

static int exists(const char *name)
{
    const char *path = NULL;
    struct stat st;
    assert_int_equal(qc_path_join(&arena, &path, first.staging, name, NULL), QC_OK);
    return lstat(path, &st) == 0;
}

/* ---- Turns ---------------------------------------------------------------------------------- */

typedef struct {
    qc_output_dir d;
    atomic_int has_it;
    qc_status st;
    int gone;
} waiter;

static void *wait_in_line(void *ctx)
{
    waiter *w = ctx;
    qc_file turn = QC_FILE_CLOSED;
    w->st = qc_part_turn_take(&turn, &w->d, "needed", &quiet, &w->gone, NULL);
    atomic_store(&w->has_it, 1);
    qc_file_discard(&turn);
    return NULL;
}

static void sleep_ms(long ms)
{
    struct timespec t = {0, ms * 1000000};
    (void)nanosleep(&t, NULL);
}

TEST_WITH(one_at_a_time, setup, teardown)
{
    qc_output_dir b;
    waiter second = {.st = QC_ERR_INTERNAL};
    qc_file turn = QC_FILE_CLOSED;
    pthread_t thread;
    int gone = 1;
    enter(&b, 1, 3);
    second.d = b;
    write_journal("needed", NULL);
    assert_int_equal(qc_part_turn_take(&turn, &first, NULL, &quiet, &gone, NULL), QC_OK);
    assert_int_equal(gone, 0);
    assert_int_equal(pthread_create(&thread, NULL, wait_in_line, &second), 0);
    sleep_ms(100);
    assert_int_equal(atomic_load(&second.has_it), 0);
    qc_file_discard(&turn);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(second.st, QC_OK);
    assert_int_equal(second.gone, 0);

    /* It is cleared while somebody waits: he came too late. */
    assert_int_equal(qc_part_turn_take(&turn, &first, NULL, &quiet, &gone, NULL), QC_OK);
    atomic_store(&second.has_it, 0);
    assert_int_equal(pthread_create(&thread, NULL, wait_in_line, &second), 0);
    sleep_ms(50);
    qc_output_dir_clear(&first);
    qc_file_discard(&turn);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(second.st, QC_OK);
    assert_int_equal(second.gone, 1);

    /* The same when even the lock went, and another took its place. */
    assert_int_equal(unlink(first.lock.path), 0);
    assert_int_equal(qc_part_turn_take(&turn, &first, NULL, &quiet, &gone, NULL), QC_OK);
    assert_int_equal(gone, 1);
    write_journal("lock", NULL);
    assert_int_equal(qc_part_turn_take(&turn, &first, NULL, &quiet, &gone, NULL), QC_OK);
    assert_int_equal(gone, 1);
    qc_output_dir_leave(&b);
}

TEST_WITH(waiting_ends_with_a_signal, setup, teardown)
{
    qc_output_dir b;
    waiter second = {.st = QC_OK};
    qc_file turn = QC_FILE_CLOSED;
    pthread_t thread;
    int gone = 1;
    enter(&b, 1, 3);
    second.d = b;
    assert_int_equal(qc_part_turn_take(&turn, &first, NULL, &quiet, &gone, NULL), QC_OK);
    assert_int_equal(pthread_create(&thread, NULL, wait_in_line, &second), 0);
    sleep_ms(30);
    qc_interrupt();
    assert_int_equal(pthread_join(thread, NULL), 0);
    qc_interrupt_clear();
    assert_int_equal(second.st, QC_ERR_INTERRUPTED);
    qc_file_discard(&turn);
    qc_output_dir_leave(&b);
}

TEST_WITH(the_holder_of_a_turn_is_known, setup, teardown)
{
    qc_file turn = QC_FILE_CLOSED, seen = QC_FILE_CLOSED;
    int gone = 1;
    assert_int_equal(qc_part_turn_take(&turn, &first, NULL, &quiet, &gone, NULL), QC_OK);
    assert_int_equal(qc_file_open_update(&seen, turn.path, NULL), QC_OK);
    assert_int_equal(qc_dir_lock_holder(&seen), getpid());
    assert_int_equal(qc_dir_lock_holder(&first.lock), 0); /* which parts share */
    qc_file_discard(&turn);
    assert_int_equal(qc_dir_lock_holder(&seen), 0);
    qc_file_discard(&seen);
}

/* ---- What others left ----------------------------------------------------------------------- */

static qc_status check(unsigned part, unsigned of, int restart, qc_error *err)
{
    return qc_parts_check_others(&first, (qc_rank){part, of}, restart, NOW, sizeof NOW - 1, err);
}

static void refuses(unsigned of, int restart, const char *has)
{
    qc_error err = {0};
    assert_int_equal(check(0, of, restart, &err), QC_ERR_USAGE);
    if (!strstr(err.msg, has))
        fail_msg("'%s' is not in '%s'", has, err.msg);
}

TEST_WITH(journals_of_others, setup, teardown)
{
    int yes = 1;
    assert_int_equal(qc_parts_have_journal(&yes, &first, NULL), QC_OK);
    assert_int_equal(yes, 0);
    assert_int_equal(check(0, 3, 0, NULL), QC_OK);

    /* Names that look like journals. */
    static const char *const others[] = {"journal-00001-of-00002x", "journal-00000-of-00002",
                                         "journal-00003-of-00002",  "journal-00001-of-0000a",
                                         "journal-1-of-2",          "journal-00001_of_00002"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        write_journal(others[i], NULL);
    assert_int_equal(qc_parts_have_journal(&yes, &first, NULL), QC_OK);
    assert_int_equal(yes, 0);
    assert_int_equal(check(0, 3, 1, NULL), QC_OK);
    assert_true(exists(others[0]));

    write_journal("journal-00002-of-00003", NOW);
    write_journal("journal-00003-of-00003", NULL); /* died before its identity */
    write_journal("journal-00001-of-00003", NOW);
    assert_int_equal(check(0, 3, 0, NULL), QC_OK);
    assert_int_equal(qc_parts_have_journal(&yes, &first, NULL), QC_OK);
    assert_int_equal(yes, 1);
    refuses(1, 0, "--part");
    refuses(2, 0, "of 3 of an interrupted conversion, and this is part 1 of 2");

    /* Anew: one's own goes, those of the same conversion stay. */
    assert_int_equal(check(0, 3, 1, NULL), QC_OK);
    assert_false(exists("journal-00001-of-00003"));
    assert_true(exists("journal-00002-of-00003"));
}

TEST_WITH(other_options, setup, teardown)
{
    qc_output_dir second;
    write_journal("journal-00002-of-00003", "format=1\nparts=3\n--to=int8\n");
    refuses(3, 0, "part 2 of 3");
    refuses(3, 0, "int8");
    refuses(3, 0, "--restart");
    /* One's own journal is for who opens it to judge. */
    assert_int_equal(check(1, 3, 0, NULL), QC_OK);
    /* It runs: nobody does away with it. */
    enter(&second, 1, 3);
    refuses(3, 1, "part 2 of 3 of another conversion is running in ");
    refuses(5, 1, "part 2 of 3 of another conversion is running in ");
    qc_output_dir_leave(&second);
    assert_int_equal(check(0, 3, 1, NULL), QC_OK);
    assert_false(exists("journal-00002-of-00003"));
    /* Of one process. */
    write_journal("journal-00001-of-00001", NOW);
    refuses(3, 0, "by one process");
    assert_int_equal(check(0, 3, 1, NULL), QC_OK);
    assert_false(exists("journal-00001-of-00001"));
}

TEST_WITH(damage_is_named, setup, teardown)
{
    qc_error err = {0};
    const char *path = NULL;
    assert_int_equal(qc_path_join(&arena, &path, first.staging, "journal-00002-of-00003", NULL),
                     QC_OK);
    assert_int_equal(qc_file_put(path, "no journal at all", 17, NULL), QC_OK);
    assert_int_equal(check(0, 3, 0, &err), QC_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "part 2 of 3"));
    assert_int_equal(check(0, 3, 1, NULL), QC_OK);
    assert_false(exists("journal-00002-of-00003"));
}
