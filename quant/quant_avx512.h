/* The parts of the AVX-512 table that have files of their own; contracts in quant_ops.h. */
#ifndef QC_QUANT_QUANT_AVX512_H
#define QC_QUANT_QUANT_AVX512_H

#include "quant/quant_ops.h"

/* quant_avx512_blocks.c */
void qc_avx512_nf4_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                            uint8_t *codes, float *absmax, qc_block_error *block_errors,
                            qc_piece_sums *sums);
void qc_avx512_int8_blocks_quantize(const void *src, qc_dtype dtype, uint64_t n,
                                    uint32_t block_elems, int8_t *codes, float *absmax,
                                    qc_block_error *block_errors, qc_piece_sums *sums);

/* quant_avx512_rows.c */
void qc_avx512_int8_rows_quantize(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                                  int8_t *codes, float *scb, qc_piece_sums *sums);

#endif
