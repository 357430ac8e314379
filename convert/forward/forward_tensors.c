/* Finds the tensors of a model: of each layer, of the embedding and of the head. */
#include "base/checked.h"
#include "convert/family/family.h"
#include "convert/forward/experts_layer.h"
#include "convert/forward/forward_find.h"

#include <inttypes.h>
#include <string.h>

/* ---- a layer ---- */

typedef struct {
    uint64_t rows, cols;
    int bias;
} linear_size;

/* Gives the sizes of a layer's matrices. A matrix that the layer does not have is part of the one
 * before it. */
static void sizes_of(const qc_forward_shape *s, linear_size out[QC_LAYER_ALL_MATRICES])
{
    const qc_forward_config *c = &s->config;
    const uint64_t q = c->heads * c->head_dim, k = c->kv_heads * c->head_dim;
    const uint64_t v = c->kv_heads * s->value_dim;
    const linear_size sizes[QC_LAYER_ALL_MATRICES] = {
        [QC_LAYER_Q] = {q, c->hidden, s->qkv_bias},
        [QC_LAYER_K] = {k, c->hidden, s->qkv_bias},
        [QC_LAYER_V] = {v, c->hidden, s->qkv_bias},
        [QC_LAYER_O] = {c->hidden, qc_forward_attended(s), s->out_bias},
        [QC_LAYER_GATE] = {c->intermediate, c->hidden, s->mlp_bias},
        [QC_LAYER_UP] = {c->intermediate, c->hidden, s->mlp_bias},
        [QC_LAYER_DOWN] = {c->hidden, c->intermediate, s->mlp_bias},
        [QC_LAYER_Q_B] = {q, s->q_rank, 0},
        [QC_LAYER_KV_B] = {c->heads * (s->turned_from + s->value_dim), s->kv_rank, 0},
    };
    memcpy(out, sizes, sizeof sizes);
    if (s->kv_rank > 0) {
        out[QC_LAYER_Q] =
            (linear_size){s->q_rank ? s->q_rank : q, c->hidden, s->q_rank > 0 && s->qkv_bias};
        out[QC_LAYER_K].rows = s->kv_rank + s->turned;
        return;
    }
    for (int i = QC_LAYER_V; i > QC_LAYER_Q; i--)
        if (!s->names->matrices[i])
            out[i - 1].rows += out[i].rows;
    if (!s->names->matrices[QC_LAYER_UP] && !(s->family->traits & QC_FAMILY_UNGATED))
        out[QC_LAYER_GATE].rows += out[QC_LAYER_UP].rows;
}

static uint64_t vector_size(const qc_forward_shape *s, int i)
{
    const qc_forward_config *c = &s->config;
    const int wide = (s->family->traits & QC_FAMILY_WIDE_NORMS) != 0;
    switch ((qc_layer_vector)i) {
    case QC_LAYER_Q_NORM:
        return c->head_dim * (wide ? c->heads : 1);
    case QC_LAYER_K_NORM:
        return c->head_dim * (wide ? c->kv_heads : 1);
    case QC_LAYER_Q_A_NORM:
        return s->q_rank;
    case QC_LAYER_KV_A_NORM:
        return s->kv_rank;
    case QC_LAYER_SINKS:
        return c->heads;
    case QC_LAYER_ATTENDED_GATE:
    case QC_LAYER_FFN_GATE:
        return 1;
    case QC_LAYER_INPUT_NORM:
    case QC_LAYER_ATTENDED_NORM:
    case QC_LAYER_POST_NORM:
    case QC_LAYER_FFN_NORM:
    case QC_LAYER_VECTORS:
        break;
    }
    return c->hidden;
}

static const qc_layer_names *names_of(const qc_forward_shape *s, uint64_t number)
{
    return s->cross && s->cross[number] ? s->family->cross_names : s->names;
}

static qc_status find_linear_of(const qc_forward_finder *f, const qc_forward_shape *s,
                                uint64_t number, int i, qc_forward_layer *out, qc_error *err)
{
    linear_size sizes[QC_LAYER_ALL_MATRICES];
    const char *name = NULL;
    out->linear[i] = (qc_forward_linear){.tensor = QC_NO_TENSOR, .bias = QC_NO_TENSOR};
    if (!names_of(s, number)->matrices[i])
        return QC_OK;
    if (out->ffn == QC_LAYER_EXPERTS && i >= QC_LAYER_GATE && i <= QC_LAYER_DOWN)
        return QC_OK;
    sizes_of(s, sizes);
    QC_TRY(qc_arena_printf(f->arena, &name, err, "%s%s%" PRIu64 ".%s", f->prefix, s->outer->layers,
                           number, names_of(s, number)->matrices[i]));
    QC_TRY(qc_forward_find_linear(f, name, sizes[i].rows, sizes[i].cols, sizes[i].bias,
                                  &out->linear[i], err));
    out->read_bytes = qc_sat_add(out->read_bytes, out->linear[i].read_bytes);
    out->memory_bytes = qc_sat_add(out->memory_bytes, out->linear[i].memory_bytes);
    return QC_OK;
}

/* Finds name.weight, and name.bias where norms have it. Old files call them gamma and beta. */
static qc_status find_norm(const qc_forward_finder *f, const qc_forward_shape *s, const char *name,
                           uint64_t n, uint32_t *weight, uint32_t *bias, qc_error *err)
{
    const char *full = NULL, *gamma = NULL;
    const int biased = (s->family->traits & QC_FAMILY_LAYER_NORMS) != 0;
    *bias = QC_NO_TENSOR;
    QC_TRY(qc_arena_printf(f->arena, &full, err, "%s.weight", name));
    QC_TRY(qc_arena_printf(f->arena, &gamma, err, "%s.gamma", name));
    const int old = biased && !qc_checkpoint_find(f->c, full) && qc_checkpoint_find(f->c, gamma);
    QC_TRY(qc_forward_find_vector(f, old ? gamma : full, n, weight, err));
    if (!biased)
        return QC_OK;
    QC_TRY(qc_arena_printf(f->arena, &full, err, "%s.%s", name, old ? "beta" : "bias"));
    return qc_forward_find_vector(f, full, n, bias, err);
}

static qc_status find_layer(const qc_forward_finder *f, const qc_forward_shape *s, uint64_t number,
                            qc_forward_layer *out, qc_error *err)
{
    const char *name = NULL;
    out->ffn = qc_experts_in(&s->experts, number) ? QC_LAYER_EXPERTS : QC_LAYER_DENSE;
    out->norms_add = s->family->traits & QC_FAMILY_NORMS_ADD_ONE ? 1.0f : 0.0f;
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++)
        QC_TRY(find_linear_of(f, s, number, i, out, err));
    for (int i = 0; i < QC_LAYER_VECTORS; i++) {
        const uint64_t n = vector_size(s, i);
        out->vectors[i] = QC_NO_TENSOR;
        if (!names_of(s, number)->vectors[i])
            continue;
        QC_TRY(qc_arena_printf(f->arena, &name, err, "%s%s%" PRIu64 ".%s", f->prefix,
                               s->outer->layers, number, names_of(s, number)->vectors[i]));
        QC_TRY(i < QC_LAYER_NORMS ? find_norm(f, s, name, n, &out->vectors[i], &out->biases[i], err)
                                  : qc_forward_find_vector(f, name, n, &out->vectors[i], err));
    }
    return out->ffn == QC_LAYER_EXPERTS ? qc_experts_find(f, s, number, out, err) : QC_OK;
}

/* ---- embedding and head ---- */

static qc_status name_of(const qc_forward_finder *f, const char *prefix, const char *module,
                         const char *what, const char **out, qc_error *err)
{
    return qc_arena_printf(f->arena, out, err, "%s%s%s", prefix, module, what);
}

/* Finds what the file puts in front of names: of the family's prefixes the first with an embedding,
 * and else the first. */
static qc_status find_prefix(qc_forward_finder *f, const qc_forward_shape *s, qc_error *err)
{
    const char *first = NULL, *at = s->family->prefixes ? s->family->prefixes : "model.";
    for (;;) {
        const int length = (int)strcspn(at, " ");
        const char *name = NULL;
        QC_TRY(qc_arena_printf(f->arena, &f->prefix, err, "%.*s", length, at));
        first = first ? first : f->prefix;
        QC_TRY(name_of(f, f->prefix, s->outer->embedding, ".weight", &name, err));
        if (qc_checkpoint_find(f->c, name))
            return QC_OK;
        at += length;
        if (*at++ == '\0')
            break;
    }
    f->prefix = first;
    return QC_OK;
}

/* Finds a table of rows, if there is one. */
static qc_status find_rows(const qc_forward_finder *f, const char *module, uint64_t rows,
                           uint64_t hidden, uint32_t *out, qc_error *err)
{
    const uint64_t dims[2] = {rows, hidden};
    const char *name = NULL;
    *out = QC_NO_TENSOR;
    if (!module)
        return QC_OK;
    QC_TRY(name_of(f, f->prefix, module, ".weight", &name, err));
    return qc_forward_find_plain(f, name, dims, 2, out, err);
}

/* Finds what is added to the embedding, of which there is a row for each place of the context. */
static qc_status find_added(const qc_forward_finder *f, qc_forward_tensors *out, qc_error *err)
{
    const qc_forward_shape *s = &out->shape;
    const uint64_t places = s->config.context + s->first_position, hidden = s->config.hidden;
    const char *name = NULL;
    QC_TRY(find_rows(f, s->outer->positions, places, hidden, &out->positions, err));
    QC_TRY(find_rows(f, s->outer->types, s->types, hidden, &out->types, err));
    out->embedded = out->embedded_bias = QC_NO_TENSOR;
    if (!s->outer->embedded)
        return QC_OK;
    QC_TRY(name_of(f, f->prefix, s->outer->embedded, "", &name, err));
    return find_norm(f, s, name, hidden, &out->embedded, &out->embedded_bias, err);
}

/* Finds the head, and says which tensor the embedding is: a tied head may be in the file under
 * either name, or under both. */
static qc_status find_head(const qc_forward_finder *f, qc_forward_tensors *out,
                           const char **embedding, qc_error *err)
{
    const qc_forward_config *c = &out->shape.config;
    const qc_outer_names *names = out->shape.outer;
    const char *head = NULL, *head_weight = NULL, *language = "language_model.";
    const char *outer = strncmp(f->prefix, language, strlen(language)) == 0 ? language : "";
    QC_TRY(name_of(f, outer, names->head, ".weight", &head_weight, err));
    QC_TRY(name_of(f, outer, names->head, "", &head, err));
    const qc_checkpoint_tensor *own = qc_checkpoint_find(f->c, head_weight);
    out->own_head = own ? (uint32_t)(own - f->c->tensors) : QC_NO_TENSOR;
    if (c->tied && !qc_checkpoint_find(f->c, *embedding) && own)
        *embedding = head_weight;
    else if (c->tied)
        QC_TRY(name_of(f, f->prefix, names->embedding, "", &head, err));
    return qc_forward_find_linear(f, head, c->vocabulary, c->hidden, 0, &out->head, err);
}

static qc_status find_ends(const qc_forward_finder *f, qc_forward_tensors *out, qc_error *err)
{
    const qc_forward_config *c = &out->shape.config;
    const qc_outer_names *names = out->shape.outer;
    const char *embedding = NULL, *norm = NULL;
    const uint64_t dims[2] = {c->vocabulary + out->shape.media_rows, c->hidden};
    QC_TRY(name_of(f, f->prefix, names->embedding, ".weight", &embedding, err));
    out->own_head = out->head.tensor = out->head.bias = QC_NO_TENSOR;
    if (names->head)
        QC_TRY(find_head(f, out, &embedding, err));
    QC_TRY(qc_forward_find_plain(f, embedding, dims, 2, &out->embedding, err));
    QC_TRY(find_added(f, out, err));
    out->norm = out->norm_bias = QC_NO_TENSOR;
    if (!names->norm)
        return QC_OK;
    QC_TRY(name_of(f, f->prefix, names->norm, "", &norm, err));
    return find_norm(f, &out->shape, norm, c->hidden, &out->norm, &out->norm_bias, err);
}

static qc_status take_images(qc_forward_shape *s, const qc_checkpoint *c,
                             const qc_image_states *images, qc_error *err)
{
    const uint64_t width = qc_image_states_width(images);
    s->image_tokens = qc_image_states_longest(images);
    if (width != s->config.hidden)
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: the states of images are %" PRIu64 " wide; expected %" PRIu64
                ", the hidden_size of %s (they come from behind its multi_modal_projector)",
                qc_image_states_path(images), width, s->config.hidden, c->path);
    return QC_OK;
}

qc_status qc_forward_tensors_find(qc_forward_tensors *out, qc_arena *arena, const qc_checkpoint *c,
                                  const qc_image_states *images, qc_error *err)
{
    qc_forward_finder f = {.c = c, .arena = arena};
    memset(out, 0, sizeof *out);
    qc_status st = (images ? qc_forward_shape_read_images
                           : qc_forward_shape_read)(&out->shape, arena, c->config, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "%s", c->path);
        return st;
    }
    if (images)
        QC_TRY(take_images(&out->shape, c, images, err));
    QC_TRY(qc_stored_find(&f.stored, arena, c, err));
    QC_TRY(qc_coded_find(&f.coded, arena, c, err));
    QC_TRY(qc_arena_alloc(arena, &out->layers, (size_t)out->shape.config.layers,
                          sizeof *out->layers, err));
    QC_TRY(find_prefix(&f, &out->shape, err));
    QC_TRY(find_ends(&f, out, err));
    f.turned = (out->shape.family->traits & QC_FAMILY_CONV1D) != 0;
    for (uint64_t i = 0; i < out->shape.config.layers; i++)
        QC_TRY(find_layer(&f, &out->shape, qc_layer_number(&out->shape, i), &out->layers[i], err));
    return QC_OK;
}
