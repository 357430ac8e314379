#include "convert/calibrate/calibrate_costs.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/calibrate/calibrate_engine.h"

#include <math.h>

unsigned qc_calibrate_costs_wanted(const qc_calibrator *k, uint32_t job)
{
    unsigned wanted = 0;
    for (unsigned c = 0; c < QC_CANDIDATES; c++)
        wanted += isinf(k->costs[job][c]) != 0;
    return wanted;
}

/* Room for the codes and scales of any candidate, which nobody reads. */
static qc_status make_room(qc_feedback_out *out, void **owned, const qc_job *j, qc_error *err)
{
    const uint64_t scales = qc_max_u64(j->rows, j->elems / 32 + 1), groups = scales / 256 + 2;
    uint64_t bytes = qc_sat_add(qc_sat_mul(qc_sat_add(scales, groups), sizeof(float)),
                                qc_sat_add(j->elems, scales));
    size_t all = 0;
    if (qc_u64_to_size(bytes, &all))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j->name);
    QC_TRY(qc_malloc_aligned(owned, 64, all, err));
    float *f = *owned;
    unsigned char *b = (unsigned char *)(f + scales + groups);
    *out = (qc_feedback_out){
        .absmax = f, .nested_absmax = f + scales, .codes = b, .absmax_codes = b + j->elems};
    return QC_OK;
}

qc_status qc_calibrate_cost(const qc_calibrator *k, uint32_t job, const float *w,
                            const qc_feedback_outputs *g, qc_error *err)
{
    const qc_job *planned = &k->plan->jobs[job];
    qc_feedback_out room;
    void *owned = NULL;
    if (!g)
        return QC_OK;
    qc_status st = make_room(&room, &owned, planned, err);
    for (unsigned c = 0; st == QC_OK && c < QC_CANDIDATES; c++) {
        qc_feedback_result result = {0};
        qc_feedback_out out = room;
        if (!isinf(k->costs[job][c]))
            continue;
        const qc_candidate *candidate = &k->candidates[c];
        const qc_scheme_row *row = &qc_schemes[candidate->scheme];
        qc_form form =
            qc_scheme_form(candidate->scheme, planned->form.cols, candidate->block_elems,
                           k->o->recipe.double_quant && !row->by_rows && !row->form->integer);
        form.scale_dtype = planned->form.scale_dtype;
        if (!form.nested)
            out.absmax_codes = NULL, out.nested_absmax = NULL;
        st = k->engine->ops->weight(k->engine, &form, w, planned->rows, g, &out, &result, err);
        k->costs[job][c] =
            result.calibrated_two_sided * result.target_two_sided / (2 * (double)k->r->tokens);
    }
    qc_free(owned);
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s'", planned->name);
    return st;
}
