/* Errors of weights against the source: those of validate (validate_layer.h), weights only. */
#include "base/workers.h"
#include "convert/report_facts.h"
#include "convert/validate_layer.h"

#include <string.h>

typedef struct {
    qc_report *r;
    qc_validate_pairs pairs;
    qc_validate_tools tools;
    qc_validate_input input;
    qc_st_cursor *cursor;
} measuring;

static qc_report_weight *weight_of(qc_report *r, uint32_t tensor)
{
    for (uint32_t i = 0; i < r->weight_count; i++)
        if (r->weights[i].tensor == tensor)
            return &r->weights[i];
    return NULL;
}

/* Validate's places are those of MODEL, ours those of OUT: a Conv1D weight lies the other way. */
static void take(qc_report_weight *w, const qc_validate_pair *p, const qc_validate_layer *l)
{
    uint64_t row = p->transpose ? l->max_col : l->max_row;
    uint64_t col = p->transpose ? l->max_row : l->max_col;
    w->has_error = 1;
    w->rel_mse = l->weight_error * l->weight_error;
    w->max_err = l->weight_max;
    w->max_index = row * p->cols + col;
}

static qc_status measure_pair(measuring *m, const qc_validate_pair *p, qc_error *err)
{
    qc_validate_weights w = {0};
    qc_validate_layer l = {.pair = p};
    qc_status st = qc_validate_weights_read(&w, m->tools.output, p, m->cursor, err);
    if (st == QC_OK)
        st = qc_validate_input_make(&m->input, p->name, qc_validate_x_dtype(p->dtype), 1, p->cols,
                                    err);
    if (st == QC_OK)
        st = qc_validate_measure(&l, &m->tools, p, &w.w, &m->input, err);
    if (st == QC_OK)
        take(weight_of(m->r, p->out_tensor), p, &l);
    qc_validate_weights_deinit(&w);
    return st;
}

static qc_status measure_all(measuring *m, qc_error *err)
{
    qc_report *r = m->r;
    uint64_t total = 0;
    for (size_t i = 0; i < m->pairs.count; i++)
        if (!m->pairs.pairs[i].why_not)
            total += m->tools.model->tensors[m->pairs.pairs[i].model_tensor].bytes;
    QC_TRY(qc_progress_create(&m->tools.progress, r->o, "comparing", total, err));
    qc_status st = QC_OK;
    for (size_t i = 0; st == QC_OK && i < m->pairs.count; i++) {
        const qc_validate_pair *p = &m->pairs.pairs[i];
        if (p->why_not)
            r->no_errors = p->why_not;
        else if (p->rows > 0 && p->cols > 0)
            st = measure_pair(m, p, err);
    }
    if (st == QC_OK && qc_interrupted())
        st = qc_error_set(err, QC_ERR_INTERRUPTED, __FILE__, __LINE__, "interrupted");
    qc_progress_destroy(m->tools.progress);
    return st;
}

qc_status qc_report_measure(qc_report *r, const qc_checkpoint *source, qc_error *err)
{
    qc_isa isa = QC_ISA_SCALAR;
    measuring m = {.r = r};
    QC_TRY(qc_isa_select(&isa, err));
    QC_TRY(
        qc_validate_pair_up(&m.pairs, r->o->arena, r->facts.model, r->facts.manifest, source, err));
    m.tools = (qc_validate_tools){.output = r->facts.model,
                                  .model = source,
                                  .ops = qc_quant_ops_for(isa),
                                  .matmul = qc_matmul_ops_for(isa),
                                  .threads = r->o->threads ? r->o->threads : qc_cpu_count(),
                                  .weights_only = 1};
    for (uint32_t i = 0; i < r->weight_count; i++)
        r->weights[i].has_error = 0;
    r->errors = QC_ERRORS_SOURCE;
    r->source_bytes = 0;
    for (size_t i = 0; i < source->file_count; i++)
        r->source_bytes += source->files[i].file_bytes;
    qc_status st = qc_validate_input_open(&m.input, NULL, r->o->seed, m.tools.ops, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&m.cursor, err);
    if (st == QC_OK)
        st = measure_all(&m, err);
    qc_st_cursor_destroy(m.cursor);
    qc_validate_input_close(&m.input);
    return st;
}
