/* The engine of calibrating on a GPU. The interface is calibrate_engine.h.
 *
 * Hidden states stay on the host. The two streams go through the steps of gpu_forward.h in turn, in
 * chunks of whole windows. The inputs of a point's linear layers are kept as floats for each stream
 * and then added to the moments. The size of a chunk does not depend on the free memory, because
 * the order of the sums would depend on it as well.
 *
 * Each matrix of a layer is an allocation of its own, so that one can be replaced while the others
 * stay where they are. A matrix that both streams name by the same pointers is held once, by z. */
#include "convert/gpu/gpu_calibrate.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/workers.h"
#include "convert/gpu/gpu_forward.h"
#include "kernels/cuda_feedback.h"

#include <stdio.h>

/* Factors and weights take this many times as long as their products alone. These ratios were
 * calculated (kernels/cuda_feedback_weight.c), not timed. */
#define FACTOR_SLOWER 2.0
#define WEIGHT_SLOWER 1.5
/* So are these, in cycles of 1.5 GHz: a look at 16 codes takes 200, and a pair of coupled outputs
 * takes a hundredth of one (kernels/cuda_feedback_outputs.cu). */
#define COUPLED      (200.0 / 16.0 / 1.5e9)
#define COUPLED_PAIR (0.01 / 1.5e9)

/* What the memory is for. */
#define OF_TEXT     "the activations of calibration"
#define OF_LAYER    "a layer's weights"
#define OF_PRODUCTS "a layer's products"
#define OF_MOMENTS  "the second moments of a linear layer's inputs"
#define OF_INPUTS   "the inputs of a linear layer"
#define OF_TIMED    "products that are timed"

/* One stream's side of a layer. */
typedef struct {
    qc_gpu_layer_run run;
    qc_gpu_memory matrices[QC_LAYER_MATRICES], vectors;
} side;

typedef struct {
    qc_calibrate_engine base;
    qc_gpu_forward f; /* without a text it has the device and the stream only */
    int text, has_layer;
    const qc_forward_shape *shape;
    qc_forward_batch batch;
    const qc_calibrate_states *states;
    const qc_forward_weights *weights; /* of x */
    qc_cuda_feedback_tools tools;
    side z, x;
    qc_gpu_memory inputs; /* floats: of x, then of z */
    uint64_t n;           /* of the moments; 0: none */
    double *h, *c;        /* c NULL: none */
    qc_gpu_memory scratch;
    qc_cuda_feedback *factor;
} gpu;

static gpu *of(qc_calibrate_engine *e)
{
    return (gpu *)e;
}

/* ---- memory ---- */

/* Makes an error that says what the device has no room for. */
static qc_status named(qc_status st, const char *what, qc_error *err)
{
    if (st == QC_ERR_NOMEM)
        QC_FAIL(err, QC_ERR_NOMEM, "the GPU's memory has no room for %s", what);
    return st;
}

/* As qc_gpu_grow; what: what the memory is for. */
static qc_status grow(gpu *g, qc_gpu_memory *m, uint64_t bytes, const char *what, qc_error *err)
{
    return named(qc_gpu_grow(&g->f, m, bytes, err), what, err);
}

static void drop_moments(gpu *g)
{
    qc_cuda_free(g->h);
    qc_cuda_free(g->c);
    qc_gpu_drop(&g->scratch);
    qc_gpu_drop(&g->inputs);
    g->h = g->c = NULL;
    g->n = 0;
}

static void drop_factor(gpu *g)
{
    qc_cuda_feedback_close(g->factor);
    g->factor = NULL;
}

static void drop_side(side *s)
{
    for (unsigned i = 0; i < QC_LAYER_MATRICES; i++)
        qc_gpu_drop(&s->matrices[i]);
    qc_gpu_drop(&s->vectors);
    s->run = (qc_gpu_layer_run){0};
}

/* After an error, what was started may still read the host's arrays, so this waits for it. Returns
 * st. */
static qc_status settled(gpu *g, qc_status st, qc_error *err)
{
    if (st != QC_OK)
        qc_gpu_forward_settle(&g->f);
    if (st == QC_ERR_NOMEM)
        qc_error_prefix(err, "calibrating on the GPU (--device cpu calibrates without one)");
    return st;
}

/* ---- opening ---- */

static void close_device(gpu *g)
{
    qc_gpu_forward_settle(&g->f);
    drop_factor(g);
    drop_moments(g);
    drop_side(&g->z);
    drop_side(&g->x);
    qc_cusolver_close(g->tools.solver);
    qc_cublas_close(g->tools.blas);
    qc_gpu_forward_deinit(&g->f);
    g->f = (qc_gpu_forward){0};
    g->tools = (qc_cuda_feedback_tools){0};
    g->text = g->has_layer = 0;
}

/* shape NULL: there is no text. */
static qc_status open_device(gpu *g, const qc_cuda_device *device, const qc_forward_shape *shape,
                             uint64_t longest, const qc_matmul_table *tuning, qc_error *err)
{
    QC_TRY(qc_cuda_use(device, err));
    QC_TRY(qc_cublas_open(&g->tools.blas, device->runtime_version, err));
    QC_TRY(qc_cusolver_open(&g->tools.solver, device->runtime_version, err));
    if (shape) {
        QC_TRY(
            named(qc_gpu_forward_init(&g->f, device, shape, longest, tuning, err), OF_TEXT, err));
        if (g->f.act.tokens < qc_max_u64(longest, QC_GPU_TOKENS))
            return named(QC_ERR_NOMEM, OF_TEXT, err);
    } else {
        g->f.device = *device;
        QC_TRY(qc_cuda_stream_create(&g->f.stream, err));
    }
    g->text = shape != NULL;
    g->tools.stream = g->f.stream;
    return QC_OK;
}

static qc_status reopen(gpu *g, const qc_forward_shape *shape, uint64_t longest, qc_error *err)
{
    const qc_devices *d = g->base.k->devices;
    close_device(g);
    return settled(g, open_device(g, &d->gpus[0], shape, longest, &d->tuning, err), err);
}

static qc_status device_name(const char **out, qc_arena *arena, const qc_cuda_device *device,
                             qc_error *err)
{
    gpu g = {0};
    *out = NULL;
    qc_status st = open_device(&g, device, NULL, 0, NULL, err);
    if (st == QC_OK)
        st = qc_arena_printf(arena, out, err, "%s, %s, %s", device->name,
                             qc_cublas_name(g.tools.blas), qc_cusolver_name(g.tools.solver));
    close_device(&g);
    return st;
}

static void close(qc_calibrate_engine *e)
{
    close_device(of(e));
}

static qc_status text(qc_calibrate_engine *e, const qc_forward_shape *shape,
                      const qc_forward_batch *batch, const qc_calibrate_states *states,
                      qc_error *err)
{
    gpu *g = of(e);
    g->shape = shape;
    g->batch = *batch;
    g->states = states;
    return reopen(g, shape, qc_max_u64(1, qc_forward_longest(batch)), err);
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
    QC_TRY(grow(g, &s->matrices[which], counted.used, OF_LAYER, err));
    QC_TRY(grow(g, stage, qc_gpu_stage_bytes(m), OF_LAYER, err));
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
    QC_TRY(grow(g, &s->vectors, qc_gpu_vectors_bytes(&g->f), OF_LAYER, err));
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
    QC_TRY(named(qc_gpu_make_workspace(&g->f, workspace, err), OF_PRODUCTS, err));
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
    qc_status st = settled(g, take_layer(g, number, z, x, &stage, err), err);
    qc_gpu_drop(&stage);
    if (st != QC_OK) {
        drop_side(&g->z);
        drop_side(&g->x);
    }
    g->has_layer = st == QC_OK;
    return st;
}

static qc_status replace(gpu *g, qc_layer_which which, qc_gpu_memory *stage, qc_error *err)
{
    uint64_t bytes = g->f.workspace.bytes;
    QC_TRY(take_matrix(g, &g->x, which, &g->weights->matrices[which], stage, &bytes, err));
    QC_TRY(named(qc_gpu_make_workspace(&g->f, bytes, err), OF_PRODUCTS, err));
    return qc_cuda_stream_synchronize(g->f.stream, err);
}

static qc_status quantized(qc_calibrate_engine *e, qc_layer_which which, qc_error *err)
{
    gpu *g = of(e);
    qc_gpu_memory stage = {0};
    QC_TRY(need_text(g, 1, err));
    qc_gpu_drop(&g->x.matrices[which]); /* nothing uses the old one any more */
    qc_status st = settled(g, replace(g, which, &stage, err), err);
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
    drop_factor(g);
    drop_moments(g);
    if (n == 0)
        QC_FAIL(err, QC_ERR_USAGE, "second moments need at least one input, found none");
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        return named(QC_ERR_NOMEM, OF_MOMENTS, err);
    QC_TRY(named(qc_cuda_malloc(&g->h, size, err), OF_MOMENTS, err));
    if (cross)
        QC_TRY(named(qc_cuda_malloc(&g->c, size, err), OF_MOMENTS, err));
    g->n = n;
    return QC_OK;
}

static qc_status zero_moments(gpu *g, uint64_t n, int cross, qc_error *err)
{
    QC_TRY(new_moments(g, n, cross, err));
    size_t size = (size_t)(n * n * sizeof(double));
    QC_TRY(grow(g, &g->scratch, qc_cuda_moments_scratch_bytes(n), OF_MOMENTS, err));
    QC_TRY(qc_cuda_fill(g->h, 0, size, g->f.stream, err));
    return g->c ? qc_cuda_fill(g->c, 0, size, g->f.stream, err) : QC_OK;
}

static qc_status moments(qc_calibrate_engine *e, uint64_t n, int cross, qc_error *err)
{
    return settled(of(e), zero_moments(of(e), n, cross, err), err);
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
    st = settled(g, st, err);
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
    return grow(g, &g->inputs, qc_sat_mul(2, each), OF_INPUTS, err);
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
    return settled(g, st, err);
}

static qc_status pass(qc_calibrate_engine *e, double seconds, qc_error *err)
{
    gpu *g = of(e);
    const walk w = {.kind = THROUGH, .most_tokens = g->f.act.tokens, .seconds = seconds};
    QC_TRY(need_text(g, 1, err));
    return settled(g, walk_windows(g, &w, err), err);
}

static qc_status head(qc_calibrate_engine *e, const float *gain, qc_error *err)
{
    gpu *g = of(e);
    qc_gpu_memory m = {0};
    size_t bytes = (size_t)qc_gpu_bytes_of(g->f.form.hidden, 1, sizeof *gain);
    QC_TRY(need_text(g, 0, err));
    qc_status st = make_inputs(g, g->f.form.hidden, err);
    if (st == QC_OK)
        st = grow(g, &m, bytes, "the final norm", err);
    if (st == QC_OK)
        st = qc_cuda_to_device(m.base, gain, bytes, g->f.stream, err);
    const walk w = {.kind = TO_THE_HEAD,
                    .add = 1,
                    .gain = (const float *)(const void *)m.base,
                    .most_tokens = g->f.act.tokens};
    if (st == QC_OK)
        st = walk_windows(g, &w, err);
    st = settled(g, st, err);
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
    drop_factor(g);
    qc_gpu_drop(&g->scratch); /* the factor may need their room */
    qc_gpu_drop(&g->inputs);
    qc_status st =
        named(qc_cuda_feedback_open(&g->factor, &g->tools, g->n, g->h, g->c, options, info, err),
              "the factor of second moments", err);
    st = settled(g, st, err);
    drop_moments(g);
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
    st = settled(g, named(st, "a weight in work", err), err);
    qc_free(owned);
    return st;
}

/* The next moments or the next factor take its place. Until then it may stay. */
static void drop(qc_calibrate_engine *e)
{
    (void)e;
}

/* ---- speed and room ---- */

#define MEASURED_LEAST  256u
#define MEASURED_MOST   2048u
#define MEASURED_ENOUGH 0.02 /* seconds that stand out from noise */
#define MEASURED_LONG   0.5  /* seconds that are not waited for twice */

typedef struct {
    gpu *c;
    uint64_t n;
    qc_cublas_product_args product; /* of n x n matrices */
    qc_gpu_device_matrix dense;     /* for the forward pass of n tokens */
} measured;

typedef qc_status (*measured_fn)(const measured *m, qc_error *err);

static qc_status one_product(const measured *m, qc_error *err)
{
    qc_cublas *blas = m->c->tools.blas;
    QC_TRY(qc_cublas_begin(blas, NULL, 0, m->c->f.stream, err));
    qc_status st = qc_cublas_product(blas, &m->product, err);
    qc_cublas_end(blas);
    return st;
}

static qc_status one_dense(const measured *m, qc_error *err)
{
    qc_gpu_forward *f = &m->c->f;
    qc_cuda_product p;
    return qc_gpu_multiply(f, &m->dense, f->act.x, f->act.exponent, m->n, f->act.a, &p, err);
}

/* The seconds of the second run, because cuBLAS loads kernels in the first one of each size; but a
 * first run that is long is taken as it is. The very first one also loads the library, which takes
 * hundreds of milliseconds, so `warm` is 0 there: then it is run once more before. */
static qc_status time_of(const measured *m, measured_fn run, int warm, double *seconds,
                         qc_error *err)
{
    if (!warm) {
        QC_TRY(run(m, err));
        QC_TRY(qc_cuda_stream_synchronize(m->c->f.stream, err));
    }
    for (int i = 0; i < 2; i++) {
        uint64_t begin = qc_clock_ns();
        QC_TRY(run(m, err));
        QC_TRY(qc_cuda_stream_synchronize(m->c->f.stream, err));
        *seconds = (double)(qc_clock_ns() - begin) * 1e-9;
        if (*seconds > MEASURED_LONG)
            break;
    }
    *seconds = *seconds > 1e-9 ? *seconds : 1e-9;
    return QC_OK;
}

static qc_status measure_product(gpu *c, qc_dtype dtype, void *room, double *out, qc_error *err)
{
    for (uint64_t n = MEASURED_LEAST; n <= MEASURED_MOST; n *= 2) {
        uint64_t bytes = n * n * (qc_dtype_bits(dtype) / 8);
        unsigned char *at = room;
        double seconds = 0;
        const measured m = {.c = c,
                            .n = n,
                            .product = {.a = at,
                                        .b = at + bytes,
                                        .y = at + 2 * bytes,
                                        .dtype = dtype,
                                        .m = n,
                                        .n = n,
                                        .k = n,
                                        .lda = n,
                                        .ldb = n,
                                        .ldy = n,
                                        .trans_a = 1,
                                        .alpha = 1.0}};
        QC_TRY(time_of(&m, one_product, n > MEASURED_LEAST, &seconds, err));
        double operations = 2.0 * (double)n * (double)n * (double)n;
        *out = seconds / operations;
        if (seconds > MEASURED_ENOUGH)
            break;
    }
    return QC_OK;
}

/* Times the product with a gate matrix of zeros, whose halves are in `room`. */
static qc_status measure_forward(gpu *c, qc_gpu_memory *room, double *out, qc_error *err)
{
    const qc_forward_config *f = &c->f.form;
    const qc_forward_matrix gate = {
        .dtype = QC_DTYPE_F16, .rows = f->intermediate, .cols = f->hidden};
    const uint64_t most = qc_min_u64(MEASURED_MOST, c->f.act.tokens);
    measured m = {.c = c};
    qc_gpu_cutter counted = {0};
    m.dense = qc_gpu_lay_matrix(&gate, &counted);
    QC_TRY(grow(c, room, counted.used, OF_TIMED, err));
    qc_gpu_cutter at = {.base = room->base};
    m.dense = qc_gpu_lay_matrix(&gate, &at);
    m.dense.workspace_bytes = qc_matmul_no_gemm(c->f.handle) ? 0 : QC_MATMUL_DENSE_WORKSPACE;
    QC_TRY(qc_gpu_make_workspace(&c->f, m.dense.workspace_bytes + QC_MATMUL_HEADER_BYTES, err));
    QC_TRY(qc_cuda_fill(room->base, 0, (size_t)room->bytes, c->f.stream, err));
    QC_TRY(qc_cuda_fill(c->f.act.x, 0, (size_t)qc_gpu_bytes_of(most, f->hidden, sizeof(uint16_t)),
                        c->f.stream, err));
    const uint64_t least = qc_min_u64(most, 64);
    for (m.n = least; m.n <= most; m.n *= 2) {
        double seconds = 0;
        QC_TRY(time_of(&m, one_dense, m.n > least, &seconds, err));
        *out = seconds / (2.0 * (double)m.n * (double)f->intermediate * (double)f->hidden);
        if (seconds > MEASURED_ENOUGH)
            break;
    }
    return QC_OK;
}

static qc_status measure_all(gpu *c, qc_gpu_memory *room, qc_calibrate_speed *out, qc_error *err)
{
    const uint64_t elems = (uint64_t)3 * MEASURED_MOST * MEASURED_MOST;
    QC_TRY(grow(c, room, elems * sizeof(double), OF_TIMED, err));
    QC_TRY(qc_cuda_fill(room->base, 0, (size_t)room->bytes, c->f.stream, err));
    QC_TRY(measure_product(c, QC_DTYPE_F32, room->base, &out->single, err));
    QC_TRY(measure_product(c, QC_DTYPE_F64, room->base, &out->dual, err));
    return c->text ? measure_forward(c, room, &out->forward, err) : QC_OK;
}

static qc_status measure(qc_calibrate_engine *e, const qc_forward_shape *shape,
                         qc_calibrate_speed *out, qc_error *err)
{
    gpu *g = of(e);
    qc_gpu_memory room = {0};
    *out = (qc_calibrate_speed){.factor_slower = FACTOR_SLOWER,
                                .weight_slower = WEIGHT_SLOWER,
                                .coupled = COUPLED,
                                .coupled_pair = COUPLED_PAIR};
    QC_TRY(reopen(g, shape, 1, err));
    qc_status st = settled(g, measure_all(g, &room, out, err), err);
    qc_gpu_drop(&room);
    return st;
}

/* Activations, tables, kept inputs and the workspace. */
static qc_calibrate_room room_text(const qc_calibrate_engine *e, const qc_forward_shape *shape,
                                   uint64_t tokens, uint64_t longest)
{
    const qc_forward_config *c = &shape->config;
    uint64_t chunk = qc_max_u64(longest, QC_GPU_TOKENS);
    uint64_t heads = qc_sat_mul(c->heads, c->head_dim);
    uint64_t widest = qc_max_u64(qc_max_u64(c->hidden, c->intermediate), heads);
    qc_gpu_cutter counted = {0};
    (void)e;
    (void)tokens;
    qc_gpu_lay_activations(c, chunk, &counted);
    uint64_t table = qc_gpu_bytes_of(longest, c->head_dim / 2, sizeof(float));
    uint64_t bytes = qc_sat_add(counted.used, qc_sat_mul(2, qc_gpu_aligned(table)));
    bytes = qc_sat_add(bytes, qc_gpu_bytes_of(chunk, widest, 2 * sizeof(float)));
    return (qc_calibrate_room){.device = qc_sat_add(bytes, QC_GPU_WORKSPACE_MOST)};
}

/* The device needs the largest of three: while moments are added, while they are factored, and
 * while a weight is worked on. */
static qc_calibrate_room room_weight(const qc_calibrate_engine *e, uint64_t rows, uint64_t n,
                                     int cross, const qc_form *form, uint64_t block)
{
    uint64_t held = qc_sat_mul(qc_gpu_bytes_of(n, n, sizeof(double)), cross ? 2 : 1);
    uint64_t added = qc_sat_add(held, qc_cuda_moments_scratch_bytes(n));
    uint64_t factored = qc_sat_add(held, qc_cuda_feedback_open_bytes(n, cross));
    uint64_t worked = qc_sat_add(qc_cuda_feedback_kept_bytes(n, cross),
                                 qc_cuda_feedback_weight_least_bytes(rows, n, form, cross, block));
    (void)e;
    return (qc_calibrate_room){qc_sat_mul(qc_sat_mul(rows, n), 2),
                               qc_max_u64(qc_max_u64(added, factored), worked)};
}

static const qc_calibrate_engine_ops ops = {
    .bytes = sizeof(gpu),
    .close = close,
    .measure = measure,
    .room_text = room_text,
    .room_weight = room_weight,
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

const qc_gpu_calibrating qc_gpu_calibrating_table = {.ops = &ops, .name = device_name};
