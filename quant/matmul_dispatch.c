#include "quant/matmul_internal.h"

#include "quant/quant_internal.h"

const qc_matmul_ops *qc_matmul_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_matmul_ops);
}
