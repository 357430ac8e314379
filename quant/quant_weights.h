/* A quantized weight as it lies in memory, for the matmuls on the CPU and on a GPU.
 *
 * W has shape [rows, cols], row-major; y = x W^T, so rows is N (outputs) and cols is K (inputs).
 * The arrays are the tensors of a converted checkpoint, byte for byte; in host memory for
 * quant/matmul_ops.h, in device memory for kernels/matmul.h. All are borrowed.
 *
 * Element (n, k) has flat index f = n * cols + k and, but for rows, block f / block_elems.
 *
 * The value of an element is that of its code, see quant_form.h. */
#ifndef QC_QUANT_QUANT_WEIGHTS_H
#define QC_QUANT_QUANT_WEIGHTS_H

#include "quant/quant_form.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    qc_form form; /* cols: K; nested: absmax is NULL; code_map lies where the other arrays do */
    uint64_t rows;
    const void *codes;   /* qc_form_code_bytes */
    const float *absmax; /* [blocks] or [rows] (SCB); NULL where double quantized */

    /* double quantization */
    const uint8_t *absmax_codes; /* [blocks] */
    const float *nested_absmax;  /* [ceil(blocks / nested_block)] */
    const float *nested_map;     /* [256] */
    uint32_t nested_block;       /* a power of two; 256 in every known file */
} qc_weights;

#ifdef __cplusplus
}
#endif
#endif
