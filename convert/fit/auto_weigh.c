#include "convert/fit/auto_weigh.h"

#include "base/alloc.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

static int is_wanted(const qc_auto_group *group, unsigned k)
{
    return k != QC_CANDIDATE_16BIT && !group->reason && !isnan(group->rel_mse[k]);
}

/* Asks for what is wanted, and nothing else. */
static void ask_for_costs(const qc_auto_result *r, const qc_auto_weights *w,
                          double (*costs)[QC_CANDIDATES], qc_candidate_form (*forms)[QC_CANDIDATES])
{
    for (uint32_t j = 0; j < w->plan->job_count; j++)
        for (unsigned k = 0; k < QC_CANDIDATES; k++)
            costs[j][k] = (double)NAN;
    for (uint32_t g = 0; g < r->group_count; g++)
        for (uint32_t i = w->first[g]; i < w->first[g + 1]; i++)
            for (unsigned k = 0; k < QC_CANDIDATES; k++)
                if (is_wanted(&r->groups[g], k)) {
                    costs[w->tensors[i]][k] = HUGE_VAL;
                    (void)qc_candidate_step(&r->rows[k], r->groups[g].step[k],
                                            &forms[w->tensors[i]][k]);
                }
}

/* Adds up the costs of each group's weights. Returns how many weights lack one. */
static uint32_t add_costs(qc_auto_result *r, const qc_auto_weights *w,
                          double (*const costs)[QC_CANDIDATES])
{
    uint32_t without = 0;
    for (uint32_t g = 0; g < r->group_count; g++)
        for (uint32_t i = w->first[g]; i < w->first[g + 1]; i++) {
            int lacks = 0;
            for (unsigned k = 0; k < QC_CANDIDATES; k++)
                if (is_wanted(&r->groups[g], k)) {
                    r->groups[g].cost[k] += costs[w->tensors[i]][k];
                    lacks |= isinf(costs[w->tensors[i]][k]) != 0;
                }
            without += lacks ? 1 : 0;
        }
    return without;
}

qc_status qc_auto_weigh_groups(qc_auto_result *out, const qc_auto_weights *w, qc_auto_weigh weigh,
                               qc_error *err)
{
    double(*costs)[QC_CANDIDATES] = NULL;
    qc_candidate_form(*forms)[QC_CANDIDATES] = NULL;
    uint32_t *job_of = NULL;
    QC_TRY(qc_calloc(&job_of, w->plan->model->tensor_count, sizeof *job_of, err));
    for (uint32_t j = 0; j < w->plan->job_count; j++)
        job_of[w->plan->jobs[j].source] = j;
    for (uint32_t i = 0; i < w->first[out->group_count]; i++)
        w->tensors[i] = job_of[w->tensors[i]];
    qc_free(job_of);
    QC_TRY(qc_calloc(&costs, w->plan->job_count, sizeof *costs, err));
    qc_status st = qc_calloc(&forms, w->plan->job_count, sizeof *forms, err);
    if (st == QC_OK) {
        ask_for_costs(out, w, costs, forms);
        st = weigh(costs, forms, w->plan, err);
    }
    const uint32_t without = st == QC_OK ? add_costs(out, w, costs) : 0;
    qc_free(forms);
    qc_free(costs);
    QC_TRY(st);
    out->weighed = without == 0 ? QC_WEIGHED_MOMENTS : QC_WEIGHED_ROLES;
    if (without == 0)
        return QC_OK;
    return qc_arena_printf(w->arena, &out->notes[out->note_count++], err,
                           "schemes are chosen by errors of weights alone, because %" PRIu32
                           " weight%s no second moments of inputs and outputs that could weigh "
                           "them",
                           without, without == 1 ? " has" : "s have");
}

/* ---- by traces ---- */

/* Returns what a relative error of 1 in all weights of a group costs; NaN where none has traces. */
static double cost_of_all(const qc_auto_result *r, const qc_auto_weights *w, const double *products,
                          uint32_t g)
{
    double sum = 0;
    uint32_t known = 0;
    for (uint32_t i = w->first[g]; i < w->first[g + 1]; i++)
        if (!isnan(products[w->tensors[i]])) {
            sum += products[w->tensors[i]];
            known++;
        }
    return known ? sum / known * r->groups[g].weights * r->groups[g].mean_square / 2 : (double)NAN;
}

static int compare_doubles(const void *pa, const void *pb)
{
    const double a = *(const double *)pa, b = *(const double *)pb;
    return (a > b) - (a < b);
}

qc_status qc_auto_weigh_by_traces(qc_auto_result *out, const qc_auto_weights *w,
                                  const double *products, qc_error *err)
{
    double *whole = NULL, *usual = NULL;
    uint32_t known = 0, without = 0;
    QC_TRY(qc_arena_array(w->arena, &whole, out->group_count, err));
    QC_TRY(qc_arena_array(w->arena, &usual, out->group_count, err));
    for (uint32_t g = 0; g < out->group_count; g++) {
        whole[g] = cost_of_all(out, w, products, g);
        if (!isnan(whole[g]))
            usual[known++] = whole[g] / (out->groups[g].importance * out->groups[g].weights);
        else
            without += out->groups[g].weights;
    }
    if (known == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "the file of --importance has none of the weights that are to be quantized");
    qsort(usual, known, sizeof *usual, compare_doubles);
    for (uint32_t g = 0; g < out->group_count; g++) {
        qc_auto_group *group = &out->groups[g];
        if (isnan(whole[g]))
            whole[g] = usual[known / 2] * group->importance * group->weights;
        for (unsigned k = 0; k < QC_CANDIDATES; k++)
            group->cost[k] = whole[g] * group->rel_mse[k];
    }
    out->weighed = QC_WEIGHED_TRACES;
    if (without == 0)
        return QC_OK;
    return qc_arena_printf(w->arena, &out->notes[out->note_count++], err,
                           "the file of --importance lacks %" PRIu32
                           " weight%s, which count%s as much as is usual for their roles",
                           without, without == 1 ? "" : "s", without == 1 ? "s" : "");
}
