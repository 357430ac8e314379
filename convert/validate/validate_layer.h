/* What is measured of one quantized weight, and how the CPU measures it.
 *
 * W are the weights of MODEL, V are those that OUT's codes decode to (exact floats), and x [R, K]
 * are activations in 16 bits. Norms are over all elements (Frobenius).
 *
 * - weight error, |W - V| / |W|; as SQNR, -20 log10 of it; the largest |W - V| and where.
 * - output error, |Y - Z| / |Z|: Y what the kernel makes of x and V, Z = x W^T summed in double and
 *   rounded to the 16-bit type, as fp16 arithmetic would give it.
 * - kernel error, |Y - S| / |S|: S = x V^T summed in double; how much of it is the kernel's own.
 *   The CPU's kernels are those of quant/cpu_matmul.h.
 *
 * x and Y are BF16 where W is, else F16. One thread makes the sums over a row, and these are added
 * in row order. Every instruction set gives the same bits. So results do not depend on threads or
 * processor.
 *
 * In memory are OUT's codes of the layer, x, Y, and some rows of W for each thread. */
#ifndef QC_CONVERT_VALIDATE_LAYER_H
#define QC_CONVERT_VALIDATE_LAYER_H

#include "convert/model/weight_read.h"
#include "convert/term/progress.h"
#include "convert/validate/validate_compare.h"
#include "convert/validate/validate_input.h"
#include "convert/validate/validate_pair.h"
#include "quant/cpu_matmul.h"
#include "quant/matmul_ops.h"

/* How many rows of x the errors are measured with. More rows average more, but with these the
 * errors have settled to three digits. */
#define QC_VALIDATE_ROWS 16u

/* The error of its own that a kernel may have, from summing in float and rounding once to Y's
 * type. */
#define QC_VALIDATE_KERNEL_F16  1e-3
#define QC_VALIDATE_KERNEL_BF16 0x1p-8
double qc_validate_kernel_limit(qc_dtype y_dtype);

/* The results for one batch size. */
typedef struct {
    uint64_t m;
    const char *path;             /* the kernel: "gemv", ..., on the CPU "integers" or "floats" */
    double seconds, fp16_seconds; /* fp16_seconds is 0 where it was not timed */
    /* the least time that memory (and on a GPU the tensor cores) needs, as a share of seconds; NaN
     * where it is unknown */
    double roof;
    double output_error, kernel_error; /* on the CPU those of all QC_VALIDATE_ROWS rows */
} qc_validate_time;

typedef struct {
    const qc_validate_pair *pair;
    const char *why_not; /* why it was not measured, or NULL if it was */
    const char *device;  /* "cpu", "cuda:0" */
    const char *note;    /* NULL, or why it was measured on another device than the rest */
    qc_dtype x_dtype;
    double weight_error, weight_max;
    uint64_t max_row, max_col; /* place of weight_max in the tensor of MODEL */
    /* output_max: the largest |Y - Z| over the root mean square of Z */
    double output_error, output_max;
    double kernel_error, kernel_max; /* kernel_max: the same over the root mean square of S */
    const qc_validate_time *times;
    unsigned time_count;
    const char *failure; /* clauses that say which limits were exceeded; NULL: none */
} qc_validate_layer;

/* Returns the time of fp16 over the kernel's; NaN if fp16 was not timed. */
double qc_validate_speedup(const qc_validate_time *t);
/* Sets the output and kernel errors from the sums over so many outputs. */
void qc_validate_set_errors(qc_validate_layer *l, const qc_validate_sums *output,
                            const qc_validate_sums *kernel, double outputs);
/* In dB; infinite if there is no error at all. */
double qc_validate_sqnr(double weight_error);
/* sqrt(error / size), of sums of squares. 0 / 0 counts as 0. */
double qc_validate_ratio(double error, double size);
/* Returns the dtype in which a weight of this type is multiplied: F16 or BF16. */
qc_dtype qc_validate_x_dtype(qc_dtype weight);

typedef struct {
    const qc_checkpoint *model;
    const qc_quant_ops *ops;
    const qc_matmul_ops *matmul;
    qc_cpu_matmul *products;
    unsigned threads;
    int weights_only;      /* a GPU measures output and kernel errors */
    qc_progress *progress; /* counts bytes of MODEL; may be NULL */
} qc_validate_tools;

/* Measures everything except pair, why_not, device, note, times and failure. `in` was made for this
 * layer. */
QC_NODISCARD qc_status qc_validate_measure(qc_validate_layer *out, const qc_validate_tools *tools,
                                           const qc_validate_pair *pair, const qc_weights *w,
                                           const qc_validate_input *in, qc_error *err);

/* qc_cpu_matmul_run, in pieces after which it answers Ctrl-C. */
QC_NODISCARD qc_status qc_validate_multiply(qc_cpu_matmul *products, const qc_weights *w,
                                            qc_matmul_cpu_io io, qc_error *err);

/* How rows of W are read, in OUT's order: rows of two dimensions, also those of a stack. */
QC_NODISCARD qc_status qc_validate_source(qc_weight_source *out, const qc_validate_tools *tools,
                                          const qc_validate_pair *pair, qc_error *err);

#endif
