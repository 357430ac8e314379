/* The engine of calibrating on a GPU. The functions of calibrate_device.h manage what is on the
 * device. Hidden states stay on the host and pass through the device window by window. */
#include "convert/calibrate/calibrate_engine.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/calibrate/calibrate_device.h"
#include "convert/llama/llama_device.h"

#include <inttypes.h>

/* Factors and weights take this many times as long as their products alone. These ratios were
 * calculated (kernels/cuda_feedback_weight.c), not timed. */
#define FACTOR_SLOWER 2.0
#define WEIGHT_SLOWER 1.5

/* The tokens between two updates of the progress, or one window that is longer. */
#define CHUNK_TOKENS 4096u

typedef struct {
    qc_calibrate_engine base;
    const qc_gpu_calibrating *table;
    qc_gpu_calibrator *gpu;
    const qc_llama_shape *shape;
    qc_llama_batch batch;
    const qc_calibrate_states *states;
    const qc_llama_weights *x;
} gpu;

static gpu *of(qc_calibrate_engine *e)
{
    return (gpu *)e;
}

static const qc_cuda_device *device_of(const gpu *g)
{
    return &g->base.k->devices->gpus[0];
}

static qc_status said(qc_status st, qc_error *err)
{
    if (st == QC_ERR_NOMEM)
        qc_error_prefix(err, "calibrating on the GPU (--device cpu does without it)");
    return st;
}

static void destroy(qc_calibrate_engine *e)
{
    gpu *g = of(e);
    if (!g)
        return;
    if (g->gpu)
        g->table->destroy(g->gpu);
    qc_free(g);
}

/* Makes a calibrator for windows of this length; shape NULL: for no text. */
static qc_status make(gpu *g, const qc_llama_shape *shape, uint64_t longest, qc_error *err)
{
    qc_gpu_decoder_form form;
    void *tables = NULL;
    if (g->gpu)
        g->table->destroy(g->gpu);
    g->gpu = NULL;
    if (shape)
        QC_TRY(qc_llama_device_form(&form, &tables, shape, longest, err));
    qc_status st = g->table->create(&g->gpu, device_of(g), shape ? &form : NULL,
                                    &g->base.k->devices->tuning, err);
    qc_free(tables);
    return said(st, err);
}

/* ---- speed and room ---- */

static qc_status measure(qc_calibrate_engine *e, const qc_llama_shape *shape,
                         qc_calibrate_speed *out, qc_error *err)
{
    gpu *g = of(e);
    *out = (qc_calibrate_speed){.factor_slower = FACTOR_SLOWER, .weight_slower = WEIGHT_SLOWER};
    QC_TRY(make(g, shape, 1, err));
    return said(g->table->measure(g->gpu, &out->single, &out->dual, &out->forward, err), err);
}

static qc_calibrate_room room_text(const qc_calibrate_engine *e, const qc_llama_shape *shape,
                                   uint64_t tokens, uint64_t longest)
{
    const qc_llama_config *c = &shape->config;
    const qc_gpu_decoder_form form = {.hidden = c->hidden,
                                      .intermediate = c->intermediate,
                                      .heads = c->heads,
                                      .kv_heads = c->kv_heads,
                                      .head_dim = c->head_dim,
                                      .longest = longest};
    const qc_gpu_calibrating *table = ((const gpu *)e)->table;
    (void)tokens;
    return (qc_calibrate_room){.device = table->bytes(&(qc_gpu_calibrating_size){.form = &form})};
}

/* The host holds the layer as it was and as it becomes, and the device holds both as well. */
static qc_calibrate_room room_layer(const qc_calibrate_engine *e, uint64_t bytes)
{
    const qc_gpu_calibrating *table = ((const gpu *)e)->table;
    const qc_gpu_calibrating_size size = {.layer_bytes = bytes};
    return (qc_calibrate_room){qc_sat_mul(2, bytes), table->bytes(&size)};
}

static qc_calibrate_room room_weight(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_feedback_form *form)
{
    const qc_gpu_calibrating *table = ((const gpu *)e)->table;
    const qc_gpu_calibrating_size size = {.n = n, .cross = cross, .rows = rows, .weight = form};
    return (qc_calibrate_room){qc_sat_mul(qc_sat_mul(rows, n), 2), table->bytes(&size)};
}

/* ---- the text ---- */

static qc_status text(qc_calibrate_engine *e, const qc_llama_shape *shape,
                      const qc_llama_batch *batch, const qc_calibrate_states *states, qc_error *err)
{
    gpu *g = of(e);
    uint64_t longest = 1;
    for (uint64_t i = 0; i < batch->count; i++)
        longest = batch->lengths[i] > longest ? batch->lengths[i] : longest;
    g->shape = shape;
    g->batch = *batch;
    g->states = states;
    return make(g, shape, longest, err);
}

static qc_status layer(qc_calibrate_engine *e, uint64_t number, const qc_llama_weights *z,
                       const qc_llama_weights *x, qc_error *err)
{
    gpu *g = of(e);
    const uint64_t window = g->shape->windows[number];
    const qc_gpu_decoder_layer lz = qc_llama_device_weights(z, window);
    const qc_gpu_decoder_layer lx = qc_llama_device_weights(x, window);
    g->x = x;
    return said(g->table->layer(g->gpu, &lz, &lx, err), err);
}

static qc_status quantized(qc_calibrate_engine *e, qc_llama_part part, qc_error *err)
{
    gpu *g = of(e);
    const qc_gpu_matrix m = qc_llama_device_matrix(&g->x->matrices[part]);
    return said(g->table->replace(g->gpu, part, &m, err), err);
}

static qc_status moments(qc_calibrate_engine *e, uint64_t n, int cross, qc_error *err)
{
    gpu *g = of(e);
    return said(g->table->moments(g->gpu, n, cross, err), err);
}

/* The states of windows [first, first + count), which begin at this token. */
static qc_gpu_states states_of(const gpu *g, uint64_t first, uint64_t count, uint64_t token)
{
    const qc_llama_config *c = &g->shape->config;
    const qc_calibrate_states *s = g->states;
    const uint64_t q = c->heads * c->head_dim;
    return (qc_gpu_states){.x = s->x + token * c->hidden,
                           .z = s->z + token * c->hidden,
                           .x_attended = s->x_attended + token * q,
                           .z_attended = s->z_attended + token * q,
                           .lengths = g->batch.lengths + first,
                           .windows = count};
}

static qc_status check_finite(const gpu *g, const qc_gpu_states *s, uint64_t tokens, qc_error *err)
{
    const uint64_t n = tokens * g->shape->config.hidden;
    QC_TRY(qc_llama_finite(s->x, n, err));
    return qc_llama_finite(s->z, n, err);
}

static qc_status stage(qc_calibrate_engine *e, qc_llama_stage at, int add, double seconds,
                       qc_error *err)
{
    gpu *g = of(e);
    uint64_t token = 0;
    for (uint64_t first = 0, next = 0; first < g->batch.count; first = next) {
        uint64_t tokens = 0;
        do
            tokens += g->batch.lengths[next++];
        while (next < g->batch.count && tokens + g->batch.lengths[next] <= CHUNK_TOKENS);
        const qc_gpu_states s = states_of(g, first, next - first, token);
        QC_TRY(said(g->table->stage(g->gpu, at, &s, add, err), err));
        if (at == QC_LLAMA_AT_GATE || at == QC_LLAMA_AT_END)
            QC_TRY(check_finite(g, &s, tokens, err));
        token += tokens;
        qc_calibrate_progress(e->k, seconds * (double)tokens / (double)g->batch.tokens);
    }
    return QC_OK;
}

static qc_status pass(qc_calibrate_engine *e, double seconds, qc_error *err)
{
    gpu *g = of(e);
    const qc_gpu_states s = states_of(g, 0, g->batch.count, 0);
    QC_TRY(said(g->table->pass(g->gpu, &s, err), err));
    QC_TRY(check_finite(g, &s, g->batch.tokens, err));
    qc_calibrate_progress(e->k, seconds);
    return QC_OK;
}

static qc_status head(qc_calibrate_engine *e, const float *gain, qc_error *err)
{
    gpu *g = of(e);
    const qc_gpu_states s = states_of(g, 0, g->batch.count, 0);
    return said(g->table->head(g->gpu, gain, &s, err), err);
}

static qc_status take(qc_calibrate_engine *e, uint64_t n, double *h, qc_error *err)
{
    gpu *g = of(e);
    qc_status st = said(g->table->take(g->gpu, n, h, err), err);
    qc_free(h);
    return st;
}

/* ---- weights ---- */

static qc_status factor(qc_calibrate_engine *e, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err)
{
    gpu *g = of(e);
    return said(g->table->factor(g->gpu, options, info, err), err);
}

/* A source that is quantized goes to the device as floats. */
static qc_status weight(qc_calibrate_engine *e, const qc_feedback_form *form,
                        const qc_llama_matrix *w, qc_feedback_out *out, qc_feedback_result *result,
                        qc_error *err)
{
    gpu *g = of(e);
    const float *values = NULL;
    void *owned = NULL;
    qc_gpu_matrix m = qc_llama_device_matrix(w);
    if (w->quantized) {
        QC_TRY(qc_calibrate_floats(e->k->ops, w, &values, &owned, err));
        m.quantized = NULL;
        m.dense = values;
        m.dtype = QC_DTYPE_F32;
    }
    qc_status st = g->table->weight(g->gpu, form, &m, out, result, err);
    qc_free(owned);
    return said(st, err);
}

/* The next moments or the next factor take its place. Until then it may stay. */
static void drop(qc_calibrate_engine *e)
{
    (void)e;
}

qc_status qc_calibrate_gpu_create(qc_calibrate_engine **out, const qc_calibrator *k, qc_error *err)
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
    QC_TRY(qc_calloc(&v, 1, sizeof(gpu), err));
    gpu *g = v;
    g->base = (qc_calibrate_engine){&ops, k};
    g->table = k->devices->work->calibrating;
    *out = &g->base;
    return QC_OK;
}

qc_status qc_calibrate_gpu_name(const char **out, qc_arena *arena, const qc_devices *devices,
                                qc_error *err)
{
    const qc_gpu_calibrating *table = devices->work->calibrating;
    qc_gpu_calibrator *c = NULL;
    *out = NULL;
    QC_TRY(table->create(&c, &devices->gpus[0], NULL, NULL, err));
    qc_status st = qc_arena_printf(arena, out, err, "%s", table->name(c));
    table->destroy(c);
    return st;
}
