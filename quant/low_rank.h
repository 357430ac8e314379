/* The product of two thin matrices, in double: what an adapter (LoRA) adds to a weight. A product
 * of two floats is exact in double, and the sum over the rank is taken from the first to the last,
 * so every instruction set gives the same bits, fused or not. Thread-safe. */
#ifndef QC_QUANT_LOW_RANK_H
#define QC_QUANT_LOW_RANK_H

#include "base/cpu.h"

#include <stdint.h>

/* Rows and columns of the product that a call makes at most. */
#define QC_LOW_RANK_ROWS 4u
#define QC_LOW_RANK_RUN  512u

/* Columns of the right matrix lie together in panels of so many: [panel, rank, column], the last
 * one filled up with zeros. Whole rows would lie at the same few places of a cache. */
#define QC_LOW_RANK_PANEL 8u

/* Returns how many numbers a packed matrix of these columns takes. */
uint64_t qc_low_rank_packed(uint64_t rank, uint64_t cols);
/* Packs a matrix whose element (k, c) is at from[k * k_step + c * c_step]. */
void qc_low_rank_pack(double *to, const float *from, uint64_t k_step, uint64_t c_step,
                      uint64_t rank, uint64_t cols);

/* A part of the product, times scale. The matrices hold values of floats. */
typedef struct {
    const double *left;  /* [rows, rank], from its first row on */
    const double *right; /* packed, all of it */
    uint64_t rank, col;  /* col: its first column */
    uint32_t rows, n;    /* at most QC_LOW_RANK_ROWS and QC_LOW_RANK_RUN */
    double scale;
} qc_low_rank_tile;

/* Adds the element of row r and column t->col + i, times scale, to
 * values[r * QC_LOW_RANK_RUN + i]. */
void qc_low_rank(qc_isa isa, double *values, const qc_low_rank_tile *t);

#endif
