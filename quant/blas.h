/* OpenBLAS, loaded when it is first needed: calibrating is the only thing that wants it, and a
 * program that was only asked to convert should neither need it nor pay for its threads.
 *
 * OpenBLAS is held to one thread; who has more gives each a tile of its own. So results depend on
 * the processor (OpenBLAS has kernels per kind) but not on how many threads share the work. */
#ifndef QC_QUANT_BLAS_H
#define QC_QUANT_BLAS_H

#include "base/status.h"

#include <stdint.h>

/* Column-major Fortran interfaces wrapped for row-major arrays; sizes below 2^31 are checked by
 * the callers in this folder. Thread-safe. */
typedef struct qc_blas qc_blas;

/* Once per process; the result is never freed. QC_ERR_UNSUPPORTED with the package to install where
 * libopenblas.so.0 is not found or lacks what is needed. Thread-safe. */
QC_NODISCARD qc_status qc_blas_open(const qc_blas **out, qc_error *err);
/* "OpenBLAS 0.3.21 ... SkylakeX", as the library describes itself. */
const char *qc_blas_name(const qc_blas *b);

#endif
