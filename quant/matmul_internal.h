/* Shared by the tables of qc_matmul_ops; not for callers.
 *
 * matmul_panels.c does what all tables have in common: it decodes a panel of rows of W to floats
 * once, walks over x in groups of as many rows as the table takes and over k in steps, and finishes
 * the sums. A table only computes the tile: the sums of a few rows of W with a group of rows of x,
 * held in registers.
 *
 *            w: [rows][stride] floats              lanes [rows][QC_MATMUL_GROUP][16]
 *     x: [m][QC_MATMUL_STEP] floats                sums [m][QC_MATMUL_PANEL]
 *
 * A step of a group of x (24 or 32 KiB) stays in the first-level cache while all rows of the panel
 * go by, and the panel stays in the second-level cache while all of x does. The lanes wait in
 * memory from step to step, so sums run in the order of k.
 *
 * A NaN's sign and payload depend on the order of operands, which compilers choose. So a sum that
 * is NaN becomes the one quiet NaN 0x7fc00000 before it is rounded. */
#ifndef QC_QUANT_MATMUL_INTERNAL_H
#define QC_QUANT_MATMUL_INTERNAL_H

#include "quant/matmul_ops.h"

#define QC_MATMUL_ROWS  4u   /* of W per call of a tile */
#define QC_MATMUL_GROUP 16u  /* rows of x per call of a tile, at most */
#define QC_MATMUL_PANEL 128u /* rows of W that are decoded together, at most */
#define QC_MATMUL_STEP  512u /* of k; a multiple of 16 */

/* All but sums are 64-byte aligned, and stride is a multiple of 16. k is a multiple of 16 except in
 * the last step, where lanes without a product stay as they are. */
struct qc_matmul_tile {
    const float *w;
    uint64_t stride;
    unsigned rows;  /* <= QC_MATMUL_ROWS */
    const float *x; /* row stride QC_MATMUL_STEP */
    unsigned m;     /* <= QC_MATMUL_GROUP */
    unsigned k;     /* <= QC_MATMUL_STEP */
    float *lanes;
    int is_first; /* lanes begin at 0 */
    int is_last;  /* lanes are folded into sums */
    float *sums;
};

extern const qc_matmul_ops qc_matmul_ops_scalar;
extern const qc_matmul_ops qc_matmul_ops_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_matmul_ops qc_matmul_ops_avx512; /* where QC_HAVE_QUANT_AVX512 */

/* The body of qc_matmul_ops.double_row, built once per instruction set. The compiler's vectors add
 * in the same order, and products of floats are exact in double, so all give the same bits. */
static inline void qc_matmul_double_lanes(const float *w, uint64_t k, const double *packed,
                                          uint64_t m, double *y)
{
    for (uint64_t first = 0; first < m; first += QC_MATMUL_PACK_ROWS) {
        double acc[QC_MATMUL_PACK_ROWS] = {0.0};
        for (uint64_t i = 0; i < k; i++, packed += QC_MATMUL_PACK_ROWS)
            for (unsigned l = 0; l < QC_MATMUL_PACK_ROWS; l++)
                acc[l] += (double)w[i] * packed[l];
        for (unsigned l = 0; l < QC_MATMUL_PACK_ROWS && first + l < m; l++)
            y[first + l] = acc[l];
    }
}

#endif
