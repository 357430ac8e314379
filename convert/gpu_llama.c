/* Layers of a Llama-like decoder on a GPU; the seam is convert/gpu_work.h, the arithmetic between
 * two products kernels/cuda_llama.h.
 *
 *   hidden --norm--> halves --q, k, v--> heads (norm, rotation) --attention--> halves --o--+
 *      |                                                                                  |
 *      +<------------------------------------ add -----------------------------------------+
 *      +--norm--> halves --gate, up--> SwiGLU --> halves --down--> add
 *
 * Of a layer all weights are on the device, made ready once; tokens go through it in chunks of
 * whole windows, as many as ACTIVATION_TOKENS, so that memory does not grow with the text. The
 * activations of a chunk, the weights of a layer, the workspace and the head are one allocation
 * each, which is made anew only where a larger one is needed.
 *
 * Dense weights go to the device as they are and are rounded there to float16 with one exponent;
 * their products are cuBLAS's, or where there is none qc_cuda_llama_dense's. */
#include "convert/gpu_llama.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "kernels/cuda_llama.h"
#include "kernels/matmul_tuning.h"

#include <math.h>
#include <string.h>

#define ALIGNMENT         256u
#define ACTIVATION_TOKENS 4096u /* at once, or the longest window */
#define LOGITS_BYTES      ((uint64_t)128 << 20)
#define WORKSPACE_MOST    ((uint64_t)256 << 20)
#define LAYER_MATRICES    7u

typedef struct {
    uint64_t rows, cols;
    int is_dense;
    uint16_t *half; /* dense */
    int *exponent;  /* dense */
    uint32_t *largest;
    qc_weights stored; /* quantized; arrays on the device */
    void *prepared;
    qc_matmul_weights ready;
    float *bias;              /* or NULL */
    uint64_t workspace_bytes; /* of products with it: how K is split depends on it */
} device_matrix;

/* An allocation of the device that grows. */
typedef struct {
    unsigned char *base;
    uint64_t bytes;
} device_memory;

/* Parts of one, in turn; base NULL: only counts. */
typedef struct {
    unsigned char *base;
    uint64_t used;
} cutter;

/* Of a chunk of tokens. */
typedef struct {
    uint64_t tokens; /* there is room for */
    float *hidden, *q, *k, *v, *attended;
    uint16_t *x, *a, *b;       /* halves on their way in, and out of products */
    int *exponent, *exponent2; /* of x before and behind SwiGLU */
    uint32_t *position;
    qc_cuda_query_tile *tiles;
} activations;

struct qc_gpu_decoder {
    qc_cuda_device device;
    qc_gpu_decoder_form form; /* its tables are the device's */
    qc_matmul *handle;
    qc_cuda_stream stream;
    device_memory tables, room, weights, workspace, head_weights, head_room;
    activations act;
    uint32_t *position;        /* host, [act.tokens] */
    qc_cuda_query_tile *tiles; /* host, [act.tokens] */
    device_matrix head;        /* rows 0: none */
    uint64_t head_tokens;
};

/* ---- memory ---------------------------------------------------------------------------------- */

static uint64_t aligned(uint64_t bytes)
{
    return qc_sat_add(bytes, ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* bytes of it at least, not initialised. */
static qc_status grow(qc_gpu_decoder *d, device_memory *m, uint64_t bytes, qc_error *err)
{
    size_t size = 0;
    void *v = NULL;
    if (bytes <= m->bytes)
        return QC_OK;
    if (qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "a layer is too large for a GPU's memory");
    QC_TRY(qc_cuda_stream_synchronize(d->stream, err)); /* nothing uses the old one */
    qc_cuda_free(m->base);
    *m = (device_memory){0};
    QC_TRY(qc_cuda_malloc(&v, size, err));
    *m = (device_memory){v, bytes};
    return QC_OK;
}

static void *cut(cutter *c, uint64_t bytes)
{
    void *at = c->base ? c->base + c->used : NULL;
    c->used = qc_sat_add(c->used, aligned(bytes));
    return at;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t bytes_of(uint64_t tokens, uint64_t each, uint64_t size)
{
    return qc_sat_mul(qc_sat_mul(tokens, each), size);
}

static activations lay_activations(const qc_gpu_decoder_form *f, uint64_t tokens, cutter *c)
{
    uint64_t q = qc_sat_mul(f->heads, f->head_dim), kv = qc_sat_mul(f->kv_heads, f->head_dim);
    uint64_t widest = larger(larger(f->hidden, f->intermediate), larger(q, kv));
    activations a = {.tokens = tokens};
    a.hidden = cut(c, bytes_of(tokens, f->hidden, sizeof(float)));
    a.q = cut(c, bytes_of(tokens, q, sizeof(float)));
    a.k = cut(c, bytes_of(tokens, kv, sizeof(float)));
    a.v = cut(c, bytes_of(tokens, kv, sizeof(float)));
    a.attended = cut(c, bytes_of(tokens, q, sizeof(float)));
    a.x = cut(c, bytes_of(tokens, widest, sizeof(uint16_t)));
    a.a = cut(c, bytes_of(tokens, widest, sizeof(uint16_t)));
    a.b = cut(c, bytes_of(tokens, f->intermediate, sizeof(uint16_t)));
    a.exponent = cut(c, bytes_of(tokens, 1, sizeof(int)));
    a.exponent2 = cut(c, bytes_of(tokens, 1, sizeof(int)));
    a.position = cut(c, bytes_of(tokens, 1, sizeof(uint32_t)));
    a.tiles = cut(c, bytes_of(tokens, 1, sizeof(qc_cuda_query_tile)));
    return a;
}

static qc_status make_room(qc_gpu_decoder *d, qc_error *err)
{
    void *v = NULL;
    uint64_t tokens = larger(d->form.longest, ACTIVATION_TOKENS);
    for (;;) {
        cutter count = {0};
        lay_activations(&d->form, tokens, &count);
        qc_status st = grow(d, &d->room, count.used, err);
        if (st == QC_OK)
            break;
        if (st != QC_ERR_NOMEM || tokens == d->form.longest)
            return st;
        tokens = larger(tokens / 2, d->form.longest);
    }
    cutter c = {.base = d->room.base};
    d->act = lay_activations(&d->form, tokens, &c);
    QC_TRY(qc_calloc(&v, (size_t)tokens, sizeof *d->position, err));
    d->position = v;
    v = NULL;
    QC_TRY(qc_calloc(&v, (size_t)tokens, sizeof *d->tiles, err));
    d->tiles = v;
    return QC_OK;
}

/* ---- the device ------------------------------------------------------------------------------ */

static qc_status set_up(qc_gpu_decoder *d, const qc_matmul_table *tuning, qc_error *err)
{
    const float *cosine = d->form.cosine, *sine = d->form.sine;
    uint64_t bytes = bytes_of(d->form.longest, d->form.head_dim / 2, sizeof(float));
    QC_TRY(qc_cuda_use(&d->device, err));
    QC_TRY(qc_cuda_stream_create(&d->stream, err));
    QC_TRY(qc_matmul_create(&d->handle, d->device.index, err));
    if (tuning)
        QC_TRY(qc_matmul_set_tuning(d->handle, tuning->rows, tuning->count, err));
    QC_TRY(grow(d, &d->tables, qc_sat_mul(2, aligned(bytes)), err));
    cutter c = {.base = d->tables.base};
    float *to_cosine = cut(&c, bytes), *to_sine = cut(&c, bytes);
    QC_TRY(qc_cuda_to_device(to_cosine, cosine, (size_t)bytes, d->stream, err));
    QC_TRY(qc_cuda_to_device(to_sine, sine, (size_t)bytes, d->stream, err));
    d->form.cosine = to_cosine;
    d->form.sine = to_sine;
    QC_TRY(make_room(d, err));
    return qc_cuda_stream_synchronize(d->stream, err);
}

static qc_status check_form(const qc_gpu_decoder_form *f, qc_error *err)
{
    if (f->head_dim == 0 || f->head_dim % 2 != 0 || f->head_dim > QC_CUDA_HEAD_MOST)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "attention heads of %llu elements: the GPU kernels take even ones up to %u",
                (unsigned long long)f->head_dim, QC_CUDA_HEAD_MOST);
    if (f->longest == 0 || f->longest > UINT32_MAX / 2 || f->heads > UINT32_MAX ||
        f->kv_heads == 0 || f->heads % f->kv_heads != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%llu heads over %llu of keys, windows of %llu tokens: not for the GPU kernels",
                (unsigned long long)f->heads, (unsigned long long)f->kv_heads,
                (unsigned long long)f->longest);
    return QC_OK;
}

qc_status qc_gpu_decoder_create(qc_gpu_decoder **out, const qc_cuda_device *device,
                                const qc_gpu_decoder_form *form, const qc_matmul_table *tuning,
                                qc_error *err)
{
    void *v = NULL;
    *out = NULL;
    QC_TRY(check_form(form, err));
    QC_TRY(qc_calloc(&v, 1, sizeof **out, err));
    qc_gpu_decoder *d = v;
    d->device = *device;
    d->form = *form;
    qc_status st = set_up(d, tuning, err);
    if (st != QC_OK) {
        qc_gpu_decoder_destroy(d);
        return st;
    }
    *out = d;
    return QC_OK;
}

void qc_gpu_decoder_destroy(qc_gpu_decoder *d)
{
    if (!d)
        return;
    device_memory *all[] = {&d->tables,    &d->room,         &d->weights,
                            &d->workspace, &d->head_weights, &d->head_room};
    /* Nothing may still run on what is given back. A stream that fails has stopped. */
    if (d->stream && qc_cuda_stream_synchronize(d->stream, NULL) != QC_OK)
        d->head.rows = 0;
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        qc_cuda_free(all[i]->base);
    qc_matmul_destroy(d->handle);
    qc_cuda_stream_destroy(d->stream);
    qc_free(d->position);
    qc_free(d->tiles);
    qc_free(d);
}

/* ---- weights --------------------------------------------------------------------------------- */

/* Bytes of the arrays of a quantized weight. */
typedef struct {
    uint64_t codes, scales, nested;
} array_bytes;

static array_bytes bytes_of_arrays(const qc_weights *w)
{
    uint64_t n = w->rows * w->cols;
    array_bytes b = {.codes = w->kind == QC_WEIGHTS_NF4 ? n / 2 + n % 2 : n};
    uint64_t scales =
        w->kind == QC_WEIGHTS_INT8_ROWS ? w->rows : qc_ceil_div_u64(n, w->block_elems);
    b.scales = w->absmax ? scales * sizeof(float) : scales;
    if (!w->absmax)
        b.nested = qc_ceil_div_u64(scales, w->nested_block) * sizeof(float);
    return b;
}

static uint64_t dense_bytes(const qc_gpu_matrix *m)
{
    return bytes_of(m->rows, m->cols, qc_dtype_bits(m->dtype) / 8);
}

/* Where the parts of a weight lie; nothing is copied yet. */
static device_matrix lay_matrix(const qc_gpu_matrix *m, cutter *c)
{
    device_matrix out = {.rows = m->rows, .cols = m->cols, .is_dense = !m->quantized};
    if (m->bias)
        out.bias = cut(c, bytes_of(m->rows, 1, sizeof(float)));
    if (out.is_dense) {
        out.half = cut(c, bytes_of(m->rows, m->cols, sizeof(uint16_t)));
        out.exponent = cut(c, sizeof(int));
        out.largest = cut(c, sizeof(uint32_t));
        return out;
    }
    const qc_weights *w = m->quantized;
    array_bytes b = bytes_of_arrays(w);
    void *codes = cut(c, b.codes), *scales = cut(c, b.scales);
    void *nested = b.nested ? cut(c, b.nested) : NULL;
    void *nested_map = w->nested_map ? cut(c, 256 * sizeof(float)) : NULL;
    void *code_map = w->code_map ? cut(c, 16 * sizeof(float)) : NULL;
    out.prepared = cut(c, qc_matmul_prepared_bytes(w, qc_matmul_repack_helps(w)));
    out.stored = *w;
    out.stored.codes = codes;
    out.stored.absmax = w->absmax ? scales : NULL;
    out.stored.absmax_codes = w->absmax ? NULL : scales;
    out.stored.nested_absmax = nested;
    out.stored.nested_map = nested_map;
    out.stored.code_map = code_map;
    return out;
}

/* device is an array that lay_matrix gave, hence not the const that qc_weights says. */
static qc_status copy_array(qc_gpu_decoder *d, const void *device, const void *host, uint64_t bytes,
                            qc_error *err)
{
    union {
        const void *from;
        void *to;
    } p = {.from = device};
    return qc_cuda_to_device(p.to, host, (size_t)bytes, d->stream, err);
}

/* stage: room for a dense weight as it comes. */
static qc_status fill_matrix(qc_gpu_decoder *d, const qc_gpu_matrix *m, device_matrix *out,
                             void *stage, qc_error *err)
{
    if (m->bias)
        QC_TRY(copy_array(d, out->bias, m->bias, m->rows * sizeof(float), err));
    if (out->is_dense) {
        QC_TRY(qc_cuda_to_device(stage, m->dense, (size_t)dense_bytes(m), d->stream, err));
        return qc_cuda_llama_weight(stage, m->dtype, m->rows * m->cols, out->half, out->exponent,
                                    out->largest, d->stream, err);
    }
    const qc_weights *w = m->quantized, *to = &out->stored;
    array_bytes b = bytes_of_arrays(w);
    QC_TRY(copy_array(d, to->codes, w->codes, b.codes, err));
    if (w->absmax)
        QC_TRY(copy_array(d, to->absmax, w->absmax, b.scales, err));
    else
        QC_TRY(copy_array(d, to->absmax_codes, w->absmax_codes, b.scales, err));
    if (b.nested)
        QC_TRY(copy_array(d, to->nested_absmax, w->nested_absmax, b.nested, err));
    if (w->nested_map)
        QC_TRY(copy_array(d, to->nested_map, w->nested_map, 256 * sizeof(float), err));
    if (w->code_map)
        QC_TRY(copy_array(d, to->code_map, w->code_map, 16 * sizeof(float), err));
    return qc_matmul_prepare(d->handle, to, qc_matmul_repack_helps(w), out->prepared, &out->ready,
                             d->stream, err);
}

/* Weights, all of them at once in `memory`, and the workspace for products with `tokens` rows. */
static qc_status take_weights(qc_gpu_decoder *d, const qc_gpu_matrix *const *in,
                              device_matrix *const *out, unsigned count, uint64_t extra,
                              uint64_t tokens, device_memory *memory, unsigned char **extra_at,
                              qc_error *err)
{
    uint64_t stage_bytes = 0, workspace = 0;
    cutter counted = {0};
    for (unsigned i = 0; i < count; i++) {
        lay_matrix(in[i], &counted);
        if (!in[i]->quantized)
            stage_bytes = larger(stage_bytes, dense_bytes(in[i]));
    }
    cut(&counted, stage_bytes);
    cut(&counted, extra);
    QC_TRY(grow(d, memory, counted.used, err));
    cutter c = {.base = memory->base};
    for (unsigned i = 0; i < count; i++)
        *out[i] = lay_matrix(in[i], &c);
    void *stage = cut(&c, stage_bytes);
    *extra_at = cut(&c, extra);
    for (unsigned i = 0; i < count; i++) {
        QC_TRY(fill_matrix(d, in[i], out[i], stage, err));
        uint64_t bytes = qc_matmul_no_gemm(d->handle) ? 0 : QC_MATMUL_DENSE_WORKSPACE;
        if (!out[i]->is_dense)
            bytes = qc_matmul_workspace_bytes(d->handle, &out[i]->ready, tokens, QC_MATMUL_AUTO,
                                              WORKSPACE_MOST);
        if (bytes == UINT64_MAX)
            QC_FAIL(err, QC_ERR_NOMEM, "a product's workspace does not fit the GPU");
        out[i]->workspace_bytes = bytes;
        workspace = larger(workspace, bytes + (out[i]->is_dense ? QC_MATMUL_HEADER_BYTES : 0));
    }
    QC_TRY(grow(d, &d->workspace, workspace, err));
    return qc_matmul_workspace_init(d->workspace.base, workspace, d->stream, err);
}

/* y = x W^T; what y is worth is *out. */
static qc_status multiply(qc_gpu_decoder *d, const device_matrix *w, const uint16_t *x,
                          const int *exponent, uint64_t rows, uint16_t *y, qc_cuda_product *out,
                          qc_error *err)
{
    qc_matmul_io io = {.m = rows, .x = x, .x_dtype = QC_DTYPE_F16, .y = y, .y_dtype = QC_DTYPE_F16};
    *out =
        (qc_cuda_product){.half = y, .exponent = exponent, .weight = w->exponent, .bias = w->bias};
    if (!w->is_dense)
        return qc_matmul_run(d->handle, &w->ready, &io, QC_MATMUL_AUTO, d->workspace.base,
                             w->workspace_bytes, d->stream, err);
    if (qc_matmul_no_gemm(d->handle))
        return qc_cuda_llama_dense(x, w->half, rows, w->rows, w->cols, y, d->stream, err);
    return qc_matmul_dense(d->handle, w->half, w->rows, w->cols, &io,
                           (unsigned char *)d->workspace.base + QC_MATMUL_HEADER_BYTES,
                           w->workspace_bytes, d->stream, err);
}

/* ---- a layer --------------------------------------------------------------------------------- */

typedef struct {
    device_matrix q, k, v, o, gate, up, down;
    float *input_norm, *attention_norm, *q_norm, *k_norm;
    uint32_t window;
    uint64_t rows; /* of the chunk */
    uint32_t tiles;
} layer_run;

static qc_status one_heads(qc_gpu_decoder *d, const layer_run *r, const device_matrix *w,
                           const float *norm, int turns, uint64_t heads, float *out, qc_error *err)
{
    const activations *a = &d->act;
    qc_cuda_product p;
    qc_cuda_heads h = {.rows = r->rows,
                       .heads = (uint32_t)heads,
                       .head_dim = (uint32_t)d->form.head_dim,
                       .norm = norm,
                       .eps = d->form.norm_eps,
                       .cosine = turns ? d->form.cosine : NULL,
                       .sine = turns ? d->form.sine : NULL,
                       .position = a->position};
    QC_TRY(multiply(d, w, a->x, a->exponent, r->rows, a->a, &p, err));
    return qc_cuda_llama_heads(&p, &h, out, d->stream, err);
}

static qc_status attention_part(qc_gpu_decoder *d, const layer_run *r, qc_error *err)
{
    const activations *a = &d->act;
    const qc_gpu_decoder_form *f = &d->form;
    qc_cuda_product p;
    qc_cuda_halves x = {.rows = r->rows, .cols = f->hidden, .half = a->x, .exponent = a->exponent};
    QC_TRY(qc_cuda_llama_halves(a->hidden, r->input_norm, f->norm_eps, &x, d->stream, err));
    QC_TRY(one_heads(d, r, &r->q, r->q_norm, 1, f->heads, a->q, err));
    QC_TRY(one_heads(d, r, &r->k, r->k_norm, 1, f->kv_heads, a->k, err));
    QC_TRY(one_heads(d, r, &r->v, NULL, 0, f->kv_heads, a->v, err));
    qc_cuda_attention attention = {.q = a->q,
                                   .k = a->k,
                                   .v = a->v,
                                   .out = a->attended,
                                   .tiles = a->tiles,
                                   .tile_count = r->tiles,
                                   .heads = (uint32_t)f->heads,
                                   .kv_heads = (uint32_t)f->kv_heads,
                                   .head_dim = (uint32_t)f->head_dim,
                                   .window = r->window,
                                   .scale = 1.0f / sqrtf((float)f->head_dim)};
    QC_TRY(qc_cuda_llama_attention(&attention, d->stream, err));
    x.cols = f->heads * f->head_dim;
    QC_TRY(qc_cuda_llama_halves(a->attended, NULL, 0.0f, &x, d->stream, err));
    QC_TRY(multiply(d, &r->o, a->x, a->exponent, r->rows, a->a, &p, err));
    return qc_cuda_llama_floats(&p, r->rows, f->hidden, 1, a->hidden, d->stream, err);
}

static qc_status mlp_part(qc_gpu_decoder *d, const layer_run *r, qc_error *err)
{
    const activations *a = &d->act;
    const qc_gpu_decoder_form *f = &d->form;
    qc_cuda_product gate, up, down;
    qc_cuda_halves x = {.rows = r->rows, .cols = f->hidden, .half = a->x, .exponent = a->exponent};
    QC_TRY(qc_cuda_llama_halves(a->hidden, r->attention_norm, f->norm_eps, &x, d->stream, err));
    QC_TRY(multiply(d, &r->gate, a->x, a->exponent, r->rows, a->a, &gate, err));
    QC_TRY(multiply(d, &r->up, a->x, a->exponent, r->rows, a->b, &up, err));
    x.cols = f->intermediate;
    x.exponent = a->exponent2;
    QC_TRY(qc_cuda_llama_swiglu(&gate, &up, &x, d->stream, err));
    QC_TRY(multiply(d, &r->down, a->x, a->exponent2, r->rows, a->a, &down, err));
    return qc_cuda_llama_floats(&down, r->rows, f->hidden, 1, a->hidden, d->stream, err);
}

/* Whole windows, lengths [count], there and back. */
static qc_status run_chunk(qc_gpu_decoder *d, layer_run *r, float *hidden, const uint64_t *lengths,
                           uint64_t count, qc_error *err)
{
    const activations *a = &d->act;
    uint32_t row = 0, tiles = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t first = row, length = (uint32_t)lengths[i];
        for (uint32_t p = 0; p < length; p++)
            d->position[row++] = p;
        for (uint32_t p = 0; p < length; p += QC_CUDA_QUERY_TILE) {
            uint32_t left = length - p;
            d->tiles[tiles++] =
                (qc_cuda_query_tile){.first = first + p,
                                     .count = left < QC_CUDA_QUERY_TILE ? left : QC_CUDA_QUERY_TILE,
                                     .window_first = first};
        }
    }
    r->rows = row;
    r->tiles = tiles;
    size_t bytes = (size_t)bytes_of(row, d->form.hidden, sizeof(float));
    QC_TRY(qc_cuda_to_device(a->position, d->position, row * sizeof *d->position, d->stream, err));
    QC_TRY(qc_cuda_to_device(a->tiles, d->tiles, tiles * sizeof *d->tiles, d->stream, err));
    QC_TRY(qc_cuda_to_device(a->hidden, hidden, bytes, d->stream, err));
    QC_TRY(attention_part(d, r, err));
    QC_TRY(mlp_part(d, r, err));
    QC_TRY(qc_cuda_to_host(hidden, a->hidden, bytes, d->stream, err));
    return qc_cuda_stream_synchronize(d->stream, err);
}

/* One of the layer's vectors, behind its weights. */
static qc_status take_vector(qc_gpu_decoder *d, cutter *c, const float *host, uint64_t n,
                             float **out, qc_error *err)
{
    *out = NULL;
    if (!host)
        return QC_OK;
    *out = cut(c, n * sizeof(float));
    return qc_cuda_to_device(*out, host, (size_t)(n * sizeof(float)), d->stream, err);
}

static qc_status take_layer(qc_gpu_decoder *d, const qc_gpu_decoder_layer *layer, layer_run *r,
                            qc_error *err)
{
    const qc_gpu_matrix *in[LAYER_MATRICES] = {&layer->q,    &layer->k,  &layer->v,   &layer->o,
                                               &layer->gate, &layer->up, &layer->down};
    device_matrix *out[LAYER_MATRICES] = {&r->q, &r->k, &r->v, &r->o, &r->gate, &r->up, &r->down};
    uint64_t hidden = aligned(bytes_of(d->form.hidden, 1, sizeof(float)));
    uint64_t head = aligned(bytes_of(d->form.head_dim, 1, sizeof(float)));
    unsigned char *vectors = NULL;
    QC_TRY(take_weights(d, in, out, LAYER_MATRICES, 2 * hidden + 2 * head, d->act.tokens,
                        &d->weights, &vectors, err));
    cutter c = {.base = vectors};
    QC_TRY(take_vector(d, &c, layer->input_norm, d->form.hidden, &r->input_norm, err));
    QC_TRY(take_vector(d, &c, layer->attention_norm, d->form.hidden, &r->attention_norm, err));
    QC_TRY(take_vector(d, &c, layer->q_norm, d->form.head_dim, &r->q_norm, err));
    QC_TRY(take_vector(d, &c, layer->k_norm, d->form.head_dim, &r->k_norm, err));
    r->window = layer->window > UINT32_MAX ? 0 : (uint32_t)layer->window;
    /* The host's arrays are its own again. */
    return qc_cuda_stream_synchronize(d->stream, err);
}

static qc_status run_layer(qc_gpu_decoder *d, const qc_gpu_decoder_layer *layer, float *hidden,
                           const uint64_t *lengths, uint64_t windows, qc_error *err)
{
    layer_run r = {0};
    for (uint64_t i = 0; i < windows; i++)
        if (lengths[i] > d->form.longest)
            QC_FAIL(err, QC_ERR_USAGE, "a window of %llu tokens, where %llu are the most",
                    (unsigned long long)lengths[i], (unsigned long long)d->form.longest);
    QC_TRY(qc_cuda_use(&d->device, err));
    QC_TRY(take_layer(d, layer, &r, err));
    for (uint64_t first = 0, next = 0; first < windows; first = next) {
        uint64_t rows = 0;
        while (next < windows && lengths[next] <= d->act.tokens - rows)
            rows += lengths[next++];
        if (qc_interrupted())
            QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
        QC_TRY(run_chunk(d, &r, hidden, lengths + first, next - first, err));
        hidden += rows * d->form.hidden;
    }
    return QC_OK;
}

/* What was started may still read the host's arrays; st is what there is to say. */
static qc_status settled(qc_gpu_decoder *d, qc_status st)
{
    if (st != QC_OK && qc_cuda_stream_synchronize(d->stream, NULL) != QC_OK)
        d->head.rows = 0; /* the device is lost */
    return st;
}

qc_status qc_gpu_decoder_run(qc_gpu_decoder *d, const qc_gpu_decoder_layer *layer, float *hidden,
                             const uint64_t *lengths, uint64_t windows, qc_error *err)
{
    return settled(d, run_layer(d, layer, hidden, lengths, windows, err));
}

/* ---- the head -------------------------------------------------------------------------------- */

static qc_status take_head(qc_gpu_decoder *d, const qc_gpu_matrix *head, qc_error *err)
{
    unsigned char *nothing = NULL;
    device_matrix *out = &d->head;
    uint64_t row = qc_sat_mul(head->rows, sizeof(float));
    QC_TRY(qc_cuda_use(&d->device, err));
    d->head_tokens = row > 0 && row < LOGITS_BYTES ? LOGITS_BYTES / row : 1;
    d->head_tokens = d->head_tokens < ACTIVATION_TOKENS ? d->head_tokens : ACTIVATION_TOKENS;
    QC_TRY(take_weights(d, &head, &out, 1, 0, d->head_tokens, &d->head_weights, &nothing, err));
    return qc_cuda_stream_synchronize(d->stream, err);
}

static qc_status run_logits(qc_gpu_decoder *d, const float *hidden, uint64_t n, float *out,
                            qc_error *err)
{
    const device_matrix *w = &d->head;
    if (w->rows == 0)
        QC_FAIL(err, QC_ERR_USAGE, "logits: there is no head yet");
    uint64_t most = d->head_tokens, k = w->cols;
    QC_TRY(qc_cuda_use(&d->device, err));
    for (int pass = 0; pass < 2; pass++) {
        cutter c = {.base = pass ? d->head_room.base : NULL};
        float *states = cut(&c, bytes_of(most, k, sizeof(float)));
        uint16_t *x = cut(&c, bytes_of(most, k, sizeof(uint16_t)));
        int *exponent = cut(&c, bytes_of(most, 1, sizeof(int)));
        uint16_t *y = cut(&c, bytes_of(most, w->rows, sizeof(uint16_t)));
        float *logits = cut(&c, bytes_of(most, w->rows, sizeof(float)));
        if (pass == 0) {
            QC_TRY(grow(d, &d->head_room, c.used, err));
            continue;
        }
        for (uint64_t first = 0; first < n; first += most) {
            uint64_t rows = n - first < most ? n - first : most;
            qc_cuda_halves halves = {.rows = rows, .cols = k, .half = x, .exponent = exponent};
            qc_cuda_product p;
            if (qc_interrupted())
                QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
            QC_TRY(qc_cuda_to_device(states, hidden + first * k,
                                     (size_t)bytes_of(rows, k, sizeof(float)), d->stream, err));
            QC_TRY(qc_cuda_llama_halves(states, NULL, 0.0f, &halves, d->stream, err));
            QC_TRY(multiply(d, w, x, exponent, rows, y, &p, err));
            QC_TRY(qc_cuda_llama_floats(&p, rows, w->rows, 0, logits, d->stream, err));
            QC_TRY(qc_cuda_to_host(out + first * w->rows, logits,
                                   (size_t)bytes_of(rows, w->rows, sizeof(float)), d->stream, err));
            QC_TRY(qc_cuda_stream_synchronize(d->stream, err));
        }
    }
    return QC_OK;
}

qc_status qc_gpu_decoder_head(qc_gpu_decoder *d, const qc_gpu_matrix *head, qc_error *err)
{
    qc_status st = settled(d, take_head(d, head, err));
    if (st != QC_OK)
        d->head.rows = 0;
    return st;
}

qc_status qc_gpu_decoder_logits(qc_gpu_decoder *d, const float *hidden, uint64_t n, float *out,
                                qc_error *err)
{
    return settled(d, run_logits(d, hidden, n, out, err));
}
