/* A ring of slots on one GPU; the interface is device_quantizer.h.
 *
 *   pinned source --copy--> device source --kernel--> device results --copy--> pinned results
 *
 * Each slot has a stream, so that the copies of one, the kernel of another and the copies back of a
 * third run at the same time. Nothing is ordered between slots. The results of a slot lie together
 * (errors, scales, bad, codes), so that one copy brings them back. There are two allocations for
 * all slots, one pinned and one on the device, and both are made once. The tables of the search are
 * a third, which is made when the first search is started. */
#include "convert/gpu/gpu_table.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/cuda_quantize.h"

#include <string.h>

#define CODES_ALIGN  256u
#define GROUP_BLOCKS 256u /* QC_NESTED_BLOCK */

typedef struct {
    unsigned char *source, *results;               /* pinned */
    unsigned char *device_source, *device_results; /* as large, on the device */
    qc_cuda_stream stream;
    qc_cuda_event done;
    qc_gpu_form form; /* how the elements that were started are quantized */
    uint64_t n;
} ring_slot;

struct qc_gpu_ring {
    qc_cuda_device device;
    size_t slot_bytes; /* bytes of the sources of a slot, and of its results */
    unsigned char *pinned, *memory;
    qc_cuda_search_tables tables, *device_tables; /* NULL: nothing has been searched yet */
    ring_slot slots[QC_GPU_SLOTS];
};

/* Where the arrays of the results of n elements begin. */
typedef struct {
    uint64_t absmax, nested_absmax, bad, absmax_codes, codes, end;
} result_layout;

static qc_cuda_sums sums_of(const qc_gpu_form *form)
{
    const qc_cuda_quantize_job a = {.form = form->form, .searched = form->searched};
    return qc_cuda_quantize_sums(&a);
}

/* n is at most the bytes of a slot, so nothing overflows. */
static result_layout lay_out(const qc_gpu_form *form, uint64_t n)
{
    result_layout l;
    const qc_cuda_sums kind = sums_of(form);
    const uint64_t scales = qc_form_scales(&form->form, n);
    const int nested = kind == QC_CUDA_SUMS_FOUND && form->form.nested;
    l.absmax = scales * (kind == QC_CUDA_SUMS_FOUND ? sizeof(qc_search_sum) : 4 * sizeof(float));
    if (kind == QC_CUDA_SUMS_ROWS)
        l.absmax *= qc_ceil_div_u64(form->form.cols, QC_CUDA_ROW_RUN);
    l.nested_absmax = l.absmax + scales * sizeof(float);
    uint64_t groups = nested ? qc_ceil_div_u64(scales, GROUP_BLOCKS) : 0;
    l.bad = qc_align_u64(l.nested_absmax + groups * sizeof(float), sizeof(uint64_t));
    l.absmax_codes = l.bad + sizeof(uint64_t);
    l.codes = qc_align_u64(l.absmax_codes + (nested ? scales : 0), CODES_ALIGN);
    l.end = l.codes + qc_form_code_bytes(&form->form, n);
    return l;
}

/* Allocates the memory of all slots, or nothing. */
static qc_status take_memory(qc_gpu_ring *r, size_t slot_bytes, qc_error *err)
{
    void *memory = NULL, *pinned = NULL;
    size_t each = 2 * slot_bytes;
    QC_TRY(qc_cuda_malloc(&memory, QC_GPU_SLOTS * each, err));
    qc_status st = qc_cuda_host_malloc(&pinned, QC_GPU_SLOTS * each, err);
    if (st != QC_OK) {
        qc_cuda_free(memory);
        return st;
    }
    r->memory = memory;
    r->pinned = pinned;
    r->slot_bytes = slot_bytes;
    for (unsigned i = 0; i < QC_GPU_SLOTS; i++) {
        ring_slot *s = &r->slots[i];
        s->source = r->pinned + i * each;
        s->results = s->source + slot_bytes;
        s->device_source = r->memory + i * each;
        s->device_results = s->device_source + slot_bytes;
    }
    return QC_OK;
}

static void ring_destroy(qc_gpu_ring *r)
{
    if (!r)
        return;
    for (unsigned i = 0; i < QC_GPU_SLOTS; i++) {
        /* Nothing may still write to the memory that is given back. A stream that fails has
         * stopped. */
        if (r->slots[i].stream && qc_cuda_stream_synchronize(r->slots[i].stream, NULL) != QC_OK)
            continue;
    }
    for (unsigned i = 0; i < QC_GPU_SLOTS; i++) {
        qc_cuda_event_destroy(r->slots[i].done);
        qc_cuda_stream_destroy(r->slots[i].stream);
    }
    qc_cuda_host_free(r->pinned);
    qc_cuda_free(r->memory);
    qc_cuda_free(r->device_tables);
    qc_free(r);
}

static qc_status ring_create(qc_gpu_ring **out, const qc_cuda_device *device, size_t slot_bytes,
                             size_t min_bytes, qc_error *err)
{
    qc_gpu_ring *r = NULL;
    qc_status st;
    *out = NULL;
    QC_TRY(qc_calloc(&r, 1, sizeof *r, err));
    r->device = *device;
    QC_TRY_GOTO(st, failed, qc_cuda_use(&r->device, err));
    for (unsigned i = 0; i < QC_GPU_SLOTS; i++) {
        QC_TRY_GOTO(st, failed, qc_cuda_stream_create(&r->slots[i].stream, err));
        QC_TRY_GOTO(st, failed, qc_cuda_event_create(&r->slots[i].done, 0, err));
    }
    st = take_memory(r, slot_bytes, err);
    while (st == QC_ERR_NOMEM && slot_bytes / 2 >= min_bytes) {
        slot_bytes /= 2;
        st = take_memory(r, slot_bytes, err);
    }
    if (st != QC_OK)
        goto failed;
    *out = r;
    return QC_OK;
failed:
    ring_destroy(r);
    return st;
}

static size_t ring_slot_bytes(const qc_gpu_ring *r)
{
    return r->slot_bytes;
}

static uint64_t ring_elems(const qc_gpu_ring *r, const qc_gpu_form *form, uint64_t step)
{
    uint64_t each = qc_dtype_bits(form->dtype) / 8;
    if (step == 0 || step > r->slot_bytes / each)
        return 0;
    uint64_t steps = r->slot_bytes / each / step;
    while (steps > 0 && lay_out(form, steps * step).end > r->slot_bytes)
        steps--; /* rows of a few columns have more bytes of results than of source */
    return steps * step;
}

static void *ring_source(qc_gpu_ring *r, unsigned slot)
{
    return r->slots[slot].source;
}

static qc_status launch(const qc_gpu_ring *r, const ring_slot *s, const result_layout *l,
                        qc_error *err)
{
    unsigned char *results = s->device_results;
    const qc_cuda_quantize_job a = {.src = s->device_source,
                                    .dtype = s->form.dtype,
                                    .n = s->n,
                                    .form = s->form.form,
                                    .searched = s->form.searched,
                                    .refit = s->form.refit,
                                    .tables = r->device_tables,
                                    .codes = results + l->codes,
                                    .absmax = (float *)(void *)(results + l->absmax),
                                    .absmax_codes = results + l->absmax_codes,
                                    .nested_absmax = (float *)(void *)(results + l->nested_absmax),
                                    .sums = results,
                                    .bad = (uint64_t *)(void *)(results + l->bad)};
    return qc_cuda_quantize(&a, s->stream, err);
}

static qc_status ring_start(qc_gpu_ring *r, unsigned slot, const qc_gpu_form *form, uint64_t n,
                            qc_error *err)
{
    ring_slot *s = &r->slots[slot];
    s->form = *form;
    s->n = n;
    result_layout l = lay_out(form, n);
    size_t source_bytes = (size_t)(n * (qc_dtype_bits(form->dtype) / 8));
    QC_TRY(qc_cuda_use(&r->device, err));
    if ((form->searched || form->form.ops->integer) && !r->device_tables) {
        /* Other slots use the tables too, so the copy is waited for. */
        QC_TRY(qc_cuda_malloc(&r->device_tables, sizeof r->tables, err));
        qc_cuda_search_tables_fill(&r->tables);
        QC_TRY(qc_cuda_to_device(r->device_tables, &r->tables, sizeof r->tables, s->stream, err));
        QC_TRY(qc_cuda_stream_synchronize(s->stream, err));
    }
    QC_TRY(qc_cuda_to_device(s->device_source, s->source, source_bytes, s->stream, err));
    QC_TRY(launch(r, s, &l, err));
    QC_TRY(qc_cuda_to_host(s->results, s->device_results, (size_t)l.end, s->stream, err));
    return qc_cuda_event_record(s->done, s->stream, err);
}

static qc_status ring_finish(qc_gpu_ring *r, unsigned slot, qc_gpu_result *out, qc_error *err)
{
    const ring_slot *s = &r->slots[slot];
    result_layout l = lay_out(&s->form, s->n);
    QC_TRY(qc_cuda_event_synchronize(s->done, err));
    const int found = sums_of(&s->form) == QC_CUDA_SUMS_FOUND;
    const int nested = found && s->form.form.nested;
    out->errors = found ? NULL : (const float *)(const void *)s->results;
    out->found = found ? (const qc_search_sum *)(const void *)s->results : NULL;
    out->absmax_codes = nested ? s->results + l.absmax_codes : NULL;
    out->nested_absmax =
        nested ? (const float *)(const void *)(s->results + l.nested_absmax) : NULL;
    out->absmax = (const float *)(const void *)(s->results + l.absmax);
    out->codes = s->results + l.codes;
    memcpy(&out->bad, s->results + l.bad, sizeof out->bad);
    return QC_OK;
}

const qc_gpu_quantizer qc_gpu_quantizer_table = {
    .ring_create = ring_create,
    .ring_destroy = ring_destroy,
    .ring_slot_bytes = ring_slot_bytes,
    .ring_elems = ring_elems,
    .ring_source = ring_source,
    .ring_start = ring_start,
    .ring_finish = ring_finish,
};
