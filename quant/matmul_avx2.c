/* The AVX2 tile. 2 rows of W by 2 of x are 4 sums in 8 registers; 16 k take 4 loads of W, 4 of x
 * and 8 fused products. */
#define QC_MATMUL_BLOCK     2u
#define QC_MATMUL_ISA       QC_ISA_AVX2
#define QC_MATMUL_QUANT_OPS qc_quant_ops_avx2
#define QC_MATMUL_TABLE     qc_matmul_ops_avx2
#include "quant/matmul_body.h"
