/* Contiguous placement puts segments in order on devices in order, so that the fullest device is as
 * little full as possible. It is exact, not greedy.
 *
 *   need of a device = sum of the bytes of its segments + the largest of their peaks
 *   share            = need / room
 *
 * Of all ways to cut the sequence, it takes those with the least largest share. Of these it takes
 * the one with the least sum of squared shares (each rounded down to 2^-20), so that one device
 * that has to be full does not leave the others lopsided. If several are still equal, the later
 * cut is taken, so that of equal devices the last ones stay empty. So there is one result, which
 * depends only on the numbers.
 *
 * With n segments and D devices it takes O(n D log n) to find the share, O(n^2 D) for the second
 * aim, and O(n D) memory during the call.
 * This is pure arithmetic that knows nothing of models. Thread-safe. */
#ifndef QC_CONVERT_PLACEMENT_H
#define QC_CONVERT_PLACEMENT_H

#include "base/arena.h"

typedef struct {
    const uint64_t *bytes;   /* per segment: its bytes on its device */
    const uint32_t *follows; /* per segment: an earlier one it lies with, or UINT32_MAX; NULL: none.
                                A follower's bytes and peak count where its leader lies, and it is
                                left out of the sequence. */
    uint32_t segment_count;
    const uint64_t *room; /* per device; 0: it can hold nothing */
    uint32_t device_count;
    const uint64_t *peak; /* per segment: its workspace; one computes at a time; NULL: 0 */
} qc_placement_task;

/* Sets device_of, one per segment. A device may stay empty when there are fewer segments than
 * devices, or when leaving it empty is better (unequal devices). *fits says that every device holds
 * its share. When it does not fit, device_of is the cut that comes nearest, which is the one whose
 * largest overdraft in bytes is least; *short_bytes is that overdraft and *short_device the first
 * device that has it. Else both are 0. Returns QC_ERR_NOMEM, or QC_ERR_INTERNAL if a segment
 * follows a later one. device_count >= 1. */
QC_NODISCARD qc_status qc_placement_solve(const qc_placement_task *task, uint32_t *device_of,
                                          int *fits, uint64_t *short_bytes, uint32_t *short_device,
                                          qc_error *err);
/* Finds only *fits, in O(n). */
QC_NODISCARD qc_status qc_placement_fits(const qc_placement_task *task, int *fits, qc_error *err);

#endif
