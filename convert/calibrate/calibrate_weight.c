/* Takes one weight, or those with the same inputs, from second moments to the store. */
#include "base/alloc.h"
#include "base/checked.h"
#include "convert/calibrate/calibrate_engine.h"
#include "convert/term/console.h"
#include "quant/matmul_ops.h"

#include <inttypes.h>
#include <string.h>

/* ---- sizes and times ---- */

uint64_t qc_calibrate_square_bytes(uint64_t n)
{
    return qc_sat_mul(qc_sat_mul(n, n), sizeof(double));
}

qc_status qc_calibrate_square(double **out, uint64_t n, qc_error *err)
{
    uint64_t bytes = qc_calibrate_square_bytes(n);
    size_t size = 0;
    void *v = NULL;
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "second moments of %" PRIu64 " inputs do not fit memory", n);
    QC_TRY(qc_malloc_aligned(&v, 64, size, err));
    memset(v, 0, size);
    *out = v;
    return QC_OK;
}

double qc_calibrate_factor_seconds(const qc_calibrator *k, uint64_t n, int cross)
{
    return qc_feedback_open_flops(n, cross) * k->factor_seconds;
}

double qc_calibrate_weight_seconds(const qc_calibrator *k, uint32_t job, int cross)
{
    const qc_job *j = &k->plan->jobs[job];
    return qc_feedback_weight_flops(j->rows, j->cols, cross, &k->feedback) * k->weight_seconds;
}

void qc_calibrate_progress(const qc_calibrator *k, double seconds)
{
    qc_progress_add(k->progress, (uint64_t)(seconds * 1e6 + 0.5));
}

/* ---- making ---- */

qc_status qc_calibrate_factor(const qc_calibrator *k, uint64_t n, int cross, uint64_t tokens,
                              const char *name, qc_error *err)
{
    qc_feedback_options options = k->feedback;
    qc_feedback_info info;
    if (options.damping == 0.0)
        options.damping = qc_feedback_damping(n, tokens);
    qc_status st = k->engine->ops->factor(k->engine, &options, &info, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "inputs of '%s'", name);
        return st;
    }
    if (info.times_raised > 0)
        qc_console_warn(k->plan->call,
                        "inputs of '%s': their second moments have no factor with damping %g; "
                        "raised to %g",
                        name, options.damping, info.damping);
    if (info.dead > 0)
        qc_console_detail(k->plan->call, 1,
                          "inputs of '%s': %" PRIu64 " of %" PRIu64
                          " are zero in every token; their weights are rounded to nearest",
                          name, info.dead, n);
    qc_calibrate_progress(k, qc_calibrate_factor_seconds(k, n, cross));
    return QC_OK;
}

qc_feedback_form qc_calibrate_form(const qc_job *j)
{
    qc_feedback_form f = {.kind = j->scheme == QC_SCHEME_NF4         ? QC_WEIGHTS_NF4
                                  : j->scheme == QC_SCHEME_INT8_ROWS ? QC_WEIGHTS_INT8_ROWS
                                                                     : QC_WEIGHTS_INT8_BLOCKS};
    f.block_elems = f.kind == QC_WEIGHTS_INT8_ROWS ? 0 : j->block_elems;
    f.nested = j->nested;
    return f;
}

qc_status qc_calibrate_floats(const qc_quant_ops *ops, const qc_llama_matrix *w, const float **out,
                              void **owned, qc_error *err)
{
    uint64_t overflow = 0, bytes = 0;
    size_t size = 0;
    *owned = NULL;
    if (!w->quantized && w->dtype == QC_DTYPE_F32) {
        *out = w->dense;
        return QC_OK;
    }
    if (qc_mul_u64(w->rows, w->cols, &bytes) || qc_mul_u64(bytes, sizeof(float), &bytes) ||
        qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the weight is too large for memory");
    QC_TRY(qc_malloc_aligned(owned, 64, size, err));
    float *f = *owned;
    if (w->quantized)
        for (uint64_t row = 0; row < w->rows; row++)
            qc_weights_row(ops, w->quantized, row, f + row * w->cols);
    else
        ops->cast(w->dense, w->dtype, w->rows * w->cols, f, QC_DTYPE_F32, &overflow);
    *out = f;
    return QC_OK;
}

qc_status qc_calibrate_weight(const qc_calibrator *k, uint32_t job, const qc_llama_matrix *w,
                              qc_calibrated_arrays *arrays, qc_error *err)
{
    const qc_job *j = &k->plan->jobs[job];
    const qc_feedback_form form = qc_calibrate_form(j);
    qc_feedback_result result = {0};
    if (j->rows != w->rows || j->cols != w->cols)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' is planned in another shape", j->name);
    QC_TRY(qc_calibrated_alloc(arrays, k->plan, job, err));
    qc_feedback_out out = {.codes = arrays->codes,
                           .absmax = arrays->absmax,
                           .absmax_codes = arrays->absmax_codes,
                           .nested_absmax = arrays->nested_absmax};
    qc_status st = k->engine->ops->weight(k->engine, &form, w, &out, &result, err);
    arrays->nested_offset = out.nested_offset;
    if (st == QC_OK)
        st = qc_calibrated_put(k->store, job, arrays, &result, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "tensor '%s'", j->name);
        return st;
    }
    k->r->weights++;
    qc_console_detail(k->plan->call, 2,
                      "%s: relative error of its outputs %.3g rounded, %.3g calibrated", j->name,
                      result.rounded, result.calibrated);
    return QC_OK;
}
