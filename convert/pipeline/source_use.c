#include "convert/pipeline/source_use.h"

#include "convert/model/recipe_coded.h"

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
    if (coded && qc_coding_is_packed(coded->coding)) {
        if (coded->zeros != UINT32_MAX)
            add_once(out, &count, coded->zeros);
        if (coded->group_index != UINT32_MAX)
            add_once(out, &count, coded->group_index);
        if (coded->coding == QC_CODING_NVFP4)
            add_once(out, &count, coded->global);
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

qc_status qc_source_files_look(const qc_plan *plan, uint32_t job, qc_error *err)
{
    uint32_t tensors[QC_JOB_TENSORS_MAX], files[QC_JOB_TENSORS_MAX];
    const qc_job *j = &plan->jobs[job];
    const size_t count = j->elems > 0 ? qc_job_tensors(j, tensors) : 0;
    size_t file_count = 0;
    for (size_t i = 0; i < count; i++)
        add_once(files, &file_count, plan->model->tensors[tensors[i]].file);
    for (size_t i = 0; i < file_count; i++)
        QC_TRY(qc_checkpoint_check_unchanged(plan->model, files[i], err));
    return QC_OK;
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
    return qc_error_pass(err, &why, QC_ERR_CHANGED);
}
