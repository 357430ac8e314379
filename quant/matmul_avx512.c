/* The AVX-512 tile. 4 rows of W by 4 of x are 16 sums in as many registers; 16 k take 4 loads of W,
 * 4 of x and 16 fused products. */
#define QC_MATMUL_BLOCK     4u
#define QC_MATMUL_ISA       QC_ISA_AVX512
#define QC_MATMUL_QUANT_OPS qc_quant_ops_avx512
#define QC_MATMUL_TABLE     qc_matmul_ops_avx512
#include "quant/matmul_body.h"
