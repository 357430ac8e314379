/* One weight, or those with the same inputs: from second moments to the store. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/workers.h"
#include "convert/calibrate_parts.h"
#include "convert/console.h"
#include "convert/llama_forward.h"
#include "quant/second_moments.h"

#include <inttypes.h>
#include <string.h>

/* How many times the time of their matrix products factors and weights take: what does not run as
 * one, the search of scales above all (bench_feedback measures it). */
#define FACTOR_SLOWER 1.8
#define WEIGHT_SLOWER 2.5

#define MEASURE_NS   100000000u /* each of two products */
#define MEASURE_COLS 768u

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
    return qc_feedback_open_flops(n, cross) * k->speed.blas * FACTOR_SLOWER;
}

double qc_calibrate_weight_seconds(const qc_calibrator *k, uint32_t job, int cross)
{
    const qc_job *j = &k->plan->jobs[job];
    return qc_feedback_weight_flops(j->rows, j->cols, cross, &k->feedback) * k->speed.blas *
           WEIGHT_SLOWER;
}

void qc_calibrate_progress(const qc_calibrator *k, double seconds)
{
    qc_progress_add(k->progress, (uint64_t)(seconds * 1e6 + 0.5));
}

static qc_status time_moments(double *out, const qc_calibrator *k, const float *x, qc_error *err)
{
    double *h = NULL, flops = 0;
    QC_TRY(qc_calibrate_square(&h, MEASURE_COLS, err));
    qc_status st = QC_OK;
    uint64_t start = 0;
    /* The first is for the pages and the library's own start. */
    for (int i = 0; st == QC_OK && (i < 2 || qc_clock_ns() - start < MEASURE_NS); i++) {
        if (i == 1)
            start = qc_clock_ns();
        st = qc_moments_add(k->blas, k->threads, h, NULL, MEASURE_COLS, x, MEASURE_COLS, NULL, 0,
                            QC_MOMENT_TOKENS, err);
        flops += i > 0 ? qc_moments_flops(QC_MOMENT_TOKENS, MEASURE_COLS, 0) : 0;
    }
    *out = (double)(qc_clock_ns() - start) * 1e-9 / flops;
    qc_free(h);
    return st;
}

static qc_status time_forward(double *out, const qc_calibrator *k, const float *x, qc_error *err)
{
    const qc_llama_matrix w = {
        .rows = QC_MOMENT_TOKENS, .cols = MEASURE_COLS, .dense = x, .dtype = QC_DTYPE_F32};
    void *y = NULL;
    double flops = 0;
    uint64_t start = 0;
    QC_TRY(qc_malloc_aligned(&y, 64, sizeof(float) * QC_MOMENT_TOKENS * QC_MOMENT_TOKENS, err));
    qc_status st = QC_OK;
    for (int i = 0; st == QC_OK && (i < 2 || qc_clock_ns() - start < MEASURE_NS); i++) {
        if (i == 1)
            start = qc_clock_ns();
        st = qc_llama_cpu_matmul(qc_matmul_ops_for(k->isa), k->threads, &w, x, QC_MOMENT_TOKENS, y,
                                 err);
        flops += i > 0 ? 2.0 * QC_MOMENT_TOKENS * QC_MOMENT_TOKENS * MEASURE_COLS : 0;
    }
    *out = (double)(qc_clock_ns() - start) * 1e-9 / flops;
    qc_free(y);
    return st;
}

qc_status qc_calibrate_measure(qc_calibrate_speed *out, const qc_calibrator *k, qc_error *err)
{
    const size_t n = (size_t)QC_MOMENT_TOKENS * MEASURE_COLS;
    void *v = NULL;
    QC_TRY(qc_malloc_aligned(&v, 64, n * sizeof(float), err));
    float *x = v;
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(i % 97) / 97.0f - 0.5f;
    qc_status st = time_moments(&out->blas, k, x, err);
    if (st == QC_OK)
        st = time_forward(&out->forward, k, x, err);
    qc_free(v);
    return st;
}

/* ---- making ---- */

qc_status qc_calibrate_factor(const qc_calibrator *k, qc_feedback **out, uint64_t n,
                              uint64_t tokens, double *h, double *c, const char *name,
                              qc_error *err)
{
    qc_feedback_options options = k->feedback;
    qc_feedback_info info;
    if (options.damping == 0.0)
        options.damping = qc_feedback_damping(n, tokens);
    int cross = c != NULL;
    qc_status st = qc_feedback_open(out, k->blas, k->threads, n, h, c, &options, &info, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "inputs of '%s'", name);
        return st;
    }
    if (info.times_raised > 0)
        qc_console_warn(k->o,
                        "inputs of '%s': their second moments have no factor with damping %g; "
                        "raised to %g",
                        name, options.damping, info.damping);
    if (info.dead > 0)
        qc_console_detail(k->o, 1,
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

/* As floats; *owned is to be freed, and NULL where w is floats already. */
static qc_status floats_of(const qc_calibrator *k, const qc_llama_matrix *w, const float **out,
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
            qc_weights_row(k->ops, w->quantized, row, f + row * w->cols);
    else
        k->ops->cast(w->dense, w->dtype, w->rows * w->cols, f, QC_DTYPE_F32, &overflow);
    *out = f;
    return QC_OK;
}

qc_status qc_calibrate_weight(const qc_calibrator *k, const qc_feedback *f, uint32_t job,
                              const qc_llama_matrix *w, qc_calibrated_arrays *arrays, qc_error *err)
{
    const qc_job *j = &k->plan->jobs[job];
    const qc_feedback_form form = qc_calibrate_form(j);
    qc_feedback_result result = {0};
    const float *values = NULL;
    void *owned = NULL;
    if (j->rows != w->rows || j->cols != w->cols)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' is planned in another shape", j->name);
    QC_TRY(qc_calibrated_alloc(arrays, k->plan, job, err));
    qc_status st = floats_of(k, w, &values, &owned, err);
    if (st == QC_OK) {
        qc_feedback_out out = {.codes = arrays->codes,
                               .absmax = arrays->absmax,
                               .absmax_codes = arrays->absmax_codes,
                               .nested_absmax = arrays->nested_absmax};
        st = qc_feedback_weight(f, &form, values, w->rows, &out, &result, err);
        arrays->nested_offset = out.nested_offset;
    }
    qc_free(owned);
    if (st == QC_OK)
        st = qc_calibrated_put(k->store, job, arrays, &result, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "tensor '%s'", j->name);
        return st;
    }
    k->r->weights++;
    qc_console_detail(k->o, 2, "%s: relative error of its outputs %.3g rounded, %.3g calibrated",
                      j->name, result.rounded, result.calibrated);
    return QC_OK;
}
