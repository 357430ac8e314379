/* For kernels/ only: what a matmul's handle holds. These files share it: matmul_handle.c (making
 * it, faults, checks), matmul.c (weights, plans, launches) and matmul_dense.c (what goes through
 * cuBLAS). */
#ifndef QC_KERNELS_MATMUL_HANDLE_H
#define QC_KERNELS_MATMUL_HANDLE_H

#include "kernels/cuda_library.h"
#include "kernels/matmul_kernels.h"
#include "kernels/matmul_plan.h"

/* A stream beside the caller's, on which the next chunk of a weight is dequantized. The lock of
 * cuBLAS (qc_cublas_begin) guards it. */
typedef struct {
    qc_cuda_stream stream;
    qc_cuda_event forked; /* what the caller's stream had done when this one got work */
    qc_cuda_event ready;  /* the chunk is dense */
} qc_matmul_side;

struct qc_matmul {
    qc_cuda_device device;
    qc_cublas *gemm; /* NULL if there is no cuBLAS: no_gemm says why */
    qc_error no_gemm;
    /* With cuBLAS: one for streams that run and one for streams that are captured, because a stream
     * belongs to a capture until that ends. */
    qc_matmul_side side[2];
    uint32_t *fault; /* pinned: kernels write it, any thread reads and clears it, atomically */
    qc_matmul_choice choice; /* of tests: what QC_MATMUL_AUTO takes, as in qc_matmul_shape */
};

/* QC_ERR_USAGE unless the handle's device is the calling thread's. Each function that puts work on
 * a stream asks this first. cudaGetDevice reads state of the thread and does not reach the
 * device. */
QC_NODISCARD qc_status qc_matmul_here(const qc_matmul *h, qc_error *err);

/* Returns the bytes of a row of codes that is laid out anew. */
uint64_t qc_matmul_repacked_row_bytes(const qc_form *form);

QC_NODISCARD qc_status qc_matmul_check_weights(const qc_weights *w, qc_error *err);
/* Checks dtypes, strides and overflow; with pointers also x, y and bias. */
QC_NODISCARD qc_status qc_matmul_check_io(const qc_matmul_io *io, uint64_t n, uint64_t k,
                                          int pointers, qc_error *err);

/* Computes the product of a DEQUANT_GEMM plan; c is as launchers get it. */
QC_NODISCARD qc_status qc_matmul_dequant_gemm(const qc_matmul *h, const qc_matmul_call *c,
                                              unsigned char *workspace, uint64_t workspace_bytes,
                                              qc_cuda_stream s, qc_error *err);

#endif
