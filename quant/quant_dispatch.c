/* From instruction set to table. Nothing that a table calls may be here, because this file refers
 * to all of them. */
#include "quant/cpu_matmul_internal.h"
#include "quant/quant_internal.h"
#include "quant/scale_search_internal.h"

const qc_quant_ops *qc_quant_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_quant_ops);
}

const qc_search_ops *qc_search_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_search_ops);
}

const qc_gemv_ops *qc_gemv_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_gemv_ops);
}
