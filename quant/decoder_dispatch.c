#include "quant/decoder_internal.h"

#include "quant/quant_internal.h"

const qc_decoder_ops *qc_decoder_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_decoder_ops);
}
