/* Shared by error_feedback*.c; not for callers. */
#ifndef QC_QUANT_ERROR_FEEDBACK_INTERNAL_H
#define QC_QUANT_ERROR_FEEDBACK_INTERNAL_H

#include "quant/blas_internal.h"
#include "quant/error_feedback.h"
#include "quant/error_feedback_lanes.h"

/* A thread takes this many rows at a time. The number is fixed, so that products do not depend on
 * threads, and even, so that no two chunks share a byte of NF4 codes. */
#define QC_FEEDBACK_ROWS 128u

struct qc_feedback {
    const qc_blas *b;
    const qc_feedback_lanes *lanes;
    qc_isa isa;
    unsigned threads;
    uint64_t n;
    qc_feedback_options options;
    uint64_t *order; /* [n] the column at each place of the feedback: by falling H_kk */
    /* [n, n]: H_kj times a power of two where j >= k; U_jk where j < k, in the order of places. So
     * the left part of a row is the column of U that feedback needs, and its right part a column of
     * H. */
    float *hu;
    double scale;   /* the power of two in hu */
    float *d;       /* [n] D, times the same power of two */
    float *inverse; /* [n] 1 / H_kk as in hu; 0 for a dead column */
    float *m;       /* [n, n], T = W m^T; NULL without C */
};

/* ---- error_feedback.c: works on the diagonal alone; for GPUs as well ---- */

#ifdef __cplusplus
extern "C" {
#endif

/* own [n] is H's diagonal. Gives the order of the columns, the mean over those that are not dead (1
 * if all are) and the number of dead ones. QC_ERR_INPUT for a moment below zero, QC_ERR_RANGE. */
QC_NODISCARD qc_status qc_feedback_look_at_diagonal(const double *own, uint64_t n, uint64_t *order,
                                                    double *mean, uint64_t *dead, qc_error *err);
/* Returns what damping adds to a living input's moment, divided by the damping. An input that is
 * hardly ever there has next to no moment: without the share of the mean, its weights would take
 * any value to make up for other errors. */
static inline double qc_feedback_anchor(double own, double mean)
{
    return own + QC_FEEDBACK_FLOOR * mean;
}
/* Call it when there is no factor with this damping: raises it tenfold, at last to 1. QC_ERR_INPUT
 * if it was 1 already. */
QC_NODISCARD qc_status qc_feedback_raise(double *damping, qc_feedback_info *info, qc_error *err);
/* Returns QC_ERR_NONFINITE for the moments of inputs [first, end). */
QC_NODISCARD qc_status qc_feedback_odd(uint64_t first, uint64_t end, qc_error *err);
/* Checks the options and n; it is QC_ERR_USAGE or QC_ERR_SHAPE. */
QC_NODISCARD qc_status qc_feedback_check(uint64_t n, const qc_feedback_options *options,
                                         qc_error *err);
/* Returns the power of two that moments with this mean are multiplied by to be stored as floats. */
double qc_feedback_scale(double mean);

/* ---- error_feedback_outputs.c: works on G alone; for GPUs as well ---- */

/* Outputs that belong together: those of a block of G. */
typedef struct {
    float scale;      /* a power of two by which G is multiplied */
    float damping;    /* on the diagonal, of G times scale */
    double inverse;   /* 1 / scale; 0 where all of G is zero */
    uint64_t changed; /* codes in the sweep before; 0: it is done */
    uint64_t now;     /* codes in this sweep so far */
} qc_feedback_unit;

/* Checks the size of blocks and the damping; it is QC_ERR_SHAPE or QC_ERR_USAGE. */
QC_NODISCARD qc_status qc_feedback_check_outputs(const qc_feedback_outputs *g, qc_error *err);
/* Reads the block with this number, for a weight of so many rows, and fills in scale, damping and
 * inverse. QC_ERR_NONFINITE, QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_feedback_look_at_outputs(const qc_feedback_outputs *g, uint64_t rows,
                                                   uint64_t number, qc_feedback_unit *out,
                                                   qc_error *err);

#ifdef __cplusplus
}
#endif

/* ---- error_feedback_factor.c ---- */

/* The factor of H with rows and columns in `order`, which overwrites what lies above the diagonal
 * tiles of h. */
#define QC_FACTOR_TILE 256u
typedef struct {
    const qc_blas *b;
    unsigned threads;
    uint64_t n, tiles;
    const uint64_t *order;
    double *h;        /* [n, n] below: H; above: R where H = R R^T, R upper */
    double *diagonal; /* [tiles][QC_FACTOR_TILE^2] R on the diagonal, rows QC_FACTOR_TILE apart */
} qc_factor;

/* dead: the diagonal value for a column whose own is zero. *exists is 0 where H is not positive
 * definite as far as doubles can tell. */
QC_NODISCARD qc_status qc_factor_make(qc_factor *f, double dead, int *exists, qc_error *err);
/* Makes x [n, n] = (R R^T)^-1 x, rows by places. */
QC_NODISCARD qc_status qc_factor_solve(const qc_factor *f, double *x, qc_error *err);
/* Returns R_jk, j <= k, by places. */
double qc_factor_at(const qc_factor *f, uint64_t j, uint64_t k);

/* ---- error_feedback_search.c ---- */

/* Step 2: writes the scales with the least sum of weights[column] * error^2 over the elements to
 * out. weights NULL means 1 everywhere. By rows, out->absmax has one scale per row. */
QC_NODISCARD qc_status qc_feedback_scales(const qc_feedback *f, const qc_form *form, const float *x,
                                          const float *weights, uint64_t rows, qc_feedback_out *out,
                                          qc_error *err);
/* Returns the factor that takes a value to its code's place; 0 for a scale that cannot be divided
 * by, where all codes are that of 0. */
float qc_feedback_inverse(const qc_form_ops *form, float scale);
uint64_t qc_feedback_search_bytes(uint64_t n, unsigned threads);

#endif
