/* What a GPU reports about a searched block, and the sums of such reports. They equal those of
 * qc_search_ops bit for bit, because the host adds in the order of blocks. C and C++. */
#ifndef QC_QUANT_SEARCH_SUMS_H
#define QC_QUANT_SEARCH_SUMS_H

#include <stdint.h>

typedef struct {
    double ee, xx;  /* sum (x - x')^2 and sum x^2 of the block, as the search has them */
    float largest;  /* |x - x'| */
    uint32_t index; /* its index in the block, the lowest on ties */
} qc_search_sum;

#endif
