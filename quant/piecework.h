/* Numbered pieces of work for the threads of a team, each taken by whoever is free. Pieces are the
 * same whatever the number of threads, so results are too. */
#ifndef QC_QUANT_PIECEWORK_H
#define QC_QUANT_PIECEWORK_H

#include "base/status.h"

#include <stdint.h>

typedef qc_status (*qc_piece_fn)(void *ctx, unsigned thread, uint64_t piece, qc_error *err);

/* fn for pieces 0 .. count-1; thread: 0 .. threads-1, no more of them than pieces. The first error
 * ends it; QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_piecework(unsigned threads, uint64_t count, qc_piece_fn fn, void *ctx,
                                    qc_error *err);

#endif
