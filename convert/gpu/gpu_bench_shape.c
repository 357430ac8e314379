/* What qc_matmul_run makes of weights and a product: its shape and the kernel that it takes. */
#include "convert/gpu/gpu_bench_internal.h"

/* The largest power of two up to 16 that divides a number of bytes. */
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
