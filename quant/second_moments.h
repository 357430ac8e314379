/* Second moments of a linear layer's inputs: what calibrating knows of the data.
 *
 *   H = sum over tokens of x x^T     [n, n], symmetric: only the lower triangle (j <= i) is kept
 *   C = sum over tokens of x z^T     [n, n], all of it; x the inputs behind the quantized layers,
 *                                    z those of the same tokens in the original model
 *
 * Sums are doubles, row-major. OpenBLAS adds products of at most QC_MOMENT_TOKENS tokens in float;
 * beyond that they are added in double, so the sum of a million tokens is as good as that of a
 * thousand. Results do not depend on threads, but on how many tokens each call gets. */
#ifndef QC_QUANT_SECOND_MOMENTS_H
#define QC_QUANT_SECOND_MOMENTS_H

#include "quant/blas.h"

#define QC_MOMENT_TOKENS 256u

/* h [n, n] (lower triangle) += x^T x; c [n, n] += x^T z where c is not NULL. x, z: [tokens, n],
 * rows ldx and ldz floats apart. Allocates a tile per thread. QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_moments_add(const qc_blas *b, unsigned threads, double *h, double *c,
                                      uint64_t n, const float *x, uint64_t ldx, const float *z,
                                      uint64_t ldz, uint64_t tokens, qc_error *err);

#endif
