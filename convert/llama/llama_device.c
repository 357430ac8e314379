#include "convert/llama/llama_device.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>

static const qc_gpu_llama *table(const qc_llama_device *d)
{
    return d->devices->work->llama;
}

/* If a GPU is too small, the user has to decide to go on without it, because a CPU takes many times
 * as long. */
static qc_status said(qc_status st, qc_error *err)
{
    if (st == QC_ERR_NOMEM)
        qc_error_prefix(err, "on the GPU (--device cpu does without it)");
    return st;
}

void qc_llama_device_close(qc_llama_device *d)
{
    if (d->decoder)
        table(d)->destroy(d->decoder);
    d->decoder = NULL;
    d->longest = 0;
    d->has_head = 0;
}

qc_status qc_llama_device_form(qc_gpu_decoder_form *out, void **tables, const qc_llama_shape *shape,
                               uint64_t longest, qc_error *err)
{
    const qc_llama_config *c = &shape->config;
    uint64_t half = c->head_dim / 2, floats = 0, bytes = 0;
    size_t size = 0;
    *tables = NULL;
    /* The tables hold frequencies, cosines and sines. */
    if (qc_mul_u64(longest, 2 * half, &floats) || qc_add_u64(floats, half, &floats) ||
        qc_mul_u64(floats, sizeof(float), &bytes) || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "a window of %" PRIu64 " tokens is too long", longest);
    QC_TRY(qc_malloc(tables, size, err));
    float *frequencies = *tables, *cosines = frequencies + half, *sines = cosines + longest * half;
    qc_rope_frequencies(&shape->rope, c->head_dim, frequencies);
    qc_rope_table(&shape->rope, frequencies, c->head_dim, longest, cosines, sines);
    *out = (qc_gpu_decoder_form){.hidden = c->hidden,
                                 .intermediate = c->intermediate,
                                 .heads = c->heads,
                                 .kv_heads = c->kv_heads,
                                 .head_dim = c->head_dim,
                                 .norm_eps = (float)c->norm_eps,
                                 .longest = longest,
                                 .cosine = cosines,
                                 .sine = sines};
    return QC_OK;
}

qc_status qc_llama_device_ready(qc_llama_device *d, uint64_t longest, qc_error *err)
{
    qc_gpu_decoder_form form;
    void *tables = NULL;
    if (d->decoder && longest <= d->longest)
        return QC_OK;
    qc_llama_device_close(d);
    QC_TRY(qc_llama_device_form(&form, &tables, d->shape, longest, err));
    qc_status st =
        table(d)->create(&d->decoder, &d->devices->gpus[0], &form, &d->devices->tuning, err);
    if (st == QC_OK)
        d->longest = longest;
    qc_free(tables);
    return said(st, err);
}

qc_gpu_matrix qc_llama_device_matrix(const qc_llama_matrix *m)
{
    return (qc_gpu_matrix){.quantized = m->quantized,
                           .dense = m->dense,
                           .dtype = m->dtype,
                           .rows = m->rows,
                           .cols = m->cols,
                           .bias = m->bias};
}

qc_gpu_decoder_layer qc_llama_device_weights(const qc_llama_weights *w, uint64_t window)
{
    return (qc_gpu_decoder_layer){
        .input_norm = w->vectors[QC_LLAMA_INPUT_NORM],
        .attention_norm = w->vectors[QC_LLAMA_POST_NORM],
        .q_norm = w->vectors[QC_LLAMA_Q_NORM],
        .k_norm = w->vectors[QC_LLAMA_K_NORM],
        .q = qc_llama_device_matrix(&w->matrices[QC_LLAMA_Q]),
        .k = qc_llama_device_matrix(&w->matrices[QC_LLAMA_K]),
        .v = qc_llama_device_matrix(&w->matrices[QC_LLAMA_V]),
        .o = qc_llama_device_matrix(&w->matrices[QC_LLAMA_O]),
        .gate = qc_llama_device_matrix(&w->matrices[QC_LLAMA_GATE]),
        .up = qc_llama_device_matrix(&w->matrices[QC_LLAMA_UP]),
        .down = qc_llama_device_matrix(&w->matrices[QC_LLAMA_DOWN]),
        .window = window,
    };
}

qc_status qc_llama_device_layer(qc_llama_device *d, const qc_llama_weights *w, uint64_t layer,
                                const qc_llama_batch *batch, float *hidden, qc_error *err)
{
    const qc_gpu_decoder_layer l = qc_llama_device_weights(w, d->shape->windows[layer]);
    QC_TRY(said(table(d)->layer(d->decoder, &l, hidden, batch->lengths, batch->count, err), err));
    return qc_llama_finite(hidden, batch->tokens * d->shape->config.hidden, err);
}

qc_status qc_llama_device_logits(qc_llama_device *d, const qc_llama_matrix *head,
                                 const float *hidden, uint64_t n, float *out, qc_error *err)
{
    const qc_gpu_matrix m = qc_llama_device_matrix(head);
    QC_TRY(qc_llama_device_ready(d, 1, err));
    if (!d->has_head)
        QC_TRY(said(table(d)->head(d->decoder, &m, err), err));
    d->has_head = 1;
    return said(table(d)->logits(d->decoder, hidden, n, out, err), err);
}
