/* Row-wise int8 with AVX-512. Per vector: widen 2, product, to integer, narrow 2, back 1, two
 * products, e, two fma, range: 12, that is 6 cycles for 32 bytes of bfloat16, besides 1.5 for the
 * first pass. */
#include "quant/quant_avx512.h"

#define QC_ROWS_QUANTIZE qc_avx512_int8_rows_quantize
#include "quant/quant_rows_body.h"
