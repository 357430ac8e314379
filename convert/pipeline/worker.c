/* The scratch that a worker has for itself. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <string.h>

qc_status qc_worker_init(qc_worker *w, qc_pipeline *p, qc_team *team, qc_error *err)
{
    memset(w, 0, sizeof *w);
    w->p = p;
    w->early = QC_NO_ITEM;
    w->team = team;
    size_t source = QC_SOURCE_STEP_BYTES, unit = p->unit_bytes;
    for (uint32_t i = 0; i < p->plan->job_count; i++) {
        const qc_job *j = &p->plan->jobs[i];
        /* A row has at most QC_FRAME_MAX_BYTES elements, and a group takes at most 8 MiB. */
        source = qc_max_u64(source, (uint64_t)j->step_elems * (qc_dtype_bits(j->dtype) / 8));
    }
    QC_TRY(qc_weight_reader_open(&w->reader, p->plan->model, err));
    w->reader.ops = p->ops;
    if (!p->keep_cache) {
        QC_TRY(qc_direct_create(&w->direct, err));
        qc_st_cursor_use_direct(w->reader.codes, w->direct);
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
    qc_weight_reader_close(&w->reader);
    qc_direct_destroy(w->direct);
    qc_frame_coder_destroy(w->coder);
    qc_digest_destroy(w->hash);
    qc_free(w->source);
    qc_free(w->content);
    qc_free(w->stored);
    qc_free(w->search);
    qc_free(w->scales);
    qc_free(w->made.data);
}
