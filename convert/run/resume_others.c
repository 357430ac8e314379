/* Reads the journals of other parts of the same conversion. */
#include "convert/run/resume_internal.h"

#include "base/alloc.h"

#include <string.h>

int qc_resume_is_done(const qc_resume *r)
{
    if (!r->found.done || !r->has_times)
        return 0;
    for (size_t i = 0; i < r->p->plan->model->file_count; i++) {
        if (r->times[i] != r->times_now[i])
            return 0;
    }
    return 1;
}

static qc_status compare_times(const qc_resume *r, const qc_resume *other, unsigned part_index,
                               qc_error *err)
{
    const qc_checkpoint *m = r->p->plan->model;
    for (size_t i = 0; other->has_times && i < m->file_count; i++) {
        if (other->times[i] != r->times_now[i])
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: was modified since part %u read it; start part %u again, it compares what "
                    "it read with what is there now",
                    m->files[i].path, part_index + 1, part_index + 1);
    }
    return QC_OK;
}

qc_status qc_resume_take_part(qc_resume *r, unsigned part_index, unsigned part_count,
                              int same_times, qc_resume_found *found, qc_error *err)
{
    qc_resume other = {.p = r->p, .d = r->d, .identity = r->identity};
    const char *name = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    void *v = NULL;
    memset(found, 0, sizeof *found);
    qc_arena_init(&other.arena);
    qc_status st =
        qc_arena_printf(&other.arena, &name, err, QC_JOURNAL_NAME, part_index + 1, part_count);
    if (st == QC_OK)
        st = qc_path_join(&other.arena, &other.path, r->d->staging, name, err);
    if (st == QC_OK)
        st = qc_path_stat(other.path, &kind, NULL, err);
    if (st == QC_OK && kind != QC_PATH_MISSING)
        st = qc_arena_alloc(&other.arena, &v, r->p->plan->model->file_count, sizeof *other.times,
                            err);
    other.times = v;
    if (st == QC_OK && kind != QC_PATH_MISSING)
        st = qc_journal_read(other.path, qc_resume_take_record, &other, NULL, err);
    if (st == QC_OK && other.found.done && same_times)
        st = compare_times(r, &other, part_index, err);
    if (st == QC_OK)
        *found = other.found;
    qc_free(other.others);
    qc_arena_deinit(&other.arena);
    return st;
}
