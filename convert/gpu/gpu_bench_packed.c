/* Packed weights. Each copy is packed from one in the file's layout, with which it shares those
 * scales that are not packed. */
#include "base/alloc.h"
#include "convert/gpu/gpu_bench_internal.h"

static qc_status pack_next(qc_bench_gpu *b, qc_bench_weights *packed, const qc_bench_weights *of,
                           qc_error *err)
{
    const uint32_t i = packed->copies;
    QC_TRY(qc_cuda_malloc(&packed->memory[i], (size_t)packed->bytes_each, err));
    packed->copies++;
    return qc_matmul_pack(b->handle, &of->w[i], packed->memory[i], &packed->w[i], b->stream, err);
}

qc_status qc_bench_packed_make(qc_bench_gpu *b, qc_bench_weights *packed,
                               const qc_bench_weights *of, qc_error *err)
{
    *packed = (qc_bench_weights){.scheme = of->scheme,
                                 .bytes_each = qc_matmul_packed_bytes(b->handle, &of->plain),
                                 .plain = of->plain};
    QC_TRY(qc_calloc(&packed->memory, 1, sizeof *packed->memory, err));
    QC_TRY(qc_calloc(&packed->w, 1, sizeof *packed->w, err));
    return pack_next(b, packed, of, err);
}

qc_status qc_bench_packed_multiply(qc_bench_gpu *b, qc_bench_weights *packed,
                                   const qc_bench_weights *of, uint32_t want, qc_error *err)
{
    want = want < of->copies ? want : of->copies;
    QC_TRY(qc_realloc_array(&packed->memory, want, sizeof *packed->memory, err));
    QC_TRY(qc_realloc_array(&packed->w, want, sizeof *packed->w, err));
    while (packed->copies < want) {
        qc_error full = {0};
        if (pack_next(b, packed, of, &full) == QC_OK)
            continue;
        if (full.code == QC_ERR_NOMEM)
            break;
        if (err)
            *err = full;
        return full.code;
    }
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    for (uint32_t i = 0; i < packed->copies; i++)
        packed->w[i].complete = QC_MATMUL_WEIGHTS_COMPLETE;
    return QC_OK;
}

typedef struct {
    const qc_bench_gpu *b;
    const qc_bench_weights *packed, *of;
} packing;

static qc_status launch_pack(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const packing *p = ctx;
    qc_matmul_weights same;
    return qc_matmul_pack(p->b->handle, &p->of->w[copy], p->packed->memory[copy], &same, s, err);
}

qc_status qc_bench_packed_time(qc_bench_gpu *b, const qc_bench_weights *packed,
                               const qc_bench_weights *of, qc_bench_packing *out, qc_error *err)
{
    packing p = {b, packed, of};
    const qc_form *form = &of->plain.form;
    const uint64_t elems = of->plain.rows * form->cols;
    *out = (qc_bench_packing){.scheme = of->scheme,
                              .file_bytes = qc_form_code_bytes(form, elems),
                              .packed_bytes = packed->bytes_each};
    if (packed->w[0].w.absmax_codes != of->w[0].w.absmax_codes)
        out->file_bytes += qc_form_scales(form, elems);
    return qc_bench_alone(
        b,
        (qc_bench_contender){
            .launch = launch_pack, .ctx = &p, .copies = packed->copies, .least = 20},
        &out->us, err);
}
