/* Reading the source of a job, whichever way its weight is stored. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/checked.h"

#include <string.h>

const qc_ckpt_tensor *qc_job_source(const qc_pipeline *p, const qc_job *j)
{
    return &p->plan->model->tensors[j->source];
}

qc_status qc_worker_look_up(const qc_worker *w, qc_error *err)
{
    if (qc_team_stopped(w->team) || atomic_load_explicit(&w->p->halted, memory_order_relaxed))
        QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
    return QC_OK;
}

/* Element i of the written [rows, cols] is element (i % cols) * rows + i / cols of the stored
 * [cols, rows]. So this reads neighbouring elements of each stored row, and scatters them. */
static qc_status read_transposed(qc_worker *w, const qc_job *j, uint64_t first, uint64_t n,
                                 unsigned char *dst, qc_error *err)
{
    const qc_ckpt_tensor *t = qc_job_source(w->p, j);
    uint64_t each = qc_dtype_bits(t->dtype) / 8;
    unsigned char row[4096];
    uint64_t per_read = sizeof row / each;
    for (uint64_t k = 0; k < j->cols; k++) {
        uint64_t r = first <= k ? 0 : qc_ceil_div_u64(first - k, j->cols);
        uint64_t last = first + n - 1; /* n > 0 */
        uint64_t end = last < k ? 0 : (last - k) / j->cols + 1;
        while (r < end) {
            uint64_t count = end - r < per_read ? end - r : per_read;
            QC_TRY(qc_worker_look_up(w, err));
            QC_TRY(qc_checkpoint_read(w->p->plan->model, w->cursor, t, (k * j->rows + r) * each,
                                      row, (size_t)(count * each), err));
            for (uint64_t i = 0; i < count; i++)
                memcpy(dst + ((r + i) * j->cols + k - first) * each, row + i * each, (size_t)each);
            r += count;
        }
    }
    return QC_OK;
}

qc_status qc_job_read(qc_worker *w, uint32_t job, uint64_t first, uint64_t n, void *dst,
                      qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    const qc_ckpt_tensor *t = qc_job_source(w->p, j);
    if (n == 0)
        return QC_OK;
    if (j->entry->coded)
        return qc_coded_read(w->p->plan->model, w->cursor, w->p->ops, t, j->entry->coded, &w->coded,
                             first, n, dst, err);
    if (j->entry->transpose)
        return read_transposed(w, j, first, n, dst, err);
    uint64_t each = qc_dtype_bits(t->dtype) / 8;
    return qc_checkpoint_read(w->p->plan->model, w->cursor, t, first * each, dst,
                              (size_t)(n * each), err);
}

const unsigned char *qc_job_stored(const qc_worker *w, uint32_t job, uint64_t n, const void *read,
                                   size_t *bytes)
{
    const qc_job *j = &w->p->plan->jobs[job];
    if (j->entry->coded) {
        *bytes = w->coded.code_bytes;
        return w->coded.codes;
    }
    *bytes = (size_t)(n * (qc_dtype_bits(j->dtype) / 8));
    return read;
}

uint64_t qc_job_step_elems(const qc_job *j)
{
    uint64_t n = QC_SOURCE_STEP_BYTES / (qc_dtype_bits(j->dtype) / 8);
    if (j->scheme == QC_SCHEME_INT8_ROWS)
        return n < j->cols ? j->cols : n - n % j->cols;
    uint64_t group = qc_job_group_elems(j);
    return n < group ? group : n; /* all are powers of two */
}
