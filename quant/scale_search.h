/* Scales of least squared error, found without data: what --scale search and refit do.
 *
 * bitsandbytes takes a block's largest magnitude as its scale. Readers decode any other scale just
 * as well, and another one usually leaves less error. Here a short search looks for a block's scale
 * of least sum (x - x')^2 among those that its form can hold. The codes are the nearest ones for
 * that scale, as a reader sees it.
 *
 * Scales of NF4 have a sign. NF4 is not symmetric (8 values above zero, 7 below), and a reader only
 * multiplies: with a negative scale it reads the mirrored code. The better of the two signs leaves
 * a fifth less error than absmax, where positive scales alone leave a seventh less. So absmax, as a
 * tensor, may hold negative numbers.
 *
 * Double quantization. A group is QC_NESTED_BLOCK blocks, which share a nested absmax; a scale is
 * map[code] * nested_absmax + offset (two roundings). The offset belongs to the whole tensor and is
 * given. For NF4 it is 0, because scales lie on both sides of it; so no pass over the tensor is
 * needed to find it. For int8 it is the mean of the scales found (without double quantization) in a
 * sample of the groups, see qc_search_sample_count. Everything else about a group is decided within
 * the group, so a weight is read from a file once, in any order of groups.
 *
 * As with quant_scalar.c, scale_search.c is the reference, and the AVX2 and AVX-512 tables and the
 * CUDA kernels equal it bit for bit, in codes, scales and sums. scale_search_internal.h has every
 * step in words; docs/theory/scale_search.md and docs/decisions/ have the floor and what else was
 * tried.
 *
 * The common rules are those of quant_ops.h: src of any alignment, F64, F32, F16 or BF16;
 * non-finite elements are reported in sums; thread-safe; no memory besides `scratch`; n == 0 is a
 * no-op. */
#ifndef QC_QUANT_SCALE_SEARCH_H
#define QC_QUANT_SCALE_SEARCH_H

#include "quant/quant_form.h"

typedef enum { QC_SEARCH_ONCE, QC_SEARCH_REFIT } qc_search_effort;

/* Says what is made of n elements; the arrays are the caller's. */
typedef struct {
    void *codes;   /* as `quantize` of the form writes them */
    float *absmax; /* [blocks] the scales as a reader will have them, nested or not; NF4: of either
                      sign; an all-zero block has the scale nearest to zero that its group holds.
                      By rows: [rows] */
    uint8_t *absmax_codes; /* [blocks], nested only */
    float *nested_absmax;  /* [groups], nested only */
} qc_search_out;

typedef struct {
    qc_isa isa;

    /* Takes n elements from the start of a group (nested) or of a block; only a tensor's last
     * group, or block, may be short. The sums are final, for out->absmax: max_err is the largest |x
     * - x'|, a difference of floats, where x' is what dequantizing to F32 gives; sum_ee is as close
     * as that of nf4_quantize (see qc_block_error_finish). scratch: qc_search_scratch_bytes,
     * 64-byte aligned, one per thread.
     *
     * A form by rows: n elements are whole rows. Those of int8 pass through float16 first, as in
     * int8_rows_quantize, which also has the same sums; the codes are the nearest ones for the
     * searched scale, clamped to +-127. */
    void (*blocks)(const qc_form *form, qc_search_effort effort, const void *src, qc_dtype dtype,
                   uint64_t n, const qc_search_out *out, void *scratch, qc_piece_sums *sums);
} qc_search_ops;

/* Chooses as qc_quant_ops_for does. */
const qc_search_ops *qc_search_ops_for(qc_isa isa);

uint64_t qc_search_scratch_bytes(void);

/* Return how many groups' scales give the offset of nested int8, and group i of them, 0 <= i <
 * qc_search_sample_count(groups). They are all groups of a small tensor, else an evenly spread
 * sample. The offset is qc_nested_offset over the absmax that `blocks` finds in them with nested =
 * 0, in order of i. */
uint64_t qc_search_sample_count(uint64_t groups);
uint64_t qc_search_sample_group(uint64_t groups, uint64_t i);

#endif
