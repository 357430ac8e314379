/* What the values of a model say about how it came here: numbers that are not finite in what is not
 * quantized, weights of which nothing is left, and files whose end is zeros. None of it stops a
 * conversion. What an earlier run made is not looked at again. */
#ifndef QC_CONVERT_ODD_VALUES_H
#define QC_CONVERT_ODD_VALUES_H

#include "convert/pipeline/worker.h"

/* Returns the digest of the content of a unit that is not quantized, and looks at its values on the
 * way, while they are in the cache. */
qc_digest qc_odd_values_digest(qc_worker *w, qc_unit *u);

/* Are all values 0 or -0? It stops soon after the first that is not, so it takes no time for most
 * weights. */
int qc_odd_values_are_zero(const void *bytes, uint64_t len, qc_dtype dtype);

typedef struct {
    uint64_t not_finite; /* tensors that have such values and keep them */
    uint64_t vanished;   /* weights that have values in the source and only zeros in the output */
    uint64_t half_zero;  /* files of the source whose second half, or more, is zeros */
} qc_odd_values;

/* Counts over the jobs that this process has made, and warns once of each kind. */
QC_NODISCARD qc_status qc_odd_values_tell(qc_odd_values *out, const qc_pipeline *p, qc_error *err);

#endif
