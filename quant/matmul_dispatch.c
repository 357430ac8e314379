#include "quant/matmul_internal.h"

const qc_matmul_ops *qc_matmul_ops_for(qc_isa isa)
{
#if defined(QC_HAVE_QUANT_AVX512)
    if (isa == QC_ISA_AVX512)
        return &qc_matmul_ops_avx512;
#endif
#if defined(QC_HAVE_QUANT_AVX2)
    if (isa == QC_ISA_AVX512 || isa == QC_ISA_AVX2)
        return &qc_matmul_ops_avx2;
#endif
    (void)isa;
    return &qc_matmul_ops_scalar;
}
