/* Finds the least largest share as follows.
 *
 *   f[d][j]   the least largest share with which devices 0..d can hold the first j segments
 *   f[d][j] = min over i <= j of max(f[d-1][i], share of segments i..j-1 on d)
 *
 * f[d-1][i] does not fall with i and the share does not rise, so the best i is where they cross,
 * which a binary search finds. Shares are compared as fractions in 128 bits, never rounded. The
 * peak of a run of segments comes from a table of maxima over runs whose length is a power of two.
 *
 * A second pass goes over all cuts whose shares keep the largest one and takes the flattest. */
#include "convert/fit/placement.h"

#include <string.h>

__extension__ typedef unsigned __int128 u128;

#define NO_LEADER   UINT32_MAX
#define SHARE_ONE   1048576.0 /* 2^20 */
#define SHARE_LIMIT 4194304.0 /* squares of 256 of these fit 64 bits */

/* num / den. With a den of 0 and num > 0 it is more than anything. */
typedef struct {
    uint64_t num, den;
} fraction;

typedef struct {
    const qc_placement_task *task;
    int by_overdraft; /* compare bytes above the room instead of shares */
    uint32_t count;   /* length of the sequence, which is the segments without followers */
    uint32_t *place;  /* per segment: its leader's place in the sequence */
    u128 *sum;        /* count + 1 sums: the bytes before a place */
    uint64_t *peaks;  /* rows of `count`: row k has maxima over 2^k places; NULL: no peaks */
} sequence;

static int is_less(fraction a, fraction b)
{
    return (u128)a.num * b.den < (u128)b.num * a.den;
}

static qc_status make_peaks(sequence *s, qc_arena *arena, const uint64_t *peak, qc_error *err)
{
    uint32_t rows = 1;
    while ((uint64_t)1 << rows <= s->count)
        rows++;
    QC_TRY(qc_arena_array(arena, &s->peaks, (size_t)rows * s->count, err));
    for (uint32_t i = 0; i < s->task->segment_count; i++) {
        uint64_t *first = &s->peaks[s->place[i]];
        *first = peak[i] > *first ? peak[i] : *first;
    }
    for (uint32_t k = 1; k < rows; k++) {
        const uint64_t *half = s->peaks + (size_t)(k - 1) * s->count;
        uint64_t *row = s->peaks + (size_t)k * s->count;
        for (uint32_t i = 0; i + (1u << k) <= s->count; i++) {
            uint64_t a = half[i], b = half[i + (1u << (k - 1))];
            row[i] = a > b ? a : b;
        }
    }
    return QC_OK;
}

static qc_status make_sequence(sequence *s, qc_arena *arena, const qc_placement_task *t,
                               qc_error *err)
{
    memset(s, 0, sizeof *s);
    s->task = t;
    QC_TRY(qc_arena_array(arena, &s->place, t->segment_count, err));
    for (uint32_t i = 0; i < t->segment_count; i++) {
        uint32_t leader = t->follows ? t->follows[i] : NO_LEADER;
        if (leader != NO_LEADER && leader >= i)
            QC_FAIL(err, QC_ERR_INTERNAL, "segment %u: expected to follow an earlier one, not %u",
                    (unsigned)i, (unsigned)leader);
        s->place[i] = leader == NO_LEADER ? s->count++ : s->place[leader];
    }
    QC_TRY(qc_arena_array(arena, &s->sum, (size_t)s->count + 1, err));
    for (uint32_t i = 0; i < t->segment_count; i++)
        s->sum[s->place[i] + 1] += t->bytes[i];
    for (uint32_t i = 0; i < s->count; i++)
        s->sum[i + 1] += s->sum[i];
    if (t->peak && s->count > 0)
        QC_TRY(make_peaks(s, arena, t->peak, err));
    return QC_OK;
}

/* Returns what places i..j-1 need together; UINT64_MAX stands for that and more. */
static uint64_t need_of(const sequence *s, uint32_t i, uint32_t j)
{
    if (i == j)
        return 0;
    u128 need = s->sum[j] - s->sum[i];
    if (s->peaks) {
        uint32_t k = 0;
        while ((uint64_t)2 << k <= j - i)
            k++;
        const uint64_t *row = s->peaks + (size_t)k * s->count;
        uint64_t a = row[i], b = row[j - (1u << k)];
        need += a > b ? a : b;
    }
    return need > UINT64_MAX ? UINT64_MAX : (uint64_t)need;
}

/* Returns how bad it is that device d holds places i..j-1. */
static fraction badness(const sequence *s, uint32_t d, uint32_t i, uint32_t j)
{
    uint64_t need = need_of(s, i, j), room = s->task->room[d];
    if (s->by_overdraft)
        return (fraction){need > room ? need - room : 0, 1};
    if (need == 0)
        return (fraction){0, 1};
    return (fraction){room == 0 ? 1 : need, room};
}

/* Returns the same as a whole number, for sums of squares. */
static uint64_t coarse_share(const sequence *s, uint32_t d, uint32_t i, uint32_t j)
{
    uint64_t need = need_of(s, i, j);
    if (need == 0)
        return 0;
    double share = (double)need / (double)s->task->room[d] * SHARE_ONE;
    return (uint64_t)(share < SHARE_LIMIT ? share : SHARE_LIMIT);
}

/* Computes f[d][j] from the row of d - 1. */
static fraction best_prefix(const sequence *s, const fraction *before, uint32_t d, uint32_t j)
{
    uint32_t low = 0, high = j; /* at j the device is empty and nothing is worse than before */
    while (low < high) {
        uint32_t i = low + (high - low) / 2;
        if (is_less(before[i], badness(s, d, i, j)))
            low = i + 1;
        else
            high = i;
    }
    fraction best = before[low];
    if (low > 0) {
        fraction other = badness(s, d, low - 1, j);
        best = is_less(other, best) ? other : best;
    }
    return best;
}

static qc_status least_largest(const sequence *s, qc_arena *arena, fraction *out, qc_error *err)
{
    fraction *before = NULL;
    const size_t width = (size_t)s->count + 1;
    QC_TRY(qc_arena_array(arena, &before, 2 * width, err));
    fraction *row = before + width;
    for (uint32_t j = 0; j <= s->count; j++)
        before[j] = badness(s, 0, 0, j);
    for (uint32_t d = 1; d < s->task->device_count; d++) {
        for (uint32_t j = 0; j <= s->count; j++)
            row[j] = best_prefix(s, before, d, j);
        fraction *swap = before;
        before = row;
        row = swap;
    }
    *out = before[s->count];
    return QC_OK;
}

/* Finds where each device may end in a cut in which nothing is worse than `limit`: not before
 * first[d], or the devices behind it cannot hold the rest; and not after last[d], because the
 * devices up to it hold no more. */
static void find_ends(const sequence *s, fraction limit, uint32_t *first, uint32_t *last)
{
    uint32_t devices = s->task->device_count;
    for (uint32_t d = 0, begin = 0; d < devices; begin = last[d++]) {
        last[d] = begin;
        while (last[d] < s->count && !is_less(limit, badness(s, d, begin, last[d] + 1)))
            last[d]++;
    }
    for (uint32_t d = devices, end = s->count; d-- > 0;) {
        first[d] = end;
        while (end > 0 && !is_less(limit, badness(s, d, end - 1, first[d])))
            end--;
    }
}

/* Of the cuts in which nothing is worse than `limit`, takes the one with the least sum of squares.
 * As the limit is the least there is, the ends have little choice, and few cuts are looked at. */
static qc_status flattest(const sequence *s, qc_arena *arena, fraction limit, uint32_t *device_at,
                          qc_error *err)
{
    uint32_t devices = s->task->device_count, n = s->count;
    size_t width = (size_t)n + 1;
    uint64_t *before = NULL;
    uint32_t *start = NULL; /* start[d * width + j]: where device d begins if it ends at j */
    uint32_t *first = NULL;
    QC_TRY(qc_arena_array(arena, &before, 2 * width, err));
    QC_TRY(qc_arena_array(arena, &start, width * devices, err));
    QC_TRY(qc_arena_array(arena, &first, (size_t)2 * devices, err));
    uint64_t *row = before + width;
    uint32_t *last = first + devices;
    find_ends(s, limit, first, last);
    for (uint32_t j = first[0]; j <= last[0]; j++) {
        uint64_t q = coarse_share(s, 0, 0, j);
        before[j] = q * q;
    }
    for (uint32_t d = 1; d < devices; d++) {
        for (uint32_t j = first[d]; j <= last[d]; j++) {
            row[j] = UINT64_MAX;
            /* The run only grows as i falls, so the first i that is too bad ends the loop. */
            for (uint32_t i = (j < last[d - 1] ? j : last[d - 1]) + 1; i-- > first[d - 1];) {
                if (is_less(limit, badness(s, d, i, j)))
                    break;
                uint64_t q = coarse_share(s, d, i, j);
                if (before[i] + q * q < row[j]) {
                    row[j] = before[i] + q * q;
                    start[d * width + j] = i;
                }
            }
        }
        uint64_t *swap = before;
        before = row;
        row = swap;
    }
    uint32_t end = n;
    for (uint32_t d = devices; d-- > 0;) {
        uint32_t begin = d == 0 ? 0 : start[d * width + end];
        for (uint32_t i = begin; i < end; i++)
            device_at[i] = d;
        end = begin;
    }
    return QC_OK;
}

static void find_short(const sequence *s, const uint32_t *device_at, uint64_t *bytes,
                       uint32_t *device)
{
    *bytes = 0;
    *device = 0;
    for (uint32_t i = 0, j = 0; i < s->count; i = j) {
        while (j < s->count && device_at[j] == device_at[i])
            j++;
        uint64_t need = need_of(s, i, j), room = s->task->room[device_at[i]];
        if (need > room && need - room > *bytes) {
            *bytes = need - room;
            *device = device_at[i];
        }
    }
}

qc_status qc_placement_solve(const qc_placement_task *task, uint32_t *device_of, int *fits,
                             uint64_t *short_bytes, uint32_t *short_device, qc_error *err)
{
    qc_status st = QC_OK;
    qc_arena arena;
    qc_arena_init(&arena);
    sequence s;
    fraction limit;
    uint32_t *device_at = NULL;
    QC_TRY_GOTO(st, done, make_sequence(&s, &arena, task, err));
    QC_TRY_GOTO(st, done, least_largest(&s, &arena, &limit, err));
    *fits = limit.num <= limit.den;
    if (!*fits) {
        s.by_overdraft = 1;
        QC_TRY_GOTO(st, done, least_largest(&s, &arena, &limit, err));
    }
    QC_TRY_GOTO(st, done, qc_arena_array(&arena, &device_at, s.count, err));
    QC_TRY_GOTO(st, done, flattest(&s, &arena, limit, device_at, err));
    for (uint32_t i = 0; i < task->segment_count; i++)
        device_of[i] = device_at[s.place[i]];
    find_short(&s, device_at, short_bytes, short_device);
done:
    qc_arena_deinit(&arena);
    return st;
}

/* Filling each device as far as it goes leaves the least to the next ones. So where this fails,
 * nothing else fits either. */
qc_status qc_placement_fits(const qc_placement_task *task, int *fits, qc_error *err)
{
    qc_status st = QC_OK;
    qc_arena arena;
    qc_arena_init(&arena);
    sequence s;
    QC_TRY_GOTO(st, done, make_sequence(&s, &arena, task, err));
    uint32_t begin = 0, end = 0;
    for (uint32_t d = 0; d < task->device_count; d++) {
        while (end < s.count && need_of(&s, begin, end + 1) <= task->room[d])
            end++;
        begin = end;
    }
    *fits = end == s.count;
done:
    qc_arena_deinit(&arena);
    return st;
}
