/* The steps in which a layer is computed; see gpu_llama_internal.h. */
#include "convert/gpu/gpu_llama_internal.h"

#include <math.h>

/* The heads of q, k or v: the product with w, then the norm and the turning, if there are any. */
static qc_status one_heads(qc_gpu_forward *d, const qc_gpu_layer_run *r,
                           const qc_gpu_device_matrix *w, const float *norm, int turns,
                           uint64_t heads, float *out, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    qc_cuda_product p;
    qc_cuda_heads h = {.rows = r->rows,
                       .heads = (uint32_t)heads,
                       .head_dim = (uint32_t)d->form.head_dim,
                       .norm = norm,
                       .eps = d->form.norm_eps,
                       .cosine = turns ? d->form.cosine : NULL,
                       .sine = turns ? d->form.sine : NULL,
                       .position = a->position};
    QC_TRY(qc_gpu_multiply(d, w, a->x, a->exponent, r->rows, a->a, &p, err));
    return qc_cuda_llama_heads(&p, &h, out, d->stream, err);
}

qc_status qc_gpu_step_norm(qc_gpu_forward *d, const qc_gpu_layer_run *r, const float *gain,
                           qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    qc_cuda_halves x = {
        .rows = r->rows, .cols = d->form.hidden, .half = a->x, .exponent = a->exponent};
    return qc_cuda_llama_halves(a->hidden, gain, d->form.norm_eps, &x, d->stream, err);
}

qc_status qc_gpu_step_attend(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_gpu_decoder_form *f = &d->form;
    QC_TRY(qc_gpu_step_norm(d, r, r->input_norm, err));
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
    return qc_cuda_llama_attention(&attention, d->stream, err);
}

qc_status qc_gpu_step_o(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_gpu_decoder_form *f = &d->form;
    qc_cuda_product p;
    qc_cuda_halves x = {
        .rows = r->rows, .cols = f->heads * f->head_dim, .half = a->x, .exponent = a->exponent};
    QC_TRY(qc_cuda_llama_halves(a->attended, NULL, 0.0f, &x, d->stream, err));
    QC_TRY(qc_gpu_multiply(d, &r->o, a->x, a->exponent, r->rows, a->a, &p, err));
    return qc_cuda_llama_floats(&p, r->rows, f->hidden, 1, a->hidden, d->stream, err);
}

qc_status qc_gpu_step_gate(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_gpu_decoder_form *f = &d->form;
    qc_cuda_product gate, up;
    qc_cuda_halves x = {
        .rows = r->rows, .cols = f->intermediate, .half = a->x, .exponent = a->exponent2};
    QC_TRY(qc_gpu_step_norm(d, r, r->attention_norm, err));
    QC_TRY(qc_gpu_multiply(d, &r->gate, a->x, a->exponent, r->rows, a->a, &gate, err));
    QC_TRY(qc_gpu_multiply(d, &r->up, a->x, a->exponent, r->rows, a->b, &up, err));
    return qc_cuda_llama_swiglu(&gate, &up, &x, d->stream, err);
}

qc_status qc_gpu_step_down(qc_gpu_forward *d, const qc_gpu_layer_run *r, qc_error *err)
{
    const qc_gpu_activations *a = &d->act;
    const qc_gpu_decoder_form *f = &d->form;
    qc_cuda_product down;
    QC_TRY(qc_gpu_multiply(d, &r->down, a->x, a->exponent2, r->rows, a->a, &down, err));
    return qc_cuda_llama_floats(&down, r->rows, f->hidden, 1, a->hidden, d->stream, err);
}

qc_status qc_gpu_check_windows(const qc_gpu_forward *d, const uint64_t *lengths, uint64_t windows,
                               qc_error *err)
{
    for (uint64_t i = 0; i < windows; i++)
        if (lengths[i] > d->form.longest)
            QC_FAIL(err, QC_ERR_USAGE, "a window has %llu tokens, and at most %llu were expected",
                    (unsigned long long)lengths[i], (unsigned long long)d->form.longest);
    return QC_OK;
}

uint64_t qc_gpu_next_windows(const qc_gpu_forward *d, const uint64_t *lengths, uint64_t windows,
                             uint64_t *next)
{
    uint64_t rows = 0;
    while (*next < windows && lengths[*next] <= d->act.tokens - rows)
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

qc_status qc_gpu_take_vector(qc_gpu_forward *d, qc_gpu_cutter *c, const float *host, uint64_t n,
                             float **out, qc_error *err)
{
    *out = NULL;
    if (!host)
        return QC_OK;
    *out = qc_gpu_cut(c, n * sizeof(float));
    return qc_cuda_to_device(*out, host, (size_t)(n * sizeof(float)), d->stream, err);
}
