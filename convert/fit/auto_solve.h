/* The solver of --to auto takes one candidate for every item and cuts the segments onto devices, so
 * that the sum of costs is least and every device holds what is put on it.
 *
 * That is a multiple-choice knapsack inside a contiguous partition, solved in these steps:
 *
 *   1. Each item gets the lower convex hull of (bytes, cost), which leaves out what is never worth
 *      taking.
 *   2. Every run of segments is filled for every size of device: each item starts with its smallest
 *      candidate, then the upgrade with the best gain per byte is taken as long as one fits (greedy
 *      on the hull).
 *   3. Dynamic programming finds the cuts.
 *   4. On each device, swaps (one item down, others up) and moves off the hull go on until none
 *      helps.
 *   5. The result is never worse than a uniform choice that fits: if one is better, it is taken and
 *      step 4 repeated.
 *
 * `bound` is what the same dynamic program gives for the relaxed knapsack, where the last upgrade
 * may be taken in part. No choice with any cuts costs less, so cost - bound is a proven limit of
 * what greed has lost.
 * The solver is pure arithmetic, deterministic (doubles are added in a fixed order, and ties go to
 * the earlier item) and thread-safe. */
#ifndef QC_CONVERT_AUTO_SOLVE_H
#define QC_CONVERT_AUTO_SOLVE_H

#include "base/arena.h"
#include "convert/model/scheme.h"

typedef struct {
    uint32_t segment;
    double cost[QC_CANDIDATES]; /* >= 0; NaN: no candidate; at least one is not NaN */
    uint64_t bytes[QC_CANDIDATES];
} qc_auto_item;

typedef struct {
    const qc_auto_item *items; /* sorted by segment, rising */
    uint32_t item_count;
    uint32_t segment_count;
    const uint64_t *fixed; /* per segment: bytes that it has whatever is chosen */
    /* Per segment: its scratch memory. A device needs the largest among its segments. May be
     * NULL. */
    const uint64_t *scratch;
    const uint64_t *room; /* per device; UINT64_MAX: no limit */
    uint32_t device_count;
} qc_auto_task;

typedef struct {
    unsigned *chosen; /* per item; the caller's array */
    uint32_t *cut;    /* per device: its first segment; the caller's array. An empty device has
                         the first segment of the next one */
    int fits;         /* 0: not even the smallest choice fits; then that is chosen */
    double cost;
    double bound;                  /* no choice that fits costs less; NaN when nothing fits */
    double uniform[QC_CANDIDATES]; /* cost of each choice for all; NaN where some item lacks it */
    int uniform_fits[QC_CANDIDATES];
} qc_auto_solution;

/* The caller sets out->chosen and out->cut. Returns QC_ERR_NOMEM, or QC_ERR_INTERNAL for a task
 * that breaks the rules above. */
QC_NODISCARD qc_status qc_auto_solve(const qc_auto_task *task, qc_auto_solution *out,
                                     qc_error *err);

#endif
