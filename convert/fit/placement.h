/* Contiguous placement: segments in order on devices in order, so that the fullest device is least
 * full. Exact, not greedy.
 *
 *   need of a device = sum of the bytes of its segments + the largest of their peaks
 *   share            = need / room
 *
 * Over all ways to cut the sequence the largest share is least; among those the sum of the squared
 * shares (each rounded down to 2^-20) is least, so that one device that has to be full does not
 * leave the others lopsided; what ties even then goes to the later cut, so that of equal devices
 * the last ones stay empty. The result is one, and depends on the numbers only.
 *
 * With n segments and D devices: O(n D log n) to find the share, O(n^2 D) for the second aim,
 * O(n D) memory for the time of the call.
 * Pure arithmetic; knows nothing of models. Thread-safe. */
#ifndef QC_CONVERT_PLACEMENT_H
#define QC_CONVERT_PLACEMENT_H

#include "base/arena.h"

typedef struct {
    const uint64_t *bytes;   /* per segment: what it takes on its device */
    const uint32_t *follows; /* per segment: an earlier one it lies with, or UINT32_MAX; NULL: none.
                                A follower's bytes and peak count where its leader lies, and it is
                                left out of the sequence. */
    uint32_t segment_count;
    const uint64_t *room; /* per device; 0: can hold nothing */
    uint32_t device_count;
    const uint64_t
        *peak; /* per segment: scratch while it computes, one segment at a time; NULL: 0 */
} qc_placement_task;

/* device_of: one per segment. A device may stay empty when there are fewer segments than devices or
 * when leaving it empty is better (unequal devices).
 * fits: every device holds its share. When it does not fit, device_of is the cut that comes nearest
 * (its largest overdraft in bytes is least), short_bytes that overdraft and short_device the first
 * device that has it; else both are 0.
 * QC_ERR_NOMEM; QC_ERR_INTERNAL if a segment follows a later one. device_count >= 1. */
QC_NODISCARD qc_status qc_placement_solve(const qc_placement_task *task, uint32_t *device_of,
                                          int *fits, uint64_t *short_bytes, uint32_t *short_device,
                                          qc_error *err);
/* fits alone, in O(n). */
QC_NODISCARD qc_status qc_placement_fits(const qc_placement_task *task, int *fits, qc_error *err);

#endif
