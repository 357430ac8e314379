#include "convert/pipeline/source_use.h"

#include "base/alloc.h"
#include "convert/model/recipe_coded.h"

#include <string.h>

static void add_once(uint32_t *list, size_t *count, uint32_t v)
{
    for (size_t i = 0; i < *count; i++) {
        if (list[i] == v)
            return;
    }
    list[(*count)++] = v;
}

size_t qc_job_tensors(const qc_job *j, uint32_t out[QC_JOB_TENSORS_MAX])
{
    size_t count = 0;
    const qc_coded_weight *coded = j->entry->coded;
    const qc_stored_weight *stored = j->entry->stored;
    add_once(out, &count, j->source);
    if (coded && coded->scales != UINT32_MAX)
        add_once(out, &count, coded->scales);
    if (coded && qc_coding_is_integer(coded->coding)) {
        if (coded->zeros != UINT32_MAX)
            add_once(out, &count, coded->zeros);
        if (coded->group_index != UINT32_MAX)
            add_once(out, &count, coded->group_index);
    }
    if (stored) {
        const uint32_t parts[] = {stored->absmax, stored->quant_map, stored->nested_absmax,
                                  stored->nested_map};
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            if (parts[i] != UINT32_MAX)
                add_once(out, &count, parts[i]);
        }
    }
    return count;
}

size_t qc_job_files(const qc_plan *plan, uint32_t job, uint32_t out[QC_JOB_TENSORS_MAX])
{
    uint32_t tensors[QC_JOB_TENSORS_MAX];
    const qc_job *j = &plan->jobs[job];
    size_t files = 0;
    if (j->elems == 0)
        return 0;
    size_t count = qc_job_tensors(j, tensors);
    for (size_t i = 0; i < count; i++)
        add_once(out, &files, plan->model->tensors[tensors[i]].file);
    return files;
}

qc_status qc_source_files_init(qc_source_files *s, const qc_plan *plan, qc_error *err)
{
    memset(s, 0, sizeof *s);
    QC_TRY(qc_calloc(&s->files, plan->model->file_count, sizeof *s->files, err));
    s->plan = plan;
    for (size_t i = 0; i < plan->model->file_count; i++) {
        atomic_init(&s->files[i].left, 0);
        atomic_init(&s->files[i].recorded_end, 0);
    }
    for (uint32_t job = 0; job < plan->job_count; job++) {
        uint32_t files[QC_JOB_TENSORS_MAX];
        size_t count = qc_job_files(plan, job, files);
        for (size_t i = 0; i < count; i++)
            atomic_fetch_add(&s->files[files[i]].left, 1);
    }
    return QC_OK;
}

void qc_source_files_deinit(qc_source_files *s)
{
    qc_free(s->files);
    memset(s, 0, sizeof *s);
}

qc_status qc_source_files_look(const qc_source_files *s, uint32_t job, qc_error *err)
{
    uint32_t files[QC_JOB_TENSORS_MAX];
    size_t count = qc_job_files(s->plan, job, files);
    for (size_t i = 0; i < count; i++)
        QC_TRY(qc_checkpoint_check_unchanged(s->plan->model, files[i], err));
    return QC_OK;
}

void qc_source_files_done(qc_source_files *s, uint32_t job, uint64_t recorded_end)
{
    uint32_t files[QC_JOB_TENSORS_MAX];
    size_t count = qc_job_files(s->plan, job, files);
    for (size_t i = 0; i < count; i++) {
        qc_source_file *f = &s->files[files[i]];
        uint_fast64_t last = atomic_load(&f->recorded_end);
        while (last < recorded_end &&
               !atomic_compare_exchange_weak(&f->recorded_end, &last, recorded_end))
            continue;
        atomic_fetch_sub(&f->left, 1);
    }
}

int qc_source_files_is_done(const qc_source_files *s, size_t file, uint64_t journal_bytes)
{
    const qc_source_file *f = &s->files[file];
    return atomic_load(&f->left) == 0 && atomic_load(&f->recorded_end) <= journal_bytes;
}

qc_status qc_source_files_check(const qc_plan *plan, qc_error *err)
{
    for (size_t i = 0; i < plan->model->file_count; i++)
        QC_TRY(qc_checkpoint_check_unchanged(plan->model, i, err));
    return QC_OK;
}

qc_status qc_source_files_explain(const qc_plan *plan, qc_status failed, qc_error *err)
{
    qc_error why = {0};
    if (failed != QC_ERR_TRUNCATED && failed != QC_ERR_INPUT && failed != QC_ERR_NONFINITE &&
        failed != QC_ERR_RANGE && failed != QC_ERR_UNSUPPORTED)
        return failed;
    if (qc_source_files_check(plan, &why) != QC_ERR_CHANGED)
        return failed;
    if (err)
        *err = why;
    return QC_ERR_CHANGED;
}
