/* The device of the engine of calibrating: what it holds, opening it, and giving it back. */
#include "convert/gpu/gpu_calibrate_internal.h"

#include "base/checked.h"

typedef qc_gpu_calibrator gpu;
typedef qc_gpu_calibrator_side side;

/* ---- memory ---- */

qc_status qc_gpu_calibrator_named(qc_status st, const char *what, qc_error *err)
{
    if (st == QC_ERR_NOMEM)
        QC_FAIL(err, QC_ERR_NOMEM, "the GPU's memory has no room for %s", what);
    return st;
}

qc_status qc_gpu_calibrator_grow(gpu *g, qc_gpu_memory *m, uint64_t bytes, const char *what,
                                 qc_error *err)
{
    return qc_gpu_calibrator_named(qc_gpu_grow(&g->f, m, bytes, err), what, err);
}

void qc_gpu_calibrator_drop_moments(gpu *g)
{
    qc_cuda_free(g->h);
    qc_cuda_free(g->c);
    qc_gpu_drop(&g->scratch);
    qc_gpu_drop(&g->inputs);
    g->h = g->c = NULL;
    g->n = 0;
}

void qc_gpu_calibrator_drop_factor(gpu *g)
{
    qc_cuda_feedback_close(g->factor);
    g->factor = NULL;
}

void qc_gpu_calibrator_drop_side(side *s)
{
    for (unsigned i = 0; i < QC_LAYER_MATRICES; i++)
        qc_gpu_drop(&s->matrices[i]);
    qc_gpu_drop(&s->vectors);
    s->run = (qc_gpu_layer_run){0};
}

qc_status qc_gpu_calibrator_settled(gpu *g, qc_status st, qc_error *err)
{
    if (st != QC_OK)
        qc_gpu_forward_settle(&g->f);
    if (st == QC_ERR_NOMEM)
        qc_error_prefix(err, "calibrating on the GPU (--device cpu calibrates without one)");
    return st;
}

/* ---- opening ---- */

void qc_gpu_calibrator_close_device(gpu *g)
{
    qc_gpu_forward_settle(&g->f);
    qc_gpu_calibrator_drop_factor(g);
    qc_gpu_calibrator_drop_moments(g);
    qc_gpu_calibrator_drop_side(&g->z);
    qc_gpu_calibrator_drop_side(&g->x);
    qc_cusolver_close(g->tools.solver);
    qc_cublas_close(g->tools.blas);
    qc_gpu_forward_deinit(&g->f);
    g->f = (qc_gpu_forward){0};
    g->tools = (qc_cuda_feedback_tools){0};
    g->text = g->has_layer = 0;
}

/* shape NULL: there is no text. */
static qc_status open_device(gpu *g, const qc_cuda_device *device, const qc_forward_shape *shape,
                             uint64_t longest, qc_error *err)
{
    QC_TRY(qc_cuda_use(device, err));
    QC_TRY(qc_cublas_open(&g->tools.blas, device->runtime_version, err));
    QC_TRY(qc_cusolver_open(&g->tools.solver, device->runtime_version, err));
    if (shape) {
        QC_TRY(qc_gpu_calibrator_named(qc_gpu_forward_init(&g->f, device, shape, longest, err),
                                       OF_TEXT, err));
        if (g->f.act.tokens < qc_max_u64(longest, QC_GPU_TOKENS))
            return qc_gpu_calibrator_named(QC_ERR_NOMEM, OF_TEXT, err);
    } else {
        g->f.device = *device;
        QC_TRY(qc_cuda_stream_create(&g->f.stream, err));
    }
    g->text = shape != NULL;
    g->tools.stream = g->f.stream;
    return QC_OK;
}

qc_status qc_gpu_calibrator_reopen(gpu *g, const qc_forward_shape *shape, uint64_t longest,
                                   qc_error *err)
{
    const qc_devices *d = g->base.k->devices;
    qc_gpu_calibrator_close_device(g);
    return qc_gpu_calibrator_settled(g, open_device(g, &d->gpus[0], shape, longest, err), err);
}

qc_status qc_gpu_calibrator_device_name(const char **out, qc_arena *arena,
                                        const qc_cuda_device *device, qc_error *err)
{
    gpu g = {0};
    *out = NULL;
    qc_status st = open_device(&g, device, NULL, 0, err);
    if (st == QC_OK)
        st = qc_arena_printf(arena, out, err, "%s, %s, %s", device->name,
                             qc_cublas_name(g.tools.blas), qc_cusolver_name(g.tools.solver));
    qc_gpu_calibrator_close_device(&g);
    return st;
}
