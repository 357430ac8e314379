/* Calibrating on a GPU. The interface is calibrate_device.h.
 *
 * The two streams go through the steps of gpu_llama_internal.h in turn, in chunks of whole windows.
 * The inputs of a stage's linear layers are kept as floats for each stream and then added to the
 * moments. The size of a chunk does not depend on the free memory, because the order of the sums
 * would depend on it as well.
 *
 * Each matrix of a layer is an allocation of its own, so that one can be replaced while the others
 * stay where they are. A matrix that both streams name by the same pointers is held once, by z. */
#include "convert/gpu/gpu_calibrate.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/workers.h"
#include "convert/gpu/gpu_llama_internal.h"
#include "convert/gpu/gpu_table.h"
#include "kernels/cuda_feedback.h"

#include <stdio.h>
#include <string.h>

/* One stream's side of a layer. */
typedef struct {
    qc_gpu_layer_run run;
    qc_gpu_memory matrices[QC_LLAMA_MATRICES], vectors;
} side;

struct qc_gpu_calibrator {
    qc_gpu_forward f; /* without a text it has the device and the stream only */
    int text, has_layer;
    char name[320];
    qc_cuda_feedback_tools tools;
    side z, x;
    qc_gpu_memory inputs; /* floats: of x, then of z */
    uint64_t n;           /* of the moments; 0: none */
    double *h, *c;        /* c NULL: none */
    qc_gpu_memory scratch;
    qc_cuda_feedback *factor;
};

/* ---- memory ---- */

static void drop_memory(qc_gpu_memory *m)
{
    qc_cuda_free(m->base);
    *m = (qc_gpu_memory){0};
}

/* Says what the device has no room for. */
static qc_status named(qc_status st, const char *what, qc_error *err)
{
    if (st == QC_ERR_NOMEM)
        QC_FAIL(err, QC_ERR_NOMEM, "the GPU's memory has no room for %s", what);
    return st;
}

/* As qc_gpu_grow; what: what the memory is for. */
static qc_status grow(qc_gpu_calibrator *c, qc_gpu_memory *m, uint64_t bytes, const char *what,
                      qc_error *err)
{
    return named(qc_gpu_grow(&c->f, m, bytes, err), what, err);
}

static void drop_moments(qc_gpu_calibrator *c)
{
    qc_cuda_free(c->h);
    qc_cuda_free(c->c);
    drop_memory(&c->scratch);
    drop_memory(&c->inputs);
    c->h = c->c = NULL;
    c->n = 0;
}

static void drop_factor(qc_gpu_calibrator *c)
{
    qc_cuda_feedback_close(c->factor);
    c->factor = NULL;
}

static void drop_side(side *s)
{
    for (unsigned i = 0; i < QC_LLAMA_MATRICES; i++)
        drop_memory(&s->matrices[i]);
    drop_memory(&s->vectors);
    s->run = (qc_gpu_layer_run){0};
}

/* ---- the calibrator ---- */

static qc_status set_up(qc_gpu_calibrator *c, const qc_cuda_device *device,
                        const qc_gpu_decoder_form *form, const qc_matmul_table *tuning,
                        qc_error *err)
{
    QC_TRY(qc_cuda_use(device, err));
    QC_TRY(qc_cublas_open(&c->tools.blas, device->runtime_version, err));
    QC_TRY(qc_cusolver_open(&c->tools.solver, device->runtime_version, err));
    if (form) {
        QC_TRY(named(qc_gpu_forward_init(&c->f, device, form, tuning, err),
                     "the activations of calibration", err));
        uint64_t wanted = qc_gpu_larger(form->longest, QC_GPU_TOKENS);
        if (c->f.act.tokens < wanted)
            QC_FAIL(err, QC_ERR_NOMEM,
                    "the GPU's memory has no room for the activations of calibration");
    } else {
        c->f.device = *device;
        QC_TRY(qc_cuda_stream_create(&c->f.stream, err));
    }
    c->text = form != NULL;
    c->tools.stream = c->f.stream;
    snprintf(c->name, sizeof c->name, "%s, %s, %s", device->name, qc_cublas_name(c->tools.blas),
             qc_cusolver_name(c->tools.solver));
    return QC_OK;
}

static void calibrator_destroy(qc_gpu_calibrator *c)
{
    if (!c)
        return;
    /* Nothing may still use the memory that is given back. A stream that fails has stopped. */
    if (c->f.stream && qc_cuda_stream_synchronize(c->f.stream, NULL) != QC_OK)
        c->has_layer = 0;
    drop_factor(c);
    drop_moments(c);
    drop_side(&c->z);
    drop_side(&c->x);
    qc_cusolver_close(c->tools.solver);
    qc_cublas_close(c->tools.blas);
    qc_gpu_forward_deinit(&c->f);
    qc_free(c);
}

static qc_status calibrator_create(qc_gpu_calibrator **out, const qc_cuda_device *device,
                                   const qc_gpu_decoder_form *form, const qc_matmul_table *tuning,
                                   qc_error *err)
{
    void *v = NULL;
    *out = NULL;
    if (form)
        QC_TRY(qc_gpu_check_form(form, err));
    QC_TRY(qc_calloc(&v, 1, sizeof **out, err));
    qc_gpu_calibrator *c = v;
    qc_status st = set_up(c, device, form, tuning, err);
    if (st != QC_OK) {
        calibrator_destroy(c);
        return st;
    }
    *out = c;
    return QC_OK;
}

static const char *calibrator_name(const qc_gpu_calibrator *c)
{
    return c->name;
}

/* After an error, what was started may still read the host's arrays, so this waits for it. Returns
 * st. */
static qc_status settled(qc_gpu_calibrator *c, qc_status st)
{
    if (st != QC_OK && qc_cuda_stream_synchronize(c->f.stream, NULL) != QC_OK)
        c->has_layer = 0; /* the device is lost */
    return st;
}

/* ---- a layer ---- */

static qc_gpu_device_matrix *part_of(qc_gpu_layer_run *r, unsigned part)
{
    qc_gpu_device_matrix *all[QC_LLAMA_MATRICES] = {&r->q,    &r->k,  &r->v,   &r->o,
                                                    &r->gate, &r->up, &r->down};
    return all[part];
}

static const qc_gpu_matrix *matrix_of(const qc_gpu_decoder_layer *l, unsigned part)
{
    const qc_gpu_matrix *all[QC_LLAMA_MATRICES] = {&l->q,    &l->k,  &l->v,   &l->o,
                                                   &l->gate, &l->up, &l->down};
    return all[part];
}

/* Are both the same matrix? For quantized ones it counts where their codes are, because each has a
 * description of its own. */
static int same_matrix(const qc_gpu_matrix *a, const qc_gpu_matrix *b)
{
    if (a->bias != b->bias || !a->quantized != !b->quantized)
        return 0;
    if (a->quantized)
        return a->quantized == b->quantized || a->quantized->codes == b->quantized->codes;
    return a->dense == b->dense;
}

static qc_status take_matrix(qc_gpu_calibrator *c, side *s, unsigned part, const qc_gpu_matrix *m,
                             qc_gpu_memory *stage, uint64_t *workspace, qc_error *err)
{
    qc_gpu_cutter counted = {0};
    qc_gpu_lay_matrix(m, &counted);
    QC_TRY(grow(c, &s->matrices[part], counted.used, "a layer's weights", err));
    if (!m->quantized)
        QC_TRY(grow(c, stage, qc_gpu_dense_bytes(m), "a layer's weights", err));
    qc_gpu_cutter at = {.base = s->matrices[part].base};
    qc_gpu_device_matrix *out = part_of(&s->run, part);
    uint64_t bytes = 0;
    *out = qc_gpu_lay_matrix(m, &at);
    QC_TRY(qc_gpu_fill_matrix(&c->f, m, out, stage->base, c->f.act.tokens, &bytes, err));
    *workspace = qc_gpu_larger(*workspace, bytes);
    return QC_OK;
}

static qc_status take_vectors(qc_gpu_calibrator *c, side *s, const qc_gpu_decoder_layer *l,
                              qc_error *err)
{
    const qc_gpu_decoder_form *f = &c->f.form;
    uint64_t hidden = qc_gpu_aligned(qc_gpu_bytes_of(f->hidden, 1, sizeof(float)));
    uint64_t head = qc_gpu_aligned(qc_gpu_bytes_of(f->head_dim, 1, sizeof(float)));
    QC_TRY(grow(c, &s->vectors, 2 * hidden + 2 * head, "a layer's weights", err));
    qc_gpu_cutter at = {.base = s->vectors.base};
    qc_gpu_layer_run *r = &s->run;
    QC_TRY(qc_gpu_take_vector(&c->f, &at, l->input_norm, f->hidden, &r->input_norm, err));
    QC_TRY(qc_gpu_take_vector(&c->f, &at, l->attention_norm, f->hidden, &r->attention_norm, err));
    QC_TRY(qc_gpu_take_vector(&c->f, &at, l->q_norm, f->head_dim, &r->q_norm, err));
    QC_TRY(qc_gpu_take_vector(&c->f, &at, l->k_norm, f->head_dim, &r->k_norm, err));
    r->window = l->window > UINT32_MAX ? 0 : (uint32_t)l->window;
    return QC_OK;
}

static qc_status take_layer(qc_gpu_calibrator *c, const qc_gpu_decoder_layer *z,
                            const qc_gpu_decoder_layer *x, qc_gpu_memory *stage, qc_error *err)
{
    uint64_t workspace = 0;
    for (unsigned i = 0; i < QC_LLAMA_MATRICES; i++) {
        const qc_gpu_matrix *mz = matrix_of(z, i), *mx = matrix_of(x, i);
        QC_TRY(take_matrix(c, &c->z, i, mz, stage, &workspace, err));
        if (same_matrix(mz, mx)) {
            drop_memory(&c->x.matrices[i]);
            *part_of(&c->x.run, i) = *part_of(&c->z.run, i);
        } else {
            QC_TRY(take_matrix(c, &c->x, i, mx, stage, &workspace, err));
        }
    }
    /* Norms are small, so each side has its own. */
    QC_TRY(take_vectors(c, &c->z, z, err));
    QC_TRY(take_vectors(c, &c->x, x, err));
    QC_TRY(named(qc_gpu_make_workspace(&c->f, workspace, err), "a layer's products", err));
    /* After this the caller may change or free its arrays. */
    return qc_cuda_stream_synchronize(c->f.stream, err);
}

static qc_status need_text(const qc_gpu_calibrator *c, int layer, qc_error *err)
{
    if (!c->text || (layer && !c->has_layer))
        QC_FAIL(err, QC_ERR_USAGE, "calibrating: this needs a %s first",
                c->text ? "layer" : "text");
    return qc_cuda_use(&c->f.device, err);
}

static qc_status calibrator_layer(qc_gpu_calibrator *c, const qc_gpu_decoder_layer *z,
                                  const qc_gpu_decoder_layer *x, qc_error *err)
{
    qc_gpu_memory stage = {0};
    QC_TRY(need_text(c, 0, err));
    c->has_layer = 0;
    qc_status st = settled(c, take_layer(c, z, x, &stage, err));
    drop_memory(&stage);
    if (st != QC_OK) {
        drop_side(&c->z);
        drop_side(&c->x);
    }
    c->has_layer = st == QC_OK;
    return st;
}

static qc_status take_part(qc_gpu_calibrator *c, unsigned part, const qc_gpu_matrix *m,
                           qc_gpu_memory *stage, qc_error *err)
{
    uint64_t workspace = 0;
    QC_TRY(take_matrix(c, &c->x, part, m, stage, &workspace, err));
    QC_TRY(named(qc_gpu_make_workspace(&c->f, qc_gpu_larger(workspace, c->f.workspace.bytes), err),
                 "a layer's products", err));
    return qc_cuda_stream_synchronize(c->f.stream, err);
}

static qc_status calibrator_replace(qc_gpu_calibrator *c, qc_llama_part part,
                                    const qc_gpu_matrix *m, qc_error *err)
{
    qc_gpu_memory stage = {0};
    QC_TRY(need_text(c, 1, err));
    drop_memory(&c->x.matrices[part]); /* nothing uses the old one any more */
    qc_status st = settled(c, take_part(c, (unsigned)part, m, &stage, err));
    drop_memory(&stage);
    return st;
}

/* ---- moments ---- */

static qc_status new_moments(qc_gpu_calibrator *c, uint64_t n, int cross, qc_error *err)
{
    static const char what[] = "the second moments of a linear layer's inputs";
    uint64_t bytes = qc_gpu_bytes_of(n, n, sizeof(double));
    size_t size = 0;
    void *v = NULL;
    QC_TRY(qc_cuda_use(&c->f.device, err));
    QC_TRY(qc_cuda_stream_synchronize(c->f.stream, err));
    drop_factor(c);
    drop_moments(c);
    if (n == 0)
        QC_FAIL(err, QC_ERR_USAGE, "second moments need at least one input");
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        return named(QC_ERR_NOMEM, what, err);
    QC_TRY(named(qc_cuda_malloc(&v, size, err), what, err));
    c->h = v;
    if (cross) {
        v = NULL;
        QC_TRY(named(qc_cuda_malloc(&v, size, err), what, err));
        c->c = v;
    }
    c->n = n;
    return QC_OK;
}

static qc_status calibrator_moments(qc_gpu_calibrator *c, uint64_t n, int cross, qc_error *err)
{
    QC_TRY(new_moments(c, n, cross, err));
    size_t size = (size_t)(n * n * sizeof(double));
    QC_TRY(grow(c, &c->scratch, qc_cuda_moments_scratch_bytes(n),
                "the second moments of a linear layer's inputs", err));
    QC_TRY(qc_cuda_fill(c->h, 0, size, c->f.stream, err));
    if (c->c)
        QC_TRY(qc_cuda_fill(c->c, 0, size, c->f.stream, err));
    return QC_OK;
}

static qc_status calibrator_take(qc_gpu_calibrator *c, uint64_t n, const double *h, qc_error *err)
{
    QC_TRY(new_moments(c, n, 0, err));
    qc_status st = qc_cuda_to_device(c->h, h, (size_t)(n * n * sizeof *h), c->f.stream, err);
    if (st == QC_OK)
        st = qc_cuda_stream_synchronize(c->f.stream, err);
    return settled(c, st);
}

uint64_t qc_gpu_calibrator_inputs(const qc_gpu_calibrator *c)
{
    return c->n;
}

qc_status qc_gpu_calibrator_read(const qc_gpu_calibrator *c, double *h, double *cross,
                                 qc_error *err)
{
    size_t bytes = (size_t)(c->n * c->n * sizeof *h);
    QC_TRY(qc_cuda_use(&c->f.device, err));
    QC_TRY(qc_cuda_to_host(h, c->h, bytes, c->f.stream, err));
    if (cross)
        QC_TRY(qc_cuda_to_host(cross, c->c, bytes, c->f.stream, err));
    return qc_cuda_stream_synchronize(c->f.stream, err);
}

/* ---- stages ---- */

/* The floats of a chunk's inputs, for stream z or for stream x. */
static float *inputs_of(const qc_gpu_calibrator *c, int z)
{
    return (float *)(void *)(c->inputs.base + (z ? c->inputs.bytes / 2 : 0));
}

static qc_status make_inputs(qc_gpu_calibrator *c, uint64_t n, qc_error *err)
{
    if (c->n != n || !c->scratch.base)
        QC_FAIL(err, QC_ERR_USAGE, "the moments have %llu inputs and the linear layers have %llu",
                (unsigned long long)c->n, (unsigned long long)n);
    uint64_t each = qc_gpu_aligned(qc_gpu_bytes_of(c->f.act.tokens, n, sizeof(float)));
    return grow(c, &c->inputs, qc_sat_mul(2, each), "the inputs of a linear layer", err);
}

/* Keeps the halves in act.x, which have these exponents, as floats. */
static qc_status keep_halves(qc_gpu_calibrator *c, const int *exponent, uint64_t rows, int z,
                             qc_error *err)
{
    const qc_cuda_product p = {.half = c->f.act.x, .exponent = exponent};
    return qc_cuda_llama_floats(&p, rows, c->n, 0, inputs_of(c, z), c->f.stream, err);
}

static uint64_t inputs_at(const qc_gpu_decoder_form *f, qc_llama_stage stage)
{
    return stage == QC_LLAMA_AT_O      ? f->heads * f->head_dim
           : stage == QC_LLAMA_AT_DOWN ? f->intermediate
                                       : f->hidden;
}

/* Takes a chunk of one stream through a stage. keep: the inputs of its linear layers are kept. */
static qc_status stage_of(qc_gpu_calibrator *c, qc_gpu_layer_run *r, qc_llama_stage stage,
                          float *hidden, float *attended, int z, int keep, qc_error *err)
{
    qc_gpu_forward *f = &c->f;
    size_t bytes = (size_t)qc_gpu_bytes_of(r->rows, f->form.hidden, sizeof(float));
    uint64_t heads = f->form.heads * f->form.head_dim;
    size_t heads_bytes = (size_t)qc_gpu_bytes_of(r->rows, heads, sizeof(float));
    QC_TRY(qc_cuda_to_device(f->act.hidden, hidden, bytes, f->stream, err));
    switch (stage) {
    case QC_LLAMA_AT_QKV:
        QC_TRY(qc_gpu_step_norm(f, r, r->input_norm, err));
        return keep ? keep_halves(c, f->act.exponent, r->rows, z, err) : QC_OK;
    case QC_LLAMA_AT_O:
        QC_TRY(qc_gpu_step_attend(f, r, err));
        QC_TRY(qc_cuda_to_host(attended, f->act.attended, heads_bytes, f->stream, err));
        return keep ? qc_cuda_copy(inputs_of(c, z), f->act.attended, heads_bytes, f->stream, err)
                    : QC_OK;
    case QC_LLAMA_AT_GATE:
        QC_TRY(qc_cuda_to_device(f->act.attended, attended, heads_bytes, f->stream, err));
        QC_TRY(qc_gpu_step_o(f, r, err));
        QC_TRY(qc_cuda_to_host(hidden, f->act.hidden, bytes, f->stream, err));
        if (!keep)
            return QC_OK;
        QC_TRY(qc_gpu_step_norm(f, r, r->attention_norm, err));
        return keep_halves(c, f->act.exponent, r->rows, z, err);
    case QC_LLAMA_AT_DOWN:
        QC_TRY(qc_gpu_step_gate(f, r, err));
        return keep ? keep_halves(c, f->act.exponent2, r->rows, z, err) : QC_OK;
    case QC_LLAMA_AT_END:
        QC_TRY(qc_gpu_step_gate(f, r, err));
        QC_TRY(qc_gpu_step_down(f, r, err));
        return qc_cuda_to_host(hidden, f->act.hidden, bytes, f->stream, err);
    }
    QC_FAIL(err, QC_ERR_USAGE, "calibrating: stage %d does not exist", (int)stage);
}

static qc_status whole_of(qc_gpu_calibrator *c, qc_gpu_layer_run *r, float *hidden, qc_error *err)
{
    qc_gpu_forward *f = &c->f;
    size_t bytes = (size_t)qc_gpu_bytes_of(r->rows, f->form.hidden, sizeof(float));
    QC_TRY(qc_cuda_to_device(f->act.hidden, hidden, bytes, f->stream, err));
    QC_TRY(qc_gpu_step_attend(f, r, err));
    QC_TRY(qc_gpu_step_o(f, r, err));
    QC_TRY(qc_gpu_step_gate(f, r, err));
    QC_TRY(qc_gpu_step_down(f, r, err));
    return qc_cuda_to_host(hidden, f->act.hidden, bytes, f->stream, err);
}

static qc_status norm_of(qc_gpu_calibrator *c, const qc_gpu_layer_run *r, const float *gain,
                         const float *hidden, int z, qc_error *err)
{
    qc_gpu_forward *f = &c->f;
    size_t bytes = (size_t)qc_gpu_bytes_of(r->rows, f->form.hidden, sizeof(float));
    QC_TRY(qc_cuda_to_device(f->act.hidden, hidden, bytes, f->stream, err));
    QC_TRY(qc_gpu_step_norm(f, r, gain, err));
    return keep_halves(c, f->act.exponent, r->rows, z, err);
}

typedef enum { A_STAGE, A_PASS, THE_HEAD } walk_kind;

typedef struct {
    walk_kind kind;
    qc_llama_stage stage;
    int add;
    const float *gain; /* on the device, for THE_HEAD */
} walk;

/* Takes one chunk of z and then of x, and adds their moments. */
static qc_status walk_chunk(qc_gpu_calibrator *c, const walk *w, const qc_gpu_states *s,
                            const uint64_t *lengths, uint64_t count, uint64_t token, qc_error *err)
{
    const qc_gpu_decoder_form *f = &c->f.form;
    uint64_t at = token * f->hidden, heads = token * f->heads * f->head_dim, rows = 0;
    for (int z = 1; z >= 0; z--) {
        qc_gpu_layer_run *r = z ? &c->z.run : &c->x.run;
        float *hidden = (z ? s->z : s->x) + at;
        float *attended = z ? s->z_attended : s->x_attended;
        QC_TRY(qc_gpu_step_windows(&c->f, r, lengths, count, err));
        rows = r->rows;
        if (w->kind == A_PASS)
            QC_TRY(whole_of(c, r, hidden, err));
        else if (w->kind == THE_HEAD)
            QC_TRY(norm_of(c, r, w->gain, hidden, z, err));
        else
            QC_TRY(stage_of(c, r, w->stage, hidden, attended ? attended + heads : NULL, z,
                            w->add && w->stage != QC_LLAMA_AT_END && (!z || c->c), err));
        /* The host writes its positions and tiles again for the next chunk. */
        QC_TRY(qc_cuda_stream_synchronize(c->f.stream, err));
    }
    if (!w->add)
        return QC_OK;
    QC_TRY(qc_cuda_moments_add(&c->tools, c->h, c->c, c->n, inputs_of(c, 0), c->n,
                               c->c ? inputs_of(c, 1) : NULL, c->n, rows,
                               (float *)(void *)c->scratch.base, err));
    return qc_cuda_stream_synchronize(c->f.stream, err);
}

static qc_status walk_windows(qc_gpu_calibrator *c, const walk *w, const qc_gpu_states *s,
                              qc_error *err)
{
    uint64_t token = 0;
    QC_TRY(qc_gpu_check_windows(&c->f, s->lengths, s->windows, err));
    for (uint64_t first = 0, next = 0; first < s->windows; first = next) {
        uint64_t rows = qc_gpu_next_windows(&c->f, s->lengths, s->windows, &next);
        if (qc_interrupted())
            QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
        QC_TRY(walk_chunk(c, w, s, s->lengths + first, next - first, token, err));
        token += rows;
    }
    return QC_OK;
}

static qc_status calibrator_stage(qc_gpu_calibrator *c, qc_llama_stage stage,
                                  const qc_gpu_states *s, int add, qc_error *err)
{
    const walk w = {.kind = A_STAGE, .stage = stage, .add = add && stage != QC_LLAMA_AT_END};
    QC_TRY(need_text(c, 1, err));
    if (w.add)
        QC_TRY(make_inputs(c, inputs_at(&c->f.form, stage), err));
    return settled(c, walk_windows(c, &w, s, err));
}

static qc_status calibrator_pass(qc_gpu_calibrator *c, const qc_gpu_states *s, qc_error *err)
{
    const walk w = {.kind = A_PASS};
    QC_TRY(need_text(c, 1, err));
    return settled(c, walk_windows(c, &w, s, err));
}

static qc_status calibrator_head(qc_gpu_calibrator *c, const float *gain, const qc_gpu_states *s,
                                 qc_error *err)
{
    qc_gpu_memory m = {0};
    size_t bytes = (size_t)qc_gpu_bytes_of(c->f.form.hidden, 1, sizeof *gain);
    QC_TRY(need_text(c, 0, err));
    QC_TRY(make_inputs(c, c->f.form.hidden, err));
    QC_TRY(grow(c, &m, bytes, "the final norm", err));
    const walk w = {.kind = THE_HEAD, .add = 1, .gain = (const float *)(const void *)m.base};
    qc_status st = qc_cuda_to_device(m.base, gain, bytes, c->f.stream, err);
    if (st == QC_OK)
        st = walk_windows(c, &w, s, err);
    st = settled(c, st);
    drop_memory(&m);
    return st;
}

/* ---- factor and weights ---- */

static qc_status calibrator_factor(qc_gpu_calibrator *c, const qc_feedback_options *options,
                                   qc_feedback_info *info, qc_error *err)
{
    QC_TRY(qc_cuda_use(&c->f.device, err));
    if (c->n == 0)
        QC_FAIL(err, QC_ERR_USAGE, "there are no moments to be factored");
    QC_TRY(qc_cuda_stream_synchronize(c->f.stream, err));
    drop_factor(c);
    drop_memory(&c->scratch); /* the factor may need their room */
    drop_memory(&c->inputs);
    qc_status st =
        named(qc_cuda_feedback_open(&c->factor, &c->tools, c->n, c->h, c->c, options, info, err),
              "the factor of second moments", err);
    st = settled(c, st);
    drop_moments(c);
    return st;
}

static qc_status calibrator_weight(qc_gpu_calibrator *c, const qc_feedback_form *form,
                                   const qc_gpu_matrix *w, qc_feedback_out *out,
                                   qc_feedback_result *result, qc_error *err)
{
    QC_TRY(qc_cuda_use(&c->f.device, err));
    if (!c->factor)
        QC_FAIL(err, QC_ERR_USAGE, "a weight can only follow a factor");
    if (w->quantized)
        QC_FAIL(err, QC_ERR_USAGE, "the weight is quantized, a dense one was expected");
    qc_status st =
        qc_cuda_feedback_weight(c->factor, form, w->dense, w->dtype, w->rows, out, result, err);
    return named(settled(c, st), "a weight in work", err);
}

/* ---- speed and room ---- */

#define MEASURED_LEAST  256u
#define MEASURED_MOST   2048u
#define MEASURED_ENOUGH 0.02 /* seconds that stand out from noise */

typedef struct {
    qc_gpu_calibrator *c;
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

/* The seconds of the second run, because libraries are loaded in the first one; but a first run
 * that is long enough is taken as it is. */
static qc_status time_of(const measured *m, measured_fn run, double *seconds, qc_error *err)
{
    for (int i = 0; i < 2; i++) {
        uint64_t begin = qc_clock_ns();
        QC_TRY(run(m, err));
        QC_TRY(qc_cuda_stream_synchronize(m->c->f.stream, err));
        *seconds = (double)(qc_clock_ns() - begin) * 1e-9;
        if (*seconds > MEASURED_ENOUGH)
            break;
    }
    *seconds = *seconds > 1e-9 ? *seconds : 1e-9;
    return QC_OK;
}

static qc_status measure_product(qc_gpu_calibrator *c, qc_dtype dtype, void *room, double *out,
                                 qc_error *err)
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
        QC_TRY(time_of(&m, one_product, &seconds, err));
        double operations = 2.0 * (double)n * (double)n * (double)n;
        *out = seconds / operations;
        if (seconds > MEASURED_ENOUGH)
            break;
    }
    return QC_OK;
}

/* Times the product with a gate matrix of zeros, whose halves are in `room`. */
static qc_status measure_forward(qc_gpu_calibrator *c, qc_gpu_memory *room, double *out,
                                 qc_error *err)
{
    const qc_gpu_decoder_form *f = &c->f.form;
    const qc_gpu_matrix gate = {.dtype = QC_DTYPE_F16, .rows = f->intermediate, .cols = f->hidden};
    const uint64_t most = MEASURED_MOST < c->f.act.tokens ? MEASURED_MOST : c->f.act.tokens;
    measured m = {.c = c};
    qc_gpu_cutter counted = {0};
    m.dense = qc_gpu_lay_matrix(&gate, &counted);
    QC_TRY(grow(c, room, counted.used, "products that are timed", err));
    qc_gpu_cutter at = {.base = room->base};
    m.dense = qc_gpu_lay_matrix(&gate, &at);
    m.dense.workspace_bytes = qc_matmul_no_gemm(c->f.handle) ? 0 : QC_MATMUL_DENSE_WORKSPACE;
    QC_TRY(qc_gpu_make_workspace(&c->f, m.dense.workspace_bytes + QC_MATMUL_HEADER_BYTES, err));
    QC_TRY(qc_cuda_fill(room->base, 0, (size_t)room->bytes, c->f.stream, err));
    QC_TRY(qc_cuda_fill(c->f.act.x, 0, (size_t)qc_gpu_bytes_of(most, f->hidden, sizeof(uint16_t)),
                        c->f.stream, err));
    for (m.n = most < 64 ? most : 64; m.n <= most; m.n *= 2) {
        double seconds = 0;
        QC_TRY(time_of(&m, one_dense, &seconds, err));
        *out = seconds / (2.0 * (double)m.n * (double)f->intermediate * (double)f->hidden);
        if (seconds > MEASURED_ENOUGH)
            break;
    }
    return QC_OK;
}

static qc_status measure(qc_gpu_calibrator *c, qc_gpu_memory *room, double *single, double *dual,
                         double *forward, qc_error *err)
{
    const uint64_t elems = (uint64_t)3 * MEASURED_MOST * MEASURED_MOST;
    QC_TRY(grow(c, room, elems * sizeof(double), "products that are timed", err));
    QC_TRY(qc_cuda_fill(room->base, 0, (size_t)room->bytes, c->f.stream, err));
    QC_TRY(measure_product(c, QC_DTYPE_F32, room->base, single, err));
    QC_TRY(measure_product(c, QC_DTYPE_F64, room->base, dual, err));
    return c->text ? measure_forward(c, room, forward, err) : QC_OK;
}

static qc_status calibrator_measure(qc_gpu_calibrator *c, double *single, double *dual,
                                    double *forward, qc_error *err)
{
    qc_gpu_memory room = {0};
    *single = *dual = *forward = 0;
    QC_TRY(qc_cuda_use(&c->f.device, err));
    qc_status st = settled(c, measure(c, &room, single, dual, forward, err));
    drop_memory(&room);
    return st;
}

static uint64_t text_bytes(const qc_gpu_decoder_form *f)
{
    uint64_t tokens = qc_gpu_larger(f->longest, QC_GPU_TOKENS);
    uint64_t heads = qc_sat_mul(f->heads, f->head_dim);
    uint64_t widest = qc_gpu_larger(qc_gpu_larger(f->hidden, f->intermediate), heads);
    qc_gpu_cutter counted = {0};
    qc_gpu_lay_activations(f, tokens, &counted);
    uint64_t table = qc_gpu_bytes_of(f->longest, f->head_dim / 2, sizeof(float));
    uint64_t inputs = qc_gpu_bytes_of(tokens, widest, 2 * sizeof(float));
    uint64_t fixed = qc_sat_add(counted.used, qc_sat_mul(2, qc_gpu_aligned(table)));
    return qc_sat_add(qc_sat_add(fixed, inputs), QC_GPU_WORKSPACE_MOST);
}

/* The largest of three needs: while moments are added, while they are factored, and while a weight
 * is worked on. */
static uint64_t moments_bytes(const qc_gpu_calibrating_size *s)
{
    uint64_t square = qc_gpu_bytes_of(s->n, s->n, sizeof(double));
    uint64_t held = s->cross ? qc_sat_mul(2, square) : square;
    uint64_t added = qc_sat_add(held, qc_cuda_moments_scratch_bytes(s->n));
    uint64_t factored = qc_sat_add(held, qc_cuda_feedback_open_bytes(s->n, s->cross));
    uint64_t most = qc_gpu_larger(added, factored);
    if (!s->weight)
        return most;
    uint64_t kept = qc_cuda_feedback_kept_bytes(s->n, s->cross);
    uint64_t weight = qc_cuda_feedback_weight_least_bytes(s->rows, s->n, s->weight, s->cross);
    return qc_gpu_larger(most, qc_sat_add(kept, weight));
}

static uint64_t calibrator_bytes(const qc_gpu_calibrating_size *size)
{
    uint64_t bytes = size->form ? text_bytes(size->form) : 0;
    bytes = qc_sat_add(bytes, qc_sat_mul(2, size->layer_bytes));
    return size->n ? qc_sat_add(bytes, moments_bytes(size)) : bytes;
}

const qc_gpu_calibrating qc_gpu_calibrating_table = {
    .create = calibrator_create,
    .destroy = calibrator_destroy,
    .name = calibrator_name,
    .layer = calibrator_layer,
    .replace = calibrator_replace,
    .moments = calibrator_moments,
    .stage = calibrator_stage,
    .pass = calibrator_pass,
    .head = calibrator_head,
    .take = calibrator_take,
    .factor = calibrator_factor,
    .weight = calibrator_weight,
    .measure = calibrator_measure,
    .bytes = calibrator_bytes,
};
