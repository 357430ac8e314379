/* Shared by cuda_feedback_* and cuda_moments.*; not for callers. Kernels take plain arrays on the
 * device and run on a stream, and nobody waits for them here. Matrices are row-major. */
#ifndef QC_KERNELS_CUDA_FEEDBACK_INTERNAL_H
#define QC_KERNELS_CUDA_FEEDBACK_INTERNAL_H

#include "base/dtype.h"
#include "kernels/cuda_feedback.h"
#include "quant/quant_form.h"

QC_C_BEGIN

/* This is struct qc_feedback (quant/error_feedback_internal.h) on the device. */
struct qc_cuda_feedback {
    qc_cuda_feedback_tools tools;
    uint64_t n;
    qc_feedback_options options;
    uint32_t *order; /* device, [n] the column at each place of the feedback: by falling H_kk */
    /* device, [n, n]: H_kj times a power of two where j >= k (columns in their own order), U_jk
     * where j < k (by places). */
    float *hu;
    float *d;       /* device, [n] D, times the same power of two; by columns */
    float *inverse; /* device, [n] 1 / H_kk as in hu; 0 for a dead column */
    float *m;       /* device, [n, n], T = W m^T; NULL without C */
};

/* Holds what kernels take of a form: names and meanings are those of quant/quant_form.h. */
typedef struct {
    int table; /* qc_form_is_table */
    int few;   /* codes of up to 4 bits, whose scales have factors of their own */
    int by_rows, integer, signed_scales, step_last;
    float lowest, highest, span, step;
    float reach; /* qc_form_reach */
    qc_dtype scale_dtype;
} qc_cuda_form;
qc_cuda_form qc_cuda_form_of(const qc_form *form); /* cuda_feedback_open.c */

/* ---- cuda_feedback_search.cu ---- */

/* The blocks of x [rows, n] floats, whose first element begins a block (and, nested, a group).
 * Everything is device memory; both functions run on the stream of f's tools, and their results
 * equal those of quant/error_feedback_search.c to the bit. */
typedef struct {
    const qc_form *form;
    const float *x;
    const float *weights; /* [n]; NULL: 1 everywhere */
    uint64_t rows;
    float *absmax; /* [blocks], or [rows] by rows */
    /* to nest: */
    uint8_t *codes;
    const float *nested_absmax; /* [groups] */
    const float *map;           /* qc_dynamic_map */
    float offset;
} qc_cuda_feedback_scales;

/* Step 2: finds absmax, the scales before double quantization. */
QC_NODISCARD qc_status qc_cuda_feedback_find(const qc_cuda_feedback *f,
                                             const qc_cuda_feedback_scales *a, qc_error *err);
/* Double quantizes the scales. It gets absmax as found, and codes as nested_quantize (host) made
 * them of nested_absmax and offset. It gives codes of least error, and in absmax what a reader
 * makes of them. */
QC_NODISCARD qc_status qc_cuda_feedback_nest(const qc_cuda_feedback *f,
                                             const qc_cuda_feedback_scales *a, qc_error *err);

/* ---- cuda_feedback_weight.c: with a bound on memory, for tests ---- */

/* Takes at most `limit` bytes of device memory. If that is too little, pieces are as small as the
 * form permits. */
QC_NODISCARD qc_status qc_cuda_feedback_weight_within(const qc_cuda_feedback *f,
                                                      const qc_form *form, const void *w,
                                                      qc_dtype dtype, uint64_t rows,
                                                      const qc_feedback_outputs *g, uint64_t limit,
                                                      qc_feedback_out *out,
                                                      qc_feedback_result *result, qc_error *err);

/* ---- cuda_moments.cu: matrices are [n, n] ---- */

/* Sets odd[row] to 1 if anything in row `row` is not finite, else to 0. With `lower`, only the part
 * of a row of h up to the diagonal counts. */
QC_NODISCARD qc_status qc_cuda_find_odd(const double *h, uint64_t n, int lower, uint32_t *odd,
                                        qc_cuda_stream s, qc_error *err);
QC_NODISCARD qc_status qc_cuda_diagonal(const double *h, uint64_t n, double *out, qc_cuda_stream s,
                                        qc_error *err);

/* What the matrices below are made of. `back` is the order from its end, which the factor uses. */
typedef struct {
    uint64_t n;
    const uint32_t *order; /* [n] column at each place */
    const double *damped;  /* [n] H's damped diagonal; for a dead column a stand-in */
    const double *added;   /* [n] what is added to the diagonal of C; for a dead column a
                              stand-in */
    const uint8_t *dead;   /* [n] */
    double scale;          /* of H in hu */
} qc_cuda_factor_input;

/* Fills a's upper triangle with H's rows and columns by back; of dead columns it takes only the
 * diagonal. */
QC_NODISCARD qc_status qc_cuda_gather_factor(const qc_cuda_factor_input *in, const double *h,
                                             double *a, qc_cuda_stream s, qc_error *err);
/* Makes hu, d and inverse (cuda_feedback_internal.h) from H and a, which qc_cusolver_factor
 * changed. */
QC_NODISCARD qc_status qc_cuda_fill_feedback(const qc_cuda_factor_input *in, const double *h,
                                             const double *a, float *hu, float *d, float *inverse,
                                             qc_cuda_stream s, qc_error *err);
/* Fills row r of x with column r of C + added, with its elements by back. */
QC_NODISCARD qc_status qc_cuda_gather_target(const qc_cuda_factor_input *in, const double *c,
                                             double *x, qc_cuda_stream s, qc_error *err);
/* Makes m of x's transpose, with rows in their own order. */
QC_NODISCARD qc_status qc_cuda_narrow_target(const qc_cuda_factor_input *in, const double *x,
                                             float *m, qc_cuda_stream s, qc_error *err);

/* ---- cuda_feedback_rows.cu: steps 1, 3 and 4 of quant/error_feedback_rows.c, with its names ----
 *
 * Indices of scales count from the piece's first element, which begins a block (and, nested, a
 * group). Results do not depend on how threads run. */

#define QC_CUDA_PANEL 64u /* most columns that the kernels below decide at a time */

/* A piece: rows of a weight and what is known of them. */
typedef struct {
    qc_cuda_form form;
    uint64_t rows, n;
    uint32_t shift;              /* log2 of the block's size; not by rows */
    const float *hu;             /* [n, n], as in struct qc_cuda_feedback */
    const uint32_t *order;       /* [n] */
    const float *inverse;        /* [n] */
    const float *target;         /* [rows, n] T */
    float *e;                    /* [rows, n] E = T - Q */
    int8_t *codes;               /* [rows, n], one a byte whatever the form, without its `zero` */
    float *absmax;               /* [blocks] or [rows] */
    float *from_absmax;          /* per scale: the factor that takes a value to its code's place */
    uint8_t *absmax_codes;       /* [blocks], nested; or NULL */
    const float *nested_absmax;  /* [groups], nested */
    const float *map;            /* [256] qc_dynamic_map, nested */
    float offset;                /* nested */
    unsigned long long *changed; /* one number, to which the count of changed codes and scales is
                                    added */
} qc_cuda_rows;

/* Some columns of a matrix of floats. */
typedef struct {
    const float *at; /* first element */
    uint64_t ld;     /* from row to row */
} qc_cuda_strip;

/* Writes src to out [elems] as floats; dtype is F32, F16 or BF16. *bad becomes the lowest index of
 * an element that is not finite, if that is lower. out may be src where that is F32. */
QC_NODISCARD qc_status qc_cuda_rows_cast(const void *src, qc_dtype dtype, uint64_t elems,
                                         float *out, uint64_t *bad, qc_cuda_stream s,
                                         qc_error *err);
/* Sets from_absmax of `scales` scales; refit keeps it up to date afterwards. */
QC_NODISCARD qc_status qc_cuda_rows_invert(const qc_cuda_rows *p, uint64_t scales, qc_cuda_stream s,
                                           qc_error *err);
/* Sets p->e to T minus what the codes nearest to w make; p->codes is not touched. */
QC_NODISCARD qc_status qc_cuda_rows_round(const qc_cuda_rows *p, const float *w, qc_cuda_stream s,
                                          qc_error *err);
/* Writes the square of H on its diagonal from col on to out [cols, cols], with both triangles. */
QC_NODISCARD qc_status qc_cuda_rows_square(const float *hu, uint64_t n, uint64_t col, uint64_t cols,
                                           float *out, qc_cuda_stream s, qc_error *err);
/* Adds the sum over the columns of a b, in double, to sums [rows]. */
QC_NODISCARD qc_status qc_cuda_rows_dot(const qc_cuda_strip *a, const qc_cuda_strip *b,
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

/* Does step 3 for columns order[col ...]: sets their codes, E and E by places. */
QC_NODISCARD qc_status qc_cuda_rows_feed(const qc_cuda_rows *p, const qc_cuda_rows_panel *a,
                                         qc_cuda_stream s, qc_error *err);
/* Does step 4: changes codes and E. */
QC_NODISCARD qc_status qc_cuda_rows_sweep(const qc_cuda_rows *p, const qc_cuda_rows_panel *a,
                                          qc_cuda_stream s, qc_error *err);

/* Writes the values of the codes at a scale of 1 to units [rows, cols], whose rows are ldu
 * apart. */
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

/* Writes the codes of whole rows (form->cols) to out as the form stores them; a nibble of NF4
 * without a code gets that of 0. */
QC_NODISCARD qc_status qc_cuda_rows_pack(const qc_form *form, const int8_t *codes, uint64_t elems,
                                         uint8_t *out, qc_cuda_stream s, qc_error *err);

/* ---- cuda_feedback_outputs.cu: step 4 of quant/error_feedback_outputs.c, with its names ---- */

/* G = G * scale + damping on the diagonal; g is a block of it, [rows, rows], rows ld apart. */
QC_NODISCARD qc_status qc_cuda_outputs_prepare(float *g, uint64_t rows, uint64_t ld, float scale,
                                               float damping, qc_cuda_stream s, qc_error *err);

#define QC_CUDA_OUTPUTS_CHUNK 64u /* rows that a flag of `moved` speaks of */

/* The codes of up to QC_CUDA_PANEL columns from col on, where outputs do not count alike. The rows
 * of the piece are blocks of G one after the other, of which the last may have fewer rows. */
typedef struct {
    uint64_t col, cols;
    uint64_t block;  /* rows of a block of G */
    const float *g;  /* [blocks][block, block], rows ld apart, as qc_cuda_outputs_prepare left it */
    uint64_t ld;     /* a block of G begins every block * ld floats */
    const float *d;  /* [rows, QC_CUDA_PANEL] G E H of these columns */
    float *less;     /* [rows, QC_CUDA_PANEL]; gets E minus the former E */
    uint32_t *moved; /* [blocks][ceil(block / QC_CUDA_OUTPUTS_CHUNK)] for the kernel */
    const unsigned long long *before; /* [blocks] codes changed in the sweep before; with 0 the
                                         block is left as it is, and d is not read */
    unsigned long long *now;          /* [blocks], to which the changed codes are added */
} qc_cuda_rows_outputs;
/* Chooses codes one after another within a block of G, each with all changes before it known: rows
 * by tiles of 16, in a tile column by column, in a column row by row. Changes codes and E. */
QC_NODISCARD qc_status qc_cuda_rows_sweep_outputs(const qc_cuda_rows *p,
                                                  const qc_cuda_rows_outputs *a, qc_cuda_stream s,
                                                  qc_error *err);

QC_C_END
#endif
