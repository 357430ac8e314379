/* What is kept of a job from its first unit on until its last derived tensor is written. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"

qc_status qc_job_need_work(qc_job_state *s, qc_error *err)
{
    void *v = s->work;
    if (!v)
        QC_TRY(qc_calloc(&v, 1, sizeof *s->work, err));
    s->work = v;
    return QC_OK;
}

void qc_job_release(qc_job_state *s)
{
    qc_job_work *w = s->work;
    if (!w)
        return;
    qc_free(w->sums);
    qc_free(w->absmax);
    qc_free(w->block_errors);
    qc_free(w->sample_absmax);
    qc_free(w->nested_codes);
    qc_free(w->nested_absmax);
    qc_free(w->state_json);
    qc_free(w);
    s->work = NULL;
}

const void *qc_job_part(const qc_pipeline *p, uint32_t job, qc_part part)
{
    static const unsigned char row_major = 0;
    static const qc_job_work none;
    const qc_job_work *s = p->jobs[job].work ? p->jobs[job].work : &none;
    switch (part) {
    case QC_PART_ABSMAX:
        return p->plan->jobs[job].nested ? (const void *)s->nested_codes : s->absmax;
    case QC_PART_QUANT_MAP:
        return qc_nf4_code;
    case QC_PART_NESTED_ABSMAX:
        return s->nested_absmax;
    case QC_PART_NESTED_MAP:
        return qc_dynamic_map;
    case QC_PART_STATE:
        return s->state_json;
    case QC_PART_SCB:
        return s->absmax;
    case QC_PART_FORMAT:
        return &row_major;
    case QC_PART_MAIN:
    case QC_PART_COUNT:
        break;
    }
    return NULL;
}

int qc_job_part_is_own(qc_part part)
{
    return part == QC_PART_ABSMAX || part == QC_PART_NESTED_ABSMAX || part == QC_PART_STATE ||
           part == QC_PART_SCB;
}
