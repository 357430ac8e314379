#ifndef QC_QUANT_LOW_RANK_INTERNAL_H
#define QC_QUANT_LOW_RANK_INTERNAL_H

#include "quant/low_rank.h"

/* Make a panel of QC_LOW_RANK_ROWS rows, QC_LOW_RANK_RUN apart in `out`, and of one row. */
typedef struct {
    void (*rows)(double *out, const double *left, const double *right, uint64_t rank);
    void (*row)(double *out, const double *left, const double *right, uint64_t rank);
} qc_low_rank_ops;

extern const qc_low_rank_ops qc_low_rank_ops_avx2; /* where QC_HAVE_QUANT_AVX2 */

#endif
