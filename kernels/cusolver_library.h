/* cuSOLVER, opened at run time as cuBLAS is (kernels/cublas_library.h): the Cholesky factor of a
 * symmetric matrix of doubles, and systems with it.
 *
 * One thread at a time for a library. */
#ifndef QC_KERNELS_CUSOLVER_LIBRARY_H
#define QC_KERNELS_CUSOLVER_LIBRARY_H

#include "kernels/cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qc_cusolver qc_cusolver;

/* For the current device. QCONV_LIBCUSOLVER names the library; else libcusolver.so of the runtime's
 * own generation is tried (.12 with CUDA 13, .11 with CUDA 11 and 12), then the other, in the
 * places of cuda_library.h. QC_ERR_DEVICE with one sentence where there is none, it is too old, or
 * it does not start. */
QC_NODISCARD qc_status qc_cusolver_open(qc_cusolver **out, int runtime_version, qc_error *err);
void qc_cusolver_close(qc_cusolver *c); /* accepts NULL */
/* "cuSOLVER 11.6.1" */
const char *qc_cusolver_name(const qc_cusolver *c);

/* a [n, n] doubles on the device, row-major, the upper triangle of a symmetric matrix (what lies
 * below is neither read nor meant): becomes L^T where a = L L^T, so that L lies in columns.
 * *exists: 0 where a is not positive definite as far as doubles can tell; a is then undefined.
 * Allocates its workspace. Synchronizes. */
QC_NODISCARD qc_status qc_cusolver_factor(qc_cusolver *c, uint64_t n, double *a, int *exists,
                                          qc_cuda_stream s, qc_error *err);
/* Each row of x [count, n], on the device, becomes the solution of a y = x with a's factor of
 * qc_cusolver_factor. */
QC_NODISCARD qc_status qc_cusolver_solve(qc_cusolver *c, uint64_t n, const double *factor,
                                         uint64_t count, double *x, qc_cuda_stream s,
                                         qc_error *err);
/* Bytes of device memory that factor's workspace takes at most, as the library says. */
QC_NODISCARD qc_status qc_cusolver_factor_bytes(qc_cusolver *c, uint64_t n, uint64_t *bytes,
                                                qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
