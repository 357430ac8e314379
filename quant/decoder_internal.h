/* Shared by the tables of qc_decoder_ops; not for callers. */
#ifndef QC_QUANT_DECODER_INTERNAL_H
#define QC_QUANT_DECODER_INTERNAL_H

#include "quant/decoder_ops.h"

#define QC_ATTEND_KEYS 64u  /* keys at a time */
#define QC_ATTEND_ROWS 128u /* rows of q per call, at least one token's */

extern const qc_decoder_ops qc_decoder_ops_scalar;
extern const qc_decoder_ops qc_decoder_ops_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_decoder_ops qc_decoder_ops_avx512; /* where QC_HAVE_QUANT_AVX512 */

/* Scratch of attend; every array begins at a multiple of 64 bytes. */
typedef struct {
    float *q, *scores, *sums, *maximum, *total; /* of ROWS */
    float *keys, *values;
} qc_attend_room;

static inline uint64_t qc_attend_padded(uint64_t dim)
{
    return (dim + 15) / 16 * 16;
}

void qc_attend_split(qc_attend_room *out, uint64_t group, uint64_t head_dim, uint64_t value_dim,
                     void *scratch);

#endif
