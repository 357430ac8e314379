/* The kernels of qc_cuda_feedback_weight besides products and the search of scales, behind plain C:
 * steps 1, 3 and 4 of quant/error_feedback_rows.c, with its names. Not for callers.
 *
 * Everything is device memory and put on the stream; nothing is waited for or allocated. Matrices
 * are row-major; indices of scales count from the piece's first element, which begins a block (and,
 * nested, a group). Results do not depend on how threads run. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_ROWS_H
#define QC_KERNELS_CUDA_FEEDBACK_ROWS_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"
#include "quant/quant_weights.h"

#ifdef __cplusplus
extern "C" {
#endif

#define QC_CUDA_PANEL 64u /* most columns that the kernels below decide at a time */

/* A piece: rows of a weight and what is known of them. */
typedef struct {
    qc_weights_kind kind;
    uint64_t rows, n;
    uint32_t shift;              /* log2 of the block's size; not of INT8_ROWS */
    const float *hu;             /* [n, n], as in struct qc_cuda_feedback */
    const uint32_t *order;       /* [n] */
    const float *inverse;        /* [n] */
    const float *target;         /* [rows, n] T */
    float *e;                    /* [rows, n] E = T - Q */
    int8_t *codes;               /* [rows, n], one a byte whatever the kind */
    float *absmax;               /* [blocks] or [rows] */
    float *from_absmax;          /* per scale: the factor that takes a value to its code's place */
    uint8_t *absmax_codes;       /* [blocks], nested; or NULL */
    const float *nested_absmax;  /* [groups], nested */
    const float *map;            /* [256] qc_dynamic_map, nested */
    float offset;                /* nested */
    unsigned long long *changed; /* one number, to which the count of changed codes and scales is
                                    added */
} qc_cuda_rows;

/* out [elems] = src as floats; dtype is F32, F16 or BF16. *bad becomes the lowest index of an
 * element that is not finite, if that is lower. out may be src where that is F32. */
QC_NODISCARD qc_status qc_cuda_rows_cast(const void *src, qc_dtype dtype, uint64_t elems,
                                         float *out, uint64_t *bad, qc_cuda_stream s,
                                         qc_error *err);
/* Sets from_absmax of `scales` scales; refit keeps it up to date afterwards. */
QC_NODISCARD qc_status qc_cuda_rows_invert(const qc_cuda_rows *p, uint64_t scales, qc_cuda_stream s,
                                           qc_error *err);
/* p->e = T minus what the codes nearest to w make; p->codes is not touched. */
QC_NODISCARD qc_status qc_cuda_rows_round(const qc_cuda_rows *p, const float *w, qc_cuda_stream s,
                                          qc_error *err);
/* out [cols, cols] = the square of H on its diagonal from col on, both triangles. */
QC_NODISCARD qc_status qc_cuda_rows_square(const float *hu, uint64_t n, uint64_t col, uint64_t cols,
                                           float *out, qc_cuda_stream s, qc_error *err);
/* sums [rows] += sum over the columns of a b, in double; rows of a and b are lda and ldb apart. */
QC_NODISCARD qc_status qc_cuda_rows_dot(const float *a, uint64_t lda, const float *b, uint64_t ldb,
                                        uint64_t rows, uint64_t cols, double *sums,
                                        qc_cuda_stream s, qc_error *err);

/* The codes of up to QC_CUDA_PANEL columns from col on. */
typedef struct {
    uint64_t col, cols;
    /* feed: what outside places feed in; T is added to it. NULL: nothing. sweep: E H. */
    const float *g;
    uint64_t ldg;
    float *by_place; /* feed: [rows, n] E by places */
    /* sweep: [rows, QC_CUDA_PANEL] or NULL. It gets E minus the former E. If `before` is set, it
     * holds the former E on entry, as refit left it there; otherwise the former E is p->e. */
    float *less;
    int before;
} qc_cuda_rows_panel;

/* Step 3: columns order[col ...]. Sets their codes, E and E by places. */
QC_NODISCARD qc_status qc_cuda_rows_feed(const qc_cuda_rows *p, const qc_cuda_rows_panel *a,
                                         qc_cuda_stream s, qc_error *err);
/* Step 4: changes codes and E. */
QC_NODISCARD qc_status qc_cuda_rows_sweep(const qc_cuda_rows *p, const qc_cuda_rows_panel *a,
                                          qc_cuda_stream s, qc_error *err);

/* units [rows, cols], rows ldu apart: the values of the codes at a scale of 1. */
QC_NODISCARD qc_status qc_cuda_rows_units(const qc_cuda_rows *p, uint64_t col, uint64_t cols,
                                          float *units, uint64_t ldu, qc_cuda_stream s,
                                          qc_error *err);

/* The scale, in closed form, of a block of columns [col, col + cols) within a row. The columns [at,
 * at + width) are here: their sums are added to those of the earlier stretches (first: there were
 * none), and with the last stretch the scale and E are changed. */
typedef struct {
    uint64_t col, cols, at, width;
    int first, last;
    const float *units, *v; /* [rows, width] of this stretch: units, and units H_block */
    float *g;               /* [rows, width] E H; kept up to date if the stretch is the whole
                               block */
    uint64_t ldu, ldv, ldg;
    double *sums;  /* [rows][2] */
    float *before; /* [rows, QC_CUDA_PANEL] or NULL: the former E; the block is then no wider
                      than that */
} qc_cuda_rows_refit_args;
QC_NODISCARD qc_status qc_cuda_rows_refit(const qc_cuda_rows *p, const qc_cuda_rows_refit_args *a,
                                          qc_cuda_stream s, qc_error *err);

/* NF4: two codes a byte, the even index in the high nibble; a nibble without a code gets that of
 * 0. */
QC_NODISCARD qc_status qc_cuda_rows_pack(const int8_t *codes, uint64_t elems, uint8_t *out,
                                         qc_cuda_stream s, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
