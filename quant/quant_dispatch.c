/* From instruction set to table. A table that was not built falls back to the next lesser one;
 * its member `isa` says which it is. */
#include "quant/quant_internal.h"

int qc_block_size_valid(uint64_t block_elems)
{
    return block_elems >= 32 && block_elems <= QC_BLOCK_MAX &&
           (block_elems & (block_elems - 1)) == 0;
}

const qc_quant_ops *qc_quant_ops_for(qc_isa isa)
{
#if defined(QC_HAVE_QUANT_AVX512)
    if (isa == QC_ISA_AVX512)
        return &qc_quant_ops_avx512;
#endif
#if defined(QC_HAVE_QUANT_AVX2)
    if (isa == QC_ISA_AVX512 || isa == QC_ISA_AVX2)
        return &qc_quant_ops_avx2;
#endif
    (void)isa;
    return &qc_quant_ops_scalar;
}
