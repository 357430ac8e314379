/* OpenBLAS, which is loaded when it is first needed. Only calibrating needs it, so a program that
 * was just asked to convert neither depends on it nor pays for its threads.
 *
 * OpenBLAS is held to one thread; a caller with more threads gives each of them a tile of its own.
 * So results depend on the processor (OpenBLAS has kernels per kind) but not on how many threads
 * share the work. */
#ifndef QC_QUANT_BLAS_H
#define QC_QUANT_BLAS_H

#include "base/status.h"

#include <stdint.h>

/* An opened OpenBLAS. The callers in this folder check that sizes are below 2^31. Thread-safe. */
typedef struct qc_blas qc_blas;

/* Loads the library once per process; the result is never freed. If libopenblas.so.0 is not found
 * or lacks what is needed, QC_ERR_UNSUPPORTED names the package to install. Thread-safe. */
QC_NODISCARD qc_status qc_blas_open(const qc_blas **out, qc_error *err);
/* Returns the library's description of itself: "OpenBLAS 0.3.21 ... SkylakeX". */
const char *qc_blas_name(const qc_blas *b);
/* Measures the seconds of one operation of a product of floats with so many threads, in a tenth of
 * a second. QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_blas_speed(double *out, const qc_blas *b, unsigned threads,
                                     qc_error *err);

#endif
