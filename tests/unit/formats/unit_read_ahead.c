/* formats/read_ahead.h, and the hints of formats/file_io.h that it rests on: what is in the page
 * cache before and after. Skipped where the folder for temporary files is on a file system that has
 * no page cache of its own (tmpfs). */
#include "formats/read_ahead.h"

#include "base/alloc.h"
#include "base/workers.h"
#include "tests/fixtures/fixture_files.h"

#define ITEM_BYTES   (128u << 10)
#define ITEMS        64u
#define WINDOW_BYTES (8u * ITEM_BYTES)

static fx_dir dir;
static qc_file file;

static void must(qc_status st, const qc_error *err)
{
    if (st != QC_OK)
        fail_msg("%s", err->msg);
}

static int uncached(unsigned item)
{
    return qc_file_is_uncached(&file, (uint64_t)item * ITEM_BYTES, ITEM_BYTES);
}

static unsigned uncached_items(void)
{
    unsigned n = 0;
    for (unsigned i = 0; i < ITEMS; i++)
        n += (unsigned)uncached(i);
    return n;
}

static void read_item(unsigned item)
{
    static _Thread_local char buf[ITEM_BYTES];
    qc_error err = {0};
    must(qc_file_pread(&file, buf, ITEM_BYTES, (uint64_t)item * ITEM_BYTES, &err), &err);
}

/* A file of which nothing is cached; the system guesses nothing. */
static int setup(void **state)
{
    static unsigned char bytes[ITEM_BYTES];
    char path[FX_PATH_BYTES];
    qc_error err = {0};
    (void)state;
    fx_make_dir(&dir);
    fx_join(path, dir.path, "file");
    must(qc_file_create(&file, path, &err), &err);
    for (unsigned i = 0; i < ITEMS; i++) {
        memset(bytes, (int)i, sizeof bytes);
        must(qc_file_pwrite(&file, bytes, sizeof bytes, (uint64_t)i * ITEM_BYTES, &err), &err);
    }
    must(qc_file_sync(&file, &err), &err);
    qc_file_hint_guess(&file, 0);
    qc_file_hint_done(&file, 0, 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    qc_alloc_fail_at(0, 0);
    qc_file_discard(&file);
    return 0;
}

static void needs_a_cache(void)
{
    if (uncached_items() < ITEMS)
        skip();
}

/* ---- Hints ---------------------------------------------------------------------------------- */

TEST_WITH(what_is_cached_is_known, setup, teardown)
{
    needs_a_cache();
    read_item(5);
    assert_false(uncached(5));
    assert_true(uncached(4));
    assert_true(uncached(6));
    /* One page of many. */
    assert_false(qc_file_is_uncached(&file, 0, (uint64_t)ITEMS * ITEM_BYTES));
    /* Whole pages count: the ends of a range lie in pages of its neighbours. */
    assert_true(qc_file_is_uncached(&file, 4 * ITEM_BYTES, ITEM_BYTES + 1));
    assert_true(qc_file_is_uncached(&file, 6 * ITEM_BYTES - 1, ITEM_BYTES));
    /* But where there is no whole page, those it lies in. */
    assert_false(qc_file_is_uncached(&file, 5 * ITEM_BYTES + 1, 1));
    assert_true(qc_file_is_uncached(&file, 4 * ITEM_BYTES + 1, 1));
    /* Nothing, and what no file has. */
    assert_false(qc_file_is_uncached(&file, 0, 0));
    assert_false(qc_file_is_uncached(&file, UINT64_MAX, 1));
    assert_false(qc_file_is_uncached(&file, 1, UINT64_MAX));
}

TEST_WITH(done_pages_leave, setup, teardown)
{
    needs_a_cache();
    for (unsigned i = 0; i < ITEMS; i++)
        read_item(i);
    assert_int_equal(uncached_items(), 0);
    /* The page that the range begins in leaves too, that it ends in stays. */
    qc_file_hint_done(&file, 5 * ITEM_BYTES + 1, ITEM_BYTES);
    assert_true(uncached(5));
    assert_false(uncached(4));
    assert_false(uncached(6));
    assert_false(qc_file_is_uncached(&file, 6 * ITEM_BYTES, 1));
    qc_file_hint_done(&file, UINT64_MAX, 1);
    qc_file_hint_done(&file, 1, UINT64_MAX);
    assert_int_equal(uncached_items(), 1);
    qc_file_hint_done(&file, 0, 0);
    assert_int_equal(uncached_items(), ITEMS);
}

TEST_WITH(pages_to_be_written_stay, setup, teardown)
{
    qc_error err = {0};
    char word[5] = "", bytes[5] = "words";
    must(qc_file_pwrite(&file, bytes, 5, 7, &err), &err);
    qc_file_hint_done(&file, 0, 0);
    must(qc_file_pread(&file, word, 5, 7, &err), &err);
    assert_memory_equal(word, "words", 5);
}

/* A hint of any length is carried out whole: the kernel would stop at what a device takes in one
 * request. */
TEST_WITH(long_hints_are_whole, setup, teardown)
{
    needs_a_cache();
    qc_file_hint_read_soon(&file, 0, (uint64_t)ITEMS * ITEM_BYTES);
    for (unsigned i = 0; i < ITEMS; i++)
        assert_false(uncached(i));
    qc_file_hint_read_soon(&file, UINT64_MAX, 1);
    qc_file_hint_read_soon(&file, 1, UINT64_MAX);
}

/* ---- Reading ahead -------------------------------------------------------------------------- */

/* Items of 8 to a group; every 16th reads nothing. */
static qc_read_range range_of(void *ctx, uint32_t item)
{
    (void)ctx;
    if (item % 16 == 15)
        return (qc_read_range){0};
    return (qc_read_range){&file, (uint64_t)item * ITEM_BYTES, ITEM_BYTES, item / 8};
}

static int reads(unsigned item)
{
    return item % 16 != 15;
}

static void start(qc_read_ahead *r, uint64_t window, int give_back)
{
    qc_error err = {0};
    must(qc_read_ahead_init(r, ITEMS, range_of, NULL, window, give_back, 0, &err), &err);
}

TEST_WITH(a_window_goes_through_the_cache, setup, teardown)
{
    qc_read_ahead r;
    needs_a_cache();
    read_item(20);
    read_item(21);
    start(&r, WINDOW_BYTES, 1);
    for (unsigned i = 0; i < ITEMS; i++) {
        qc_read_ahead_take(&r, i);
        /* The item and a window after it are there, what comes later is not. */
        for (unsigned k = i; k < i + 8 && k < ITEMS; k++)
            assert_true(!reads(k) || !uncached(k));
        for (unsigned k = i + 11; k < ITEMS; k++)
            assert_true(k == 20 || k == 21 || uncached(k));
        if (reads(i))
            read_item(i);
        qc_read_ahead_done(&r, i);
        for (unsigned k = 0; k <= i; k++)
            assert_int_equal(uncached(k), k != 20 && k != 21);
    }
    qc_read_ahead_deinit(&r);
    assert_int_equal(uncached_items(), ITEMS - 2);
}

TEST_WITH(pages_stay_on_request, setup, teardown)
{
    qc_read_ahead r;
    needs_a_cache();
    start(&r, WINDOW_BYTES, 0);
    for (unsigned i = 0; i < ITEMS; i++) {
        qc_read_ahead_take(&r, i);
        if (reads(i))
            read_item(i);
        qc_read_ahead_done(&r, i);
    }
    qc_read_ahead_deinit(&r);
    assert_int_equal(uncached_items(), ITEMS / 16);
}

/* What is cached is asked for; the rest is the caller's, until it says that it cannot. */
TEST_WITH(direct_items_are_left_alone, setup, teardown)
{
    qc_read_ahead r;
    qc_read_range a;
    qc_error err = {0};
    needs_a_cache();
    read_item(4);
    must(qc_read_ahead_init(&r, ITEMS, range_of, NULL, WINDOW_BYTES, 1, 1, &err), &err);
    for (unsigned i = 0; i < 30; i++) {
        qc_read_ahead_take(&r, i);
        assert_int_equal(qc_read_ahead_is_direct(&r, i, &a), reads(i) && i != 4);
        qc_read_ahead_done(&r, i);
        assert_int_equal(uncached_items(), ITEMS - 1);
    }
    assert_true(a.file == &file && a.offset == 29u * ITEM_BYTES && a.bytes == ITEM_BYTES);
    qc_read_ahead_no_direct(&r, 29);
    assert_false(uncached(29));
    assert_false(qc_read_ahead_is_direct(&r, 29, &a));
    read_item(29);
    qc_read_ahead_done(&r, 29);
    for (unsigned i = 30; i < ITEMS; i++) {
        qc_read_ahead_take(&r, i);
        assert_false(qc_read_ahead_is_direct(&r, i, &a));
        if (reads(i))
            read_item(i);
        qc_read_ahead_done(&r, i);
    }
    assert_int_equal(uncached_items(), ITEMS - 1);
    qc_read_ahead_deinit(&r);
    /* Where pages may stay, they are to be there for the next run. */
    must(qc_read_ahead_init(&r, ITEMS, range_of, NULL, WINDOW_BYTES, 0, 1, &err), &err);
    qc_read_ahead_take(&r, 0);
    assert_false(qc_read_ahead_is_direct(&r, 0, &a));
    qc_read_ahead_deinit(&r);
}

/* A sample of a group, taken after its first item was, does not make the rest look like somebody
 * else's. */
TEST_WITH(samples_of_a_group_are_ours, setup, teardown)
{
    qc_read_ahead r;
    needs_a_cache();
    start(&r, ITEM_BYTES, 1);
    for (unsigned i = 0; i < ITEMS; i++) {
        qc_read_ahead_take(&r, i);
        if (i % 8 == 0)
            read_item(i + 6);
        if (reads(i))
            read_item(i);
        qc_read_ahead_done(&r, i);
    }
    qc_read_ahead_deinit(&r);
    assert_int_equal(uncached_items(), ITEMS);
}

typedef struct {
    qc_read_ahead *r;
    atomic_uint_fast32_t next;
} shared;

static qc_status take_some(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    shared *s = ctx;
    (void)team, (void)index, (void)err;
    for (uint32_t i; (i = (uint32_t)atomic_fetch_add(&s->next, 1)) < ITEMS;) {
        qc_read_ahead_take(s->r, i);
        if (reads(i))
            read_item(i);
        qc_read_ahead_done(s->r, i);
    }
    return QC_OK;
}

TEST_WITH(a_team_leaves_nothing, setup, teardown)
{
    needs_a_cache();
    read_item(3);
    for (unsigned round = 0; round < 20; round++) {
        qc_read_ahead r;
        qc_error err = {0};
        shared s = {.r = &r};
        atomic_init(&s.next, 0);
        start(&r, WINDOW_BYTES, 1);
        must(qc_team_run(6, take_some, &s, &err), &err);
        qc_read_ahead_deinit(&r);
        assert_false(uncached(3));
        assert_int_equal(uncached_items(), ITEMS - 1);
    }
}

TEST_WITH(without_memory, setup, teardown)
{
    qc_read_ahead r;
    qc_error err = {0};
    qc_alloc_fail_at(1, 0);
    assert_int_equal(qc_read_ahead_init(&r, ITEMS, range_of, NULL, WINDOW_BYTES, 1, 0, &err),
                     QC_ERR_NOMEM);
    qc_read_ahead_deinit(&r);
    qc_alloc_fail_at(0, 0);
    memset(&r, 0, sizeof r);
    qc_read_ahead_deinit(&r);
}
