#include "quant/scale_search_internal.h"

#include "quant/quant_internal.h"

const qc_search_ops *qc_search_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_search_ops);
}
