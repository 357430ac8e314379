/* From instruction set to table, and the sample of groups. */
#include "quant/scale_search_internal.h"

#define SAMPLE_GROUPS 64u

const qc_search_ops *qc_search_ops_for(qc_isa isa)
{
#if defined(QC_HAVE_QUANT_AVX512)
    if (isa == QC_ISA_AVX512)
        return &qc_search_ops_avx512;
#endif
#if defined(QC_HAVE_QUANT_AVX2)
    if (isa == QC_ISA_AVX512 || isa == QC_ISA_AVX2)
        return &qc_search_ops_avx2;
#endif
    (void)isa;
    return &qc_search_ops_scalar;
}

uint64_t qc_search_sample_count(uint64_t groups)
{
    return groups < SAMPLE_GROUPS ? groups : SAMPLE_GROUPS;
}

uint64_t qc_search_sample_group(uint64_t groups, uint64_t i)
{
    /* i * groups / 64 without overflow */
    uint64_t count = qc_search_sample_count(groups);
    return count < SAMPLE_GROUPS ? i : groups / count * i + groups % count * i / count;
}
