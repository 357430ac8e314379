/* Weights that share x. They are slices of one weight that was quantized once: each has some of its
 * rows and writes columns of its own in y. */
#include "convert/gpu/gpu_bench_internal.h"

qc_status qc_bench_parts_of(qc_bench_parts *out, const qc_bench_work *w,
                            const qc_matmul_weights *of, qc_error *err)
{
    uint64_t first = 0;
    for (uint32_t i = 0; i < w->shape->part_count; i++) {
        const qc_weights_part part = {first, w->shape->parts[i], 0, of->part.cols};
        QC_TRY(qc_matmul_slice(of, &part, &out->weights[i], err));
        out->pointers[i] = &out->weights[i];
        out->io[i] = w->io;
        out->io[i].ldy = w->shape->n;
        out->io[i].y = w->io.y ? (uint16_t *)w->io.y + first : NULL;
        first += w->shape->parts[i];
    }
    return QC_OK;
}

qc_status qc_bench_run_parts(const qc_bench_work *w, const qc_matmul_weights *of, qc_cuda_stream s,
                             qc_error *err)
{
    qc_bench_parts p;
    QC_TRY(qc_bench_parts_of(&p, w, of, err));
    return qc_matmul_run_group(w->b->handle, p.pointers, p.io, w->shape->part_count, w->path,
                               w->workspace, w->workspace_bytes, s, err);
}

qc_status qc_bench_dense_parts(const qc_bench_work *w, const void *dense, qc_cuda_stream s,
                               qc_error *err)
{
    uint64_t first = 0;
    for (uint32_t i = 0; i < w->shape->part_count; i++) {
        qc_matmul_io io = w->io;
        io.ldy = w->shape->n;
        io.y = (uint16_t *)w->io.y + first;
        QC_TRY(qc_matmul_dense(w->b->handle, (const uint16_t *)dense + first * w->shape->k,
                               w->shape->parts[i], w->shape->k, &io, w->b->gemm_workspace,
                               QC_MATMUL_DENSE_WORKSPACE, s, err));
        first += w->shape->parts[i];
    }
    return QC_OK;
}

qc_status qc_bench_parts_path(const qc_bench_work *w, const qc_bench_weights *weights,
                              const char **name, qc_error *err)
{
    qc_matmul_plan plan;
    qc_matmul_shape shape = qc_bench_shape_of(w->b, &weights->w[0], &w->io);
    shape.parts = w->shape->part_count;
    for (uint32_t i = 0; i < shape.parts; i++)
        shape.part_n[i] = w->shape->parts[i];
    QC_TRY(qc_matmul_plan_make(&w->b->device, &shape, w->path, w->workspace_bytes, &plan, err));
    *name = qc_matmul_path_name(plan.path);
    return QC_OK;
}

uint64_t qc_bench_parts_workspace(const qc_bench_work *w, const qc_matmul_weights *of, uint64_t m,
                                  uint64_t limit_bytes, qc_error *err)
{
    qc_bench_parts p;
    if (qc_bench_parts_of(&p, w, of, err) != QC_OK)
        return UINT64_MAX;
    return qc_matmul_group_workspace_bytes(w->b->handle, p.pointers, w->shape->part_count, m,
                                           w->path, limit_bytes);
}
