#include "convert/calibrate/calibrate_read.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/model/coded_read.h"

#include <inttypes.h>

/* Reads a matrix of a stack that is coded as floats. */
static qc_status read_coded(qc_forward_matrix *out, const qc_calibrator *k, const qc_job *j,
                            uint64_t first, qc_error *err)
{
    qc_coded_scratch scratch = {0};
    out->dtype = QC_DTYPE_F32;
    qc_status st =
        qc_coded_read(k->plan->model, k->source.cursor, k->ops, &k->plan->model->tensors[j->source],
                      j->entry->coded, &scratch, first, j->elems, out->owned, err);
    qc_coded_scratch_deinit(&scratch);
    return st;
}

static qc_status read_matrix(qc_forward_matrix *out, const qc_calibrator *k, const qc_job *j,
                             uint32_t matrix, qc_error *err)
{
    const qc_checkpoint_tensor *t = &k->plan->model->tensors[j->source];
    const uint64_t each = j->entry->coded ? sizeof(float) : qc_dtype_bits(t->dtype) / 8;
    const uint64_t bytes = qc_sat_mul(j->elems, each);
    size_t size = 0;
    if (qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j->name);
    *out = (qc_forward_matrix){.rows = j->rows, .cols = j->cols, .dtype = t->dtype};
    QC_TRY(qc_malloc_aligned(&out->owned, 64, size, err));
    out->dense = out->owned;
    if (j->entry->coded)
        return read_coded(out, k, j, matrix * j->elems, err);
    return qc_checkpoint_read(k->plan->model, k->source.cursor, t, matrix * bytes, out->owned, size,
                              err);
}

qc_status qc_calibrate_read(qc_forward_matrix *out, const qc_calibrator *k, uint32_t number,
                            qc_error *err)
{
    uint32_t matrix;
    (void)qc_calibrated_job(k->plan, number, &matrix);
    const qc_job j = qc_calibrated_weight(k->plan, number);
    if (number >= k->plan->job_count)
        return read_matrix(out, k, &j, matrix, err);
    const qc_forward_linear linear = {.tensor = j.source,
                                      .bias = UINT32_MAX,
                                      .stored = j.entry->stored,
                                      .coded = j.entry->coded,
                                      .rows = j.rows,
                                      .cols = j.cols,
                                      .turned = j.entry->transpose,
                                      .memory_bytes = qc_sat_mul(j.elems, sizeof(float))};
    return qc_forward_matrix_read(out, &k->source, &linear, err);
}
