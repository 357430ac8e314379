/* Packed weights: which there can be, and how many bytes they take. */
#include "kernels/matmul_packed.h"

#include "base/checked.h"

int qc_packed_takes(const qc_weights *w)
{
    return w->rows && w->form.cols && w->form.cols % QC_PACKED_COLS == 0 && !w->form.ops->integer &&
           (qc_form_by_rows(&w->form) || w->form.block_elems >= QC_PACKED_COLS);
}

int qc_packed_has_scales(const qc_weights *w)
{
    return qc_packed_takes(w) && !w->absmax && w->form.block_elems == QC_PACKED_COLS &&
           w->nested_block >= QC_PACKED_SCALES &&
           w->form.cols % (QC_PACKED_COLS * QC_PACKED_SCALES) == 0;
}

static uint64_t bands_of(const qc_weights *w)
{
    return qc_ceil_div_u64(w->rows, QC_PACKED_ROWS);
}

uint64_t qc_packed_code_bytes(const qc_weights *w)
{
    return qc_sat_mul(bands_of(w), qc_sat_mul(w->form.cols / QC_PACKED_COLS,
                                              QC_PACKED_BLOCK_BYTES(w->form.ops->bits)));
}

uint64_t qc_packed_scale_bytes(const qc_weights *w)
{
    if (!qc_packed_has_scales(w))
        return 0;
    return qc_sat_mul(bands_of(w), qc_sat_mul(w->form.cols / (QC_PACKED_COLS * QC_PACKED_SCALES),
                                              QC_PACKED_SCALE_BYTES));
}
