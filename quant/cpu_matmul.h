/* y = x W^T + bias on the CPU with W quantized, for text generation: fast for a few rows of x.
 *
 *   x [m, k] F32, F16 or BF16, row stride ldx elements    y [m, n] F32, F16 or BF16, stride ldy
 *   bias [n] float or NULL
 *
 * A decode step multiplies every weight once, so its time is that of reading codes and scales. For
 * up to QC_CPU_MATMUL_ROWS rows of x, and weights whose rows are whole groups of 64 and whole
 * blocks, the product is made of integers:
 *
 *   x of a group of 64   q = round(x / s), |q| <= 16383, with s = largest |x| / 16383
 *   value of a code      t = round(v * 16384 / largest |v|), a table of 16 for codes of 4 bits;
 *                        codes of 8 bits are their own values
 *   a group              sum of q * t, exact in 32 bits, in 8 lanes; each lane times the scales of
 *                        x and the weights is added in float by one fmaf
 *
 * So x is off by at most 2^-15 of the largest |x| of its group, which is less than rounding to
 * bfloat16 may move any element above a 64th of it. A value of a code of 4 bits is off by at most
 * 2^-15 of the largest value, and not at all for integers. All other shapes take the panels of
 * quant/matmul_ops.h, whose sums are in float. Either way the bits depend on shapes and values
 * only, not on threads or instruction set.
 *
 * Infinity and NaN in x come out as NaN in all outputs of that row of x. */
#ifndef QC_QUANT_CPU_MATMUL_H
#define QC_QUANT_CPU_MATMUL_H

#include "quant/quant_weights.h"

#ifdef __cplusplus
extern "C" {
#endif

#define QC_CPU_MATMUL_ROWS 16u /* of x that take the integer kernels; more take panels */

/* Threads that wait for products between calls, and room for x. One call at a time uses a handle;
 * others wait for it. */
typedef struct qc_cpu_matmul qc_cpu_matmul;

/* threads: 1 to 1024, or 0 for one per processor. The calling thread of a product takes part, so
 * threads - 1 are started. QC_ERR_USAGE where threads are more; that or QC_ERR_DEVICE where
 * QCONV_ISA is wrong (base/cpu.h). */
QC_API QC_NODISCARD qc_status qc_cpu_matmul_create(qc_cpu_matmul **out, unsigned threads,
                                                   qc_error *err);
QC_API void qc_cpu_matmul_destroy(qc_cpu_matmul *h); /* NULL is fine; no call may be running */
QC_API unsigned qc_cpu_matmul_threads(const qc_cpu_matmul *h);

/* Does this weight take the integer kernels? */
QC_API int qc_cpu_matmul_is_fast(const qc_weights *w);

/* w must be sound (qc_weights_check). Allocates when x is larger than ever before.
 * QC_ERR_USAGE names a wrong dtype or stride; QC_ERR_NOMEM. */
QC_API QC_NODISCARD qc_status qc_cpu_matmul_run(qc_cpu_matmul *h, const qc_weights *w,
                                                const qc_matmul_cpu_io *io, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
