/* Shared by the tables of qc_matmul_ops; not for callers.
 *
 * matmul_dispatch.c has what all tables do alike: it decodes QC_MATMUL_ROWS rows of W to floats,
 * once, walks over x in groups of at most QC_MATMUL_GROUP rows, and finishes the sums. What is left
 * to a table is the tile: the sums of a few rows of W with a few rows of x, held in registers.
 *
 *            w: rows [rows][stride] floats         sums [rows][QC_MATMUL_GROUP]
 *     x: [m][k] of its own type, widened as it is loaded
 *
 * A NaN's sign and payload depend on the order of operands, which compilers choose: a sum that is
 * NaN becomes the one quiet NaN 0x7fc00000 before it is rounded. */
#ifndef QC_QUANT_MATMUL_PARTS_H
#define QC_QUANT_MATMUL_PARTS_H

#include "quant/matmul_ops.h"

#define QC_MATMUL_ROWS  4u  /* of W, decoded together */
#define QC_MATMUL_GROUP 16u /* rows of x per call of a tile */

/* m <= QC_MATMUL_GROUP, rows <= QC_MATMUL_ROWS; x: m rows of k elements, ldx elements apart. Lanes
 * k % 16 without bias, folded; 64-byte aligned: w, whose stride is a multiple of 16. */
typedef void (*qc_matmul_tile_fn)(const float *w, uint64_t stride, unsigned rows, const void *x,
                                  qc_dtype x_dtype, uint64_t ldx, unsigned m, uint64_t k,
                                  float *sums);

extern const qc_matmul_ops qc_matmul_ops_scalar;
extern const qc_matmul_ops qc_matmul_ops_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_matmul_ops qc_matmul_ops_avx512; /* where QC_HAVE_QUANT_AVX512 */

void qc_matmul_quantized(qc_matmul_tile_fn tile, const qc_quant_ops *ops, const qc_weights *w,
                         uint64_t first, uint64_t count, const qc_matmul_cpu_io *io, void *scratch);
void qc_matmul_dense_rows(qc_matmul_tile_fn tile, const qc_quant_ops *ops, const void *w,
                          qc_dtype w_dtype, uint64_t k, uint64_t first, uint64_t count,
                          const qc_matmul_cpu_io *io, void *scratch);

/* qc_matmul_ops.double_row, built once per instruction set: the compiler's vectors add in the same
 * order, and products of floats are exact in double, so all give the same bits. */
static inline void qc_matmul_double_lanes(const float *w, uint64_t k, const double *packed,
                                          uint64_t m, double *y)
{
    for (uint64_t first = 0; first < m; first += QC_MATMUL_GROUP) {
        double acc[QC_MATMUL_GROUP] = {0.0};
        for (uint64_t i = 0; i < k; i++, packed += QC_MATMUL_GROUP)
            for (unsigned l = 0; l < QC_MATMUL_GROUP; l++)
                acc[l] += (double)w[i] * packed[l];
        for (unsigned l = 0; l < QC_MATMUL_GROUP && first + l < m; l++)
            y[first + l] = acc[l];
    }
}

#endif
