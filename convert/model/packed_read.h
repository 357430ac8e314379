/* Reads weights that are stored as integers or NVFP4 with scales (recipe_packed.h) as floats: the
 * code, less its zero point, or E2M1's value of the code, times the scale of its group. The
 * difference is exact, and the product is rounded once, as is NVFP4's scale, which is one of E4M3
 * times or divided by that of the whole weight.
 *
 * GPTQ and AWQ store a weight the other way round, so that rows of the weight are columns of the
 * file. A stripe of rows is therefore read at once and kept, and what lies in it is served from
 * there. */
#ifndef QC_CONVERT_PACKED_READ_H
#define QC_CONVERT_PACKED_READ_H

#include "base/alloc.h"
#include "convert/model/recipe.h"
#include "quant/quant_ops.h"

/* Some rows of a weight, taken apart. It grows to a million codes, or to four million where rows
 * are columns of the file, whose parts are read one by one; or to 8 rows where those have more. */
typedef struct {
    const qc_coded_weight *weight; /* whose rows these are; NULL: nobody's */
    uint64_t first_row, rows;
    const qc_coded_weight *grouped; /* whose columns `groups` is about; NULL: nobody's */
    qc_buffer codes;                /* [rows, in] bytes */
    qc_buffer zeros;                /* [rows, groups] int16_t */
    qc_buffer scales;               /* [rows, groups] float */
    qc_buffer groups;               /* [in] uint32_t: the group of each column */
    qc_buffer raw;
} qc_packed_stripe;

/* A weight in codes, and how it is read. */
typedef struct {
    const qc_checkpoint *model;
    qc_st_cursor *cursor; /* reads the codes */
    qc_st_cursor *beside; /* reads scales and zero points; it may be the same */
    const qc_quant_ops *ops;
    const qc_checkpoint_tensor *t; /* the tensor of the codes */
    const qc_coded_weight *w;
} qc_coded_source;

void qc_packed_stripe_deinit(qc_packed_stripe *s);

/* Reads elements [first, first + n) of the weight, n > 0. *bad becomes the index, from first on, of
 * the first product that is too large for a float, and otherwise stays. QC_ERR_NONFINITE for a
 * scale that is not finite, QC_ERR_INPUT for one of integers that is 0 and for a column whose group
 * is not there. */
QC_NODISCARD qc_status qc_packed_read(const qc_coded_source *src, qc_packed_stripe *s,
                                      uint64_t first, uint64_t n, float *out, uint64_t *bad,
                                      qc_error *err);

#endif
