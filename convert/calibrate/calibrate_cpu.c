/* The engine of calibrating on the CPU, and what engines share. */
#include "convert/calibrate/calibrate_engine.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <string.h>

/* Factors and weights take this many times as long as their matrix products alone, above all
 * because of the search of scales (docs/theory/calibration.md has figures). */
#define FACTOR_SLOWER 1.8
#define WEIGHT_SLOWER 2.5

qc_status qc_calibrate_engine_create(qc_calibrate_engine **out, const qc_calibrate_engine_ops *ops,
                                     const qc_calibrator *k, qc_error *err)
{
    QC_TRY(qc_calloc(out, 1, ops->engine_bytes, err));
    **out = (qc_calibrate_engine){ops, k};
    return QC_OK;
}

void qc_calibrate_engine_destroy(qc_calibrate_engine *e)
{
    if (!e)
        return;
    e->ops->close(e);
    qc_free(e);
}

uint64_t qc_calibrate_square_bytes(uint64_t n)
{
    return qc_sat_mul(qc_sat_mul(n, n), sizeof(double));
}

qc_status qc_calibrate_square(double **out, uint64_t n, qc_error *err)
{
    uint64_t bytes = qc_calibrate_square_bytes(n);
    size_t size = 0;
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "second moments of %" PRIu64 " inputs do not fit memory", n);
    QC_TRY(qc_malloc_aligned(out, 64, size, err));
    memset(*out, 0, size);
    return QC_OK;
}

/* ---- the CPU ---- */

typedef struct {
    qc_calibrate_engine base;
    double *h, *c; /* NULL: there are none */
    uint64_t n;
    qc_feedback *f;
} cpu;

static cpu *of(qc_calibrate_engine *e)
{
    return (cpu *)e;
}

static void drop(qc_calibrate_engine *e)
{
    cpu *c = of(e);
    qc_feedback_close(c->f); /* uses the moments */
    c->f = NULL;
    qc_free(c->h);
    qc_free(c->c);
    c->h = c->c = NULL;
}

/* ---- speed and room ---- */

static qc_status measure(qc_calibrate_engine *e, qc_calibrate_speed *out, qc_error *err)
{
    *out = (qc_calibrate_speed){.factor_slower = FACTOR_SLOWER, .weight_slower = WEIGHT_SLOWER};
    QC_TRY(qc_blas_speed(&out->single, e->k->blas, e->k->threads, err));
    out->dual = out->single;
    return QC_OK;
}

static qc_calibrate_room room_weight(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_form *form, uint64_t block)
{
    uint64_t bytes = qc_sat_add(qc_feedback_weight_bytes(rows, n, e->k->threads, block),
                                qc_sat_mul(qc_sat_mul(rows, n), sizeof(float)));
    (void)form;
    bytes = qc_sat_add(bytes, qc_sat_mul(qc_calibrate_square_bytes(n), cross ? 2 : 1));
    return (qc_calibrate_room){.host = qc_sat_add(bytes, qc_feedback_open_bytes(n, cross))};
}

static qc_status take(qc_calibrate_engine *e, uint64_t n, double *h, double *cross, qc_error *err)
{
    cpu *c = of(e);
    (void)err;
    drop(e);
    c->n = n;
    c->h = h;
    c->c = cross;
    return QC_OK;
}

/* ---- weights ---- */

static qc_status factor(qc_calibrate_engine *e, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err)
{
    cpu *c = of(e);
    return qc_feedback_open(&c->f, e->k->blas, e->k->threads, c->n, c->h, c->c, options, info, err);
}

static qc_status weight(qc_calibrate_engine *e, const qc_form *form, const float *w, uint64_t rows,
                        const qc_feedback_outputs *g, qc_feedback_out *out,
                        qc_feedback_result *result, qc_error *err)
{
    return qc_feedback_weight(of(e)->f, form, w, rows, g, out, result, err);
}

const qc_calibrate_engine_ops qc_calibrate_cpu_ops = {
    .engine_bytes = sizeof(cpu),
    .close = drop,
    .measure = measure,
    .room_weight = room_weight,
    .take = take,
    .factor = factor,
    .weight = weight,
    .drop = drop,
};
