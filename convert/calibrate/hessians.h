/* Second moments of linear layers' inputs that were captured elsewhere, for --hessians
 * (docs/calibration.md has the format). They come in a safetensors file, or a folder of such files
 * as Hugging Face lays out a model:
 *
 *   <module>.second_moment   F64 or F32 [n, n]: the mean over tokens of x x^T, which is symmetric
 *   <module>.tokens          I64 [1]: the number of these tokens
 *   <module>.same_as         U8: instead of the two above, the name of another module, in UTF-8,
 *                            whose inputs these are (k_proj and v_proj have q_proj's)
 *
 * <module> is the weight's name without ".weight". */
#ifndef QC_CONVERT_HESSIANS_H
#define QC_CONVERT_HESSIANS_H

#include "formats/checkpoint.h"

typedef struct qc_hessians qc_hessians;

/* Opens the file or folder, and checks names, shapes and types. QC_ERR_INPUT and QC_ERR_SHAPE where
 * they are wrong. */
QC_NODISCARD qc_status qc_hessians_open(qc_hessians **out, const char *path, qc_error *err);
void qc_hessians_close(qc_hessians *h); /* accepts NULL */

/* Returns the number of a weight's moments, or UINT32_MAX where the file has none. Weights with the
 * same number have the same inputs, so one factor serves them. *n: the columns; *tokens: how many
 * tokens the moments are of. */
uint32_t qc_hessians_find(const qc_hessians *h, const char *weight, uint64_t *n, uint64_t *tokens);
/* Reads the lower triangle into out [n, n] and multiplies it by the number of tokens, which gives
 * sums as second_moments.h has them. QC_ERR_INPUT where the matrix is not symmetric (within 1e-3 of
 * the diagonal's mean) or a diagonal element is negative; QC_ERR_NONFINITE. */
QC_NODISCARD qc_status qc_hessians_read(const qc_hessians *h, uint32_t number, double *out,
                                        qc_error *err);
/* The modules that have moments, in the order of the file. This finds names that match no
 * weight. */
uint32_t qc_hessians_count(const qc_hessians *h);
const char *qc_hessians_name(const qc_hessians *h, uint32_t i);

#endif
