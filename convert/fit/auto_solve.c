#include "convert/fit/auto_solve.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The search on a device gives up after this many steps, each of which looks at one pair of
 * items. */
#define SEARCH_STEPS (20u << 20)
/* There may be this many segments. Every run of segments is looked at, which takes the square of
 * their number times the items. */
#define MAX_SEGMENTS 1024u

/* One step up along an item's hull. */
typedef struct {
    uint32_t item;
    unsigned to;
    uint64_t bytes; /* bytes more than before */
    double gain;    /* cost that it saves */
    double rate;    /* gain per byte */
} upgrade;

typedef struct {
    const qc_auto_task *t;
    qc_auto_solution *out;
    qc_arena arena;
    uint32_t *first_item; /* per segment, and one more at the end */
    unsigned *least;      /* per item: the smallest candidate */
    upgrade *upgrades;    /* best rate first */
    uint32_t upgrade_count;
    uint32_t *blocked; /* per item: the last run in which its next step did not fit */
    uint32_t run;
    uint64_t
        *prefix_bytes;   /* per segment: fixed and least bytes of all segments before; saturated */
    double *prefix_cost; /* cost of the least candidates */
    uint64_t *prefix_most; /* as prefix_bytes, with the largest candidates on the hulls */
    double *prefix_best;   /* cost of those */
} solver;

static int is_candidate(const qc_auto_item *it, unsigned c)
{
    return !isnan(it->cost[c]);
}

/* ---- hulls ---- */

/* Returns the smallest candidate; where two are equally small, the one that costs less. */
static unsigned least_of(const qc_auto_item *it)
{
    unsigned best = QC_CANDIDATES;
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        if (is_candidate(it, c) &&
            (best == QC_CANDIDATES || it->bytes[c] < it->bytes[best] ||
             (it->bytes[c] == it->bytes[best] && it->cost[c] < it->cost[best])))
            best = c;
    }
    return best;
}

/* Finds the point of the lower hull after `from`, which is where the cost falls steepest. */
static int next_on_hull(const qc_auto_item *it, unsigned from, upgrade *u)
{
    int found = 0;
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        if (!is_candidate(it, c) || it->bytes[c] <= it->bytes[from] ||
            !(it->cost[c] < it->cost[from]))
            continue;
        uint64_t bytes = it->bytes[c] - it->bytes[from];
        double gain = it->cost[from] - it->cost[c], rate = gain / (double)bytes;
        if (!found || rate > u->rate || (rate >= u->rate && bytes > u->bytes)) {
            *u = (upgrade){.to = c, .bytes = bytes, .gain = gain, .rate = rate};
            found = 1;
        }
    }
    return found;
}

static int compare_upgrades(const void *pa, const void *pb)
{
    const upgrade *a = pa, *b = pb;
    if (a->rate > b->rate)
        return -1;
    if (a->rate < b->rate)
        return 1;
    if (a->item != b->item)
        return a->item < b->item ? -1 : 1;
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes; /* never both of one item and size */
}

static qc_status prepare_items(solver *s, qc_error *err)
{
    const qc_auto_task *t = s->t;
    size_t segs = (size_t)t->segment_count + 1;
    QC_TRY(qc_arena_array(&s->arena, &s->first_item, segs, err));
    QC_TRY(qc_arena_array(&s->arena, &s->least, t->item_count, err));
    QC_TRY(qc_arena_array(&s->arena, &s->upgrades, (size_t)t->item_count * QC_CANDIDATES, err));
    QC_TRY(qc_arena_array(&s->arena, &s->blocked, t->item_count, err));
    QC_TRY(qc_arena_array(&s->arena, &s->prefix_bytes, segs, err));
    QC_TRY(qc_arena_array(&s->arena, &s->prefix_most, segs, err));
    QC_TRY(qc_arena_array(&s->arena, &s->prefix_cost, segs, err));
    QC_TRY(qc_arena_array(&s->arena, &s->prefix_best, segs, err));
    uint32_t i = 0;
    for (uint32_t seg = 0; seg < t->segment_count; seg++) {
        uint64_t bytes = t->fixed[seg], most = bytes;
        double cost = 0, best = 0;
        s->first_item[seg] = i;
        for (; i < t->item_count && t->items[i].segment == seg; i++) {
            const qc_auto_item *it = &t->items[i];
            unsigned at = s->least[i] = least_of(it);
            if (at == QC_CANDIDATES)
                QC_FAIL(err, QC_ERR_INTERNAL, "auto: item %u has no candidate", (unsigned)i);
            bytes = qc_sat_add(bytes, it->bytes[at]);
            cost += it->cost[at];
            upgrade u = {0};
            while (next_on_hull(it, at, &u)) {
                u.item = i;
                s->upgrades[s->upgrade_count++] = u;
                at = u.to;
            }
            most = qc_sat_add(most, it->bytes[at]);
            best += it->cost[at];
        }
        s->prefix_bytes[seg + 1] = qc_sat_add(s->prefix_bytes[seg], bytes);
        s->prefix_cost[seg + 1] = s->prefix_cost[seg] + cost;
        s->prefix_most[seg + 1] = qc_sat_add(s->prefix_most[seg], most);
        s->prefix_best[seg + 1] = s->prefix_best[seg] + best;
    }
    s->first_item[t->segment_count] = i;
    if (i != t->item_count)
        QC_FAIL(err, QC_ERR_INTERNAL, "auto: items are not in the order of their segments");
    if (s->prefix_most[t->segment_count] == UINT64_MAX)
        QC_FAIL(err, QC_ERR_SHAPE, "auto: the model is larger than 2^64 bytes");
    qsort(s->upgrades, s->upgrade_count, sizeof *s->upgrades, compare_upgrades);
    return QC_OK;
}

/* ---- one run of segments on one device ---- */

typedef struct {
    double cost;  /* cost of the greedy choice; infinity when nothing fits */
    double bound; /* cost of the relaxed problem */
} run_cost;

static uint64_t scratch_of(const qc_auto_task *t, uint32_t first, uint32_t end)
{
    uint64_t most = 0;
    for (uint32_t s = first; t->scratch && s < end; s++)
        most = t->scratch[s] > most ? t->scratch[s] : most;
    return most;
}

/* Fills `room` bytes, from which scratch is already taken off, with segments [first, end). The
 * choice for their items is written to chosen, unless that is NULL. */
static run_cost fill_run(solver *s, uint32_t first, uint32_t end, uint64_t room, unsigned *chosen)
{
    uint32_t lo = s->first_item[first], hi = s->first_item[end];
    uint64_t least = s->prefix_bytes[end] - s->prefix_bytes[first];
    run_cost r = {HUGE_VAL, HUGE_VAL};
    if (least > room)
        return r;
    if (!chosen && s->prefix_most[end] - s->prefix_most[first] <= room) {
        r.cost = r.bound = s->prefix_best[end] - s->prefix_best[first];
        return r;
    }
    uint64_t left = room - least;
    r.cost = r.bound = s->prefix_cost[end] - s->prefix_cost[first];
    s->run++;
    int relaxed = 1; /* no upgrade was refused yet, so the bound goes along */
    for (uint32_t i = lo; chosen && i < hi; i++)
        chosen[i] = s->least[i];
    for (uint32_t k = 0; k < s->upgrade_count; k++) {
        const upgrade *u = &s->upgrades[k];
        if (u->item < lo || u->item >= hi || s->blocked[u->item] == s->run)
            continue;
        if (u->bytes > left) {
            if (relaxed)
                r.bound -= u->gain * ((double)left / (double)u->bytes);
            relaxed = 0;
            s->blocked[u->item] = s->run;
            continue;
        }
        left -= u->bytes;
        r.cost -= u->gain;
        if (relaxed)
            r.bound -= u->gain;
        if (chosen)
            chosen[u->item] = u->to;
    }
    return r;
}

/* ---- cuts ---- */

/* Finds the cuts. best[d][j] is the least cost of segments [0, j) on devices [0, d), and `from` is
 * where the last of these devices begins. */
static qc_status cut_segments(solver *s, int *fits, qc_error *err)
{
    const qc_auto_task *t = s->t;
    uint32_t n = t->segment_count + 1, devices = t->device_count;
    size_t cells = (size_t)(devices + 1) * n;
    double *best = NULL, *bound = NULL;
    uint32_t *from = NULL;
    run_cost *runs = NULL; /* for the last size of device: equal devices share them */
    QC_TRY(qc_arena_array(&s->arena, &best, cells, err));
    QC_TRY(qc_arena_array(&s->arena, &bound, cells, err));
    QC_TRY(qc_arena_array(&s->arena, &from, cells, err));
    QC_TRY(qc_arena_array(&s->arena, &runs, (size_t)n * n, err));
    for (size_t i = 0; i < cells; i++)
        best[i] = bound[i] = HUGE_VAL;
    best[0] = bound[0] = 0;
    for (uint32_t d = 0; d < devices; d++) {
        double *to = best + (size_t)(d + 1) * n, *to_bound = bound + (size_t)(d + 1) * n;
        const double *at = best + (size_t)d * n, *at_bound = bound + (size_t)d * n;
        int known = d > 0 && t->room[d] == t->room[d - 1];
        for (uint32_t i = 0; i < n; i++) {
            uint64_t scratch = 0;
            for (uint32_t j = i; j < n; j++) {
                run_cost *r = &runs[(size_t)i * n + j];
                if (!known) {
                    uint64_t room = t->room[d];
                    if (j > i && t->scratch && t->scratch[j - 1] > scratch)
                        scratch = t->scratch[j - 1];
                    *r = j == i ? (run_cost){0, 0}
                         : room < scratch
                             ? (run_cost){HUGE_VAL, HUGE_VAL}
                             : fill_run(s, i, j, room == UINT64_MAX ? room : room - scratch, NULL);
                }
                if (at[i] + r->cost < to[j]) {
                    to[j] = at[i] + r->cost;
                    from[(size_t)(d + 1) * n + j] = i;
                }
                if (at_bound[i] + r->bound < to_bound[j])
                    to_bound[j] = at_bound[i] + r->bound;
            }
        }
    }
    s->out->bound = bound[cells - 1];
    *fits = !isinf(best[cells - 1]);
    uint32_t j = t->segment_count;
    for (uint32_t d = devices; *fits && d > 0; d--)
        s->out->cut[d - 1] = j = from[(size_t)d * n + j];
    return QC_OK;
}

static uint32_t end_of(const solver *s, uint32_t d)
{
    return d + 1 < s->t->device_count ? s->out->cut[d + 1] : s->t->segment_count;
}

/* ---- better than greedy ---- */

static uint64_t bytes_on(const solver *s, uint32_t d)
{
    uint64_t sum = scratch_of(s->t, s->out->cut[d], end_of(s, d));
    for (uint32_t seg = s->out->cut[d]; seg < end_of(s, d); seg++) {
        sum = qc_sat_add(sum, s->t->fixed[seg]);
        for (uint32_t i = s->first_item[seg]; i < s->first_item[seg + 1]; i++)
            sum = qc_sat_add(sum, s->t->items[i].bytes[s->out->chosen[i]]);
    }
    return sum;
}

typedef struct {
    uint32_t a, b;
    unsigned to_a, to_b;
    double gain;
} swap;

/* Finds the best change of item a, alone or together with one other item of [lo, hi), within `left`
 * bytes. */
static void best_swap(const solver *s, uint32_t a, uint32_t lo, uint32_t hi, uint64_t left,
                      swap *best, uint64_t *steps)
{
    const qc_auto_item *x = &s->t->items[a];
    unsigned now_a = s->out->chosen[a];
    for (unsigned ca = 0; ca < QC_CANDIDATES; ca++) {
        if (ca == now_a || !is_candidate(x, ca))
            continue;
        double gain_a = x->cost[now_a] - x->cost[ca];
        if (qc_sat_add(left, x->bytes[now_a]) >= x->bytes[ca] && gain_a > best->gain)
            *best = (swap){a, a, ca, ca, gain_a};
        if (gain_a > 0 || qc_sat_add(left, x->bytes[now_a]) < x->bytes[ca])
            continue; /* a pair is found from the side of the item that gets worse */
        uint64_t room = qc_sat_add(left, x->bytes[now_a]) - x->bytes[ca];
        for (uint32_t b = lo; b < hi; b++) {
            const qc_auto_item *y = &s->t->items[b];
            unsigned now_b = s->out->chosen[b];
            (*steps)++;
            for (unsigned cb = 0; cb < QC_CANDIDATES; cb++) {
                if (b == a || cb == now_b || !is_candidate(y, cb) ||
                    qc_sat_add(room, y->bytes[now_b]) < y->bytes[cb])
                    continue;
                double gain = gain_a + (y->cost[now_b] - y->cost[cb]);
                if (gain > best->gain)
                    *best = (swap){a, b, ca, cb, gain};
            }
        }
    }
}

static void refine_device(const solver *s, uint32_t d)
{
    uint32_t lo = s->first_item[s->out->cut[d]], hi = s->first_item[end_of(s, d)];
    uint64_t used = bytes_on(s, d), room = s->t->room[d], steps = 0;
    double total = 0;
    for (uint32_t i = lo; i < hi; i++)
        total += s->t->items[i].cost[s->out->chosen[i]];
    while (used <= room && steps < SEARCH_STEPS) {
        swap best = {.gain = total * 1e-9}; /* less is rounding error, and the loop would not end */
        int found = 0;
        for (uint32_t a = lo; a < hi && steps < SEARCH_STEPS; a++) {
            double before = best.gain;
            best_swap(s, a, lo, hi, room - used, &best, &steps);
            found |= best.gain > before;
        }
        if (!found)
            return;
        const qc_auto_item *x = &s->t->items[best.a], *y = &s->t->items[best.b];
        used -= x->bytes[s->out->chosen[best.a]];
        used += x->bytes[best.to_a];
        s->out->chosen[best.a] = best.to_a;
        if (best.b != best.a) {
            used -= y->bytes[s->out->chosen[best.b]];
            used += y->bytes[best.to_b];
            s->out->chosen[best.b] = best.to_b;
        }
    }
}

static void refine(solver *s)
{
    s->out->cost = 0;
    for (uint32_t d = 0; d < s->t->device_count; d++)
        refine_device(s, d);
    for (uint32_t i = 0; i < s->t->item_count; i++)
        s->out->cost += s->t->items[i].cost[s->out->chosen[i]];
}

/* ---- uniform choices ---- */

/* Are there cuts with which choice c fits everywhere? To know that, it is enough to fill every
 * device as far as it goes. */
static int uniform_fits(const solver *s, unsigned c, uint32_t *cut)
{
    const qc_auto_task *t = s->t;
    uint32_t seg = 0;
    for (uint32_t d = 0; d < t->device_count; d++) {
        uint64_t sum = 0, scratch = 0;
        cut[d] = seg;
        for (; seg < t->segment_count; seg++) {
            uint64_t more = t->fixed[seg], need = t->scratch ? t->scratch[seg] : 0;
            for (uint32_t i = s->first_item[seg]; i < s->first_item[seg + 1]; i++)
                more = qc_sat_add(more, t->items[i].bytes[c]);
            need = need > scratch ? need : scratch;
            if (qc_sat_add(qc_sat_add(sum, more), need) > t->room[d])
                break;
            sum = qc_sat_add(sum, more);
            scratch = need;
        }
    }
    return seg == t->segment_count;
}

static qc_status compare_uniform(solver *s, int fits, qc_error *err)
{
    const qc_auto_task *t = s->t;
    uint32_t *cut = NULL;
    QC_TRY(qc_arena_array(&s->arena, &cut, t->device_count, err));
    for (unsigned c = 0; c < QC_CANDIDATES; c++) {
        double sum = 0;
        for (uint32_t i = 0; i < t->item_count; i++)
            sum += t->items[i].cost[c]; /* NaN stays */
        s->out->uniform[c] = sum;
        if (t->item_count == 0)
            s->out->uniform[c] = (double)NAN;
        s->out->uniform_fits[c] = !isnan(s->out->uniform[c]) && uniform_fits(s, c, cut);
        if (fits && s->out->uniform_fits[c] && sum < s->out->cost) {
            for (uint32_t i = 0; i < t->item_count; i++)
                s->out->chosen[i] = c;
            memcpy(s->out->cut, cut, t->device_count * sizeof *cut);
            refine(s);
        }
    }
    return QC_OK;
}

static qc_status solve_task(solver *s, qc_error *err)
{
    const qc_auto_task *t = s->t;
    QC_TRY(prepare_items(s, err));
    QC_TRY(cut_segments(s, &s->out->fits, err));
    if (s->out->fits) {
        for (uint32_t d = 0; d < t->device_count; d++) {
            uint32_t first = s->out->cut[d], end = end_of(s, d);
            uint64_t room = t->room[d];
            if (first < end)
                (void)fill_run(s, first, end,
                               room == UINT64_MAX ? room : room - scratch_of(t, first, end),
                               s->out->chosen);
        }
        refine(s);
    } else {
        s->out->bound = (double)NAN;
        s->out->cost = 0;
        for (uint32_t d = 0; d < t->device_count; d++)
            s->out->cut[d] = d == 0 ? 0 : t->segment_count;
        for (uint32_t i = 0; i < t->item_count; i++) {
            s->out->chosen[i] = s->least[i];
            s->out->cost += t->items[i].cost[s->least[i]];
        }
    }
    return compare_uniform(s, s->out->fits, err);
}

qc_status qc_auto_solve(const qc_auto_task *task, qc_auto_solution *out, qc_error *err)
{
    solver s = {.t = task, .out = out};
    if (task->device_count == 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "auto: no device");
    if (task->segment_count > MAX_SEGMENTS)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "--to auto: the model has %u segments, its layers among them; expected at most %u, "
                "because the ways to cut it are too many; use --to nf4",
                (unsigned)task->segment_count, MAX_SEGMENTS);
    qc_arena_init(&s.arena);
    qc_status st = solve_task(&s, err);
    qc_arena_deinit(&s.arena);
    return st;
}
