/* The solver of --to auto on cases whose answer is plain. */
#include "convert/fit/auto_solve.h"
#include "tests/fixtures/test.h"

#include <math.h>

enum { NF4, NF4_32, INT8, FULL = QC_CANDIDATE_16BIT };

#define none ((double)NAN)
/* The costs and bytes of these four, with the other candidates left out. */
#define COSTS(nf4, nf4_32, int8, full)                                                             \
    {                                                                                              \
        nf4, nf4_32, int8, none, none, none, none, none, full                                      \
    }
#define BYTES(nf4, nf4_32, int8, full)                                                             \
    {                                                                                              \
        nf4, nf4_32, int8, 0, 0, 0, 0, 0, full                                                     \
    }

typedef struct {
    qc_auto_item items[8];
    uint64_t fixed[8], scratch[8], room[4];
    unsigned chosen[8];
    uint32_t cut[4];
    qc_auto_solution out;
} task;

static void solve(task *t, uint32_t items, uint32_t segments, uint32_t devices)
{
    qc_auto_task in = {t->items, items, segments, t->fixed, t->scratch, t->room, devices};
    qc_error err = {0};
    t->out.chosen = t->chosen;
    t->out.cut = t->cut;
    if (qc_auto_solve(&in, &t->out, &err) != QC_OK)
        fail_msg("%s", err.msg);
}

static const qc_auto_item plain = {0, COSTS(8, 6, 1, 0), BYTES(40, 45, 80, 160)};

static qc_auto_item in_segment(uint32_t segment)
{
    qc_auto_item it = plain;
    it.segment = segment;
    return it;
}

TEST(test_nothing_fits)
{
    task t = {.items = {plain, plain}, .room = {79}};
    solve(&t, 2, 1, 1);
    assert_false(t.out.fits);
    assert_int_equal(t.chosen[0], NF4);
    assert_int_equal(t.chosen[1], NF4);
    assert_true(isnan(t.out.bound));
    t.room[0] = 80;
    solve(&t, 2, 1, 1);
    assert_true(t.out.fits);
}

/* A block size of 32 is worth taking where int8 has no room. */
TEST(test_small_rest)
{
    task t = {.items = {plain, plain}, .room = {130}};
    solve(&t, 2, 1, 1);
    assert_true(fabs(t.out.cost - 7) < 1e-12);
    assert_int_equal(t.chosen[0] + t.chosen[1], NF4_32 + INT8);
}

/* Greed takes the best gain per byte first and then has no room for the better one. */
TEST(test_better_than_greedy)
{
    task t = {.items = {{0, COSTS(10, none, none, 0), BYTES(0, 0, 0, 60)},
                        {0, COSTS(14, none, none, 0), BYTES(0, 0, 0, 100)}},
              .room = {100}};
    solve(&t, 2, 1, 1);
    assert_true(fabs(t.out.cost - 10) < 1e-12);
    assert_true(t.out.bound <= 10);
}

TEST(test_nothing_to_choose)
{
    task t = {.fixed = {10, 20}, .room = {10, UINT64_MAX}};
    solve(&t, 0, 2, 2);
    assert_true(t.out.fits);
    solve(&t, 0, 0, 1);
    assert_true(t.out.fits);
}

TEST(test_broken_tasks)
{
    task t = {.items = {in_segment(1), in_segment(0)}, .room = {1000}};
    t.out.chosen = t.chosen;
    t.out.cut = t.cut;
    qc_auto_task in = {t.items, 2, 2, t.fixed, NULL, t.room, 1};
    qc_error err = {0};
    assert_int_equal(qc_auto_solve(&in, &t.out, &err), QC_ERR_INTERNAL);
    in.device_count = 0;
    assert_int_equal(qc_auto_solve(&in, &t.out, &err), QC_ERR_INTERNAL);
    in.device_count = 1;
    in.segment_count = 1u << 20;
    assert_int_equal(qc_auto_solve(&in, &t.out, &err), QC_ERR_UNSUPPORTED);
}
