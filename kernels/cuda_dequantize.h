/* The values of a quantized weight on a GPU, with the bytes of quant/quant_ops.h. All pointers are
 * device memory; dst may have any alignment of its type. Work is put on the stream and not waited
 * for; nothing is allocated. Thread-safe: yes. Errors: QC_ERR_USAGE for an argument,
 * QC_ERR_INTERNAL from CUDA. */
#ifndef QC_KERNELS_CUDA_DEQUANTIZE_H
#define QC_KERNELS_CUDA_DEQUANTIZE_H

#include "kernels/cuda_device.h"
#include "quant/quant_weights.h"
#include "quant/weight_slice.h"

QC_C_BEGIN

/* Dequantizes the elements of a part of a weight of any form (any rows, any columns) and decodes
 * double-quantized scales on the way. The bytes are those of the form's `dequantize`.
 *
 *   dst       [part->rows, ld] F32, F16 or BF16; ld >= part->cols elements from row to row;
 *             elements beyond them are zeroed
 *   exponent  values are multiplied by 2^*exponent (exact) before they are rounded to dst_dtype;
 *             device memory, NULL: 0
 *   overflow  device, may be NULL: as *bad, the lowest index (in the weight) that was finite and
 *             became infinite
 *
 * The matmul for large M uses it as well. */
QC_API QC_NODISCARD qc_status qc_cuda_dequantize_part(const qc_weights *w,
                                                      const qc_weights_part *part, void *dst,
                                                      qc_dtype dst_dtype, uint64_t ld,
                                                      const int *exponent, uint64_t *overflow,
                                                      qc_cuda_stream s, qc_error *err);

/* The same for whole rows [first_row, first_row + rows). */
QC_API QC_NODISCARD qc_status qc_cuda_dequantize(const qc_weights *w, uint64_t first_row,
                                                 uint64_t rows, void *dst, qc_dtype dst_dtype,
                                                 uint64_t ld, const int *exponent,
                                                 uint64_t *overflow, qc_cuda_stream s,
                                                 qc_error *err);

QC_C_END
#endif
