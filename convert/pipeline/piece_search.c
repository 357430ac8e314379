/* Quantizes weights whose scales are searched (--scale search, refit).
 *
 * A step is whole groups, and what the search leaves of it is what is written: nothing is done
 * again when the weight is finished. The one thing that a group takes from the rest of its weight
 * is the offset of double quantization, which is 0 in NF4. In block-wise int8 it comes from a
 * sample of groups (quant/scale_search.h), which is read before the first frame. The workers that
 * want it share the sample, a group at a time. A worker that finds no group left to take waits for
 * those who took the last ones, at most as long as one group takes. The offset depends on the
 * sampled values alone, not on who searched them. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <string.h>

static qc_search_form form_of(const qc_job *j)
{
    return (qc_search_form){.is_nf4 = j->scheme == QC_SCHEME_NF4,
                            .block_elems = j->block_elems,
                            .nested = j->nested,
                            .effort =
                                j->scale == QC_SCALE_REFIT ? QC_SEARCH_REFIT : QC_SEARCH_ONCE};
}

static uint64_t group_count(const qc_job *j)
{
    return qc_ceil_div_u64(j->elems, qc_job_group_elems(j));
}

qc_status qc_search_prepare(qc_worker *w, qc_error *err)
{
    uint64_t scratch = 0, scales = 0;
    size_t bytes = 0, count = 0;
    void *v = NULL;
    for (uint32_t i = 0; i < w->p->plan->job_count; i++) {
        const qc_job *j = &w->p->plan->jobs[i];
        if (j->scale == QC_SCALE_ABSMAX)
            continue;
        qc_search_form form = form_of(j);
        int rows = j->scheme == QC_SCHEME_INT8_ROWS;
        uint64_t need = qc_search_scratch_bytes(rows ? NULL : &form, j->cols);
        scratch = need > scratch ? need : scratch;
        if (j->nested) {
            uint64_t blocks = qc_job_step_elems(j) / j->block_elems;
            scales = blocks > scales ? blocks : scales;
            form.nested = 0; /* the sample is searched without double quantization */
            need = qc_search_scratch_bytes(&form, j->cols);
            scratch = need > scratch ? need : scratch;
        }
    }
    if (qc_u64_to_size(scratch, &bytes) || qc_u64_to_size(scales, &count))
        QC_FAIL(err, QC_ERR_NOMEM, "the scratch of a search is too large");
    if (bytes > 0) {
        QC_TRY(qc_malloc_aligned(&v, 64, bytes, err));
        w->search = v;
    }
    if (count > 0) {
        v = NULL;
        QC_TRY(qc_realloc_array(&v, count, sizeof *w->scales, err));
        w->scales = v;
    }
    return QC_OK;
}

qc_status qc_search_open(const qc_job *j, int sampled, qc_job_work *s, qc_error *err)
{
    void *v = NULL;
    uint64_t groups = group_count(j);
    QC_TRY(qc_malloc(&v, (size_t)j->blocks, err));
    s->nested_codes = v;
    v = NULL;
    QC_TRY(qc_realloc_array(&v, (size_t)groups, sizeof *s->nested_absmax, err));
    s->nested_absmax = v;
    if (!sampled || !qc_job_has_sample(j))
        return QC_OK;
    v = NULL;
    s->sample_count = qc_search_sample_count(groups);
    QC_TRY(qc_realloc_array(&v, (size_t)s->sample_count, QC_NESTED_BLOCK * sizeof(float), err));
    s->sample_absmax = v;
    atomic_init(&s->sample_next, 0);
    atomic_init(&s->sample_left, s->sample_count);
    return QC_OK;
}

/* Searches the sampled groups [first, end), which are neighbours in the weight, into sample_absmax.
 * Groups with an element that has no code count as zeros here. The step that such an element
 * belongs to refuses it, so the message always names the same one. */
static qc_status sample_groups(qc_worker *w, uint32_t job, uint64_t first, uint64_t end,
                               qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    qc_job_work *s = w->p->jobs[job].work;
    uint64_t each = qc_job_group_elems(j);
    uint64_t at = qc_search_sample_group(group_count(j), first) * each;
    uint64_t n = (end - first) * each < j->elems - at ? (end - first) * each : j->elems - at;
    uint64_t blocks = qc_ceil_div_u64(n, j->block_elems);
    qc_search_form form = form_of(j);
    form.nested = 0;
    /* w->content is free until the unit is made, and it is large enough for the codes of any
     * step. */
    qc_search_out out = {.codes = w->content, .absmax = s->sample_absmax + first * QC_NESTED_BLOCK};
    qc_piece_sums sums = {0};
    qc_error trouble = {0};
    qc_status st = qc_job_read(w, job, at, n, w->source, &trouble);
    if (st == QC_OK)
        w->p->search->blocks(&form, w->source, j->dtype, n, &out, w->search, &sums);
    if (st == QC_ERR_NONFINITE || (st == QC_OK && sums.bad != QC_BAD_NONE)) {
        memset(out.absmax, 0, (size_t)blocks * sizeof *out.absmax);
        return QC_OK;
    }
    if (st != QC_OK && err)
        *err = trouble;
    return st;
}

/* The one worker that completed the sample calls this. */
static void make_offset(qc_pipeline *p, uint32_t job)
{
    const qc_job *j = &p->plan->jobs[job];
    qc_job_work *s = p->jobs[job].work;
    uint64_t groups = group_count(j), n = s->sample_count * QC_NESTED_BLOCK;
    if (qc_search_sample_group(groups, s->sample_count - 1) == groups - 1)
        n -= groups * QC_NESTED_BLOCK - j->blocks; /* the last group may be short */
    float offset = qc_nested_offset(s->sample_absmax, n);
    qc_free(s->sample_absmax);
    s->sample_absmax = NULL;
    pthread_mutex_lock(&p->finish_lock);
    s->offset = offset;
    s->offset_ready = 1;
    pthread_cond_broadcast(&p->finish_cond);
    pthread_mutex_unlock(&p->finish_lock);
}

static qc_status wait_for_offset(qc_worker *w, const qc_job_work *s, qc_error *err)
{
    qc_pipeline *p = w->p;
    int stopped = 0;
    pthread_mutex_lock(&p->finish_lock);
    while (!s->offset_ready && !(stopped = qc_team_stopped(w->team)))
        qc_cond_wait_briefly(&p->finish_cond, &p->finish_lock);
    pthread_mutex_unlock(&p->finish_lock);
    if (stopped)
        QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
    return QC_OK;
}

qc_status qc_search_offset(qc_worker *w, uint32_t job, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    qc_job_work *s = w->p->jobs[job].work;
    uint64_t groups = group_count(j);
    /* Reading a weight that is stored transposed takes a read per column, however many rows. */
    uint64_t most = j->entry->transpose ? qc_job_step_elems(j) / qc_job_group_elems(j) : 1;
    for (;;) {
        uint64_t first = atomic_fetch_add(&s->sample_next, most);
        if (first >= s->sample_count)
            break;
        uint64_t end = first + most < s->sample_count ? first + most : s->sample_count;
        for (uint64_t from = first, to; from < end; from = to) {
            for (to = from + 1; to < end; to++)
                if (qc_search_sample_group(groups, to) !=
                    qc_search_sample_group(groups, to - 1) + 1)
                    break;
            QC_TRY(sample_groups(w, job, from, to, err));
        }
        if (atomic_fetch_sub(&s->sample_left, end - first) == end - first)
            make_offset(w->p, job);
    }
    return wait_for_offset(w, s, err);
}

void qc_search_step(qc_worker *w, uint32_t job, const void *source, uint64_t first, uint64_t n,
                    void *codes, qc_piece_sums *sums)
{
    const qc_job *j = &w->p->plan->jobs[job];
    const qc_job_work *s = w->p->jobs[job].work;
    if (j->scheme == QC_SCHEME_INT8_ROWS) {
        w->p->search->rows(source, j->dtype, n / j->cols, j->cols, codes,
                           s->absmax + first / j->cols, w->search, sums);
        return;
    }
    uint64_t block = first / j->block_elems;
    qc_search_form form = form_of(j);
    qc_search_out out = {.codes = codes};
    if (j->nested) {
        form.offset = s->offset;
        out.absmax = w->scales;
        out.absmax_codes = s->nested_codes + block;
        out.nested_absmax = s->nested_absmax + block / QC_NESTED_BLOCK;
    } else {
        out.absmax = s->absmax + block;
    }
    w->p->search->blocks(&form, source, j->dtype, n, &out, w->search, sums);
}
