/* Contiguous placement: segments in order on devices in order, so that the fullest device is least
 * full. Exact, not greedy: over all ways to cut the sequence the largest used share
 * (bytes / room) is least; among those, the one whose second fullest is least full is not sought,
 * but ties go to the earlier cut, so the result is one.
 * Pure arithmetic; knows nothing of models. Thread-safe. */
#ifndef QC_CONVERT_PLACEMENT_H
#define QC_CONVERT_PLACEMENT_H

#include "base/arena.h"

typedef struct {
    const uint64_t *bytes;   /* per segment: what it takes on its device */
    const uint32_t *follows; /* per segment: an earlier one it lies with, or UINT32_MAX; NULL: none.
                                A follower's bytes count on that device and it is left out of the
                                sequence. */
    uint32_t segment_count;
    const uint64_t *room; /* per device */
    uint32_t device_count;
} qc_placement_task;

/* device_of: one per segment. A device may stay empty when there are fewer segments than devices or
 * when leaving it empty is better (unequal devices).
 * fits: every device holds its share. When it does not fit, device_of is the cut that comes nearest
 * (its largest overdraft in bytes is least), short_bytes that overdraft and short_device where.
 * QC_ERR_NOMEM only. device_count >= 1. */
QC_NODISCARD qc_status qc_placement_solve(const qc_placement_task *task, uint32_t *device_of,
                                          int *fits, uint64_t *short_bytes, uint32_t *short_device,
                                          qc_error *err);

#endif
