/* Calibrated quantization: it finds the codes and scales with the least error in a layer's outputs,
 * not in its weights.
 *
 * W [rows, n] is to become Q, which is what a reader makes of codes and scales, so that
 *   sum over tokens |W z - Q x|^2
 * is small. Here x are the inputs that the layer will have behind quantized layers, and z those
 * that it had in the original model. The second moments H = sum x x^T and C = sum x z^T, row-major
 * doubles [n, n], hold all that matters about the tokens. H is damped first: each element of its
 * diagonal grows by a share of itself and of the diagonal's mean (without dead columns). That adds
 * M = damping * (diag(H) + QC_FEEDBACK_FLOOR * mean). From here on H means H + M.
 *
 *   1. Target.   T = W (C + M)^T H^-1, the best weights that are not quantized; without C, T = W.
 *   2. Scales.   A search finds them. It weighs an error in column k by D_k of
 *                H = (U + I) D (U + I)^T, U strictly upper: that is what rounding column k costs
 *                when the columns behind it make up for it. Columns are taken in order of falling
 *                H_kk, here and in step 3.
 *   3. Feedback. The code of column k is the nearest for T_k + sum over j < k of (T_j - Q_j) U_jk.
 *                This is Frantar et al. 2022 (GPTQ), in the form of Chee et al. 2023 (LDLQ), which
 *                needs no inverse.
 *   4. Sweeps.   Each block in turn gets the best scale for its present codes, in closed form with
 *                all else fixed; then each code is chosen anew for the exact error, with all else
 *                fixed (coordinate descent). Only changes that lower the error are made.
 *
 * With second moments G of the gradients of the outputs, tr(G E H E^T) with E = T - Q takes the
 * place of tr(E H E^T) in step 4, and scales stay as step 2 found them, since fitting them
 * brought nothing (docs/decisions/0027). Rows of a block of G depend on one another, so their codes
 * are chosen one after another. Steps 1 to 3 do not know G.
 *
 * Steps 1, 3 and 4 go over columns in panels of one block. So the work outside the panel is a
 * matrix product (OpenBLAS), and the work inside stays in the cache.
 *
 * A dead column (zero in every token: H_kk = 0) has no effect. It keeps its weights rounded to
 * nearest, and no error is fed into or out of it.
 *
 * Scales have the forms of scale_search.h: NF4's are signed, double quantized ones are map[code] *
 * nested_absmax + offset with offset 0. Blocks run over the flattened tensor; where n is not a
 * multiple of the block size, a block goes on into the next row.
 *
 * Results depend on the processor (blas.h), not on threads. */
#ifndef QC_QUANT_ERROR_FEEDBACK_H
#define QC_QUANT_ERROR_FEEDBACK_H

#include "quant/blas.h"
#include "quant/quant_form.h"

#define QC_FEEDBACK_FLOOR  0.1
#define QC_FEEDBACK_SWEEPS 4u
/* With G more sweeps gain more (docs/decisions/0027); they end when no code changes. */
#define QC_FEEDBACK_SWEEPS_TWO_SIDED 8u

typedef struct {
    double damping;  /* > 0; the fewer the tokens, the larger: see qc_feedback_damping */
    unsigned sweeps; /* step 4; 0: none */
} qc_feedback_options;

/* 0.1 + 4 n / tokens, at most 2, as measured with 4 to 1000 tokens a column (docs/decisions/). */
double qc_feedback_damping(uint64_t n, uint64_t tokens);
/* The same of G, whose blocks have so many outputs: 0.1 + 4 block / tokens, without a limit. With
 * much damping all outputs count alike. */
double qc_feedback_outputs_damping(uint64_t block, uint64_t tokens);

typedef struct {
    double damping;        /* the damping that was used */
    unsigned times_raised; /* how often it was raised tenfold until the factor existed */
    uint64_t dead;         /* columns */
} qc_feedback_info;

typedef struct qc_feedback qc_feedback;

/* Factors H, for any number of weights with the same inputs. h is the lower triangle, [n, n]. It
 * stays the caller's array and is not freed, but is used until close, and its upper triangle is
 * filled. c is [n, n] or NULL; it is used until close and changed. Allocates [n, n] floats (two
 * with c). This call and qc_feedback_weight use `threads` threads. QC_ERR_NONFINITE for moments
 * that are not finite, QC_ERR_INPUT where no damping up to 1 gives a factor. info may be NULL. */
QC_NODISCARD qc_status qc_feedback_open(qc_feedback **out, const qc_blas *b, unsigned threads,
                                        uint64_t n, double *h, double *c,
                                        const qc_feedback_options *options, qc_feedback_info *info,
                                        qc_error *err);
void qc_feedback_close(qc_feedback *f); /* f may be NULL */

/* The caller's arrays, as qc_weights describes them. */
typedef struct {
    void *codes;
    float *absmax;         /* [blocks] or [rows]: the scales as a reader will have them, nested
                              or not */
    uint8_t *absmax_codes; /* nested */
    float *nested_absmax;  /* nested */
    float nested_offset;   /* set, unless it is given; NF4: 0 */
    /* For a matrix of a stack, whose groups may begin in the matrix before it and end in the one
     * behind it; zeros otherwise. */
    uint64_t lead;    /* blocks of the first group that come before the matrix */
    float ends[2];    /* nested absmax of the first and the last group; 0: to be set */
    int offset_given; /* nested_offset is given */
} qc_feedback_out;

/* What errors of the outputs do to the model's answer: the mean over tokens of g g^T, where g is
 * the gradient of the loss with respect to the outputs of the weight. Only blocks on its diagonal
 * are given: outputs of different blocks count as if their gradients had nothing to do with one
 * another. */
typedef struct {
    const float *g; /* [blocks][block][block], symmetric; what belongs to rows beyond the weight's
                       is not read */
    uint64_t block; /* outputs of a block; it may be more than the weight has */
    double damping; /* the share of a block's mean diagonal that is added to its diagonal; 0: the
                       default */
} qc_feedback_outputs;

/* These are the sum over tokens of |W z - Q x|^2 divided by that of |W z|^2, in double; without C,
 * z is x. */
typedef struct {
    double rounded;    /* with scales that were searched without data, and codes rounded to
                          nearest */
    double calibrated; /* with the scales and codes that are returned */
    /* The same two of tr(G E H E^T), G with its damping; 0 without G. */
    double rounded_two_sided, calibrated_two_sided;
    double target_two_sided; /* tr(G T H T^T), by which these two are divided; 0 without G */
} qc_feedback_result;

/* Quantizes w [rows, n]. Outputs count alike where g is NULL. Allocates qc_feedback_weight_bytes.
 * QC_ERR_NONFINITE for weights or g that are not finite. QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_feedback_weight(const qc_feedback *f, const qc_form *form, const float *w,
                                          uint64_t rows, const qc_feedback_outputs *g,
                                          qc_feedback_out *out, qc_feedback_result *result,
                                          qc_error *err);

/* Return the most that these two allocate, without the caller's arrays. They saturate. block: that
 * of qc_feedback_outputs; 0 without. */
uint64_t qc_feedback_open_bytes(uint64_t n, int cross);
uint64_t qc_feedback_weight_bytes(uint64_t rows, uint64_t n, unsigned threads, uint64_t block);
/* Return the floating-point operations of the matrix products in them, which bound their time from
 * below. */
double qc_feedback_open_flops(uint64_t n, int cross);
double qc_feedback_weight_flops(uint64_t rows, uint64_t n, int cross,
                                const qc_feedback_options *options, uint64_t block);

#endif
