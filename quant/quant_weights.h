/* A quantized weight as it lies in memory, for the matmuls on the CPU and on a GPU.
 *
 * W has shape [rows, cols], row-major; y = x W^T, so rows is N (outputs) and cols is K (inputs).
 * The arrays are the tensors of a converted checkpoint, byte for byte; in host memory for
 * quant/matmul_ops.h, in device memory for kernels/matmul.h. All are borrowed.
 *
 * Blocks run over the flattened tensor, so where cols is not a multiple of block_elems a block goes
 * on into the next row: element (n, k) has flat index f = n * cols + k and block f / block_elems.
 *
 * The value of an element, in IEEE single precision (docs/quantizers.md):
 *
 *   NF4          code_map[code f] * absmax[f / block_elems]
 *   INT8_ROWS    ((float)code f * absmax[n]) * QC_INT8_STEP
 *   INT8_BLOCKS  ((float)code f * QC_INT8_STEP) * absmax[f / block_elems]
 *
 * Where the scales are double quantized, absmax[b] = nested_map[absmax_codes[b]] * nested_absmax[b
 * / nested_block] + nested_offset (two roundings). */
#ifndef QC_QUANT_QUANT_WEIGHTS_H
#define QC_QUANT_QUANT_WEIGHTS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { QC_WEIGHTS_NF4, QC_WEIGHTS_INT8_ROWS, QC_WEIGHTS_INT8_BLOCKS } qc_weights_kind;

typedef struct {
    qc_weights_kind kind;
    uint64_t rows, cols;
    uint32_t block_elems; /* power of two, 32 to 4096; 0 for INT8_ROWS */
    const void *codes;    /* NF4: (rows * cols + 1) / 2 bytes, even index in the high nibble; else
                             rows * cols int8 */
    const float *absmax;  /* [blocks], or [rows] (SCB) for INT8_ROWS; NULL where double quantized */

    /* double quantization: absmax is NULL then */
    const uint8_t *absmax_codes; /* [blocks] */
    const float *nested_absmax;  /* [ceil(blocks / nested_block)] */
    const float *nested_map;     /* [256] */
    float nested_offset;
    uint32_t nested_block; /* a power of two; 256 in every known file */

    const float *code_map; /* NF4: [16]; NULL: the values of QLoRA (qc_nf4_code) */
} qc_weights;

#ifdef __cplusplus
}
#endif
#endif
