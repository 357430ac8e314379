/* A quantized weight as it lies in memory, for all that make, read, search, calibrate, check and
 * multiply it, on the CPU and on a GPU.
 *
 * W has shape [rows, cols], row-major; y = x W^T, so rows is N (outputs) and cols is K (inputs).
 * The arrays are the tensors of a converted checkpoint, byte for byte (docs/format.md): in host
 * memory for what is declared here, in device memory for kernels/matmul.h. All are borrowed.
 *
 * Element (n, k) has flat index f = n * cols + k. Its block is f / block_elems, so where cols is
 * not a multiple of block_elems a block goes on into the next row; or each row has one scale.
 *
 * The value of a code, in IEEE single precision (docs/quantizers.md):
 *
 *   nf4           code_map[code] * scale
 *   int8 rows     ((float)code * scale) * QC_INT8_STEP
 *   int8 blocks   ((float)code * QC_INT8_STEP) * scale
 *   w2a16 to w8a16, w8a8 (float)(code - bias) * scale
 *
 * QC_INT8_STEP is 1/127 rounded to float. Where scales are double quantized, that of block b is
 * nested_map[absmax_codes[b]] * nested_absmax[b / nested_block] + offset (two roundings). */
#ifndef QC_QUANT_QUANT_WEIGHTS_H
#define QC_QUANT_QUANT_WEIGHTS_H

#include "base/dtype.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* GPU kernels are compiled for some of these; all other code takes what it needs from the ops.
 * W2A16 to W8A16 are what compressed-tensors packs to 32-bit words, W8A8 what it keeps as I8. */
typedef enum {
    QC_FORM_NF4,
    QC_FORM_INT8_ROWS,
    QC_FORM_INT8_BLOCKS,
    QC_FORM_W4A16,
    QC_FORM_W8A16,
    QC_FORM_W8A8,
    QC_FORM_W2A16,
    QC_FORM_W3A16,
    QC_FORM_W5A16,
    QC_FORM_W6A16,
    QC_FORM_W7A16
} qc_form_kind;

/* The operations of a kind: quant/quant_form.h. Other programs hand the pointer on. */
typedef struct qc_form_ops qc_form_ops;
/* NULL for a kind that there is not. */
QC_API const qc_form_ops *qc_form_ops_of(qc_form_kind kind);

/* How the numbers of a weight lie. Start from zeros: a member that a form has no use for is 0. */
typedef struct {
    const qc_form_ops *ops;
    uint32_t block_elems;  /* elements that share a scale: a power of two from 32 to 4096; 0: each
                              row has a scale */
    uint64_t cols;         /* columns of a row; blocks are quantized without it */
    int32_t nested;        /* 1: double quantized scales */
    float offset;          /* added to double quantized scales; 0 for NF4 as we make it */
    const float *code_map; /* NF4: [16] values of the codes, where the other arrays lie; NULL: those
                              of NF4 */
    qc_dtype scale_dtype;  /* F32, F16 or BF16 where the form leaves it open (integers) */
} qc_form;

typedef struct {
    qc_form form; /* cols: K; nested: absmax is NULL */
    uint64_t rows;
    const void *codes;   /* see qc_form_code_bytes */
    const float *absmax; /* [blocks] or [rows] (SCB); NULL where double quantized */

    /* double quantization */
    const uint8_t *absmax_codes; /* [blocks] */
    const float *nested_absmax;  /* [ceil(blocks / nested_block)] */
    const float *nested_map;     /* [256] */
    uint32_t nested_block;       /* a power of two; 256 in every known file */
} qc_weights;

/* Checks that every size and pointer of w is consistent, for callers with untrusted descriptors;
 * QC_ERR_SHAPE says what is not. codes_bytes, scale counts: what the arrays hold. */
QC_API QC_NODISCARD qc_status qc_weights_check(const qc_weights *w, uint64_t codes_bytes,
                                               uint64_t scales, uint64_t nested_scales,
                                               qc_error *err);

/* The part of it that needs no arrays: rows, columns, block sizes and the form fit each other.
 * nested: the scales are quantized, too. Sets *blocks to the number of scales. */
QC_NODISCARD qc_status qc_weights_check_sizes(const qc_weights *w, int nested, uint64_t *blocks,
                                              qc_error *err);

/* Writes the values of rows [first, first + rows) of w, without gaps: out has room for rows * cols
 * elements of dtype F32, F16 or BF16, and needs no alignment. F32 has the values as they are; the
 * others are rounded once, to nearest even, and what is too large for F16 becomes infinite.
 * threads: 1 to 1024, or 0 for one per processor; the values do not depend on it. w must be sound
 * (qc_weights_check). QC_ERR_USAGE names what is wrong; QC_ERR_INTERRUPTED. */
QC_API QC_NODISCARD qc_status qc_weights_dequantize(const qc_weights *w, uint64_t first,
                                                    uint64_t rows, void *out, qc_dtype dtype,
                                                    unsigned threads, qc_error *err);

/* x and y of a product on the CPU: y = x W^T + bias. */
typedef struct {
    const void *x;     /* [m, k] */
    qc_dtype x_dtype;  /* F32, F16 or BF16 */
    uint64_t m, ldx;   /* ldx: elements from row to row, at least k */
    void *y;           /* [m, n] */
    qc_dtype y_dtype;  /* F32, F16 or BF16 */
    uint64_t ldy;      /* at least n */
    const float *bias; /* [n], or NULL */
} qc_matmul_cpu_io;

#ifdef __cplusplus
}
#endif
#endif
