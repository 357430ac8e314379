/* How long memory takes to be read: the floor of whatever passes all of it once. */
#ifndef QC_BASE_READ_RATE_H
#define QC_BASE_READ_RATE_H

#include "base/status.h"

#include <stdint.h>

/* Reads `count` bytes once with so many threads, each its share with 32-byte loads and software
 * prefetch, and sets the seconds that took, the start of the threads included. Some bytes at the
 * end of shares that are not whole steps of 256 are left out; a count of 1 MiB and more makes that
 * negligible. */
QC_NODISCARD qc_status qc_read_memory(const void *bytes, uint64_t count, unsigned threads,
                                      double *seconds, qc_error *err);

#endif
