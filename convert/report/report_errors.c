/* Takes the errors of weights against the source from what `qconv verify --against` finds
 * (against.h). */
#include "convert/pipeline/pipeline.h"
#include "convert/report/report_facts.h"
#include "convert/term/progress.h"
#include "convert/verify/against.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare_rows(const void *a, const void *b)
{
    return strcmp((*(const qc_against_row *const *)a)->name,
                  (*(const qc_against_row *const *)b)->name);
}

static const qc_against_row *find_row(const qc_against_row **sorted, size_t count, const char *name)
{
    qc_against_row key = {.name = name};
    const qc_against_row *k = &key;
    const qc_against_row **found = bsearch(&k, sorted, count, sizeof *sorted, compare_rows);
    return found ? *found : NULL;
}

/* Places are found in MODEL but reported in OUT, where a Conv1D weight lies the other way. */
static void take(qc_report_weight *w, const qc_against_row *row)
{
    const qc_stored_weight *s = w->stored;
    uint64_t cols = s->ndim ? s->dims[s->ndim - 1] : 1;
    uint64_t r = row->transpose ? row->max_col : row->max_row;
    uint64_t c = row->transpose ? row->max_row : row->max_col;
    w->fault = row->fault;
    if (!row->measured || row->kind != QC_AGAINST_QUANTIZED || !isfinite(row->error))
        return;
    w->has_error = w->has_expected = 1;
    w->rel_mse = row->error * row->error;
    w->expected = row->expected * row->expected;
    w->max_err = row->max_error;
    w->max_index = r * cols + c;
    w->clipped = row->clipped;
}

static void add_progress(void *ctx, uint64_t bytes)
{
    qc_progress_add(ctx, bytes);
}

static qc_status compare(qc_report *r, qc_against_result *result, qc_error *err)
{
    const qc_call *call = r->call;
    qc_isa isa = QC_ISA_SCALAR;
    qc_progress *progress = NULL;
    QC_TRY(qc_isa_select(&isa, err));
    QC_TRY(qc_progress_create(&progress, call, "comparing", r->facts.file_bytes, err));
    qc_against_options ao = {.ops = qc_quant_ops_for(isa),
                             .threads =
                                 call->threads ? call->threads : qc_pipeline_default_threads(0),
                             .progress = add_progress,
                             .progress_ctx = progress};
    qc_status st = qc_against_run(result, call->arena, call->model, r->facts.manifest,
                                  call->against, &ao, err);
    qc_progress_destroy(progress);
    return st;
}

qc_status qc_report_measure(qc_report *r, const qc_checkpoint *source, qc_error *err)
{
    qc_arena *arena = r->call->arena;
    void *v = NULL;
    QC_TRY(qc_arena_alloc(arena, &v, 1, sizeof(qc_against_result), err));
    qc_against_result *result = v;
    QC_TRY(compare(r, result, err));
    QC_TRY(qc_arena_alloc(arena, &v, result->count + 1, sizeof(const qc_against_row *), err));
    const qc_against_row **sorted = v;
    for (size_t i = 0; i < result->count; i++)
        sorted[i] = &result->rows[i];
    qsort(sorted, result->count, sizeof *sorted, compare_rows);
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_against_row *row = find_row(sorted, result->count, r->weights[i].name);
        r->weights[i].has_error = 0;
        if (row)
            take(&r->weights[i], row);
    }
    r->against = result;
    r->errors = QC_ERRORS_SOURCE;
    r->source_bytes = 0;
    for (size_t i = 0; i < source->file_count; i++)
        r->source_bytes += source->files[i].file_bytes;
    return QC_OK;
}
