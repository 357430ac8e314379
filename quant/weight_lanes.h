/* The loops of weight_check.c over elements, written so that a compiler makes vectors of them. They
 * are built once for each instruction set (weight_lanes*.c), with the same results. Not for
 * callers.
 *
 * Sums have 16 lanes: element i goes to lane i % 16; lanes are folded as qc_fold16 does. Largest
 * magnitudes are found as integers, whose order is that of the floats, with NaN above all. */
#ifndef QC_QUANT_WEIGHT_LANES_H
#define QC_QUANT_WEIGHT_LANES_H

#include "quant/quant_internal.h"

#define QC_LANES_MOST 1024u /* elements of a call: as many as a float can sum up */

typedef struct {
    float ee, xx;  /* sums of (x - value)^2 and of x^2 */
    uint32_t peak; /* bits of the largest |x - value|, rounded; above QC_F32_INF: NaN */
} qc_lane_sums;

/* Codes of 4 bits: their values, and where each is the nearest one, all times the scale. */
typedef struct {
    const float *map, *low, *high; /* [16] */
} qc_lane_tables;

typedef struct {
    qc_lane_sums (*errors)(const float *x, const float *value, uint32_t n);
    /* Counts elements outside of [low - slack, high + slack]; NaN is outside. */
    uint32_t (*outside)(const float *x, const float *low, const float *high, uint32_t n,
                        float slack);
    /* Decodes and compares n elements, a multiple of 32, with a scale for each `block` of them (a
     * multiple of 32). Element i goes to lane i / 2 % 16. outside [ceil(n / block)]: how many are
     * outside of their code's borders, give or take slack times the scale; a negative scale swaps
     * the borders. */
    qc_lane_sums (*codes4)(const float *x, const uint8_t *codes, const float *scales,
                           const qc_lane_tables *t, uint32_t n, uint32_t block, float slack,
                           uint32_t *outside);
    /* Counts elements of int8 farther than reach from their value, except for those beyond the
     * first or last code. */
    uint32_t (*outside8)(const float *x, const float *value, const int8_t *codes, uint32_t n,
                         float reach);
    /* Counts elements of a magnitude above top. */
    uint32_t (*above)(const float *x, uint32_t n, float top);
} qc_lanes;

extern const qc_lanes qc_lanes_scalar;
extern const qc_lanes qc_lanes_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_lanes qc_lanes_avx512; /* where QC_HAVE_QUANT_AVX512 */

#endif
