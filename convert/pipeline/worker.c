/* The scratch that a worker has for itself. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <string.h>

static qc_status row_bytes(const qc_job *j, size_t *out, qc_error *err)
{
    if (qc_u64_to_size(2 * j->cols, out))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s': a row is too long", j->name);
    return QC_OK;
}

qc_status qc_worker_init(qc_worker *w, qc_pipeline *p, qc_team *team, qc_error *err)
{
    memset(w, 0, sizeof *w);
    w->p = p;
    w->early = QC_NO_ITEM;
    w->team = team;
    size_t source = QC_SOURCE_STEP_BYTES, unit = p->unit_bytes;
    for (uint32_t i = 0; i < p->plan->job_count; i++) {
        const qc_job *j = &p->plan->jobs[i];
        uint64_t each = qc_dtype_bits(j->dtype) / 8;
        if (qc_schemes[j->scheme].by_rows && j->cols * each > source)
            source = (size_t)(j->cols * each); /* cols is at most QC_FRAME_MAX_BYTES */
        /* A group of searched scales takes at most 8 MiB. */
        if (j->blocks > 0 && qc_job_step_elems(j) * each > source)
            source = (size_t)(qc_job_step_elems(j) * each);
        /* A stack of experts needs a row of codes and a block of them before it. */
        if (j->scheme == QC_SCHEME_DEQUANT && j->entry->transpose && 2 * j->cols > source)
            QC_TRY(row_bytes(j, &source, err));
    }
    QC_TRY(qc_st_cursor_create(&w->cursor, err));
    if (!p->keep_cache) {
        QC_TRY(qc_direct_create(&w->direct, err));
        qc_st_cursor_use_direct(w->cursor, w->direct);
    }
    QC_TRY(qc_frame_coder_create(&w->coder, err));
    QC_TRY(qc_digest_create(&w->hash, err));
    QC_TRY(qc_malloc_aligned(&w->source, 4096, source, err));
    QC_TRY(qc_malloc_aligned(&w->content, 4096, unit, err));
    if (qc_pipeline_is_compressed(p)) {
        QC_TRY(qc_malloc_aligned(&w->stored, 4096, qc_frame_bound(unit), err));
    }
    return qc_search_prepare(w, err);
}

void qc_worker_deinit(qc_worker *w)
{
    qc_worker_leave_gpu(w);
    qc_st_cursor_destroy(w->cursor);
    qc_direct_destroy(w->direct);
    qc_frame_coder_destroy(w->coder);
    qc_digest_destroy(w->hash);
    qc_free(w->source);
    qc_free(w->content);
    qc_free(w->stored);
    qc_free(w->search);
    qc_free(w->scales);
    qc_coded_scratch_deinit(&w->coded);
}
