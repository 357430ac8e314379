/* The host's share of quantizing on a GPU: it turns the folded lane sums of each block or run into
 * what the functions of quant_ops.h leave, bit for bit, in the same order and with the same
 * roundings; see quant_internal.h. Thread-safe: yes. Allocates: no. */
#ifndef QC_QUANT_QUANT_COLLECT_H
#define QC_QUANT_QUANT_COLLECT_H

#include "quant/quant_ops.h"
#include "quant/search_sums.h"

/* errors: [blocks][4] rr, rc, cc, peak (kernels/cuda_quantize.h). out: [blocks]. sums are those of
 * nf4_quantize or int8_blocks_quantize for these blocks, except that `bad` is always QC_BAD_NONE;
 * here and below. */
void qc_blocks_collect(const float *absmax, const float *errors, uint64_t blocks,
                       qc_block_error *out, qc_piece_sums *sums);

/* errors: [rows][runs][4] ee, xx, max, column bits. sums are those of int8_rows_quantize. Of
 * integers, whose ee and xx are in units of the scale's square, they are those of int_quantize;
 * scales: [rows] then, else NULL. */
void qc_rows_collect(const float *errors, const float *scales, uint64_t rows, uint64_t cols,
                     qc_piece_sums *sums);

/* found: what was found in each of `blocks` blocks of block_elems elements. sums are those of
 * `blocks` of qc_search_ops. */
void qc_search_collect(const qc_search_sum *found, uint64_t blocks, uint32_t block_elems,
                       qc_piece_sums *sums);

#endif
