/* Inside kernels/ only: what qc_matmul_run hands to the launchers, one per path. Launchers check
 * nothing but their launch: the plan is right. */
#ifndef QC_KERNELS_MATMUL_KERNELS_H
#define QC_KERNELS_MATMUL_KERNELS_H

#include "kernels/matmul_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    qc_matmul_plan plan;
    qc_matmul_weights weights;
    uint64_t m, n, k;
    /* GEMV: x as the caller has it. MMA paths: float16 with 16-byte aligned rows, readable (zero)
     * up to plan.k_padded, and x_exponent[m]: row m was multiplied by 2^x_exponent[m]; NULL: by 1.
     */
    const void *x;
    qc_dtype x_dtype;
    uint64_t ldx;
    const int *x_exponent;
    void *y;
    qc_dtype y_dtype;
    uint64_t ldy;
    const void *bias;
    float *partials; /* [splits][m][n] where plan.splits > 1 */
} qc_matmul_call;

QC_NODISCARD qc_status qc_gemv_launch(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err);
QC_NODISCARD qc_status qc_mma884_launch(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err);
QC_NODISCARD qc_status qc_mma16816_launch(const qc_matmul_call *c, qc_cuda_stream s, qc_error *err);
/* partials -> y: summed over splits in order, scaled by exponents, bias added, rounded once. */
QC_NODISCARD qc_status qc_matmul_reduce_launch(const qc_matmul_call *c, qc_cuda_stream s,
                                               qc_error *err);

/* Tiles and shared memory of the tensor-core kernels for a plan; pure host functions beside their
 * kernels, called by qc_matmul_plan_make after path, run and the shape are decided. They set
 * m_tile, n_tile, threads, splits, split_k and shared_bytes. */
void qc_gemv_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);
void qc_mma884_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);
void qc_mma16816_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);

#ifdef __cplusplus
}
#endif
#endif
