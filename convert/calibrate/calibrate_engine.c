#include "convert/calibrate/calibrate_engine.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <string.h>

qc_status qc_calibrate_engine_create(qc_calibrate_engine **out, const qc_calibrate_engine_ops *ops,
                                     const qc_calibrator *k, qc_error *err)
{
    QC_TRY(qc_calloc(out, 1, ops->bytes, err));
    **out = (qc_calibrate_engine){ops, k};
    return QC_OK;
}

void qc_calibrate_engine_destroy(qc_calibrate_engine *e)
{
    if (!e)
        return;
    e->ops->close(e);
    qc_free(e);
}

uint64_t qc_calibrate_square_bytes(uint64_t n)
{
    return qc_sat_mul(qc_sat_mul(n, n), sizeof(double));
}

qc_status qc_calibrate_square(double **out, uint64_t n, qc_error *err)
{
    uint64_t bytes = qc_calibrate_square_bytes(n);
    size_t size = 0;
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "second moments of %" PRIu64 " inputs do not fit memory", n);
    QC_TRY(qc_malloc_aligned(out, 64, size, err));
    memset(*out, 0, size);
    return QC_OK;
}

qc_status qc_calibrate_floats(const qc_quant_ops *ops, const qc_forward_matrix *w,
                              const float **out, void **owned, qc_error *err)
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
