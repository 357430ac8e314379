#include "convert/calibrate/calibrate_engine.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <string.h>

qc_status qc_calibrate_engine_create(qc_calibrate_engine **out, const qc_calibrate_engine_ops *ops,
                                     const qc_calibrator *k, qc_error *err)
{
    QC_TRY(qc_calloc(out, 1, ops->engine_bytes, err));
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
