/* A part of a quantized weight as a weight of its own, with the same values bit for bit: for
 * tensor parallel loading, rows (outputs) of one layer and columns (inputs) of the next.
 *
 * What a cut does to scales:
 *
 *   a scale for each row     Any cut is possible. (Codes of 4 bits: at even columns.)
 *   blocks                   Where a cut falls into a block, the blocks of the slice are smaller:
 *                            the largest power of two that divides where the rows of the slice
 *                            begin and end. Their scales are repeated. 32 is the least, so a cut
 *                            at anything that does not divide by it is refused. Rows whose columns
 *                            do not divide by 32 can be cut between rows only, at every 2nd, 4th,
 *                            ..., 32nd of them.
 *   double quantized scales  Where a cut falls into a group of scales, the groups of the slice are
 *                            smaller likewise, and their scales are repeated. Where not even two
 *                            scales stay together, the slice has plain scales in float.
 *
 * Whole rows that begin with a block, and with a group of scales, need no copy. */
#ifndef QC_QUANT_WEIGHT_SLICE_H
#define QC_QUANT_WEIGHT_SLICE_H

#include "quant/quant_weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [row, row + rows), and of each the columns [col, col + cols). */
typedef struct {
    uint64_t row, rows, col, cols;
} qc_weights_part;

/* Where a part may begin: at multiples of these. One of columns ends at one, too, or with the
 * weight. */
typedef struct {
    uint64_t rows;
    uint64_t cols;          /* the whole weight's where rows cannot be cut */
    uint64_t rows_in_place; /* whole rows that begin at a multiple of this are not copied */
} qc_weights_cuts;

/* What a loader reads of a weight in a file for a part of it, so that it reads no more. The codes
 * are those of `read`, row by row, and its scales those of its elements. Where rows begin within a
 * block that no smaller one should replace, the rows before them are read, too. */
typedef struct {
    qc_weights_part read;  /* up to the last row of the part */
    uint64_t skip;         /* rows of it that do not belong to the part, at its begin */
    uint32_t block_elems;  /* block of the weight that is read; 0: a scale for each row */
    uint32_t nested_block; /* scales in a group of them there; 0: they are floats */
    uint64_t code_bytes, scales, nested_scales;
} qc_weights_read;

/* The arrays of w must be sound (qc_weights_check), here and below, but qc_weights_read_of takes a
 * weight without arrays, of which form.nested says whether it has scales that are quantized too.
 * QC_ERR_USAGE where a pointer is NULL; QC_ERR_SHAPE where the numbers of w do not fit each
 * other. */
QC_API QC_NODISCARD qc_status qc_weights_cuts_of(const qc_weights *w, qc_weights_cuts *out,
                                                 qc_error *err);

/* QC_ERR_USAGE and QC_ERR_SHAPE as qc_weights_slice_bytes. */
QC_API QC_NODISCARD qc_status qc_weights_read_of(const qc_weights *w, const qc_weights_part *part,
                                                 qc_weights_read *out, qc_error *err);

/* Sets *bytes to the memory that qc_weights_slice needs for this part: 0 where the slice lies in
 * w's arrays. QC_ERR_USAGE where the part is not within w; QC_ERR_SHAPE where a cut is not
 * possible: the message says where one is. */
QC_API QC_NODISCARD qc_status qc_weights_slice_bytes(const qc_weights *w,
                                                     const qc_weights_part *part, uint64_t *bytes,
                                                     qc_error *err);

/* Describes the part in *out. Arrays that are not those of w are written to memory, which has room
 * for the bytes above, is aligned to 64, and lives as long as *out, as do the arrays of w. The
 * arrays are those of host memory. Errors: as above, and QC_ERR_USAGE where memory is NULL and
 * bytes are needed. */
QC_API QC_NODISCARD qc_status qc_weights_slice(const qc_weights *w, const qc_weights_part *part,
                                               void *memory, qc_weights *out, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif
