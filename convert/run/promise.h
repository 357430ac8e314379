/* What a conversion promised before it began, compared with what it wrote: a size that is not the
 * planned one, or a weight that stayed large although it was to become small, must not look like
 * success. */
#ifndef QC_CONVERT_PROMISE_H
#define QC_CONVERT_PROMISE_H

#include "convert/pipeline/pipeline.h"

/* Reads the headers of all shards in the staging folder back. QC_ERR_CHECK names the first tensor
 * whose name, dtype, shape or bytes are not those of the plan, or a tensor of the source that
 * nothing was made of. */
QC_NODISCARD qc_status qc_promise_check_files(const qc_pipeline *p, qc_error *err);

/* The matrices that a conversion was to quantize, and those of them that stay in 16 bits or more
 * though nobody asked for it: no rule keeps them, and --to auto did not find room to. */
typedef struct {
    uint32_t matrices, left;
    uint64_t bytes, left_bytes; /* as the source has them */
    const char *first, *why;    /* one that stays, and the reason; NULL: there is none */
} qc_promise_left;

qc_promise_left qc_promise_count_left(const qc_plan *plan);
/* QC_ERR_CHECK says so where more than half of the bytes stay. Call it when the output is complete,
 * which stays as it is. */
QC_NODISCARD qc_status qc_promise_check_left(const qc_promise_left *n, const char *out,
                                             qc_error *err);

#endif
