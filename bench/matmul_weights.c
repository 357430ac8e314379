/* The weights of bench_matmul: quantized on the device from random numbers, made ready, and
 * copied to as many addresses as it takes. */
#include "bench/matmul_bench.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/cuda_quantize.h"

#include <string.h>

#define ALIGNMENT 256u /* of each array in device memory */

const mb_scheme mb_schemes[MB_SCHEMES] = {{"nf4", &qc_form_nf4, 0, 1},
                                          {"nf4-plain", &qc_form_nf4, 0, 0},
                                          {"int8", &qc_form_int8_rows, 1, 0},
                                          {"int8-blocks", &qc_form_int8_blocks, 0, 1}};

static qc_form form_of(const mb_scheme *s, uint64_t k)
{
    return (qc_form){.ops = s->ops, .cols = k, .block_elems = s->by_rows ? 0 : MB_BLOCK};
}

static uint64_t nested_count(uint64_t scales)
{
    return qc_ceil_div_u64(scales, QC_NESTED_BLOCK);
}

uint64_t mb_weight_bytes(const mb_scheme *s, uint64_t n, uint64_t k)
{
    const qc_form form = form_of(s, k);
    const uint64_t scales = qc_form_scales(&form, n * k);
    return qc_form_code_bytes(&form, n * k) +
           (s->nested ? scales + 4 * nested_count(scales) + sizeof qc_dynamic_map : 4 * scales);
}

qc_status mb_download(mb_bench *b, void *host, const void *device, uint64_t bytes, qc_error *err)
{
    unsigned char *to = host;
    const unsigned char *from = device;
    while (bytes) {
        size_t part = bytes < MB_PINNED ? (size_t)bytes : MB_PINNED;
        QC_TRY(qc_cuda_to_host(b->pinned, from, part, b->t.stream, err));
        QC_TRY(qc_cuda_stream_synchronize(b->t.stream, err));
        memcpy(to, b->pinned, part);
        to += part;
        from += part;
        bytes -= part;
    }
    return QC_OK;
}

/* ---- the first copy ---- */

/* One copy is one allocation: codes, scales, scales of the scales, and what qc_matmul_prepare
 * needs. */
typedef struct {
    uint64_t count; /* of scales */
    uint64_t scales, nested, prepared;
} layout;

static layout lay_out(const qc_weights *q, int is_nested)
{
    const uint64_t elems = q->rows * q->form.cols;
    layout l = {.count = qc_form_scales(&q->form, elems)};
    l.scales = qc_align_u64(qc_form_code_bytes(&q->form, elems), ALIGNMENT);
    l.nested = l.scales + qc_align_u64(is_nested ? l.count : 4 * l.count, ALIGNMENT);
    l.prepared = l.nested + (is_nested ? qc_align_u64(4 * nested_count(l.count), ALIGNMENT) : 0);
    return l;
}

/* Where the arrays lie in one copy. */
static void point(qc_weights *w, const layout *l, unsigned char *memory)
{
    w->codes = memory;
    if (w->nested_map) {
        w->absmax_codes = memory + l->scales;
        w->nested_absmax = (const float *)(const void *)(memory + l->nested);
    } else {
        w->absmax = (const float *)(const void *)(memory + l->scales);
    }
}

/* Writes codes to memory and float scales to absmax. */
static qc_status quantize(mb_bench *b, const qc_weights *q, const void *dense, void *codes,
                          float *absmax, qc_error *err)
{
    const qc_cuda_quantize_job a = {.src = dense,
                                    .dtype = b->dtype,
                                    .n = q->rows * q->form.cols,
                                    .form = q->form,
                                    .codes = codes,
                                    .absmax = absmax,
                                    .bad = b->bad};
    return qc_cuda_quantize(&a, b->t.stream, err);
}

qc_status mb_nest(mb_bench *b, const float *absmax, uint64_t count, uint8_t *codes, float *nested,
                  float *offset, qc_error *err)
{
    const uint64_t groups = nested_count(count);
    float *host = NULL, *group = NULL;
    uint8_t *code = NULL;
    qc_status st = qc_calloc(&host, (size_t)count, sizeof *host, err);
    if (st == QC_OK)
        st = qc_calloc(&group, (size_t)groups, sizeof *group, err);
    if (st == QC_OK)
        st = qc_malloc(&code, (size_t)count, err);
    if (st == QC_OK)
        st = mb_download(b, host, absmax, 4 * count, err);
    if (st == QC_OK) {
        *offset = qc_nested_offset(host, count);
        b->ops->nested_quantize(host, count, *offset, code, group);
        st = qc_cuda_to_device(codes, code, (size_t)count, b->t.stream, err);
    }
    if (st == QC_OK)
        st = qc_cuda_to_device(nested, group, (size_t)(4 * groups), b->t.stream, err);
    /* After this the copies on the host may go. */
    if (st == QC_OK)
        st = qc_cuda_stream_synchronize(b->t.stream, err);
    qc_free(code);
    qc_free(group);
    qc_free(host);
    return st;
}

static qc_status make_first(mb_bench *b, qc_weights *q, const layout *l, const void *dense,
                            unsigned char *memory, qc_error *err)
{
    void *temporary = NULL;
    float *absmax = (float *)(void *)(memory + l->scales);
    if (q->nested_map) {
        QC_TRY(qc_cuda_malloc(&temporary, (size_t)(4 * l->count), err));
        absmax = temporary;
    }
    qc_status st = quantize(b, q, dense, memory, absmax, err);
    if (st == QC_OK && q->nested_map)
        st = mb_nest(b, absmax, l->count, memory + l->scales, (float *)(void *)(memory + l->nested),
                     &q->form.offset, err);
    if (st == QC_OK)
        st = qc_cuda_stream_synchronize(b->t.stream, err);
    qc_cuda_free(temporary);
    return st;
}

static qc_status room_for(mb_weights *w, uint32_t copies, qc_error *err)
{
    QC_TRY(qc_realloc_array(&w->memory, copies, sizeof *w->memory, err));
    return qc_realloc_array(&w->w, copies, sizeof *w->w, err);
}

qc_status mb_weights_make(mb_bench *b, mb_weights *w, const mb_scheme *scheme, const void *dense,
                          const mb_shape *shape, qc_error *err)
{
    qc_weights q = {.form = form_of(scheme, shape->k),
                    .rows = shape->n,
                    .nested_map = scheme->nested ? b->map : NULL,
                    .nested_block = scheme->nested ? QC_NESTED_BLOCK : 0};
    const layout l = lay_out(&q, scheme->nested);
    *w = (mb_weights){0};
    QC_TRY(room_for(w, 1, err));
    /* How many bytes depends on the alignment of addresses, which all copies share. */
    point(&q, &l, (unsigned char *)ALIGNMENT);
    w->bytes_each = l.prepared + qc_align_u64(qc_matmul_prepared_bytes(&q), ALIGNMENT);
    QC_TRY(qc_cuda_malloc(&w->memory[0], (size_t)w->bytes_each, err));
    w->copies = 1;
    point(&q, &l, w->memory[0]);
    QC_TRY(make_first(b, &q, &l, dense, w->memory[0], err));
    w->plain = q;
    return qc_matmul_prepare(b->t.handle, &q, (unsigned char *)w->memory[0] + l.prepared, &w->w[0],
                             b->t.stream, err);
}

/* ---- more of them ---- */

static qc_status copy_next(mb_bench *b, mb_weights *w, qc_error *err)
{
    const layout l = lay_out(&w->plain, w->plain.nested_map != NULL);
    const uint32_t i = w->copies;
    QC_TRY(qc_cuda_malloc(&w->memory[i], (size_t)w->bytes_each, err));
    w->copies++;
    QC_TRY(qc_cuda_copy(w->memory[i], w->memory[0], (size_t)l.prepared, b->t.stream, err));
    qc_weights q = w->plain;
    point(&q, &l, w->memory[i]);
    return qc_matmul_prepare(b->t.handle, &q, (unsigned char *)w->memory[i] + l.prepared, &w->w[i],
                             b->t.stream, err);
}

qc_status mb_weights_multiply(mb_bench *b, mb_weights *w, uint32_t want, qc_error *err)
{
    QC_TRY(room_for(w, want, err));
    while (w->copies < want) {
        qc_error full = {0};
        if (copy_next(b, w, &full) == QC_OK)
            continue;
        if (full.code == QC_ERR_NOMEM)
            break;
        *err = full;
        return full.code;
    }
    QC_TRY(qc_cuda_stream_synchronize(b->t.stream, err));
    for (uint32_t i = 0; i < w->copies; i++)
        w->w[i].complete = QC_MATMUL_WEIGHTS_COMPLETE; /* nothing writes to them any more */
    return QC_OK;
}

void mb_weights_free(mb_weights *w)
{
    for (uint32_t i = 0; i < w->copies; i++)
        qc_cuda_free(w->memory[i]);
    qc_free(w->memory);
    qc_free(w->w);
    *w = (mb_weights){0};
}
