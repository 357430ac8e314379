/* Quantizing and dequantizing on a GPU, with the bytes of quant/quant_ops.h.
 *
 * Kernels make the codes and scales, bit for bit. For the error sums they make a few floats per
 * block or run, in the fixed order of summation over 16 lanes (quant/quant_internal.h); on the
 * host, qc_blocks_collect and qc_rows_collect (quant/quant_collect.h) turn those into the same
 * qc_block_error and qc_piece_sums.
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

#include "kernels/cuda_dequantize.h"
#include "quant/quant_form.h"

QC_C_BEGIN

/* The blocks of a flattened piece that starts at a block boundary. */
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

/* This many columns of a row lie between two flushes of the sums: QC_ROW_FLUSH of
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

QC_C_END
#endif
