#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "convert/gpu_bench_parts.h"
#include "convert/gpu_work.h"

#include <stdio.h>
#include <string.h>

static void put_device(qc_bench_gpu *b)
{
    qc_bench_device *d = &b->r->device;
    (void)snprintf(d->name, sizeof d->name, "%s", b->device.name);
    (void)snprintf(d->pci, sizeof d->pci, "%s", b->device.pci);
    d->sm = b->device.sm;
    d->multiprocessors = b->device.multiprocessors;
    d->memory_bytes = b->device.memory_bytes;
    d->l2_bytes = b->device.l2_bytes;
    d->driver_version = b->device.driver_version;
    d->runtime_version = b->device.runtime_version;
    d->build = qc_gpu_build();
    d->no_gemm = qc_matmul_no_gemm(b->handle);
    if (!d->no_gemm && b->q->bf16 && b->device.sm < 80)
        d->no_gemm = "cuBLAS multiplies bfloat16 from compute capability 8.0 on";
}

/* cuBLAS is to find in a graph what it has outside of one: without a workspace it would allocate
 * and release there, around every product that is timed. */
static qc_status make_gemm_workspace(qc_bench_gpu *b, qc_error *err)
{
    uint64_t free_bytes = 0, total = 0;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    if (qc_matmul_no_gemm(b->handle) || free_bytes / 16 < QC_MATMUL_DENSE_WORKSPACE)
        return QC_OK;
    return qc_cuda_malloc(&b->gemm_workspace, (size_t)QC_MATMUL_DENSE_WORKSPACE, err);
}

qc_status qc_bench_gpu_open(qc_bench_gpu *b, qc_error *err)
{
    qc_isa isa;
    void *p;
    QC_TRY(qc_isa_select(&isa, err));
    b->ops = qc_quant_ops_for(isa);
    QC_TRY(qc_cuda_device_open(&b->device, b->q->device, err));
    QC_TRY(qc_cuda_use(&b->device, err));
    QC_TRY(qc_matmul_create(&b->handle, b->q->device, err));
    QC_TRY(qc_matmul_set_tuning(b->handle, b->q->tuning.rows, b->q->tuning.count, err));
    QC_TRY(qc_cuda_stream_create(&b->stream, err));
    QC_TRY(qc_cuda_event_create(&b->begin, 1, err));
    QC_TRY(qc_cuda_event_create(&b->end, 1, err));
    QC_TRY(qc_cuda_host_malloc(&b->pinned, QC_BENCH_PINNED, err));
    QC_TRY(qc_cuda_malloc(&p, sizeof(uint64_t), err));
    b->bad = p;
    QC_TRY(qc_cuda_malloc(&p, sizeof qc_dynamic_map, err));
    b->map = p;
    memcpy(b->pinned, qc_dynamic_map, sizeof qc_dynamic_map);
    QC_TRY(qc_cuda_to_device(b->map, b->pinned, sizeof qc_dynamic_map, b->stream, err));
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    put_device(b);
    return make_gemm_workspace(b, err);
}

void qc_bench_gpu_close(qc_bench_gpu *b)
{
    qc_cuda_free(b->gemm_workspace);
    qc_cuda_free(b->map);
    qc_cuda_free(b->bad);
    qc_cuda_host_free(b->pinned);
    if (b->end)
        qc_cuda_event_destroy(b->end);
    if (b->begin)
        qc_cuda_event_destroy(b->begin);
    if (b->stream)
        qc_cuda_stream_destroy(b->stream);
    qc_matmul_destroy(b->handle);
}

static unsigned alignment_of(uint64_t bytes)
{
    unsigned a = 16;
    while (bytes % a)
        a /= 2;
    return a;
}

qc_matmul_shape qc_bench_shape_of(const qc_bench_gpu *b, const qc_matmul_weights *w, int repacked,
                                  const qc_matmul_io *io)
{
    qc_matmul_shape s = {.kind = w->w.kind,
                         .m = io->m,
                         .n = w->w.rows,
                         .k = w->w.cols,
                         .block_elems = w->w.block_elems,
                         .x_dtype = io->x_dtype,
                         .y_dtype = io->y_dtype,
                         .ldx = w->w.cols,
                         .x_alignment = alignment_of(2 * w->w.cols),
                         .codes_alignment = w->alignment,
                         .repacked = repacked,
                         .have_gemm = !qc_matmul_no_gemm(b->handle)};
    s.tuned = qc_matmul_tuning(b->handle, &s.tuned_count);
    return s;
}

qc_status qc_bench_path_of(const qc_bench_gpu *b, const qc_matmul_weights *w, int repacked,
                           const qc_matmul_io *io, qc_matmul_path path, uint64_t workspace_bytes,
                           const char **name, qc_error *err)
{
    qc_matmul_plan plan;
    const qc_matmul_shape shape = qc_bench_shape_of(b, w, repacked, io);
    QC_TRY(qc_matmul_plan_make(&b->device, &shape, path, workspace_bytes, &plan, err));
    *name = qc_matmul_path_name(plan.path);
    return QC_OK;
}

qc_status qc_gpu_bench(const qc_bench_request *q, const qc_bench_sink *sink, qc_arena *arena,
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
    qc_bench_gpu b = {.q = q, .sink = sink, .r = out, .started_ns = qc_clock_ns()};
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
        /* What still runs uses memory that is about to be freed. */
        qc_status ended = qc_cuda_stream_synchronize(b.stream, &late);
        if (st == QC_OK && ended != QC_OK) {
            st = ended;
            if (err)
                *err = late;
        }
    }
    out->seconds = (double)(qc_clock_ns() - b.started_ns) / 1e9;
    if (out->device.no_gemm) {
        /* The sentence is the handle's. */
        const char *kept;
        if (st == QC_OK)
            st = qc_arena_printf(arena, &kept, err, "%s", out->device.no_gemm);
        out->device.no_gemm = st == QC_OK ? kept : NULL;
    }
    qc_bench_gpu_close(&b);
    return st;
}
