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

qc_status qc_calibrate_cost(const qc_calibrator *k, uint32_t job, const float *w,
                            const qc_feedback_outputs *g, qc_error *err)
{
    qc_status st = QC_OK;
    for (unsigned c = 0; st == QC_OK && g && c < QC_CANDIDATES; c++) {
        qc_job j = k->plan->jobs[job];
        qc_calibrated_arrays arrays = {0}; /* nobody reads them */
        qc_feedback_result result = {0};
        if (!isinf(k->costs[job][c]))
            continue;
        qc_job_set_form(&j, k->candidates[c].scheme, k->candidates[c].block_elems,
                        k->o->recipe.double_quant);
        st = qc_calibrated_alloc_job(&arrays, &j, 0, err);
        qc_feedback_out out = qc_calibrate_out(k, job, &arrays);
        if (st == QC_OK)
            st = k->engine->ops->weight(k->engine, &j.form, w, j.rows, g, &out, &result, err);
        qc_calibrated_free(&arrays);
        k->costs[job][c] =
            result.calibrated_two_sided * result.target_two_sided / (2 * (double)k->r->tokens);
    }
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s'", k->plan->jobs[job].name);
    return st;
}
