/* Sums up the errors of weights to those of forms, kinds and layers. A mean of relative errors
 * counts each weight by its elements, because the manifest does not have the sums of squares. */
#include "convert/report/report_facts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare_doubles(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

/* `values` has room for all weights. */
static void sum_form(qc_report *r, uint32_t f, double *values)
{
    qc_report_form *form = &r->forms[f];
    double sum = 0.0, elems = 0.0;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *w = &r->weights[i];
        if (w->form != f)
            continue;
        form->weights++;
        form->elems += w->elems;
        form->bytes += w->bytes;
        if (!w->has_error)
            continue;
        values[form->with_error++] = w->rel_mse;
        sum += w->rel_mse * (double)w->elems;
        elems += (double)w->elems;
    }
    size_t n = form->with_error;
    if (n == 0)
        return;
    qsort(values, n, sizeof *values, compare_doubles);
    form->mean = elems > 0 ? sum / elems : 0.0;
    form->least = values[0];
    form->most = values[n - 1];
    form->median = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* elems is [kind_count], with zeros; it gets the elements of weights with an error. */
static void sum_kinds(qc_report *r, double *elems)
{
    for (uint32_t i = 0; i < r->weight_count; i++) {
        qc_report_weight *w = &r->weights[i];
        qc_report_kind *k = &r->kinds[w->kind];
        double median = r->forms[w->form].median;
        k->weights++;
        k->elems += w->elems;
        k->bytes += w->bytes;
        if (!w->has_error)
            continue;
        w->over_median = median > 0 ? w->rel_mse / median : 0.0;
        k->mean += w->rel_mse * (double)w->elems; /* divided below */
        elems[w->kind] += (double)w->elems;
        if (k->with_error == 0 || w->rel_mse > k->most) {
            k->most = w->rel_mse;
            k->most_of = i;
        }
        if (k->with_error == 0 || w->max_err > k->max_err) {
            k->max_err = w->max_err;
            k->max_of = i;
        }
        k->with_error++;
    }
    for (uint32_t k = 0; k < r->kind_count; k++)
        r->kinds[k].mean = elems[k] > 0 ? r->kinds[k].mean / elems[k] : 0.0;
}

static uint32_t series_of(const qc_report *r, uint32_t kind)
{
    uint32_t s = 0;
    for (uint32_t k = 1; k <= kind; k++)
        s += strcmp(r->kinds[k].name, r->kinds[k - 1].name) != 0;
    return s;
}

static void add_to_cell(qc_report_cell *c, const qc_report_weight *w)
{
    double elems = (double)c->elems, more = (double)w->elems;
    if (c->count == 0) {
        c->form = w->form;
        c->least = c->most = w->rel_mse;
    }
    c->mixed |= c->form != w->form;
    c->least = w->rel_mse < c->least ? w->rel_mse : c->least;
    c->most = w->rel_mse > c->most ? w->rel_mse : c->most;
    c->mean = elems + more > 0 ? (c->mean * elems + w->rel_mse * more) / (elems + more) : 0.0;
    c->elems += w->elems;
    c->count++;
}

static qc_status sum_cells(qc_report *r, qc_error *err)
{
    void *v = NULL;
    /* Where there are so many cells, the names have no order, and there would be nothing to see. */
    if ((uint64_t)r->series_count * r->layer_count > QC_REPORT_MAX_CELLS)
        return QC_OK;
    QC_TRY(qc_arena_alloc(r->call->arena, &v, (size_t)r->kind_count + 1, sizeof(uint32_t), err));
    uint32_t *series = v;
    for (uint32_t k = 0; k < r->kind_count; k++)
        series[k] = series_of(r, k);
    QC_TRY(qc_arena_alloc(r->call->arena, &v, (size_t)r->series_count * r->layer_count + 1,
                          sizeof *r->cells, err));
    r->cells = v;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *w = &r->weights[i];
        if (w->has_error && w->layer != QC_REPORT_NO_LAYER)
            add_to_cell(&r->cells[(size_t)series[w->kind] * r->layer_count + w->layer], w);
    }
    return QC_OK;
}

typedef struct {
    double rel_mse;
    uint32_t weight;
} ranked;

static int compare_ranked(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->rel_mse != y->rel_mse)
        return x->rel_mse > y->rel_mse ? -1 : 1;
    return x->weight < y->weight ? -1 : 1;
}

static qc_status rank(qc_report *r, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_arena_alloc(r->call->arena, &v, (size_t)r->weight_count + 1, sizeof *r->worst, err));
    r->worst = v;
    QC_TRY(qc_arena_alloc(r->call->arena, &v, (size_t)r->weight_count + 1, sizeof(ranked), err));
    ranked *order = v;
    for (uint32_t i = 0; i < r->weight_count; i++)
        if (r->weights[i].has_error)
            order[r->worst_count++] = (ranked){r->weights[i].rel_mse, i};
    qsort(order, r->worst_count, sizeof *order, compare_ranked);
    for (uint32_t i = 0; i < r->worst_count; i++)
        r->worst[i] = order[i].weight;
    return QC_OK;
}

qc_status qc_report_sum_up(qc_report *r, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_arena_alloc(r->call->arena, &v, (size_t)r->weight_count + 1, sizeof(double), err));
    for (uint32_t f = 0; f < r->form_count; f++)
        sum_form(r, f, v);
    QC_TRY(qc_arena_alloc(r->call->arena, &v, (size_t)r->kind_count + 1, sizeof(double), err));
    sum_kinds(r, v);
    QC_TRY(sum_cells(r, err));
    QC_TRY(rank(r, err));
    if (r->worst_count < r->weight_count && !r->no_errors)
        r->no_errors =
            r->errors == QC_ERRORS_NONE ? "there is no manifest, and no --against to compare with"
            : r->errors == QC_ERRORS_SOURCE ? "the source has nothing to compare them with"
                                            : "the manifest has none for them";
    return QC_OK;
}
