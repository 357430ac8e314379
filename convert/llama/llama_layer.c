#include "convert/llama/llama_layer.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/coded_read.h"
#include "convert/model/recipe_stored.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DECODE_ELEMS ((uint64_t)1 << 20) /* elements of a coded weight that are decoded at a time */

/* ---- finding ---- */

typedef struct {
    const qc_checkpoint *c;
    qc_arena *arena;
    qc_stored_set stored;
    qc_coded_set coded;
} finder;

static int is_float(qc_dtype t)
{
    return t == QC_DTYPE_F32 || t == QC_DTYPE_F16 || t == QC_DTYPE_BF16;
}

static qc_status missing(const finder *f, const char *name, qc_error *err)
{
    const qc_json_node *q = qc_json_get(qc_json_root(f->c->config), "quantization_config");
    const char *method = qc_json_string_or(qc_json_get(q, "quant_method"), NULL);
    QC_FAIL(err, method ? QC_ERR_UNSUPPORTED : QC_ERR_INPUT,
            "%s: tensor '%s', which config.json asks for, is not there%s%.60s%s", f->c->path, name,
            method ? " (quantization_config says '" : "", method ? method : "", method ? "')" : "");
}

static qc_status shape_differs(const finder *f, const char *name, const uint64_t *dims,
                               unsigned ndim, const uint64_t *expected, unsigned expected_ndim,
                               qc_error *err)
{
    char found[QC_SHAPE_TEXT_BYTES], want[QC_SHAPE_TEXT_BYTES];
    QC_FAIL(err, QC_ERR_SHAPE, "%s: tensor '%s' is %s, and config.json makes it %s", f->c->path,
            name, qc_text_shape(found, dims, ndim), qc_text_shape(want, expected, expected_ndim));
}

static qc_status type_unsupported(const finder *f, const qc_checkpoint_tensor *t, qc_error *err)
{
    QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: tensor '%s' is %s; expected F32, F16 or BF16", f->c->path,
            t->name, qc_dtype_name(t->dtype));
}

/* Finds a plain tensor of floats. */
static qc_status plain(const finder *f, const char *name, const uint64_t *dims, unsigned ndim,
                       uint32_t *out, qc_error *err)
{
    const qc_checkpoint_tensor *t = qc_checkpoint_find(f->c, name);
    if (!t)
        return missing(f, name, err);
    *out = (uint32_t)(t - f->c->tensors);
    if (f->stored.weights[*out])
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: tensor '%s' is quantized; expected 16 or 32 bits",
                f->c->path, name);
    int same = t->ndim == ndim;
    for (unsigned i = 0; same && i < ndim; i++)
        same = t->dims[i] == dims[i];
    if (!same)
        return shape_differs(f, name, t->dims, t->ndim, dims, ndim, err);
    return is_float(t->dtype) ? QC_OK : type_unsupported(f, t, err);
}

static qc_status vector(const finder *f, const char *name, uint64_t n, uint32_t *out, qc_error *err)
{
    return plain(f, name, &n, 1, out, err);
}

static qc_status linear(const finder *f, const char *module, uint64_t rows, uint64_t cols, int bias,
                        qc_llama_linear *out, qc_error *err)
{
    const char *name = NULL;
    const uint64_t want[2] = {rows, cols};
    QC_TRY(qc_arena_printf(f->arena, &name, err, "%s.weight", module));
    uint32_t index = qc_coded_index(&f->coded, f->c, name);
    if (index == QC_NO_TENSOR)
        return missing(f, name, err);
    const qc_checkpoint_tensor *t = &f->c->tensors[index];
    *out = (qc_llama_linear){.bias = QC_NO_TENSOR, .rows = rows, .cols = cols};
    out->tensor = (uint32_t)(t - f->c->tensors);
    out->stored = f->stored.weights[out->tensor];
    out->coded = f->coded.weights[out->tensor];
    if (!out->stored && out->coded)
        QC_TRY(qc_stored_of_integers(&out->stored, f->arena, f->c, out->tensor, out->coded, err));
    out->read_bytes = out->memory_bytes = t->bytes;
    if (out->stored) {
        if (out->stored->ndim != 2 || out->stored->dims[0] != rows || out->stored->dims[1] != cols)
            return shape_differs(f, name, out->stored->dims, out->stored->ndim, want, 2, err);
        out->read_bytes = out->memory_bytes = qc_stored_bytes(f->c, out->tensor, out->stored);
    } else if (out->coded) {
        if (out->coded->ndim != 2 || out->coded->dims[0] != rows || out->coded->dims[1] != cols)
            return shape_differs(f, name, out->coded->dims, out->coded->ndim, want, 2, err);
        out->memory_bytes = qc_sat_mul(qc_sat_mul(rows, cols), sizeof(float));
    } else {
        QC_TRY(plain(f, name, want, 2, &out->tensor, err));
    }
    if (!bias)
        return QC_OK;
    QC_TRY(qc_arena_printf(f->arena, &name, err, "%s.bias", module));
    return vector(f, name, rows, &out->bias, err);
}

static qc_status find_layer(const finder *f, const qc_llama_shape *s, uint64_t number,
                            qc_llama_layer *out, qc_error *err)
{
    const qc_llama_config *c = &s->config;
    const uint64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const struct {
        const char *module;
        uint64_t rows, cols;
        int bias;
    } linears[QC_LLAMA_MATRICES] = {
        [QC_LLAMA_Q] = {"self_attn.q_proj", q, c->hidden, s->qkv_bias},
        [QC_LLAMA_K] = {"self_attn.k_proj", kv, c->hidden, s->qkv_bias},
        [QC_LLAMA_V] = {"self_attn.v_proj", kv, c->hidden, s->qkv_bias},
        [QC_LLAMA_O] = {"self_attn.o_proj", c->hidden, q, s->out_bias},
        [QC_LLAMA_GATE] = {"mlp.gate_proj", c->intermediate, c->hidden, s->mlp_bias},
        [QC_LLAMA_UP] = {"mlp.up_proj", c->intermediate, c->hidden, s->mlp_bias},
        [QC_LLAMA_DOWN] = {"mlp.down_proj", c->hidden, c->intermediate, s->mlp_bias},
    };
    const struct {
        const char *name;
        uint64_t n;
    } vectors[QC_LLAMA_VECTORS] = {
        [QC_LLAMA_INPUT_NORM] = {"input_layernorm", c->hidden},
        [QC_LLAMA_POST_NORM] = {"post_attention_layernorm", c->hidden},
        [QC_LLAMA_Q_NORM] = {"self_attn.q_norm", s->head_norms ? c->head_dim : 0},
        [QC_LLAMA_K_NORM] = {"self_attn.k_norm", s->head_norms ? c->head_dim : 0},
    };
    const char *name = NULL;
    for (int i = 0; i < QC_LLAMA_MATRICES; i++) {
        QC_TRY(qc_arena_printf(f->arena, &name, err, "model.layers.%" PRIu64 ".%s", number,
                               linears[i].module));
        QC_TRY(linear(f, name, linears[i].rows, linears[i].cols, linears[i].bias, &out->linear[i],
                      err));
        out->read_bytes = qc_sat_add(out->read_bytes, out->linear[i].read_bytes);
        out->memory_bytes = qc_sat_add(out->memory_bytes, out->linear[i].memory_bytes);
    }
    for (int i = 0; i < QC_LLAMA_VECTORS; i++) {
        out->vectors[i] = QC_NO_TENSOR;
        if (vectors[i].n == 0)
            continue;
        QC_TRY(qc_arena_printf(f->arena, &name, err, "model.layers.%" PRIu64 ".%s.weight", number,
                               vectors[i].name));
        QC_TRY(vector(f, name, vectors[i].n, &out->vectors[i], err));
    }
    return QC_OK;
}

/* Finds the embedding and the head. A tied head may be in the file under either name, or under
 * both. */
static qc_status find_ends(const finder *f, qc_llama_tensors *out, qc_error *err)
{
    const qc_llama_config *c = &out->shape.config;
    const char *embedding = "model.embed_tokens.weight", *head = "lm_head";
    const uint64_t dims[2] = {c->vocabulary, c->hidden};
    if (c->tied && !qc_checkpoint_find(f->c, embedding) &&
        qc_checkpoint_find(f->c, "lm_head.weight"))
        embedding = "lm_head.weight";
    else if (c->tied)
        head = "model.embed_tokens";
    QC_TRY(plain(f, embedding, dims, 2, &out->embedding, err));
    QC_TRY(linear(f, head, c->vocabulary, c->hidden, 0, &out->head, err));
    return vector(f, "model.norm.weight", c->hidden, &out->norm, err);
}

qc_status qc_llama_tensors_find(qc_llama_tensors *out, qc_arena *arena, const qc_checkpoint *c,
                                qc_error *err)
{
    finder f = {.c = c, .arena = arena};
    memset(out, 0, sizeof *out);
    qc_status st = qc_llama_shape_read(&out->shape, arena, c->config, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "%s", c->path);
        return st;
    }
    QC_TRY(qc_stored_find(&f.stored, arena, c, err));
    QC_TRY(qc_coded_find(&f.coded, arena, c, err));
    QC_TRY(qc_arena_alloc(arena, &out->layers, (size_t)out->shape.config.layers,
                          sizeof *out->layers, err));
    QC_TRY(find_ends(&f, out, err));
    for (uint64_t i = 0; i < out->shape.config.layers; i++)
        QC_TRY(find_layer(&f, &out->shape, i, &out->layers[i], err));
    return QC_OK;
}

/* ---- reading ---- */

qc_status qc_llama_vector_read(float **out, const qc_llama_source *s, uint32_t tensor,
                               qc_error *err)
{
    const qc_checkpoint_tensor *t = &s->checkpoint->tensors[tensor];
    uint64_t n = t->dims[0], overflow = 0;
    void *raw = NULL;
    *out = NULL;
    qc_status st = qc_tensor_read(s->checkpoint, t, s->cursor, &raw, err);
    if (st == QC_OK)
        st = qc_malloc(out, (size_t)n * sizeof **out, err);
    if (st == QC_OK)
        s->ops->cast(raw, t->dtype, n, *out, QC_DTYPE_F32, &overflow);
    qc_free(raw);
    return st;
}

/* Reads FP8 and integers as floats. */
static qc_status read_coded(qc_llama_matrix *out, const qc_llama_source *s,
                            const qc_llama_linear *l, qc_error *err)
{
    const qc_checkpoint_tensor *t = &s->checkpoint->tensors[l->tensor];
    qc_coded_scratch scratch = {0};
    uint64_t n = l->rows * l->cols;
    size_t size = 0;
    if (qc_u64_to_size(l->memory_bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", t->name);
    QC_TRY(qc_malloc(&out->owned, size, err));
    qc_status st = QC_OK;
    for (uint64_t at = 0; st == QC_OK && at < n; at += DECODE_ELEMS) {
        uint64_t count = n - at < DECODE_ELEMS ? n - at : DECODE_ELEMS;
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = qc_coded_read(s->checkpoint, s->cursor, s->ops, t, l->coded, &scratch, at, count,
                               (float *)out->owned + at, err);
    }
    qc_coded_scratch_deinit(&scratch);
    out->dtype = QC_DTYPE_F32;
    return st;
}

/* Scales of integers that decoding them to floats refuses as well. */
static qc_status check_scales(const qc_weights *w, const char *name, qc_error *err)
{
    const uint64_t n = w->form.ops->integer ? qc_form_scales(&w->form, w->rows * w->form.cols) : 0;
    for (uint64_t i = 0; i < n; i++)
        if (!isfinite(w->absmax[i]) || w->absmax[i] == 0.0f)
            return qc_error_set(err, isfinite(w->absmax[i]) ? QC_ERR_INPUT : QC_ERR_NONFINITE,
                                __FILE__, __LINE__, "tensor '%s': scale %" PRIu64 " of it is %s",
                                name, i, isfinite(w->absmax[i]) ? "0" : "not finite");
    return QC_OK;
}

qc_status qc_llama_matrix_read(qc_llama_matrix *out, const qc_llama_source *s,
                               const qc_llama_linear *l, qc_error *err)
{
    const qc_checkpoint_tensor *t = &s->checkpoint->tensors[l->tensor];
    memset(out, 0, sizeof *out);
    out->rows = l->rows;
    out->cols = l->cols;
    if (l->stored) {
        QC_TRY(qc_stored_read(&out->arrays, s->checkpoint, l->tensor, l->stored, s->cursor, err));
        QC_TRY(check_scales(&out->arrays.w, t->name, err));
        out->quantized = &out->arrays.w;
    } else if (l->coded) {
        QC_TRY(read_coded(out, s, l, err));
    } else {
        QC_TRY(qc_tensor_read(s->checkpoint, t, s->cursor, &out->owned, err));
        out->dtype = t->dtype;
    }
    out->dense = out->owned;
    if (l->bias != QC_NO_TENSOR) {
        float *bias = NULL;
        qc_status st = qc_llama_vector_read(&bias, s, l->bias, err);
        out->bias = out->owned_bias = bias;
        QC_TRY(st);
    }
    qc_progress_add(s->progress, l->read_bytes);
    return QC_OK;
}

void qc_llama_matrix_deinit(qc_llama_matrix *m)
{
    qc_stored_deinit(&m->arrays);
    qc_free(m->owned);
    qc_free(m->owned_bias);
    memset(m, 0, sizeof *m);
}

qc_status qc_llama_weights_read(qc_llama_weights *out, const qc_llama_source *s,
                                const qc_llama_layer *l, qc_error *err)
{
    memset(out, 0, sizeof *out);
    for (int i = 0; i < QC_LLAMA_VECTORS; i++)
        if (l->vectors[i] != QC_NO_TENSOR)
            QC_TRY(qc_llama_vector_read(&out->vectors[i], s, l->vectors[i], err));
    for (int i = 0; i < QC_LLAMA_MATRICES; i++)
        QC_TRY(qc_llama_matrix_read(&out->matrices[i], s, &l->linear[i], err));
    return QC_OK;
}

void qc_llama_weights_deinit(qc_llama_weights *w)
{
    for (int i = 0; i < QC_LLAMA_MATRICES; i++)
        qc_llama_matrix_deinit(&w->matrices[i]);
    for (int i = 0; i < QC_LLAMA_VECTORS; i++)
        qc_free(w->vectors[i]);
    memset(w, 0, sizeof *w);
}

uint64_t qc_llama_longest(const qc_llama_batch *b)
{
    uint64_t longest = 0;
    for (uint64_t i = 0; i < b->count; i++)
        longest = qc_max_u64(longest, b->lengths[i]);
    return longest;
}

qc_status qc_llama_finite(const float *x, uint64_t n, qc_error *err)
{
    const uint32_t exponent = 0x7f800000u;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bad |= (bits & exponent) == exponent;
    }
    if (bad)
        QC_FAIL(err, QC_ERR_NONFINITE, "a hidden state is not finite");
    return QC_OK;
}

/* ---- the embedding ---- */

typedef struct {
    uint32_t id;
    uint64_t at;
} wanted;

static int compare_wanted(const void *a, const void *b)
{
    const wanted *x = a, *y = b;
    if (x->id != y->id)
        return x->id < y->id ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Rows are read in the order of the file, each once, so that a compressed embedding is decoded at
 * most once. */
qc_status qc_llama_embed(const qc_llama_source *s, const qc_llama_tensors *t, const uint32_t *ids,
                         uint64_t n, float *out, qc_error *err)
{
    const qc_checkpoint_tensor *e = &s->checkpoint->tensors[t->embedding];
    uint64_t hidden = t->shape.config.hidden, bytes = hidden * (qc_dtype_bits(e->dtype) / 8);
    uint64_t overflow = 0;
    void *row = NULL;
    wanted *w = NULL;
    size_t count = 0;
    if (qc_u64_to_size(n, &count))
        QC_FAIL(err, QC_ERR_NOMEM, "%" PRIu64 " tokens are too many", n);
    QC_TRY(qc_malloc(&row, (size_t)bytes, err));
    qc_status st = qc_calloc(&w, count, sizeof *w, err);
    for (uint64_t i = 0; st == QC_OK && i < n; i++)
        w[i] = (wanted){ids[i], i};
    if (st == QC_OK && n > 0)
        qsort(w, count, sizeof *w, compare_wanted);
    for (uint64_t i = 0; st == QC_OK && i < n; i++) {
        if (i > 0 && w[i].id == w[i - 1].id) {
            memcpy(out + w[i].at * hidden, out + w[i - 1].at * hidden,
                   (size_t)hidden * sizeof *out);
            continue;
        }
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = qc_checkpoint_read(s->checkpoint, s->cursor, e, w[i].id * bytes, row,
                                    (size_t)bytes, err);
        if (st == QC_OK)
            s->ops->cast(row, e->dtype, hidden, out + w[i].at * hidden, QC_DTYPE_F32, &overflow);
    }
    qc_free(w);
    qc_free(row);
    return st;
}
