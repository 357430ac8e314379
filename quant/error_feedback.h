/* Calibrated quantization: codes and scales of least error in a layer's outputs, not in its
 * weights.
 *
 * W [rows, n] is to become Q, what a reader makes of codes and scales, so that
 *     sum over tokens |W z - Q x|^2
 * is small: x the inputs that the layer will have behind quantized layers, z those it had in the
 * original model. Second moments H = sum x x^T and C = sum x z^T (second_moments.h) say all about
 * the tokens that matters. H is damped first: to each element of its diagonal a share of itself,
 * and of their mean (dead columns left out), is added: M = damping * (diag(H) + QC_FEEDBACK_FLOOR *
 * mean). What follows says H for H + M.
 *
 *  1. Target.   T = W (C + M)^T H^-1, the best weights that are not quantized; without
 *               C, T = W.
 *  2. Scales.   Found by search, an error in column k weighed by D_k of
 *               H = (U + I) D (U + I)^T, U strictly upper: what rounding column k costs when
 *               the columns behind it make up for it. Columns are taken in order of falling H_kk,
 *               here and in step 3.
 *  3. Feedback. Code of column k is the nearest for T_k + sum over j < k of
 *               (T_j - Q_j) U_jk. Frantar et al. 2022 (GPTQ), in the form of Chee et al. 2023
 * (LDLQ), which needs no inverse.
 *  4. Sweeps.   Block by block: the scale in closed form for the codes that are there, all else
 *               fixed; then each code anew for the exact error, all else fixed (coordinate
 *               descent). Nothing is taken that does not lower the error.
 *
 * Steps 1, 3 and 4 go over columns in panels of one block, so that what lies outside of the panel
 * is a matrix product (OpenBLAS) and what lies inside stays in the cache.
 *
 * A dead column (zero in every token: H_kk = 0) cannot do anything: it keeps its weights rounded
 * to nearest and no error is fed into or out of it.
 *
 * Scales have the forms of scale_search.h: NF4's are signed, double quantized ones are
 * map[code] * nested_absmax + offset with offset 0. Blocks run over the flattened tensor; where n
 * is no multiple of the block size a block goes on into the next row.
 *
 * Results depend on the processor (blas.h), not on threads. */
#ifndef QC_QUANT_ERROR_FEEDBACK_H
#define QC_QUANT_ERROR_FEEDBACK_H

#include "quant/blas.h"
#include "quant/quant_weights.h"

#define QC_FEEDBACK_FLOOR  0.1
#define QC_FEEDBACK_SWEEPS 4u

typedef struct {
    double damping;  /* > 0; the fewer the tokens the more: qc_feedback_damping */
    unsigned sweeps; /* step 4; 0: none */
} qc_feedback_options;

/* 0.1 + 4 n / tokens, at most 2: as measured with 4 to 1000 tokens a column (docs/decisions/). */
double qc_feedback_damping(uint64_t n, uint64_t tokens);

typedef struct {
    double damping;        /* that was used */
    unsigned times_raised; /* tenfold each, until the factor existed */
    uint64_t dead;         /* columns */
} qc_feedback_info;

typedef struct qc_feedback qc_feedback;

/* Factors H, for any number of weights with the same inputs. h: lower triangle, [n, n]; it is taken
 * over (the caller's array, used until close, not freed) and its upper triangle filled. c: [n, n]
 * or NULL, used until close, changed. Allocates [n, n] floats (two with c). threads: of this
 * and of qc_feedback_weight. QC_ERR_NONFINITE for moments that are not finite, QC_ERR_INPUT where
 * no damping up to 1 gives a factor. info may be NULL. */
QC_NODISCARD qc_status qc_feedback_open(qc_feedback **out, const qc_blas *b, unsigned threads,
                                        uint64_t n, double *h, double *c,
                                        const qc_feedback_options *options, qc_feedback_info *info,
                                        qc_error *err);
void qc_feedback_close(qc_feedback *f); /* NULL is fine */

/* How a weight is stored. */
typedef struct {
    qc_weights_kind kind;
    uint32_t block_elems; /* 0 for INT8_ROWS */
    int nested;
} qc_feedback_form;

/* The caller's arrays, as qc_weights describes them. */
typedef struct {
    void *codes;
    float *absmax;         /* [blocks] or [rows]: the scales as a reader has them, also if nested */
    uint8_t *absmax_codes; /* nested */
    float *nested_absmax;  /* nested */
    float nested_offset;   /* set; NF4: 0 */
} qc_feedback_out;

/* sum over tokens of |W z - Q x|^2 over that of |W z|^2; without C z is x. In double. */
typedef struct {
    double rounded;    /* with scales searched without data and codes rounded to nearest */
    double calibrated; /* of what is returned */
} qc_feedback_result;

/* w: [rows, n]. Bytes it allocates: qc_feedback_weight_bytes. QC_ERR_NONFINITE for weights that are
 * not finite. QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_feedback_weight(const qc_feedback *f, const qc_feedback_form *form,
                                          const float *w, uint64_t rows, qc_feedback_out *out,
                                          qc_feedback_result *result, qc_error *err);

/* What the two allocate at most, the caller's arrays left out; saturate. */
uint64_t qc_feedback_open_bytes(uint64_t n, int cross);
uint64_t qc_feedback_weight_bytes(uint64_t rows, uint64_t n, unsigned threads);
/* Floating-point operations of the matrix products in them: the floor of their time. */
double qc_feedback_open_flops(uint64_t n, int cross);
double qc_feedback_weight_flops(uint64_t rows, uint64_t n, int cross,
                                const qc_feedback_options *options);
double qc_moments_flops(uint64_t tokens, uint64_t n, int cross);

#endif
