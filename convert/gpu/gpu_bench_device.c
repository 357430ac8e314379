/* The device during one run of qconv bench: opening and closing it, what qc_matmul_run makes of
 * weights on it, saving what was measured, and going on after something could not be measured. */
#include "convert/gpu/gpu_bench_internal.h"

#include "base/checked.h"
#include "base/clock.h"

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
    d->build = qc_cuda_build();
    d->no_gemm = qc_matmul_no_gemm(b->handle);
    if (!d->no_gemm && b->q->bf16 && b->device.sm < 80)
        d->no_gemm = "cuBLAS multiplies bfloat16 from compute capability 8.0 on";
}

/* Gives cuBLAS a workspace, so that it finds the same in a graph as outside of one. Without it,
 * cuBLAS would allocate and release memory around every product that is timed. */
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
    QC_TRY(qc_cuda_malloc(&b->bad, sizeof(uint64_t), err));
    QC_TRY(qc_cuda_malloc(&b->map, sizeof qc_dynamic_map, err));
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

/* ---- shapes and paths ---- */

/* Returns the largest power of two up to 16 that divides a number of bytes. */
static unsigned alignment_of(uint64_t bytes)
{
    unsigned a = 16;
    while (bytes % a)
        a /= 2;
    return a;
}

qc_matmul_shape qc_bench_shape_of(const qc_bench_gpu *b, const qc_matmul_weights *w,
                                  const qc_matmul_io *io)
{
    qc_matmul_shape s = {.kind = w->w.form.ops->kind,
                         .m = io->m,
                         .n = w->part.rows,
                         .k = w->part.cols,
                         .block_elems = w->w.form.block_elems,
                         .x_dtype = io->x_dtype,
                         .y_dtype = io->y_dtype,
                         .ldx = w->part.cols,
                         .x_alignment = alignment_of(2 * w->w.form.cols),
                         .repacked = w->row_bytes != 0,
                         .packed = w->packed,
                         .have_gemm = !qc_matmul_no_gemm(b->handle)};
    s.tuned = qc_matmul_tuning(b->handle, &s.tuned_count);
    return s;
}

qc_status qc_bench_path_of(const qc_bench_gpu *b, const qc_matmul_weights *w,
                           const qc_matmul_io *io, qc_matmul_path path, uint64_t workspace_bytes,
                           const char **name, qc_error *err)
{
    qc_matmul_plan plan;
    const qc_matmul_shape shape = qc_bench_shape_of(b, w, io);
    QC_TRY(qc_matmul_plan_make(&b->device, &shape, path, workspace_bytes, &plan, err));
    *name = qc_matmul_path_name(plan.path);
    return QC_OK;
}

/* ---- what could not be measured ---- */

void qc_bench_save(qc_bench_gpu *b)
{
    b->r->seconds = (double)(qc_clock_ns() - b->started_ns) / 1e9;
    if (b->sink->save)
        b->sink->save(b->sink->ctx, b->r);
}

/* Sends a number to the device and back, which shows whether the device still answers. */
static qc_status try_device(qc_bench_gpu *b, qc_error *err)
{
    uint64_t *sent = b->pinned, *got = sent + 1;
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    *sent = qc_clock_ns();
    *got = ~*sent;
    QC_TRY(qc_cuda_to_device(b->bad, sent, sizeof *sent, b->stream, err));
    QC_TRY(qc_cuda_to_host(got, b->bad, sizeof *got, b->stream, err));
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    if (*got != *sent)
        QC_FAIL(err, QC_ERR_INTERNAL,
                "a number that was sent to the device came back as another one");
    return QC_OK;
}

static qc_status keep_failure(qc_bench_gpu *b, qc_bench_failure f, const qc_error *why,
                              qc_error *err)
{
    qc_bench_result *r = b->r;
    if ((r->failed_count & (r->failed_count - 1)) == 0) { /* a power of two: full */
        void *more;
        QC_TRY(qc_arena_alloc(b->arena, &more, r->failed_count ? 2 * (size_t)r->failed_count : 1,
                              sizeof f, err));
        if (r->failed_count)
            memcpy(more, r->failed, r->failed_count * sizeof f);
        r->failed = more;
    }
    QC_TRY(qc_arena_printf(b->arena, &f.what, err, "%s", why->msg));
    r->failed[r->failed_count++] = f;
    return QC_OK;
}

static void say_failure(const qc_bench_gpu *b, const qc_bench_failure *f)
{
    qc_strbuf line;
    qc_strbuf_init(&line, 4096);
    if (qc_bench_failure_line(b->q, f, &line, NULL) == QC_OK)
        b->sink->say(b->sink->ctx, line.data);
    qc_strbuf_deinit(&line);
}

qc_status qc_bench_failed(qc_bench_gpu *b, qc_bench_failure f, const qc_error *why, qc_error *err)
{
    qc_error dead = {0};
    if (why->code == QC_ERR_INTERRUPTED || !b->arena) {
        if (err)
            *err = *why;
        return why->code;
    }
    QC_TRY(keep_failure(b, f, why, err));
    qc_bench_save(b);
    say_failure(b, &b->r->failed[b->r->failed_count - 1]);
    if (try_device(b, &dead) != QC_OK)
        QC_FAIL(err, QC_ERR_INTERNAL,
                "%s does not answer any more after '%.200s' (%.120s), so the run ends here; the "
                "file of --output has what was measured before",
                b->device.name, why->msg, dead.msg);
    return QC_OK;
}
