/* Quantizing and dequantizing on a GPU, with the bytes of quant/quant_ops.h.
 *
 * The results of the functions of quant_ops.h are all made here too, bit for bit. Kernels make the
 * codes and scales. For the error sums they make a few floats per block or run, in the fixed order
 * of summation over 16 lanes (quant/quant_internal.h); on the host, qc_blocks_collect and
 * qc_rows_collect (quant/quant_collect.h) turn those into the same qc_block_error and
 * qc_piece_sums.
 *
 * All pointers are device memory. dtype: F32, F16 or BF16 (only the CPU does F64). src, codes and
 * dst may have any alignment of their type; 16 bytes is faster, as is a K that is a multiple of 8
 * in dequantizing. Sizes are 64-bit; for n == 0 nothing but *bad is written. Work is put on the
 * stream and not waited for; nothing is allocated. Thread-safe: yes. Errors: QC_ERR_USAGE for an
 * argument (block size, dtype), QC_ERR_INTERNAL from CUDA. *bad (device, 8 bytes) is set to
 * UINT64_MAX first and then to the lowest index whose element has no code; the other results are
 * then unspecified. */
#ifndef QC_KERNELS_CUDA_QUANTIZE_H
#define QC_KERNELS_CUDA_QUANTIZE_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"
#include "quant/quant_form.h"

QC_C_BEGIN

/* Blocks over a flattened piece that starts at a block boundary. */
typedef struct {
    const void *src; /* [n] */
    qc_dtype dtype;
    uint64_t n;
    uint32_t block_elems;
    void *codes;   /* NF4: (n + 1) / 2 bytes; int8: n */
    float *absmax; /* [blocks], blocks = ceil(n / block_elems) */
    float *errors; /* [blocks][4]: sums rr, rc, cc folded over 16 lanes, and the largest |r|; NULL:
                      not wanted. 16-byte aligned */
    uint64_t *bad;
} qc_cuda_blocks;

QC_NODISCARD qc_status qc_cuda_nf4_quantize(const qc_cuda_blocks *a, qc_cuda_stream s,
                                            qc_error *err);
QC_NODISCARD qc_status qc_cuda_int8_blocks_quantize(const qc_cuda_blocks *a, qc_cuda_stream s,
                                                    qc_error *err);

/* How many columns of a row lie between two flushes of the sums: QC_ROW_FLUSH of
 * quant_internal.h. */
#define QC_CUDA_ROW_RUN 1024u

typedef struct {
    const void *src; /* [rows, cols] */
    qc_dtype dtype;
    uint64_t rows, cols;
    int8_t *codes; /* [rows, cols] */
    float *scb;    /* [rows]; 0 where cols is 0 */
    float *errors; /* [rows][ceil(cols / QC_CUDA_ROW_RUN)][4]: sums ee and xx folded over 16 lanes,
                      the largest |e|, and the bits (uint32_t) of its column within the run, lowest
                      on ties; NULL: not wanted. 16-byte aligned */
    uint64_t *bad; /* a value that is finite, but infinite in float16, counts */
} qc_cuda_rows;

QC_NODISCARD qc_status qc_cuda_int8_rows_quantize(const qc_cuda_rows *a, qc_cuda_stream s,
                                                  qc_error *err);

/* Like nested_quantize and nested_dequantize of quant_ops.h. map: [256] device floats, NULL for the
 * dynamic map. nested_block: a power of two. */
QC_NODISCARD qc_status qc_cuda_nested_quantize(const float *absmax, uint64_t n, float offset,
                                               uint8_t *codes, float *nested_absmax,
                                               qc_cuda_stream s, qc_error *err);
QC_NODISCARD qc_status qc_cuda_nested_dequantize(const uint8_t *codes, const float *nested_absmax,
                                                 const float *map, uint64_t n,
                                                 uint32_t nested_block, float offset, float *absmax,
                                                 qc_cuda_stream s, qc_error *err);

/* Dequantizes the elements of rows [first_row, first_row + rows) of a weight of any form and
 * decodes double-quantized scales on the way. The bytes are those of the form's `dequantize`.
 *
 *   dst       [rows, ld] F32, F16 or BF16; ld >= w->cols elements from row to row; elements beyond
 *             cols are zeroed
 *   exponent  values are multiplied by 2^*exponent (exact) before they are rounded to dst_dtype;
 *             device memory, NULL: 0
 *   overflow  device, may be NULL: as *bad, the lowest index (in the weight) that was finite and
 *             became infinite
 *
 * The matmul for large M uses it as well. */
QC_NODISCARD qc_status qc_cuda_dequantize(const qc_weights *w, uint64_t first_row, uint64_t rows,
                                          void *dst, qc_dtype dst_dtype, uint64_t ld,
                                          const int *exponent, uint64_t *overflow, qc_cuda_stream s,
                                          qc_error *err);

QC_C_END
#endif
