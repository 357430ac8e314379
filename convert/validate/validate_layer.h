/* What is measured of one quantized weight, and the measuring on the CPU.
 *
 * With W the weights of MODEL, V those that OUT's decode to (exact floats), x [R, K] activations in
 * 16 bit, and norms over all elements (Frobenius):
 *
 * - weight error, |W - V| / |W|; as SQNR, -20 log10 of it; the largest |W - V| and where.
 * - output error, |Y - Z| / |Z|: Y what the kernel makes of x and V, Z = x W^T summed in double and
 *   rounded to the 16-bit type, as fp16 arithmetic would give it.
 * - kernel error, |Y - S| / |S|: S = x V^T summed in double; how much of it is the kernel's own.
 *
 * x and Y are BF16 where W is, else F16. Sums over a row are made by one thread and added in row
 * order, and every instruction set gives the same bits, so results do not depend on threads or
 * processor.
 *
 * Memory: OUT's codes of the layer, x, Y, and per thread a few rows of W. A Conv1D weight, which
 * lies the other way in MODEL, is read whole. */
#ifndef QC_CONVERT_VALIDATE_LAYER_H
#define QC_CONVERT_VALIDATE_LAYER_H

#include "convert/term/progress.h"
#include "convert/validate/validate_input.h"
#include "convert/validate/validate_pair.h"
#include "quant/matmul_ops.h"

/* Rows of x for the errors; more rows average more, and these have settled to three digits. */
#define QC_VALIDATE_ROWS 16u

/* The kernel's own error that is allowed: accumulation in float and one rounding to Y's type. */
#define QC_VALIDATE_KERNEL_F16  1e-3
#define QC_VALIDATE_KERNEL_BF16 0x1p-8
double qc_validate_kernel_limit(qc_dtype y_dtype);

/* One size of batch on a GPU. */
typedef struct {
    uint64_t m;
    const char *path; /* of the kernel: "gemv", ... */
    double seconds, fp16_seconds;
    double roof; /* the time that memory and tensor cores need at least, as a share of seconds */
    double output_error, kernel_error;
} qc_validate_time;

typedef struct {
    const qc_validate_pair *pair;
    const char *why_not; /* why it was not measured; NULL: it was */
    const char *device;  /* "cpu", "cuda:0" */
    const char *note;    /* NULL, or why it ran on another device than the rest */
    qc_dtype x_dtype;
    double weight_error, weight_max;
    uint64_t max_row, max_col;       /* as the tensor lies in MODEL */
    double output_error, output_max; /* max: the largest |Y - Z| over the root mean square of Z */
    double kernel_error, kernel_max; /* max: over the root mean square of S */
    const qc_validate_time *times;
    unsigned time_count;
    const char *failure; /* what passed a limit, clauses; NULL: nothing */
} qc_validate_layer;

/* In dB; infinite for no error at all. */
double qc_validate_sqnr(double weight_error);
/* sqrt(error / size) of sums of squares; 0 / 0 is 0. */
double qc_validate_ratio(double error, double size);
/* F16 or BF16: what a weight of this type is multiplied in. */
qc_dtype qc_validate_x_dtype(qc_dtype weight);

typedef struct {
    const qc_checkpoint *output, *model;
    const qc_quant_ops *ops;
    const qc_matmul_ops *matmul;
    unsigned threads;
    int weights_only;      /* leave output and kernel errors to a GPU */
    qc_progress *progress; /* bytes of MODEL; NULL is fine */
} qc_validate_tools;

/* Everything but pair, why_not, device, note, times and failure. in: made for this layer. */
QC_NODISCARD qc_status qc_validate_measure(qc_validate_layer *out, const qc_validate_tools *tools,
                                           const qc_validate_pair *pair, const qc_weights *w,
                                           const qc_validate_input *in, qc_error *err);

/* A Conv1D weight as stored; the caller frees it. */
QC_NODISCARD qc_status qc_validate_whole(void **out, const qc_validate_tools *tools,
                                         const qc_validate_pair *pair, qc_error *err);

/* Rows of W as floats, in OUT's order, for one thread. whole: qc_validate_whole for a Conv1D
 * weight, borrowed; else NULL. Close it also when opening failed. */
typedef struct qc_validate_source qc_validate_source;
QC_NODISCARD qc_status qc_validate_source_open(qc_validate_source **out,
                                               const qc_validate_tools *tools,
                                               const qc_validate_pair *pair, const void *whole,
                                               qc_error *err);
void qc_validate_source_close(qc_validate_source *s); /* NULL is fine */
/* Rows [first, first + count) to out [count, cols]. */
QC_NODISCARD qc_status qc_validate_source_read(qc_validate_source *s, uint64_t first,
                                               uint64_t count, float *out, qc_error *err);

#endif
