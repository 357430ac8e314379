/* What the first layer gets: rows of the embedding and of learned positions. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/forward/forward_layer.h"
#include "convert/model/recipe_stored.h"

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

static qc_status add_positions(const qc_forward_source *s, const qc_forward_tensors *t,
                               const qc_forward_batch *batch, float *out, qc_error *err)
{
    const qc_checkpoint_tensor *e = &s->checkpoint->tensors[t->positions];
    const uint64_t longest = qc_forward_longest(batch), hidden = t->shape.config.hidden;
    const uint64_t n = longest * hidden, bytes = n * (qc_dtype_bits(e->dtype) / 8);
    uint64_t overflow = 0;
    void *raw = NULL;
    float *rows = NULL;
    if (longest > t->shape.config.context)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s: a window of %" PRIu64 " tokens is longer than the %" PRIu64
                " positions that the model has learned",
                s->checkpoint->path, longest, t->shape.config.context);
    QC_TRY(qc_malloc(&raw, (size_t)bytes, err));
    qc_status st = qc_malloc(&rows, (size_t)n * sizeof *rows, err);
    if (st == QC_OK)
        st = qc_checkpoint_read(s->checkpoint, s->cursor, e, 0, raw, (size_t)bytes, err);
    if (st == QC_OK)
        s->ops->cast(raw, e->dtype, n, rows, QC_DTYPE_F32, &overflow);
    for (uint64_t w = 0; st == QC_OK && w < batch->count; w++)
        for (uint64_t i = 0; i < batch->lengths[w] * hidden; i++)
            *out++ += rows[i];
    qc_free(raw);
    qc_free(rows);
    return st;
}

qc_status qc_forward_embed(const qc_forward_source *s, const qc_forward_tensors *t,
                           const qc_forward_batch *batch, float *out, qc_error *err)
{
    QC_TRY(read_rows(s, t, batch->ids, batch->tokens, out, err));
    return t->positions == QC_NO_TENSOR ? QC_OK : add_positions(s, t, batch, out, err);
}
