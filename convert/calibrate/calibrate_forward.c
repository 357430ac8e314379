#include "convert/calibrate/calibrate_forward.h"

#include "base/alloc.h"
#include "base/checked.h"

/* A weight as floats. Free *owned, which is NULL where w is floats already. */
static qc_status floats_of(const qc_quant_ops *ops, const qc_forward_matrix *w, const float **out,
                           void **owned, qc_error *err)
{
    uint64_t overflow = 0, bytes = 0;
    size_t size = 0;
    *owned = NULL;
    if (!w->quantized && w->dtype == QC_DTYPE_F32) {
        *out = w->dense;
        return QC_OK;
    }
    if (qc_mul_u64(w->rows, w->cols, &bytes) || qc_mul_u64(bytes, sizeof(float), &bytes) ||
        qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the weight is too large for memory");
    QC_TRY(qc_malloc_aligned(owned, 64, size, err));
    float *f = *owned;
    if (w->quantized)
        for (uint64_t row = 0; row < w->rows; row++)
            qc_weights_row(ops, w->quantized, row, f + row * w->cols);
    else
        ops->cast(w->dense, w->dtype, w->rows * w->cols, f, QC_DTYPE_F32, &overflow);
    *out = f;
    return QC_OK;
}

qc_status qc_calibrate_forward_weight(const qc_calibrator *k, uint32_t number,
                                      const qc_forward_matrix *w, const qc_feedback_outputs *g,
                                      qc_calibrated_arrays *arrays, qc_error *err)
{
    const float *x = NULL;
    void *owned = NULL;
    qc_status st = floats_of(k->ops, w, &x, &owned, err);
    if (st == QC_OK)
        st = qc_calibrate_weight(k, number, x, g, arrays, err);
    qc_free(owned);
    return st;
}

qc_status qc_calibrate_forward_searched(const qc_calibrator *k, uint32_t number,
                                        const qc_forward_matrix *w, qc_error *err)
{
    const float *x = NULL;
    void *owned = NULL;
    qc_status st = floats_of(k->ops, w, &x, &owned, err);
    if (st == QC_OK)
        st = qc_calibrate_searched(k, number, x, err);
    qc_free(owned);
    return st;
}

qc_status qc_calibrate_forward_groups_add(qc_calibrator *k, uint32_t number,
                                          const qc_forward_matrix *w, qc_error *err)
{
    const float *x = NULL;
    void *owned = NULL;
    qc_status st = floats_of(k->ops, w, &x, &owned, err);
    if (st == QC_OK)
        st = qc_calibrate_groups_add(k, number, x, err);
    qc_free(owned);
    return st;
}
