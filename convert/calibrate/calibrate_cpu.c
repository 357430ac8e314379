/* The engine of calibrating on the CPU. Windows pass through a stage in chunks, both streams side
 * by side, and the inputs of linear layers go to the moments while they are in the cache. */
#include "convert/calibrate/calibrate_engine.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "convert/llama/llama_forward.h"
#include "quant/second_moments.h"

#include <inttypes.h>
#include <string.h>

/* Factors and weights take this many times as long as their matrix products alone, above all
 * because of the search of scales (bench_feedback measures it). */
#define FACTOR_SLOWER 1.8
#define WEIGHT_SLOWER 2.5

#define MEASURE_NS   100000000u /* for each of two products */
#define MEASURE_COLS 768u

typedef struct {
    qc_calibrate_engine base;
    const qc_calibrate_states *states;
    qc_llama_batch batch;
    uint64_t q;    /* floats of all heads of a token */
    uint64_t wide; /* of the hidden states */
    qc_llama_cpu x, z;
    uint64_t number; /* of the layer */
    const qc_llama_weights *x_weights, *z_weights;
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

static void destroy(qc_calibrate_engine *e)
{
    cpu *c = of(e);
    if (!c)
        return;
    drop(e);
    qc_llama_cpu_deinit(&c->x);
    qc_llama_cpu_deinit(&c->z);
    qc_free(c);
}

/* ---- speed and room ---- */

static qc_status time_moments(double *out, const qc_calibrator *k, const float *x, qc_error *err)
{
    double *h = NULL, flops = 0;
    QC_TRY(qc_calibrate_square(&h, MEASURE_COLS, err));
    qc_status st = QC_OK;
    uint64_t start = 0;
    /* The first run is not timed: it touches the pages and starts the library. */
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

static qc_status measure(qc_calibrate_engine *e, const qc_llama_shape *shape,
                         qc_calibrate_speed *out, qc_error *err)
{
    const size_t n = (size_t)QC_MOMENT_TOKENS * MEASURE_COLS;
    void *v = NULL;
    (void)shape;
    *out = (qc_calibrate_speed){.factor_slower = FACTOR_SLOWER, .weight_slower = WEIGHT_SLOWER};
    QC_TRY(qc_malloc_aligned(&v, 64, n * sizeof(float), err));
    float *x = v;
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(i % 97) / 97.0f - 0.5f;
    qc_status st = time_moments(&out->single, e->k, x, err);
    if (st == QC_OK)
        st = time_forward(&out->forward, e->k, x, err);
    out->dual = out->single;
    qc_free(v);
    return st;
}

static qc_calibrate_room room_text(const qc_calibrate_engine *e, const qc_llama_shape *shape,
                                   uint64_t tokens, uint64_t longest)
{
    uint64_t bytes = qc_llama_cpu_bytes(shape, e->k->threads, tokens, longest);
    return (qc_calibrate_room){.host = qc_sat_mul(2, bytes)};
}

/* The layer is held as it is and as it becomes. */
static qc_calibrate_room room_layer(const qc_calibrate_engine *e, uint64_t bytes)
{
    (void)e;
    return (qc_calibrate_room){.host = qc_sat_mul(2, bytes)};
}

static qc_calibrate_room room_weight(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_feedback_form *form)
{
    uint64_t bytes = qc_sat_add(qc_feedback_weight_bytes(rows, n, e->k->threads),
                                qc_sat_mul(qc_sat_mul(rows, n), sizeof(float)));
    (void)form;
    bytes = qc_sat_add(bytes, qc_sat_mul(qc_calibrate_square_bytes(n), cross ? 2 : 1));
    return (qc_calibrate_room){.host = qc_sat_add(bytes, qc_feedback_open_bytes(n, cross))};
}

/* ---- the text ---- */

static qc_status text(qc_calibrate_engine *e, const qc_llama_shape *shape,
                      const qc_llama_batch *batch, const qc_calibrate_states *states, qc_error *err)
{
    cpu *c = of(e);
    const qc_llama_tools tools = {.threads = e->k->threads, .isa = e->k->isa};
    c->states = states;
    c->batch = *batch;
    c->wide = shape->config.hidden;
    c->q = shape->config.heads * shape->config.head_dim;
    QC_TRY(qc_llama_cpu_create(&c->x, shape, &tools, batch, err));
    return qc_llama_cpu_create(&c->z, shape, &tools, batch, err);
}

static qc_status layer(qc_calibrate_engine *e, uint64_t number, const qc_llama_weights *z,
                       const qc_llama_weights *x, qc_error *err)
{
    cpu *c = of(e);
    (void)err;
    c->number = number;
    c->z_weights = z;
    c->x_weights = x;
    return QC_OK;
}

/* The caller has already put the matrix into x's weights. */
static qc_status quantized(qc_calibrate_engine *e, qc_llama_part part, qc_error *err)
{
    (void)e;
    (void)part;
    (void)err;
    return QC_OK;
}

static qc_status moments(qc_calibrate_engine *e, uint64_t n, int cross, qc_error *err)
{
    cpu *c = of(e);
    drop(e);
    c->n = n;
    QC_TRY(qc_calibrate_square(&c->h, n, err));
    return cross ? qc_calibrate_square(&c->c, n, err) : QC_OK;
}

static qc_status add_moments(cpu *c, const float *x, uint64_t ldx, const float *z, uint64_t ldz,
                             uint64_t tokens, qc_error *err)
{
    const qc_calibrator *k = c->base.k;
    return qc_moments_add(k->blas, k->threads, c->h, c->c, c->n, x, ldx, z, ldz, tokens, err);
}

static qc_status stage(qc_calibrate_engine *e, qc_llama_stage at_stage, int add, double seconds,
                       qc_error *err)
{
    cpu *c = of(e);
    const qc_calibrate_states *s = c->states;
    const float *x = NULL, *z = NULL;
    uint64_t ldx = 0, ldz = 0;
    qc_llama_chunk at = {0};
    while (qc_llama_cpu_next(&c->x, &at)) {
        QC_TRY(qc_llama_cpu_stage(&c->x, c->x_weights, c->number, &at, at_stage, s->x,
                                  s->x_attended, &x, &ldx, err));
        QC_TRY(qc_llama_cpu_stage(&c->z, c->z_weights, c->number, &at, at_stage, s->z,
                                  s->z_attended, &z, &ldz, err));
        if (at_stage == QC_LLAMA_AT_O) {
            size_t bytes = (size_t)(at.tokens * c->q) * sizeof *x;
            memcpy(s->x_attended + at.start * c->q, x, bytes);
            memcpy(s->z_attended + at.start * c->q, z, bytes);
        }
        if (add)
            QC_TRY(add_moments(c, x, ldx, z, ldz, at.tokens, err));
        qc_calibrate_progress(e->k, seconds * (double)at.tokens / (double)c->batch.tokens);
    }
    return QC_OK;
}

static qc_status pass(qc_calibrate_engine *e, double seconds, qc_error *err)
{
    cpu *c = of(e);
    QC_TRY(qc_llama_cpu_layer(&c->x, c->x_weights, c->number, c->states->x, err));
    QC_TRY(qc_llama_cpu_layer(&c->z, c->z_weights, c->number, c->states->z, err));
    qc_calibrate_progress(e->k, seconds);
    return QC_OK;
}

static qc_status head(qc_calibrate_engine *e, const float *gain, qc_error *err)
{
    cpu *c = of(e);
    const qc_calibrate_states *s = c->states;
    QC_TRY(qc_llama_cpu_norm(&c->x, gain, s->x, err));
    QC_TRY(qc_llama_cpu_norm(&c->z, gain, s->z, err));
    return add_moments(c, s->x, c->wide, s->z, c->wide, c->batch.tokens, err);
}

static qc_status take(qc_calibrate_engine *e, uint64_t n, double *h, qc_error *err)
{
    cpu *c = of(e);
    (void)err;
    drop(e);
    c->n = n;
    c->h = h;
    return QC_OK;
}

/* ---- weights ---- */

static qc_status factor(qc_calibrate_engine *e, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err)
{
    cpu *c = of(e);
    return qc_feedback_open(&c->f, e->k->blas, e->k->threads, c->n, c->h, c->c, options, info, err);
}

static qc_status weight(qc_calibrate_engine *e, const qc_feedback_form *form,
                        const qc_llama_matrix *w, qc_feedback_out *out, qc_feedback_result *result,
                        qc_error *err)
{
    const float *values = NULL;
    void *owned = NULL;
    qc_status st = qc_calibrate_floats(e->k->ops, w, &values, &owned, err);
    if (st == QC_OK)
        st = qc_feedback_weight(of(e)->f, form, values, w->rows, out, result, err);
    qc_free(owned);
    return st;
}

qc_status qc_calibrate_cpu_create(qc_calibrate_engine **out, const qc_calibrator *k, qc_error *err)
{
    static const qc_calibrate_engine_ops ops = {
        .destroy = destroy,
        .measure = measure,
        .room_text = room_text,
        .room_layer = room_layer,
        .room_weight = room_weight,
        .text = text,
        .layer = layer,
        .quantized = quantized,
        .moments = moments,
        .stage = stage,
        .pass = pass,
        .head = head,
        .take = take,
        .factor = factor,
        .weight = weight,
        .drop = drop,
    };
    void *v = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&v, 1, sizeof(cpu), err));
    cpu *c = v;
    c->base = (qc_calibrate_engine){&ops, k};
    *out = &c->base;
    return QC_OK;
}
