/* Matrices of stacks of experts. A stack is quantized into one tensor, and its matrices are
 * calibrated one by one.
 *
 * With double quantization a group of QC_NESTED_BLOCK scales has a scale of its own, and a group
 * may begin in one matrix and end in the next. What such a group has in common has to be known
 * before the first of its matrices is quantized. It is taken from the blocks' largest values,
 * without data. The same holds for the offset of int8's scales, which a stack has once. Groups that
 * lie within a matrix are those of a weight by itself.
 *
 * A stack is in the store as a whole. So the matrices that too few tokens came to are there, too,
 * as the search finds them. */
#include "base/alloc.h"
#include "base/checked.h"
#include "convert/calibrate/calibrate_engine.h"
#include "quant/scale_search.h"

#include <math.h>
#include <string.h>

/* ---- groups ---- */

/* Do matrices of this weight's stack share groups of scales, or an offset of them? */
static int shares_groups(const qc_calibrator *k, uint32_t number)
{
    const qc_job j = qc_calibrated_weight(k->plan, number);
    return number >= k->plan->job_count && j.form.nested &&
           (j.scales % QC_NESTED_BLOCK != 0 || !j.form.ops->signed_scales);
}

static const qc_calibrate_groups *groups_of(const qc_calibrator *k, uint32_t job)
{
    for (uint32_t i = 0; i < k->group_count; i++)
        if (k->groups[i].job == job)
            return &k->groups[i];
    return NULL;
}

static uint64_t group_count(const qc_calibrator *k, uint32_t job)
{
    return qc_ceil_div_u64(k->plan->jobs[job].scales, QC_NESTED_BLOCK);
}

/* Takes a matrix into the groups of its stack. */
static void add_matrix(qc_calibrate_groups *g, const qc_job *j, uint32_t matrix, const float *w)
{
    const float reach = qc_form_reach(j->form.ops);
    const uint32_t block = j->form.block_elems;
    for (uint64_t b = 0; b < j->scales; b++) {
        const uint64_t group = (matrix * j->scales + b) / QC_NESTED_BLOCK;
        float largest = 0.0f;
        for (uint64_t i = 0; i < block; i++)
            largest = fmaxf(largest, fabsf(w[b * block + i]));
        largest /= reach;
        g->most[group] = fmaxf(g->most[group], largest);
        g->least[group] = fminf(g->least[group], largest);
        g->scale_sum += (double)largest;
    }
}

qc_status qc_calibrate_groups_look(qc_calibrator *k, uint32_t number, qc_error *err)
{
    uint32_t matrix;
    const uint32_t job = qc_calibrated_job(k->plan, number, &matrix);
    const qc_job j = qc_calibrated_weight(k->plan, number);
    if (!shares_groups(k, number) || groups_of(k, job))
        return QC_OK;
    const uint64_t count = group_count(k, job);
    QC_TRY(qc_realloc_array(&k->groups, k->group_count + 1, sizeof *k->groups, err));
    qc_calibrate_groups *g = &k->groups[k->group_count++];
    *g = (qc_calibrate_groups){.job = job};
    QC_TRY(qc_calloc(&g->most, (size_t)count, sizeof *g->most, err));
    QC_TRY(qc_calloc(&g->least, (size_t)count, sizeof *g->least, err));
    for (uint64_t i = 0; i < count; i++)
        g->least[i] = INFINITY;
    for (uint32_t i = 0; i < qc_calibrated_matrices(k->plan, job); i++) {
        float *w = NULL;
        qc_status st =
            qc_calibrated_original(&w, &k->reader, k->plan, k->plan->first_matrix[job] + i, err);
        if (st == QC_OK)
            add_matrix(g, &j, i, w);
        qc_free(w);
        QC_TRY(st);
    }
    return QC_OK;
}

void qc_calibrate_groups_end(qc_calibrator *k)
{
    for (uint32_t i = 0; i < k->group_count; i++) {
        qc_calibrate_groups *g = &k->groups[i];
        const qc_job *j = &k->plan->jobs[g->job];
        if (!g->least)
            continue;
        if (!j->form.ops->signed_scales) {
            g->offset = (float)(g->scale_sum / (double)j->scales);
            for (uint64_t n = 0; n < group_count(k, g->job); n++)
                g->most[n] = fmaxf(g->most[n] - g->offset, g->offset - g->least[n]);
        }
        qc_free(g->least);
        g->least = NULL;
    }
}

void qc_calibrate_groups_drop(qc_calibrator *k)
{
    for (uint32_t i = 0; i < k->group_count; i++) {
        qc_free(k->groups[i].most);
        qc_free(k->groups[i].least);
    }
    qc_free(k->groups);
    k->groups = NULL;
    k->group_count = 0;
}

qc_feedback_out qc_calibrate_out(const qc_calibrator *k, uint32_t number,
                                 const qc_calibrated_arrays *a)
{
    uint32_t matrix;
    const uint32_t job = qc_calibrated_job(k->plan, number, &matrix);
    const qc_calibrate_groups *g = groups_of(k, job);
    const qc_job j = qc_calibrated_weight(k->plan, number);
    qc_feedback_out out = {.codes = a->codes,
                           .absmax = a->absmax,
                           .absmax_codes = a->absmax_codes,
                           .nested_absmax = a->nested_absmax,
                           .lead = qc_calibrated_lead(k->plan, number)};
    if (number < k->plan->job_count || !g)
        return out;
    const uint64_t first = matrix * j.scales, end = first + j.scales;
    if (first % QC_NESTED_BLOCK != 0)
        out.ends[0] = g->most[first / QC_NESTED_BLOCK];
    if (end % QC_NESTED_BLOCK != 0 && end < k->plan->jobs[job].scales)
        out.ends[1] = g->most[end / QC_NESTED_BLOCK];
    out.offset_given = !j.form.ops->signed_scales;
    out.nested_offset = g->offset;
    return out;
}

/* ---- without a text ---- */

qc_status qc_calibrate_search(const qc_calibrator *k, uint32_t number, const float *x,
                              const qc_calibrated_arrays *a, qc_error *err)
{
    const qc_search_ops *ops = qc_search_ops_for(k->isa);
    const qc_job weight = qc_calibrated_weight(k->plan, number), *j = &weight;
    qc_form form = j->form;
    const qc_search_out out = {a->codes, a->absmax, a->absmax_codes, a->nested_absmax};
    qc_piece_sums sums = {0};
    void *scratch = NULL;
    form.nested = form.nested && form.ops->signed_scales; /* others have one offset for all */
    QC_TRY(qc_malloc_aligned(&scratch, 64, qc_search_scratch_bytes(), err));
    ops->blocks(&form, j->scale == QC_SCALE_REFIT ? QC_SEARCH_REFIT : QC_SEARCH_ONCE, x,
                QC_DTYPE_F32, j->elems, &out, scratch, &sums);
    qc_free(scratch);
    if (sums.bad != QC_BAD_NONE)
        QC_FAIL(err, QC_ERR_NONFINITE, "a weight is not finite, or too large for its form");
    return QC_OK;
}

/* As if each input came alone: the best scales for the weights, and the nearest codes. */
static qc_status weigh_alike(const qc_calibrator *k, const qc_job *j, const float *w,
                             qc_feedback_out *out, qc_error *err)
{
    qc_calibrate_engine *e = k->engine;
    const qc_form form = j->form;
    qc_feedback_options options = k->feedback;
    qc_feedback_info info;
    qc_feedback_result result;
    double *h = NULL;
    options.damping = options.damping > 0.0 ? options.damping : 1.0;
    QC_TRY(qc_calibrate_square(&h, j->form.cols, err));
    for (uint64_t i = 0; i < j->form.cols; i++)
        h[i * j->form.cols + i] = 1.0;
    qc_status st = e->ops->take(e, j->form.cols, h, NULL, err);
    if (st == QC_OK)
        st = e->ops->factor(e, &options, &info, err);
    if (st == QC_OK)
        st = e->ops->weight(e, &form, w, j->rows, NULL, out, &result, err);
    e->ops->drop(e);
    return st;
}

qc_status qc_calibrate_searched(qc_calibrator *k, uint32_t number, qc_error *err)
{
    const qc_job j = qc_calibrated_weight(k->plan, number);
    qc_calibrated_arrays a = {0};
    float *w = NULL;
    qc_status st = qc_calibrated_original(&w, &k->reader, k->plan, number, err);
    if (st != QC_OK) {
        qc_free(w);
        return st;
    }
    st = qc_calibrated_alloc(&a, k->plan, number, err);
    qc_feedback_out out = qc_calibrate_out(k, number, &a);
    if (st == QC_OK && shares_groups(k, number)) {
        st = weigh_alike(k, &j, w, &out, err);
        a.nested_offset = out.nested_offset;
    } else if (st == QC_OK) {
        st = qc_calibrate_search(k, number, w, &a, err);
    }
    const qc_feedback_result result = QC_CALIBRATED_SEARCHED;
    if (st == QC_OK)
        st = qc_calibrated_put(k->store, number, &a, &result, err);
    if (st != QC_OK) {
        char name[QC_CALIBRATED_NAME_BYTES];
        qc_error_prefix(err, "tensor '%s'", qc_calibrated_name(name, k->plan, number));
    }
    qc_calibrated_free(&a);
    qc_free(w);
    return st;
}
