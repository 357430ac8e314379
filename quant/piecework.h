/* Numbered tasks for the threads of a team; each is taken by whichever thread is free. The tasks
 * are the same whatever the number of threads, and so are the results. */
#ifndef QC_QUANT_PIECEWORK_H
#define QC_QUANT_PIECEWORK_H

#include "base/status.h"

#include <stdint.h>

typedef qc_status (*qc_piece_fn)(void *ctx, unsigned thread, uint64_t piece, qc_error *err);

/* Calls fn for tasks 0 .. count-1. thread: 0 .. threads-1; there are no more threads than tasks.
 * The first error ends it; QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_piecework(unsigned threads, uint64_t count, qc_piece_fn fn, void *ctx,
                                    qc_error *err);

#endif
