/* The solver of --to auto: one candidate for every item, and cuts of the segments onto devices, so
 * that the sum of costs is least and every device holds what is put on it.
 *
 * A multiple-choice knapsack inside a contiguous partition:
 *
 *   1. per item the lower convex hull of (bytes, cost): what is never worth taking is left out
 *   2. for every run of segments and every size of device: cheapest first upgrades, best gain per
 *      byte first, then whatever still fits (greedy on the hull)
 *   3. dynamic programming over the cuts
 *   4. per device: swaps (one item down, others up) and moves off the hull until none helps
 *   5. never above a uniform choice that fits: if one is better, it is taken and step 4 repeated
 *
 * `bound` is the same dynamic program over the relaxed knapsack (the last upgrade taken in part),
 * so no choice with any cuts costs less: cost - bound is a proven limit of what greed has lost.
 * Pure arithmetic, deterministic (doubles in a fixed order, ties to the earlier), thread-safe. */
#ifndef QC_CONVERT_AUTO_SOLVE_H
#define QC_CONVERT_AUTO_SOLVE_H

#include "base/arena.h"

#define QC_AUTO_CHOICES 4u

typedef struct {
    uint32_t segment;
    double cost[QC_AUTO_CHOICES]; /* >= 0; NaN: not a candidate; at least one is none */
    uint64_t bytes[QC_AUTO_CHOICES];
} qc_auto_item;

typedef struct {
    const qc_auto_item *items; /* by rising segment */
    uint32_t item_count;
    uint32_t segment_count;
    const uint64_t *fixed; /* per segment: bytes that come with it whatever is chosen */
    /* Per segment: scratch of which a device needs the largest among its segments; may be NULL. */
    const uint64_t *scratch;
    const uint64_t *room; /* per device; UINT64_MAX: no limit */
    uint32_t device_count;
} qc_auto_task;

typedef struct {
    unsigned *chosen; /* per item: the caller's array */
    uint32_t *cut;    /* per device: its first segment; the caller's array. Empty devices have the
                         first segment of the next one */
    int fits;         /* 0: not even the smallest choice does; then that is chosen */
    double cost;
    double bound;                    /* no choice that fits costs less; NaN when nothing fits */
    double uniform[QC_AUTO_CHOICES]; /* cost of each choice for all; NaN where some item lacks it */
    int uniform_fits[QC_AUTO_CHOICES];
} qc_auto_solution;

/* out->chosen and out->cut are set by the caller. QC_ERR_NOMEM, or QC_ERR_INTERNAL for a task
 * that breaks the rules above. */
QC_NODISCARD qc_status qc_auto_solve(const qc_auto_task *task, qc_auto_solution *out,
                                     qc_error *err);

#endif
