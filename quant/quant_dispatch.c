/* From instruction set to table. */
#include "quant/quant_internal.h"

int qc_block_size_valid(uint64_t block_elems)
{
    return block_elems >= 32 && block_elems <= QC_BLOCK_MAX &&
           (block_elems & (block_elems - 1)) == 0;
}

const qc_quant_ops *qc_quant_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_quant_ops);
}
