/* The loops of error_feedback*.c over elements, 16 side by side. They are built once for each
 * instruction set (error_feedback_lanes*.c), with the same results: no operation is fused. Not for
 * callers.
 *
 * A unit is the value of a code at a scale of 1: qc_nf4_code[code], or q * step. */
#ifndef QC_QUANT_ERROR_FEEDBACK_LANES_H
#define QC_QUANT_ERROR_FEEDBACK_LANES_H

#include "quant/quant_form.h"
#include "quant/quant_internal.h"

#define QC_TILE_COLS 64u

/* Columns of 16 rows, column by column. */
typedef struct {
    _Alignas(64) float in[QC_TILE_COLS][QC_LANES];     /* see feed and sweep; changed */
    _Alignas(64) float target[QC_TILE_COLS][QC_LANES]; /* T */
    _Alignas(64) float scale[QC_TILE_COLS][QC_LANES];
    _Alignas(64) float inverse[QC_TILE_COLS][QC_LANES]; /* qc_feedback_inverse */
    _Alignas(64) float value[QC_TILE_COLS][QC_LANES];   /* Q */
    _Alignas(64) float error[QC_TILE_COLS][QC_LANES];   /* T - Q */
    _Alignas(64) int32_t code[QC_TILE_COLS][QC_LANES];
} qc_tile;

/* G of 16 rows, of which the first `rows` are there. */
typedef struct {
    _Alignas(64) float g[QC_LANES][QC_LANES];
    _Alignas(64) float inverse[QC_LANES]; /* 1 / G_ii; 0: the row keeps its codes */
    uint32_t rows;
} qc_tile_outputs;

typedef struct {
    /* Sets rr[j] to the sum of d * r^2, where r is x * inv[j] less the unit of its code. n is a
     * multiple of 16. */
    void (*errors)(const float *x, const float *d, uint32_t n, const qc_form_ops *form,
                   const float *inv, unsigned count, float *rr);
    /* Makes the sums of d * unit * x and of d * unit^2, with the units for inv. */
    void (*refit)(const float *x, const float *d, uint32_t n, const qc_form_ops *form, float inv,
                  float *ux, float *uu);
    /* Step 3 within a tile. in: T plus what columns outside feed in; u [cols][QC_TILE_COLS]: U_jk.
     * Sets code, value and error. */
    void (*feed)(qc_tile *t, uint32_t cols, const float *u, const qc_form_ops *form);
    /* The codes of step 4. in: E H of these columns; h [cols][QC_TILE_COLS]: H_jk; inverse [cols],
     * 0 for a dead column. Changes code, value and error; returns the number of changed codes. */
    uint32_t (*sweep)(qc_tile *t, uint32_t cols, const float *h, const float *inverse,
                      const qc_form_ops *form);
    /* The same for rows that depend on one another, in each column one after another. in: G E H. */
    uint32_t (*sweep_outputs)(qc_tile *t, uint32_t cols, const float *h, const float *inverse,
                              const qc_tile_outputs *o, const qc_form_ops *form);
} qc_feedback_lanes;

extern const qc_feedback_lanes qc_feedback_lanes_scalar;
extern const qc_feedback_lanes qc_feedback_lanes_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_feedback_lanes qc_feedback_lanes_avx512; /* where QC_HAVE_QUANT_AVX512 */

const qc_feedback_lanes *qc_feedback_lanes_for(qc_isa isa);

#endif
