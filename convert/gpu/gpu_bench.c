/* qconv bench on a GPU: the roofs, the quantizing kernels and the matmuls, one after the other. */
#include "base/clock.h"
#include "convert/gpu/gpu_bench_internal.h"
#include "convert/gpu/gpu_table.h"

static qc_status run(const qc_bench_request *q, const qc_bench_sink *sink, qc_arena *arena,
                     qc_bench_result *out, qc_error *err)
{
    void *rows;
    *out = (qc_bench_result){0};
    QC_TRY(qc_arena_alloc(arena, &rows, (size_t)q->shape_count * q->m_count,
                          q->scheme_count * (q->tune ? sizeof *out->tuned : sizeof *out->rows),
                          err));
    if (q->tune)
        out->tuned = rows;
    else
        out->rows = rows;
    if (q->packed)
        QC_TRY(qc_arena_alloc(arena, &out->packings, (size_t)q->shape_count * q->scheme_count,
                              sizeof *out->packings, err));
    qc_bench_gpu b = {.q = q, .sink = sink, .r = out, .arena = arena, .started_ns = qc_clock_ns()};
    qc_status st = qc_bench_gpu_open(&b, err);
    if (st == QC_OK && !q->tune) {
        sink->say(sink->ctx, "copies, cuBLAS, launches");
        st = qc_bench_roofs(&b, err);
    }
    if (st == QC_OK && !q->tune) {
        sink->say(sink->ctx, "quantizing and dequantizing");
        st = qc_bench_kernels(&b, err);
    }
    if (st == QC_OK)
        st = qc_bench_matmuls(&b, err);
    if (b.stream) {
        qc_error late = {0};
        /* Work that still runs uses memory that is about to be freed. */
        qc_status ended = qc_cuda_stream_synchronize(b.stream, &late);
        if (st == QC_OK && ended != QC_OK) {
            st = late.code;
            if (err)
                *err = late;
        }
    }
    out->seconds = (double)(qc_clock_ns() - b.started_ns) / 1e9;
    out->complete = st == QC_OK;
    if (out->device.no_gemm) {
        /* The sentence belongs to the handle, which is about to be destroyed. */
        const char *kept;
        if (st == QC_OK)
            st = qc_arena_printf(arena, &kept, err, "%s", out->device.no_gemm);
        out->device.no_gemm = st == QC_OK ? kept : NULL;
    }
    qc_bench_gpu_close(&b);
    return st;
}

const qc_gpu_bench qc_gpu_bench_table = {.run = run};
