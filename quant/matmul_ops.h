/* y = x W^T + bias on the CPU with W quantized (or dense). validate uses it on a machine without a
 * GPU, and tests hold the GPU's kernels against it.
 *
 * Every table gives the same bits: the value of a weight is the float of quant_weights.h; product k
 * of an output goes to lane k % 16 by one fmaf in increasing k; lanes are folded as qc_fold16 does;
 * the bias is added in float; the sum is rounded once to y's type.
 *
 *   x [m, k] F32, F16 or BF16, row stride ldx elements    y [m, n] F32, F16 or BF16, stride ldy
 *   bias [n] float or NULL
 *
 * One call makes rows (outputs) [first, first + count) of W, which are columns of y. Callers share
 * the work among threads by such ranges; results do not depend on the cut. NaN and infinity follow
 * IEEE; a NaN comes out as the positive quiet one. Thread-safe: yes.
 * Allocates: no (scratch is the caller's). Sizes: rows * cols, m * ldx and so on fit 64 bits
 * (qc_weights_check for w). */
#ifndef QC_QUANT_MATMUL_OPS_H
#define QC_QUANT_MATMUL_OPS_H

#include "quant/quant_form.h"

typedef struct qc_matmul_tile qc_matmul_tile; /* matmul_internal.h */

typedef struct {
    qc_isa isa;
    void (*tile)(const qc_matmul_tile *t);
    unsigned group; /* rows of x that a tile takes best, at most QC_MATMUL_GROUP */
    const qc_quant_ops *quant;
    /* One output in double for all rows of x: y [m] = sum over k, in order, of w [k] * x. packed:
     * see qc_matmul_double_pack. */
    void (*double_row)(const float *w, uint64_t k, const double *packed, uint64_t m, double *y);
} qc_matmul_ops;

/* As qc_quant_ops_for. */
const qc_matmul_ops *qc_matmul_ops_for(qc_isa isa);

/* scratch: qc_matmul_cpu_scratch_bytes, 64-byte aligned, one per thread */
void qc_matmul_cpu_quantized(const qc_matmul_ops *ops, const qc_weights *w, uint64_t first,
                             uint64_t count, const qc_matmul_cpu_io *io, void *scratch);
/* The same with W [n, k] in F32, F16 or BF16; lanes and folds are the same. */
void qc_matmul_cpu_dense(const qc_matmul_ops *ops, const void *w, qc_dtype w_dtype, uint64_t k,
                         uint64_t first, uint64_t count, const qc_matmul_cpu_io *io, void *scratch);
/* Also enough for any smaller k. Saturates. */
uint64_t qc_matmul_cpu_scratch_bytes(uint64_t m, uint64_t k);

/* x as double_row wants it: [ceil(m / 16)][k][16] doubles equal to x, with zeros in rows beyond m.
 * Align it to 64 bytes for speed. */
#define QC_MATMUL_PACK_ROWS 16u
void qc_matmul_double_pack(const void *x, qc_dtype x_dtype, uint64_t m, uint64_t ldx, uint64_t k,
                           double *packed);

#endif
