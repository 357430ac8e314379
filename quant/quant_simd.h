/* The quantizers by blocks of the AVX2 and AVX-512 tables, which have files of their own
 * (quant_avx2_blocks.c, quant_avx512_blocks.c); contracts in quant_ops.h. */
#ifndef QC_QUANT_QUANT_SIMD_H
#define QC_QUANT_QUANT_SIMD_H

#include "quant/quant_ops.h"

void qc_avx2_nf4_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                          uint8_t *codes, float *absmax, qc_block_error *block_errors,
                          qc_piece_sums *sums);
void qc_avx2_int8_blocks_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                                  int8_t *codes, float *absmax, qc_block_error *block_errors,
                                  qc_piece_sums *sums);
void qc_avx512_nf4_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                            uint8_t *codes, float *absmax, qc_block_error *block_errors,
                            qc_piece_sums *sums);
void qc_avx512_int8_blocks_quantize(const void *src, qc_dtype dtype, uint64_t n,
                                    uint32_t block_elems, int8_t *codes, float *absmax,
                                    qc_block_error *block_errors, qc_piece_sums *sums);

#endif
