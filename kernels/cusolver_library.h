/* cuSOLVER, opened at run time like cuBLAS (kernels/cublas_library.h): the Cholesky factor of a
 * symmetric matrix of doubles, and systems of equations with it.
 *
 * Only one thread at a time may use a library. */
#ifndef QC_KERNELS_CUSOLVER_LIBRARY_H
#define QC_KERNELS_CUSOLVER_LIBRARY_H

#include "kernels/cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qc_cusolver qc_cusolver;

/* Opens cuSOLVER for the current device. QCONV_LIBCUSOLVER names the library; otherwise
 * libcusolver.so of the runtime's own generation is tried (.12 with CUDA 13, .11 with CUDA 11 and
 * 12), then the other, in the places of cuda_library.h. QC_ERR_DEVICE with one sentence where there
 * is none, it is too old, or it does not start. */
QC_NODISCARD qc_status qc_cusolver_open(qc_cusolver **out, int runtime_version, qc_error *err);
void qc_cusolver_close(qc_cusolver *c); /* accepts NULL */
/* "cuSOLVER 11.6.1" */
const char *qc_cusolver_name(const qc_cusolver *c);

/* a [n, n] doubles on the device, row-major, is the upper triangle of a symmetric matrix (what lies
 * below is not read and has no meaning). It becomes L^T where a = L L^T, so L lies in columns.
 * *exists is 0 where a is not positive definite as far as doubles can tell; a is then undefined.
 * Allocates its workspace. Synchronizes. */
QC_NODISCARD qc_status qc_cusolver_factor(qc_cusolver *c, uint64_t n, double *a, int *exists,
                                          qc_cuda_stream s, qc_error *err);
/* Each row of x [count, n], on the device, becomes the solution y of a y = x, with the factor that
 * qc_cusolver_factor made of a. */
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
