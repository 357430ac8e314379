/* The engine of calibrating on a GPU. The interface is calibrate_engine.h.
 *
 * Hidden states stay on the host. The two streams go through the steps of gpu_forward.h in turn, in
 * chunks of whole windows. The inputs of a point's linear layers are kept as floats for each stream
 * and then added to the moments. The size of a chunk does not depend on the free memory, because
 * the order of the sums would depend on it as well.
 *
 * Each matrix of a layer is an allocation of its own, so that one can be replaced while the others
 * stay where they are. A matrix that both streams name by the same pointers is held once, by z. */
#include "convert/gpu/gpu_calibrate_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"

typedef qc_gpu_calibrator gpu;
typedef qc_gpu_calibrator_side side;

static gpu *of(qc_calibrate_engine *e)
{
    return qc_gpu_calibrator_of(e);
}

static void close(qc_calibrate_engine *e)
{
    qc_gpu_calibrator_close_device(of(e));
}

static qc_status text(qc_calibrate_engine *e, const qc_forward_shape *shape,
                      const qc_forward_batch *batch, const qc_calibrate_states *states,
                      qc_error *err)
{
    gpu *g = of(e);
    g->shape = shape;
    g->batch = *batch;
    g->states = states;
    return qc_gpu_calibrator_reopen(g, shape, qc_max_u64(1, qc_forward_longest(batch)), err);
}

/* ---- a layer ---- */

/* Are both the same matrix? For quantized ones it counts where their codes are, because each has a
 * description of its own. */
static int same_matrix(const qc_forward_matrix *a, const qc_forward_matrix *b)
{
    if (a->bias != b->bias || !a->quantized != !b->quantized)
        return 0;
    if (a->quantized)
        return a->quantized == b->quantized || a->quantized->codes == b->quantized->codes;
    return a->dense == b->dense;
}

static qc_status take_matrix(gpu *g, side *s, unsigned which, const qc_forward_matrix *m,
                             qc_gpu_memory *stage, uint64_t *workspace, qc_error *err)
{
    qc_gpu_cutter counted = {0};
    uint64_t bytes = 0;
    qc_gpu_lay_matrix(m, &counted);
    QC_TRY(qc_gpu_calibrator_grow(g, &s->matrices[which], counted.used, OF_LAYER, err));
    QC_TRY(qc_gpu_calibrator_grow(g, stage, qc_gpu_stage_bytes(m), OF_LAYER, err));
    qc_gpu_cutter at = {.base = s->matrices[which].base};
    s->run.matrices[which] = qc_gpu_lay_matrix(m, &at);
    QC_TRY(qc_gpu_fill_matrix(&g->f, m, &s->run.matrices[which], stage->base, g->f.act.tokens,
                              &bytes, err));
    *workspace = qc_max_u64(*workspace, bytes);
    return QC_OK;
}

/* Takes the norms, of which each side has its own, because they are small. */
static qc_status take_vectors(gpu *g, side *s, const qc_forward_weights *w, uint64_t window,
                              qc_error *err)
{
    QC_TRY(qc_gpu_calibrator_grow(g, &s->vectors, qc_gpu_vectors_bytes(&g->f), OF_LAYER, err));
    return qc_gpu_take_vectors(&g->f, w, window, s->vectors.base, &s->run, err);
}

static qc_status take_layer(gpu *g, uint64_t number, const qc_forward_weights *z,
                            const qc_forward_weights *x, qc_gpu_memory *stage, qc_error *err)
{
    const uint64_t window = g->shape->windows[number];
    uint64_t workspace = 0;
    for (unsigned i = 0; i < QC_LAYER_MATRICES; i++) {
        const qc_forward_matrix *mz = &z->matrices[i], *mx = &x->matrices[i];
        QC_TRY(take_matrix(g, &g->z, i, mz, stage, &workspace, err));
        if (same_matrix(mz, mx)) {
            qc_gpu_drop(&g->x.matrices[i]);
            g->x.run.matrices[i] = g->z.run.matrices[i];
        } else {
            QC_TRY(take_matrix(g, &g->x, i, mx, stage, &workspace, err));
        }
    }
    QC_TRY(take_vectors(g, &g->z, z, window, err));
    QC_TRY(take_vectors(g, &g->x, x, window, err));
    QC_TRY(qc_gpu_calibrator_named(qc_gpu_make_workspace(&g->f, workspace, err), OF_PRODUCTS, err));
    /* After this the caller may change or free its arrays. */
    return qc_cuda_stream_synchronize(g->f.stream, err);
}

static qc_status need_text(const gpu *g, int layer, qc_error *err)
{
    if (!g->text || (layer && !g->has_layer))
        QC_FAIL(err, QC_ERR_USAGE, "calibrating: this needs a %s first",
                g->text ? "layer" : "text");
    return qc_cuda_use(&g->f.device, err);
}

static qc_status layer(qc_calibrate_engine *e, uint64_t number, const qc_forward_weights *z,
                       const qc_forward_weights *x, qc_error *err)
{
    gpu *g = of(e);
    qc_gpu_memory stage = {0};
    QC_TRY(need_text(g, 0, err));
    g->weights = x;
    g->has_layer = 0;
    qc_status st = qc_gpu_calibrator_settled(g, take_layer(g, number, z, x, &stage, err), err);
    qc_gpu_drop(&stage);
    if (st != QC_OK) {
        qc_gpu_calibrator_drop_side(&g->z);
        qc_gpu_calibrator_drop_side(&g->x);
    }
    g->has_layer = st == QC_OK;
    return st;
}

static qc_status replace(gpu *g, qc_layer_which which, qc_gpu_memory *stage, qc_error *err)
{
    uint64_t bytes = g->f.workspace.bytes;
    QC_TRY(take_matrix(g, &g->x, which, &g->weights->matrices[which], stage, &bytes, err));
    QC_TRY(qc_gpu_calibrator_named(qc_gpu_make_workspace(&g->f, bytes, err), OF_PRODUCTS, err));
    return qc_cuda_stream_synchronize(g->f.stream, err);
}

static qc_status quantized(qc_calibrate_engine *e, qc_layer_which which, qc_error *err)
{
    gpu *g = of(e);
    qc_gpu_memory stage = {0};
    QC_TRY(need_text(g, 1, err));
    qc_gpu_drop(&g->x.matrices[which]); /* nothing uses the old one any more */
    qc_status st = qc_gpu_calibrator_settled(g, replace(g, which, &stage, err), err);
    qc_gpu_drop(&stage);
    return st;
}

/* ---- moments ---- */

static qc_status new_moments(gpu *g, uint64_t n, int cross, qc_error *err)
{
    uint64_t bytes = qc_gpu_bytes_of(n, n, sizeof(double));
    size_t size = 0;
    QC_TRY(qc_cuda_use(&g->f.device, err));
    QC_TRY(qc_cuda_stream_synchronize(g->f.stream, err));
    qc_gpu_calibrator_drop_factor(g);
    qc_gpu_calibrator_drop_moments(g);
    if (n == 0)
        QC_FAIL(err, QC_ERR_USAGE, "second moments need at least one input, found none");
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        return qc_gpu_calibrator_named(QC_ERR_NOMEM, OF_MOMENTS, err);
    QC_TRY(qc_gpu_calibrator_named(qc_cuda_malloc(&g->h, size, err), OF_MOMENTS, err));
    if (cross)
        QC_TRY(qc_gpu_calibrator_named(qc_cuda_malloc(&g->c, size, err), OF_MOMENTS, err));
    g->n = n;
    return QC_OK;
}

static qc_status zero_moments(gpu *g, uint64_t n, int cross, qc_error *err)
{
    QC_TRY(new_moments(g, n, cross, err));
    size_t size = (size_t)(n * n * sizeof(double));
    QC_TRY(
        qc_gpu_calibrator_grow(g, &g->scratch, qc_cuda_moments_scratch_bytes(n), OF_MOMENTS, err));
    QC_TRY(qc_cuda_fill(g->h, 0, size, g->f.stream, err));
    return g->c ? qc_cuda_fill(g->c, 0, size, g->f.stream, err) : QC_OK;
}

static qc_status moments(qc_calibrate_engine *e, uint64_t n, int cross, qc_error *err)
{
    return qc_gpu_calibrator_settled(of(e), zero_moments(of(e), n, cross, err), err);
}

static qc_status take(qc_calibrate_engine *e, uint64_t n, double *h, double *c, qc_error *err)
{
    gpu *g = of(e);
    size_t bytes = (size_t)(n * n * sizeof *h);
    qc_status st = new_moments(g, n, c != NULL, err);
    if (st == QC_OK)
        st = qc_cuda_to_device(g->h, h, bytes, g->f.stream, err);
    if (st == QC_OK && c)
        st = qc_cuda_to_device(g->c, c, bytes, g->f.stream, err);
    if (st == QC_OK)
        st = qc_cuda_stream_synchronize(g->f.stream, err);
    st = qc_gpu_calibrator_settled(g, st, err);
    qc_free(h);
    qc_free(c);
    return st;
}

uint64_t qc_gpu_calibrator_inputs(qc_calibrate_engine *e)
{
    return of(e)->n;
}

qc_status qc_gpu_calibrator_read(qc_calibrate_engine *e, double *h, double *cross, qc_error *err)
{
    const gpu *g = of(e);
    size_t bytes = (size_t)(g->n * g->n * sizeof *h);
    QC_TRY(qc_cuda_use(&g->f.device, err));
    QC_TRY(qc_cuda_to_host(h, g->h, bytes, g->f.stream, err));
    if (cross)
        QC_TRY(qc_cuda_to_host(cross, g->c, bytes, g->f.stream, err));
    return qc_cuda_stream_synchronize(g->f.stream, err);
}

/* ---- windows through a layer ---- */

/* Returns the floats of a chunk's inputs, for stream z or for stream x. */
static float *inputs_of(const gpu *g, int z)
{
    return (float *)(void *)(g->inputs.base + (z ? g->inputs.bytes / 2 : 0));
}

static qc_status make_inputs(gpu *g, uint64_t n, qc_error *err)
{
    if (g->n != n || !g->scratch.base)
        QC_FAIL(err, QC_ERR_USAGE, "the moments have %llu inputs and the linear layers have %llu",
                (unsigned long long)g->n, (unsigned long long)n);
    uint64_t each = qc_gpu_aligned(qc_gpu_bytes_of(g->f.act.tokens, n, sizeof(float)));
    return qc_gpu_calibrator_grow(g, &g->inputs, qc_sat_mul(2, each), OF_INPUTS, err);
}

/* Keeps the halves in act.x, which have these exponents, as floats. */
static qc_status keep_halves(gpu *g, const int *exponent, uint64_t rows, int z, qc_error *err)
{
    const qc_cuda_product p = {.half = g->f.act.x, .exponent = exponent};
    return qc_cuda_llama_floats(&p, rows, g->n, 0, inputs_of(g, z), g->f.stream, err);
}

static uint64_t inputs_at(const qc_forward_config *c, qc_forward_point point)
{
    return point == QC_AT_O      ? c->heads * c->head_dim
           : point == QC_AT_DOWN ? c->intermediate
                                 : c->hidden;
}

typedef enum { TO_A_POINT, THROUGH, TO_THE_HEAD } walk_kind;

typedef struct {
    walk_kind kind;
    qc_forward_point point;
    int add;
    const float *gain;    /* on the device, for TO_THE_HEAD */
    uint64_t most_tokens; /* of a chunk, or one window that is longer */
    double seconds;       /* for the progress */
} walk;

/* Takes a chunk of one stream to a point. keep: the inputs of its linear layers are kept. */
static qc_status to_point(gpu *g, const walk *w, float *hidden, float *attended, int z, int keep,
                          qc_error *err)
{
    qc_gpu_forward *f = &g->f;
    const qc_gpu_layer_run *r = z ? &g->z.run : &g->x.run;
    size_t bytes = qc_gpu_hidden_bytes(f, r);
    uint64_t heads = f->form.heads * f->form.head_dim;
    size_t heads_bytes = (size_t)qc_gpu_bytes_of(r->rows, heads, sizeof(float));
    QC_TRY(qc_cuda_to_device(f->act.hidden, hidden, bytes, f->stream, err));
    switch (w->point) {
    case QC_AT_QKV:
        QC_TRY(qc_gpu_step_norm(f, r, r->vectors[QC_LAYER_INPUT_NORM], err));
        return keep ? keep_halves(g, f->act.exponent, r->rows, z, err) : QC_OK;
    case QC_AT_O:
        QC_TRY(qc_gpu_step_attend(f, r, err));
        QC_TRY(qc_cuda_to_host(attended, f->act.attended, heads_bytes, f->stream, err));
        return keep ? qc_cuda_copy(inputs_of(g, z), f->act.attended, heads_bytes, f->stream, err)
                    : QC_OK;
    case QC_AT_GATE:
        QC_TRY(qc_cuda_to_device(f->act.attended, attended, heads_bytes, f->stream, err));
        QC_TRY(qc_gpu_step_o(f, r, err));
        QC_TRY(qc_cuda_to_host(hidden, f->act.hidden, bytes, f->stream, err));
        if (!keep)
            return QC_OK;
        QC_TRY(qc_gpu_step_norm(f, r, r->vectors[QC_LAYER_POST_NORM], err));
        return keep_halves(g, f->act.exponent, r->rows, z, err);
    case QC_AT_DOWN:
        QC_TRY(qc_gpu_step_gate(f, r, err));
        return keep ? keep_halves(g, f->act.exponent2, r->rows, z, err) : QC_OK;
    case QC_AT_END:
        QC_TRY(qc_gpu_step_gate(f, r, err));
        QC_TRY(qc_gpu_step_down(f, r, err));
        return qc_cuda_to_host(hidden, f->act.hidden, bytes, f->stream, err);
    case QC_AT_IMAGE: /* no GPU computes such a model */
    case QC_AT_Q_B:
    case QC_AT_KV_B:
        break;
    }
    QC_FAIL(err, QC_ERR_USAGE, "calibrating: point %d does not exist", (int)w->point);
}

static qc_status to_head(gpu *g, const walk *w, const float *hidden, int z, qc_error *err)
{
    qc_gpu_forward *f = &g->f;
    const qc_gpu_layer_run *r = z ? &g->z.run : &g->x.run;
    QC_TRY(qc_cuda_to_device(f->act.hidden, hidden, qc_gpu_hidden_bytes(f, r), f->stream, err));
    QC_TRY(qc_gpu_step_norm(f, r, w->gain, err));
    return keep_halves(g, f->act.exponent, r->rows, z, err);
}

/* Takes the chunk of windows [first, end), which begins at this token, through z and then through
 * x, and adds their moments. */
static qc_status walk_chunk(gpu *g, const walk *w, uint64_t first, uint64_t end, uint64_t token,
                            qc_error *err)
{
    const qc_forward_config *c = &g->f.form;
    const qc_calibrate_states *s = g->states;
    const int changes = w->kind == THROUGH || (w->kind == TO_A_POINT &&
                                               (w->point == QC_AT_GATE || w->point == QC_AT_END));
    uint64_t rows = 0;
    for (int z = 1; z >= 0; z--) {
        qc_gpu_layer_run *r = z ? &g->z.run : &g->x.run;
        float *hidden = (z ? s->z : s->x) + token * c->hidden;
        float *attended = (z ? s->z_attended : s->x_attended) + token * c->heads * c->head_dim;
        QC_TRY(qc_gpu_step_windows(&g->f, r, g->batch.lengths + first, end - first, err));
        rows = r->rows;
        if (w->kind == THROUGH)
            QC_TRY(qc_gpu_step_layer(&g->f, r, hidden, err));
        else if (w->kind == TO_THE_HEAD)
            QC_TRY(to_head(g, w, hidden, z, err));
        else
            QC_TRY(to_point(g, w, hidden, attended, z, w->add && (!z || g->c), err));
        /* The host writes its positions and tiles again for the next chunk. */
        QC_TRY(qc_cuda_stream_synchronize(g->f.stream, err));
        if (changes)
            QC_TRY(qc_forward_finite(hidden, rows * c->hidden, err));
    }
    if (!w->add)
        return QC_OK;
    const qc_cuda_moments sums = {.h = g->h,
                                  .c = g->c,
                                  .n = g->n,
                                  .tokens = rows,
                                  .x = inputs_of(g, 0),
                                  .z = g->c ? inputs_of(g, 1) : NULL,
                                  .ldx = g->n,
                                  .ldz = g->n,
                                  .scratch = (float *)(void *)g->scratch.base};
    QC_TRY(qc_cuda_moments_add(&g->tools, &sums, err));
    return qc_cuda_stream_synchronize(g->f.stream, err);
}

static qc_status walk_windows(gpu *g, const walk *w, qc_error *err)
{
    const qc_forward_batch *b = &g->batch;
    uint64_t token = 0;
    QC_TRY(qc_gpu_check_windows(&g->f, b->lengths, b->count, err));
    for (uint64_t first = 0, next = 0; first < b->count; first = next) {
        uint64_t rows = qc_gpu_next_windows(b->lengths, b->count, w->most_tokens, &next);
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(walk_chunk(g, w, first, next, token, err));
        token += rows;
        qc_calibrate_progress(g->base.k, w->seconds * (double)rows / (double)b->tokens);
    }
    return QC_OK;
}

static qc_status reach(qc_calibrate_engine *e, qc_forward_point point, int add, double seconds,
                       qc_error *err)
{
    gpu *g = of(e);
    const walk w = {.kind = TO_A_POINT,
                    .point = point,
                    .add = add && point != QC_AT_END,
                    .most_tokens = QC_GPU_TOKENS,
                    .seconds = seconds};
    QC_TRY(need_text(g, 1, err));
    qc_status st = w.add ? make_inputs(g, inputs_at(&g->f.form, point), err) : QC_OK;
    if (st == QC_OK)
        st = walk_windows(g, &w, err);
    return qc_gpu_calibrator_settled(g, st, err);
}

static qc_status pass(qc_calibrate_engine *e, double seconds, qc_error *err)
{
    gpu *g = of(e);
    const walk w = {.kind = THROUGH, .most_tokens = g->f.act.tokens, .seconds = seconds};
    QC_TRY(need_text(g, 1, err));
    return qc_gpu_calibrator_settled(g, walk_windows(g, &w, err), err);
}

static qc_status head(qc_calibrate_engine *e, const float *gain, qc_error *err)
{
    gpu *g = of(e);
    qc_gpu_memory m = {0};
    size_t bytes = (size_t)qc_gpu_bytes_of(g->f.form.hidden, 1, sizeof *gain);
    QC_TRY(need_text(g, 0, err));
    qc_status st = make_inputs(g, g->f.form.hidden, err);
    if (st == QC_OK)
        st = qc_gpu_calibrator_grow(g, &m, bytes, "the final norm", err);
    if (st == QC_OK)
        st = qc_cuda_to_device(m.base, gain, bytes, g->f.stream, err);
    const walk w = {.kind = TO_THE_HEAD,
                    .add = 1,
                    .gain = (const float *)(const void *)m.base,
                    .most_tokens = g->f.act.tokens};
    if (st == QC_OK)
        st = walk_windows(g, &w, err);
    st = qc_gpu_calibrator_settled(g, st, err);
    qc_gpu_drop(&m);
    return st;
}

/* ---- factor and weights ---- */

static qc_status factor(qc_calibrate_engine *e, const qc_feedback_options *options,
                        qc_feedback_info *info, qc_error *err)
{
    gpu *g = of(e);
    QC_TRY(qc_cuda_use(&g->f.device, err));
    if (g->n == 0)
        QC_FAIL(err, QC_ERR_USAGE, "there are no moments to be factored");
    QC_TRY(qc_cuda_stream_synchronize(g->f.stream, err));
    qc_gpu_calibrator_drop_factor(g);
    qc_gpu_drop(&g->scratch); /* the factor may need their room */
    qc_gpu_drop(&g->inputs);
    qc_status st = qc_gpu_calibrator_named(
        qc_cuda_feedback_open(&g->factor, &g->tools, g->n, g->h, g->c, options, info, err),
        "the factor of second moments", err);
    st = qc_gpu_calibrator_settled(g, st, err);
    qc_gpu_calibrator_drop_moments(g);
    return st;
}

/* A source that is quantized goes to the device as floats. */
static qc_status weight(qc_calibrate_engine *e, const qc_form *form, const qc_forward_matrix *w,
                        const qc_feedback_outputs *outputs, qc_feedback_out *out,
                        qc_feedback_result *result, qc_error *err)
{
    gpu *g = of(e);
    const float *values = NULL;
    void *owned = NULL;
    QC_TRY(qc_cuda_use(&g->f.device, err));
    if (!g->factor)
        QC_FAIL(err, QC_ERR_USAGE, "a weight can only follow a factor");
    if (w->quantized)
        QC_TRY(qc_calibrate_floats(e->k->ops, w, &values, &owned, err));
    qc_status st = qc_cuda_feedback_weight(g->factor, form, values ? values : w->dense,
                                           values ? QC_DTYPE_F32 : w->dtype, w->rows, outputs, out,
                                           result, err);
    st = qc_gpu_calibrator_settled(g, qc_gpu_calibrator_named(st, "a weight in work", err), err);
    qc_free(owned);
    return st;
}

/* The next moments or the next factor take its place. Until then it may stay. */
static void drop(qc_calibrate_engine *e)
{
    (void)e;
}

static const qc_calibrate_engine_ops ops = {
    .bytes = sizeof(gpu),
    .close = close,
    .measure = qc_gpu_calibrator_measure,
    .room_text = qc_gpu_calibrator_room_text,
    .room_weight = qc_gpu_calibrator_room_weight,
    .text = text,
    .layer = layer,
    .quantized = quantized,
    .moments = moments,
    .reach = reach,
    .pass = pass,
    .head = head,
    .take = take,
    .factor = factor,
    .weight = weight,
    .drop = drop,
};

const qc_gpu_calibrating qc_gpu_calibrating_table = {.ops = &ops,
                                                     .name = qc_gpu_calibrator_device_name};
