#define QC_FEEDBACK_TABLE qc_feedback_lanes_scalar
#include "quant/error_feedback_lanes_body.h"

const qc_feedback_lanes *qc_feedback_lanes_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_feedback_lanes);
}
