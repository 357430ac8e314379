/* Reads weights in FP8, MXFP4, NVFP4 or integers with scales as floats. Nothing but the scratch has
 * a state, so any range of a weight can be read at any time, by any thread that has its own scratch
 * and cursor. */
#ifndef QC_CONVERT_CODED_READ_H
#define QC_CONVERT_CODED_READ_H

#include "convert/model/packed_read.h"
#include "convert/model/recipe.h"
#include "quant/quant_ops.h"

/* The buffers grow to what one read needs: the stored bytes of its elements, and their scales. */
typedef struct {
    qc_buffer codes; /* after a read of FP8 or MXFP4: the weight's stored bytes */
    size_t code_bytes;
    qc_buffer raw;    /* scales as they are stored */
    qc_buffer scales; /* as floats */
    int has_table;    /* whether there is a table with the values of table_dtype's codes */
    qc_dtype table_dtype;
    float table[256];
    qc_packed_stripe stripe; /* some rows of a weight in integers */
} qc_coded_scratch;

void qc_coded_scratch_deinit(qc_coded_scratch *s);

/* Returns the bytes that the codes of n elements fill, rounded up. */
uint64_t qc_coded_bytes(const qc_coded_weight *w, uint64_t n);

/* Reads elements [first, first + n) of the flattened weight, in order; of MXFP4, whole blocks.
 * QC_ERR_NONFINITE, with the place, for a value that is NaN, infinite or too large for a float. */
QC_NODISCARD qc_status qc_coded_read(const qc_coded_source *src, qc_coded_scratch *scratch,
                                     uint64_t first, uint64_t n, float *out, qc_error *err);

/* Reads columns [first_col, first_col + cols) of `rows` rows, from first_row on, of the flattened
 * [experts * out, in] weight into out [rows, cols]. first_col and cols are multiples of 32. For
 * MXFP4 only. */
QC_NODISCARD qc_status qc_coded_read_columns(const qc_coded_source *src, qc_coded_scratch *scratch,
                                             uint64_t first_row, uint64_t rows, uint64_t first_col,
                                             uint64_t cols, float *out, qc_error *err);

#endif
