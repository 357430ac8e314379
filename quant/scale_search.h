/* Scales of least squared error, found without data: what --scale search and refit do.
 *
 * bitsandbytes takes a block's largest value as its scale. Any other scale is decoded just as well,
 * and a slightly smaller one usually leaves less error: the many small values gain more than the
 * largest loses. Here a block's scale is the one of least sum (x - x')^2 over the scales that its
 * form can hold, and its codes are the nearest ones for that scale, as a reader sees it.
 *
 * Double quantization. A group is QC_NESTED_BLOCK blocks, which share a nested absmax; a scale is
 * map[code] * nested_absmax + offset (two roundings). The offset is the tensor's and is given: the
 * mean of scales found (without double quantization) in a sample of its groups, see
 * qc_search_sample. Everything else about a group is decided within the group, so a weight is read
 * once, in any order of groups.
 *
 * quant_scalar's rule holds: scale_search.c is the truth, and the AVX2 and AVX-512 tables and the
 * CUDA kernels equal it bit for bit, in codes, scales and sums. The method, its floor and what else
 * was tried are in docs/quantizers.md and docs/decisions/.
 *
 * Common rules as in quant_ops.h: src of any alignment, F64, F32, F16 or BF16; non-finite elements
 * are reported in sums; thread-safe; allocates nothing but what `scratch` is; n == 0 is a no-op. */
#ifndef QC_QUANT_SCALE_SEARCH_H
#define QC_QUANT_SCALE_SEARCH_H

#include "quant/quant_ops.h"

typedef enum { QC_SEARCH_ONCE, QC_SEARCH_REFIT } qc_search_effort;

/* How a block-quantized tensor is searched. */
typedef struct {
    int is_nf4; /* 1 NF4, 0 int8 blocks */
    uint32_t block_elems;
    int nested;   /* double quantization */
    float offset; /* nested: a value that bfloat16 holds, as qc_nested_offset gives */
    qc_search_effort effort;
} qc_search_form;

/* What is made of n elements; arrays are the caller's. */
typedef struct {
    void *codes;   /* as nf4_quantize or int8_blocks_quantize leave them */
    float *absmax; /* [blocks] the scales as a reader will have them, nested or not; an all-zero
                      block keeps whatever scale its group can hold nearest to zero */
    uint8_t *absmax_codes; /* [blocks], nested only */
    float *nested_absmax;  /* [groups], nested only */
} qc_search_out;

typedef struct {
    qc_isa isa;

    /* n elements from the start of a group (nested) or of a block; only a tensor's last group, or
     * block, may be short. sums are final: sum_ee, max_err and max_index compare x with what
     * dequantizing to F32 with out->absmax gives. scratch: qc_search_scratch_bytes, 64-byte
     * aligned, one per thread. */
    void (*blocks)(const qc_search_form *form, const void *src, qc_dtype dtype, uint64_t n,
                   const qc_search_out *out, void *scratch, qc_piece_sums *sums);

    /* int8 by rows: scb [rows] is the searched one, codes nearest for it, clamped to +-127. Rows
     * pass through float16 first, as in int8_rows_quantize; sums likewise. */
    void (*rows)(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols, int8_t *codes,
                 float *scb, void *scratch, qc_piece_sums *sums);
} qc_search_ops;

/* As qc_quant_ops_for. */
const qc_search_ops *qc_search_ops_for(qc_isa isa);

/* form: NULL for rows of `cols`. */
uint64_t qc_search_scratch_bytes(const qc_search_form *form, uint64_t cols);

/* Group i of those whose scales give the offset, 0 <= i < qc_search_sample_count(groups): all of
 * them in a small tensor, else evenly spread. The offset is qc_nested_offset over the absmax that
 * `blocks` finds in them with nested = 0, in order of i. */
uint64_t qc_search_sample_count(uint64_t groups);
uint64_t qc_search_sample_group(uint64_t groups, uint64_t i);

#endif
