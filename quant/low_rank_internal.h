#ifndef QC_QUANT_LOW_RANK_INTERNAL_H
#define QC_QUANT_LOW_RANK_INTERNAL_H

#include "quant/low_rank.h"

/* Panels that `wide` takes at a time. */
#define QC_LOW_RANK_WIDE 4u

/* Add a panel of QC_LOW_RANK_ROWS rows, which are QC_LOW_RANK_RUN apart in `out`; one of one row;
 * and QC_LOW_RANK_WIDE of one row. */
typedef void (*qc_low_rank_add)(double *out, const double *left, const double *right, uint64_t rank,
                                double scale);
typedef struct {
    qc_low_rank_add rows, row, wide;
} qc_low_rank_ops;

extern const qc_low_rank_ops qc_low_rank_ops_avx2; /* where QC_HAVE_QUANT_AVX2 */

#endif
