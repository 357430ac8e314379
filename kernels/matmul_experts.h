/* y = x W_e^T (+ bias_e) for the experts of a mixture's layer, in one launch: rows offsets[e] ..
 * offsets[e + 1] of y belong to expert e. Offsets lie in device memory and are read by the kernel,
 * so that a captured graph may run again with others.
 *
 *   x        [x_count, K]  F16 or BF16; row `row` of y is made of row x_rows[row], or of row `row`
 *   W_e      [N, K]        weights of one form (NF4, int8 by rows or by blocks) and size
 *   bias     [count, N]    dtype of y, or NULL
 *   y        [max_rows, N] F16 or BF16
 *
 * Any numbers of rows per expert will do, 0 and all of them included. offsets[0] need not be 0, and
 * offsets[count] need not be max_rows: rows of y outside of them are not written. With count 1 and
 * offsets {0, m} this is an ordinary product whose number of rows is only known on the device.
 *
 * The path and its tiles depend on the device, the weights, max_rows, count and the alignment of x,
 * and not on what the offsets say. What a row of y holds then depends on nothing but its row of x,
 * its expert and its weight in the row_weights: K is not split, and every sum has one order.
 *
 *   GEMV         a row of x at a time; float sums of exact products. AUTO takes it where there are
 *                no more rows than experts
 *   MMA_884, MMA_16816   tensor cores; tiles of 16 rows of one expert, or of 64 where there are
 *                more than 16 rows an expert. BF16 x, a K that is no multiple of 32 and an x on
 *                another address than 16 bytes are laid out anew first, which is a second launch
 *
 * Like qc_matmul_run, the function allocates nothing, does not synchronize, and may be captured.
 * Offsets that decrease or go beyond max_rows leave all of y as it was. A number in x_rows that is
 * x_count or more leaves the rows of its tile as they were. qc_matmul_check reports both. */
#ifndef QC_KERNELS_MATMUL_EXPERTS_H
#define QC_KERNELS_MATMUL_EXPERTS_H

#include "kernels/matmul.h"

QC_C_BEGIN

/* Weights that were made ready together. They borrow the arrays of the qc_weights, and `memory`. */
typedef struct {
    const void *table; /* device: what kernels know of each expert */
    qc_form form;      /* of the first */
    uint64_t rows;
    uint32_t count;
    int repacked; /* codes lie in `memory`, in rows on 16-byte addresses */
} qc_matmul_experts;

/* Returns how much memory qc_matmul_experts_prepare needs for w[0 .. count); UINT64_MAX where w is
 * NULL. */
QC_API uint64_t qc_matmul_experts_bytes(const qc_weights *w, uint32_t count);

/* w[0 .. count): equal in form, size, block and whether scales are double-quantized; offsets and
 * code maps may differ. memory: device, 256-byte aligned; written on s, then only read. Where rows
 * of codes of any expert do not begin on 16-byte addresses, those of all are laid out anew, as
 * qc_matmul_prepare does it. The w may be freed after the call, their arrays not. */
QC_API QC_NODISCARD qc_status qc_matmul_experts_prepare(const qc_matmul *h, const qc_weights *w,
                                                        uint32_t count, void *memory,
                                                        qc_matmul_experts *out, qc_cuda_stream s,
                                                        qc_error *err);

typedef struct {
    uint64_t max_rows;        /* of y, at most INT32_MAX */
    const uint32_t *offsets;  /* device, [count + 1] */
    const uint32_t *x_rows;   /* device, [max_rows], or NULL */
    const float *row_weights; /* device, [max_rows], or NULL: what row `row` of y is multiplied by,
                                 bias and all, in float and before it is rounded */
    uint64_t x_count;         /* rows of x; without x_rows max_rows at least, or 0, which is that */
    const void *x;
    qc_dtype x_dtype; /* F16 or BF16 */
    uint64_t ldx;     /* elements, >= K; 0: K */
    void *y;
    qc_dtype y_dtype; /* F16 or BF16 */
    uint64_t ldy;     /* elements, >= N; 0: N */
    const void *bias; /* [count, N] of y_dtype, or NULL */
} qc_matmul_experts_io;

/* Returns the workspace that a product needs, whatever the dtypes and strides of this many rows of
 * x; UINT64_MAX where it overflows. */
QC_API uint64_t qc_matmul_experts_workspace(const qc_matmul_experts *w, uint64_t x_count);

/* path: QC_MATMUL_AUTO, GEMV, MMA_884 or MMA_16816. workspace: device, 256-byte aligned, used until
 * the stream is done; NULL where nothing is laid out anew. QC_ERR_USAGE names the argument that is
 * wrong. Pointers that are NULL are only refused where they would be followed. */
QC_API QC_NODISCARD qc_status qc_matmul_run_experts(const qc_matmul *h, const qc_matmul_experts *w,
                                                    const qc_matmul_experts_io *io,
                                                    qc_matmul_path path, void *workspace,
                                                    uint64_t workspace_bytes, qc_cuda_stream s,
                                                    qc_error *err);

QC_C_END
#endif
