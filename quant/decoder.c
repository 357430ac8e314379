/* What all tables of qc_decoder_ops share: how much scratch attention takes, and how its arrays lie
 * in it. */
#include "quant/decoder_internal.h"

#include "base/checked.h"

uint64_t qc_attend_tokens(uint64_t group)
{
    return group < QC_ATTEND_ROWS ? QC_ATTEND_ROWS / group : 1;
}

uint64_t qc_attend_scratch_bytes(uint64_t group, uint64_t head_dim, uint64_t value_dim)
{
    uint64_t rows = qc_sat_mul(qc_attend_tokens(group), group);
    uint64_t q = qc_attend_padded(head_dim), v = qc_attend_padded(value_dim);
    /* Rows of q, scores and sums, and their maxima and totals, each rounded up to 64 bytes. */
    uint64_t floats = qc_sat_mul(rows, qc_sat_add(qc_sat_add(q, v), QC_ATTEND_KEYS + 2 * 16));
    return qc_sat_mul(qc_sat_add(floats, qc_sat_mul(qc_sat_add(q, v), QC_ATTEND_KEYS)),
                      sizeof(float));
}

void qc_attend_split(qc_attend_room *out, uint64_t group, uint64_t head_dim, uint64_t value_dim,
                     void *scratch)
{
    uint64_t rows = qc_attend_tokens(group) * group;
    out->q = scratch;
    out->scores = out->q + rows * qc_attend_padded(head_dim);
    out->sums = out->scores + rows * QC_ATTEND_KEYS;
    out->maximum = out->sums + rows * qc_attend_padded(value_dim);
    out->total = out->maximum + rows * 16;
    out->keys = out->total + rows * 16;
    out->values = out->keys + qc_attend_padded(head_dim) * QC_ATTEND_KEYS;
}
