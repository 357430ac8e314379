/* Row-wise int8 with AVX2. Per vector of 8: widen 2, product, to integer, 2 to narrow, back 1, two
 * products, e, two fma, and, max: 13, that is 35 cycles for 64 columns, besides 11 for the first
 * pass. */
#include "quant/quant_avx2.h"

#define QC_ROWS_QUANTIZE qc_avx2_int8_rows_quantize
#include "quant/quant_rows_body.h"
