/* cuBLAS, opened at run time: qconv does not need it to start and is not linked with it.
 *
 * Threads: a lock serializes the calls on one library. */
#ifndef QC_KERNELS_CUBLAS_LIBRARY_H
#define QC_KERNELS_CUBLAS_LIBRARY_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qc_cublas qc_cublas;

/* Opens cuBLAS for the current device. QCONV_LIBCUBLAS names the library; otherwise libcublas.so of
 * the runtime's own major version is tried, then .13, .12 and .11, in the places of cuda_library.h.
 * QC_ERR_DEVICE with one sentence where there is none, or where it does not start. */
QC_NODISCARD qc_status qc_cublas_open(qc_cublas **out, int runtime_version, qc_error *err);
void qc_cublas_close(qc_cublas *c); /* accepts NULL */

/* y [m, n] = alpha * x [m, k] * w [n, k]^T, all row-major with the strides given, accumulated in
 * float. All sizes and strides at most INT32_MAX. */
typedef struct {
    const void *w, *x;
    void *y;
    qc_dtype in_dtype;  /* of x and w: F16 or BF16 */
    qc_dtype out_dtype; /* that one, or F32 */
    uint64_t m, n, k, ldw, ldx, ldy;
    /* device memory: alpha, then 0, as floats; NULL: alpha is 1 */
    const float *alpha_zero;
} qc_cublas_gemm_args;

/* y [m, n] = alpha * op(a) op(b) + beta * y, all F32 or all F64, row-major with the strides given.
 * op(a) is [m, k] and op(b) [k, n]; with trans_a, a is stored as [k, m], likewise b. F32 is
 * computed and added in float, never in TF32. Sizes and strides are at most INT32_MAX. alpha and
 * beta are passed from the host. */
typedef struct {
    const void *a, *b;
    void *y;
    qc_dtype dtype;
    int trans_a, trans_b;
    uint64_t m, n, k, lda, ldb, ldy;
    double alpha, beta;
} qc_cublas_product_args;

/* Holds the lock for several products in a row on one stream with one workspace (256-byte aligned;
 * NULL: cuBLAS's own). Each begin that returned QC_OK needs an end. */
QC_NODISCARD qc_status qc_cublas_begin(qc_cublas *c, void *workspace, size_t workspace_bytes,
                                       qc_cuda_stream s, qc_error *err);
QC_NODISCARD qc_status qc_cublas_gemm(qc_cublas *c, const qc_cublas_gemm_args *a, qc_error *err);
QC_NODISCARD qc_status qc_cublas_product(qc_cublas *c, const qc_cublas_product_args *a,
                                         qc_error *err);
void qc_cublas_end(qc_cublas *c);
/* The library's name as it gives it: "cuBLAS 12.4.5". */
const char *qc_cublas_name(const qc_cublas *c);

#ifdef __cplusplus
}
#endif
#endif
