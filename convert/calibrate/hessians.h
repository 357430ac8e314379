/* Second moments of linear layers' inputs, captured elsewhere: --hessians (docs/calibration.md has
 * the format). A safetensors file, or a folder of them as Hugging Face lays out a model:
 *
 *   <module>.second_moment   F64 or F32 [n, n]: the mean over tokens of x x^T. Symmetric
 *   <module>.tokens          I64 [1]: how many tokens that is
 *   <module>.same_as         U8: name of another module, in UTF-8, whose inputs these are, instead
 *                            of the two above (k_proj and v_proj are q_proj's)
 *
 * <module>: the weight's name without ".weight". */
#ifndef QC_CONVERT_HESSIANS_H
#define QC_CONVERT_HESSIANS_H

#include "formats/checkpoint.h"

typedef struct qc_hessians qc_hessians;

/* Opens and checks names, shapes and types. QC_ERR_INPUT, QC_ERR_SHAPE. */
QC_NODISCARD qc_status qc_hessians_open(qc_hessians **out, const char *path, qc_error *err);
void qc_hessians_close(qc_hessians *h); /* NULL is fine */

/* Of a weight: QC_NO_TENSOR-like UINT32_MAX where the file has none. Equal numbers: the same
 * inputs, so that one factor serves. *n: columns; *tokens. */
uint32_t qc_hessians_find(const qc_hessians *h, const char *weight, uint64_t *n, uint64_t *tokens);
/* Lower triangle into out [n, n], times the number of tokens: sums, as second_moments.h has them.
 * QC_ERR_INPUT where it is not symmetric (within 1e-3 of the diagonal's mean) or a diagonal element
 * is negative; QC_ERR_NONFINITE. */
QC_NODISCARD qc_status qc_hessians_read(const qc_hessians *h, uint32_t number, double *out,
                                        qc_error *err);
/* Modules that have moments, in order of the file; for names that match no weight. */
uint32_t qc_hessians_count(const qc_hessians *h);
const char *qc_hessians_name(const qc_hessians *h, uint32_t i);

#endif
