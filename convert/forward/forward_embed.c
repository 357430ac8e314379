/* What the first layer gets: rows of the embedding, of learned positions and of types. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/forward/forward_layer.h"
#include "convert/model/recipe_stored.h"
#include "quant/decoder_ops.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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
static qc_status read_rows(const qc_forward_source *s, const qc_forward_tensors *t,
                           const uint32_t *ids, uint64_t n, float *out, qc_error *err)
{
    const qc_checkpoint_tensor *e = &s->checkpoint->tensors[t->embedding];
    uint64_t hidden = t->shape.config.hidden, bytes = hidden * (qc_dtype_bits(e->dtype) / 8);
    const float scale = (float)t->shape.embedding_scale;
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
        for (uint64_t k = 0; st == QC_OK && scale != 1.0f && k < hidden; k++)
            out[w[i].at * hidden + k] *= scale;
    }
    qc_free(w);
    qc_free(row);
    return st;
}

/* Reads the first n rows of a table as floats. */
static qc_status first_rows(const qc_forward_source *s, uint32_t tensor, uint64_t n, float **out,
                            qc_error *err)
{
    const qc_checkpoint_tensor *e = &s->checkpoint->tensors[tensor];
    const uint64_t count = n * e->dims[1], bytes = count * (qc_dtype_bits(e->dtype) / 8);
    uint64_t overflow = 0;
    void *raw = NULL;
    QC_TRY(qc_malloc(&raw, (size_t)bytes, err));
    qc_status st = qc_malloc(out, (size_t)count * sizeof **out, err);
    if (st == QC_OK)
        st = qc_checkpoint_read(s->checkpoint, s->cursor, e, 0, raw, (size_t)bytes, err);
    if (st == QC_OK)
        s->ops->cast(raw, e->dtype, count, *out, QC_DTYPE_F32, &overflow);
    qc_free(raw);
    return st;
}

uint64_t qc_forward_embed_bytes(const qc_forward_tensors *t, uint64_t longest)
{
    const uint64_t rows = qc_sat_add(t->shape.first_position, longest);
    return t->positions == QC_NO_TENSOR
               ? 0
               : qc_sat_mul(qc_sat_mul(rows, t->shape.config.hidden), 2 * sizeof(float));
}

static void add_row(float *out, const float *row, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] += row[i];
}

static qc_status add_positions(const qc_forward_source *s, const qc_forward_tensors *t,
                               const qc_forward_batch *batch, float *out, qc_error *err)
{
    const qc_forward_shape *shape = &t->shape;
    const uint64_t longest = qc_forward_longest(batch), hidden = shape->config.hidden;
    const uint64_t first = shape->first_position;
    const uint32_t *id = batch->ids;
    float *rows = NULL;
    if (longest > shape->config.context)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s: a window of %" PRIu64 " tokens is longer than the %" PRIu64
                " positions that the model has learned",
                s->checkpoint->path, longest, shape->config.context);
    qc_status st = first_rows(s, t->positions, first + longest, &rows, err);
    for (uint64_t w = 0; st == QC_OK && w < batch->count; w++) {
        uint64_t next = first;
        for (uint64_t i = 0; i < batch->lengths[w]; i++, out += hidden) {
            const int padding = first > 0 && *id++ == first - 1;
            add_row(out, rows + (padding ? first - 1 : next++) * hidden, hidden);
        }
    }
    qc_free(rows);
    return st;
}

static qc_status add_type(const qc_forward_source *s, const qc_forward_tensors *t, uint64_t n,
                          float *out, qc_error *err)
{
    const uint64_t hidden = t->shape.config.hidden;
    float *row = NULL;
    qc_status st = first_rows(s, t->types, 1, &row, err);
    for (uint64_t i = 0; st == QC_OK && i < n; i++)
        add_row(out + i * hidden, row, hidden);
    qc_free(row);
    return st;
}

static qc_status norm_rows(const qc_forward_source *s, const qc_forward_tensors *t, uint64_t n,
                           float *out, qc_error *err)
{
    const qc_decoder_ops *ops = qc_decoder_ops_for(s->ops->isa);
    const uint64_t hidden = t->shape.config.hidden;
    const float eps = (float)t->shape.config.norm_eps;
    float *norm = NULL;
    qc_status st = qc_forward_norm_read(&norm, s, t->embedded, t->embedded_bias, 0.0f, err);
    for (uint64_t i = 0; st == QC_OK && i < n; i++)
        ops->layer_norm(out + i * hidden, norm, norm + hidden, hidden, eps, out + i * hidden);
    qc_free(norm);
    return st;
}

qc_status qc_forward_embed(const qc_forward_source *s, const qc_forward_tensors *t,
                           const qc_forward_batch *batch, float *out, qc_error *err)
{
    QC_TRY(read_rows(s, t, batch->ids, batch->tokens, out, err));
    if (t->types != QC_NO_TENSOR)
        QC_TRY(add_type(s, t, batch->tokens, out, err));
    if (t->positions != QC_NO_TENSOR)
        QC_TRY(add_positions(s, t, batch, out, err));
    return t->embedded == QC_NO_TENSOR ? QC_OK : norm_rows(s, t, batch->tokens, out, err);
}
