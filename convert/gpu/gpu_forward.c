#include "convert/gpu/gpu_forward.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/cuda_quantize.h"

#include <math.h>

#define ALIGNMENT 256u

/* ---- memory ---------------------------------------------------------------------------------- */

uint64_t qc_gpu_aligned(uint64_t bytes)
{
    return qc_sat_add(bytes, ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

qc_status qc_gpu_grow(qc_gpu_forward *d, qc_gpu_memory *m, uint64_t bytes, qc_error *err)
{
    size_t size = 0;
    if (bytes <= m->bytes)
        return QC_OK;
    if (qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "a layer is too large for a GPU's memory");
    QC_TRY(qc_cuda_stream_synchronize(d->stream, err)); /* then nothing uses the old memory */
    qc_gpu_drop(m);
    QC_TRY(qc_cuda_malloc(&m->base, size, err));
    m->bytes = bytes;
    return QC_OK;
}

void qc_gpu_drop(qc_gpu_memory *m)
{
    qc_cuda_free(m->base);
    *m = (qc_gpu_memory){0};
}

void *qc_gpu_cut(qc_gpu_cutter *c, uint64_t bytes)
{
    void *at = c->base ? c->base + c->used : NULL;
    c->used = qc_sat_add(c->used, qc_gpu_aligned(bytes));
    return at;
}

uint64_t qc_gpu_bytes_of(uint64_t tokens, uint64_t each, uint64_t size)
{
    return qc_sat_mul(qc_sat_mul(tokens, each), size);
}

qc_gpu_activations qc_gpu_lay_activations(const qc_forward_config *f, uint64_t tokens,
                                          qc_gpu_cutter *c)
{
    uint64_t q = qc_sat_mul(f->heads, f->head_dim), kv = qc_sat_mul(f->kv_heads, f->head_dim);
    uint64_t widest = qc_max_u64(qc_max_u64(f->hidden, f->intermediate), qc_max_u64(q, kv));
    qc_gpu_activations a = {.tokens = tokens};
    a.hidden = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, f->hidden, sizeof(float)));
    a.q = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, q, sizeof(float)));
    a.k = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, kv, sizeof(float)));
    a.v = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, kv, sizeof(float)));
    a.attended = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, q, sizeof(float)));
    a.x = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, widest, sizeof(uint16_t)));
    a.a = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, widest, sizeof(uint16_t)));
    a.b = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, f->intermediate, sizeof(uint16_t)));
    a.exponent = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, 1, sizeof(int)));
    a.exponent2 = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, 1, sizeof(int)));
    a.position = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, 1, sizeof(uint32_t)));
    a.tiles = qc_gpu_cut(c, qc_gpu_bytes_of(tokens, 1, sizeof(qc_cuda_query_tile)));
    return a;
}

static qc_status make_room(qc_gpu_forward *d, qc_error *err)
{
    uint64_t tokens = qc_max_u64(d->longest, QC_GPU_TOKENS);
    for (;;) {
        qc_gpu_cutter count = {0};
        qc_gpu_lay_activations(&d->form, tokens, &count);
        qc_status st = qc_gpu_grow(d, &d->room, count.used, err);
        if (st == QC_OK)
            break;
        if (st != QC_ERR_NOMEM || tokens == d->longest)
            return st;
        tokens = qc_max_u64(tokens / 2, d->longest);
    }
    qc_gpu_cutter c = {.base = d->room.base};
    d->act = qc_gpu_lay_activations(&d->form, tokens, &c);
    QC_TRY(qc_calloc(&d->position, (size_t)tokens, sizeof *d->position, err));
    return qc_calloc(&d->tiles, (size_t)tokens, sizeof *d->tiles, err);
}

static qc_status check_form(const qc_forward_config *f, uint64_t longest, qc_error *err)
{
    if (f->head_dim == 0 || f->head_dim % 2 != 0 || f->head_dim > QC_CUDA_HEAD_MOST)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "attention heads have %llu elements; the GPU kernels take an even number up to %u",
                (unsigned long long)f->head_dim, QC_CUDA_HEAD_MOST);
    if (longest == 0 || longest > UINT32_MAX / 2 || f->heads > UINT32_MAX || f->kv_heads == 0 ||
        f->heads % f->kv_heads != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the GPU kernels cannot compute %llu attention heads over %llu heads of keys in "
                "windows of %llu tokens",
                (unsigned long long)f->heads, (unsigned long long)f->kv_heads,
                (unsigned long long)longest);
    return QC_OK;
}

static qc_status take_tables(qc_gpu_forward *d, const qc_forward_shape *shape, qc_error *err)
{
    uint64_t bytes = qc_gpu_bytes_of(d->longest, d->form.head_dim / 2, sizeof(float));
    qc_rope_tables tables = {0};
    QC_TRY(qc_gpu_grow(d, &d->tables, qc_sat_mul(2, qc_gpu_aligned(bytes)), err));
    QC_TRY(qc_rope_tables_make(&tables, &shape->rope, shape->config.head_dim, d->longest, err));
    qc_gpu_cutter c = {.base = d->tables.base};
    d->cosine = qc_gpu_cut(&c, bytes);
    d->sine = qc_gpu_cut(&c, bytes);
    qc_status st = qc_cuda_to_device(d->cosine, tables.cosines, (size_t)bytes, d->stream, err);
    if (st == QC_OK)
        st = qc_cuda_to_device(d->sine, tables.sines, (size_t)bytes, d->stream, err);
    if (st == QC_OK)
        st = qc_cuda_stream_synchronize(d->stream, err);
    else
        qc_gpu_forward_settle(d);
    qc_free(tables.cosines);
    return st;
}

qc_status qc_gpu_forward_init(qc_gpu_forward *d, const qc_cuda_device *device,
                              const qc_forward_shape *shape, uint64_t longest, qc_error *err)
{
    QC_TRY(check_form(&shape->config, longest, err));
    d->device = *device;
    d->form = shape->config;
    d->longest = longest;
    QC_TRY(qc_cuda_use(&d->device, err));
    QC_TRY(qc_cuda_stream_create(&d->stream, err));
    QC_TRY(qc_matmul_create(&d->handle, d->device.index, err));
    QC_TRY(take_tables(d, shape, err));
    return make_room(d, err);
}

void qc_gpu_forward_settle(qc_gpu_forward *d)
{
    /* A stream that fails has stopped as well. */
    qc_status st = d->stream ? qc_cuda_stream_synchronize(d->stream, NULL) : QC_OK;
    (void)st;
}

void qc_gpu_forward_deinit(qc_gpu_forward *d)
{
    qc_gpu_drop(&d->tables);
    qc_gpu_drop(&d->room);
    qc_gpu_drop(&d->workspace);
    qc_matmul_destroy(d->handle);
    qc_cuda_stream_destroy(d->stream);
    qc_free(d->position);
    qc_free(d->tiles);
}

/* ---- weights --------------------------------------------------------------------------------- */

/* The bytes of a quantized weight's arrays. */
typedef struct {
    uint64_t codes, scales, nested;
} array_bytes;

static array_bytes bytes_of_arrays(const qc_weights *w)
{
    uint64_t n = w->rows * w->form.cols;
    array_bytes b = {.codes = qc_form_code_bytes(&w->form, n)};
    uint64_t scales = qc_form_scales(&w->form, n);
    b.scales = w->absmax ? scales * sizeof(float) : scales;
    if (!w->absmax)
        b.nested = qc_ceil_div_u64(scales, w->nested_block) * sizeof(float);
    return b;
}

static int becomes_dense(const qc_forward_matrix *m)
{
    return !m->quantized || m->quantized->form.ops->integer;
}

/* What the stage of a matrix has. */
typedef struct {
    void *dense; /* as it comes, or floats */
    qc_weights integers;
    uint64_t bytes;
} stage_parts;

static stage_parts lay_stage(const qc_forward_matrix *m, void *stage)
{
    qc_gpu_cutter c = {.base = stage};
    stage_parts parts = {0};
    if (!becomes_dense(m))
        return parts;
    const qc_dtype dtype = m->quantized ? QC_DTYPE_F32 : m->dtype;
    parts.dense = qc_gpu_cut(&c, qc_gpu_bytes_of(m->rows, m->cols, qc_dtype_bits(dtype) / 8));
    if (m->quantized) {
        const array_bytes b = bytes_of_arrays(m->quantized);
        parts.integers = *m->quantized;
        parts.integers.codes = qc_gpu_cut(&c, b.codes);
        parts.integers.absmax = qc_gpu_cut(&c, b.scales);
    }
    parts.bytes = c.used;
    return parts;
}

uint64_t qc_gpu_stage_bytes(const qc_forward_matrix *m)
{
    return lay_stage(m, NULL).bytes;
}

qc_gpu_device_matrix qc_gpu_lay_matrix(const qc_forward_matrix *m, qc_gpu_cutter *c)
{
    qc_gpu_device_matrix out = {.rows = m->rows, .cols = m->cols, .is_dense = becomes_dense(m)};
    if (m->bias)
        out.bias = qc_gpu_cut(c, qc_gpu_bytes_of(m->rows, 1, sizeof(float)));
    if (out.is_dense) {
        out.half = qc_gpu_cut(c, qc_gpu_bytes_of(m->rows, m->cols, sizeof(uint16_t)));
        out.exponent = qc_gpu_cut(c, sizeof(int));
        out.largest = qc_gpu_cut(c, sizeof(uint32_t));
        return out;
    }
    const qc_weights *w = m->quantized;
    array_bytes b = bytes_of_arrays(w);
    void *codes = qc_gpu_cut(c, b.codes), *scales = qc_gpu_cut(c, b.scales);
    void *nested = b.nested ? qc_gpu_cut(c, b.nested) : NULL;
    void *nested_map = w->nested_map ? qc_gpu_cut(c, 256 * sizeof(float)) : NULL;
    void *code_map = w->form.code_map ? qc_gpu_cut(c, 16 * sizeof(float)) : NULL;
    out.stored = *w;
    out.stored.codes = codes; /* aligned, as those of the host need not be */
    out.prepared = qc_gpu_cut(c, qc_matmul_prepared_bytes(&out.stored));
    out.stored.absmax = w->absmax ? scales : NULL;
    out.stored.absmax_codes = w->absmax ? NULL : scales;
    out.stored.nested_absmax = nested;
    out.stored.nested_map = nested_map;
    out.stored.form.code_map = code_map;
    return out;
}

/* device is an array that qc_gpu_lay_matrix gave, so it may be written to, although qc_weights
 * calls it const. */
static qc_status copy_array(qc_gpu_forward *d, const void *device, const void *host, uint64_t bytes,
                            qc_error *err)
{
    union {
        const void *from;
        void *to;
    } p = {.from = device};
    return qc_cuda_to_device(p.to, host, (size_t)bytes, d->stream, err);
}

static qc_status fill_dense(qc_gpu_forward *d, const qc_forward_matrix *m,
                            qc_gpu_device_matrix *out, void *stage, qc_error *err)
{
    const stage_parts parts = lay_stage(m, stage);
    const qc_weights *w = m->quantized, *to = &parts.integers;
    const qc_dtype dtype = w ? QC_DTYPE_F32 : m->dtype;
    if (w) {
        const array_bytes b = bytes_of_arrays(w);
        QC_TRY(copy_array(d, to->codes, w->codes, b.codes, err));
        QC_TRY(copy_array(d, to->absmax, w->absmax, b.scales, err));
        QC_TRY(qc_cuda_dequantize(to, 0, m->rows, parts.dense, dtype, m->cols, NULL, NULL,
                                  d->stream, err));
    } else {
        QC_TRY(copy_array(d, parts.dense, m->dense,
                          qc_gpu_bytes_of(m->rows, m->cols, qc_dtype_bits(dtype) / 8), err));
    }
    return qc_cuda_llama_weight(parts.dense, dtype, m->rows * m->cols, out->half, out->exponent,
                                out->largest, d->stream, err);
}

static qc_status fill_matrix(qc_gpu_forward *d, const qc_forward_matrix *m,
                             qc_gpu_device_matrix *out, void *stage, qc_error *err)
{
    if (m->bias)
        QC_TRY(copy_array(d, out->bias, m->bias, m->rows * sizeof(float), err));
    if (out->is_dense)
        return fill_dense(d, m, out, stage, err);
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
    if (w->form.code_map)
        QC_TRY(copy_array(d, to->form.code_map, w->form.code_map, 16 * sizeof(float), err));
    return qc_matmul_prepare(d->handle, to, out->prepared, &out->ready, d->stream, err);
}

/* The workspace that products of `tokens` rows with *out take, within limit_bytes. */
static qc_status product_bytes(const qc_gpu_forward *d, qc_gpu_device_matrix *out, uint64_t tokens,
                               uint64_t limit_bytes, uint64_t *workspace, qc_error *err)
{
    uint64_t bytes = qc_matmul_no_gemm(d->handle) ? 0 : QC_MATMUL_DENSE_WORKSPACE;
    if (!out->is_dense)
        bytes =
            qc_matmul_workspace_bytes(d->handle, &out->ready, tokens, QC_MATMUL_AUTO, limit_bytes);
    if (bytes == UINT64_MAX)
        QC_FAIL(err, QC_ERR_NOMEM, "the workspace of a product does not fit the GPU");
    out->workspace_bytes = bytes;
    *workspace = bytes + (out->is_dense ? QC_MATMUL_HEADER_BYTES : 0);
    return QC_OK;
}

qc_status qc_gpu_fill_matrix(qc_gpu_forward *d, const qc_forward_matrix *m,
                             qc_gpu_device_matrix *out, void *stage, uint64_t tokens,
                             uint64_t *workspace, qc_error *err)
{
    QC_TRY(fill_matrix(d, m, out, stage, err));
    return product_bytes(d, out, tokens, QC_GPU_WORKSPACE_MOST, workspace, err);
}

qc_status qc_gpu_make_workspace(qc_gpu_forward *d, uint64_t bytes, qc_error *err)
{
    QC_TRY(qc_gpu_grow(d, &d->workspace, bytes, err));
    return qc_matmul_workspace_init(d->workspace.base, bytes, d->stream, err);
}

qc_status qc_gpu_take_weights(qc_gpu_forward *d, const qc_gpu_weights *w, qc_gpu_memory *memory,
                              unsigned char **extra, qc_error *err)
{
    uint64_t stage_bytes = 0;
    qc_gpu_cutter counted = {0};
    for (unsigned i = 0; i < w->count; i++) {
        qc_gpu_lay_matrix(&w->in[i], &counted);
        stage_bytes = qc_max_u64(stage_bytes, qc_gpu_stage_bytes(&w->in[i]));
    }
    qc_gpu_cut(&counted, stage_bytes);
    qc_gpu_cut(&counted, w->extra_bytes);
    QC_TRY(qc_gpu_grow(d, memory, counted.used, err));
    qc_gpu_cutter c = {.base = memory->base};
    for (unsigned i = 0; i < w->count; i++)
        w->out[i] = qc_gpu_lay_matrix(&w->in[i], &c);
    void *stage = qc_gpu_cut(&c, stage_bytes);
    if (extra)
        *extra = qc_gpu_cut(&c, w->extra_bytes);
    for (unsigned i = 0; i < w->count; i++)
        QC_TRY(fill_matrix(d, &w->in[i], &w->out[i], stage, err));
    /* The workspace of a product may be as large as its weight in float16. Where there is no room
     * for that, less is enough. */
    for (uint64_t limit = QC_GPU_WORKSPACE_MOST;; limit /= 2) {
        uint64_t workspace = 0, bytes = 0;
        for (unsigned i = 0; i < w->count; i++) {
            QC_TRY(product_bytes(d, &w->out[i], w->tokens, limit, &bytes, err));
            workspace = qc_max_u64(workspace, bytes);
        }
        qc_status st = qc_gpu_make_workspace(d, workspace, err);
        if (st != QC_ERR_NOMEM || limit / 2 < QC_GPU_WORKSPACE_LEAST)
            return st;
    }
}

/* Returns the number of elements of a layer's vector. */
static uint64_t vector_length(const qc_gpu_forward *d, unsigned i)
{
    return i == QC_LAYER_Q_NORM || i == QC_LAYER_K_NORM ? d->form.head_dim : d->form.hidden;
}

uint64_t qc_gpu_vectors_bytes(const qc_gpu_forward *d)
{
    qc_gpu_cutter c = {0};
    for (unsigned i = 0; i < QC_LAYER_VECTORS; i++)
        (void)qc_gpu_cut(&c, qc_gpu_bytes_of(vector_length(d, i), 1, sizeof(float)));
    return c.used;
}

qc_status qc_gpu_take_vectors(qc_gpu_forward *d, const qc_forward_weights *w, uint64_t window,
                              unsigned char *memory, qc_gpu_layer_run *out, qc_error *err)
{
    qc_gpu_cutter c = {.base = memory};
    out->window = window > UINT32_MAX ? 0 : (uint32_t)window;
    for (unsigned i = 0; i < QC_LAYER_VECTORS; i++) {
        size_t bytes = (size_t)vector_length(d, i) * sizeof(float);
        out->vectors[i] = w->vectors[i] ? qc_gpu_cut(&c, bytes) : NULL;
        if (w->vectors[i])
            QC_TRY(qc_cuda_to_device(out->vectors[i], w->vectors[i], bytes, d->stream, err));
    }
    return QC_OK;
}

qc_status qc_gpu_multiply(qc_gpu_forward *d, const qc_gpu_device_matrix *w, const uint16_t *x,
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

/* ---- the steps of a layer -------------------------------------------------------------------- */

/* The heads of q, k or v: the product with w, then the norm and the turning, if there are any. */
static qc_status one_heads(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_layer_which which,
                           const float *norm, float *out, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const int turns = which != QC_LAYER_V;
    const uint64_t heads = which == QC_LAYER_Q ? d->form.heads : d->form.kv_heads;
    qc_cuda_product p;
    qc_cuda_heads h = {.rows = r->rows,
                       .heads = (uint32_t)heads,
                       .head_dim = (uint32_t)d->form.head_dim,
                       .norm = norm,
                       .eps = (float)d->form.norm_eps,
                       .cosine = turns ? d->cosine : NULL,
                       .sine = turns ? d->sine : NULL,
                       .position = a->position};
    QC_TRY(qc_gpu_multiply(d, &r->matrices[which], a->x, a->exponent, r->rows, a->a, &p, err));
    return qc_cuda_llama_heads(&p, &h, out, d->stream, err);
}

qc_status qc_gpu_step_norm(qc_gpu_forward *d, const qc_gpu_layer_run *r, const float *gain,
                           qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    qc_cuda_halves x = {
        .rows = r->rows, .cols = d->form.hidden, .half = a->x, .exponent = a->exponent};
    return qc_cuda_llama_halves(a->hidden, gain, (float)d->form.norm_eps, &x, d->stream, err);
}

qc_status qc_gpu_step_attend(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_forward_config *f = &d->form;
    QC_TRY(qc_gpu_step_norm(d, r, r->vectors[QC_LAYER_INPUT_NORM], err));
    QC_TRY(one_heads(d, r, QC_LAYER_Q, r->vectors[QC_LAYER_Q_NORM], a->q, err));
    QC_TRY(one_heads(d, r, QC_LAYER_K, r->vectors[QC_LAYER_K_NORM], a->k, err));
    QC_TRY(one_heads(d, r, QC_LAYER_V, NULL, a->v, err));
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
    return qc_cuda_llama_attention(&attention, d->stream, err);
}

qc_status qc_gpu_step_o(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_forward_config *f = &d->form;
    qc_cuda_product p;
    qc_cuda_halves x = {
        .rows = r->rows, .cols = f->heads * f->head_dim, .half = a->x, .exponent = a->exponent};
    QC_TRY(qc_cuda_llama_halves(a->attended, NULL, 0.0f, &x, d->stream, err));
    QC_TRY(qc_gpu_multiply(d, &r->matrices[QC_LAYER_O], a->x, a->exponent, r->rows, a->a, &p, err));
    return qc_cuda_llama_floats(&p, r->rows, f->hidden, 1, a->hidden, d->stream, err);
}

qc_status qc_gpu_step_gate(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_forward_config *f = &d->form;
    qc_cuda_product gate, up;
    qc_cuda_halves x = {
        .rows = r->rows, .cols = f->intermediate, .half = a->x, .exponent = a->exponent2};
    QC_TRY(qc_gpu_step_norm(d, r, r->vectors[QC_LAYER_POST_NORM], err));
    QC_TRY(qc_gpu_multiply(d, &r->matrices[QC_LAYER_GATE], a->x, a->exponent, r->rows, a->a, &gate,
                           err));
    QC_TRY(
        qc_gpu_multiply(d, &r->matrices[QC_LAYER_UP], a->x, a->exponent, r->rows, a->b, &up, err));
    return qc_cuda_llama_swiglu(&gate, &up, &x, d->stream, err);
}

qc_status qc_gpu_step_down(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_forward_config *f = &d->form;
    qc_cuda_product down;
    QC_TRY(qc_gpu_multiply(d, &r->matrices[QC_LAYER_DOWN], a->x, a->exponent2, r->rows, a->a, &down,
                           err));
    return qc_cuda_llama_floats(&down, r->rows, f->hidden, 1, a->hidden, d->stream, err);
}

size_t qc_gpu_hidden_bytes(const qc_gpu_forward *d, const qc_gpu_layer_run *r)
{
    return (size_t)qc_gpu_bytes_of(r->rows, d->form.hidden, sizeof(float));
}

qc_status qc_gpu_step_layer(qc_gpu_forward *d, const qc_gpu_layer_run *r, float *hidden,
                            qc_error *err)
{
    size_t bytes = qc_gpu_hidden_bytes(d, r);
    QC_TRY(qc_cuda_to_device(d->act.hidden, hidden, bytes, d->stream, err));
    QC_TRY(qc_gpu_step_attend(d, r, err));
    QC_TRY(qc_gpu_step_o(d, r, err));
    QC_TRY(qc_gpu_step_gate(d, r, err));
    QC_TRY(qc_gpu_step_down(d, r, err));
    return qc_cuda_to_host(hidden, d->act.hidden, bytes, d->stream, err);
}

qc_status qc_gpu_check_windows(const qc_gpu_forward *d, const uint64_t *lengths, uint64_t windows,
                               qc_error *err)
{
    for (uint64_t i = 0; i < windows; i++)
        if (lengths[i] > d->longest)
            QC_FAIL(err, QC_ERR_USAGE, "a window has %llu tokens; expected at most %llu",
                    (unsigned long long)lengths[i], (unsigned long long)d->longest);
    return QC_OK;
}

uint64_t qc_gpu_next_windows(const uint64_t *lengths, uint64_t windows, uint64_t most_tokens,
                             uint64_t *next)
{
    uint64_t rows = lengths[(*next)++];
    while (*next < windows && rows < most_tokens && lengths[*next] <= most_tokens - rows)
        rows += lengths[(*next)++];
    return rows;
}

qc_status qc_gpu_step_windows(qc_gpu_forward *d, qc_gpu_layer_run *r, const uint64_t *lengths,
                              uint64_t count, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
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
    QC_TRY(qc_cuda_to_device(a->position, d->position, row * sizeof *d->position, d->stream, err));
    return qc_cuda_to_device(a->tiles, d->tiles, tiles * sizeof *d->tiles, d->stream, err);
}
