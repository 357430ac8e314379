/* cuBLAS and cuSOLVER, opened at run time: qconv does not need them to start and is not linked with
 * them.
 *
 * Threads: a lock serializes the calls on one cuBLAS; only one thread at a time may use a cuSOLVER.
 * The opener of both is thread-safe. */
#ifndef QC_KERNELS_CUDA_LIBRARY_H
#define QC_KERNELS_CUDA_LIBRARY_H

#include "base/dtype.h"
#include "base/open_library.h"
#include "kernels/cuda_device.h"

QC_C_BEGIN

/* ---- cuBLAS ---- */

typedef struct qc_cublas qc_cublas;

/* Opens cuBLAS for the current device. QCONV_LIBCUBLAS names the library; otherwise libcublas.so of
 * the runtime's own major version is tried, then .13, .12 and .11, in qc_cuda_places.
 * QC_ERR_DEVICE with one sentence where there is none, or where it does not start. */
QC_NODISCARD qc_status qc_cublas_open(qc_cublas **out, int runtime_version, qc_error *err);
void qc_cublas_close(qc_cublas *c); /* accepts NULL */

/* y [m, n] = alpha * op(a) op(b) + beta * y, row-major with the strides given. op(a) is [m, k] and
 * op(b) [k, n]; with trans_a, a is stored as [k, m], likewise b. Sums are float (never TF32), those
 * of F64 double. Sizes and strides are at most INT32_MAX. */
typedef struct {
    const void *a, *b;
    void *y;
    qc_dtype dtype;   /* F16, BF16, F32 or F64, for a and b */
    qc_dtype y_dtype; /* the same, or F32 with F16 and BF16 */
    int trans_a, trans_b;
    uint64_t m, n, k, lda, ldb, ldy;
    double alpha, beta;      /* passed from the host, */
    const float *alpha_zero; /* or device memory, not of F64: alpha, then 0 for beta */
} qc_cublas_product_args;

/* Takes the lock for several products in a row on one stream with one workspace (256-byte aligned;
 * NULL is cuBLAS's own). Each begin that returned QC_OK needs an end. */
QC_NODISCARD qc_status qc_cublas_begin(qc_cublas *c, void *workspace, size_t workspace_bytes,
                                       qc_cuda_stream s, qc_error *err);
QC_NODISCARD qc_status qc_cublas_product(qc_cublas *c, const qc_cublas_product_args *a,
                                         qc_error *err);
void qc_cublas_end(qc_cublas *c);
/* Returns the library's name as it gives it: "cuBLAS 12.4.5". */
const char *qc_cublas_name(const qc_cublas *c);

/* ---- cuSOLVER: the Cholesky factor of a symmetric matrix of doubles, and systems of equations
 * with it ---- */

typedef struct qc_cusolver qc_cusolver;

/* Opens cuSOLVER for the current device. QCONV_LIBCUSOLVER names the library; otherwise
 * libcusolver.so of the runtime's own generation is tried (.12 with CUDA 13, .11 with CUDA 11 and
 * 12), then the other, in qc_cuda_places. QC_ERR_DEVICE with one sentence where there
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

/* ---- inside kernels/ only ---- */

/* The folders of a toolkit, and of the wheels in a Python environment, whose libraries find each
 * other. */
extern const qc_library_place qc_cuda_places[];

/* Turns the result of the library's function `what` into a status; no_memory is the code of
 * QC_ERR_NOMEM. */
QC_NODISCARD qc_status qc_cuda_library_check(int code, int no_memory, const char *title,
                                             const char *what, qc_error *err);

QC_C_END
#endif
