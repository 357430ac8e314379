/* From instruction set to table, and what all of them share once per call or tensor. */
#include "quant/scale_search_internal.h"

#include <math.h>
#include <string.h>

#define SAMPLE_GROUPS 64u

const qc_search_ops *qc_search_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_search_ops);
}

uint64_t qc_search_sample_count(uint64_t groups)
{
    return qc_min_u64(groups, SAMPLE_GROUPS);
}

uint64_t qc_search_sample_group(uint64_t groups, uint64_t i)
{
    /* i * groups / 64 without overflow */
    uint64_t count = qc_search_sample_count(groups);
    return count < SAMPLE_GROUPS ? i : groups / count * i + groups % count * i / count;
}

uint64_t qc_search_scratch_bytes(const qc_search_form *form, uint64_t cols)
{
    (void)form;
    (void)cols;
    return (sizeof(qc_search_scratch) + 63) / 64 * 64;
}

void qc_search_report_bad(const void *src, qc_dtype dtype, uint64_t index, qc_piece_sums *sums)
{
    double wide = 0.0;
    float x = 0.0f;
    uint64_t overflow;
    const unsigned char *at = (const unsigned char *)src + index * (qc_dtype_bits(dtype) / 8);
    qc_quant_ops_scalar.cast(at, dtype, 1, &x, QC_DTYPE_F32, &overflow);
    if (dtype == QC_DTYPE_F64)
        memcpy(&wide, at, sizeof wide);
    else
        wide = (double)x;
    sums->bad = isfinite(wide) ? QC_BAD_RANGE : QC_BAD_NONFINITE;
    sums->bad_index = index;
}
