/* The engine of calibrating on the CPU. Windows pass to a point of a layer in chunks, both streams
 * side by side, and the inputs of linear layers go to the moments while they are in the cache. */
#include "convert/calibrate/calibrate_engine.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "convert/forward/forward_cpu.h"
#include "quant/second_moments.h"

#include <inttypes.h>
#include <string.h>

/* Factors and weights take this many times as long as their matrix products alone, above all
 * because of the search of scales (docs/theory/calibration.md has figures). */
#define FACTOR_SLOWER 1.8
#define WEIGHT_SLOWER 2.5

#define MEASURE_NS   100000000u /* for each of two products */
#define MEASURE_COLS 768u

typedef struct {
    qc_calibrate_engine base;
    qc_forward_batch batch;
    uint64_t q;    /* floats of all heads of a token */
    uint64_t wide; /* of the hidden states */
    qc_forward_cpu x_cpu, z_cpu;
    qc_forward_pass x, z;
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

static void close(qc_calibrate_engine *e)
{
    cpu *c = of(e);
    drop(e);
    qc_forward_cpu_deinit(&c->x_cpu);
    qc_forward_cpu_deinit(&c->z_cpu);
}

/* ---- speed and room ---- */

/* The inputs of the products that are timed, and room for what they give. */
typedef struct {
    const qc_calibrator *k;
    float *x, *y;
    double *h;
} timed;

static qc_status one_moments(const timed *t, double *flops, qc_error *err)
{
    *flops = qc_moments_flops(QC_MOMENT_TOKENS, MEASURE_COLS, 0);
    return qc_moments_add(t->k->blas, t->k->threads, t->h, NULL, MEASURE_COLS, t->x, MEASURE_COLS,
                          NULL, 0, QC_MOMENT_TOKENS, err);
}

static qc_status one_forward(const timed *t, double *flops, qc_error *err)
{
    const qc_forward_matrix w = {
        .rows = QC_MOMENT_TOKENS, .cols = MEASURE_COLS, .dense = t->x, .dtype = QC_DTYPE_F32};
    *flops = 2.0 * QC_MOMENT_TOKENS * QC_MOMENT_TOKENS * MEASURE_COLS;
    return qc_forward_cpu_matmul(qc_matmul_ops_for(t->k->isa), t->k->threads, &w, t->x,
                                 QC_MOMENT_TOKENS, t->y, err);
}

/* The seconds of an operation. The first run is not timed: it touches the pages and starts the
 * library. */
static qc_status time_of(double *out, const timed *t,
                         qc_status (*run)(const timed *t, double *flops, qc_error *err),
                         qc_error *err)
{
    double flops = 0, all = 0;
    QC_TRY(run(t, &flops, err));
    uint64_t start = qc_clock_ns();
    do {
        QC_TRY(run(t, &flops, err));
        all += flops;
    } while (qc_clock_ns() - start < MEASURE_NS);
    *out = (double)(qc_clock_ns() - start) * 1e-9 / all;
    return QC_OK;
}

static qc_status measure_all(timed *t, qc_calibrate_speed *out, qc_error *err)
{
    const size_t n = (size_t)QC_MOMENT_TOKENS * MEASURE_COLS;
    QC_TRY(qc_malloc_aligned(&t->x, 64, n * sizeof *t->x, err));
    QC_TRY(qc_malloc_aligned(&t->y, 64, sizeof *t->y * QC_MOMENT_TOKENS * QC_MOMENT_TOKENS, err));
    QC_TRY(qc_calibrate_square(&t->h, MEASURE_COLS, err));
    for (size_t i = 0; i < n; i++)
        t->x[i] = (float)(i % 97) / 97.0f - 0.5f;
    QC_TRY(time_of(&out->single, t, one_moments, err));
    out->dual = out->single;
    return time_of(&out->forward, t, one_forward, err);
}

static qc_status measure(qc_calibrate_engine *e, qc_calibrate_speed *out, qc_error *err)
{
    timed t = {.k = e->k};
    *out = (qc_calibrate_speed){.factor_slower = FACTOR_SLOWER, .weight_slower = WEIGHT_SLOWER};
    qc_status st = measure_all(&t, out, err);
    qc_free(t.x);
    qc_free(t.y);
    qc_free(t.h);
    return st;
}

static qc_calibrate_room room_text(const qc_calibrate_engine *e, const qc_forward_shape *shape,
                                   uint64_t tokens, uint64_t longest)
{
    uint64_t bytes = qc_forward_cpu_bytes(shape, e->k->threads, tokens, longest);
    return (qc_calibrate_room){.host = qc_sat_mul(2, bytes)};
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

/* ---- the text ---- */

static qc_status text(qc_calibrate_engine *e, const qc_forward_shape *shape,
                      const qc_forward_batch *batch, const qc_calibrate_states *states,
                      qc_error *err)
{
    cpu *c = of(e);
    const qc_forward_tools tools = {
        .threads = e->k->threads, .isa = e->k->isa, .images = e->k->images};
    c->x = (qc_forward_pass){.hidden = states->x, .attended = states->x_attended};
    c->z = (qc_forward_pass){.hidden = states->z, .attended = states->z_attended};
    c->batch = *batch;
    c->wide = shape->config.hidden;
    c->q = qc_forward_attended(shape);
    QC_TRY(qc_forward_cpu_create(&c->x_cpu, shape, &tools, batch, err));
    return qc_forward_cpu_create(&c->z_cpu, shape, &tools, batch, err);
}

static qc_status layer(qc_calibrate_engine *e, uint64_t number, const qc_forward_weights *z,
                       const qc_forward_weights *x, qc_error *err)
{
    cpu *c = of(e);
    (void)err;
    c->x.layer = c->z.layer = number;
    c->x.w = x;
    c->z.w = z;
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

static qc_status add_moments(cpu *c, qc_forward_inputs x, qc_forward_inputs z, uint64_t tokens,
                             qc_error *err)
{
    const qc_calibrator *k = c->base.k;
    return qc_moments_add(k->blas, k->threads, c->h, c->c, c->n, x.x, x.ld, z.x, z.ld, tokens, err);
}

/* Both streams have the same inputs here. */
static qc_status reach_images(cpu *c, double seconds, qc_error *err)
{
    const qc_cross *x = c->x_cpu.cross;
    uint64_t n = 0;
    for (uint64_t i = 0; i < x->unique_count; i++)
        for (uint64_t at = 0; at < x->uniques[i]->seen; at += n) {
            const uint64_t left = x->uniques[i]->seen - at;
            n = left < QC_FORWARD_TOKENS ? left : QC_FORWARD_TOKENS;
            QC_TRY(qc_image_read(x->states, x->uniques[i], at, n, x->block, err));
            const qc_forward_inputs states = {x->block, c->wide};
            QC_TRY(add_moments(c, states, states, n, err));
            qc_calibrate_progress(c->base.k, seconds * (double)n / (double)x->tokens);
        }
    return QC_OK;
}

static qc_status reach(qc_calibrate_engine *e, qc_forward_point point, int add, double seconds,
                       qc_error *err)
{
    cpu *c = of(e);
    qc_forward_inputs x, z;
    qc_forward_chunk at = {0};
    if (point == QC_AT_IMAGE)
        return reach_images(c, seconds, err);
    while (qc_forward_cpu_next(&c->x_cpu, &at)) {
        QC_TRY(qc_forward_cpu_at(&c->x_cpu, &c->x, &at, point, &x, err));
        QC_TRY(qc_forward_cpu_at(&c->z_cpu, &c->z, &at, point, &z, err));
        if (point == QC_AT_O) {
            size_t bytes = (size_t)(at.tokens * c->q) * sizeof(float);
            memcpy(c->x.attended + at.start * c->q, x.x, bytes);
            memcpy(c->z.attended + at.start * c->q, z.x, bytes);
        }
        if (add)
            QC_TRY(add_moments(c, x, z, at.tokens, err));
        qc_calibrate_progress(e->k, seconds * (double)at.tokens / (double)c->batch.tokens);
    }
    return QC_OK;
}

static qc_status add(qc_calibrate_engine *e, const float *x, const float *z, uint64_t tokens,
                     qc_error *err)
{
    cpu *c = of(e);
    return add_moments(c, (qc_forward_inputs){x, c->n}, (qc_forward_inputs){z, c->n}, tokens, err);
}

static qc_status pass(qc_calibrate_engine *e, double seconds, qc_error *err)
{
    cpu *c = of(e);
    QC_TRY(qc_forward_cpu_layer(&c->x_cpu, c->x.w, c->x.layer, c->x.hidden, err));
    QC_TRY(qc_forward_cpu_layer(&c->z_cpu, c->z.w, c->z.layer, c->z.hidden, err));
    qc_calibrate_progress(e->k, seconds);
    return QC_OK;
}

static qc_status head(qc_calibrate_engine *e, const float *gain, qc_error *err)
{
    cpu *c = of(e);
    const qc_forward_inputs x = {c->x.hidden, c->wide}, z = {c->z.hidden, c->wide};
    QC_TRY(qc_forward_cpu_norm(&c->x_cpu, gain, c->x.hidden, err));
    QC_TRY(qc_forward_cpu_norm(&c->z_cpu, gain, c->z.hidden, err));
    return add_moments(c, x, z, c->batch.tokens, err);
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
    .bytes = sizeof(cpu),
    .close = close,
    .measure = measure,
    .room_text = room_text,
    .room_weight = room_weight,
    .text = text,
    .layer = layer,
    .moments = moments,
    .reach = reach,
    .add = add,
    .pass = pass,
    .head = head,
    .take = take,
    .factor = factor,
    .weight = weight,
    .drop = drop,
};
