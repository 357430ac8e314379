/* Reads a tensor of a checkpoint as its values, whatever they are stored as: floats, bitsandbytes'
 * and qconv's codes (recipe_stored.h), FP8, MXFP4, NVFP4 or integers with scales (recipe_coded.h).
 * The values are those that a conversion to the same dtype writes. */
#ifndef QC_CONVERT_WEIGHT_READ_H
#define QC_CONVERT_WEIGHT_READ_H

#include "convert/model/coded_read.h"
#include "convert/model/recipe.h"
#include "quant/quant_form.h"

/* A weight and how it is read. Fill it with qc_weight_source_of. */
typedef struct {
    uint32_t tensor; /* index of the tensor that has its codes or floats */
    const qc_stored_weight *stored;
    const qc_coded_weight *coded;
    int turned; /* the last two dimensions are read the other way round than they lie */
    uint64_t
        by_groups; /* a matrix whose qc_weight_elements come as AWQ makes them (awq_layout.h), in
                           groups of so many columns; 0: they come as they lie */
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS]; /* as it is read */
    uint64_t elems;
} qc_weight_source;

typedef struct {
    const qc_checkpoint *model;
    const qc_quant_ops *ops;
    qc_st_cursor *codes, *scales, *maps; /* three, so that a frame of each stays decoded */
    qc_coded_scratch coded;
    qc_buffer raw, nested, numbers, made;
    /* After qc_weight_floats, _stored and _elements: the codes of the elements as they are stored,
     * of FP8 and MXFP4 those that were read. Of integers with scales there are none. */
    const unsigned char *code;
    size_t code_bytes;
} qc_weight_reader;

/* At most one of stored and coded is not NULL; both are NULL for a tensor of floats. turned: see
 * above (qc_recipe_entry's transpose). QC_ERR_SHAPE where it has fewer than two dimensions and
 * turned is set, QC_ERR_UNSUPPORTED where its values are no floats. */
QC_NODISCARD qc_status qc_weight_source_of(qc_weight_source *out, const qc_checkpoint *model,
                                           uint32_t tensor, const qc_stored_weight *stored,
                                           const qc_coded_weight *coded, int turned, qc_error *err);

/* A reader serves one thread at a time. It is as large as a step of one row or 1 MiB takes. */
QC_NODISCARD qc_status qc_weight_reader_open(qc_weight_reader *out, const qc_checkpoint *model,
                                             qc_error *err);
void qc_weight_reader_close(qc_weight_reader *r); /* accepts a struct of zeros */

/* Reads [first, first + count) of the first of w's dimensions to out, in F32, F16 or BF16, without
 * gaps; of a scalar, first is 0 and count 1. QC_ERR_RANGE where a value is too large for the
 * dtype, QC_ERR_INTERRUPTED. */
QC_NODISCARD qc_status qc_weight_read(qc_weight_reader *r, const qc_weight_source *w,
                                      uint64_t first, uint64_t count, void *out, qc_dtype dtype,
                                      qc_error *err);

/* Reads elements [first, first + n), n > 0, of the flattened tensor in the order in which they lie,
 * as floats that the reader keeps until its next call. Only w's tensor, stored and coded count. */
QC_NODISCARD qc_status qc_weight_floats(qc_weight_reader *r, const qc_weight_source *w,
                                        uint64_t first, uint64_t n, const float **out,
                                        qc_error *err);
/* Reads elements [first, first + n), n > 0, of the flattened codes of a stored weight to dst, in
 * F32, F16 or BF16. *bad: the first, from `first` on, too large for dtype, or UINT64_MAX. */
QC_NODISCARD qc_status qc_weight_stored(qc_weight_reader *r, const qc_weight_source *w,
                                        uint64_t first, uint64_t n, void *dst, qc_dtype dtype,
                                        uint64_t *bad, qc_error *err);
/* Reads elements [first, first + n) of any other weight, in the order in which they are read, to
 * dst: as floats where they are coded, else in their own dtype. What is turned is a plain matrix
 * of floats, or a stack of such. */
QC_NODISCARD qc_status qc_weight_elements(qc_weight_reader *r, const qc_weight_source *w,
                                          uint64_t first, uint64_t n, void *dst, qc_error *err);
/* Reads elements [begin, end) of matrix number `matrix` of a weight that is turned: to out, in F32,
 * F16 or BF16. *bad becomes the first of these that is too large for dtype, and otherwise stays;
 * reading ends with it. */
QC_NODISCARD qc_status qc_weight_turned(qc_weight_reader *r, const qc_weight_source *w,
                                        uint64_t matrix, uint64_t begin, uint64_t end,
                                        unsigned char *out, qc_dtype dtype, uint64_t *bad,
                                        qc_error *err);
/* Decodes n elements, whose codes begin at `codes`, to out. The first is element `at` of those that
 * scales[0] and its successors belong to, and may lie inside a row or block. *overflow: the first
 * that is too large for dtype, or UINT64_MAX. */
void qc_weight_decode(const qc_quant_ops *ops, const qc_form *form, const unsigned char *codes,
                      const float *scales, uint64_t at, uint64_t n, void *out, qc_dtype dtype,
                      uint64_t *overflow);
/* Reads elements [first, first + n), n > 0, of a matrix of `cols` columns that lies turned in t, or
 * of a stack of such, in its dtype. */
QC_NODISCARD qc_status qc_weight_read_turned(const qc_checkpoint *model, qc_st_cursor *cursor,
                                             const qc_checkpoint_tensor *t, uint64_t cols,
                                             uint64_t first, uint64_t n, unsigned char *dst,
                                             qc_error *err);
/* Reads scales [first, first + n) in the same way. Where they are quantized, too, r->nested has
 * their own scales, from that of the first on. */
QC_NODISCARD qc_status qc_weight_scales(qc_weight_reader *r, const qc_stored_weight *w,
                                        uint64_t first, uint64_t n, const float **out,
                                        qc_error *err);

#endif
