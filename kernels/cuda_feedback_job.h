/* Shared by cuda_feedback_weight.c, _products.c and _outputs.c; not for callers. A weight that is
 * being quantized: what is asked for, the piece at work, and its arrays on the device. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_JOB_H
#define QC_KERNELS_CUDA_FEEDBACK_JOB_H

#include "kernels/cuda_feedback_internal.h"
#include "quant/error_feedback_internal.h"

#define QC_CUDA_SUPER 512u

/* One allocation that is cut up, each array at a multiple of 256 bytes. */
typedef struct {
    float *target, *e, *spare; /* [rows, n] */
    int8_t *codes;             /* [rows, n] */
    float *g, *v;              /* [rows, QC_CUDA_SUPER] */
    float *less;               /* [rows, QC_CUDA_PANEL] */
    float *square;             /* [QC_CUDA_SUPER, QC_CUDA_SUPER] */
    float *absmax;             /* [blocks] */
    float *from_absmax;        /* [blocks] */
    uint8_t *absmax_codes;     /* [blocks] */
    float *nested_absmax;      /* [groups] */
    float *map;                /* [256] */
    double *traces;            /* [kinds][rows], see job */
    double *sums;              /* [rows][2] */
    unsigned long long *changed;
    uint64_t *bad;
    /* With moments of the outputs, whose blocks are units: */
    float *outputs;                  /* [units][unit, block] G */
    uint32_t *moved;                 /* as in qc_cuda_rows_outputs */
    unsigned long long *unit_counts; /* [2][units] changed codes, of one sweep and of the other */
} qc_cuda_feedback_parts;

typedef struct {
    const qc_cuda_feedback *f;
    const qc_form *form;
    const unsigned char *w; /* host */
    qc_dtype dtype;
    uint64_t n, rows, most; /* rows: of all; most: of a piece */
    uint32_t shift;
    int aligned;   /* no block goes on into the next row */
    uint64_t wide; /* columns that share a scale within a row, or those of a panel */
    qc_feedback_out *out;
    void *memory;
    qc_cuda_feedback_parts d;
    /* e H e^T of rounded, of T, calibrated; with moments of the outputs, also these three of
     * G e H e^T. */
    unsigned kinds;
    double *host_traces; /* [kinds][most] */
    double sums[6];
    /* With moments of the outputs, else NULL: */
    const qc_feedback_outputs *g;
    qc_feedback_unit *units;         /* host, of the whole weight */
    unsigned long long *unit_counts; /* host, of a piece */
    uint64_t unit;                   /* rows of a unit, of which the last may have fewer */
    /* The piece at work. */
    uint64_t first, count; /* rows */
    uint64_t block, blocks;
    qc_cuda_rows r;
} qc_cuda_feedback_job;

/* ---- cuda_feedback_products.c ---- */

/* The right-hand side of a product: [k, cols], or [cols, k] if it is transposed. */
typedef struct {
    qc_cuda_strip b;
    int trans;
    uint64_t k, cols;
} qc_cuda_factor;

/* Makes y [rows, cols] = alpha x [rows, k] f + beta y for all rows of the piece. */
QC_NODISCARD qc_status qc_cuda_piece_multiply(const qc_cuda_feedback_job *j, qc_cuda_strip x,
                                              qc_cuda_factor f, float *y, uint64_t ldy,
                                              double alpha, double beta, qc_error *err);

/* A stretch of columns that a product makes at a time: at most QC_CUDA_SUPER. */
typedef struct {
    uint64_t col, cols;
} qc_cuda_stretch;

/* Makes y [rows, cols], whose rows are QC_CUDA_SUPER apart, = x H[low .. high, col .. col + cols],
 * where x [rows, n] has columns low .. high; what lies left of col counts `left` times. d.square
 * then holds the square of H at these columns, rows cols apart. */
QC_NODISCARD qc_status qc_cuda_piece_times_h(const qc_cuda_feedback_job *j, const float *x,
                                             uint64_t low, uint64_t high, qc_cuda_stretch s,
                                             double left, float *y, qc_error *err);
/* Adds what changed in a panel, which d.less has, to E H of the super from column `behind` on. */
QC_NODISCARD qc_status qc_cuda_piece_pass_on(const qc_cuda_feedback_job *j, qc_cuda_factor square,
                                             uint64_t behind, qc_error *err);

/* ---- cuda_feedback_outputs.c ---- */

/* Allocates what is known of blocks of G, and reads all of G on the host: what the CPU refuses is
 * refused in the same words. */
QC_NODISCARD qc_status qc_cuda_outputs_open(qc_cuda_feedback_job *j, qc_error *err);
/* Takes G of the piece to the device. */
QC_NODISCARD qc_status qc_cuda_outputs_take(const qc_cuda_feedback_job *j, qc_error *err);
/* Makes y [rows, cols] = G x, where x [rows, cols] are some columns; rows of y are ldy apart. Units
 * in which nothing changes any more are left out if `live` is set. */
QC_NODISCARD qc_status qc_cuda_outputs_multiply(const qc_cuda_feedback_job *j, qc_cuda_strip x,
                                                uint64_t cols, float *y, uint64_t ldy, int live,
                                                qc_error *err);
/* Sweeps the piece until nothing changes, or as often as the options say. */
QC_NODISCARD qc_status qc_cuda_outputs_sweeps(qc_cuda_feedback_job *j, qc_error *err);
/* 1 / the power of two that G of this row of the piece is multiplied by; 0 where it is zero. */
double qc_cuda_outputs_inverse(const qc_cuda_feedback_job *j, uint64_t row);

#endif
