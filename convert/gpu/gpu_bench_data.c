/* The data of the matmuls: random numbers on the device, and weights quantized from them. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/random.h"
#include "convert/gpu/gpu_bench_internal.h"
#include "kernels/cuda_quantize.h"
#include "quant/quant_half.h"

#include <math.h>
#include <string.h>

#define ALIGNMENT 256u /* of each array in device memory */

/* ---- random numbers ---- */

/* The sum of four uniform numbers. It has a bell shape with standard deviation 1, without the tails
 * of a normal distribution, and it is fast enough to make millions. */
static float next_bell(uint64_t *state)
{
    uint64_t v = qc_random_next(state);
    int sum = (int)(v & 0xffff) + (int)(v >> 16 & 0xffff) + (int)(v >> 32 & 0xffff) +
              (int)(v >> 48) - 2 * 0xffff;
    return (float)sum * (float)(1.7320508075688772 / 65536); /* the variance of four is 1/3 */
}

qc_status qc_bench_pool_make(qc_bench_gpu *b, qc_bench_pool *p, uint64_t unique, double deviation,
                             qc_dtype dtype, qc_error *err)
{
    uint64_t state = b->q->seed;
    float scale = (float)deviation;
    *p = (qc_bench_pool){.unique = unique, .dtype = dtype};
    QC_TRY(qc_calloc(&p->host, (size_t)unique, sizeof *p->host, err));
    for (uint64_t i = 0; i < unique; i++) {
        float v = next_bell(&state) * scale;
        p->host[i] = dtype == QC_DTYPE_F16 ? qc_f16_from_f32(v) : qc_bf16_from_f32(v);
    }
    QC_TRY(qc_cuda_malloc(&p->device, (size_t)unique * sizeof *p->host, err));
    QC_TRY(qc_cuda_to_device(p->device, p->host, (size_t)unique * sizeof *p->host, b->stream, err));
    return qc_cuda_stream_synchronize(b->stream, err);
}

qc_status qc_bench_pool_fill(qc_bench_gpu *b, const qc_bench_pool *p, void *dst, uint64_t n,
                             uint64_t first, qc_error *err)
{
    const uint16_t *from = p->device;
    uint16_t *to = dst;
    uint64_t at = first % p->unique;
    while (n) {
        uint64_t part = p->unique - at < n ? p->unique - at : n;
        QC_TRY(qc_cuda_copy(to, from + at, (size_t)part * sizeof *to, b->stream, err));
        to += part;
        n -= part;
        at = 0;
    }
    return QC_OK;
}

void qc_bench_pool_free(qc_bench_pool *p)
{
    qc_free(p->host);
    qc_cuda_free(p->device);
    *p = (qc_bench_pool){0};
}

qc_status qc_bench_download(qc_bench_gpu *b, void *host, const void *device, uint64_t bytes,
                            qc_error *err)
{
    unsigned char *to = host;
    const unsigned char *from = device;
    while (bytes) {
        size_t part = bytes < QC_BENCH_PINNED ? (size_t)bytes : QC_BENCH_PINNED;
        QC_TRY(qc_cuda_to_host(b->pinned, from, part, b->stream, err));
        QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
        memcpy(to, b->pinned, part);
        to += part;
        from += part;
        bytes -= part;
    }
    return QC_OK;
}

/* ---- weights ---- */

/* One copy is one allocation: codes, scales, scales of the scales, and what qc_matmul_prepare
 * needs. */
typedef struct {
    uint64_t blocks; /* blocks of the weight, or rows */
    uint64_t scales, nested, prepared, total;
    int is_nf4, is_rows, is_nested;
} layout;

static layout lay_out(qc_bench_scheme scheme, uint64_t n, uint64_t k)
{
    layout l = {0};
    l.is_nf4 = scheme == QC_BENCH_NF4 || scheme == QC_BENCH_NF4_PLAIN;
    l.is_rows = scheme == QC_BENCH_INT8;
    l.is_nested = scheme == QC_BENCH_NF4 || scheme == QC_BENCH_INT8_BLOCK;
    l.blocks = l.is_rows ? n : qc_ceil_div_u64(n * k, QC_BENCH_BLOCK);
    l.scales = qc_align_u64(l.is_nf4 ? (n * k + 1) / 2 : n * k, ALIGNMENT);
    l.nested = l.scales + qc_align_u64(l.is_nested ? l.blocks : 4 * l.blocks, ALIGNMENT);
    l.prepared =
        l.nested + (l.is_nested ? qc_align_u64(4 * qc_ceil_div_u64(l.blocks, 256), ALIGNMENT) : 0);
    return l;
}

/* Writes codes to memory and float scales to absmax. */
static qc_status quantize(qc_bench_gpu *b, const layout *l, unsigned char *memory, float *absmax,
                          const qc_bench_dense *d, qc_error *err)
{
    if (l->is_rows) {
        qc_cuda_rows rows = {.src = d->values,
                             .dtype = d->dtype,
                             .rows = d->n,
                             .cols = d->k,
                             .codes = (int8_t *)memory,
                             .scb = absmax,
                             .bad = b->bad};
        return qc_cuda_int8_rows_quantize(&rows, b->stream, err);
    }
    qc_cuda_blocks blocks = {.src = d->values,
                             .dtype = d->dtype,
                             .n = d->n * d->k,
                             .block_elems = QC_BENCH_BLOCK,
                             .codes = memory,
                             .absmax = absmax,
                             .bad = b->bad};
    return l->is_nf4 ? qc_cuda_nf4_quantize(&blocks, b->stream, err)
                     : qc_cuda_int8_blocks_quantize(&blocks, b->stream, err);
}

/* Writes the codes of the scales in absmax to memory, and their offset to *offset. */
static qc_status nest(qc_bench_gpu *b, const layout *l, unsigned char *memory, const float *absmax,
                      float *offset, qc_error *err)
{
    void *host;
    QC_TRY(qc_calloc(&host, (size_t)l->blocks, sizeof(float), err));
    qc_status st = qc_bench_download(b, host, absmax, 4 * l->blocks, err);
    if (st == QC_OK) {
        *offset = qc_nested_offset(host, l->blocks);
        st = qc_cuda_nested_quantize(absmax, l->blocks, *offset, memory + l->scales,
                                     (float *)(void *)(memory + l->nested), b->stream, err);
    }
    qc_free(host);
    return st;
}

/* Where the arrays lie in one copy. */
static void point(qc_weights *w, const layout *l, unsigned char *memory)
{
    w->codes = memory;
    if (l->is_nested) {
        w->absmax_codes = memory + l->scales;
        w->nested_absmax = (const float *)(const void *)(memory + l->nested);
    } else {
        w->absmax = (const float *)(const void *)(memory + l->scales);
    }
}

static qc_status make_first(qc_bench_gpu *b, qc_bench_weights *w, const layout *l,
                            const qc_bench_dense *dense, qc_error *err)
{
    unsigned char *memory = w->memory[0];
    void *temporary = NULL;
    float *absmax = (float *)(void *)(memory + l->scales);
    float offset = 0;
    if (l->is_nested) {
        QC_TRY(qc_cuda_malloc(&temporary, (size_t)(4 * l->blocks), err));
        absmax = temporary;
    }
    qc_status st = quantize(b, l, memory, absmax, dense, err);
    if (st == QC_OK && l->is_nested)
        st = nest(b, l, memory, absmax, &offset, err);
    if (st == QC_OK)
        st = qc_cuda_stream_synchronize(b->stream, err);
    qc_cuda_free(temporary);
    w->w[0].w.form.offset = offset;
    return st;
}

qc_status qc_bench_weights_make(qc_bench_gpu *b, qc_bench_weights *w, qc_bench_scheme scheme,
                                const qc_bench_dense *dense, qc_error *err)
{
    layout l = lay_out(scheme, dense->n, dense->k);
    *w = (qc_bench_weights){.scheme = scheme, .copies = 1};
    QC_TRY(qc_calloc(&w->memory, 1, sizeof *w->memory, err));
    QC_TRY(qc_calloc(&w->w, 1, sizeof *w->w, err));
    qc_weights q = {.form.ops = l.is_nf4    ? &qc_form_nf4
                                : l.is_rows ? &qc_form_int8_rows
                                            : &qc_form_int8_blocks,
                    .rows = dense->n,
                    .form.cols = dense->k,
                    .form.block_elems = l.is_rows ? 0 : QC_BENCH_BLOCK,
                    .nested_map = l.is_nested ? b->map : NULL,
                    .nested_block = l.is_nested ? QC_NESTED_BLOCK : 0};
    /* How many depends on the alignment of addresses, which all copies share. */
    point(&q, &l, (unsigned char *)256);
    l.total = l.prepared + qc_align_u64(qc_matmul_prepared_bytes(&q), ALIGNMENT);
    w->bytes_each = l.total;
    QC_TRY(qc_cuda_malloc(&w->memory[0], (size_t)l.total, err));
    point(&q, &l, w->memory[0]);
    w->w[0].w = q;
    QC_TRY(make_first(b, w, &l, dense, err));
    q.form.offset = w->w[0].w.form.offset;
    w->plain = q;
    return qc_matmul_prepare(b->handle, &q, (unsigned char *)w->memory[0] + l.prepared, &w->w[0],
                             b->stream, err);
}

qc_status qc_bench_weights_multiply(qc_bench_gpu *b, qc_bench_weights *w, uint32_t want,
                                    qc_error *err)
{
    layout l = lay_out(w->scheme, w->w[0].w.rows, w->w[0].w.form.cols);
    QC_TRY(qc_realloc_array(&w->memory, want, sizeof *w->memory, err));
    QC_TRY(qc_realloc_array(&w->w, want, sizeof *w->w, err));
    while (w->copies < want) {
        void *next;
        qc_error full = {0};
        if (qc_cuda_malloc(&next, (size_t)w->bytes_each, &full) != QC_OK) {
            if (full.code == QC_ERR_NOMEM)
                break;
            if (err)
                *err = full;
            return full.code;
        }
        w->memory[w->copies] = next;
        qc_matmul_weights *copy = &w->w[w->copies++];
        QC_TRY(qc_cuda_copy(next, w->memory[0], (size_t)l.prepared, b->stream, err));
        qc_weights q = w->plain;
        point(&q, &l, next);
        QC_TRY(qc_matmul_prepare(b->handle, &q, (unsigned char *)next + l.prepared, copy, b->stream,
                                 err));
    }
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    for (uint32_t i = 0; i < w->copies; i++)
        w->w[i].complete = QC_MATMUL_WEIGHTS_COMPLETE; /* nothing writes to them any more */
    return QC_OK;
}

void qc_bench_weights_free(qc_bench_weights *w)
{
    for (uint32_t i = 0; w->memory && i < w->copies; i++)
        qc_cuda_free(w->memory[i]);
    qc_free(w->memory);
    qc_free(w->w);
    *w = (qc_bench_weights){0};
}
