#define QC_FEEDBACK_TABLE qc_feedback_lanes_scalar
#include "quant/error_feedback_lanes_body.h"

const qc_feedback_lanes *qc_feedback_lanes_for(qc_isa isa)
{
#if defined(QC_HAVE_QUANT_AVX512)
    if (isa == QC_ISA_AVX512)
        return &qc_feedback_lanes_avx512;
#endif
#if defined(QC_HAVE_QUANT_AVX2)
    if (isa == QC_ISA_AVX512 || isa == QC_ISA_AVX2)
        return &qc_feedback_lanes_avx2;
#endif
    (void)isa;
    return &qc_feedback_lanes_scalar;
}
