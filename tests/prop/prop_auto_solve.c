/* The solver of --to auto against brute force over all choices and all cuts. */
#include "base/clock.h"
#include "convert/fit/auto_solve.h"
#include "tests/fixtures/test.h"

#include <inttypes.h>
#include <math.h>

enum { MAX_ITEMS = 640, MAX_SEGMENTS = 96, MAX_DEVICES = 8 };

typedef struct {
    qc_auto_task task;
    qc_auto_item items[MAX_ITEMS];
    uint64_t fixed[MAX_SEGMENTS], scratch[MAX_SEGMENTS], room[MAX_DEVICES];
    unsigned chosen[MAX_ITEMS];
    uint32_t cut[MAX_DEVICES];
    qc_auto_solution out;
} problem;

static uint64_t rng_state;

static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state;
}

static double unit(void)
{
    return (double)(rng() >> 11) * 0x1p-53;
}

static void begin(problem *p, uint32_t segments, uint32_t devices)
{
    memset(p, 0, sizeof *p);
    p->task = (qc_auto_task){p->items, 0, segments, p->fixed, p->scratch, p->room, devices};
    p->out.chosen = p->chosen;
    p->out.cut = p->cut;
}

/* Sizes and costs as the candidates have them, with noise; sometimes one is missing. */
static void add_item(problem *p, uint32_t segment)
{
    static const double bits[QC_CANDIDATES] = {4.13, 4.25, 8.03, [QC_CANDIDATE_16BIT] = 16};
    static const double cost[QC_CANDIDATES] = {8.5e-3, 7e-3, 5e-5, 0};
    qc_auto_item *it = &p->items[p->task.item_count++];
    double elems = 20 + 200 * unit(), weight = 0.1 + unit();
    it->segment = segment;
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        it->bytes[c] = (uint64_t)(elems * bits[c] / 8 * (0.9 + 0.2 * unit())) + 1;
        it->cost[c] = cost[c] * weight * (0.7 + 0.6 * unit());
        if (c != QC_CANDIDATE_16BIT && (bits[c] < 1 || rng() % 10 == 0))
            it->cost[c] = (double)NAN;
    }
}

static uint64_t load(const problem *p, uint32_t d, const uint32_t *cut, const unsigned *chosen)
{
    uint32_t end = d + 1 < p->task.device_count ? cut[d + 1] : p->task.segment_count;
    uint64_t sum = 0, scratch = 0;
    for (uint32_t s = cut[d]; s < end; s++) {
        sum += p->fixed[s];
        scratch = p->scratch[s] > scratch ? p->scratch[s] : scratch;
    }
    for (uint32_t i = 0; i < p->task.item_count; i++) {
        if (p->items[i].segment >= cut[d] && p->items[i].segment < end)
            sum += p->items[i].bytes[chosen[i]];
    }
    return sum + scratch;
}

static int cuts_exist(const problem *p, const unsigned *chosen, uint32_t *cut, uint32_t d)
{
    if (d == p->task.device_count) {
        for (uint32_t k = 0; k < d; k++) {
            if (load(p, k, cut, chosen) > p->room[k])
                return 0;
        }
        return 1;
    }
    for (cut[d] = d ? cut[d - 1] : 0; cut[d] <= (d ? p->task.segment_count : 0); cut[d]++) {
        if (cuts_exist(p, chosen, cut, d + 1))
            return 1;
    }
    return 0;
}

/* Least cost over all choices; infinity if none fits. */
static double brute(const problem *p, unsigned *chosen, uint32_t i, double cost, double best)
{
    uint32_t cut[MAX_DEVICES];
    if (cost >= best)
        return best;
    if (i == p->task.item_count)
        return cuts_exist(p, chosen, cut, 0) ? cost : best;
    for (unsigned c = QC_CANDIDATES; c-- > 0;) {
        chosen[i] = c;
        if (!isnan(p->items[i].cost[c]))
            best = brute(p, chosen, i + 1, cost + p->items[i].cost[c], best);
    }
    return best;
}

static void solve_ok(problem *p)
{
    qc_error err = {0};
    if (qc_auto_solve(&p->task, &p->out, &err) != QC_OK)
        fail_msg("%s", err.msg);
}

/* What must hold of every solution. */
static void check(const problem *p)
{
    double cost = 0;
    for (uint32_t i = 0; i < p->task.item_count; i++) {
        assert_true(p->chosen[i] < QC_CANDIDATES);
        assert_true(p->items[i].cost[p->chosen[i]] >= 0);
        cost += p->items[i].cost[p->chosen[i]];
    }
    assert_true(fabs(cost - p->out.cost) <= 1e-12 * (1 + cost));
    if (!p->out.fits)
        return;
    assert_true(p->cut[0] == 0);
    for (uint32_t d = 0; d < p->task.device_count; d++) {
        assert_true(load(p, d, p->cut, p->chosen) <= p->room[d]);
        if (d)
            assert_true(p->cut[d] >= p->cut[d - 1] && p->cut[d] <= p->task.segment_count);
    }
    assert_true(p->out.bound <= p->out.cost * (1 + 1e-9) + 1e-15);
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        if (p->out.uniform_fits[c])
            assert_true(p->out.cost <= p->out.uniform[c]);
    }
}

static void random_problem(problem *p)
{
    begin(p, 1 + (uint32_t)(rng() % 4), 1 + (uint32_t)(rng() % 3));
    uint32_t items = 1 + (uint32_t)(rng() % 6);
    for (uint32_t s = 0; s < p->task.segment_count; s++) {
        p->fixed[s] = rng() % 30;
        p->scratch[s] = rng() % 20;
        for (uint32_t k = 0; k < items / p->task.segment_count + (s == 0); k++)
            add_item(p, s);
    }
    uint64_t least = 0, most = 0;
    for (uint32_t i = 0; i < p->task.item_count; i++) {
        least += p->items[i].bytes[0];
        most += p->items[i].bytes[QC_CANDIDATE_16BIT];
    }
    for (uint32_t d = 0; d < p->task.device_count; d++)
        p->room[d] = 20 + (uint64_t)((double)least * 0.5 / p->task.device_count +
                                     unit() * (double)(most + 60) / p->task.device_count * 1.3);
    if (rng() % 3 == 0)
        p->room[p->task.device_count - 1] = p->room[0];
}

TEST(test_against_brute_force)
{
    uint64_t seed = 20261121;
    const char *given = getenv("QCONV_TEST_SEED");
    if (given)
        seed = strtoull(given, NULL, 10);
    print_message("seed %" PRIu64 " (QCONV_TEST_SEED)\n", seed);
    rng_state = seed;
    static problem p;
    unsigned work[MAX_ITEMS];
    unsigned fitting = 0, exact = 0;
    double sum_gap = 0, worst_gap = 0, worst_bound = 0;
    for (int round = 0; round < 3000; round++) {
        random_problem(&p);
        solve_ok(&p);
        check(&p);
        double best = brute(&p, work, 0, 0, (double)INFINITY);
        assert_int_equal(p.out.fits, !isinf(best));
        for (unsigned c = 0; c < QC_CANDIDATES; c++) {
            uint32_t cut[MAX_DEVICES];
            double all = 0; /* NaN where an item lacks the candidate */
            for (uint32_t i = 0; i < p.task.item_count; i++) {
                work[i] = c;
                all += p.items[i].cost[c];
            }
            assert_int_equal(isnan(p.out.uniform[c]), isnan(all));
            assert_true(isnan(all) || fabs(p.out.uniform[c] - all) <= 1e-12 * (1 + all));
            assert_int_equal(p.out.uniform_fits[c],
                             !isnan(p.out.uniform[c]) && cuts_exist(&p, work, cut, 0));
        }
        if (!p.out.fits)
            continue;
        assert_true(p.out.cost >= best * (1 - 1e-12));
        assert_true(p.out.bound <= best * (1 + 1e-9) + 1e-15);
        double all = 0; /* the whole range there is to gain */
        for (uint32_t i = 0; i < p.task.item_count; i++) {
            double most = 0;
            for (unsigned c = 0; c < QC_CANDIDATES; c++)
                most = p.items[i].cost[c] > most ? p.items[i].cost[c] : most;
            all += most;
        }
        double gap = all > 0 ? (p.out.cost - best) / all : 0;
        fitting++;
        exact += gap < 1e-12;
        sum_gap += gap;
        worst_gap = gap > worst_gap ? gap : worst_gap;
        double proven = all > 0 ? (p.out.cost - p.out.bound) / all : 0;
        worst_bound = proven > worst_bound ? proven : worst_bound;
    }
    print_message("%u problems fit; exact in %u; gap, as a share of the worst choice's cost: mean "
                  "%.2e, largest %.3f (proven: %.3f)\n",
                  fitting, exact, sum_gap / fitting, worst_gap, worst_bound);
    assert_true(fitting > 1000);
    assert_true(exact > fitting * 9 / 10);
    assert_true(sum_gap / fitting < 5e-3);
}

/* 80 layers of 7 and 62 of 11, on 8 devices of different sizes: time, proven gap, repeatability. */
static void large(uint32_t layers, uint32_t each, const char *what)
{
    static problem p, q;
    begin(&p, layers + 2, 8);
    rng_state = 7;
    uint64_t bytes[QC_CANDIDATES] = {0};
    for (uint32_t l = 1; l <= layers; l++) {
        for (uint32_t k = 0; k < each; k++) {
            add_item(&p, l);
            for (unsigned c = 0; c < QC_CANDIDATES; c++)
                bytes[c] += p.items[p.task.item_count - 1].bytes[c];
        }
    }
    for (uint32_t d = 0; d < 8; d++)
        p.room[d] = (bytes[0] + (bytes[2] - bytes[0]) * (d + 1) / 8) / 8 + 200;
    memcpy(&q, &p, sizeof q);
    q.task.items = q.items;
    q.task.fixed = q.fixed;
    q.task.scratch = q.scratch;
    q.task.room = q.room;
    q.out.chosen = q.chosen;
    q.out.cut = q.cut;
    uint64_t begun = qc_clock_ns();
    solve_ok(&p);
    double seconds = (double)(qc_clock_ns() - begun) * 1e-9;
    check(&p);
    print_message("%s: %.3f s, cost %.4g, at most %.2f%% above the optimum\n", what, seconds,
                  p.out.cost, 100 * (p.out.cost / p.out.bound - 1));
    assert_true(p.out.fits);
    assert_true(p.out.cost <= p.out.bound * 1.03);
    solve_ok(&q);
    assert_memory_equal(p.chosen, q.chosen, sizeof p.chosen);
    assert_memory_equal(p.cut, q.cut, sizeof p.cut);
}

TEST(test_large)
{
    large(80, 7, "80 layers of 7");
    large(56, 11, "56 layers of 11");
}
