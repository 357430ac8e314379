/* The quantizers of the AVX2 table that have files of their own (quant_avx2_blocks.c,
 * quant_avx2_rows.c); contracts in quant_ops.h. */
#ifndef QC_QUANT_QUANT_AVX2_H
#define QC_QUANT_QUANT_AVX2_H

#include "quant/quant_ops.h"

void qc_avx2_nf4_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                          uint8_t *codes, float *absmax, qc_block_error *block_errors,
                          qc_piece_sums *sums);
void qc_avx2_int8_blocks_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                                  int8_t *codes, float *absmax, qc_block_error *block_errors,
                                  qc_piece_sums *sums);
void qc_avx2_int8_rows_quantize(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                                int8_t *codes, float *scb, qc_piece_sums *sums);
void qc_avx2_int_quantize(const qc_int_codes *how, const void *src, qc_dtype dtype, uint64_t n,
                          uint64_t group, void *codes, float *scales, qc_piece_sums *sums);

/* qc_codes_pack and qc_codes_unpack. */
void qc_avx2_codes_pack(unsigned bits, const uint8_t *codes, uint64_t n, void *packed);
void qc_avx2_codes_unpack(unsigned bits, const void *packed, uint64_t n, uint8_t *codes);

#endif
