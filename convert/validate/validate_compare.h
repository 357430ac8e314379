/* Comparing a quantized layer with its original on a GPU, as validate uses it. gpu_validate.c
 * implements it. */
#ifndef QC_CONVERT_VALIDATE_COMPARE_H
#define QC_CONVERT_VALIDATE_COMPARE_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"
#include "quant/quant_form.h"

/* The distance between two sets of numbers. A NaN among them stays. */
typedef struct {
    double ee, xx, max; /* sums of squares of errors and of the others; the largest error */
} qc_validate_sums;

/* The result for one batch size. The sums of squares run over all outputs of the rows that were
 * looked at. Y is the result of the quantized matmul, Z is cuBLAS's result with the original
 * weights (or, where there is no cuBLAS, sums in double that are rounded), and S are sums in double
 * of the quantized weights. */
typedef struct {
    uint64_t m, first; /* asked: rows [first, first + m) of x, and whether to time them */
    int timed;
    const char *path;        /* "gemv", ... */
    double seconds;          /* median; 0: not timed */
    double fp16_seconds;     /* likewise; 0 without cuBLAS */
    double floor_seconds;    /* the least time on the memory and tensor cores as measured */
    qc_validate_sums output; /* Y beside Z */
    qc_validate_sums kernel; /* Y beside S */
    uint64_t outputs;        /* how many were looked at */
} qc_gpu_compared;

typedef struct {
    const qc_weights *w; /* in host memory */
    uint64_t codes_bytes, scales_bytes, nested_bytes;
    qc_dtype dtype; /* dtype of x, the results and the original weights: F16 or BF16 */
    const void *x;  /* host, [rows, cols] */
    uint64_t rows;
    /* Reads rows [first, first + count) of the original weights in dtype. */
    qc_status (*read)(void *ctx, uint64_t first, uint64_t count, void *out, qc_error *err);
    void *ctx;
} qc_gpu_comparison;

typedef struct qc_gpu_comparer qc_gpu_comparer;

typedef struct qc_gpu_validator {
    /* Measures the device's roof first. */
    qc_status (*create)(qc_gpu_comparer **out, const qc_cuda_device *device, qc_error *err);
    void (*destroy)(qc_gpu_comparer *c); /* accepts NULL */
    /* Why times against fp16 cannot be taken, or NULL. */
    const char *(*no_gemm)(const qc_gpu_comparer *c);
    /* Answers each question in out. QC_ERR_NOMEM means that the device has no room for this layer;
     * nothing is lost, and other layers may follow. */
    qc_status (*compare)(qc_gpu_comparer *c, const qc_gpu_comparison *in, qc_gpu_compared *out,
                         unsigned count, qc_error *err);
} qc_gpu_validator;

#endif
