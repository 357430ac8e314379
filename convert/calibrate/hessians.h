/* Second moments of linear layers' inputs that were captured elsewhere, for --hessians
 * (docs/calibration.md has the format). They come in a safetensors file, or a folder of such files
 * as Hugging Face lays out a model:
 *
 *   <module>.second_moment   F64 or F32 [n, n]: the mean over tokens of x x^T, which is symmetric
 *   <module>.tokens          I64 [1]: the number of these tokens
 *   <module>.same_as         U8: instead of the two above, the name of another module, in UTF-8,
 *                            whose inputs these are (k_proj and v_proj have q_proj's)
 *   <module>.cross_moment    F64 or F32 [n, n], beside a second moment: the mean over the same
 *                            tokens of x z^T, where x are the inputs behind quantized layers, of
 *                            which the second moment then is, and z those in the original model
 *   <module>.output_moment   F64 or F32 [m, m], or [ceil(m / b), b, b]: the mean over tokens of
 *                            g g^T, where g is the gradient of the loss of the outputs; or the
 *                            blocks on its diagonal, the last one filled up with zeros
 *   <module>.output_tokens   I64 [1]: the number of these tokens
 *
 * <module> is the weight's name without ".weight"; for a matrix of a stack of experts it is
 * STACK[3], or STACK[3, gate] and STACK[3, up] where these lie one below the other. */
#ifndef QC_CONVERT_HESSIANS_H
#define QC_CONVERT_HESSIANS_H

#include "formats/checkpoint.h"

typedef struct qc_hessians qc_hessians;

/* Opens the file or folder, and checks names, shapes and types. QC_ERR_INPUT and QC_ERR_SHAPE where
 * they are wrong. */
QC_NODISCARD qc_status qc_hessians_open(qc_hessians **out, const char *path, qc_error *err);
void qc_hessians_close(qc_hessians *h); /* accepts NULL */

/* The modules that have moments, in the order of their names. */
uint32_t qc_hessians_count(const qc_hessians *h);
const char *qc_hessians_name(const qc_hessians *h, uint32_t module);

/* Returns the number of a module's moments. Modules with the same number have the same inputs, so
 * one factor serves them. *n: the columns; *tokens: how many tokens the moments are of. */
uint32_t qc_hessians_moments(const qc_hessians *h, uint32_t module, uint64_t *n, uint64_t *tokens);
/* Reads the lower triangle into out [n, n] and multiplies it by the number of tokens, which gives
 * sums. QC_ERR_INPUT where the matrix is not symmetric (within 1e-3 of the diagonal's mean) or not
 * positive, as far as each two elements of the diagonal and the one between them tell;
 * QC_ERR_NONFINITE. */
QC_NODISCARD qc_status qc_hessians_read(const qc_hessians *h, uint32_t number, double *out,
                                        qc_error *err);
/* Is there a cross moment beside these moments, and reads it: out [n, n], times the number of
 * tokens. QC_ERR_NONFINITE. */
int qc_hessians_has_cross(const qc_hessians *h, uint32_t number);
QC_NODISCARD qc_status qc_hessians_read_cross(const qc_hessians *h, uint32_t number, double *out,
                                              qc_error *err);

/* The second moments of a module's outputs. */
typedef struct {
    uint64_t blocks, block; /* as qc_feedback_outputs has them; 0: there are none */
    uint64_t tokens;
    int whole; /* a matrix of all outputs, not a list of blocks */
} qc_hessians_outputs;

qc_hessians_outputs qc_hessians_outputs_of(const qc_hessians *h, uint32_t module);
/* Reads them: out [blocks][block][block]. Refuses what qc_hessians_read refuses. */
QC_NODISCARD qc_status qc_hessians_read_outputs(const qc_hessians *h, uint32_t module, float *out,
                                                qc_error *err);

#endif
