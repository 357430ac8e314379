#include "convert/calibrate/calibrate_read.h"

#include "base/alloc.h"
#include "base/checked.h"

qc_status qc_calibrate_read(float **out, qc_calibrator *k, uint32_t number, qc_error *err)
{
    const qc_job j = qc_calibrated_weight(k->plan, number);
    qc_weight_source w;
    uint32_t matrix;
    size_t size = 0;
    (void)qc_calibrated_job(k->plan, number, &matrix);
    QC_TRY(qc_weight_source_of(&w, k->plan->model, j.source, j.entry->stored, j.entry->coded,
                               j.entry->transpose, err));
    if (!w.turned) { /* a stack as the rows of all of its matrices */
        w.ndim = 2;
        w.dims[0] = w.elems / j.form.cols;
        w.dims[1] = j.form.cols;
    }
    if (qc_u64_to_size(qc_sat_mul(j.elems, sizeof(float)), &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j.name);
    QC_TRY(qc_malloc_aligned(out, 64, size, err));
    return qc_weight_read(&k->reader, &w, matrix * j.rows, j.rows, *out, QC_DTYPE_F32, err);
}
