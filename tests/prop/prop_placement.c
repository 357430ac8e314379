/* Placement against trying every cut. QC_SEED=n replays one run. */
#include "base/alloc.h"
#include "convert/fit/placement.h"
#include "tests/fixtures/test_random.h"

#define ROUNDS        40000
#define SEGMENTS_MOST 9u
#define DEVICES_MOST  4u
#define NONE          UINT32_MAX

typedef struct {
    uint64_t bytes[SEGMENTS_MOST], peak[SEGMENTS_MOST], room[DEVICES_MOST];
    uint32_t follows[SEGMENTS_MOST];
    qc_placement_task task;
} instance;

/* Small numbers tie often; large ones need more than 64 bits to compare. */
static void make_instance(instance *x)
{
    memset(x, 0, sizeof *x);
    uint64_t most = below(3) ? 12 : (uint64_t)1 << 61;
    int with_peaks = (int)below(2), with_followers = (int)below(2), equal_rooms = (int)below(2);
    x->task = (qc_placement_task){.bytes = x->bytes,
                                  .room = x->room,
                                  .segment_count = (uint32_t)below(SEGMENTS_MOST + 1),
                                  .device_count = 1 + (uint32_t)below(DEVICES_MOST)};
    uint64_t total = 0;
    for (uint32_t i = 0; i < x->task.segment_count; i++) {
        x->bytes[i] = below(4) ? below(most) / SEGMENTS_MOST : 0;
        x->peak[i] = below(2) ? below(most) / SEGMENTS_MOST : 0;
        x->follows[i] = i > 0 && below(4) == 0 ? (uint32_t)below(i) : NONE;
        total += x->bytes[i];
    }
    /* About as much room as is needed: half of them fit. */
    uint64_t each = total * 3 / x->task.device_count + 1;
    for (uint32_t d = 0; d < x->task.device_count; d++)
        x->room[d] = equal_rooms && d > 0 ? x->room[0] : below(6) ? below(each) : 0;
    x->task.peak = with_peaks ? x->peak : NULL;
    x->task.follows = with_followers ? x->follows : NULL;
}

static uint32_t leader_of(const instance *x, uint32_t i)
{
    while (x->task.follows && x->follows[i] != NONE)
        i = x->follows[i];
    return i;
}

static uint64_t need_on(const instance *x, const uint32_t *device_of, uint32_t d)
{
    uint64_t sum = 0, peak = 0;
    for (uint32_t i = 0; i < x->task.segment_count; i++) {
        if (device_of[i] != d)
            continue;
        sum += x->bytes[i];
        if (x->task.peak && x->peak[i] > peak)
            peak = x->peak[i];
    }
    return sum + peak;
}

typedef struct {
    uint64_t num, den;
} share;

/* Shares compared the slow way, by long division: nothing in common with the code under test. */
static int is_less_share(share a, share b)
{
    int flipped = 0;
    for (;;) {
        if (a.den == 0 || b.den == 0)
            return flipped ? a.den == 0 && b.den != 0 : b.den == 0 && a.den != 0;
        uint64_t qa = a.num / a.den, qb = b.num / b.den;
        if (qa != qb)
            return flipped ? qa > qb : qa < qb;
        share ra = {a.den, a.num % a.den}, rb = {b.den, b.num % b.den};
        a = ra;
        b = rb;
        flipped = !flipped;
    }
}

typedef struct {
    int fits;
    share largest;
    uint64_t overdraft;
    uint64_t squares; /* of the shares, where it fits */
} verdict;

static verdict judge(const instance *x, const uint32_t *device_of)
{
    verdict v = {1, {0, 1}, 0, 0};
    for (uint32_t d = 0; d < x->task.device_count; d++) {
        uint64_t need = need_on(x, device_of, d), room = x->room[d];
        share s = {need ? room ? need : 1 : 0, need ? room : 1};
        if (is_less_share(v.largest, s))
            v.largest = s;
        if (need > room) {
            v.fits = 0;
            v.overdraft = need - room > v.overdraft ? need - room : v.overdraft;
        } else if (need > 0) {
            uint64_t q = (uint64_t)((double)need / (double)room * 1048576.0);
            v.squares += q * q;
        }
    }
    return v;
}

/* Every assignment that does not fall along the leaders. */
static void try_all(const instance *x, uint32_t i, uint32_t from, uint32_t *device_of,
                    verdict *best, uint64_t *least_overdraft)
{
    if (i == x->task.segment_count) {
        verdict v = judge(x, device_of);
        int better = is_less_share(v.largest, best->largest);
        if (better || (!is_less_share(best->largest, v.largest) && v.squares < best->squares)) {
            best->largest = v.largest;
            best->squares = v.squares;
        }
        best->fits |= v.fits;
        *least_overdraft = v.overdraft < *least_overdraft ? v.overdraft : *least_overdraft;
        return;
    }
    uint32_t leader = leader_of(x, i);
    if (leader != i) {
        device_of[i] = device_of[leader];
        try_all(x, i + 1, from, device_of, best, least_overdraft);
        return;
    }
    for (uint32_t d = from; d < x->task.device_count; d++) {
        device_of[i] = d;
        try_all(x, i + 1, d, device_of, best, least_overdraft);
    }
}

static void check_one(const instance *x)
{
    uint32_t device_of[SEGMENTS_MOST], scratch[SEGMENTS_MOST], again[SEGMENTS_MOST];
    int fits = -1, quick = -1;
    uint64_t short_bytes = 1;
    uint32_t short_device = 1, from = 0;
    assert_int_equal(
        qc_placement_solve(&x->task, device_of, &fits, &short_bytes, &short_device, NULL), QC_OK);
    assert_int_equal(qc_placement_fits(&x->task, &quick, NULL), QC_OK);
    for (uint32_t i = 0; i < x->task.segment_count; i++) {
        assert_true(device_of[i] < x->task.device_count);
        if (leader_of(x, i) != i) {
            assert_int_equal(device_of[i], device_of[leader_of(x, i)]);
            continue;
        }
        assert_true(device_of[i] >= from); /* contiguous, in order */
        from = device_of[i];
    }
    verdict best = {0, {1, 0}, 0, UINT64_MAX}, got = judge(x, device_of);
    uint64_t least_overdraft = UINT64_MAX;
    try_all(x, 0, 0, scratch, &best, &least_overdraft);
    assert_int_equal(fits, best.fits);
    assert_int_equal(quick, best.fits);
    assert_int_equal(got.fits, best.fits);
    if (fits) {
        assert_false(is_less_share(best.largest, got.largest));
        assert_int_equal(got.squares, best.squares);
        assert_int_equal(short_bytes, 0);
    } else {
        assert_int_equal(got.overdraft, least_overdraft);
        assert_int_equal(short_bytes, least_overdraft);
        assert_int_equal(need_on(x, device_of, short_device) - x->room[short_device],
                         least_overdraft);
    }
    assert_int_equal(qc_placement_solve(&x->task, again, &fits, &short_bytes, &short_device, NULL),
                     QC_OK);
    assert_memory_equal(device_of, again, x->task.segment_count * sizeof *again);
}

TEST_WITH(equals_trying_every_cut, NULL, print_seed)
{
    const char *given = getenv("QC_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20260117;
    for (int round = 0; round < (given ? 1 : ROUNDS); round++, seed++) {
        random_begin(seed);
        instance x;
        make_instance(&x);
        check_one(&x);
    }
}

/* What 80 layers between two tables on 8 devices look like: flat but for what has to be. */
TEST(a_large_one_is_flat)
{
    uint64_t bytes[83], room[8];
    uint32_t device_of[83], layers[8] = {0};
    for (uint32_t i = 0; i < 83; i++)
        bytes[i] = 440;
    bytes[0] = bytes[82] = 20 * 440;
    bytes[81] = 1;
    for (uint32_t d = 0; d < 8; d++)
        room[d] = 40000;
    qc_placement_task t = {
        .bytes = bytes, .room = room, .segment_count = 83, .device_count = 8, .follows = NULL};
    int fits = 0;
    uint64_t short_bytes = 0;
    uint32_t short_device = 0;
    assert_int_equal(qc_placement_solve(&t, device_of, &fits, &short_bytes, &short_device, NULL),
                     QC_OK);
    assert_true(fits);
    for (uint32_t i = 1; i < 81; i++)
        layers[device_of[i]]++;
    assert_int_equal(layers[0], 0);
    assert_int_equal(layers[7], 0);
    for (uint32_t d = 1; d < 7; d++)
        assert_in_range(layers[d], 13, 14);
}

TEST(ties_go_to_the_later_cut)
{
    uint64_t bytes[3] = {1, 1, 1}, room[2] = {4, 4}, short_bytes = 0;
    uint32_t device_of[3], short_device = 0;
    int fits = 0;
    qc_placement_task t = {.bytes = bytes, .room = room, .segment_count = 3, .device_count = 2};
    assert_int_equal(qc_placement_solve(&t, device_of, &fits, &short_bytes, &short_device, NULL),
                     QC_OK);
    assert_true(device_of[0] == 0 && device_of[1] == 0 && device_of[2] == 1);
}

TEST(the_last_devices_stay_empty)
{
    uint64_t bytes[3] = {2, 1, 2}, room[6] = {9, 9, 9, 9, 9, 9}, short_bytes = 0;
    uint32_t device_of[3], short_device = 0;
    int fits = 0;
    qc_placement_task t = {.bytes = bytes, .room = room, .segment_count = 3, .device_count = 6};
    assert_int_equal(qc_placement_solve(&t, device_of, &fits, &short_bytes, &short_device, NULL),
                     QC_OK);
    assert_true(device_of[0] == 0 && device_of[1] == 1 && device_of[2] == 2);
}

TEST(no_memory_is_an_error)
{
    uint64_t bytes[2] = {1, 1}, room[2] = {4, 4}, short_bytes = 0;
    uint32_t device_of[2], short_device = 0;
    int fits = 0;
    qc_placement_task t = {.bytes = bytes, .room = room, .segment_count = 2, .device_count = 2};
    qc_alloc_fail_at(1, 1);
    assert_int_equal(qc_placement_solve(&t, device_of, &fits, &short_bytes, &short_device, NULL),
                     QC_ERR_NOMEM);
    assert_int_equal(qc_placement_fits(&t, &fits, NULL), QC_ERR_NOMEM);
    qc_alloc_fail_at(0, 0);
}

TEST(a_later_leader_is_refused)
{
    uint64_t bytes[2] = {1, 1}, room[1] = {4}, short_bytes;
    uint32_t follows[2] = {1, NONE}, device_of[2], short_device;
    int fits;
    qc_placement_task t = {
        .bytes = bytes, .room = room, .segment_count = 2, .device_count = 1, .follows = follows};
    qc_error err = {0};
    assert_int_equal(qc_placement_solve(&t, device_of, &fits, &short_bytes, &short_device, &err),
                     QC_ERR_INTERNAL);
}
